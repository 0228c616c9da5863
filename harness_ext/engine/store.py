"""Keeps f(s) on disk, so that a second run, or one that was killed half way, computes only what is missing.

Layout, `<root>/<model fingerprint>/`:

    model.json                      what a person calls the model; also what processes lock.
    <feature>/<name>.journal        what a running process has computed: one frame a batch, appended as soon as the batch is
                                    done. What is written survives the end of the process, so one that is killed loses the
                                    batch it was in and no other.
    <feature>/<name>.safetensors    a shard: `keys` (n, 16) uint8, the hashes of the token ids, and `states` (n, d). A journal
                                    becomes a shard when it is large or its process is done with it, under a temporary name
                                    that is renamed when complete; a shard is never changed after. Format version and checksum
                                    are in its header.

A frame is a header with a checksum of its own (`FRAME_HEADER`) and a safetensors file. After bytes that are damaged a journal
is read on from the next header, which its magic bytes and its checksum tell from states. A last frame that is cut short, as a
process leaves it that is killed or still writes, is not read and is no damage.

What is damaged or of another version is never served: there is one warning a file, and its states are computed again.

Several processes may use one store: each adds files of its own. While a process uses a model's states it holds a shared lock on
`model.json`, and one on each journal that it writes. Whoever gets the model's lock for itself alone knows that no other process
uses the model. Only then

- is `model.json` written, or replaced where it cannot be read;
- do journals without a lock and temporary files, which were left by processes that were killed, become shards and go;
- are states evicted, least recently used first, to hold the size limit, or removed by `harness-ext cache clear`.

As `model.json` may be replaced or removed between the moment that it is opened and the moment that it is locked, a lock counts
only if the file at that path is the locked one still; else it is taken anew. Where files cannot be locked (Windows, some
network file systems) nothing is cleared up or evicted, and `cache clear` removes what it is told to.

A folder is the store's own if its name is a fingerprint, and a file if the store gives such names (`OWN_STATES`,
`OWN_DESCRIPTION`). No other is counted, evicted or removed, whatever folder the user has named.

Known gap: nothing is forced to the disk, so states of the last seconds may be lost when the machine itself stops; the checksums
tell.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import struct
import time
import uuid
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError, safe_open

from harness_ext.contracts import Feature

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "FORMAT_VERSION",
    "CacheEntry",
    "Cleared",
    "FeatureStore",
    "cache_info",
    "cache_limit",
    "cache_root",
    "clear_cache",
]

logger = logging.getLogger("lm_eval.harness_ext.engine")

FORMAT_VERSION = "1"
SHARD_BYTES = 2**26
"""Journals become shards at this size: few files, and little memory to read or write one."""
DEFAULT_LIMIT = 20 * 2**30
EVICT_TO = 0.9
"""Share of the size limit that an eviction leaves, so that not every batch evicts."""
DESCRIPTION_FILE = "model.json"
STATE_FILES = (".safetensors", ".journal")

FINGERPRINT = re.compile(r"[0-9a-f]{32}")
"""Names of models' folders; see `engine.fingerprint`."""
OWN_STATES = re.compile(
    r"\d{20}-[0-9a-f]{8}\.(journal|safetensors)|\.\d{20}-[0-9a-f]{8}\.safetensors\.[0-9a-f]{8}\.tmp"
)
"""Files in the folder of a feature: journals, shards, and shards that are not complete."""
OWN_DESCRIPTION = re.compile(r"model\.json|\.model\.json\.[0-9a-f]{8}\.tmp")
"""Files in the folder of a model."""

FRAME_MAGIC = b"HXSTATE2"
FRAME_HEADER = struct.Struct("<8sQ16s8s")
"""Magic bytes with the version, number of bytes that follow, xxh3-128 of those, which are a safetensors file, and xxh3-64 of
the header up to here."""
SCAN_BYTES = 2**20
"""Bytes that are read at once to find the next frame."""

LOCK_TRIES = 10
"""How often a lock is taken anew: each time another process has replaced or removed the file in between."""
UNLOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of a file system that has no locks."""

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
        self._warned: set[Path] = set()
        self._stopped = False
        self._lock: _Lock | None = None
        self._description = description
        try:
            self._make_folder()
        except OSError as err:
            self._give_up(err)
        self._hold()

    def get(self, feature: Feature, keys: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray | None]:
        """Read states.

        Returns:
            A boolean mask of shape (len(keys),), and the states found, in the order of the keys, of shape
            (mask.sum(), d); None where there are none.
        """
        found = np.zeros(len(keys), dtype=bool)
        states: np.ndarray | None = None
        for of_file, rows, places in self._matches(feature, keys, found):
            if states is None:
                states = np.empty((len(keys), of_file.shape[1]), dtype=of_file.dtype)
            states[places] = of_file[rows]
        # Indexing copies, and there may be gigabytes of them.
        return found, states if states is None or found.all() else states[found]

    def has(self, feature: Feature, keys: Sequence[bytes]) -> np.ndarray:
        """The mask of `get`, for which states are read and checked file by file, and none is kept."""
        found = np.zeros(len(keys), dtype=bool)
        for _ in self._matches(feature, keys, found):
            pass
        return found

    def _matches(
        self, feature: Feature, keys: Sequence[bytes], found: np.ndarray
    ) -> Iterator[tuple[np.ndarray, list[int], list[int]]]:
        """Yield the states (n, d) of files, the rows of those that are asked for, and the places of these among the keys.

        Sets `found` at those places. All states have one width and dtype.
        """
        self._hold()
        position = {key: i for i, key in enumerate(keys)}
        like: tuple[int, np.dtype] | None = None
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
                    if like is None:
                        like = (rows.states.shape[1], rows.states.dtype)
                    elif (rows.states.shape[1], rows.states.dtype) != like:
                        self._warn(path, "its states are not like those of the other files")
                        break
                    of_file, of_keys = map(list, zip(*wanted, strict=True))
                    found[of_keys] = True
                    self._mark_used(path)
                    yield rows.states, of_file, of_keys

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
        return sorted(
            path for path in folder.glob("*") if path.suffix in STATE_FILES and OWN_STATES.fullmatch(path.name)
        )

    def _read(self, path: Path, *, wanted: Container[bytes]) -> Iterator[_Rows]:
        """Yield what a file has: the whole frames of a journal, a shard that is whole and has a wanted key."""
        try:
            if path.suffix == ".journal":
                yield from _read_journal(path)
            elif (rows := _read_shard(path, wanted)) is not None:
                yield rows
        except FileNotFoundError:
            return  # another process has made a shard of it, or evicted it, since it was listed
        except (OSError, SafetensorError, ValueError) as err:
            self._warn(path, str(err))

    def _warn(self, path: Path, reason: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            logger.warning(
                "%s cannot be used (%s); such states are computed again. `harness-ext cache clear` removes the file.",
                path,
                reason,
            )

    def _mark_used(self, path: Path) -> None:
        if path not in self._used:
            self._used.add(path)
            with contextlib.suppress(OSError):  # a store that is only read
                os.utime(path)

    def _finish(self, feature: Feature) -> None:
        """Make a shard of this process's journal; where that fails the journal stays, and is as good."""
        journal = self._journals[feature]
        if os.name == "nt":  # where no file that is open can be removed
            journal.close()
        self._make_shard(journal.path)
        journal.close()
        del self._journals[feature]

    def _make_shard(self, journal: Path) -> None:
        path = journal.with_suffix(".safetensors")
        try:
            # It is there if a process was killed before it could remove the journal.
            if not path.exists():
                # One that is damaged stays as it is, and serves what is before and after the damage.
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

    def _make_folder(self) -> None:
        """Make the model's folder and the file that is locked, empty at first; raises OSError where there is none then."""
        path = self._folder / DESCRIPTION_FILE
        for tries_left in reversed(range(LOCK_TRIES)):
            if path.exists():
                return
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                _touch(path)
                return
            except FileNotFoundError:  # the folder was removed in between
                if not tries_left:
                    raise

    def _hold(self) -> None:
        """Share the model's lock. If no other process uses the model, describe it and clear up after those that were killed."""
        path = self._folder / DESCRIPTION_FILE
        for _ in range(LOCK_TRIES):
            if self._lock is not None:
                return
            with contextlib.suppress(OSError):
                self._make_folder()
            try:
                lock = _Lock(path)
                if lock.alone():
                    if self._describe():
                        lock.close()  # that of the file that was replaced
                        continue
                    self._clear_up()
                lock.share()
            except FileNotFoundError:
                continue  # removed since it was made
            except OSError as err:
                if err.errno in UNLOCKABLE:
                    self._describe()
                return
            if lock.is_current():
                self._lock = lock
            else:
                lock.close()

    def _share_again(self) -> None:
        """Share the model's lock after it was asked for alone, which gives it up for a moment."""
        if self._lock is None:
            return
        self._lock.share()
        if not self._lock.is_current():
            self._lock.close()
            self._lock = None
            self._hold()

    def _describe(self) -> bool:
        """Replace a description that is not whole; whether there is a new file.

        Under the model's lock for this process alone, or where there are no locks: whoever locks a file that was replaced has
        a lock that nobody sees.
        """
        path = self._folder / DESCRIPTION_FILE
        try:
            if _description_of(path.read_bytes()) is not None:
                return False
            with _complete_file(path) as temporary:
                temporary.write_text(json.dumps({"model": self._description}))
        except OSError:  # a store that can only be read, or a file that cannot
            return False
        return True

    def _clear_up(self) -> None:
        try:
            own = sorted(_own_files(self._folder))
        except OSError:
            return
        for path in own:
            if path.suffix == ".tmp":
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            elif path.suffix == ".journal" and not _is_written(path):
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
            for path in _own_states(self._root)
            if (status := _status(path)) is not None
        ]
        total = sum(of_file for _, of_file, _ in files)
        # What would not fit an empty store removes nothing.
        if total + size <= self._limit or size > EVICT_TO * self._limit:
            return total
        with contextlib.ExitStack() as stack:
            if self._lock is not None:
                # Last of all, when no lock is left that another process may wait for.
                stack.callback(self._share_again)
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
        try:
            if model == self._folder and self._lock is not None:
                return self._lock.alone()
            lock = stack.enter_context(contextlib.closing(_Lock(model / DESCRIPTION_FILE)))
            return lock.alone()
        except OSError:
            return False  # no folder of ours, or one whose files cannot be locked


class _Lock:
    """A lock on a file among processes. All methods but `close` raise OSError where there are none."""

    def __init__(self, path: Path) -> None:
        if fcntl is None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path))
        self._path, self._process = path, os.getpid()
        try:
            self._descriptor = os.open(path, os.O_RDWR)
        except PermissionError:
            self._descriptor = os.open(path, os.O_RDONLY)

    def alone(self) -> bool:
        """Lock for this process alone if no other process has a lock; False, and no lock, otherwise."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        if not self.is_current():
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            return False
        return True

    def share(self) -> None:
        """Wait for whoever is alone, and lock together with others."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def is_current(self) -> bool:
        """Whether the path still names the file that was opened; a lock on another is one that nobody sees."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

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
        except BaseException:  # a keyboard interrupt, too: half a frame with another after it is damage
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


def _touch(path: Path) -> None:
    """Make an empty file where there is none."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))


def _description_of(content: bytes) -> str | None:
    """What a person calls the model, from the content of its `model.json`; None where that does not say."""
    try:
        description = json.loads(content)["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return description if isinstance(description, str) else None


def _is_written(path: Path) -> bool:
    """Whether a process has the file as its journal."""
    if path.suffix != ".journal":
        return False
    with contextlib.suppress(OSError), contextlib.closing(_Lock(path)) as lock:
        return not lock.alone()
    return True


def _frame(rows: _Rows) -> bytes:
    content = safetensors.numpy.save({"keys": rows.keys, "states": np.ascontiguousarray(rows.states)})
    header = FRAME_HEADER.pack(FRAME_MAGIC, len(content), xxhash.xxh3_128(content).digest(), bytes(8))
    return header[:-8] + xxhash.xxh3_64(header[:-8]).digest() + content


def _read_journal(path: Path) -> Iterator[_Rows]:
    """Yield the frames of a journal that are whole, those after damaged bytes among them.

    A last frame that is cut short is no damage.

    Raises:
        ValueError: After the last frame, if there are bytes that cannot be read.
    """
    unread = place = 0
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size  # what its process writes from now on is not looked at
        while place < end:
            header = _frame_header(file, place)
            if header is None:
                # Bytes that may be the beginning of a header.
                begun = _bytes_at(file, place, len(FRAME_MAGIC))
                is_cut = end - place < FRAME_HEADER.size and FRAME_MAGIC.startswith(begun)
            else:
                is_cut = header.stop > end
                if not is_cut and (rows := _frame_rows(_bytes_at(file, header.start, header.size), header)):
                    yield rows
                    place = header.stop
                    continue
            following = _next_frame(file, place + 1, end)
            if following is None and is_cut:
                break
            unread += (end if following is None else following) - place
            place = end if following is None else following
    if unread:
        raise ValueError(f"{unread:,} of {end:,} bytes are damaged, or of another format than {FRAME_MAGIC.decode()}")


class _FrameHeader(NamedTuple):
    """Where the bytes after the header begin, how many they are, and their xxh3-128."""

    start: int
    size: int
    checksum: bytes

    @property
    def stop(self) -> int:
        return self.start + self.size


def _bytes_at(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _frame_header(file: BinaryIO, place: int) -> _FrameHeader | None:
    """The header at a place of a journal; None where there is none that is whole."""
    raw = _bytes_at(file, place, FRAME_HEADER.size)
    if len(raw) < FRAME_HEADER.size:
        return None
    magic, size, checksum, of_header = FRAME_HEADER.unpack(raw)
    if magic != FRAME_MAGIC or of_header != xxhash.xxh3_64(raw[:-8]).digest():
        return None
    return _FrameHeader(place + FRAME_HEADER.size, size, checksum)


def _frame_rows(content: bytes, header: _FrameHeader) -> _Rows | None:
    """What a frame has; None where it is damaged."""
    if header.checksum != xxhash.xxh3_128(content).digest():
        return None
    try:
        return _checked(safetensors.numpy.load(content))
    except (SafetensorError, ValueError):
        return None


def _next_frame(file: BinaryIO, place: int, end: int) -> int | None:
    """Where the next header begins, from a place on; None where there is none.

    The size that a header gives is not relied on, since bytes may be missing as well as wrong.
    """
    while len(block := _bytes_at(file, place, min(SCAN_BYTES, end - place))) >= len(FRAME_MAGIC):
        found = block.find(FRAME_MAGIC)
        if found < 0:
            place += len(block) - len(FRAME_MAGIC) + 1
        elif _frame_header(file, place + found) is not None:
            return place + found
        else:
            place += found + 1
    return None


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


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, in the order of names; an empty list where it does not exist. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def _models(root: Path) -> list[Path]:
    """Folders of a store whose names are fingerprints.

    Raises:
        NotADirectoryError: If the store's folder is a file.
        OSError: If it cannot be read.
    """
    try:
        return [Path(entry.path) for entry in _scan(root) if FINGERPRINT.fullmatch(entry.name) and entry.is_dir()]
    except NotADirectoryError as err:
        raise NotADirectoryError(
            f"{root}: expected the folder of the store, found a file. Set HARNESS_EXT_CACHE to a folder, or unset it."
        ) from err


def _own_files(model: Path) -> list[Path]:
    """Files in a model's folder that the store has made, by their names; raises OSError."""
    entries = _scan(model)
    own = [entry for entry in entries if OWN_DESCRIPTION.fullmatch(entry.name)]
    for folder in entries:
        if folder.is_dir():
            own += [entry for entry in _scan(Path(folder.path)) if OWN_STATES.fullmatch(entry.name)]
    return [Path(entry.path) for entry in own if entry.is_file(follow_symlinks=False)]


def _own_states(root: Path) -> Iterator[Path]:
    """Yield journals and shards of all models, as far as their folders can be read."""
    with contextlib.suppress(OSError):
        for model in _models(root):
            with contextlib.suppress(OSError):
                yield from (path for path in _own_files(model) if path.suffix in STATE_FILES)


@dataclass(frozen=True)
class CacheEntry:
    """The states of one model on disk.

    Attributes:
        fingerprint: Name of its folder.
        description: Name and dtype of the model when it was first stored; None where its `model.json` cannot be read.
        rows: Number of states.
        bytes: Size on disk of the files that the store has made.
    """

    fingerprint: str
    description: str | None
    rows: int
    bytes: int


def cache_info(root: Path) -> list[CacheEntry]:
    """List the models in a store; an empty list where the folder does not exist.

    Raises:
        OSError: If the folder, or that of a model, is a file or cannot be read.
    """
    entries = []
    for model in _models(root):
        files = _own_files(model)
        if not files:
            continue  # not a folder of ours
        description = None
        with contextlib.suppress(OSError):
            description = _description_of((model / DESCRIPTION_FILE).read_bytes())
        sizes = [status.st_size for path in files if (status := _status(path)) is not None]
        entries.append(CacheEntry(model.name, description, sum(map(_count_rows, files)), sum(sizes)))
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


@dataclass(frozen=True)
class Cleared:
    """What `clear_cache` has done.

    Attributes:
        freed: Bytes.
        in_use: Models that a process uses: nothing of these was removed.
        errors: Of the system, one for each model of which not everything could be removed.
    """

    freed: int
    in_use: tuple[CacheEntry, ...]
    errors: tuple[OSError, ...]


def clear_cache(root: Path, fingerprint: str | None = None) -> Cleared:
    """Remove the states of one model, or of all, but of those that a process uses.

    Where files cannot be locked, nothing says whether one does.

    Args:
        root: Folder of the store. Only what the store has made is removed; see `OWN_STATES`.
        fingerprint: Which model; None for all.

    Raises:
        KeyError: If no model of the store has that fingerprint.
        OSError: As `cache_info`.
    """
    entries = cache_info(root)
    chosen = [entry for entry in entries if fingerprint in (None, entry.fingerprint)]
    if fingerprint is not None and not chosen:
        known = ", ".join(entry.fingerprint for entry in entries) or "none"
        raise KeyError(f"{root}: no model has the fingerprint {fingerprint!r}. Known: {known}.")
    freed = 0
    in_use: list[CacheEntry] = []
    errors: list[OSError] = []
    for entry in chosen:
        try:
            for size in _remove(root / entry.fingerprint):
                freed += size
        except _InUseError:
            in_use.append(entry)
        except OSError as err:
            errors.append(err)
    return Cleared(freed, tuple(in_use), tuple(errors))


class _InUseError(Exception):
    """Another process uses a model's states."""


def _remove(model: Path) -> Iterator[int]:
    """Remove what the store has made in a model's folder, and the folder if that is all; yields the bytes of each file.

    Raises:
        _InUseError: If a process uses the model; nothing was removed then.
        OSError: If a file cannot be removed, or it is not known whether a process uses the model.
    """
    description = model / DESCRIPTION_FILE
    with contextlib.ExitStack() as stack:
        try:
            if fcntl is not None and not description.exists():
                _touch(description)  # so that no process begins to use the model in the meantime
            lock = stack.enter_context(contextlib.closing(_Lock(description)))
            # A process that evicts gives up the model's lock for a moment, but not those of its journals.
            if not lock.alone() or any(map(_is_written, _own_files(model))):
                raise _InUseError
        except FileNotFoundError:
            return  # another process has removed the folder
        except OSError as err:
            if err.errno not in UNLOCKABLE:
                raise OSError(err.errno, err.strerror, str(err.filename or description)) from err
        files = _own_files(model)
        # The description last: what is left of a model has a name.
        for path in sorted(files, key=lambda path: path == description):
            if (status := _status(path)) is not None:
                path.unlink(missing_ok=True)
                yield status.st_size
        for folder in [*(Path(entry.path) for entry in _scan(model)), model]:
            with contextlib.suppress(OSError):  # a file, or not empty
                folder.rmdir()
