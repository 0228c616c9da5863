"""`harness-ext lab sde-check`: whether SGD, SVAG and the linear scaling rule end at the same loss, flatness and accuracy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_ext.paths import require_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from harness_ext.lab.languages.base import Language, Task
    from harness_ext.lab.model import ModelConfig
    from harness_ext.lab.sde import SdeSettings

__all__ = ["add_actions", "sde_check"]

DEFAULT_FOLDER = "harness_ext_sde"
_FLATNESS_BLOCKS = 64
_FLATNESS_TOKENS = 4096
"""Of a backward pass."""


def add_actions(actions: Any) -> None:
    """Add `sde-check`."""
    action: argparse.ArgumentParser = actions.add_parser(
        "sde-check",
        help="check whether a stochastic differential equation describes SGD on a language, by SVAG",
        description="Runs SGD, SVAG and the linear scaling rule from one start for the same time, several times each, and "
        "reports whether loss, flatness and downstream accuracy agree within error, and the gradient's noise-to-signal ratio "
        "(Li, Malladi and Arora, 2021). Settings that are not given are those of the module harness_ext.lab.sde.",
    )
    action.add_argument("--language", metavar="KIND", help="hmm, pcfg or reviews (default: hmm, or that of --start)")
    action.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (default: %(default)s)")
    action.add_argument("--width", type=int, metavar="N", help="of the model (default: 32)")
    action.add_argument("--depth", type=int, metavar="N", help="of the model (default: 2)")
    action.add_argument(
        "--start", metavar="FOLDER", help="checkpoint of `harness-ext lab run` to start from (default: trains one)"
    )
    action.add_argument("--task", metavar="NAME", help="downstream task (default: the language's first)")
    action.add_argument("--quick", action="store_true", help="seconds, to see that it runs; says little")
    action.add_argument("--no-flatness", action="store_true", help="leave out the Fisher trace")
    action.add_argument("--amplifications", type=int, nargs="+", metavar="L", help="l of SVAG (default: 1 2 4 8)")
    action.add_argument(
        "--batch-factors", type=int, nargs="*", metavar="K", help="of the linear scaling rule (default: 2 4 8)"
    )
    action.add_argument("--seeds", type=int, metavar="N", help="runs of each kind (default: 6)")
    action.add_argument("--steps", type=int, metavar="N", help="of SGD (default: 200)")
    action.add_argument("--batch-size", type=int, metavar="N", help="blocks in a batch (default: 8)")
    action.add_argument("--learning-rate", type=float, metavar="X", help="of SGD, constant (default: 0.3)")
    action.add_argument(
        "--out", default=DEFAULT_FOLDER, metavar="DIR", help="folder of table, JSON and figures (default: %(default)s)"
    )
    action.set_defaults(func=sde_check)


def sde_check(args: argparse.Namespace) -> int:
    """Run the check, print its table and write it.

    Raises:
        ValueError: If an argument is out of range, a name is not known, the start's training diverges or matplotlib is missing.
        FileNotFoundError: If --start names no checkpoint.
    """
    from harness_ext.cli.lab.run import check_seed
    from harness_ext.lab import sde
    from harness_ext.lab.languages import make_language
    from harness_ext.lab.model import ModelConfig

    check_seed(args.seed)
    settings = _settings(args)
    out = Path(args.out).expanduser()
    require_place(out, is_folder=True)
    start: PreTrainedModel | None = None
    if args.start is None:
        language = make_language(args.language or "hmm", args.seed)
        config = ModelConfig(
            width=32 if args.width is None else args.width, depth=2 if args.depth is None else args.depth
        )
        tokenizer = language.tokenizer(max_length=config.context)
    else:
        for name in ("language", "width", "depth"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} is that of --start {args.start}; leave it out")
        language, config, start, tokenizer = _read_start(Path(args.start).expanduser())
    task = _task(language, args.task)
    measure = None if args.no_flatness else _fisher_trace(language, tokenizer, args.seed)
    try:
        report = sde.sde_check(
            language,
            config,
            settings=settings,
            seed=args.seed,
            start=start,
            task=task,
            measure_flatness=measure,
            flatness_name="Fisher trace",
        )
    except FloatingPointError as err:
        raise ValueError(f"the start's training diverged ({err}); name a checkpoint with --start") from err
    print(report.table(), end="")
    try:
        paths = report.write(out)
    except ImportError as err:
        raise ValueError(
            f"{out} has the table and the JSON; the figure needs matplotlib: pip install 'harness-ext[plots]'"
        ) from err
    print(f"\n{', '.join(path.name for path in paths)} are in {out}.")
    return 0


def _settings(args: argparse.Namespace) -> SdeSettings:
    from harness_ext.lab.sde import QUICK, SdeSettings

    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in ("amplifications", "batch_factors", "seeds", "steps", "batch_size", "learning_rate")
        if (value := getattr(args, name)) is not None
    }
    return replace(QUICK if args.quick else SdeSettings(), **given)


def _read_start(folder: Path) -> tuple[Language, ModelConfig, PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint of the lab, with its language made again."""
    import hashlib

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from harness_ext.lab.checkpoints import LAB_FILE, read_checkpoint, without_bars
    from harness_ext.lab.languages import make_language
    from harness_ext.lab.model import ModelConfig

    checkpoint = read_checkpoint(folder)
    record = json.loads((folder / LAB_FILE).read_text(encoding="utf-8"))["language"]
    language = make_language(record["kind"], record["seed"], record["sizes"])
    tables = json.dumps(language.to_dict(), sort_keys=True)
    if hashlib.sha256(tables.encode()).hexdigest() != checkpoint.language_sha256:
        raise ValueError(
            f"--start {folder}: its language {record['kind']}, seed {record['seed']}, has other tables in this version. Make "
            "the checkpoint anew with `harness-ext lab run`."
        )
    sizes = {name: value for name, value in checkpoint.model.items() if name in ModelConfig.__dataclass_fields__}
    try:
        config = ModelConfig(**sizes)
    except ValueError as err:
        raise ValueError(f"--start {folder}: expected a trained model ({err})") from err
    with without_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return language, config, model, AutoTokenizer.from_pretrained(folder)


def _task(language: Language, name: str | None) -> Task | None:
    if name is None:
        return None
    tasks = {task.name: task for task in language.tasks}
    if name not in tasks:
        raise ValueError(f"--task {name}: expected a task of the language {language.name}: {', '.join(tasks)}")
    return tasks[name]


def _fisher_trace(
    language: Language, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Callable[[PreTrainedModel], tuple[float, float]]:
    """The Fisher trace of the pretraining loss, always on the same documents."""
    import numpy as np

    from harness_ext.flatness.options import FlatnessOptions
    from harness_ext.flatness.run import Block, measure
    from harness_ext.lab.train import encode

    # A stream of its own: the check's are children of the seed alone.
    documents = language.sample(_FLATNESS_BLOCKS, np.random.default_rng([seed, _FLATNESS_BLOCKS]))
    end, longest = tokenizer.eos_token_id, tokenizer.model_max_length - 1
    rows = [row[:longest] for row in encode((" ".join(words) for words in documents), tokenizer)]
    blocks = [Block([end, *row], [*row, end], number) for number, row in enumerate(rows)]
    options = FlatnessOptions(quantities=("fisher_trace",), max_blocks=_FLATNESS_BLOCKS, seed=seed)

    def fisher(model: PreTrainedModel) -> tuple[float, float]:
        run = measure(model, blocks, options, device=model.device, max_tokens=_FLATNESS_TOKENS, progress=False)
        estimate = run.report["estimates"]["fisher_trace"]
        return estimate["value"], estimate["stderr"]

    return fisher
