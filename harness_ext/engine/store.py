"""Keeps f(s) on disk, so that a second run, or one that was killed half way, computes only what is missing.

Layout: `<root>/<model fingerprint>/<feature>/<shard>.safetensors`, each shard with `keys` (n, 16) uint8, the hashes of the
token ids, and `states` (n, d). A shard is written under a temporary name and renamed when complete, and is never changed
after, so several processes may use one store: each adds shards of its own. Shards carry the format version and a checksum;
one that is cut short, damaged or of another version is skipped with a warning and its states are computed again.

Known gap: nothing limits the size of the store; `harness-ext cache clear` empties it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from harness_ext.contracts import Feature

__all__ = ["FORMAT_VERSION", "CacheEntry", "FeatureStore", "cache_info", "cache_root", "clear_cache"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

FORMAT_VERSION = "1"
FLUSH_SECONDS = 1.0
"""States younger than this may be lost when the process is killed."""
SHARD_BYTES = 2**26
"""Shards of a run are merged up to this size: few files, and little memory to read or write one."""
DESCRIPTION_FILE = "model.json"


def cache_root() -> Path | None:
    """The folder that `HARNESS_EXT_CACHE` names, else `harness_ext` in the user's cache folder; None for "off"."""
    value = os.environ.get("HARNESS_EXT_CACHE", "")
    if value.lower() == "off":
        return None
    if value:
        return Path(value).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "harness_ext"


@dataclass
class _Pending:
    """States of one feature that are not on disk yet, and the shards that this process wrote."""

    keys: list[bytes] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)


class FeatureStore:
    """The states of one model.

    Args:
        root: Folder of all models' states.
        fingerprint: Of the model; see `engine.fingerprint`.
        description: What a person calls the model; shown by `harness-ext cache info`.
    """

    def __init__(self, root: Path, fingerprint: str, *, description: str) -> None:
        self._folder = root / fingerprint
        self._pending: dict[Feature, _Pending] = {}
        self._broken = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / DESCRIPTION_FILE
            if not path.exists():
                with _complete_file(path) as temporary:
                    temporary.write_text(json.dumps({"model": description}))
        except OSError as err:
            self._give_up(err)

    def get(self, feature: Feature, keys: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray | None]:
        """Read states.

        Returns:
            A boolean mask of shape (len(keys),), and the states found, in the order of the keys, of shape
            (mask.sum(), d); None where there are none.
        """
        position = {key: i for i, key in enumerate(keys)}
        found = np.zeros(len(keys), dtype=bool)
        states: np.ndarray | None = None
        for path in sorted((self._folder / feature.name).glob("*.safetensors")):
            shard = self._read_shard(path, wanted=position)
            if shard is None:
                continue
            shard_keys, shard_states = shard
            wanted = [
                (row, position[key])
                for row, key in enumerate(bytes(key) for key in shard_keys)
                if key in position and not found[position[key]]
            ]
            if not wanted:
                continue
            if states is None:
                states = np.empty((len(keys), shard_states.shape[1]), dtype=shard_states.dtype)
            rows, positions = map(list, zip(*wanted, strict=True))
            states[positions] = shard_states[rows]
            found[positions] = True
        # Indexing copies, and there may be gigabytes of them.
        return found, states if states is None or found.all() else states[found]

    def add(self, feature: Feature, keys: Sequence[bytes], states: np.ndarray) -> None:
        """Take states of shape (len(keys), d); they are on disk within `FLUSH_SECONDS` or at `close`."""
        if self._broken:
            return
        pending = self._pending.setdefault(feature, _Pending())
        if not pending.keys:
            pending.since = time.monotonic()
        pending.keys.extend(keys)
        pending.states.append(states)
        if time.monotonic() - pending.since >= FLUSH_SECONDS:
            self._flush(feature, pending)

    def close(self) -> None:
        """Write what is pending, and merge this process's small shards into one."""
        for feature, pending in self._pending.items():
            self._flush(feature, pending)
            if len(pending.written) > 1:
                self._merge(feature, pending)
        self._pending.clear()

    def _flush(self, feature: Feature, pending: _Pending) -> None:
        if not pending.keys or self._broken:
            return
        keys = np.frombuffer(b"".join(pending.keys), dtype=np.uint8).reshape(-1, 16)
        path = self._write_shard(feature, keys, np.concatenate(pending.states))
        pending.keys, pending.states = [], []
        if path is not None:
            pending.written.append(path)

    def _merge(self, feature: Feature, pending: _Pending) -> None:
        """Turn the shards of this process into few of about `SHARD_BYTES`, holding one of them in memory at a time."""
        group: list[Path] = []
        size = 0
        for path in [*pending.written, None]:
            if path is None or size >= SHARD_BYTES:
                if len(group) > 1:
                    self._merge_group(feature, group)
                group, size = [], 0
            if path is not None:
                group.append(path)
                with contextlib.suppress(OSError):
                    size += path.stat().st_size

    def _merge_group(self, feature: Feature, paths: Sequence[Path]) -> None:
        shards = [shard for path in paths if (shard := self._read_shard(path)) is not None]
        if not shards:
            return
        keys, states = (np.concatenate(arrays) for arrays in zip(*shards, strict=True))
        if self._write_shard(feature, keys, states) is not None:
            for path in paths:
                path.unlink(missing_ok=True)

    def _write_shard(self, feature: Feature, keys: np.ndarray, states: np.ndarray) -> Path | None:
        path = self._folder / feature.name / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"format": FORMAT_VERSION, "checksum": _checksum(keys, states)}
            with _complete_file(path) as temporary:
                save_file({"keys": keys, "states": np.ascontiguousarray(states)}, temporary, metadata=metadata)
        except (OSError, SafetensorError) as err:
            self._give_up(err)
            return None
        return path

    def _read_shard(
        self, path: Path, *, wanted: Container[bytes] | None = None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Keys and states of a shard; None where it is unusable or, with `wanted`, has none of those keys."""
        try:
            with safe_open(path, framework="numpy") as shard:
                metadata = shard.metadata() or {}
                if metadata.get("format") != FORMAT_VERSION:
                    raise ValueError(f"format {metadata.get('format')}, expected {FORMAT_VERSION}")
                keys = shard.get_tensor("keys")
                if wanted is not None and not any(bytes(key) in wanted for key in keys):
                    return None
                states = shard.get_tensor("states")
            if metadata.get("checksum") != _checksum(keys, states):
                raise ValueError("the checksum does not match")
        except FileNotFoundError:
            return None  # merged by another process since it was listed
        except (OSError, SafetensorError, ValueError) as err:
            logger.warning(
                "%s cannot be used (%s); its states are computed again. `harness-ext cache clear` removes it.",
                path,
                err,
            )
            return None
        return keys, states

    def _give_up(self, err: Exception) -> None:
        self._broken = True
        logger.warning(
            "States cannot be written to %s (%s). The run goes on without storing them; free some space, or set "
            "HARNESS_EXT_CACHE to another folder, or to `off`.",
            self._folder,
            err,
        )


@contextlib.contextmanager
def _complete_file(path: Path) -> Iterator[Path]:
    """Give a temporary path that becomes `path` if the block succeeds and vanishes if it does not."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _checksum(keys: np.ndarray, states: np.ndarray) -> str:
    digest = xxhash.xxh3_128(np.ascontiguousarray(keys).data)
    digest.update(np.ascontiguousarray(states).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class CacheEntry:
    """The states of one model on disk.

    Attributes:
        fingerprint: Name of its folder.
        description: Name and dtype of the model when it was first stored.
        rows: Number of states.
        bytes: Size on disk.
    """

    fingerprint: str
    description: str
    rows: int
    bytes: int


def cache_info(root: Path) -> list[CacheEntry]:
    """List the models in a store; an empty list where the folder does not exist."""
    entries = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir()) if root.is_dir() else ():
        try:
            description = str(json.loads((folder / DESCRIPTION_FILE).read_text())["model"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a folder of ours
        rows = 0
        for path in folder.glob("*/*.safetensors"):
            with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="numpy") as shard:
                rows += shard.get_slice("keys").get_shape()[0]
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        entries.append(CacheEntry(folder.name, description, rows, size))
    return entries


def clear_cache(root: Path, fingerprint: str | None = None) -> int:
    """Remove the states of one model, or of all.

    Args:
        root: Folder of the store. Only folders that `cache_info` lists are touched.
        fingerprint: Which model; None for all.

    Returns:
        Bytes freed.

    Raises:
        KeyError: If no model of the store has that fingerprint.
    """
    entries = cache_info(root)
    chosen = [entry for entry in entries if fingerprint in (None, entry.fingerprint)]
    if fingerprint is not None and not chosen:
        known = ", ".join(entry.fingerprint for entry in entries) or "none"
        raise KeyError(f"{root}: no model has the fingerprint {fingerprint!r}. Known: {known}.")
    for entry in chosen:
        shutil.rmtree(root / entry.fingerprint)
    return sum(entry.bytes for entry in chosen)
