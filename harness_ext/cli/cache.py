"""`harness-ext cache info|clear`: the states f(s) that runs have left on disk."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_parser", "clear", "info"]

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
    delete = actions.add_parser("clear", help="delete the stored states")
    delete.add_argument(
        "fingerprint", nargs="?", help="of one model, as `info` shows it, or its beginning (default: all models)"
    )
    delete.set_defaults(func=clear)


def info(args: argparse.Namespace) -> int:
    """Print the size of the store and its limit, and one line for each model.

    Raises:
        ValueError: If `HARNESS_EXT_CACHE_LIMIT` has no size.
    """
    from harness_ext.engine import store

    root = store.cache_root()
    if root is None:
        print(_OFF)
        return 0
    entries, limit = store.cache_info(root), store.cache_limit()
    size = _size(sum(entry.bytes for entry in entries))
    print(
        f"{root}: {_count(len(entries), 'model')}, {size} of at most {_size(limit)}"
        if limit is not None
        else f"{root}: {_count(len(entries), 'model')}, {size}, without a limit"
    )
    for entry in entries:
        print(f"  {entry.fingerprint}  {entry.rows:>9,} rows  {_size(entry.bytes):>9}  {entry.description}")
    return 0


def clear(args: argparse.Namespace) -> int:
    """Delete the states of one model, or of all.

    Raises:
        KeyError: If no stored model, or more than one, has the fingerprint.
    """
    from harness_ext.engine import store

    root = store.cache_root()
    if root is None:
        print(_OFF)
        return 0
    fingerprint = None
    if args.fingerprint is not None:
        known = [entry.fingerprint for entry in store.cache_info(root)]
        hits = [name for name in known if name == args.fingerprint] or [
            name for name in known if name.startswith(args.fingerprint)
        ]
        if len(hits) != 1:
            found = "no stored model has" if not hits else f"{len(hits)} stored models have"
            raise KeyError(
                f"{root}: {found} the fingerprint {args.fingerprint!r}. Stored: {', '.join(known) or 'none'}."
            )
        fingerprint = hits[0]
    freed = store.clear_cache(root, fingerprint)
    print(f"{root}: freed {_size(freed)}")
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
