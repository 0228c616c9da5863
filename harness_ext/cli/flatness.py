"""`harness-ext flatness widen`: a small model as a large one, to compare the flatness of models of different sizes.

`harness-ext flatness chart` shows which modules a Fisher trace comes from.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness_ext.paths import require_file, require_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["WIDEN_FILE", "add_parser", "widen"]

WIDEN_FILE = "widen.json"
"""In the folder of a widened model: what it was made of."""

_CHARTS = (".svg", ".png", ".pdf")

_CHECKED_TOKENS = 64
_TOLERANCE = 1e-4
"""Of the logits, in units of the largest one. SmolLM2-135M, widened twice, differs by 3e-6."""


def add_parser(subparsers: Any) -> None:
    """Add `flatness` with its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "flatness",
        help="embed a small model in a larger architecture, show a trace by module",
        description="The trace of the Hessian grows with a model, and changes under rescalings that leave its function alone. "
        "Liu, Xie, Li and Ma (2023) compare sizes by viewing the small model as a large one.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_widen(actions)
    _add_chart(actions)


def _add_widen(actions: Any) -> None:
    action: argparse.ArgumentParser = actions.add_parser(
        "widen",
        help="embed a small model in a larger architecture without changing its function",
        description="Writes a Hugging Face folder with a model of LARGE's architecture and SMALL's function and tokenizer. "
        "Weights are tiled and divided by the ratio of widths, new layers are zero; the module harness_ext.flatness.widen says "
        "what that does to the traces. Families: GPT-2, Llama, Mistral, Qwen2.",
    )
    action.add_argument("small", metavar="SMALL", help="model to embed: a folder, or an id on the Hub")
    action.add_argument(
        "--like",
        required=True,
        metavar="LARGE",
        help="architecture: a folder or an id on the Hub, of which only config.json is read",
    )
    action.add_argument("--out", required=True, metavar="FOLDER", help="folder to make")
    action.set_defaults(func=widen)


def _add_chart(actions: Any) -> None:
    action: argparse.ArgumentParser = actions.add_parser(
        "chart",
        help="tabulate and draw a Fisher trace by kind of module and by layer",
        description="Prints a Markdown table of the Fisher trace by kind of module and by layer, for each flatness task in a "
        "results JSON; with --out, draws a chart too (needs matplotlib).",
    )
    action.add_argument("results", metavar="RESULTS.json", help="as lm_eval --output_path writes it")
    action.add_argument("--out", metavar="FILE", help="chart to write: .svg, .png or .pdf")
    action.add_argument("--scaled", action="store_true", help="draw the weight-scaled trace instead")
    action.set_defaults(func=chart)


def chart(args: argparse.Namespace) -> int:
    """Print the table, write the chart.

    Raises:
        ValueError: If the file has no traces by parameter, the chart's ending is not known, or matplotlib is not installed.
        OSError: If the file cannot be read.
    """
    from harness_ext.flatness import breakdown

    require_file(Path(args.results).expanduser(), "a result file, as lm_eval --output_path writes it")
    if args.out is not None:
        require_place(Path(args.out).expanduser(), is_folder=False)
    found = breakdown.read_breakdowns(Path(args.results).expanduser())
    for of_task in found:
        print(f"{of_task.model}, {of_task.task}\n")
        print("\n".join(breakdown.table_lines(of_task)) + "\n")
    if args.out is None:
        return 0
    path = Path(args.out).expanduser()
    if path.suffix not in _CHARTS:
        raise ValueError(
            f"--out {path}: expected a name that ends in {', '.join(_CHARTS)}, found {path.suffix or 'no ending'}"
        )
    try:
        figure = breakdown.draw(found, "fisher_trace_scaled" if args.scaled else "fisher_trace")
    except ImportError as err:
        raise ValueError(f"A chart needs matplotlib: pip install 'harness-ext[plots]' ({err}).") from err
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"Chart in {path}")
    return 0


def widen(args: argparse.Namespace) -> int:
    """Embed, compare the logits, save.

    Raises:
        FileExistsError: If the folder holds something.
        ValueError: If the architecture cannot hold the model, or the model is without a tokenizer.
        RuntimeError: If the logits differ by more than rounding.
    """
    folder = Path(args.out).expanduser()
    require_place(folder, is_folder=True)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"--out {folder}: expected a new or empty folder, found something in it. Name another one."
        )

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness_ext import __version__
    from harness_ext.cli.models import loading
    from harness_ext.flatness import widen as widening

    with loading(args.like, "--like", what="a config.json"):
        large = AutoConfig.from_pretrained(args.like)
    with loading(args.small):
        small = AutoConfig.from_pretrained(args.small)
    try:
        widening.plan(small, large)
    except ValueError as err:
        raise ValueError(f"--like {args.like}: {err}") from err
    tokenizer = _tokenizer(args.small)
    with loading(args.small):
        model = AutoModelForCausalLM.from_pretrained(args.small, dtype="auto").eval()
    dtype = model.dtype
    # Half precision would hide a difference in its rounding, so the logits are compared before the weights are rounded.
    model = model.to(torch.promote_types(dtype, torch.float32))
    wide = widening.widen(model, large)
    difference = _difference(model, wide)
    if not difference <= _TOLERANCE:
        raise RuntimeError(
            f"{args.small}: the logits of the widened model differ by {difference:.1e} of the largest one, expected rounding, "
            f"below {_TOLERANCE:.0e}; nothing was written"
        )
    wide.to(dtype)
    wide.config.dtype = dtype
    record = {
        "made_by": "harness-ext flatness widen",
        "harness_ext_version": __version__,
        "small": args.small,
        "like": args.like,
        "parameters": {"small": _size(model), "large": _size(wide)},
        "largest_difference_of_logits": difference,
    }
    _save(folder, wide, tokenizer, record, data=Path(args.small).expanduser() / "data")
    rounded = "" if dtype == model.dtype else ", before weights are rounded"
    measuring = _measuring(Path(args.small).expanduser())
    print(
        f"{_size(model):,} parameters widened to {_size(wide):,}, saved in {str(dtype).removeprefix('torch.')}. "
        f"The logits differ by {difference:.0e} of the largest one{rounded}.\n"
        f"To measure its flatness{measuring.note}:\n  {measuring.variable}lm_eval --tasks {measuring.tasks} --model hf "
        "--model_args "
        f"{shlex.quote(f'pretrained={folder}')}"
    )
    return 0


class _Measuring(NamedTuple):
    """How the flatness of a model is measured on its own text.

    Attributes:
        tasks: For `--tasks`.
        variable: What stands before the command.
        note: What the user has to know.
    """

    tasks: str
    variable: str = ""
    note: str = ""


def _measuring(small: Path) -> _Measuring:
    """The tasks on the language of a model of the lab, or on WikiText-2 for any other."""
    from harness_ext.lab.checkpoints import LAB_FILE

    usual = _Measuring(
        "loss_wikitext,flatness_wikitext", note=", on WikiText-2 (loss_corpus,flatness_corpus: any text)"
    )
    try:
        record = json.loads((small / LAB_FILE).read_text(encoding="utf-8"))
        text = f"harness_ext/{record['language']['kind']}_text"
    except (OSError, ValueError, KeyError, TypeError):
        return usual  # no model of the lab, or one of `harness-ext quad train`
    name = _name_of_corpus(text)
    if name is None:
        return _Measuring(
            "loss_NAME,flatness_NAME",
            note=f" on its own language; NAME is that of a corpus task of {text}, which is missing here",
        )
    tasks = f"loss_{name},flatness_{name}"
    if (small / "data" / text).is_dir():
        return _Measuring(tasks)
    # A checkpoint has no data of its own before it is evaluated.
    found = next((above / "data" for above in small.resolve().parents if (above / "data" / text).is_dir()), None)
    folder = "FOLDER_OF_THE_LAB/data" if found is None else str(found)
    return _Measuring(tasks, variable=f"HARNESS_EXT_DATA={shlex.quote(folder)} ")


def _name_of_corpus(dataset: str) -> str | None:
    """The name in `flatness_NAME` of the tasks on a corpus, by its dataset."""
    import yaml

    from harness_ext import resources

    for path in sorted(resources.task_configs_folder().glob("*/_corpus.yaml")):
        if yaml.safe_load(path.read_text(encoding="utf-8")).get("dataset_path") == dataset:
            for task in path.parent.glob("flatness_*.yaml"):
                return task.stem.removeprefix("flatness_")
    return None


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    missing = f"{name}: expected a tokenizer beside the weights, found none; save its tokenizer there"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (ValueError, OSError) as err:
        raise ValueError(f"{missing} ({str(err).splitlines()[0]})") from err
    # For some families transformers makes up an empty one.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(missing)
    return tokenizer


def _difference(small: PreTrainedModel, large: PreTrainedModel) -> float:
    """The largest difference of the logits on a random text, in units of the largest logit."""
    import torch

    length = min(_CHECKED_TOKENS, small.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(small.config.vocab_size, (1, length), generator=generator)
    with torch.inference_mode():
        before, after = (model(input_ids=tokens, use_cache=False).logits for model in (small, large))
    return float((before - after).abs().max() / before.abs().max())


def _size(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _save(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: dict[str, Any], *, data: Path
) -> None:
    """Write the folder, which appears only when all is written, with the datasets that lie in the small model's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if data.is_dir():
            shutil.copytree(data, partial / "data")
        (partial / WIDEN_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
