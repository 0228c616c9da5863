"""`harness-ext cache info|clear`; see tests/engine/test_store.py for what is removed and what is not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness_ext import cli
from harness_ext.contracts import Feature
from harness_ext.engine.store import FeatureStore

A, B = "aaaab" + "1" * 27, "aaaac" + "2" * 27


def fill(folder: Path, fingerprint: str, description: str, rows: int) -> FeatureStore:
    written = FeatureStore(folder, fingerprint, description=description)
    written.add(Feature(), [bytes([row] * 16) for row in range(rows)], np.ones((rows, 300), dtype=np.float32))
    return written


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A store with three states of one model and one of another."""
    folder = tmp_path / "store"
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(folder))
    fill(folder, A, "gpt2 float32", 3).close()
    fill(folder, B, "opt float32", 1).close()
    return folder


def stored(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_info_lists_models_and_sizes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "info"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{root}: 2 models, {size_of(root) / 1024:.1f} KiB of at most 20.0 GiB"
    assert [[*line.split()[:3], *line.split()[-2:]] for line in rest] == [
        [A, "3", "rows", "gpt2", "float32"],
        [B, "1", "rows", "opt", "float32"],
    ]


@pytest.mark.parametrize(("given", "left"), [([], []), ([B], [A]), (["aaaac"], [A])], ids=["all", "one", "a beginning"])
def test_clear_clears_one_model_or_all(
    root: Path, capsys: pytest.CaptureFixture[str], given: list[str], left: list[str]
) -> None:
    before = size_of(root)
    assert cli.main(["cache", "clear", *given]) == 0
    assert stored(root) == left
    assert capsys.readouterr().out == f"{root}: freed {(before - size_of(root)) / 1024:.1f} KiB\n"


@pytest.mark.parametrize(("given", "found"), [("zzzz", "no stored model has"), ("aaaa", "2 stored models have")])
def test_clear_deletes_nothing_that_is_not_named_clearly(
    root: Path, capsys: pytest.CaptureFixture[str], given: str, found: str
) -> None:
    assert cli.main(["cache", "clear", given]) == 2
    assert stored(root) == [A, B]
    assert f"{found} the fingerprint '{given}'. Stored: {A}, {B}." in capsys.readouterr().err


@pytest.mark.parametrize("given", ["", "aaa"])
def test_clear_asks_for_enough_of_a_fingerprint(root: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    assert cli.main(["cache", "clear", given]) == 2
    assert stored(root) == [A, B]
    assert (
        f"at least its first 4 characters, as `harness-ext cache info` shows it, found '{given}'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(("given", "left"), [([], [A]), ([A], [A, B])], ids=["all", "one"])
def test_clear_leaves_what_a_run_uses_and_says_so(
    root: Path, capsys: pytest.CaptureFixture[str], given: list[str], left: list[str]
) -> None:
    running = FeatureStore(root, A, description="gpt2 float32")
    assert cli.main(["cache", "clear", *given]) == 1
    assert stored(root) == left
    assert running.get(Feature(), [bytes(16)])[0].all()
    assert capsys.readouterr().err == (
        f"harness-ext: {A} (gpt2 float32) is in use, and its states stay. Wait for the run that uses them or stop it, and "
        "clear again.\n"
    )
    running.close()
    assert cli.main(["cache", "clear", *given]) == 0
    assert A not in stored(root)


def test_a_model_without_a_readable_description_is_shown_and_cleared(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / A / "model.json").write_bytes(b"{")
    (root / B / "model.json").unlink()
    (root / ("c" * 32)).mkdir()  # with nothing of ours
    (root / ("c" * 32) / "model.safetensors").write_bytes(bytes(1000))
    assert cli.main(["cache", "info"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{root}: 2 models, {(size_of(root) - 1000) / 1024:.1f} KiB of")
    assert [line.split(maxsplit=3)[:2] for line in rest] == [[A, "3"], [B, "1"]]
    assert all(line.endswith("KiB  without a readable model.json") for line in rest)
    assert cli.main(["cache", "clear"]) == 0
    assert stored(root) == ["c" * 32]


def test_an_empty_cache_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "none"))
    assert cli.main(["cache", "info"]) == 0
    assert cli.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'none'}: 0 models, 0 B of at most 20.0 GiB\n{tmp_path / 'none'}: freed 0 B\n"
    )


@pytest.mark.parametrize("arguments", [["info"], ["clear"], ["clear", "aaaa"]], ids=" ".join)
def test_a_file_instead_of_the_folder_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "file"))
    assert cli.main(["cache", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"harness-ext: error: {tmp_path / 'file'}: expected the folder of the store, found a file. "
        "Set HARNESS_EXT_CACHE to a folder, or unset it.\n"
    )


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Permissions do not hold for root."""
    if not hasattr(os, "geteuid"):
        pytest.skip("this system has no users of files")
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


@pytest.fixture
def open_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store with one model in a folder to which every user gets."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "store"
        monkeypatch.setenv("HARNESS_EXT_CACHE", str(folder))
        fill(folder, A, "gpt2 float32", 3).close()
        yield folder
        folder.chmod(0o755)
        (folder / A).chmod(0o755)


@pytest.mark.parametrize("closed", ["the store", "the model"])
@pytest.mark.parametrize("action", ["info", "clear"])
def test_a_folder_that_cannot_be_read_is_one_line(
    open_root: Path, as_nobody: None, capsys: pytest.CaptureFixture[str], closed: str, action: str
) -> None:
    folder = open_root if closed == "the store" else open_root / A
    euid = os.geteuid()
    os.seteuid(os.getuid())
    folder.chmod(0)
    os.seteuid(euid)
    assert cli.main(["cache", action]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"harness-ext: error: {folder}: no permission.")
    assert captured.err.count("\n") == 1


def test_files_that_cannot_be_deleted_are_one_line(
    open_root: Path, as_nobody: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = size_of(open_root)
    assert cli.main(["cache", "clear"]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{open_root}: freed 0 B\n"
    assert captured.err.startswith(f"harness-ext: error: {open_root / A}")
    assert "no permission" in captured.err
    assert captured.err.count("\n") == 1
    assert size_of(open_root) == before


@pytest.mark.parametrize(
    ("given", "said"), [("1MiB", "of at most 1.0 MiB"), ("2000", "of at most 2.0 KiB"), ("off", ", without a limit")]
)
def test_info_shows_the_limit(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", given)
    assert cli.main(["cache", "info"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(said)


@pytest.mark.parametrize("action", ["info", "clear"])
def test_cache_says_that_it_is_off(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    assert cli.main(["cache", action]) == 0
    assert capsys.readouterr().out == "The cache is off (HARNESS_EXT_CACHE=off).\n"
    assert stored(root) == [A, B]
