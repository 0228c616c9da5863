"""What an earlier build wrote into a folder, so that the next one makes only what has changed.

It lies in a cache of its own for each folder (`cache`). A file counts as written if it has the size and the time of change that
it had then, and is to have the content that it was to have then.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness_ext.leaderboard.cache import Cache, Kept, cache_folder

__all__ = ["Made", "replace"]

_FORGOTTEN_AFTER = 30 * 86_400
"""Seconds after which what is known of a folder that nothing was written into is deleted."""

_FILES = "files"


class Made:
    """What is known of a folder.

    Args:
        folder: Where files are written.
        stamps: Of `contracts.Board`; names without one are made anew.
        cache: Of earlier builds into this folder; None: nothing is known.
    """

    def __init__(self, folder: Path, stamps: Mapping[str, str] | None = None, cache: Cache | None = None) -> None:
        self._folder, self._stamps = folder, stamps or {}
        self._cache = cache or Cache(None, "")
        self._kept = Kept(self._cache)
        known = self._kept.take(_FILES, "")
        self._known: dict[str, list[Any]] = {} if known is None else json.loads(known)
        self._files: dict[str, list[Any]] = {}

    @classmethod
    def of(cls, folder: Path, stamps: Mapping[str, str]) -> Made:
        """What the user's cache knows of a folder."""
        below = cache_folder()
        if below is None:
            return cls(folder, stamps)
        digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        for path in below.glob("written-*.sqlite"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _FORGOTTEN_AFTER:
                    path.unlink()
        return cls(folder, stamps, Cache(below / f"written-{digest}.sqlite", "1"))

    def stamp(self, name: str) -> str | None:
        """What changes whenever a page or the lines of a column do."""
        return self._stamps.get(name)

    def has(self, name: str, stamp: str | None) -> bool:
        """Whether a file is as it was written when it had this stamp."""
        known = self._known.get(name)
        if stamp is None or known is None or known[0] != stamp:
            return False
        try:
            status = (self._folder / name).stat()
        except OSError:
            return False
        if known[1:] != [status.st_size, status.st_mtime_ns]:
            return False
        self._files[name] = known
        return True

    def wrote(self, name: str, stamp: str | None) -> None:
        """Remember a file that has just been written."""
        if stamp is not None:
            status = (self._folder / name).stat()
            self._files[name] = [stamp, status.st_size, status.st_mtime_ns]

    def text(self, name: str, stamp: str | None, make: Callable[[], str]) -> str:
        """A text, taken or made."""
        found = None if stamp is None else self._kept.take(name, stamp)
        if found is None:
            found = make()
            if stamp is not None:
                self._kept.keep(name, stamp, found)
        return found

    def data(self, name: str, stamp: str | None, make: Callable[[], bytes]) -> bytes:
        """Bytes, taken or made."""
        return base64.b64decode(self.text(name, stamp, lambda: base64.b64encode(make()).decode("ascii")))

    def save(self) -> None:
        """Keep all this for the next build."""
        if self._files != self._known:
            self._kept.keep(_FILES, "", json.dumps(self._files))
        self._kept.save()
        self._cache.close()


def replace(path: Path, content: bytes) -> bool:
    """Write a file unless it has these bytes; its folder is made. Whether it was written."""
    try:
        if path.stat().st_size == len(content) and path.read_bytes() == content:
            return False
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return True
