"""`harness-ext quad train`: train or continue a small language model with the Quad objective.

The folder that it leaves is an ordinary Hugging Face model, so that `lm_eval` runs every task on it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness_ext.paths import require_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["add_parser", "read_documents", "train"]

_MAKER = "harness-ext quad train"

_SIZES = {"width": 64, "depth": 2, "heads": 4, "context": 256}
"""Of a model from scratch."""

_LONGEST_DEFAULT = 256
_HELD_OUT_SHARE, _HELD_OUT_MOST = 0.05, 500
_FIT_TOKENS_PER_DIMENSION = 100
"""Tokens that the linear layer is first fitted to, in units of d: with so many it is overfitted by about a hundredth."""


def add_parser(subparsers: Any) -> None:
    """Add `quad` with its action `train`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "quad",
        help="train a small language model with the Quad objective",
        description="The Quad objective of Saunshi, Malladi and Arora (2021): E[−⟨f(s), φ_w⟩ + ½‖Φ f(s)‖²].",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    action: argparse.ArgumentParser = actions.add_parser(
        "train",
        help="train or continue a model and save a folder that lm_eval loads",
        description="Trains or continues a causal language model with the Quad objective. Its output embedding Φ is untied "
        "and kept fixed, a linear layer W follows the transformer, and ΦW is the output embedding of the folder that is "
        "saved. The logits of such a model approximate probabilities: lm_eval's log-likelihoods of it rank tokens, and are no "
        "estimate of how likely they are. A bias of the output embedding has no place in the objective and is 0 in the folder. "
        "`accelerate launch -m harness_ext quad train …` uses several devices.",
    )
    action.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    start = action.add_mutually_exclusive_group(required=True)
    start.add_argument("--model", metavar="MODEL", help="model to continue: a folder, or an id on the Hub")
    start.add_argument(
        "--architecture",
        choices=("gpt2",),
        help="train from scratch, with a random Φ (see --train-embedding); needs --tokenizer",
    )
    action.add_argument("--tokenizer", metavar="MODEL", help="with --architecture: a folder, or an id on the Hub")
    for name, value in _SIZES.items():
        action.add_argument(f"--{name}", type=int, metavar="N", help=f"with --architecture (default: {value})")
    action.add_argument(
        "--text",
        required=True,
        nargs="+",
        metavar="FILE",
        help="text files, a document on each line, or documents between blank lines where there are any; .jsonl files; or "
        "datasets of the Hub or of HARNESS_EXT_DATA, such as SetFit/sst2",
    )
    action.add_argument("--column", default="text", help="of .jsonl files and datasets (default: %(default)s)")
    action.add_argument("--split", default="train", help="of datasets (default: %(default)s)")
    action.add_argument("--steps", type=int, default=1000, metavar="N", help="optimizer steps (default: %(default)s)")
    action.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="blocks in a step of one device (default: %(default)s)"
    )
    action.add_argument(
        "--length",
        type=int,
        metavar="N",
        help=f"tokens in a block (default: the model's context, at most {_LONGEST_DEFAULT})",
    )
    action.add_argument("--lr", type=float, default=1e-3, metavar="X", help="peak learning rate (default: %(default)s)")
    action.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    action.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the transformer's forward pass; weights are kept and saved in float32 (default: %(default)s)",
    )
    action.add_argument("--train-embedding", action="store_true", help="train Φ too")
    action.set_defaults(func=train)


def train(args: argparse.Namespace) -> int:
    """Train, save and report the held-out Quad loss before and after.

    Raises:
        ValueError: If a number is out of range, the text is too short, or the model cannot be trained so.
        FileExistsError: If the folder holds something.
    """
    folder = Path(args.out).expanduser()
    require_place(folder, is_folder=True)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"--out {folder}: expected a new or empty folder, found something in it. Name another one."
        )
    for name in ("steps", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    if not 0 < args.lr < float("inf"):
        raise ValueError(f"--lr {args.lr}: expected a number above 0; the default is 0.001")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed}: expected a number from 0 to {2**63 - 1}")

    import numpy as np
    import torch
    from accelerate import PartialState
    from transformers.utils import logging

    from harness_ext import __version__
    from harness_ext.lab import train as lab
    from harness_ext.lab.quad import QuadModel

    # Left to itself, accelerate takes each process of a launch on CPUs for the only one.
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    state = PartialState(cpu=True) if launched and not torch.cuda.is_available() else PartialState()
    if not state.is_main_process:
        logging.set_verbosity_error()
    documents = read_documents(args.text, column=args.column, split=args.split)
    model, tokenizer = _start(args)
    model.to(state.device)
    end_of_text, length = tokenizer.eos_token_id, _block_size(args.length, model)
    lab.check_packing(model, block_size=length)
    text = _split(lab.encode(documents, tokenizer), length=length, seed=args.seed)
    largest = max(max(document) for document in (*text.train, *text.held_out, [end_of_text]))
    if largest >= len(model.get_input_embeddings().weight):
        raise ValueError(
            f"the tokenizer gives token {largest}, and the model has {len(model.get_input_embeddings().weight)}; they do not "
            "belong together"
        )
    blocks = _pack(text.train, end_of_text=end_of_text, length=length, batch_size=args.batch_size, state=state)

    quad = QuadModel(model, train_embedding=args.train_embedding)
    enough = -(-_FIT_TOKENS_PER_DIMENSION * len(quad.linear) // length)
    order = np.random.default_rng(args.seed).permutation(len(blocks.tokens))[:enough]
    fitted = quad.fit_linear(
        lab.packed_batches(
            lab.Blocks(blocks.tokens[order], blocks.positions[order]), batch_size=args.batch_size, device=quad.device
        )
    )
    measure: dict[str, Any] = {"end_of_text": end_of_text, "batch_size": args.batch_size, "objective": "quad"}
    before = lab.validation_loss(quad, text.held_out, **measure)
    if state.is_main_process:
        print(
            f"Quad loss of the model with the best linear layer: {before.value:.5f} ± {before.stderr:.5f} on "
            f"{before.tokens:,} held-out tokens (0 for no features at all, −0.5 at the very least)",
            flush=True,
        )
    config = lab.TrainConfig(steps=args.steps, batch_size=args.batch_size, learning_rate=args.lr)
    try:
        result = lab.train(quad, blocks, config, seed=args.seed, objective="quad", dtype=getattr(torch, args.dtype))
    except FloatingPointError as err:
        raise ValueError(f"{err}; on the command line, --lr") from err
    after = lab.validation_loss(quad, text.held_out, **measure)
    if not state.is_main_process:
        return 0
    record = {
        "made_by": _MAKER,
        "harness_ext_version": __version__,
        "objective": {
            "name": "quad",
            "embedding": "trained" if args.train_embedding else "fixed",
            "dropped_bias": quad.dropped_bias,
            "logits": "approximate probabilities, not log-probabilities",
        },
        "start": {"model": args.model} if args.model else {"architecture": args.architecture, **_sizes(args)},
        "seed": args.seed,
        "algorithm": {**config.to_dict(), "dtype": args.dtype, "length": length},
        "text": {"sources": args.text, "documents": len(documents), "held_out": len(text.held_out)},
        "tokens_fitted": fitted,
        "tokens_seen": result.tokens,
        "train_seconds": round(result.seconds, 1),
        "quad_loss": {"linear_layer_only": before._asdict(), "trained": after._asdict()},
    }
    _save(folder, quad.fold(), tokenizer, record, data=Path(args.model).expanduser() / "data" if args.model else None)
    tasks = "natural_demo,probe_demo" if (folder / "data").is_dir() else "natural_sst,probe_sst"
    print(
        f"Quad loss after {result.tokens:,} tokens in {result.seconds:.0f} s: {after.value:.5f} ± {after.stderr:.5f}\n"
        f"Saved. To evaluate it:\n  lm_eval --tasks {tasks} --model hf --model_args "
        f"{shlex.quote(f'pretrained={folder}')} --batch_size auto"
    )
    return 0


def read_documents(sources: Sequence[str], *, column: str, split: str) -> list[str]:
    """Read documents from text files, JSON lines and datasets; those without a letter or sign are left out.

    Args:
        sources: Paths of files, or ids of datasets.
        column: Of JSON lines and datasets.
        split: Of datasets.

    Raises:
        FileNotFoundError: If a source is neither a file nor a dataset that is found.
        KeyError: If the column is missing.
        ValueError: If a line is not JSON, a document is not a text, or there is no document.
    """
    documents = [document for source in sources for document in _read(source, column, split) if document.strip()]
    if not documents:
        raise ValueError(f"--text {' '.join(sources)}: expected documents, found none")
    return documents


def _read(source: str, column: str, split: str) -> Iterator[str]:
    path = Path(source).expanduser()
    if path.exists() and not path.is_dir():  # a pipe too
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as err:
            raise ValueError(f"--text {path}: expected a text in UTF-8 ({err})") from err
        if path.suffix == ".jsonl":
            yield from _rows(path, text, column)
            return
        paragraphs = ["\n".join(lines) for lines in _paragraphs(text.splitlines())]
        yield from paragraphs if len(paragraphs) > 1 else text.splitlines()
        return
    if path.is_dir() or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"--text {source}: expected a text file, a .jsonl file or the id of a dataset such as SetFit/sst2; there is no "
            "such file"
        )
    from harness_ext.tasks.data import open_dataset

    rows = open_dataset(source, None)[split]
    if column not in rows.column_names:
        raise KeyError(
            f"--text {source}: no column {column!r}. Columns: {', '.join(rows.column_names)}; choose by --column."
        )
    yield from (_document(value, f"{source} {split}", number) for number, value in enumerate(rows[column], start=1))


def _rows(path: Path, text: str, column: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as err:
            raise ValueError(f"--text {path}, line {number}: expected a JSON object ({err})") from err
        if not isinstance(row, dict) or column not in row:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise KeyError(f"--text {path}, line {number}: no column {column!r}. Found: {found}; choose by --column.")
        yield _document(row[column], str(path), number)


def _document(value: Any, source: str, number: int) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"--text {source}, row {number}: expected a text, found {type(value).__name__}; choose by --column"
        )
    return value


def _paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in (*lines, ""):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    return {name: value if (value := getattr(args, name)) is not None else default for name, default in _SIZES.items()}


def _start(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model to train, in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from harness_ext.cli.models import loading

    given = [name for name in ("tokenizer", *_SIZES) if getattr(args, name) is not None]
    if args.model and given:
        raise ValueError(f"--{given[0]} is for --architecture; a model that is continued has its own")
    if args.architecture and args.tokenizer is None:
        raise ValueError(
            "--architecture needs --tokenizer: a folder with a tokenizer, or an id on the Hub such as gpt2"
        )
    of_tokenizer = (args.model, "--model") if args.model else (args.tokenizer, "--tokenizer")
    with loading(*of_tokenizer, what="a model" if args.model else "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(of_tokenizer[0])
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{args.model or args.tokenizer}: its tokenizer has no eos_token to put between documents")
    if args.model:
        with loading(args.model, "--model"):
            return AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"), tokenizer
    from harness_ext.lab.model import ModelConfig, build_model

    return build_model(
        ModelConfig(**_sizes(args), architecture=args.architecture), tokenizer, seed=args.seed
    ), tokenizer


def _block_size(length: int | None, model: PreTrainedModel) -> int:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        return min(context or _LONGEST_DEFAULT, _LONGEST_DEFAULT)
    if length < 2 or (context is not None and length > context):
        raise ValueError(f"--length {length}: expected 2 to {context or 'any number of'} tokens, the model's context")
    return length


class _Text(NamedTuple):
    """Token ids of documents; the held-out ones are cut so that an end of text fits before them."""

    train: list[list[int]]
    held_out: list[list[int]]


def _split(documents: Sequence[list[int]], *, length: int, seed: int) -> _Text:
    import numpy as np

    documents = [document for document in documents if document]
    if len(documents) < 4:
        raise ValueError(
            f"--text: expected at least 4 documents, as some are held out, got {len(documents)}. A document is a line of a "
            "text file, or what stands between blank lines."
        )
    count = max(2, min(_HELD_OUT_MOST, round(_HELD_OUT_SHARE * len(documents))))
    held_out = set(np.random.default_rng(seed).permutation(len(documents))[:count].tolist())
    return _Text(
        train=[document for row, document in enumerate(documents) if row not in held_out],
        held_out=[documents[row][: length - 1] for row in sorted(held_out)],
    )


def _pack(documents: Sequence[list[int]], *, end_of_text: int, length: int, batch_size: int, state: Any) -> Any:
    from harness_ext.lab.train import pack

    try:
        blocks = pack(documents, end_of_text=end_of_text, block_size=length)
    except ValueError as err:
        raise ValueError(f"--text: {err}. Give more text, or a smaller --length.") from err
    needed = batch_size * state.num_processes
    if len(blocks.tokens) < needed:
        raise ValueError(
            f"--text: {len(blocks.tokens)} blocks of {length} tokens, and one step takes {needed}. Give more text, a smaller "
            f"--batch-size (at most {len(blocks.tokens) // state.num_processes} here) or --length."
        )
    return blocks


def _save(folder: Path, model: Any, tokenizer: Any, record: dict[str, Any], *, data: Path | None) -> None:
    """Write the folder, which appears only when all is written, with the datasets of the model that was continued."""
    from harness_ext.lab.checkpoints import save

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        if data is not None and data.is_dir():
            shutil.copytree(data, partial / "data")
        save(partial, model, tokenizer, record)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
