"""The command `harness-ext`.

Each subcommand is a module of this package with `add_parser(subparsers)`, which sets `func`, a function of the parsed
arguments that returns the exit status. Modules import torch, transformers and lm_eval inside that function, so that
`--help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from harness_ext import __version__
from harness_ext.cli import errors

__all__ = ["main"]

COMMANDS = ("demo", "run", "tasks", "prompts", "quad", "flatness", "lab", "leaderboard", "cache")
"""Modules of this package, in the order of the help text."""

_SECONDS_BETWEEN_LINES = 30
"""Of a progress bar whose reader is no terminal."""

# These take another program's arguments, which argparse would reorder, abbreviate or answer (`--help`) itself.
_TAKE_ALL = ("run",)


class _Parser(argparse.ArgumentParser):
    """Refuses unknown arguments with the usage of the subcommand that they were given to; argparse leaves them to the top."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            given = next((text.partition("=")[0] for text in unknown if text.startswith("-")), None)
            near = difflib.get_close_matches(given, known, n=1) if given else []
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f" (did you mean {near[0]}?)" if near else ""))
        return found, unknown


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = _Parser(
        prog="harness-ext",
        description="Sentence-completion tasks and feature probes for lm_eval. "
        "Once installed, `lm_eval --tasks natural_sst,probe_sst …` finds them too.",
        epilog=f"`harness-ext COMMAND --help` says more. {errors.DEBUG_VARIABLE}=1 shows the traceback of an error, which is "
        "one line otherwise.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    An error in what the user gave, or one that we raised, is printed as one line and makes status 2;
    `HARNESS_EXT_DEBUG=1` adds the traceback. Other exceptions are ours to mend and pass through.

    Args:
        argv: Arguments after the program's name; None for those of the process.

    Raises:
        SystemExit: For `--help`, `--version` and arguments that do not parse, as argparse does.
    """
    if argv is None and not sys.stderr.isatty():
        # In a file each update of a progress bar is a line of its own. tqdm reads this when it is imported.
        os.environ.setdefault("TQDM_MININTERVAL", str(_SECONDS_BETWEEN_LINES))
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if arguments and arguments[0] in _TAKE_ALL:
        args = parser.parse_args(arguments[:1])
        args.arguments = arguments[1:]
    else:
        args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status = args.func(args)
        sys.stdout.flush()  # so that a closed pipe is noticed here and not at exit
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, what a shell reports for a program that the signal ended
    except KeyboardInterrupt:
        if getattr(args, "can_be_resumed", False):
            print("\nStopped. The same command goes on where it was.", file=sys.stderr)
        return 130  # 128 + SIGINT
    except Exception as err:
        if not errors.is_of_the_user(err):
            raise
        errors.show(err)
        return 2
    return int(status or 0)
