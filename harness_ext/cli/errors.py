"""What of an error the user sees: one line for what can be put right from the command line, a traceback for faults of ours."""

from __future__ import annotations

import contextlib
import dis
import errno
import os
import sys
from collections.abc import Iterator
from types import TracebackType

__all__ = ["DEBUG_VARIABLE", "is_of_the_user", "is_raised_by_us", "message_of", "one_line_hook", "show"]

DEBUG_VARIABLE = "HARNESS_EXT_DEBUG"
"""1: the traceback is shown too."""

_RAISE = dis.opmap["RAISE_VARARGS"]

_REASONS = {
    errno.ENOENT: "no such file or folder. Check the path",
    errno.EACCES: "no permission. Change its permissions or name another path",
    errno.EPERM: "not permitted. Change its permissions or name another path",
    errno.EROFS: "on a file system that is read only. Name another path",
    errno.ENOTDIR: "expected a folder, found a file on the way. Name another path",
    errno.EISDIR: "expected a file, found a folder. Name a file",
    errno.EEXIST: "exists already. Name another path or remove it",
    errno.ENOTEMPTY: "expected an empty folder, found something in it. Name another one",
    errno.ENOSPC: "no space left on this disk. Free some, or name a path on another disk",
    errno.EDQUOT: "the quota of this disk is used up. Free some, or name a path on another disk",
    errno.ENAMETOOLONG: "a name longer than this file system takes. Shorten it",
    errno.ELOOP: "a link that leads to itself. Name the file itself",
}
"""What an error of the system means, and what to do."""


def is_raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` statement of this package made the error, with a text for whoever reads it.

    An error that a library raised, or that one of our own expressions led to (`table[key]`, `int(text)`), is none.
    """
    return _raised_in(error) == "harness_ext" and not isinstance(error, AssertionError) and bool(_first_text(error))


def is_of_the_user(error: Exception) -> bool:
    """Whether one line says enough of what a subcommand of our own raised.

    A key that some expression did not find says nothing without the place; a RuntimeError is a fault of ours.
    """
    if isinstance(error, KeyError):
        return _raised_in(error) is not None
    return isinstance(error, ValueError | OSError) or (is_raised_by_us(error) and not isinstance(error, RuntimeError))


def _raised_in(error: BaseException) -> str | None:
    """The package whose `raise` statement made the error; None for one that an expression led to."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_lasti < 0 or last.tb_frame.f_code.co_code[last.tb_lasti] != _RAISE:
        return None
    return str(last.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _first_text(error: BaseException) -> str:
    return str(error.args[0]) if error.args else ""


def message_of(error: BaseException) -> str:
    """The text of an error, without the quotes of a KeyError or the number of an OSError."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror is not None:
        # Of two files, as in a renaming, the second is the one to be made.
        path = error.filename if error.filename2 is None else error.filename2
        if not isinstance(path, str | bytes):
            return f"{_REASONS.get(error.errno, error.strerror)}."
        name = os.fsdecode(path)
        return f"{name}: {_reason(error, name)}."
    # str() of a KeyError is the repr of its message.
    return _first_text(error) if isinstance(error, KeyError) else str(error)


def _reason(error: OSError, path: str) -> str:
    above = os.path.dirname(path)
    if error.errno == errno.ENOENT and above and not os.path.isdir(above):
        return f"there is no folder {above}. Make it, or check the path"
    if error.errno == errno.EEXIST and os.path.isfile(path):
        return "expected a folder, found a file. Name another path"
    assert error.errno is not None
    return _REASONS.get(error.errno, str(error.strerror))


def show(error: BaseException) -> None:
    """Print an error as one line, after its traceback where that is asked for."""
    if is_debugging():
        sys.__excepthook__(type(error), error, error.__traceback__)
    print(f"harness-ext: error: {message_of(error)}", file=sys.stderr, flush=True)


def is_debugging() -> bool:
    """Whether the user has asked for tracebacks."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


@contextlib.contextmanager
def one_line_hook() -> Iterator[None]:
    """Let `sys.excepthook` show errors that we raised as one line, and all others as before.

    `ranks.show_first_error_only`, which a run may call, puts itself before this hook, and stays there.
    """
    before = sys.excepthook
    if getattr(before, "_shows_first_error_only", False):
        # Put before that one, this hook would show an error of every rank.
        yield
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if is_raised_by_us(error):
            show(error)
        else:
            before(kind, error, traceback)

    sys.excepthook = hook
    try:
        yield
    finally:
        if sys.excepthook is hook:
            sys.excepthook = before
