"""`harness-ext lab match`: groups of equal loss among checkpoints, or among any models with results of a loss."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness_ext.cli.lab.report import write_json
from harness_ext.paths import require_place

__all__ = ["add_actions", "match"]


def add_actions(actions: Any) -> None:
    """Add `match`."""
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
        "--tolerance",
        type=float,
        default=0.005,
        metavar="X",
        help="largest gap of a group, with --z standard errors of it, in the unit of the losses (default: %(default)s)",
    )
    action.add_argument(
        "--z", type=float, metavar="Z", help="standard errors of the gap that count into it (default: 1.645; 0: none)"
    )
    action.add_argument("--min-size", type=int, default=3, metavar="N", help="models of a group (default: %(default)s)")
    action.add_argument("--groups", type=int, metavar="N", help="this many groups")
    action.add_argument(
        "--targets",
        type=float,
        nargs="+",
        metavar="LOSS",
        help="the group nearest to each of these losses; the distance is told",
    )
    action.add_argument("--out", metavar="FILE", help="write the groups as JSON")
    action.set_defaults(func=match)


def match(args: argparse.Namespace) -> int:
    """Print groups of equal loss.

    Raises:
        ValueError: If neither or both of folders and results are given, or no group can be made.
        FileNotFoundError: If there is nothing to match.
    """
    if bool(args.folders) == bool(args.results):
        raise ValueError("expected either folders with checkpoints, or --results with lm_eval's result files")
    if args.out:
        require_place(Path(args.out), is_folder=False)
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
        write_json(Path(args.out), found.to_dict())
    return 0
