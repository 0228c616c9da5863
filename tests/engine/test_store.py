from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer

from harness_ext.contracts import CONDITIONAL_MEAN, Feature, PromptRequest, Span
from harness_ext.engine import store as store_module
from harness_ext.engine.answer import answer_requests
from harness_ext.engine.fingerprint import model_fingerprint
from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.store import FeatureStore, cache_info, cache_limit, cache_root, clear_cache
from harness_ext.engine.tokens import PromptEncoder

F = Feature()
KEYS = [bytes([i]) * 16 for i in range(6)]
STATES = np.arange(24, dtype=np.float32).reshape(6, 4)


def open_store(root: Path, fingerprint: str = "a" * 32) -> FeatureStore:
    return FeatureStore(root, fingerprint, description="tiny (float32)")


def shards(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def journals(root: Path) -> list[Path]:
    return sorted(root.rglob("*.journal"))


def fill(root: Path, rows: slice = slice(0, 4), fingerprint: str = "a" * 32) -> None:
    store = open_store(root, fingerprint)
    store.add(F, KEYS[rows], STATES[rows])
    store.close()


def leave_journal(root: Path, batches: int = 3) -> Path:
    """What a process leaves that is killed after some batches of two states."""
    store = open_store(root)
    for batch in range(batches):
        store.add(F, KEYS[2 * batch : 2 * batch + 2], STATES[2 * batch : 2 * batch + 2])
    (path,) = journals(root)
    content = path.read_bytes()
    store.close()
    for shard in shards(root):
        shard.unlink()
    path.write_bytes(content)
    return path


def found_in(root: Path, keys: list[bytes] = KEYS) -> list[int]:
    """Which of the keys a new store finds; what it finds must be right."""
    store = open_store(root)
    found, states = store.get(F, keys)
    store.close()
    places = np.flatnonzero(found).tolist()
    assert states is None if not places else np.array_equal(states, STATES[places])
    return places


def test_what_is_stored_is_found_in_any_order(tmp_path: Path) -> None:
    fill(tmp_path)
    found, states = open_store(tmp_path).get(F, [KEYS[5], KEYS[2], KEYS[0]])
    assert found.tolist() == [False, True, True]
    assert np.array_equal(states, STATES[[2, 0]])


@pytest.mark.parametrize("other", [Feature(1), Feature(pooling="mean"), Feature(mixture=CONDITIONAL_MEAN)])
def test_another_feature_or_model_never_hits(tmp_path: Path, other: Feature) -> None:
    fill(tmp_path)
    assert not open_store(tmp_path).get(other, KEYS)[0].any()
    assert not open_store(tmp_path, "b" * 32).get(F, KEYS)[0].any()


def test_many_batches_become_one_shard(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for key, state in zip(KEYS, STATES, strict=True):
        store.add(F, [key], state[np.newaxis])
    assert not shards(tmp_path)
    store.close()
    assert len(shards(tmp_path)) == 1
    assert not journals(tmp_path)
    assert found_in(tmp_path) == list(range(6))


def test_journals_become_shards_at_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARD_BYTES", 300)
    store = open_store(tmp_path)
    for key, state in zip(KEYS, STATES, strict=True):
        store.add(F, [key], state[np.newaxis])
        assert sum(path.stat().st_size for path in journals(tmp_path)) < 300
    store.close()
    assert len(shards(tmp_path)) > 1
    assert found_in(tmp_path) == list(range(6))


def test_what_was_added_is_found_at_once_by_this_and_other_processes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add(F, KEYS[:2], STATES[:2])
    assert store.get(F, KEYS)[0].sum() == 2
    assert found_in(tmp_path) == [0, 1]
    store.add(F, KEYS[2:4], STATES[2:4])
    store.close()
    store.add(F, KEYS[4:], STATES[4:])  # after it was closed
    assert store.get(F, KEYS)[0].all()


# ------------------------------------------------------------------------------------------------------ damage


def other_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"format":"1"', b'"format":"9"').replace(b"HXSTATE2", b"HXSTATE1"))


def no_safetensors(path: Path) -> None:
    path.write_bytes(b"\x80\x04not what it says, and long enough for the header of a frame")


@pytest.mark.parametrize("damage", [other_version, no_safetensors])
@pytest.mark.parametrize("kind", [".safetensors", ".journal"])
def test_a_file_that_is_not_ours_is_skipped_with_a_warning(
    tmp_path: Path, damage: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == ".journal":
        damage(leave_journal(tmp_path, 2))
    else:
        fill(tmp_path)
        damage(shards(tmp_path)[0])
    fill(tmp_path, slice(4, 6))
    assert found_in(tmp_path) == [4, 5]
    assert "cannot be used" in caplog.text
    assert "cache clear" in caplog.text


def test_every_flipped_bit_of_a_shard_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Header length, header, keys and states: what is served is right, whichever bit is wrong."""
    fill(tmp_path)
    (path,) = shards(tmp_path)
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    unseen = []
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        caplog.clear()
        if found_in(tmp_path) == [0, 1, 2, 3]:
            unseen.append(bit)
        elif not caplog.records:
            assert bit // 8 >= header_end  # a key that nobody asks for
    # The padding of the header says nothing; there is no other bit without a meaning.
    assert {content[bit // 8] for bit in unseen} <= {ord(" ")}


def write_journal(path: Path, content: bytes) -> None:
    """Make this the only file with states."""
    for left in [*shards(path.parent), *journals(path.parent)]:
        left.unlink()
    path.write_bytes(content)


def read_journal(path: Path) -> tuple[list[Any], str]:
    """The frames that are served, and what is said of the others."""
    served = []
    try:
        for rows in store_module._read_journal(path):
            served.append(rows)
    except ValueError as err:
        return served, str(err)
    return served, ""


def flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_every_flipped_bit_of_a_journal_costs_its_frame_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Magic, size, both checksums, and every byte of what a frame has: there is no bit without a meaning."""
    path = leave_journal(tmp_path)
    content = path.read_bytes()
    frame = len(content) // 3
    for bit in range(8 * len(content)):
        write_journal(path, flipped(content, bit))
        caplog.clear()
        place = bit // 8 // frame
        assert found_in(tmp_path) == [row for row in range(6) if row // 2 != place]
        (record,) = caplog.records
        assert str(path) in record.getMessage()
        assert f"({frame:,} of {len(content):,} bytes are damaged" in record.getMessage()


def test_a_flipped_bit_of_a_frame_that_is_cut_short_costs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left of the last frame is not served, so its bits matter only where they make it look like something else."""
    path = leave_journal(tmp_path)
    content = path.read_bytes()
    frame = len(content) // 3
    header = store_module.FRAME_HEADER.size
    for length in (3, 8, header - 1, header, header + 1, frame - 1):
        for bit in range(8 * min(length, header + 4)):
            write_journal(path, flipped(content[: 2 * frame + length], 8 * 2 * frame + bit))
            caplog.clear()
            assert found_in(tmp_path) == [0, 1, 2, 3]
            # A flip after the magic bytes of half a header, or after a header, changes nothing that is read.
            is_seen = bit < 8 * (header if length >= header else len(store_module.FRAME_MAGIC))
            assert len(caplog.records) == is_seen


rows_of_frames = st.lists(st.integers(1, 3), min_size=1, max_size=5)


@given(data=st.data(), rows=rows_of_frames)
@settings(max_examples=150, deadline=None)
def test_frames_that_damage_did_not_touch_are_served(data: st.DataObject, rows: list[int]) -> None:
    """Flipped bits, overwritten, missing and added bytes, several at once, in frames of several sizes."""
    written = []
    for count in rows:
        start = sum(len(frame.keys) for frame in written)
        keys = np.arange(16 * start, 16 * (start + count), dtype=np.uint8).reshape(count, 16)
        written.append(store_module._Rows(keys, np.full((count, 3), start, dtype=np.float32)))
    frames = [store_module._frame(rows) for rows in written]
    kinds = st.sampled_from(["flip", "overwrite", "remove", "add", "nothing"])
    damaged = []
    for frame in frames:
        kind = data.draw(kinds)
        at = data.draw(st.integers(0, len(frame) - 1))
        some = data.draw(st.binary(min_size=1, max_size=60))
        damaged.append(
            {
                "flip": flipped(frame, 8 * at + data.draw(st.integers(0, 7))),
                "overwrite": frame[:at] + some + frame[at + len(some) :],
                "remove": frame[:at] + frame[at + len(some) :],
                "add": frame[:at] + some + frame[at:],
                "nothing": frame,
            }[kind]
        )
    whole = [place for place, (one, other) in enumerate(zip(frames, damaged, strict=True)) if one in other]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.journal"
        path.write_bytes(b"".join(damaged))
        served, reason = read_journal(path)
    assert len(served) == len(whole)
    for place, found in zip(whole, served, strict=True):
        assert np.array_equal(found.keys, written[place].keys)
        assert np.array_equal(found.states, written[place].states)
    total = sum(map(len, damaged))
    unread = total - sum(len(frames[place]) for place in whole)
    header = store_module.FRAME_HEADER.size
    if len(damaged[-1]) < len(frames[-1]) and damaged[-1][:header] == frames[-1][:header]:
        unread -= len(damaged[-1])  # as a process leaves it that is killed
    assert reason == (
        f"{unread:,} of {total:,} bytes are damaged, or of another format than HXSTATE2" if unread else ""
    )


@pytest.mark.parametrize("size", [8, 50, 2**20])
def test_the_next_frame_is_found_across_the_blocks_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(store_module, "SCAN_BYTES", size)
    path = leave_journal(tmp_path)
    content = path.read_bytes()
    # Bytes that look like the beginning of a frame, and are none.
    for before in (b"", b"H", b"HXSTATE2", b"HXSTATE" * 20, b"HXSTATE2" * 20):
        for length in range(60):
            unread = b"!" * length + before
            path.write_bytes(unread + content)
            served, reason = read_journal(path)
            assert np.array_equal(np.concatenate([rows.states for rows in served]), STATES)
            assert reason.startswith(f"{len(unread)} of " if unread else "")
            assert bool(reason) == bool(unread)


def test_a_journal_that_grows_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    """Its process may write between two looks of the reader."""
    path = leave_journal(tmp_path)
    content = path.read_bytes()
    frame = len(content) // 3
    for length in range(frame, 2 * frame):
        path.write_bytes(content[:length])
        reader = store_module._read_journal(path)
        served = [next(reader)]
        path.write_bytes(content)
        served += reader
        assert len(served) == 1


@pytest.mark.parametrize("kind", [".safetensors", ".journal"])
def test_a_file_that_was_cut_short_anywhere(tmp_path: Path, kind: str) -> None:
    if kind == ".journal":
        path = leave_journal(tmp_path)
    else:
        fill(tmp_path, slice(0, 6))
        (path,) = shards(tmp_path)
    content = path.read_bytes()
    for length in range(len(content)):
        for left in [*shards(tmp_path), *journals(tmp_path)]:
            left.unlink()
        path.write_bytes(content[:length])
        whole = length // (len(content) // 3) if kind == ".journal" else 0
        assert found_in(tmp_path) == list(range(2 * whole))


def test_files_of_other_states_do_not_mix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path)
    store = open_store(tmp_path)
    store.add(F, KEYS[4:], np.ones((2, 7), dtype=np.float32))
    store.close()
    assert found_in(tmp_path) == [0, 1, 2, 3]
    assert "not like those of the other files" in caplog.text


# ----------------------------------------------------------------------------------------- after a killed process


def test_a_journal_that_was_left_becomes_a_shard_and_temporary_files_go(tmp_path: Path) -> None:
    path = leave_journal(tmp_path)
    path.write_bytes(path.read_bytes() + b"HXSTATE2 and half a frame")
    temporary = path.with_name(f".{path.stem}.safetensors.0123abcd.tmp")
    temporary.write_bytes(b"half a shard")
    assert found_in(tmp_path) == list(range(6))
    assert not journals(tmp_path)
    assert not temporary.exists()
    assert len(shards(tmp_path)) == 1
    assert found_in(tmp_path) == list(range(6))


def test_a_journal_whose_shard_is_complete_only_goes(tmp_path: Path) -> None:
    path = leave_journal(tmp_path)
    content = path.read_bytes()
    assert found_in(tmp_path) == list(range(6))
    path.write_bytes(content)  # as if the process had been killed before it could remove it
    assert found_in(tmp_path) == list(range(6))
    assert not journals(tmp_path)
    assert cache_info(tmp_path)[0].rows == 6


def test_nothing_is_cleared_up_while_another_process_uses_the_model(tmp_path: Path) -> None:
    path = leave_journal(tmp_path)
    content = path.read_bytes()
    other = open_store(tmp_path)
    path.write_bytes(content)
    temporary = path.with_name(f".{path.stem}.safetensors.0123abcd.tmp")
    temporary.write_bytes(b"half a shard, which the other process is writing")
    assert found_in(tmp_path) == list(range(6))
    assert path.exists()
    assert temporary.exists()
    other.close()
    assert found_in(tmp_path) == list(range(6))
    assert not path.exists()
    assert not temporary.exists()


def test_a_damaged_journal_stays_and_serves_what_is_not_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = leave_journal(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # in the second of three frames
    path.write_bytes(content)
    for _ in range(2):
        assert found_in(tmp_path) == [0, 1, 4, 5]
        assert path.exists()
    assert caplog.text.count("cannot be used") == 2
    store = open_store(tmp_path)
    for _ in range(3):
        store.has(F, KEYS)
        store.get(F, KEYS)
    assert caplog.text.count("cannot be used") == 3


def test_what_is_looked_for_is_what_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of shards and journals, whole and damaged, and of states that are not like the others."""
    path = leave_journal(tmp_path)
    content = path.read_bytes()
    write_journal(path, flipped(content, 8 * (len(content) // 3 + 70)))
    fill(tmp_path, slice(2, 3))
    store = open_store(tmp_path)
    store.add(F, [KEYS[3]], np.ones((1, 7), dtype=np.float32))
    for keys in (KEYS, KEYS[::-1], KEYS[3:4], [bytes(16), *KEYS[1:5]], []):
        assert store.has(F, keys).tolist() == store.get(F, keys)[0].tolist()
    assert store.has(F, KEYS).tolist() == [True, True, True, False, True, True]
    (shard,) = shards(tmp_path)
    store.close()
    content = shard.read_bytes()
    shard.write_bytes(flipped(content, 8 * content.index(STATES[2].tobytes())))
    store = open_store(tmp_path)
    assert not store.has(F, [KEYS[2]]).any()
    assert shard.name in caplog.text


def test_processes_that_make_a_store_at_once_lock_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description that the second replaced would leave the first with a lock that nobody sees."""
    first = open_store(tmp_path)
    inode = (tmp_path / ("a" * 32) / "model.json").stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)  # the second looked before the first had made it
        second = FeatureStore(tmp_path, "a" * 32, description="under another name")
    assert (tmp_path / ("a" * 32) / "model.json").stat().st_ino == inode
    assert cache_info(tmp_path)[0].description == "tiny (float32)"
    assert not first._lock.alone()
    second.close()
    assert first._lock.alone()


def test_a_description_that_was_not_written_is_written_later(tmp_path: Path) -> None:
    (tmp_path / ("a" * 32)).mkdir()
    (tmp_path / ("a" * 32) / "model.json").write_bytes(b"")  # by a process that was killed
    assert cache_info(tmp_path)[0].description is None
    open_store(tmp_path)
    assert cache_info(tmp_path)[0].description == "tiny (float32)"


DESCRIPTION = Path("a" * 32) / "model.json"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": 3}', b"\xff", b"[" * 10**5])
def test_a_description_is_replaced_only_when_no_other_process_uses_the_model(tmp_path: Path, content: bytes) -> None:
    """The lock is held on the file itself: one that was replaced would leave its holder with a lock that nobody sees."""
    first = open_store(tmp_path)
    (tmp_path / DESCRIPTION).write_bytes(content)
    second = open_store(tmp_path)
    assert (tmp_path / DESCRIPTION).read_bytes() == content
    second.close()
    assert first._lock.alone()
    first.close()
    open_store(tmp_path)
    assert cache_info(tmp_path)[0].description == "tiny (float32)"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["model.json"]


@pytest.mark.parametrize("change", ["replaced", "removed"])
@pytest.mark.parametrize("moment", ["alone", "share"])
def test_a_lock_on_a_description_that_is_no_more_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, moment: str
) -> None:
    """Another process mends the description or clears the model between this one's opening and locking it."""
    open_store(tmp_path).close()
    method = getattr(store_module._Lock, moment)
    changes = []

    def interfere(lock: Any) -> Any:
        if not changes:
            changes.append(1)
            if change == "replaced":
                (tmp_path / "new").write_text('{"model": "new"}')
                os.replace(tmp_path / "new", tmp_path / DESCRIPTION)
            else:
                (tmp_path / DESCRIPTION).unlink()
                (tmp_path / DESCRIPTION).parent.rmdir()
        return method(lock)

    with monkeypatch.context() as patch:
        patch.setattr(store_module._Lock, moment, interfere)
        store = open_store(tmp_path)
    assert changes
    assert store._lock.is_current()
    store.add(F, KEYS, STATES)
    assert clear_cache(tmp_path).in_use == tuple(cache_info(tmp_path))
    assert cache_info(tmp_path)[0].description == ("new" if change == "replaced" else "tiny (float32)")
    store.close()
    assert found_in(tmp_path) == list(range(6))


@pytest.mark.parametrize("content", [b"", b'{"model": "tiny"}'])
def test_who_clears_up_has_a_lock_that_others_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    open_store(tmp_path).close()
    (tmp_path / DESCRIPTION).write_bytes(content)
    seen = []

    def clear_up(store: FeatureStore) -> None:
        with contextlib.closing(store_module._Lock(tmp_path / DESCRIPTION)) as lock:
            seen.append(lock.alone())

    monkeypatch.setattr(FeatureStore, "_clear_up", clear_up)
    open_store(tmp_path)
    assert seen == [False]


def test_a_lock_on_a_file_that_was_replaced_is_not_alone(tmp_path: Path) -> None:
    """Else whoever evicts or clears would take the states from under a process that has locked the new file."""
    lock = store_module._Lock(open_store(tmp_path)._folder / "model.json")
    (tmp_path / "new").write_text("{}")
    os.replace(tmp_path / "new", tmp_path / DESCRIPTION)
    assert not lock.alone()
    assert store_module._Lock(tmp_path / DESCRIPTION).alone()


def _open_often(root: str, name: str, start: Any) -> None:
    start.wait()
    for _ in range(60):
        store = FeatureStore(Path(root), "a" * 32, description=name * 200)
        assert store._lock is not None
        assert store._lock.is_current()
        (Path(root) / DESCRIPTION).read_bytes()
        store.close()
        if name == "b":
            clear_cache(Path(root))
        elif name == "c":
            with contextlib.suppress(OSError):
                store = FeatureStore(Path(root), "a" * 32, description="")
                if store._lock.alone():
                    (Path(root) / DESCRIPTION).write_bytes(b"{")  # as if a process had been killed in the middle
                store.close()


def test_processes_that_mend_and_clear_at_once(tmp_path: Path) -> None:
    """Each always has the lock that the others see, and what is left in the end is one whole description."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    processes = [context.Process(target=_open_often, args=(str(tmp_path), name, start)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    open_store(tmp_path).close()
    (entry,) = cache_info(tmp_path)
    assert entry.description in ("tiny (float32)", "a" * 200, "b" * 200, "c" * 200, "")
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_interrupt_in_the_middle_of_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    store.add(F, KEYS[:2], STATES[:2])
    write, calls = os.write, []

    def interrupted(descriptor: int, content: Any) -> int:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(descriptor, content[:40])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.add(F, KEYS[2:4], STATES[2:4])
    store.add(F, KEYS[4:], STATES[4:])
    store.close()
    assert found_in(tmp_path) == [0, 1, 4, 5]


# --------------------------------------------------------------------------------------- folders that take no states


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may become longer than 500 bytes: the system writes what fits and refuses the rest, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_storing_but_not_the_run(
    tmp_path: Path, full_disk: None, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    for key, state in zip(KEYS, STATES, strict=True):  # the third does not fit
        store.add(F, [key], state[np.newaxis])
    assert store.get(F, KEYS)[0].tolist() == [True, True, False, False, False, False]
    store.close()
    store.add(F, KEYS, STATES)
    store.close()
    assert caplog.text.count("States cannot be written") == 1
    assert "HARNESS_EXT_CACHE" in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))
    assert found_in(tmp_path) == [0, 1]


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store with four states in a folder that this process may read only."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        fill(root / "store")
        folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        for path in root.rglob("*"):
            if path.is_file():
                path.chmod(0o444)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)  # permissions do not hold for root
        yield root / "store"
        if is_root:
            os.seteuid(0)
        for folder in folders:
            folder.chmod(0o755)


def test_a_folder_that_can_only_be_read_serves_and_warns_once(
    read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(read_only)
    assert store.get(F, KEYS)[0].tolist() == [True] * 4 + [False] * 2
    assert not caplog.records
    for _ in range(3):
        store.add(F, KEYS[4:], STATES[4:])
    store.close()
    assert caplog.text.count("States cannot be written") == 1
    other = open_store(read_only, "b" * 32)
    other.add(F, KEYS, STATES)
    other.close()
    assert not other.get(F, KEYS)[0].any()
    assert caplog.text.count("States cannot be written") == 2


def test_a_store_that_cannot_be_made_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path / "file")
    store.add(F, KEYS, STATES)
    store.close()
    assert not store.get(F, KEYS)[0].any()
    assert "cannot be written" in caplog.text


# -------------------------------------------------------------------------------------------------------- the limit


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", 20 * 2**30), ("off", None), ("1000", 1000), ("50GB", 50 * 10**9), ("1.5 gib", 3 * 2**29), ("2M", 2 * 10**6)],
)
def test_cache_limit(monkeypatch: pytest.MonkeyPatch, given: str, expected: int | None) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", given)
    assert cache_limit() == expected


@pytest.mark.parametrize("given", ["plenty", "-5GB", "5 pounds", "GB"])
def test_a_limit_that_is_no_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", given)
    with pytest.raises(ValueError, match=f"HARNESS_EXT_CACHE_LIMIT is {given!r}; expected a size such as 50GB"):
        open_store(tmp_path)


def sizes(root: Path) -> int:
    return sum(path.stat().st_size for path in [*shards(root), *journals(root)])


def three_models(root: Path) -> None:
    """Models a, b and c, used in this order, of one shard of 1,000 bytes or a little more."""
    for age, name in enumerate("abc"):
        store = open_store(root, name * 32)
        store.add(F, KEYS, np.zeros((6, 36), dtype=np.float32))
        store.close()
        for path in (root / (name * 32)).rglob("*.safetensors"):
            os.utime(path, (10**9 + age, 10**9 + age))
    assert 3000 < sizes(root) < 4000


def models_with_states(root: Path) -> str:
    return "".join(sorted(path.parents[1].name[0] for path in shards(root)))


def test_the_least_recently_used_states_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_models(tmp_path)
    store = open_store(tmp_path)
    store.get(F, KEYS[:1])  # model a is used again
    store.close()
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", "3600")
    fill(tmp_path, slice(0, 6), "d" * 32)
    assert models_with_states(tmp_path) == "acd"
    assert sizes(tmp_path) <= 3600


def test_states_that_a_process_uses_are_not_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    three_models(tmp_path)
    reader, writer = open_store(tmp_path), open_store(tmp_path, "b" * 32)
    writer.add(Feature(1), KEYS, STATES)
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", "1500")
    fill(tmp_path, slice(0, 6), "d" * 32)
    assert models_with_states(tmp_path) == "ab"
    assert len(journals(tmp_path)) == 1
    assert caplog.text.count("has reached its limit") == 1
    writer.close()
    reader.close()
    fill(tmp_path, slice(0, 6), "d" * 32)
    assert models_with_states(tmp_path) == "bd"  # of b what is new
    assert not open_store(tmp_path, "b" * 32).get(F, KEYS)[0].any()


def test_a_model_gives_way_to_its_own_states_but_not_to_those_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_store(tmp_path)
    for layer in range(3):
        first.add(Feature(layer), KEYS, np.zeros((6, 36), dtype=np.float32))
    first.close()
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", "3500")
    store = open_store(tmp_path)
    assert store.get(Feature(0), KEYS)[0].all()
    for layer in range(3, 9):
        store.add(Feature(layer), KEYS, np.zeros((6, 36), dtype=np.float32))
        assert sizes(tmp_path) <= 3500
    store.close()
    kept = [layer for layer in range(9) if store.get(Feature(layer), KEYS)[0].all()]
    # What was read, and of the new ones those that fit beside it.
    assert kept == [0, 3, 4]
    assert caplog.text.count("has reached its limit") == 1


def test_what_does_not_fit_an_empty_store_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = open_store(tmp_path, "b" * 32)
    other.add(Feature(0), KEYS, np.zeros((6, 36), dtype=np.float32))
    other.close()
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", "3500")
    store = open_store(tmp_path)
    store.add(Feature(1), KEYS, np.zeros((6, 360), dtype=np.float32))
    store.close()
    assert open_store(tmp_path, "b" * 32).get(Feature(0), KEYS)[0].all()


def test_a_damaged_description_is_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add(Feature(0), KEYS, np.zeros((6, 36), dtype=np.float32))
    store.close()
    (description,) = tmp_path.rglob("model.json")
    before = description.read_bytes()
    description.write_bytes(b"\x00\xff" + before + before)
    open_store(tmp_path).close()
    assert description.read_bytes() == before


def test_what_is_not_ours_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "gpt2").mkdir(parents=True)
    precious = tmp_path / "models" / "gpt2" / "model.safetensors"
    precious.write_bytes(bytes(5000))
    (tmp_path / "models" / "model.json").write_text('{"model": "a table of models"}')
    fill(tmp_path)
    by_hand = tmp_path / ("a" * 32) / F.name / "copy.safetensors"
    by_hand.write_bytes(bytes(5000))
    note = tmp_path / ("a" * 32) / F.name / "note.txt"
    note.write_text("mine")
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", "700")
    fill(tmp_path, slice(0, 6), "b" * 32)
    assert precious.exists()
    assert by_hand.exists()
    assert note.exists()
    assert models_with_states(tmp_path).count("b") == 1


# ------------------------------------------------------------------------------------------------------- processes


def _add_rows(root: str, start: int) -> None:
    store_module.SHARD_BYTES = 2000
    store = open_store(Path(root))
    for i in range(start, start + 40):
        store.add(F, [i.to_bytes(16, "big")], np.full((1, 4), i, dtype=np.float32))
    store.close()


def test_two_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_rows, args=(str(tmp_path), start)) for start in (0, 20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found, states = open_store(tmp_path).get(F, [i.to_bytes(16, "big") for i in range(60)])
    assert found.all()
    assert np.array_equal(states[:, 0], np.arange(60))


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    assert cache_root() is None
    monkeypatch.delenv("HARNESS_EXT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "harness_ext"


def test_info_and_clear(tmp_path: Path) -> None:
    fill(tmp_path)
    open_store(tmp_path, "b" * 32)
    (tmp_path / "not ours").mkdir()
    (tmp_path / "not ours" / "thesis.tex").write_text("…")
    entries = {entry.fingerprint: entry for entry in cache_info(tmp_path)}
    assert entries["a" * 32].rows == 4
    assert entries["a" * 32].description == "tiny (float32)"
    assert entries["b" * 32].rows == 0
    with pytest.raises(KeyError, match="Known: aaaa"):
        clear_cache(tmp_path, "c" * 32)
    assert clear_cache(tmp_path, "a" * 32).freed == entries["a" * 32].bytes
    assert clear_cache(tmp_path).freed > 0
    assert cache_info(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["not ours"]
    assert (tmp_path / "not ours" / "thesis.tex").exists()
    assert cache_info(tmp_path / "nowhere") == []


def test_states_in_use_are_not_cleared(tmp_path: Path) -> None:
    fill(tmp_path, fingerprint="b" * 32)
    store = open_store(tmp_path)
    store.add(F, KEYS[:2], STATES[:2])
    for fingerprint in ("a" * 32, None):
        before = cache_info(tmp_path)
        cleared = clear_cache(tmp_path, fingerprint)
        assert [entry.fingerprint for entry in cleared.in_use] == ["a" * 32]
        assert cleared.freed == (0 if fingerprint else before[1].bytes)
    store.add(F, KEYS[2:4], STATES[2:4])
    store.close()
    assert found_in(tmp_path) == [0, 1, 2, 3]
    assert clear_cache(tmp_path).in_use == ()
    assert not list(tmp_path.iterdir())


def test_a_model_is_not_cleared_while_its_process_evicts(tmp_path: Path) -> None:
    """That process gives up the model's lock for a moment, to ask for it alone."""
    store = open_store(tmp_path)
    store.add(F, KEYS, STATES)
    store._lock.close()
    assert len(clear_cache(tmp_path).in_use) == 1
    store.close()
    assert found_in(tmp_path) == list(range(6))


def test_a_store_that_was_cleared_between_two_uses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add(F, KEYS, STATES)
    store.close()
    assert clear_cache(tmp_path).freed > 0
    store.add(F, KEYS[:2], STATES[:2])
    assert len(clear_cache(tmp_path).in_use) == 1
    store.close()
    assert cache_info(tmp_path)[0].description == "tiny (float32)"
    assert found_in(tmp_path) == [0, 1]


def test_where_files_cannot_be_locked_what_is_named_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "fcntl", None)
    fill(tmp_path)
    assert cache_info(tmp_path)[0].description == "tiny (float32)"
    assert found_in(tmp_path) == [0, 1, 2, 3]
    assert clear_cache(tmp_path).freed > 0
    assert not list(tmp_path.iterdir())


def snapshot(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def test_nothing_is_cleared_that_the_store_has_not_made(tmp_path: Path) -> None:
    """As in a home folder that HARNESS_EXT_CACHE names by mistake."""
    home = tmp_path / "home"
    shard = "01234567890123456789-0123abcd.safetensors"
    for name in (
        "model.json",
        shard,
        f"{F.name}/{shard}",
        f"models/{F.name}/{shard}",
        "models/model.json",
        f"{'A' * 32}/{F.name}/{shard}",
        f"{'a' * 31}/{F.name}/{shard}",
        f"{'a' * 40}/{F.name}/{shard}",
        f"{'b' * 32}/weights/model.safetensors",
        f"{'b' * 32}/weights/deep/{shard}",
        f"{'b' * 32}/weights/.x.tmp",
        f"{'b' * 32}/{shard}",
        f"{'b' * 32}/run.journal",
        f"{'b' * 32}/config.json",
    ):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (home / ("b" * 32) / "weights" / shard).symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    assert cache_info(home) == []
    assert clear_cache(home).freed == 0
    assert snapshot(tmp_path) == before
    # Beside what is ours, too.
    for fingerprint in ("a" * 32, "b" * 32):
        fill(home, fingerprint=fingerprint)
    assert [entry.description for entry in cache_info(home)] == ["tiny (float32)"] * 2
    cleared = clear_cache(home)
    assert cleared.freed > 0
    assert not cleared.errors
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"HXSTATE2", b"mine"])
def test_opening_a_model_touches_nothing_that_the_store_has_not_made(tmp_path: Path, content: bytes) -> None:
    fill(tmp_path)
    diary = tmp_path / ("a" * 32) / F.name / "diary.journal"
    diary.write_bytes(content)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(content)
    link = diary.with_name("01234567890123456789-0123abcd.journal")
    link.symlink_to(elsewhere)
    open_store(tmp_path).close()
    assert diary.read_bytes() == elsewhere.read_bytes() == content
    assert link.is_symlink()
    assert not any(diary.parent.glob("diary.safetensors"))


@pytest.mark.parametrize("content", [None, b"", b"[1]"], ids=["none", "empty", "another"])
def test_a_folder_without_a_readable_description_is_listed_and_cleared(tmp_path: Path, content: bytes | None) -> None:
    fill(tmp_path)
    (tmp_path / DESCRIPTION).unlink()
    if content is not None:
        (tmp_path / DESCRIPTION).write_bytes(content)
    temporary = shards(tmp_path)[0].with_name(f".{shards(tmp_path)[0].name}.0123abcd.tmp")
    temporary.write_bytes(bytes(100))
    (entry,) = cache_info(tmp_path)
    assert (entry.description, entry.rows) == (None, 4)
    assert entry.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert clear_cache(tmp_path).freed == entry.bytes
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fingerprint in ("a" * 32, "b" * 32):
        fill(tmp_path, fingerprint=fingerprint)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if "a" * 32 in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    cleared = clear_cache(tmp_path)
    assert [Path(error.filename).parents[1].name for error in cleared.errors] == ["a" * 32]
    assert [entry.fingerprint for entry in cache_info(tmp_path)] == ["a" * 32]


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        for look in (cache_info, clear_cache):
            with pytest.raises(
                NotADirectoryError, match=rf"^{root}: expected the folder of the store, found a file\. Set"
            ):
                look(root)


# ------------------------------------------------------------------------------------------------- whole passes

TEXTS = [f"film number {i} This movie is" for i in range(12)]
F_ONLY = [PromptRequest(features=(F,))] * len(TEXTS)
REQUESTS = [PromptRequest((" great", " outstanding"), (Feature(), Feature(1)))] * len(TEXTS)


def run(root: Path | None, *, model=None, texts=TEXTS, requests=REQUESTS, **options):
    settings = {"max_length": 128, "add_special_tokens": None, "prefix_token_id": 0} | options
    model = model or tiny_model("gpt2")
    fingerprint = model_fingerprint(model)
    return answer_requests(
        texts,
        requests,
        model=LastStateModel(model, device=torch.device("cpu")),
        encoder=PromptEncoder(tiny_tokenizer(), **settings),
        store=None if root is None else FeatureStore(root, str(fingerprint), description="tiny"),
        max_rows=2,
        max_tokens=4096,
        progress=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_pass_forwards_nothing_and_answers_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model("gpt2", dtype=dtype)
    first, cold = run(tmp_path, model=model)
    second, warm = run(tmp_path, model=model)
    assert (cold.from_store, cold.forwarded) == (0, cold.distinct_prompts + cold.word_continuations)
    assert (warm.from_store, warm.forwarded, warm.tokens) == (cold.forwarded, 0, 0)
    for a, b in zip(first, second, strict=True):
        assert a.key == b.key
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
        for feature in (Feature(), Feature(1)):
            assert np.array_equal(a.source.take([a.row], feature), b.source.take([b.row], feature))


def test_only_what_is_missing_is_forwarded(tmp_path: Path) -> None:
    run(tmp_path, texts=TEXTS[:5], requests=[PromptRequest((" great",))] * 5)
    _, summary = run(tmp_path, requests=[PromptRequest((" great",))] * len(TEXTS))
    assert (summary.from_store, summary.forwarded) == (5, 7)
    # A layer that was not stored needs a new forward; f(s) alone does not.
    _, summary = run(tmp_path, requests=[PromptRequest(features=(Feature(),))] * len(TEXTS))
    assert summary.forwarded == 0
    _, summary = run(tmp_path, requests=[PromptRequest(features=(Feature(1),))] * len(TEXTS))
    assert summary.forwarded == len(TEXTS)


CHAT = "<eos>user: {} assistant:"


def test_another_template_or_truncation_length_never_hits(tmp_path: Path) -> None:
    """A text is found by what the model reads, so these differ in their keys."""
    _, full = run(tmp_path, requests=F_ONLY)
    assert full.forwarded == len(TEXTS)
    for texts in ([text.replace("This movie is", "It was") for text in TEXTS], [CHAT.format(text) for text in TEXTS]):
        _, summary = run(tmp_path, texts=texts, requests=F_ONLY)
        assert summary.from_store == 0
    texts = [f"1 2 3 4 5 6 7 8 {i} This movie is" for i in range(10)]
    cut = [PromptRequest(features=(F,), document=Span(0, text.index(" This"))) for text in texts]
    run(tmp_path, texts=texts, requests=[PromptRequest(features=(F,))] * 10)
    for max_length in (10, 16):
        _, summary = run(tmp_path, texts=texts, requests=cut, max_length=max_length)
        assert summary.cut_prompts == 10
        assert summary.from_store == 0
    # But where nothing is cut the model reads the same.
    _, summary = run(tmp_path, texts=texts, requests=cut, max_length=64)
    assert summary.from_store == 10


def test_the_store_moves_no_score(tmp_path: Path) -> None:
    without, _ = run(None)
    run(tmp_path, texts=TEXTS[3:9], requests=REQUESTS[:6])
    mixed, _ = run(tmp_path)
    for a, b in zip(without, mixed, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


SLOW_RUN = """
import sys, time
from pathlib import Path
import torch
from harness_ext.engine import plan
plan.MIN_SHARED = 2.0  # no prompt shares a row with another
import test_store
from tiny import tiny_model
model = tiny_model("gpt2")
forward, batches = model.transformer.forward, []
def slow(*args, **kwargs):
    batches.append(1)
    print("batch", len(batches), flush=True)
    time.sleep(0.2)
    return forward(*args, **kwargs)
model.transformer.forward = slow
test_store.run(Path(sys.argv[1]), model=model, requests=test_store.F_ONLY)
"""


def test_a_killed_run_loses_at_most_its_last_batch(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW_RUN), str(tmp_path)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()).strip() != b"batch 4":
        assert line, "the run ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    _, summary = run(tmp_path, requests=F_ONLY)
    # Three batches of two were complete when the fourth began.
    assert summary.from_store == 6
    assert summary.forwarded == len(TEXTS) - 6


def test_nothing_in_the_store_is_executable(tmp_path: Path) -> None:
    run(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())
