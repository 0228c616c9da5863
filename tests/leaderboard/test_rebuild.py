"""A build after changes, of what has changed only, is byte for byte the build from nothing."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from result_files import lab_json, loss_config, result_file, sample, task_config, write, write_samples

from harness_ext.leaderboard import build, site
from harness_ext.leaderboard.build import build_board, open_cache
from harness_ext.leaderboard.cache import Cache
from harness_ext.leaderboard.contracts import Board, plain
from harness_ext.leaderboard.export import EXPORTS, write_exports
from harness_ext.leaderboard.made import Made
from harness_ext.leaderboard.site import write_site

MODELS = ("org/a", "org/b-7B", "größe/c", "=d()")
TASKS = ("reviews", "films", "questions")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "cache"))


def write_all(board: Board, folder: Path, made: Made | None = None) -> site.Written:
    written = write_site(board, folder, downloads=EXPORTS, made=made)
    write_exports(board, folder, made)
    return written


def rebuild(results: Path, out: Path) -> site.Written:
    """As the command builds."""
    cache = open_cache(results)
    board = build_board(results, cache)
    made = Made.of(out, board.stamps)
    written = write_all(board, out, made)
    made.save()
    cache.close()
    return written


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(results: Path, out: Path, scratch: Path) -> None:
    rebuild(results, out)
    shutil.rmtree(scratch, ignore_errors=True)
    write_all(build_board(results, Cache(None, "")), scratch)
    found, expected = content(out), content(scratch)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


class Changes:
    """Changes of a results folder, each drawn at random."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng, self.count = folder, rng, 0

    def results(self) -> list[Path]:
        return sorted(self.folder.rglob("results_*.json"))

    def file(self) -> dict[str, Any]:
        rng = self.rng
        tasks = rng.sample(TASKS, rng.randint(1, 3))
        documents = rng.choice([6, 6, 6, 8])
        made = result_file(
            tasks,
            model=rng.choice(MODELS),
            acc=rng.randint(0, 6) / 6,
            documents=documents,
            effective=rng.choice([None, None, documents - 2]),
            shots=rng.choice([0, 0, 2]),
            date=rng.choice([None, 1.7e9, 1.8e9 + self.count]),
            configs={name: task_config(dataset_path=rng.choice(["org/x", "org/x", "org/y"])) for name in tasks},
            config={"model_sha": rng.choice(["", "", "a" * 40, "b" * 40])},
        )
        if rng.random() < 0.4:
            loss = 1.1 + rng.randint(0, 3) / 1e3
            made["results"] |= {
                "loss_text": {"loss,none": 3.0, "bits_per_byte,none": loss, "bits_per_byte_stderr,none": 1e-4},
                "flatness_text": {"fisher_trace,none": 10.0 + rng.random()},
            }
            made["configs"] |= {"loss_text": loss_config(), "flatness_text": loss_config(window_flatness={"blocks": 8})}
        return made

    def add(self) -> None:
        self.count += 1
        folder = self.folder / self.rng.choice(["one", "two", "."])
        path = write(folder / f"results_{self.count}.json", self.file())
        if self.rng.random() < 0.3:
            lines = [sample(number, float(self.rng.random() < 0.5)) for number in range(6)]
            write_samples(path.with_name(f"samples_reviews_{self.count}.jsonl"), lines)

    def edit(self) -> None:
        write(self.rng.choice(self.results()), self.file())

    def remove(self) -> None:
        self.rng.choice(self.results()).unlink()

    def rename(self) -> None:
        path = self.rng.choice(self.results())
        self.count += 1
        path.rename(path.with_name(f"results_{self.count}.json"))

    def copy(self) -> None:
        self.count += 1
        shutil.copyfile(self.rng.choice(self.results()), self.folder / f"results_{self.count}.json")

    def touch(self) -> None:
        os.utime(self.rng.choice(self.results()), (self.count, self.count))

    def break_file(self) -> None:
        self.rng.choice(self.results()).write_text("{")

    def lab(self) -> None:
        write(self.folder / "two" / "lab.json", lab_json(excess=self.rng.random()))

    def any(self) -> str:
        names = ["add", "add", "add", "edit", "rename", "copy", "touch", "lab"]
        names += ["remove", "break_file"] if len(self.results()) > 4 else []
        name = self.rng.choice(names)
        getattr(self, name)()
        return name


@pytest.mark.parametrize("seed", range(4))
def test_any_changes(seed: int, tmp_path: Path) -> None:
    changes = Changes(tmp_path / "results", random.Random(seed))
    for _ in range(5):
        changes.add()
    for _ in range(8):
        check(tmp_path / "results", tmp_path / "out", tmp_path / "scratch")
        for _ in range(changes.rng.randint(1, 2)):
            changes.any()
    check(tmp_path / "results", tmp_path / "out", tmp_path / "scratch")


def many(folder: Path) -> None:
    for number in range(4):
        write(folder / f"results_{number}.json", result_file(["reviews", "films"], model=f"org/m{number}"))


def test_what_has_not_changed_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    many(results)
    rebuild(results, out)
    made: list[str] = []
    real_script, real_record = site.data_script, build._Reading._record

    def script(name: str, value: Any) -> bytes:
        made.append(name)
        return real_script(name, value)

    def record(self: Any, file: Any) -> Any:
        made.append(file.name)
        return real_record(self, file)

    monkeypatch.setattr(site, "data_script", script)
    monkeypatch.setattr(build._Reading, "_record", record)
    assert rebuild(results, out).changed == ()
    # Texts of documents come from the samples, which are not joined here.
    assert {name for name in made if not name.startswith("documents/")} == {"index"}
    made.clear()
    write(results / "results_9.json", result_file(["films"], model="org/m9"))
    changed = set(rebuild(results, out).changed)
    asked = {name for name in made if name.endswith(".json")}
    board = build_board(results, Cache(None, ""))
    (films,) = (column.id for column in board.columns if column.task == "films")
    (model,) = (model.id for model in board.models if model.name == "org/m9")
    pages = {f"columns/{films}", f"models/{model}"}
    assert {name for name in made if name.startswith(("columns/", "models/"))} == pages
    assert changed == {"data/index.js", *(f"data/{name}.js" for name in pages)}
    assert asked == {f"results_{number}.json" for number in (0, 1, 2, 3, 9)}  # all that have films


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"x"), lambda path: path.unlink()])
def test_a_page_that_was_changed_or_lost_is_made_again(spoil: Callable[[Path], Any], tmp_path: Path) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    many(results)
    rebuild(results, out)
    expected = content(out)
    for path in sorted((out / "data").rglob("*.js")) + [out / name for name in EXPORTS]:
        spoil(path)
    rebuild(results, out)
    assert content(out) == expected


def test_details_of_scores_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    results = tmp_path / "results"
    many(results)
    write(results / "results_8.json", result_file(["films"], model="org/m1", acc=0.25, date=1.8e9))
    fresh = build_board(results, Cache(None, ""))
    for attribute in ("metrics", "runs", "notes", "prompts"):
        cache = open_cache(results)
        build_board(results, cache)
        cache.close()
        cache = open_cache(results)
        board = build_board(results, cache)
        for score, expected in zip(board.scores, fresh.scores, strict=True):
            assert "metrics" not in vars(score)
            assert (score.num_runs, score.source) == (expected.num_runs, expected.source)
            assert score.metric("acc") == expected.metric("acc")
            assert getattr(score, attribute) == getattr(expected, attribute)
            assert score == expected
            assert plain(score) == plain(expected)
            with pytest.raises(AttributeError, match="no attribute 'other'"):
                score.other  # noqa: B018
        cache.close()


def test_a_file_that_changes_during_a_build_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results"
    many(results)
    cache = open_cache(results)
    build_board(results, cache)
    cache.close()
    cache = open_cache(results)
    board = build_board(results, cache)
    cache.close()  # so that the record has to be read from the file
    (results / "results_2.json").write_text("{")
    score = next(score for score in board.scores if score.source == "results_2.json")
    with pytest.raises(ValueError, match=r"results_2\.json: has changed while the leaderboard was built"):
        _ = score.metrics


def test_what_is_known_of_folders_is_forgotten_in_time(tmp_path: Path) -> None:
    results = tmp_path / "results"
    many(results)
    rebuild(results, tmp_path / "old")
    (known,) = (tmp_path / "cache" / "leaderboard").glob("written-*.sqlite")
    os.utime(known, (1.0, 1.0))
    rebuild(results, tmp_path / "new")
    assert not known.exists()
    assert len(list((tmp_path / "cache" / "leaderboard").glob("written-*.sqlite"))) == 1


def test_without_a_cache_everything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    results = tmp_path / "results"
    many(results)
    assert rebuild(results, tmp_path / "out").changed
    assert rebuild(results, tmp_path / "out").changed == ()
    check(results, tmp_path / "out", tmp_path / "scratch")


def test_a_page_of_old_and_new_scores_reads_the_new_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    write(results / "results_1.json", result_file(["reviews"], model="org/a"))
    write(results / "results_2.json", result_file(["films"], model="org/a"))
    rebuild(results, out)
    write(results / "results_1.json", result_file(["reviews"], model="org/a", acc=0.25))
    read: list[str] = []
    real = build.read_results

    def counted(path: Path, **kwargs: Any) -> Any:
        read.append(path.name)
        return real(path, **kwargs)

    monkeypatch.setattr(build, "read_results", counted)
    (page,) = (name for name in rebuild(results, out).changed if "/models/" in name)
    assert read == ["results_1.json"]
    assert all(text in (out / page).read_text() for text in ("results_1.json", "results_2.json", "0.25"))
