"""Records of result files kept between builds, so that a build reads only what is new.

One SQLite file for each results folder, outside the committed tree. A record counts only if its file, and the samples and
lab.json beside it, have the size and the time of change that they had when it was made, and if its own checksum is right;
otherwise the file is read again. Deleting the cache loses time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["Cache", "Kept", "cache_folder"]


def cache_folder() -> Path | None:
    """Where caches lie: below HARNESS_EXT_CACHE, else `harness_ext` in the user's cache folder; None for "off"."""
    value = os.environ.get("HARNESS_EXT_CACHE", "")
    if value.casefold() == "off":
        return None
    if value:
        return Path(value).expanduser() / "leaderboard"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "harness_ext" / "leaderboard"


class Cache:
    """Texts by name and stamp.

    Args:
        path: The SQLite file; its folder is made. None: nothing is kept.
        version: Of what makes the texts; texts of another one are forgotten.
    """

    def __init__(self, path: Path | None, version: str) -> None:
        self._version = version
        self._connection: sqlite3.Connection | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open(path)
        except sqlite3.DatabaseError:  # not a database, or a broken one
            self.close()
            with contextlib.suppress(OSError, sqlite3.Error):
                path.unlink(missing_ok=True)
                self._open(path)
        except OSError:  # a cache that cannot be written is done without
            self.close()

    def _open(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=10)
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS texts (name TEXT PRIMARY KEY, stamp TEXT, checksum BLOB, text TEXT) WITHOUT ROWID"
        )

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _checksum(self, name: str, stamp: str, text: str) -> bytes:
        made = hashlib.blake2b(json.dumps([self._version, name, stamp]).encode(), digest_size=16)
        made.update(text.encode("utf-8", errors="surrogatepass"))
        return made.digest()

    def get(self, name: str) -> tuple[str, str] | None:
        """Stamp and text of a name; None if there is none whose checksum is right."""
        if self._connection is None:
            return None
        try:
            row = self._connection.execute("SELECT stamp, checksum, text FROM texts WHERE name = ?", (name,)).fetchone()
        except sqlite3.Error:
            return None
        if row is None or not isinstance(row[2], str) or row[1] != self._checksum(name, row[0], row[2]):
            return None
        return row[0], row[2]

    def names(self) -> list[str]:
        """All names."""
        if self._connection is None:
            return []
        try:
            return [name for (name,) in self._connection.execute("SELECT name FROM texts")]
        except sqlite3.Error:
            return []

    def update(self, changed: Mapping[str, tuple[str, str]], forgotten: Iterable[str]) -> None:
        """Keep stamp and text by name, and forget names. A failure, such as a full disk, loses the update only."""
        if self._connection is None:
            return
        rows = [(name, stamp, self._checksum(name, stamp, text), text) for name, (stamp, text) in changed.items()]
        with contextlib.suppress(sqlite3.Error), self._connection:
            self._connection.executemany("DELETE FROM texts WHERE name = ?", [(name,) for name in forgotten])
            self._connection.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?)", rows)


class Kept:
    """Texts of a cache that a build asks for, and those that it makes; what it neither asked for nor made is forgotten.

    Args:
        cache: Where they are.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._changed: dict[str, tuple[str, str]] = {}
        self._used: set[str] = set()

    def use(self, name: str) -> None:
        """Do not forget a name, though nothing asks for it."""
        self._used.add(name)

    def take(self, name: str, stamp: str) -> str | None:
        """The text of a name; None if there is none of this stamp."""
        self._used.add(name)
        known = self._changed.get(name) or self._cache.get(name)
        return known[1] if known is not None and known[0] == stamp else None

    def keep(self, name: str, stamp: str, text: str) -> None:
        """Keep a text, from `save` on."""
        self._used.add(name)
        self._changed[name] = (stamp, text)

    def save(self) -> None:
        """Write what is new, and forget what was not used."""
        self._cache.update(self._changed, [name for name in self._cache.names() if name not in self._used])
        self._changed = {}
