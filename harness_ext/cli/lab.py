"""`harness-ext lab`: families of models of equal loss on synthetic languages, evaluated, matched and compared."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness_ext.lab.match import Matching
    from harness_ext.lab.run import Plan

__all__ = ["add_parser", "evaluate", "num_cores", "print_results", "run", "train_and_match"]

DEFAULT_FOLDER = "harness_ext_lab"
_PRESETS = ("cpu", "demo", "paper")
_GROUPS_FILE = "groups.json"
_SEED_OF_STATISTICS = 0
_TRACES = ("fisher_trace", "hessian_trace")


def add_parser(subparsers: Any) -> None:
    """Add `lab` with its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lab",
        help="make families of loss-matched models on synthetic languages, and compare them",
        description="Trains small models on languages of which every probability is known, chooses those of equal excess "
        "loss, evaluates them by lm_eval, and checks the theory of the papers on them.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_run(actions)
    _add_match(actions)
    _add_theory(actions)


def _add_run(actions: Any) -> None:
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
    action.set_defaults(func=run)


def _add_match(actions: Any) -> None:
    action: argparse.ArgumentParser = actions.add_parser(
        "match",
        help="choose groups of equal loss among checkpoints, or among models with lm_eval results of a loss",
        description="Groups checkpoints of the lab by their exact excess loss; with --results, any models by the loss in "
        "lm_eval's result files.",
    )
    action.add_argument("folders", nargs="*", metavar="FOLDER", help="folders with checkpoints of the lab")
    action.add_argument(
        "--results", nargs="+", metavar="PATH", help="lm_eval result files, or folders of them, instead of checkpoints"
    )
    action.add_argument(
        "--metric", default="bits_per_byte", help="of --results: bits_per_byte or loss (default: %(default)s)"
    )
    action.add_argument("--task", help="of --results: the task whose loss counts, where there are several")
    action.add_argument(
        "--tolerance", type=float, default=0.005, metavar="X", help="largest gap (default: %(default)s)"
    )
    action.add_argument(
        "--z", type=float, metavar="Z", help="standard errors of the gap that count into it (default: 1.645; 0: none)"
    )
    action.add_argument("--min-size", type=int, default=3, metavar="N", help="models of a group (default: %(default)s)")
    action.add_argument("--groups", type=int, metavar="N", help="this many groups")
    action.add_argument("--targets", type=float, nargs="+", metavar="LOSS", help="a group near each of these losses")
    action.add_argument("--out", metavar="FILE", help="write the groups as JSON")
    action.set_defaults(func=match)


def _add_theory(actions: Any) -> None:
    action: argparse.ArgumentParser = actions.add_parser(
        "theory",
        help="check the bound of Saunshi, Malladi and Arora (2021) and the flatness correlation on a lab's models",
        description="Draws the logistic loss of linear classifiers on p_f and on Φᵀp_f against the root of the excess loss, "
        "with the bound, and flatness against downstream accuracy in groups of equal loss.",
    )
    action.add_argument("folder", metavar="FOLDER", help="of `harness-ext lab run`")
    action.add_argument("--tasks", nargs="+", metavar="NAME", help="tasks of two classes (default: all that there are)")
    action.add_argument(
        "--bound",
        type=float,
        nargs="+",
        metavar="B",
        help="B, of the classifiers (default: one measured for each task)",
    )
    action.add_argument("--documents", type=int, default=2000, metavar="N", help="of a task (default: %(default)s)")
    action.add_argument("--out", metavar="DIR", help="folder of tables and figures (default: FOLDER/theory)")
    action.set_defaults(func=theory)


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
    evaluate(out, plan, matching.to_dict(), workers=args.workers)
    print_results(out, matching.to_dict())
    _print_correlations(out, out / "report")
    print(f"Tables and figures are in {out / 'report'}, result files in {out / 'results'}.")
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


def match(args: argparse.Namespace) -> int:
    """Print groups of equal loss.

    Raises:
        ValueError: If neither or both of folders and results are given, or no group can be made.
        FileNotFoundError: If there is nothing to match.
    """
    if bool(args.folders) == bool(args.results):
        raise ValueError("expected either folders with checkpoints, or --results with lm_eval's result files")
    from harness_ext.lab import match as matching
    from harness_ext.loss_groups import Z

    named: dict[str, Any] = {}
    if args.results:
        candidates = matching.from_results([Path(path) for path in args.results], metric=args.metric, task=args.task)
        named = {"quantity": args.metric.replace("_", " ")}
        named |= {"unit": "bits per byte"} if args.metric == "bits_per_byte" else {}
    else:
        candidates = matching.from_folders([Path(folder) for folder in args.folders])
    found = matching.match(
        candidates,
        tolerance=args.tolerance,
        z=Z if args.z is None else args.z,
        min_size=args.min_size,
        num_groups=args.groups,
        targets=args.targets,
        **named,
    )
    print("\n".join(found.table_lines()))
    if args.out:
        _write_json(Path(args.out), found.to_dict())
    return 0


def theory(args: argparse.Namespace) -> int:
    """Check the theory on the models of a folder.

    Raises:
        ValueError: If matplotlib is missing, or there is nothing to check.
    """
    import torch

    from harness_ext.lab.theory import check_theory

    folder = Path(args.folder).expanduser()
    out = Path(args.out).expanduser() if args.out else folder / "theory"
    torch.set_num_threads(1)
    report = check_theory(folder, bound_B=args.bound, tasks=args.tasks, num_documents=args.documents)
    for name, reason in report.left_out.items():
        print(f"left out: {name}: {reason}")
    try:
        for path in report.write(out):
            print(path)
    except ImportError as err:
        raise ValueError(
            f"{out} has the tables; the figures need matplotlib: pip install 'harness-ext[plots]'"
        ) from err
    if (folder / _GROUPS_FILE).is_file() and (folder / "results").is_dir():
        _print_correlations(folder, out)
    return 0


def evaluate(out: Path, plan: Plan, groups: Mapping[str, Any], *, workers: int | None = None) -> dict[str, Path]:
    """Run lm_eval on the models in groups, the best model and the lookup table; models that have results are left alone.

    Returns:
        Result files by the model's name.

    Raises:
        ValueError: If lm_eval fails on a model; the others have been finished.
    """
    from harness_ext.cli.evaluation import Evaluation, evaluate_all
    from harness_ext.lab.checkpoints import find_checkpoints
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
        link_data(out / "data", checkpoint.folder / "data")
        evaluations.append(
            Evaluation(
                checkpoint.name,
                checkpoint.folder.relative_to(out).as_posix(),
                # The lookup table has no trained weights, so no flatness.
                [task for task in plan.tasks if not (is_lookup and task.startswith("flatness"))],
                {"trust_remote_code": "True"} if is_lookup else {},
            )
        )
    at_a_time = _workers(workers)
    try:
        return evaluate_all(
            evaluations,
            where=out,
            out=out / "results",
            workers=at_a_time,
            threads=max(1, num_cores() // at_a_time),
        )
    except RuntimeError as err:
        raise ValueError(f"{err}\nThe other models are done; the same command tries these again.") from err


def link_data(source: Path, target: Path) -> None:
    """Give a checkpoint the data of its language, as hard links where the file system has them."""
    from harness_ext.lab.checkpoints import whole_folder

    if target.is_dir():
        return

    def link(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    with whole_folder(target) as folder:
        shutil.copytree(source, folder, copy_function=link, dirs_exist_ok=True)


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
    _write_json(out / _GROUPS_FILE, found.to_dict())
    return found


def _print_language(out: Path, plan: Plan) -> None:
    from harness_ext.lab.run import read_truth

    truth = read_truth(out)
    print(
        f"Language: {plan.language}, seed {plan.seed}; entropy {truth['entropy']['value']:.4f} nats per token. "
        f"{len(plan.runs)} runs in {out}."
    )
    for name, task in truth["tasks"].items():
        print(
            f"  {name}: Bayes accuracy {task['bayes_accuracy']['accuracy']:.1%}, commonest class {task['majority']:.1%}, label "
            f"words under p* {task['natural_ceiling']:.1%}"
        )


def print_results(out: Path, groups: Mapping[str, Any]) -> None:
    """One line a model: its loss, mean accuracies by kind of task, and traces."""
    from harness_ext.cli.evaluation import find_results
    from harness_ext.lab.result_files import read_result_file

    models = [(group["name"], model) for group in groups["groups"] for model in group["models"]]
    rows: list[list[str]] = []
    kinds: list[str] = []
    for group, model in models:
        path = find_results(out / "results", model["name"])
        if path is None:
            continue
        file = read_result_file(path)
        accuracies: dict[str, list[float]] = {}
        for task in file.results:
            measured = file.measured(task, "acc")
            if measured is not None:
                accuracies.setdefault(_kind(task), []).append(measured.value)
        kinds = kinds or list(accuracies)
        traces = []
        for trace in _TRACES:
            found = [file.measured(task, trace) for task in file.results]
            value = next((one for one in found if one is not None), None)
            traces.append("-" if value is None else f"{value.value:.1f} ± {value.stderr:.1f}")
        means = [
            f"{sum(accuracies[kind]) / len(accuracies[kind]):.1%}" if kind in accuracies else "-" for kind in kinds
        ]
        rows.append([group, model["name"], f"{model['loss']['value']:.4f}", *means, *traces])
    print_table([["group", "model", "excess", *kinds, *_TRACES], *rows])


def _kind(task: str) -> str:
    """`probe_cmean` of `probe_cmean_hmm_regime`; datasets of the lab begin with the language's kind."""
    for kind in ("hmm", "pcfg", "reviews"):
        head, found, _ = task.partition(f"_{kind}_")
        if found:
            return head
    return task


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_correlations(out: Path, folder: Path) -> None:
    """Correlate flatness with downstream accuracy in the groups of a folder; write tables and figures."""
    import numpy as np

    from harness_ext.lab import flatness_report
    from harness_ext.lab.result_files import read_result_files

    groups = json.loads((out / _GROUPS_FILE).read_text(encoding="utf-8"))
    files = read_result_files(sorted((out / "results").rglob("results_*.json")))
    rows = flatness_report.read_rows(groups, files)
    tested = flatness_report.correlate(rows, rng=np.random.default_rng(_SEED_OF_STATISTICS))
    print("\n".join(flatness_report.table_lines([one for one in tested if one.group == flatness_report.ALL_GROUPS])))
    try:
        flatness_report.write(rows, tested, folder)
    except ImportError:
        print("The figures need matplotlib: pip install 'harness-ext[plots]'")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
