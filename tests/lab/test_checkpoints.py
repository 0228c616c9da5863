"""Folders of checkpoints, and trainings that stop and go on."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from harness_ext.lab.algorithms import AdamW, Adversarial, Algorithm, LabelledTokens, LabelNoise, Sam, Sgd, Svag
from harness_ext.lab.checkpoints import (
    LAB_FILE,
    Checkpoint,
    Estimate,
    find_checkpoints,
    load_state,
    read_checkpoint,
    remove_leftovers,
    save,
    save_state,
    whole_folder,
)
from harness_ext.lab.languages.hmm import random_hmm
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.quad import QuadModel
from harness_ext.lab.train import Blocks, TrainConfig, Trainer, cpu_threads, encode, pack

SMALL = ModelConfig(width=16, depth=1, heads=2, context=16)
LANGUAGE = random_hmm(0, states=4, words=12, lengths=(6, 8))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with cpu_threads(1):
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return LANGUAGE.tokenizer(max_length=16)


@pytest.fixture(scope="module")
def blocks(tokenizer: Any) -> Blocks:
    documents = encode([" ".join(words) for words in LANGUAGE.sample(120, np.random.default_rng(0))], tokenizer)
    return pack(documents, end_of_text=tokenizer.eos_token_id, block_size=16)


def equal(one: Any, other: Any) -> bool:
    """Whether two states hold the same, tensors to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


# Resuming. ------------------------------------------------------------------------------------------------------------

ALL = [
    AdamW(),
    Sgd(),
    Sgd(momentum=0.9),
    Sam(0.05, AdamW()),
    Sam(0.05, Sgd(momentum=0.5)),
    LabelNoise(0.5, Sgd(momentum=0.9)),
    LabelNoise(0.5, AdamW()),
    Svag(2.0),
    Adversarial(documents=8, every=3),
]


def labelled(number: int, count: int) -> list[LabelledTokens]:
    rng = np.random.default_rng([1, number])
    return [LabelledTokens(rng.integers(12, size=6).tolist(), int(rng.integers(3))) for _ in range(count)]


def new_trainer(algorithm: Algorithm, tokenizer: Any, blocks: Blocks, objective: str = "cross_entropy") -> Trainer:
    model: Any = build_model(SMALL, tokenizer, seed=0)
    if objective == "quad":
        model = QuadModel(model)
    config = TrainConfig(steps=40, batch_size=4, learning_rate=0.02, algorithm=algorithm)
    return Trainer(model, blocks, config, seed=3, objective=objective, labelled=labelled)


@pytest.mark.parametrize(
    ("algorithm", "objective"),
    [*((algorithm, "cross_entropy") for algorithm in ALL), (AdamW(), "quad")],
    ids=repr,
)
def test_a_training_that_stopped_goes_on_to_the_same_weights(
    algorithm: Algorithm, objective: str, tokenizer: Any, blocks: Blocks, tmp_path: Path
) -> None:
    # More than one pass over the blocks.
    assert len(blocks.tokens) < 4 * 40
    whole = new_trainer(algorithm, tokenizer, blocks, objective)
    losses = whole.run(40)
    first = new_trainer(algorithm, tokenizer, blocks, objective)
    parts = first.run(17)
    save_state(tmp_path, first.state())
    torch.manual_seed(99)  # whatever happens to the global generator meanwhile
    second = new_trainer(algorithm, tokenizer, blocks, objective)
    state = load_state(tmp_path)
    assert state is not None
    second.resume(state)
    assert second.step == 17
    parts += second.run(40)
    assert parts == losses
    assert equal(second.state(), whole.state())


def test_the_state_is_read_as_it_was_written(tokenizer: Any, blocks: Blocks, tmp_path: Path) -> None:
    trainer = new_trainer(AdamW(), tokenizer, blocks)
    trainer.run(2)
    save_state(tmp_path, trainer.state())
    state = load_state(tmp_path)
    assert equal(state, {key: dict(value) if key == "model" else value for key, value in trainer.state().items()})


def test_state_files_hold_no_code(tokenizer: Any, blocks: Blocks, tmp_path: Path) -> None:
    trainer = new_trainer(AdamW(), tokenizer, blocks)
    trainer.run(1)
    save_state(tmp_path, trainer.state())
    [folder] = tmp_path.iterdir()
    assert folder.name == "00000001"
    assert {path.name for path in folder.iterdir()} == {"tensors.safetensors", "state.json"}
    json.loads((folder / "state.json").read_text(encoding="utf-8"))
    header = (folder / "tensors.safetensors").read_bytes()
    assert not header.startswith((b"PK", b"\x80"))  # what torch.save and pickle begin with
    safetensors.torch.load(header)


def test_the_newest_state_replaces_older_ones(tokenizer: Any, blocks: Blocks, tmp_path: Path) -> None:
    assert load_state(tmp_path / "none") is None
    assert load_state(tmp_path) is None
    trainer = new_trainer(Sgd(), tokenizer, blocks)
    for step in (1, 2, 9, 10):
        trainer.run(step)
        save_state(tmp_path, trainer.state())
        state = load_state(tmp_path)
        assert state is not None
        assert state["step"] == step
        assert [path.name for path in tmp_path.iterdir()] == [f"{step:08d}"]


class Killed(BaseException):
    """What stands for SIGKILL: from then on nothing is done to the disk any more."""


class Disk:
    """Stops the process in the middle of the n-th operation that changes the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
        self._stop_at, self._count, self.is_dead = stop_at, 0, False
        self._real_write = Path.write_text
        for owner, name, half in (
            (Path, "mkdir", None),
            (Path, "rename", None),
            (Path, "write_text", self._half_write),
            (shutil, "rmtree", self._half_remove),
            (safetensors.torch, "save_file", lambda tensors, path: path.write_bytes(b"half")),
        ):
            monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name), half))

    def _wrap(self, real: Callable[..., Any], half: Callable[..., Any] | None) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if self.is_dead:
                raise Killed
            self._count += 1
            if self._count == self._stop_at:
                if half is not None:
                    half(*args)
                self.is_dead = True
                raise Killed
            return real(*args, **kwargs)

        return operation

    def _half_write(self, path: Path, text: str) -> None:
        self._real_write(path, text[: len(text) // 2], encoding="utf-8")

    @staticmethod
    def _half_remove(folder: Path) -> None:
        for path in sorted(folder.iterdir())[:1] if folder.is_dir() else []:
            path.unlink()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_state_that_is_killed_while_it_is_written_leaves_one_that_loads(
    is_first: bool, tokenizer: Any, blocks: Blocks, tmp_path: Path
) -> None:
    trainer = new_trainer(AdamW(), tokenizer, blocks)
    states: dict[int | None, Any] = {None: None}
    for step in (3, 5):
        trainer.run(step)
        save_state(tmp_path / f"kept{step}", trainer.state())
        states[step] = load_state(tmp_path / f"kept{step}")
    outcomes = []
    for stop_at in range(1, 100):
        folder = tmp_path / str(stop_at)
        if not is_first:
            shutil.copytree(tmp_path / "kept3", folder)
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = Disk(monkeypatch, stop_at)
            try:
                save_state(folder, trainer.state())
            except Killed:
                assert disk.is_dead
        if not disk.is_dead:
            break
        found = load_state(folder)
        outcomes.append(None if found is None else found["step"])
        assert equal(found, states[outcomes[-1]])
        # What was left behind is in nobody's way.
        save_state(folder, trainer.state())
        assert equal(load_state(folder), states[5])
    before = None if is_first else 3
    assert outcomes == [before] * outcomes.count(before) + [5] * outcomes.count(5)
    assert outcomes.count(before) >= 5


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_is_whole_whenever_the_process_is_killed(is_there: bool, tmp_path: Path) -> None:
    def whole(folder: Path) -> str | None:
        """What a folder holds, None if it is not there."""
        if not folder.exists():
            return None
        one, two = ((folder / name).read_text(encoding="utf-8") for name in ("one", "two"))
        assert one == two
        return one

    def write(folder: Path, text: str) -> None:
        with whole_folder(folder) as partial:
            (partial / "one").write_text(text, encoding="utf-8")
            (partial / "two").write_text(text, encoding="utf-8")

    found = []
    for stop_at in range(1, 100):
        folder = tmp_path / str(stop_at) / "step_1"
        if is_there:
            write(folder, "old")
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = Disk(monkeypatch, stop_at)
            try:
                write(folder, "new")
            except Killed:
                assert disk.is_dead
        found.append(whole(folder))
        if not disk.is_dead:
            assert [path.name for path in folder.parent.iterdir()] == ["step_1"]
            break
    assert found[0] == ("old" if is_there else None)
    assert found[-1] == "new"
    # Killed between two renames, the old one is out of sight and the new one not there yet.
    assert found.count(None) <= 1 or not is_there


def test_an_error_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step_1"
    with whole_folder(folder) as partial:
        (partial / "file").write_text("old", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), whole_folder(folder) as partial:
        (partial / "file").write_text("new" * (1 // 0), encoding="utf-8")
    real = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("no space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no space left"), whole_folder(folder) as partial:
        (partial / "file").write_text("new", encoding="utf-8")
    assert (folder / "file").read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


# Records. -------------------------------------------------------------------------------------------------------------

RECORD: dict[str, Any] = {
    "made_by": "harness-ext lab",
    "run": "adamw-w64",
    "seed": 1,
    "language": {"kind": "hmm", "seed": 0, "sha256": "abc"},
    "model": {"architecture": "gpt2", "width": 16, "num_parameters": 4000},
    "algorithm": {"name": "adamw", "learning_rate": 0.004},
    "objective": "cross_entropy",
    "step": 600,
    "tokens_seen": 4800,
    "validation_loss": {"value": 3.12, "stderr": 0.003, "tokens": 51000},
    "excess": {"value": 0.02, "stderr": 0.0003, "documents": 1000},
}


def write(
    folder: Path, record: Any, *, schema_version: int | None = 2, weights: str | None = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True)
    text = record if isinstance(record, str) else json.dumps({"schema_version": schema_version, **record})
    (folder / LAB_FILE).write_text(text, encoding="utf-8")
    if weights:
        (folder / weights).touch()
    return folder


def test_a_saved_model_is_read_as_a_checkpoint(tokenizer: Any, tmp_path: Path) -> None:
    model = build_model(SMALL, tokenizer, seed=0)
    save(tmp_path / "model", model, tokenizer, RECORD)
    found = read_checkpoint(tmp_path / "model")
    assert found == Checkpoint(
        folder=tmp_path / "model",
        run="adamw-w64",
        seed=1,
        algorithm="adamw",
        objective="cross_entropy",
        step=600,
        tokens_seen=4800,
        num_parameters=4000,
        language_sha256="abc",
        excess=Estimate(0.02, 0.0003),
        validation_loss=Estimate(3.12, 0.003),
        model=RECORD["model"],
    )
    assert found.name == "adamw-w64-00000600"
    assert find_checkpoints(tmp_path) == find_checkpoints(tmp_path / "model") == [found]


def test_checkpoints_are_found_at_any_depth_in_order(tmp_path: Path) -> None:
    places = {
        ("b", 2): "runs/b/checkpoints/x",
        ("a", 100): "runs/a/checkpoints/y",
        ("a", 9): "elsewhere",
        ("c", 1): ".",
    }
    for (run, step), place in places.items():
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAB_FILE).write_text(
            json.dumps({"schema_version": 2, **RECORD, "run": run, "step": step}), encoding="utf-8"
        )
        (folder / "model.safetensors.index.json").touch()
    # Half written, so nobody's.
    write(tmp_path / "runs" / "a" / "checkpoints" / ".step_9.1.partial", RECORD)
    assert [(one.run, one.step) for one in find_checkpoints(tmp_path)] == [("a", 9), ("a", 100), ("b", 2), ("c", 1)]


@pytest.mark.parametrize("folder", ["nothing", "."])
def test_no_checkpoints_is_an_error(folder: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected checkpoints, folders with a lab\.json, found none"):
        find_checkpoints(tmp_path / folder)


def without(*names: str) -> dict[str, Any]:
    record = json.loads(json.dumps(RECORD))
    inner = record
    for name in names[:-1]:
        inner = inner[name]
    del inner[names[-1]]
    return record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "expected JSON"),
        ("[1]", "expected schema_version 2, found None"),
        (without("run"), "found no 'run'"),
        (without("algorithm", "name"), "found no 'name'"),
        (without("language", "sha256"), "found no 'sha256'"),
        (without("model", "num_parameters"), "found no 'num_parameters'"),
        (without("excess"), "found no 'excess'"),
        (without("validation_loss", "stderr"), "found no 'stderr'"),
        ({**RECORD, "step": "many"}, "found invalid literal"),
        ({**RECORD, "language": None}, "found 'NoneType'"),
        ({**RECORD, "excess": {"value": math.nan, "stderr": 0.1}}, "where numbers are finite"),
        ({**RECORD, "validation_loss": {"value": 3.0, "stderr": math.inf}}, "where numbers are finite"),
    ],
)
def test_a_wrong_record_names_its_file(record: Any, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "step_1", record)
    with pytest.raises(ValueError, match=message) as caught:
        read_checkpoint(folder)
    assert str(folder / LAB_FILE) in str(caught.value)


@pytest.mark.parametrize("version", [1, 3, None, "2"])
def test_another_schema_version_is_an_error(version: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "step_1", RECORD, schema_version=version)
    with pytest.raises(ValueError, match=rf"lab\.json: expected schema_version 2, found {version!r}"):
        read_checkpoint(folder)


def test_a_folder_without_record_or_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty/lab\.json: no such file"):
        read_checkpoint(tmp_path / "empty")
    folder = write(tmp_path / "step_1", RECORD, weights="pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"step_1: has lab\.json and no weights; expected model\.safetensors or"
    ):
        read_checkpoint(folder)


def test_what_killed_processes_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    dead, running = 2**22 + 1, os.getpid()  # Linux has no process above 2**22
    runs = tmp_path / "runs" / "one"
    kept = [
        runs / "checkpoints" / "step_1" / "lab.json",
        runs / "checkpoints" / f".step_2.{running}.partial" / "lab.json",
        runs / ".hidden" / "notes",
        runs / f"log.{dead}.partial",
    ]
    left = [
        runs / "checkpoints" / f".step_2.{dead}.partial" / "model.safetensors",
        runs / "checkpoints" / f".step_1.{dead}.replaced" / "lab.json",
        tmp_path / f".plan.json.{dead}.partial",
    ]
    orphan = runs / "state" / f".00000040.{dead}.replaced" / "state.json"
    for path in (*kept, *left, orphan):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name, encoding="utf-8")
    remove_leftovers(tmp_path)
    assert all(path.is_file() for path in kept)
    assert not any(path.parent.exists() for path in left[:2])
    assert not left[2].exists()
    assert not orphan.parent.exists()
    assert (runs / "state" / "00000040" / "state.json").read_text(encoding="utf-8") == "state.json"
