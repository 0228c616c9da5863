"""`harness-ext run …`: lm_eval with our tasks, also where Python reads no `.pth` files (PYTHONPATH, `pip --target`)."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add_parser", "run"]

# A first argument that is one of these is lm_eval's own subcommand; anything else belongs to its `run`.
_LM_EVAL_COMMANDS = ("run", "ls", "validate")


def add_parser(subparsers: Any) -> None:
    """Add `run`. Its arguments are not parsed here: `main` puts them in `args.arguments` as they came."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="lm_eval with our tasks, for installs in which `lm_eval` itself does not find them; takes its arguments",
        add_help=False,
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run lm_eval in this process on `args.arguments` and return the status that `lm_eval` itself would have.

    An error that we raised is shown as one line, any other with its traceback, as `lm_eval` shows both.

    Raises:
        FileNotFoundError: If the package has lost its task configs.
    """
    from harness_ext import plugin, resources
    from harness_ext.cli.errors import one_line_hook

    resources.task_configs_folder()  # raises, where discovery inside lm_eval would only leave our tasks out
    plugin.install()

    from lm_eval.__main__ import cli_evaluate

    arguments = list(args.arguments)
    if not arguments or arguments[0] not in _LM_EVAL_COMMANDS:
        arguments.insert(0, "run")
    saved = sys.argv
    sys.argv = ["lm-eval", *arguments]  # lm_eval's parser reads nothing else
    try:
        with one_line_hook():
            try:
                with plugin.spare_scans():
                    cli_evaluate()
            except Exception:
                # Not left to main: of several processes the hook lets one show its error, and the status is that of `lm_eval`.
                sys.excepthook(*sys.exc_info())
                return 1
    except SystemExit as done:
        if done.code is None or isinstance(done.code, int):
            return done.code or 0
        print(done.code, file=sys.stderr)
        return 1
    finally:
        sys.argv = saved
    return 0
