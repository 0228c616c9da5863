"""`harness-ext prompts list|show|check|new|words`: the templates, what would ruin their scores, and new ones."""

from __future__ import annotations

import argparse
from typing import Any

from harness_ext.cli.prompts.inspect import add_actions as add_inspect
from harness_ext.cli.prompts.new import add_actions as add_new
from harness_ext.cli.prompts.words import add_actions as add_words

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add `prompts` with its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prompts", help="list, show, check or write prompt templates, or search label words"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for add_actions in (add_inspect, add_new, add_words):
        add_actions(actions)
