"""`harness-ext lab run`: trains, matches and evaluates the models of a preset."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_ext.cli.evaluation import Evaluation, evaluate_all, link_data
from harness_ext.cli.lab.report import GROUPS_FILE, RESULTS, print_results, write_json, write_report
from harness_ext.cli.lab.widened import measure_widened
from harness_ext.wording import count

if TYPE_CHECKING:
    from harness_ext.lab.match import Matching
    from harness_ext.lab.run import Plan

__all__ = ["add_actions", "check_seed", "evaluate", "num_cores", "run", "train_and_match"]

DEFAULT_FOLDER = "harness_ext_lab"
_PRESETS = ("cpu", "demo", "paper")


def add_actions(actions: Any) -> None:
    """Add `run`."""
    action: argparse.ArgumentParser = actions.add_parser(
        "run",
        help="train, match and evaluate the models of a preset",
        description="Trains the models of a preset, groups checkpoints of equal loss, evaluates these through lm_eval, and "
        "correlates flatness with downstream accuracy. Asked again, it goes on where it was stopped.",
    )
    action.add_argument("--preset", choices=_PRESETS, default="cpu", help="what to make (default: %(default)s)")
    action.add_argument("--out", default=DEFAULT_FOLDER, metavar="DIR", help="folder to make (default: %(default)s)")
    action.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of language and models (default: %(default)s)"
    )
    action.add_argument(
        "--workers", type=int, metavar="N", help="models at a time (default: one for each CPU core; on a GPU 1)"
    )
    action.add_argument(
        "--no-evaluate", action="store_true", help="stop after the groups are chosen, before lm_eval evaluates them"
    )
    action.add_argument(
        "--log_samples",
        "--log-samples",
        action="store_true",
        help="keep lm_eval's samples_*.jsonl beside the result files, so that models can be compared document by document; "
        "models that were evaluated without are evaluated again (cpu: 50 MB a model)",
    )
    action.set_defaults(func=run, can_be_resumed=True)


def run(args: argparse.Namespace) -> int:
    """Make, match, evaluate and compare the models of a preset.

    Raises:
        ValueError: If an argument is out of range, the folder has another plan, or no group can be made.
        FileExistsError: If the folder holds something else.
    """
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"--workers {args.workers}: expected at least 1")
    check_seed(args.seed)
    from harness_ext.lab.presets import PRESETS

    out = Path(args.out).expanduser()
    plan = PRESETS[args.preset](args.seed)
    matching = train_and_match(out, plan, workers=args.workers)
    if matching is None or args.no_evaluate:
        return 0
    evaluate(out, plan, matching.to_dict(), workers=args.workers, log_samples=args.log_samples)
    print_results(out)
    write_report(out, out / "report")
    print(f"Tables and figures are in {out / 'report'}, result files in {out / RESULTS}.")
    return 0


def check_seed(seed: int) -> None:
    """Complain of a seed that numpy or torch would not take."""
    if not 0 <= seed < 2**31:
        raise ValueError(f"--seed {seed}: expected a number from 0 to {2**31 - 1}")


def train_and_match(out: Path, plan: Plan, *, workers: int | None = None) -> Matching | None:
    """Make what is missing of a plan's language, data and checkpoints, choose the groups and print them.

    Args:
        out: The folder.
        plan: What it is to hold.
        workers: Models at a time; None: one for each CPU core, or one on a GPU.

    Returns:
        The groups; None in the processes of a launcher that are not the first.

    Raises:
        ValueError: If the folder has another plan, runs failed, or no group can be made.
        FileExistsError: If the folder holds something else.
    """
    from harness_ext.lab.run import prepare, write_lookup
    from harness_ext.lab.training import train_all

    prepare(out, plan)
    _print_language(out, plan)
    try:
        train_all(out, plan, workers=_workers(workers))
    except RuntimeError as err:
        raise ValueError(f"{err}\nThe other runs are done; the same command tries these again.") from err
    if int(os.environ.get("RANK", "0")) > 0:
        return None
    if plan.lookup:
        write_lookup(out)
    matching = _match_checkpoints(out, plan)
    print("\n".join(matching.table_lines()), flush=True)
    return matching


def _workers(asked: int | None) -> int:
    import torch

    return asked or (1 if torch.cuda.is_available() else num_cores())


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def evaluate(
    out: Path, plan: Plan, groups: Mapping[str, Any], *, workers: int | None = None, log_samples: bool = False
) -> dict[str, Path]:
    """Run lm_eval on the models in groups, the best model and the lookup table; models that have results are left alone.

    Where sizes differ, flatness is also measured on the models in groups as models of one size; see `measure_widened`.
    With `log_samples`, lm_eval's samples are kept, and models that have results without samples are evaluated again.

    Returns:
        Result files by the model's name; without those of widened models.

    Raises:
        ValueError: If lm_eval fails on a model; the others have been finished.
    """
    from harness_ext.lab.checkpoints import find_checkpoints
    from harness_ext.lab.lookup import refuse_other_code
    from harness_ext.lab.run import LOOKUP

    wanted = {model["name"] for group in groups["groups"] for model in group["models"]}
    found = find_checkpoints(out / "runs")
    trained = [one for one in found if one.run != LOOKUP and one.objective == "cross_entropy"]
    wanted.add(min(trained, key=lambda one: one.excess.value).name)
    evaluations = []
    for checkpoint in found:
        is_lookup = checkpoint.run == LOOKUP
        if checkpoint.name not in wanted and not is_lookup:
            continue
        if is_lookup:
            refuse_other_code(checkpoint.folder)
        link_data(out / "data", checkpoint.folder / "data")
        evaluations.append(
            Evaluation(
                checkpoint.name,
                checkpoint.folder.relative_to(out).as_posix(),
                # The lookup table has no trained weights, so no flatness.
                [task for task in plan.tasks if not (is_lookup and task.startswith("flatness"))],
                {"trust_remote_code": "True"} if is_lookup else {},
                log_samples=log_samples,
            )
        )
    at_a_time = _workers(workers)
    threads = max(1, num_cores() // at_a_time)
    try:
        results = evaluate_all(evaluations, where=out, out=out / RESULTS, workers=at_a_time, threads=threads)
        left_out = measure_widened(out, plan, groups, workers=at_a_time, threads=threads)
    except RuntimeError as err:
        raise ValueError(f"{err}\nThe other models are done; the same command tries these again.") from err
    for name, reason in left_out.items():
        print(f"{name}: no flatness as the largest architecture: {reason}")
    return results


def _match_checkpoints(out: Path, plan: Plan) -> Matching:
    from harness_ext.lab import match as matching
    from harness_ext.lab.checkpoints import find_checkpoints
    from harness_ext.lab.run import LOOKUP

    trained = [
        checkpoint
        for checkpoint in find_checkpoints(out / "runs")
        if checkpoint.run != LOOKUP and checkpoint.objective == "cross_entropy"
    ]
    found = matching.match(
        matching.from_checkpoints(trained), tolerance=plan.tolerance, targets=list(plan.levels) or None
    )
    write_json(out / GROUPS_FILE, found.to_dict())
    return found


def _print_language(out: Path, plan: Plan) -> None:
    from harness_ext.lab.run import read_truth

    truth = read_truth(out)
    print(
        f"Language: {plan.language}, seed {plan.seed}; entropy {truth['entropy']['value']:.4f} nats per token. "
        f"{count(len(plan.runs), 'run')} in {out}."
    )
    for name, task in truth["tasks"].items():
        print(
            f"  {name}: Bayes accuracy {task['bayes_accuracy']['accuracy']:.1%}, commonest class {task['majority']:.1%}, label "
            f"words under p* {task['natural_ceiling']:.1%}"
        )
