"""`harness-ext cache info|clear`: the states f(s) that runs have left on disk."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_ext.cli import errors
from harness_ext.wording import count

if TYPE_CHECKING:
    from harness_ext.engine.store import CacheEntry

__all__ = ["add_parser", "clear", "info"]

_FEWEST = 4
"""Characters of a fingerprint that say which model to clear; an unset variable of a script says none."""

_OFF = "The cache is off (HARNESS_EXT_CACHE=off)."


def add_parser(subparsers: Any) -> None:
    """Add `cache` with its actions `info` and `clear`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cache",
        help="show or clear the stored states of models",
        description="States f(s) are kept on disk, so that a second run computes only what is missing. "
        "HARNESS_EXT_CACHE names the folder; HARNESS_EXT_CACHE=off keeps nothing. HARNESS_EXT_CACHE_LIMIT is the size, such as "
        "50GB or off, beyond which the states that were not used for longest are removed.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("info", help="list the stored models, their sizes and the limit")
    show.set_defaults(func=info)
    delete = actions.add_parser(
        "clear",
        help="delete the stored states",
        description="Deletes what the store has made, and nothing else that is in its folder. States that a run uses stay, and "
        "the exit status is 1 then.",
    )
    delete.add_argument(
        "fingerprint", nargs="?", help="of one model, as `info` shows it, or its beginning (default: all models)"
    )
    delete.set_defaults(func=clear)


def info(args: argparse.Namespace) -> int:
    """Print the size of the store and its limit, and one line for each model; 1 if the folder cannot be read.

    Raises:
        ValueError: If `HARNESS_EXT_CACHE_LIMIT` has no size.
    """
    from harness_ext.engine import store

    root = store.cache_root()
    if root is None:
        print(_OFF)
        return 0
    limit = store.cache_limit()
    try:
        entries = store.cache_info(root)
    except OSError as err:
        errors.show(err)
        return 1
    size = _size(sum(entry.bytes for entry in entries))
    print(
        f"{root}: {count(len(entries), 'model')}, {size} of at most {_size(limit)}"
        if limit is not None
        else f"{root}: {count(len(entries), 'model')}, {size}, without a limit"
    )
    for entry in entries:
        print(f"  {entry.fingerprint}  {entry.rows:>9,} rows  {_size(entry.bytes):>9}  {_name(entry)}")
    return 0


def clear(args: argparse.Namespace) -> int:
    """Delete the states of one model, or of all; 1 if some are in use or cannot be deleted.

    Raises:
        KeyError: If no stored model, or more than one, has the fingerprint.
    """
    from harness_ext.engine import store

    root = store.cache_root()
    if root is None:
        print(_OFF)
        return 0
    try:
        fingerprint = None if args.fingerprint is None else _the_one(root, args.fingerprint)
        cleared = store.clear_cache(root, fingerprint)
    except OSError as err:
        errors.show(err)
        return 1
    print(f"{root}: freed {_size(cleared.freed)}")
    for entry in cleared.in_use:
        print(
            f"harness-ext: {entry.fingerprint} ({_name(entry)}) is in use, and its states stay. Wait for the run that uses "
            "them or stop it, and clear again.",
            file=sys.stderr,
        )
    for error in cleared.errors:
        errors.show(error)
    return 1 if cleared.in_use or cleared.errors else 0


def _the_one(root: Path, beginning: str) -> str:
    """The fingerprint of the only stored model whose fingerprint is this or begins so."""
    from harness_ext.engine import store

    if len(beginning) < _FEWEST:
        raise ValueError(
            f"expected a fingerprint or at least its first {_FEWEST} characters, as `harness-ext cache info` shows it, found "
            f"{beginning!r}. Without one, all models are cleared."
        )
    known = [entry.fingerprint for entry in store.cache_info(root)]
    hits = [name for name in known if name.startswith(beginning)]
    if len(hits) != 1:
        found = "no stored model has" if not hits else f"{len(hits)} stored models have"
        raise KeyError(f"{root}: {found} the fingerprint {beginning!r}. Stored: {', '.join(known) or 'none'}.")
    return hits[0]


def _name(entry: CacheEntry) -> str:
    return "without a readable model.json" if entry.description is None else entry.description


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
