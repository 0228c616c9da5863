"""`harness-ext lab theory`: the bound of Saunshi, Malladi and Arora, and flatness, on the models of a lab."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness_ext.cli.lab.report import GROUPS_FILE, write_report
from harness_ext.paths import require_place

__all__ = ["add_actions", "theory"]


def add_actions(actions: Any) -> None:
    """Add `theory`."""
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


def theory(args: argparse.Namespace) -> int:
    """Check the theory on the models of a folder.

    Raises:
        ValueError: If matplotlib is missing, or there is nothing to check.
    """
    import torch

    from harness_ext.lab.theory import check_theory

    folder = Path(args.folder).expanduser()
    out = Path(args.out).expanduser() if args.out else folder / "theory"
    if folder.is_dir():  # otherwise what is missing is said below
        require_place(out, is_folder=True)
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
    if (folder / GROUPS_FILE).is_file() and (folder / "results").is_dir():
        write_report(folder, out)
    return 0
