"""`harness-ext prompts words`: label words that a model itself suggests, with their zero-shot accuracy.

Source: Gao, Fisch, Chen (LM-BFF, ACL 2021); see `harness_ext.engine.label_words`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from harness_ext.contracts import PromptRequest, PromptStates
    from harness_ext.engine.label_words import WordSearch
    from harness_ext.prompts import Prompt
    from harness_ext.scaffold import DatasetConfig

__all__ = ["add_actions", "words"]

NUM_SHOWN = 10
"""Words shown of each class's candidates."""

NUM_BEST = 5
"""Assignments shown of each search."""


def add_actions(actions: Any) -> None:
    """Add the action `words`."""
    parser = actions.add_parser(
        "words",
        help="suggest label words by a model's own next-word distribution",
        description="Suggest label words for a dataset by a model's own next-word distribution, as LM-BFF does: the words "
        "that it finds most likely after training documents of a class are the candidates, and the assignments of one to "
        "each class with the highest zero-shot accuracy on these documents are kept. Accuracies of the words so chosen are "
        "too good on the documents that chose them; the held-out ones are not.",
    )
    parser.add_argument("dataset", metavar="DATASET", help="a name such as sst, or a folder with _dataset.yaml")
    parser.add_argument("--model", required=True, metavar="M", help="a causal model: a Hub id or a folder")
    parser.add_argument("--prompt", metavar="ID", help="whose words are sought (default: the dataset's own)")
    parser.add_argument(
        "--top", type=int, default=100, metavar="K", help="candidates of each class (default: %(default)s)"
    )
    parser.add_argument(
        "--num-documents",
        type=int,
        default=500,
        metavar="N",
        help="documents that choose the words, drawn at random (default: %(default)s)",
    )
    parser.add_argument(
        "--held-out", type=int, metavar="N", help="further documents that check them (default: as many, 0 for none)"
    )
    parser.add_argument("--split", metavar="S", help="split that they are drawn from (default: the training split)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", metavar="T", help="of the weights, such as bfloat16 (default: auto)")
    parser.add_argument(
        "--batch-size", default="auto", metavar="N", help="prompts in a batch, or auto (default: %(default)s)"
    )
    # On a machine without it lm_eval takes the CPU.
    parser.add_argument(
        "--device", default="cuda:0", metavar="D", help="as for lm_eval (default: %(default)s, or the CPU)"
    )
    parser.set_defaults(func=words)


class _Documents(NamedTuple):
    """Documents that were drawn, those that choose words first.

    Attributes:
        rows: The documents.
        labels: Their classes, shape (n,).
        num_search: How many of them choose.
        source: Where they come from.
    """

    rows: list[Mapping[str, Any]]
    labels: np.ndarray
    num_search: int
    source: str


class _Scored(NamedTuple):
    """Accuracies of one set of label words: raw and centred, on the documents that choose and on those held out."""

    acc: float
    acc_batch: float
    held_out_acc: float
    held_out_acc_batch: float


def words(args: argparse.Namespace) -> int:
    """Search label words and print them beside those of the prompt.

    Raises:
        KeyError: If there is no such dataset or prompt.
        ValueError: If an option is out of range, or the documents do not suffice.
        FileNotFoundError: If the dataset or the split is neither in the local mirror nor on the Hub.
    """
    from harness_ext.cli.prompts.dataset import data_folders, require_config
    from harness_ext.prompts import load_prompt

    for option in ("top", "num_documents"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {getattr(args, option)}: expected at least 1.")
    if re.fullmatch(r"auto(:\d+)?|[1-9]\d*", args.batch_size) is None:
        raise ValueError(f"--batch-size {args.batch_size}: expected auto or a number of at least 1.")
    if args.held_out is not None and args.held_out < 0:
        raise ValueError(f"--held-out {args.held_out}: expected 0 or more.")
    folders = data_folders(args.model)
    config = require_config(args.dataset, folders)
    if not config.classes:
        raise ValueError(
            f"{config.name}: its data name its classes, and they are not here. Name as --model a folder of "
            "`harness-ext lab run` that has them under data/, or set HARNESS_EXT_DATA to them."
        )
    name = args.prompt or config.prompt
    if name is None:
        raise ValueError(f"{config.name} has no default prompt. Give --prompt ID.")
    prompt = load_prompt(name, data_folders=folders)
    own_words = _own_words(prompt, config)
    documents = _draw(config, args)
    found = _search(args, config, prompt, own_words, documents)

    _print_heading(args, prompt, documents, found)
    _print_candidates(config, found)
    _print_searches(config, own_words, documents, found)
    best = found.searches["acc"].best[0].columns
    chosen = {name: [found.words[column]] for name, column in zip(config.classes, best, strict=True)}
    print(
        "\nTo use words of your choice, write them into a prompt of your own, here those of highest acc:\n"
        f"  {{%- set label_words = {json.dumps(chosen, ensure_ascii=False)} -%}}"
    )
    return 0


# ------------------------------------------------------------------------------------------------- documents


def _own_words(prompt: Prompt, config: DatasetConfig) -> tuple[tuple[str, ...], ...]:
    """The prompt's label words in the order of the classes; () for a prompt without any."""
    from harness_ext.prompts import words_by_class

    if not prompt.label_words:
        return ()
    return words_by_class(prompt, config.classes, label_column=config.label_column)


def _draw(config: DatasetConfig, args: argparse.Namespace) -> _Documents:
    """Draw documents without replacement, those that choose words and as many held out as there are."""
    import numpy as np

    from harness_ext.tasks.data import open_dataset

    if args.split is None and not config.splits:
        raise ValueError(f"{config.name} names no training split. Give --split.")
    split = config.splits[0] if args.split is None else args.split
    opened = open_dataset(config.dataset_path, config.config_name, pretrained=args.model)
    dataset = opened[split]
    for column in (config.text_column, config.label_column):
        if column not in dataset.column_names:
            raise ValueError(
                f"{config.dataset_path}, split {split!r}: no column {column!r}, found {', '.join(dataset.column_names)}."
            )
    held_out = args.num_documents if args.held_out is None else args.held_out
    rows: list[Mapping[str, Any]] = []
    for index in np.random.default_rng(args.seed).permutation(len(dataset)):
        row = dataset[int(index)]
        # An empty document is refused by the tasks, and would say nothing of its class here.
        if isinstance(row[config.text_column], str) and row[config.text_column].strip():
            rows.append(row)
        if len(rows) == args.num_documents + held_out:
            break
    num_search = args.num_documents
    if len(rows) < num_search:
        raise ValueError(
            f"{config.dataset_path}, split {split!r}, has {len(rows)} documents; --num-documents {num_search} asks for more."
        )
    labels = np.array([_label_of(row[config.label_column], config, split) for row in rows])
    return _Documents(rows, labels, num_search, f"{config.dataset_path}, {split} split ({opened.source})")


def _label_of(value: Any, config: DatasetConfig, split: str) -> int:
    """Class index of a label, as the tasks read it."""
    if isinstance(value, str) and value in config.classes:
        return config.classes.index(value)
    if isinstance(value, int) and 0 <= value < len(config.classes):
        return int(value)
    raise ValueError(
        f"{config.dataset_path}, split {split!r}: column {config.label_column!r} has {value!r}, expected 0 to "
        f"{len(config.classes) - 1} or one of {', '.join(map(repr, config.classes))}. Choose a labelled --split."
    )


# ------------------------------------------------------------------------------------------------- the model


class _Found(NamedTuple):
    """What the model says.

    Attributes:
        num_words: Tokens that are whole words.
        words: The candidates' words, a column of `scores` each.
        candidates: Columns of each class's candidates, the most likely first, shape (K, k).
        means: Mean log-probability of each candidate over each class's documents that choose, shape (K, W).
        scores: Log-probability of each candidate after each document, shape (n, W).
        own: Class scores by the prompt's own words, shape (n, K); None where it has none.
        searches: The best assignments by raw and by centred accuracy.
    """

    num_words: int
    words: list[str]
    candidates: np.ndarray
    means: np.ndarray
    scores: np.ndarray
    own: np.ndarray | None
    searches: dict[str, WordSearch]


def _search(
    args: argparse.Namespace,
    config: DatasetConfig,
    prompt: Prompt,
    own_words: Sequence[Sequence[str]],
    documents: _Documents,
) -> _Found:
    """Load the model, forward the documents' prompts and search."""
    import numpy as np
    import torch
    from lm_eval.models.huggingface import HFLM

    from harness_ext.cli.models import loading
    from harness_ext.contracts import Feature, PromptRequest
    from harness_ext.engine import label_words
    from harness_ext.engine.forward import LastStateModel
    from harness_ext.engine.tokens import PromptEncoder
    from harness_ext.evaluators.natural import class_log_scores

    if args.dtype != "auto" and not isinstance(getattr(torch, args.dtype, None), torch.dtype):
        raise ValueError(f"--dtype {args.dtype}: expected auto, float32, bfloat16 or float16.")
    with loading(args.model, "--model"):
        lm = HFLM(pretrained=args.model, device=args.device, dtype=args.dtype, batch_size=args.batch_size)
    rendered = [prompt.render(row) for row in documents.rows]
    continuations = tuple(f" {word}" for of_class in own_words for word in of_class)
    asked = [PromptRequest(continuations, (Feature(),), document) for _, document in rendered]
    answers = _answers(lm, [text for text, _ in rendered], asked)
    states = _states(answers)
    readout = LastStateModel(lm.model, device=lm.device, autocast_dtype=lm.mixed_precision_dtype).readout
    encoder = PromptEncoder(
        lm.tokenizer,
        max_length=lm.max_length,
        add_special_tokens=lm.add_bos_token,
        prefix_token_id=lm.prefix_token_id,
    )

    search = slice(documents.num_search)
    gold = documents.labels[search]
    means = readout.class_means(states[search], gold, len(config.classes))
    vocabulary = label_words.whole_words(
        lm.tokenizer,
        encoder.encode,
        context=prompt.render_without_document(documents.rows[0]).strip() or "a",
        num_tokens=means.shape[1],
    )
    # A token that is ruled out after some document has no centred score.
    possible = [token for token in vocabulary if np.isfinite(means[:, token]).all()]
    if len(possible) < len(config.classes):
        raise ValueError(
            f"{args.model}: {len(possible)} tokens of its vocabulary are whole words after {prompt.id}, too few for "
            f"{len(config.classes)} classes. Its label words must be several tokens each: choose them by hand."
        )
    candidates = label_words.top_tokens(means, possible, args.top)
    tokens = np.unique(candidates)
    columns = np.searchsorted(tokens, candidates)
    log_probs, _ = readout.read(states, [tokens.tolist()] * len(states))
    scores = torch.stack(log_probs).double().numpy()
    centred = scores[search] - scores[search].mean(axis=0)
    owners = np.repeat(np.arange(len(own_words)), [len(of_class) for of_class in own_words])
    return _Found(
        num_words=len(possible),
        words=[vocabulary[int(token)] for token in tokens],
        candidates=columns,
        means=means[:, tokens],
        scores=scores,
        own=class_log_scores([answer.log_probs for answer in answers], owners, len(own_words)) if own_words else None,
        searches={
            "acc": label_words.search_words(scores[search], gold, columns, num_best=NUM_BEST),
            "acc_batch": label_words.search_words(centred, gold, columns, num_best=NUM_BEST),
        },
    )


def _answers(lm: Any, contexts: Sequence[str], asked: Sequence[PromptRequest]) -> list[PromptStates]:
    """Ask the engine as a task does, so that states come from the store where a run has left them."""
    from lm_eval.api.instance import Instance

    from harness_ext.engine.attach import REQUEST_TYPE, gives_states, prompt_states

    if not gives_states(lm):
        raise ValueError(f"{type(lm.model).__name__} gives no f(s); expected a causal language model.")
    instances = [
        Instance(REQUEST_TYPE, doc={}, arguments=(context, what.to_argument()), idx=0)  # type: ignore[arg-type]
        for context, what in zip(contexts, asked, strict=True)
    ]
    return prompt_states(lm, instances)


def _states(answers: Sequence[PromptStates]) -> Any:
    """f(s) of shape (n, d), a float32 tensor."""
    import torch

    from harness_ext.contracts import Feature

    source = answers[0].source
    assert source is not None
    return torch.tensor(source.take([answer.row for answer in answers], Feature()))  # a copy: it may be read-only


# ------------------------------------------------------------------------------------------------- scores and output


def _score(scores: np.ndarray, documents: _Documents) -> _Scored:
    """Accuracies of class scores (n, K); each part is centred by itself. NaN where nothing is held out."""
    from harness_ext.evaluators.natural import centred_scores
    from harness_ext.evaluators.scores import tie_aware_accuracy

    found = []
    for rows in (slice(documents.num_search), slice(documents.num_search, None)):
        part, gold = scores[rows], documents.labels[rows]
        for values in (part, centred_scores(part)) if len(part) else ():
            found.append(float(tie_aware_accuracy(values, gold).values.mean()))
    return _Scored(*found, *[float("nan")] * (4 - len(found)))


def _print_heading(args: argparse.Namespace, prompt: Prompt, documents: _Documents, found: _Found) -> None:
    import numpy as np

    num_held_out = len(documents.rows) - documents.num_search
    counts = np.bincount(documents.labels[documents.num_search :] if num_held_out else documents.labels)
    of = "the held-out ones" if num_held_out else "these"
    print(f"prompt      {prompt.id}  ({args.model}, {args.dtype})")
    print(f"documents   {documents.source}, seed {args.seed}")
    print(f"            {documents.num_search} choose the words, {num_held_out} are held out to check them")
    print(f"            always the most frequent class would be right for {counts.max() / counts.sum():.3f} of {of}")
    print(f"candidates  {found.candidates.shape[1]} of each class, of {found.num_words:,} tokens that are whole words")


def _print_candidates(config: DatasetConfig, found: _Found) -> None:
    import numpy as np

    width = max(map(len, config.classes))
    print("\nmost likely after documents of the class")
    for name, columns in zip(config.classes, found.candidates, strict=True):
        print(f"  {name:<{width}}  {', '.join(found.words[column] for column in columns[:NUM_SHOWN])}")
    print("\nof the candidates, most in favour of the class (its mean log-probability less the mean over classes)")
    in_favour = found.means - found.means.mean(axis=0)
    for name, columns, favour in zip(config.classes, found.candidates, in_favour, strict=True):
        best = columns[np.argsort(-favour[columns], kind="stable")[:NUM_SHOWN]]
        print(f"  {name:<{width}}  {', '.join(f'{found.words[column]} {favour[column]:+.2f}' for column in best)}")


def _print_searches(
    config: DatasetConfig, own_words: Sequence[Sequence[str]], documents: _Documents, found: _Found
) -> None:
    """Print each search's best words, the prompt's own above them."""
    for by, search in found.searches.items():
        rows: list[tuple[str, _Scored]] = []
        if found.own is not None:
            own = " / ".join("+".join(of_class) for of_class in own_words)
            rows.append((f"{own}  (the prompt's)", _score(found.own, documents)))
        for columns, _ in search.best:
            chosen = " / ".join(found.words[column] for column in columns)
            rows.append((chosen, _score(found.scores[:, list(columns)], documents)))
        header = " / ".join(config.classes)
        width = max(len(header), *(len(text) for text, _ in rows))
        print(f"\nbest by {by} ({'all assignments tried' if search.exhaustive else 'searched class by class'})")
        print(f"  {header:<{width}}  {'acc':>6}  {'acc_batch':>9}  {'held-out acc':>12}  {'held-out acc_batch':>18}")
        for text, (acc, batch, held_out, held_out_batch) in rows:
            print(f"  {text:<{width}}  {acc:>6.3f}  {batch:>9.3f}  {held_out:>12.3f}  {held_out_batch:>18.3f}")
