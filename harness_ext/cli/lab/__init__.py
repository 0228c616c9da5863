"""`harness-ext lab run|match|theory|sde-check`: families of models of equal loss on synthetic languages, made and compared."""

from __future__ import annotations

import argparse
from typing import Any

from harness_ext.cli.lab.match import add_actions as add_match
from harness_ext.cli.lab.run import add_actions as add_run
from harness_ext.cli.lab.sde_check import add_actions as add_sde_check
from harness_ext.cli.lab.theory import add_actions as add_theory

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add `lab` with its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lab",
        help="make families of loss-matched models on synthetic languages, and compare them",
        description="Trains small models on languages of which every probability is known, chooses those of equal excess "
        "loss, evaluates them by lm_eval, and checks the theory of the papers on them.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for add_actions in (add_run, add_match, add_theory, add_sde_check):
        add_actions(actions)
