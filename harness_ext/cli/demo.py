"""`harness-ext demo`: the lab's smallest preset, a synthetic language of movie reviews and three tiny models of it.

It needs no network and no data. What it leaves is a folder of `harness-ext lab run`: every checkpoint in it is an ordinary
Hugging Face model with the language's datasets under `data/`, so that `lm_eval` runs the demo's tasks on it without further
options.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

DEFAULT_FOLDER = "harness_ext_demo"
_TASKS = ("natural_demo", "probe_demo")
_DATASET = "reviews"


def add_parser(subparsers: Any) -> None:
    """Add `demo`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="make a synthetic language, train three tiny models on it and evaluate them; no network, two minutes",
        description="Makes a synthetic language of movie reviews, trains three tiny models on it to the same loss, and "
        "evaluates them through lm_eval. Asked again, it goes on where it was stopped; `harness-ext lab run --preset demo` "
        "is the same.",
    )
    parser.add_argument("--out", default=DEFAULT_FOLDER, metavar="DIR", help="folder to make (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of language and models (default: %(default)s)"
    )
    parser.add_argument(
        "--force", action="store_true", help="if DIR holds a demo, replace it and everything else in its folder"
    )
    parser.set_defaults(func=run, can_be_resumed=True)


def run(args: argparse.Namespace) -> int:
    """Make the models unless they are there, evaluate them, and print accuracies beside the Bayes-optimal one.

    Raises:
        ValueError: If the seed is out of range, or differs from that of the demo that is there.
        FileExistsError: If the folder holds something that is not a demo.
    """
    from harness_ext.cli.lab import run as lab
    from harness_ext.cli.lab.report import print_results

    lab.check_seed(args.seed)
    # Nothing of the demo is on the Hub, and where there is no network the libraries wait for it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from harness_ext.lab.presets import PRESETS

    folder = Path(args.out).expanduser()
    there = _seed_of_demo(folder)
    if there is not None and args.force:
        shutil.rmtree(folder)
    elif there is not None and there != args.seed:
        raise ValueError(
            f"{folder} holds a demo of --seed {there}. Ask for that one, add --force to replace it, or name another folder "
            "with --out."
        )
    plan = PRESETS["demo"](args.seed)
    matching = lab.train_and_match(folder, plan)
    if matching is None:
        return 0
    results = lab.evaluate(folder, plan, matching.to_dict())
    print_results(folder)
    _print_accuracies(folder, results)
    return 0


def _seed_of_demo(folder: Path) -> int | None:
    """Return the seed of the demo in `folder`, None if the folder is free, and raise if something else is there."""
    from harness_ext.lab.checkpoints import is_free

    if is_free(folder):
        return None
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        if plan["made_by"] == "harness-ext lab" and plan["name"] == "demo":
            return int(plan["seed"])
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise FileExistsError(
        f"{folder} holds something that is not a demo (no plan.json of one). It is left alone, also with --force; name another "
        "folder with --out."
    )


def _print_accuracies(folder: Path, results: dict[str, Path]) -> None:
    """The best model's accuracies beside those of the best classifier and of chance, and how to run it by hand."""
    from harness_ext.lab.checkpoints import find_checkpoints
    from harness_ext.lab.result_files import read_result_file
    from harness_ext.lab.run import LOOKUP, read_truth

    truth = read_truth(folder)["tasks"][_DATASET]
    trained = [one for one in find_checkpoints(folder / "runs") if one.run != LOOKUP]
    best = min(trained, key=lambda one: one.excess.value)
    file = read_result_file(results[best.name])
    print(
        f"\nThe best model, {best.name}: {best.excess.value:.3f} nats per token above the entropy.\n"
        "Accuracy        measured        Bayes-optimal   chance"
    )
    for task in _TASKS:
        measured = file.measured(task, "acc")
        assert measured is not None, "the demo has run this task"
        print(
            f"{task:<14} {measured.value:6.1%} ± {measured.stderr:.1%}      {truth['bayes_accuracy']['accuracy']:.1%}         "
            f"{truth['majority']:.1%}"
        )
    print(
        "\nTo evaluate it by hand:\n"
        f"  lm_eval --tasks {','.join(_TASKS)} --model hf --model_args {shlex.quote(f'pretrained={best.folder}')} "
        "--batch_size auto"
    )
