"""Keeps f(s) on disk, so that a second run, or one that was killed half way, computes only what is missing.

Layout, `<root>/<model fingerprint>/<feature>/`:

    <name>.journal      what a running process has computed: one frame a batch, with the checksum of its bytes, appended as soon
                        as the batch is done. What is written survives the end of the process, so one that is killed loses
                        the batch it was in and no other; a last frame that is cut short is not read.
    <name>.safetensors  a shard: `keys` (n, 16) uint8, the hashes of the token ids, and `states` (n, d). A journal becomes a
                        shard when it is large or its process is done with it, under a temporary name that is renamed when
                        complete; a shard is never changed after. Format version and checksum are in its header.

Several processes may use one store: each adds files of its own. A file that is damaged or of another version is never served:
there is a warning, and its states are computed again. While a process uses a model's states it holds a shared lock on the
model's `model.json`, and one on each journal that it writes. Whoever gets the model's lock for itself alone knows that journals
without a lock and temporary files were left by processes that were killed, and clears up; and only then are states evicted,
least recently used first, to hold the size limit. Where files cannot be locked (Windows, some network file systems) nothing
is cleared up or evicted.

Known gap: nothing is forced to the disk, so states of the last seconds may be lost when the machine itself stops; the checksums
tell.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import struct
import time
import uuid
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError, safe_open

from harness_ext.contracts import Feature

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FORMAT_VERSION", "CacheEntry", "FeatureStore", "cache_info", "cache_limit", "cache_root", "clear_cache"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

FORMAT_VERSION = "1"
SHARD_BYTES = 2**26
"""Journals become shards at this size: few files, and little memory to read or write one."""
DEFAULT_LIMIT = 20 * 2**30
EVICT_TO = 0.9
"""Share of the size limit that an eviction leaves, so that not every batch evicts."""
DESCRIPTION_FILE = "model.json"
STATE_FILES = (".safetensors", ".journal")

FRAME_MAGIC = b"HXSTATE1"
FRAME_HEADER = struct.Struct("<8sQ16s")
"""Magic bytes with the version, number of bytes that follow, and xxh3-128 of both and of those bytes: a safetensors file."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def cache_root() -> Path | None:
    """The folder that `HARNESS_EXT_CACHE` names, else `harness_ext` in the user's cache folder; None for "off"."""
    value = os.environ.get("HARNESS_EXT_CACHE", "")
    if value.lower() == "off":
        return None
    if value:
        return Path(value).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "harness_ext"


def cache_limit() -> int | None:
    """Bytes that the store may take: `HARNESS_EXT_CACHE_LIMIT`, such as `50GB` or `512 MiB`, else 20 GiB; None for "off".

    Raises:
        ValueError: If the variable has no size.
    """
    value = os.environ.get("HARNESS_EXT_CACHE_LIMIT", "").strip()
    if not value:
        return DEFAULT_LIMIT
    if value.lower() == "off":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", value.upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"HARNESS_EXT_CACHE_LIMIT is {value!r}; expected a size such as 50GB, 512MiB or a number of bytes, or `off`."
        )
    return int(float(match[1]) * _UNITS[match[2]])


class _Rows(NamedTuple):
    """Keys (n, 16) uint8 and states (n, d)."""

    keys: np.ndarray
    states: np.ndarray


class FeatureStore:
    """The states of one model.

    Args:
        root: Folder of all models' states.
        fingerprint: Of the model; see `engine.fingerprint`.
        description: What a person calls the model; shown by `harness-ext cache info`.

    Raises:
        ValueError: If `HARNESS_EXT_CACHE_LIMIT` has no size.
    """

    def __init__(self, root: Path, fingerprint: str, *, description: str) -> None:
        self._root = root
        self._folder = root / fingerprint
        self._limit = cache_limit()
        self._room: float | None = None
        self._journals: dict[Feature, _Journal] = {}
        self._used: set[Path] = set()
        self._stopped = False
        self._lock: _Lock | None = None
        path = self._folder / DESCRIPTION_FILE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _describe(path, description)
        except OSError as err:
            if not path.exists():  # else it is a folder that can only be read, which is none of our business yet
                self._give_up(err)
        self._hold()

    def get(self, feature: Feature, keys: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray | None]:
        """Read states.

        Returns:
            A boolean mask of shape (len(keys),), and the states found, in the order of the keys, of shape
            (mask.sum(), d); None where there are none.
        """
        self._hold()
        position = {key: i for i, key in enumerate(keys)}
        found = np.zeros(len(keys), dtype=bool)
        states: np.ndarray | None = None
        seen: set[Path] = set()
        # Again until nothing is new: another process may turn a journal into a shard after it was listed.
        while not found.all() and (fresh := [path for path in self._files(feature) if path not in seen]):
            for path in fresh:
                if found.all():
                    break
                seen.add(path)
                for rows in self._read(path, wanted=position):
                    wanted = [
                        (row, position[key])
                        for row, key in enumerate(map(bytes, rows.keys))
                        if key in position and not found[position[key]]
                    ]
                    if not wanted:
                        continue
                    if states is None:
                        states = np.empty((len(keys), rows.states.shape[1]), dtype=rows.states.dtype)
                    elif (rows.states.shape[1], rows.states.dtype) != (states.shape[1], states.dtype):
                        logger.warning("%s cannot be used: its states are not like those of the other files.", path)
                        break
                    of_file, of_keys = map(list, zip(*wanted, strict=True))
                    states[of_keys] = rows.states[of_file]
                    found[of_keys] = True
                    self._mark_used(path)
        # Indexing copies, and there may be gigabytes of them.
        return found, states if states is None or found.all() else states[found]

    def add(self, feature: Feature, keys: Sequence[bytes], states: np.ndarray) -> None:
        """Keep states of shape (len(keys), d): they outlive this process from here on."""
        if self._stopped or not len(keys):
            return
        rows = _Rows(np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16), states)
        frame = _frame(rows)
        if not self._make_room(len(frame)):
            return
        try:
            self._hold()
            if feature not in self._journals:
                self._journals[feature] = _Journal(self._folder / feature.name)
                self._used.add(self._journals[feature].path)
            journal = self._journals[feature]
            journal.append(frame)
        except OSError as err:
            self._give_up(err)
            return
        if journal.size >= SHARD_BYTES:
            self._finish(feature)
            self._room = None  # other processes write, too

    def close(self) -> None:
        """Turn journals into shards. States that are added or asked for afterwards are kept and found like before."""
        try:
            for feature in list(self._journals):
                self._finish(feature)
        finally:
            for journal in self._journals.values():
                journal.close()
            self._journals.clear()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    # ------------------------------------------------------------------------------------------- files of a model

    def _files(self, feature: Feature) -> list[Path]:
        folder = self._folder / feature.name
        return sorted(path for path in folder.glob("*") if path.suffix in STATE_FILES)

    def _read(self, path: Path, *, wanted: Container[bytes]) -> Iterator[_Rows]:
        """Yield what a file has: a journal up to where it is damaged, a shard that is whole and has a wanted key."""
        try:
            if path.suffix == ".journal":
                yield from _read_journal(path)
            elif (rows := _read_shard(path, wanted)) is not None:
                yield rows
        except FileNotFoundError:
            return  # another process has made a shard of it, or evicted it, since it was listed
        except (OSError, SafetensorError, ValueError) as err:
            logger.warning(
                "%s cannot be used (%s); its states are computed again. `harness-ext cache clear` removes it.",
                path,
                err,
            )

    def _mark_used(self, path: Path) -> None:
        if path not in self._used:
            self._used.add(path)
            with contextlib.suppress(OSError):  # a store that is only read
                os.utime(path)

    def _finish(self, feature: Feature) -> None:
        """Make a shard of this process's journal; where that fails the journal stays, and is as good."""
        journal = self._journals[feature]
        self._make_shard(journal.path)
        journal.close()
        del self._journals[feature]

    def _make_shard(self, journal: Path) -> None:
        path = journal.with_suffix(".safetensors")
        try:
            # It is there if a process was killed before it could remove the journal.
            if not path.exists():
                # One that is damaged stays as it is, and serves what is before the damage.
                frames = list(_read_journal(journal))
                if frames:
                    rows = _Rows(*(np.concatenate(arrays) for arrays in zip(*frames, strict=True)))
                    metadata = {"format": FORMAT_VERSION, "checksum": _checksum(rows)}
                    with _complete_file(path) as temporary:
                        safetensors.numpy.save_file(rows._asdict(), temporary, metadata=metadata)
                    self._used.add(path)
            journal.unlink(missing_ok=True)
        except (OSError, SafetensorError, ValueError) as err:
            logger.debug("%s stays a journal: %s", journal, err)

    def _hold(self) -> None:
        """Take the model's lock, and clear up after processes that were killed if no other process uses the model."""
        if self._lock is not None or fcntl is None:
            return
        with contextlib.suppress(OSError):
            self._lock = _Lock(self._folder / DESCRIPTION_FILE)
            try:
                if self._lock.alone():
                    self._clear_up()
            finally:
                self._lock.share()

    def _clear_up(self) -> None:
        with contextlib.suppress(OSError):
            for path in self._folder.glob("*/.*.tmp"):
                path.unlink(missing_ok=True)
        for path in sorted(self._folder.glob("*/*.journal")):
            if not _is_written(path):
                self._make_shard(path)

    # --------------------------------------------------------------------------------------------------- limits

    def _give_up(self, err: Exception) -> None:
        self._stopped = True
        logger.warning(
            "States cannot be written to %s (%s). The run goes on without storing them; free some space, or set "
            "HARNESS_EXT_CACHE to another folder, or to `off`.",
            self._folder,
            err,
        )

    def _make_room(self, size: int) -> bool:
        """Whether `size` more bytes fit the limit, after an eviction if need be."""
        if self._limit is None:
            return True
        if self._room is None or self._room < size:
            self._room = self._limit - self._evict(size)
        if self._room < size:
            self._stopped = True
            logger.warning(
                "%s has reached its limit of %.3g GB: %.3g GB more do not fit beside what is in use. The run goes on without "
                "storing further states; set HARNESS_EXT_CACHE_LIMIT to a larger size, or to `off`.",
                self._root,
                self._limit / 1e9,
                size / 1e9,
            )
            return False
        self._room -= size
        return True

    def _evict(self, size: int) -> int:
        """Remove least recently used files if there is no room for `size` bytes; returns the bytes that are left."""
        assert self._limit is not None, "there is something to hold"
        files = [
            (status.st_mtime_ns, status.st_size, path)
            for path in self._root.glob("*/*/*")
            if path.suffix in STATE_FILES and (status := _status(path)) is not None
        ]
        total = sum(of_file for _, of_file, _ in files)
        # What would not fit an empty store removes nothing.
        if total + size <= self._limit or size > EVICT_TO * self._limit:
            return total
        with contextlib.ExitStack() as stack:
            if self._lock is not None:
                # Last of all, when no lock is left that another process may wait for.
                stack.callback(self._lock.share)
            unused: dict[Path, bool] = {}
            for _, of_file, path in sorted(files):
                if total + size <= EVICT_TO * self._limit:
                    break
                model = path.parent.parent
                if model not in unused:
                    unused[model] = self._is_unused(model, stack)
                if unused[model] and path not in self._used and not _is_written(path):
                    with contextlib.suppress(OSError):
                        path.unlink()
                        total -= of_file
        return total

    def _is_unused(self, model: Path, stack: contextlib.ExitStack) -> bool:
        """Whether no other process uses a model; none begins to while the stack is open."""
        if model == self._folder and self._lock is not None:
            return self._lock.alone()
        try:
            lock = stack.enter_context(contextlib.closing(_Lock(model / DESCRIPTION_FILE)))
            return lock.alone()
        except OSError:
            return False  # no folder of ours, or one whose files cannot be locked


class _Lock:
    """A lock on a file among processes; raises OSError where there is none."""

    def __init__(self, path: Path) -> None:
        if fcntl is None:
            raise OSError("this system has no file locks")
        self._process = os.getpid()
        try:
            self._descriptor = os.open(path, os.O_RDWR)
        except OSError:
            self._descriptor = os.open(path, os.O_RDONLY)

    def alone(self) -> bool:
        """Lock for this process alone if no other process has a lock; False, and no lock, otherwise."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def share(self) -> None:
        """Wait for whoever is alone, and lock together with others."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._descriptor >= 0:
            # Not by closing alone, as a child process has the descriptor, too, and not by the child: its parent has the lock.
            if os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError, TypeError):
            self.close()


class _Journal:
    """A file that frames are appended to; each is in it completely or not at all."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.journal"
        self.size = 0
        self._lock: _Lock | None = None
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        # No other process has it open, so this is at once. Where there are no locks, nothing asks for it.
        with contextlib.suppress(OSError):
            self._lock = _Lock(self.path)
            self._lock.alone()

    def append(self, frame: bytes) -> None:
        """Write a frame; raises OSError, and takes back what was written of it, where it does not fit."""
        view = memoryview(frame)
        try:
            while len(view):
                view = view[os.write(self._descriptor, view) :]
        except BaseException:  # a keyboard interrupt, too: a frame after half a frame would never be read
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
                os.lseek(self._descriptor, self.size, os.SEEK_SET)
            raise
        self.size += len(frame)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError, TypeError):
            self.close()


def _describe(path: Path, description: str) -> None:
    """Make the description of a model, or mend it. It is locked, so it is never replaced."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            is_whole = isinstance(json.loads(os.pread(descriptor, 2**20, 0)), dict)
        except ValueError:
            is_whole = False
        if not is_whole:
            content = json.dumps({"model": description}).encode()
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def _is_written(path: Path) -> bool:
    """Whether a process has the file as its journal."""
    if path.suffix != ".journal":
        return False
    with contextlib.suppress(OSError), contextlib.closing(_Lock(path)) as lock:
        return not lock.alone()
    return True


def _frame(rows: _Rows) -> bytes:
    content = safetensors.numpy.save({"keys": rows.keys, "states": np.ascontiguousarray(rows.states)})
    return FRAME_HEADER.pack(FRAME_MAGIC, len(content), _frame_checksum(content)) + content


def _frame_checksum(content: bytes) -> bytes:
    digest = xxhash.xxh3_128(struct.pack("<8sQ", FRAME_MAGIC, len(content)))
    digest.update(content)
    return digest.digest()


def _read_journal(path: Path) -> Iterator[_Rows]:
    """Yield the frames of a journal up to one that is cut short, as a process leaves it that is killed or still writes.

    Raises:
        ValueError: At a frame that is damaged; where the next one begins is not known.
    """
    with path.open("rb") as file:
        while len(header := file.read(FRAME_HEADER.size)) == FRAME_HEADER.size:
            magic, size, checksum = FRAME_HEADER.unpack(header)
            if magic != FRAME_MAGIC:
                raise ValueError(f"frame {magic!r}, expected {FRAME_MAGIC!r}")
            if size > os.fstat(file.fileno()).st_size - file.tell():
                return
            content = file.read(size)
            if checksum != _frame_checksum(content):
                raise ValueError("the checksum of a frame does not match")
            yield _checked(safetensors.numpy.load(content))


def _read_shard(path: Path, wanted: Container[bytes]) -> _Rows | None:
    """Return what a shard has; None where it has no wanted key.

    Raises:
        ValueError: If it is damaged or of another version; also SafetensorError.
    """
    with safe_open(path, framework="numpy") as shard:
        metadata = shard.metadata() or {}
        if metadata.get("format") != FORMAT_VERSION:
            raise ValueError(f"format {metadata.get('format')}, expected {FORMAT_VERSION}")
        keys = shard.get_tensor("keys")
        if not any(bytes(key) in wanted for key in keys):
            return None
        rows = _checked({"keys": keys, "states": shard.get_tensor("states")})
    if metadata.get("checksum") != _checksum(rows):
        raise ValueError("the checksum does not match")
    return rows


def _checked(arrays: dict[str, np.ndarray]) -> _Rows:
    keys, states = arrays.get("keys"), arrays.get("states")
    if keys is None or states is None:
        raise ValueError(f"has {', '.join(sorted(arrays)) or 'nothing'}, expected keys and states")
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != 16 or states.ndim != 2 or len(keys) != len(states):
        raise ValueError(f"keys {keys.dtype} {keys.shape} and states {states.shape}, expected uint8 (n, 16) and (n, d)")
    return _Rows(keys, states)


@contextlib.contextmanager
def _complete_file(path: Path) -> Iterator[Path]:
    """Give a temporary path that becomes `path` if the block succeeds and vanishes if it does not."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _checksum(rows: _Rows) -> str:
    digest = xxhash.xxh3_128(np.ascontiguousarray(rows.keys).data)
    digest.update(np.ascontiguousarray(rows.states).data)
    return digest.hexdigest()


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:  # another process has removed it
        return None


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
        rows = sum(_count_rows(path) for path in folder.glob("*/*"))
        sizes = [status.st_size for path in folder.rglob("*") if path.is_file() and (status := _status(path))]
        entries.append(CacheEntry(folder.name, description, rows, sum(sizes)))
    return entries


def _count_rows(path: Path) -> int:
    """States of a file, as far as it can be read."""
    rows = 0
    with contextlib.suppress(OSError, SafetensorError, ValueError):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="numpy") as shard:
                rows = int(shard.get_slice("keys").get_shape()[0])
        elif path.suffix == ".journal":
            for frame in _read_journal(path):
                rows += len(frame.keys)
    return rows


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
