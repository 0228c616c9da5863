"""The command `harness-ext`.

Each subcommand is a module of this package with `add_parser(subparsers)`, which sets `func`, a function of the parsed
arguments that returns the exit status. Modules import torch, transformers and lm_eval inside that function, so that
`--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from harness_ext import __version__

__all__ = ["main"]

COMMANDS = ("demo", "run", "tasks", "prompts", "quad", "flatness", "lab", "leaderboard", "cache")
"""Modules of this package, in the order of the help text."""

# These take another program's arguments, which argparse would reorder, abbreviate or answer (`--help`) itself.
_TAKE_ALL = ("run",)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="harness-ext",
        description="Sentence-completion tasks and feature probes for lm_eval. "
        "Once installed, `lm_eval --tasks natural_sst,probe_sst …` finds them too.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    An error in what the user gave (ValueError, KeyError, OSError) is printed as one line and makes status 2;
    `HARNESS_EXT_DEBUG=1` adds the traceback. Other exceptions are ours to mend and pass through.

    Args:
        argv: Arguments after the program's name; None for those of the process.

    Raises:
        SystemExit: For `--help`, `--version` and arguments that do not parse, as argparse does.
    """
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
        return 130  # 128 + SIGINT
    except (ValueError, KeyError, OSError) as err:
        if os.environ.get("HARNESS_EXT_DEBUG") == "1":
            traceback.print_exc()
        # str() of a KeyError is the repr of its message.
        message = err.args[0] if isinstance(err, KeyError) and err.args else err
        print(f"error: {message}", file=sys.stderr)
        return 2
    return int(status or 0)
