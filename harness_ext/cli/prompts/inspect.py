"""`harness-ext prompts list|show|check`: the templates that there are, what a model reads, and what would ruin scores."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_ext.wording import count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from harness_ext.contracts import Span
    from harness_ext.engine.tokens import PromptEncoder
    from harness_ext.prompts import Prompt

__all__ = ["add_actions", "check", "list_prompts", "show"]


def add_actions(actions: Any) -> None:
    """Add the actions `list`, `show` and `check`."""
    listing = actions.add_parser("list", help="list prompts with their label words")
    listing.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="such as 'sst/*' (default: all)")
    listing.set_defaults(func=list_prompts)

    showing = actions.add_parser(
        "show",
        help="print one prompt, and what the model reads",
        description="Print one prompt, and what the model reads for documents of the local mirror (HARNESS_EXT_DATA) or of a "
        "lab model's own data, or for a made-up one; the document is in brackets. "
        "With --model, tokens are divided by | and blanks shown as ·.",
    )
    showing.add_argument("prompt", metavar="ID", help="such as sst/it_was, or a path that ends in .jinja")
    showing.add_argument("--model", metavar="M", help="mark the tokens of this model: a Hub id or a folder")
    showing.add_argument(
        "--num-documents", type=int, default=1, metavar="N", help="documents to show (default: %(default)s)"
    )
    showing.add_argument("--dataset", metavar="D", help="its dataset: a name, or a folder with _dataset.yaml")
    showing.set_defaults(func=show)

    checking = actions.add_parser(
        "check",
        help="look for what silently ruins scores; status 1 if there is any",
        description="Look for what silently ruins scores. With --model, show the tokens of every label word.",
    )
    checking.add_argument("prompts", nargs="+", metavar="FILE_OR_ID", help="paths, ids, or patterns such as 'sst/*'")
    checking.add_argument("--model", metavar="M", help="tokenise label words as this model does: a Hub id or a folder")
    checking.add_argument(
        "--dataset",
        metavar="D",
        help="check columns and classes against this dataset: a name, or a folder with _dataset.yaml "
        "(default: the one that the prompt's own folder is named after)",
    )
    checking.set_defaults(func=check)


# ------------------------------------------------------------------------------------------------- list


def list_prompts(args: argparse.Namespace) -> int:
    """Print one line for each prompt.

    Raises:
        KeyError: If none matches the pattern.
    """
    from harness_ext.prompts import find_prompts, load_prompt

    ids = find_prompts(args.pattern)
    width = max(map(len, ids))
    for prompt_id in ids:
        print(f"{prompt_id:<{width}}  {_words(load_prompt(prompt_id).label_words)}")
    return 0


# ------------------------------------------------------------------------------------------------- show


def show(args: argparse.Namespace) -> int:
    """Print a prompt's file, label words, and renderings.

    Raises:
        KeyError: If there is no such prompt or dataset.
        ValueError: If --num-documents is not positive.
    """
    from harness_ext.cli.prompts.dataset import data_folders, read_facts
    from harness_ext.prompts import example_document, load_prompt

    if args.num_documents < 1:
        raise ValueError(f"--num-documents {args.num_documents}: expected at least 1.")
    prompt = load_prompt(args.prompt, data_folders=data_folders(args.model))
    folders = data_folders(args.model, prompt.path)
    facts = read_facts(prompt, args.dataset, num_documents=args.num_documents, folders=folders)
    tokenizer = None if args.model is None else _load_tokenizer(args.model)
    encoder = None if tokenizer is None else _engine_encoder(args.model, tokenizer)
    print(f"id           {prompt.id}\nfile         {prompt.path}\ndigest       {prompt.digest}")
    print(f"columns      {', '.join(sorted(prompt.variables))}")
    print(f"label words  {_words(prompt.label_words) or 'none: for probes only'}")
    print(f"\n{prompt.source}\n")
    docs = facts.examples or (example_document(prompt),)
    shown: list[tuple[str, ...]] = []
    for number, doc in enumerate(docs, start=1):
        text, span = prompt.render(doc)
        which = "a document" if args.num_documents == 1 else f"document {number}"
        print(f"--- what the model reads: {f'{which} of {facts.source}' if facts.examples else 'a made-up document'}")
        print(text if span is None else _bracketed(text, span.start, len(text) - span.end))
        if encoder is not None and tokenizer is not None:
            rows = _show_tokens(prompt, text, span, encoder, tokenizer)
            if rows and rows != shown:  # they may depend on how the prompt ends, and seldom do
                _print_table(("class", "word", "token ids", "tokens"), rows)
            shown = rows
    print("--- without the document, for acc_pmi")
    print(prompt.render_without_document(docs[0]))
    return 0


def _bracketed(text: str, head: int, tail: int) -> str:
    """Put the document in brackets: all but the first `head` and the last `tail` characters."""
    end = len(text) - tail
    return f"{text[:head]}[{text[head:end]}]{text[end:]}"


def _engine_encoder(model: str, tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
    """Encode as the engine does for `--model hf --model_args pretrained=M`, without the weights."""
    from lm_eval.models.utils import resolve_max_length
    from transformers import AutoConfig

    from harness_ext.engine.tokens import PromptEncoder

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):  # a folder with a tokenizer alone, which has a length of its own
        config = None
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return PromptEncoder(
        tokenizer,
        max_length=resolve_max_length(config, tokenizer),
        add_special_tokens=None,
        prefix_token_id=prefix,
    )


def _show_tokens(
    prompt: Prompt, text: str, span: Span | None, encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, ...]]:
    """Print the tokens of a prompt; return class, word, token ids and tokens of each label word after it."""
    from harness_ext.contracts import PromptRequest
    from harness_ext.engine.label_words import token_texts

    words = [(label, word) for label, of_class in prompt.label_words.items() for word in of_class]
    request = PromptRequest(tuple(f" {word}" for _, word in words), document=span)
    [encoded] = encoder.encode_requests([text], [request])
    pieces = token_texts(tokenizer, encoded.context)
    special = set(tokenizer.all_special_ids)
    visible = [
        piece if token in special else piece.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
        for token, piece in zip(encoded.context, pieces, strict=True)
    ]
    # The prompt may begin with BOS, and may have lost the beginning of its document, never the template around it.
    leading = 0
    while leading < len(pieces) and encoded.context[leading] in special:
        leading += 1
    joined = "".join(pieces[leading:])
    whole = span is not None and joined.startswith(text[: span.start]) and joined.endswith(text[span.end :])
    cut = f", {encoded.cut_tokens} more of the document cut off" if encoded.cut_tokens else ""
    print(f"--- its {count(len(pieces), 'token')}{cut}")
    if span is not None and whole and len(joined) >= span.start + len(text) - span.end:
        before, after = len("".join(pieces[:leading])) + span.start, len(text) - span.end
        visible = _bracket_pieces(visible, before, sum(map(len, visible)) - after)
    print("|".join(visible))
    return [
        (label, word, " ".join(map(str, ids)), "|".join(token_texts(tokenizer, ids)).replace(" ", "·"))
        for (label, word), ids in zip(words, encoded.continuations, strict=True)
    ]


def _bracket_pieces(pieces: Sequence[str], start: int, end: int) -> list[str]:
    """Put brackets at two characters of the joined pieces, inside of a piece where they fall there.

    Where they fall between two pieces, each goes to the document's side.
    """
    result, position = [], 0
    opened = closed = False
    for piece in pieces:
        marked, here = piece, position
        position += len(piece)
        if not closed and here < end <= position:
            marked, closed = f"{marked[: end - here]}]{marked[end - here :]}", True
        if not opened and here <= start < position:
            marked, opened = f"{marked[: start - here]}[{marked[start - here :]}", True
        result.append(marked)
    return result


# ------------------------------------------------------------------------------------------------- check


def check(args: argparse.Namespace) -> int:
    """Check prompts, print the findings and return 1 if one of them is an error.

    Raises:
        KeyError: If there is no such prompt or dataset.
    """
    from harness_ext.cli.prompts.dataset import data_folders, read_facts
    from harness_ext.prompts import (
        PromptError,
        check_prompt,
        example_document,
        find_prompts,
        is_pattern,
        load_prompt,
        tokenize_words,
    )

    beside_model = data_folders(args.model)
    names = [
        hit
        for name in args.prompts
        for hit in (find_prompts(name, data_folders=beside_model) if is_pattern(name) else [name])
    ]
    tokenizer = None if args.model is None else _load_tokenizer(args.model)
    encode = None if tokenizer is None else _encoder(tokenizer)
    num_errors = 0
    given: list[Prompt] = []
    for name in names:
        try:
            prompt = load_prompt(name, data_folders=beside_model)
        except PromptError as err:
            print(f"{name}\n  error: {err}")
            num_errors += 1
            continue
        facts = read_facts(prompt, args.dataset, folders=data_folders(args.model, prompt.path))
        config = facts.config
        unknown = "" if config is None or config.classes else "; no data here, so that classes are not checked"
        print(f"{prompt.id}  ({facts.source or 'dataset not known: columns and classes are not checked'}{unknown})")
        findings = check_prompt(
            prompt,
            columns=facts.columns,
            classes=None if config is None else config.classes or None,
            label_column=None if config is None else config.label_column,
            example=facts.examples[0] if facts.examples else None,
            encode=encode,
        )
        for finding in findings:
            print(f"  {finding}")
        given.append(prompt)
        alike = _duplicates(prompt, [*given, *_siblings(prompt, None if config is None else config.name)])
        if alike:
            print(f"  warning: the same text and label words as {', '.join(alike)}: a sweep scores them twice")
        errors = sum(finding.severity == "error" for finding in findings)
        num_errors += errors
        if not findings and not alike:
            print("  nothing to report")
        if tokenizer is not None and encode is not None and prompt.label_words and not errors:
            context = prompt.render(facts.examples[0] if facts.examples else example_document(prompt)).text
            rows = [
                (label, word, " ".join(map(str, ids)), " ".join(map(repr, tokenizer.convert_ids_to_tokens(list(ids)))))
                for label, word, ids, _ in tokenize_words(prompt, encode, context=context)
            ]
            _print_table(("class", "word", "token ids", "tokens"), rows)
    print(f"\n{count(len(names), 'prompt')}, {count(num_errors, 'error')}")
    return 1 if num_errors else 0


def _siblings(prompt: Prompt, dataset: str | None) -> list[Prompt]:
    """Load the other prompts of the dataset, and those of the folder that the prompt lies in, where they can be loaded."""
    from harness_ext.prompts import PromptError, find_prompts, load_prompt

    folder = prompt.path.resolve().parent
    names = [path.as_posix() for path in sorted(folder.glob("*.jinja"))]
    if dataset is not None:
        names += [prompt_id for prompt_id in find_prompts("*") if prompt_id.partition("/")[0] == dataset]
    result = []
    for name in names:
        try:
            result.append(load_prompt(name))
        except PromptError:  # reported where that one is checked
            continue
    return result


def _duplicates(prompt: Prompt, others: Sequence[Prompt]) -> list[str]:
    """Return the ids of prompts in other files that are this one under another name."""
    from harness_ext.prompts import duplicate_prompts

    by_file: dict[Path, Prompt] = {prompt.path.resolve(): prompt}
    for other in others:
        by_file.setdefault(other.path.resolve(), other)
    groups = duplicate_prompts(by_file.values())
    return [name for group in groups if prompt.id in group for name in group if name != prompt.id]


def _load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from harness_ext.cli.models import loading

    with loading(model, "--model", what="a tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    return tokenizer


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], Sequence[int]]:
    # Special tokens are the engine's business; one at the end would hide the word.
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


# ------------------------------------------------------------------------------------------------- output


def _words(label_words: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{label}: {', '.join(words)}" for label, words in label_words.items())


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
