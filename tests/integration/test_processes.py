"""Jobs of one to four processes on the CPU (gloo), whose results are those of one process to the last bit.

All jobs are run by one `jobs.py`, each by forks that meet like the processes of a launcher.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import tiny_model, tiny_tokenizer
from worlds import reviews, write_split

TASKS = "natural_sst,probe_sst,quad_sst,probe_words_sst,loss_wikitext,flatness_wikitext"
SWEEP = {"prompt": ["sst/it_was", "sst/sentiment", "sst/this_movie_is"]}
SECONDS = 60
"""Within which a job has to end when one of its processes fails."""

DEPENDS_ON_PROCESSES = {"processes", "busiest_share"}
TIMES = {"date", "start_time", "end_time", "total_evaluation_time_seconds", "seconds", "tokens_per_second"}
OF_THE_STORE = {"model_fingerprint", "from_store", "forwarded", "tokens", "separate_tokens", "padding", "sharing"}


@dataclass(frozen=True)
class Job:
    """What a job of several processes left."""

    folder: Path
    statuses: list[int | str]
    seconds: list[float]

    @property
    def results(self) -> dict[str, Any]:
        (path,) = self.folder.rglob("results_*.json")
        return json.loads(path.read_text())

    @property
    def samples(self) -> dict[str, str]:
        """Sample files, as they are, by task."""
        return {path.name.rpartition("_")[0]: path.read_text() for path in self.folder.rglob("samples_*.jsonl")}

    @property
    def weights(self) -> list[dict[str, np.ndarray]]:
        """Of each fit of the job in order."""
        paths = sorted(self.folder.glob("*.fit.npz"), key=lambda path: int(path.name.split(".")[0]))
        return [dict(np.load(path)) for path in paths]

    def errors(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def forwarded(self) -> list[list[str]]:
        """Sequences that each rank forwarded."""
        paths = [self.folder / f"{rank}.forwarded" for rank in range(len(self.statuses))]
        return [path.read_text().splitlines() if path.exists() else [] for path in paths]

    @property
    def summary(self) -> dict[str, Any]:
        return self.results["harness_ext"]["passes"][0]


def differences(one: Any, other: Any, leave_out: set[str], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ, apart from the entries of some names."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if key not in leave_out:
                yield from differences(one.get(key, "missing"), other.get(key, "missing"), leave_out, f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, leave_out, f"{path}[{i}]")
    elif one != other:
        yield path, one, other


def same(job: Job, alone: Job, *, beside: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """The result file, the samples and the weights of the probes are equal, not only close."""
    assert job.statuses == [0] * len(job.statuses), job.errors(job.statuses.index(1))[-2000:]
    leave_out = TIMES | DEPENDS_ON_PROCESSES | beside
    assert list(differences(alone.results, job.results, leave_out)) == []
    assert job.samples == alone.samples
    assert len(job.samples) > 0
    assert len(job.weights) == len(alone.weights)
    for found, expected in zip(job.weights, alone.weights, strict=True):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


class Spec:
    """Makes the spec of `jobs.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, []  # type: tuple[Path, list[dict[str, Any]]]

    def add(
        self,
        name: str,
        size: int,
        tasks: str = TASKS,
        *more: str,
        metadata: Mapping[str, Any] | None = None,
        store: str = "off",
        **kwargs: Any,
    ) -> None:
        options = {
            "probe": {"c_grid": [0.01, 1.0], "num_folds": 3},
            "flatness": {"max_blocks": 20, "lambda_blocks": 2},
            "block_tokens": 24,
            **(metadata or {}),
        }
        write = self.folder / "jobs" / name
        arguments = ["--model", "hf", "--model_args", f"pretrained={self.folder / 'gpt2'},dtype=float32"]
        arguments += ["--device", "cpu", "--batch_size", "8", "--tasks", tasks, "--metadata", json.dumps(options)]
        arguments += ["--output_path", str(write / "out"), "--log_samples", *more]
        environment = {
            "HARNESS_EXT_DATA": str(self.folder / "data"),
            "HARNESS_EXT_CACHE": store if store == "off" else str(self.folder / "stores" / store),
            "HF_DATASETS_CACHE": str(self.folder / "datasets"),
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        }
        self.jobs.append(
            {
                "name": name,
                "size": size,
                "write": str(write),
                "arguments": arguments,
                "environment": environment,
                **kwargs,
            }
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a dataset and a corpus."""
    folder = tmp_path_factory.mktemp("world")
    tiny_model("gpt2").save_pretrained(folder / "gpt2")
    tiny_tokenizer().save_pretrained(folder / "gpt2")
    tiny_model("llama").save_pretrained(folder / "llama")
    tiny_tokenizer().save_pretrained(folder / "llama")
    rows = [{"text": f"{row['text']} {i}", "label": i % 2} for i, row in enumerate(reviews(180))]
    write_split(folder / "data" / "SetFit" / "sst2", "train", rows[:100])
    write_split(folder / "data" / "SetFit" / "sst2", "test", rows[100:])
    lines = [{"text": " ".join(row["text"] for row in rows[i : i + 4])} for i in range(0, len(rows), 4)]
    write_split(folder / "data" / "Salesforce" / "wikitext", "test", lines)
    return folder


@pytest.fixture(scope="module")
def jobs(world: Path) -> dict[str, Job]:
    spec = Spec(world)
    for size in (1, 2, 3):
        spec.add(f"ranks {size}", size)
    spec.add("ranks 4", 4, ranks_of_node=2)  # of two nodes
    spec.add("no document", 3, "natural_sst,loss_wikitext,flatness_wikitext", "--limit", "1")
    spec.add("one document", 1, "natural_sst,loss_wikitext,flatness_wikitext", "--limit", "1")
    spec.add("shared store, cold", 2, "natural_sst,quad_sst", store="shared")
    spec.add("shared store, warm", 3, "natural_sst,quad_sst", store="shared")
    spec.add("own stores, cold", 3, "natural_sst,quad_sst", store="of {rank}")
    spec.add("own stores, one missing", 2, "natural_sst,quad_sst", store="of {rank}")
    spec.add("no store", 1, "natural_sst,quad_sst")
    for size in (1, 3):
        options = SWEEP | {"probe": {"prompt": True, "layer": "all", "c_grid": [0.1], "num_folds": 3}}
        spec.add(f"sweep {size}", size, "natural_sst,probe_sst,probe_full_sst", metadata=options)
        options = {"flatness": {"max_blocks": 60, "rel_stderr": 0.3, "quantities": ["fisher_trace", "ggn_trace"]}}
        spec.add(f"precision {size}", size, "flatness_wikitext", metadata=options)
    spec.add("sharded", 2, "natural_sst,quad_sst,probe_full_sst,loss_wikitext", sharded=True)
    spec.add("not sharded", 1, "natural_sst,quad_sst,probe_full_sst,loss_wikitext")
    before = {"model": "hf", "model_args": f"pretrained={world / 'gpt2'}", "device": "cpu", "tasks": ["natural_sst"]}
    spec.add(
        "after a caught error", 2, "natural_sst,quad_sst", fails={"where": "requests", "ranks": [0, 1]}, catches=before
    )
    for where, ranks in (("forward", [1]), ("fit", [0]), ("requests", [0, 1]), ("flatness", [1])):
        spec.add(f"fails in {where}", 2, fails={"where": where, "ranks": ranks}, waits=True)
    spec.add("sharded flatness", 2, "flatness_wikitext", sharded=True, waits=True)
    spec.add("fails in options", 2, metadata={"prompt": "sst/nothing"}, waits=True)
    spec.add("tensor parallel", 2, "natural_sst", waits=True)
    spec.jobs[-1]["arguments"] += ["--model_args", f"pretrained={world / 'llama'},tp_plan=auto"]
    for where in ("killed", "stopped", "interrupted"):
        size = 3 if where == "stopped" else 2
        spec.add(where, size, "natural_sst", fails={"where": where, "ranks": [1]}, waits=True)
    shutil.copytree(world / "data", world / "of 0")
    shutil.copytree(world / "data", world / "of 1")
    write_split(world / "of 1" / "Salesforce" / "wikitext", "test", [{"text": "the film is bad"}] * 30)
    write_split(world / "of 1" / "SetFit" / "sst2", "test", [{"text": "it was good", "label": 1}] * 80)
    for task in ("natural_sst", "loss_wikitext", "flatness_wikitext"):
        spec.add(f"other data, {task}", 2, task, waits=True)
        spec.jobs[-1]["environment"]["HARNESS_EXT_DATA"] = str(world / "of {rank}")
    path = world / "spec.json"
    path.write_text(json.dumps(spec.jobs))
    script = Path(__file__).with_name("jobs.py")
    done = subprocess.run([sys.executable, script, path], capture_output=True, text=True, cwd=world)
    assert done.returncode == 0, done.stderr[-2000:]
    found = zip(spec.jobs, json.loads(done.stdout), strict=True)
    return {job["name"]: Job(Path(job["write"]), **ended) for job, ended in found}


# ----------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_are_those_of_one_process_to_the_last_bit(jobs: dict[str, Job], size: int) -> None:
    same(jobs[f"ranks {size}"], jobs["ranks 1"])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_distinct_prompt_is_forwarded_once_in_the_whole_job(jobs: dict[str, Job], size: int) -> None:
    (alone,) = jobs["ranks 1"].forwarded()
    of_ranks = jobs[f"ranks {size}"].forwarded()
    everything = [sequence for of_rank in of_ranks for sequence in of_rank]
    assert len(alone) == len(set(alone))
    assert sorted(everything) == sorted(alone)
    assert all(of_ranks)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rank_0_alone_fits_and_writes(jobs: dict[str, Job], size: int) -> None:
    folder = jobs[f"ranks {size}"].folder
    assert {path.name.split(".")[1] for path in folder.glob("*.fit.npz")} == {"0"}
    assert [path.name for path in folder.glob("*.wrote")] == ["0.wrote"]
    assert len(list(folder.rglob("results_*.json"))) == 1
    assert all(not (folder / f"{rank}.out").read_text() for rank in range(1, size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rank_0_alone_shows_bars_and_they_count_all_ranks(jobs: dict[str, Job], size: int) -> None:
    job = jobs[f"ranks {size}"]
    for name in ("One pass", "Windows", "Flatness"):
        last = [line for line in re.split(r"[\r\n]", job.errors(0)) if line.startswith(f"{name}:")][-1]
        assert f"{name}: 100%" in last
        done, total = map(int, re.search(r"(\d+)/(\d+) \[", last).groups())  # type: ignore[union-attr]
        assert done == total > 0
    others = "".join(job.errors(rank) for rank in range(1, size))
    assert not re.search(r"One pass|Windows:|Flatness:|it/s.*Building|100/100", others)


def test_the_busiest_share_is_reported(jobs: dict[str, Job]) -> None:
    assert jobs["ranks 1"].summary["busiest_share"] == 1
    for size in (2, 3, 4):
        summary = jobs[f"ranks {size}"].summary
        assert summary["processes"] == size
        # Of 60 short batches; the proof that sharing is exact, 200 tokens, is one of them.
        assert 1 / size <= summary["busiest_share"] < 1.7 / size
        shown = f"{size} processes, the busiest with {summary['busiest_share']:.1%} of the tokens"
        assert shown in jobs[f"ranks {size}"].errors(0)


def test_sweeps_and_words_of_several_tokens(jobs: dict[str, Job]) -> None:
    """Prompts that share their beginning: whether that is exact is proven once, and all ranks go by it."""
    assert jobs["sweep 1"].summary["sharing"] == "packed"
    assert jobs["sweep 1"].summary["word_continuations"] > 0
    same(jobs["sweep 3"], jobs["sweep 1"])


def test_flatness_to_a_precision_stops_at_the_same_block(jobs: dict[str, Job]) -> None:
    same(jobs["precision 3"], jobs["precision 1"])
    report = jobs["precision 3"].results["configs"]["flatness_wikitext"]["metadata"]["report"]["window_flatness"]
    assert report["stopped"] == "rel_stderr"


def test_ranks_without_a_document(jobs: dict[str, Job]) -> None:
    same(jobs["no document"], jobs["one document"])


# --------------------------------------------------------------------------------------------------------- the store


def test_a_store_that_all_ranks_share(jobs: dict[str, Job]) -> None:
    same(jobs["shared store, cold"], jobs["no store"], beside=OF_THE_STORE)
    same(jobs["shared store, warm"], jobs["no store"], beside=OF_THE_STORE)
    assert jobs["shared store, warm"].summary["forwarded"] == 0
    assert jobs["shared store, warm"].forwarded() == [[], [], []]


def test_stores_that_ranks_do_not_share(jobs: dict[str, Job]) -> None:
    """What the third rank computed is nowhere in the second job, and nothing else is computed again."""
    cold, warm = jobs["own stores, cold"], jobs["own stores, one missing"]
    same(cold, jobs["no store"], beside=OF_THE_STORE)
    same(warm, jobs["no store"], beside=OF_THE_STORE)
    assert sorted(sequence for of_rank in warm.forwarded() for sequence in of_rank) == sorted(cold.forwarded()[2])
    assert 0 < warm.summary["forwarded"] < warm.summary["from_store"]


# -------------------------------------------------------------------------------------------------- weights in pieces


def test_weights_that_are_spread_over_ranks(jobs: dict[str, Job]) -> None:
    """FSDP gathers weights in every forward pass of every rank: all make equally many, whatever their shares are."""
    same(jobs["sharded"], jobs["not sharded"])
    calls = [len((jobs["sharded"].folder / f"{rank}.calls").read_text()) for rank in range(2)]
    assert calls[0] == calls[1] > 0
    assert all(jobs["sharded"].forwarded())


def test_flatness_of_weights_that_are_spread_over_ranks_is_refused(jobs: dict[str, Job]) -> None:
    job = jobs["sharded flatness"]
    assert job.statuses == [1, 1]
    assert "weights are spread over processes" in job.errors(0) + job.errors(1)


def test_a_tensor_parallel_model_is_refused(jobs: dict[str, Job]) -> None:
    job = jobs["tensor parallel"]
    assert job.statuses == [1, 1]
    shown = job.errors(0) + job.errors(1)
    assert shown.count("natural_sst: the model's matrices are split over processes (tp_plan)") == 1


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("where", ["forward", "fit", "requests", "flatness", "options"])
def test_a_rank_that_fails_ends_all_and_its_error_is_shown_once(jobs: dict[str, Job], where: str) -> None:
    job = jobs[f"fails in {where}"]
    assert job.statuses == [1, 1]
    assert max(job.seconds) < SECONDS
    shown = job.errors(0) + job.errors(1)
    if where == "options":  # what the user can put right is one line
        assert shown.count("Traceback (most recent call last)") == 0
        assert len(re.findall("error: .*unknown prompt 'sst/nothing'", shown)) == 1
    else:
        assert shown.count("Traceback (most recent call last)") == 1
        assert len(re.findall(rf"Error: .*fails on purpose in {where}", shown)) == 1
    assert not list(job.folder.rglob("results_*.json"))


def test_a_rank_that_is_killed_ends_all_without_a_launcher_that_does(jobs: dict[str, Job]) -> None:
    job = jobs["killed"]
    assert job.statuses == [1, -9]
    assert max(job.seconds) < SECONDS
    assert not list(job.folder.rglob("results_*.json"))


def test_a_rank_whose_connections_stay_open_is_known_by_its_silence(jobs: dict[str, Job]) -> None:
    job = jobs["stopped"]
    assert job.statuses == [1, -9, 1]
    assert max(job.seconds) < SECONDS
    assert job.errors(0).count("rank 1 has given no sign of life for 15 s") == 1
    assert [job.errors(rank).count(f"rank {rank} ends: rank 1 has failed") for rank in (0, 2)] == [1, 1]
    assert not any("Traceback" in job.errors(rank) for rank in (0, 2))
    assert not list(job.folder.rglob("results_*.json"))


def test_a_rank_that_is_interrupted_ends_all(jobs: dict[str, Job]) -> None:
    job = jobs["interrupted"]
    assert job.statuses == [1, 130]
    assert max(job.seconds) < SECONDS
    assert not list(job.folder.rglob("results_*.json"))


def test_an_error_that_was_caught_does_not_end_the_next_evaluation(jobs: dict[str, Job]) -> None:
    job = jobs["after a caught error"]
    assert [(job.folder / f"{rank}.out").read_text().count("caught: rank") for rank in (0, 1)] == [1, 1]
    same(job, jobs["no store"], beside={"config"})


@pytest.mark.parametrize(
    ("task", "what"), [("natural_sst", "prompts"), ("loss_wikitext", "windows"), ("flatness_wikitext", "blocks")]
)
def test_ranks_that_have_other_data_are_told_so(jobs: dict[str, Job], task: str, what: str) -> None:
    job = jobs[f"other data, {task}"]
    assert job.statuses == [1, 1]
    shown = job.errors(0) + job.errors(1)
    assert shown.count(f"Rank 1 of 2 has other {what} than rank 0") == 1
    assert not list(job.folder.rglob("results_*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["sst/it_was", "sst/nothing"])
def test_torchrun_and_lm_eval_itself(world: Path, tmp_path: Path, prompt: str) -> None:
    """A launcher that ends all processes when one ends, and lm_eval's own command."""
    arguments = ["--model", "hf", "--model_args", f"pretrained={world / 'gpt2'}", "--tasks", "natural_sst"]
    arguments += ["--metadata", json.dumps({"prompt": prompt}), "--output_path", str(tmp_path)]
    environment = {"HARNESS_EXT_DATA": str(world / "data"), "HARNESS_EXT_CACHE": "off", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "lm_eval",
            *arguments,
        ],
        env={**os.environ, **environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    written = list(tmp_path.rglob("results_*.json"))
    if prompt == "sst/it_was":
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(written[0].read_text())["harness_ext"]["passes"][0]["processes"] == 2
        assert len(written) == 1
    else:
        assert done.returncode != 0
        assert not written
        assert len(re.findall(r"KeyError: .*unknown prompt 'sst/nothing'", done.stderr)) == 1
