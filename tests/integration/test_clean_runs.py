"""What a run leaves behind: its results or an error, and nothing else: no file, no open file, no thread, no warning."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval.loggers import EvaluationTracker
from tiny import tiny_model, tiny_tokenizer
from worlds import World, a_world, reviews, write_split

from harness_ext.cli import main
from harness_ext.engine.attach import attach
from harness_ext.engine.forward import LastStateModel

RUNS = """
import os, sys, threading
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
from harness_ext import plugin

plugin.install()
scan = TaskManager.__init__
TaskManager.__init__ = lambda self, *args, **kwargs: scan(self, *args, **{**kwargs, "include_defaults": False})
for turn in range(2):
    cli_evaluate()
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    print("left:", len(files), sorted({thread.name for thread in threading.enumerate()}))
"""
TASKS = "natural_sst,probe_sst,quad_sst,loss_wikitext,flatness_wikitext"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with a_world(tmp_path_factory.mktemp("clean")) as made:
        tiny_model("gpt2").save_pretrained(made.folder / "model")
        tiny_tokenizer().save_pretrained(made.folder / "model")
        for split, count, seed in (("train", 30, 0), ("test", 12, 1)):
            write_split(made.mirror / "SetFit" / "sst2", split, reviews(count, seed=seed))
        lines = [{"text": row["text"]} for row in reviews(40, seed=2)]
        write_split(made.mirror / "Salesforce" / "wikitext", "test", lines)
        yield made


def arguments(world: World, tasks: str, output: Path) -> list[str]:
    return [
        *("run", "--model", "hf", "--model_args", f"pretrained={world.folder / 'model'},dtype=float32"),
        *("--device", "cpu", "--batch_size", "8", "--tasks", tasks, "--output_path", str(output)),
        *("--log_samples", "--metadata", json.dumps({"block_tokens": 32, "flatness": {"max_blocks": 3}})),
    ]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc")
def test_a_run_leaves_no_file_no_thread_and_no_warning(world: World, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", RUNS),
            *arguments(world, TASKS, tmp_path / "out"),
        ],
        env=os.environ
        | {
            "HARNESS_EXT_CACHE": str(tmp_path / "states"),
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = re.findall(r"^left: (.*)$", done.stdout, re.MULTILINE)
    assert first == second
    # Standard input, output and error, and the folder that is being listed; torch adds its watchers.
    assert int(first.split()[0]) <= 8, first
    assert re.sub(r"'MainThread'|'tqdm_monitor'|[\[\], ]", "", first.partition(" ")[2]) == "", first
    # torch makes a folder for compiled code when it is imported.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert {path.suffix for path in (tmp_path / "states").rglob("*") if path.is_file()} == {".safetensors", ".json"}
    warned = re.findall(r"^.*(?:\w+Warning\b|Exception ignored).*$", done.stderr, re.MULTILINE)
    assert warned == []


# ------------------------------------------------------------------------------------------- results are there, or not


RESULTS: dict[str, Any] = {
    "results": {"natural_sst": {"alias": "natural_sst", "acc,none": 0.5, "acc_stderr,none": "N/A"}},
    "versions": {"natural_sst": 1.0},
    "n-shot": {"natural_sst": 0},
    "higher_is_better": {"natural_sst": {"acc": True}},
    "configs": {"natural_sst": {"description": "x" * 5000}},
}
SAMPLE = {
    "doc_id": 0,
    "doc_hash": "a",
    "prompt_hash": "b",
    "target_hash": "c",
    "arguments": [["x" * 500]],
    "resps": [["0"]],
    "filtered_resps": ["0"],
    "target": "0",
}


@pytest.fixture
def full_disk() -> Iterator[Any]:
    """A function after which no file may become longer than so many bytes, as on a disk that is full then."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tracker(output: Path) -> EvaluationTracker:
    attach()
    made = EvaluationTracker(output_path=str(output))
    made.general_config_tracker.model_name_sanitized = "model"
    return made


def ours() -> dict[str, Any]:
    return json.loads(json.dumps(RESULTS)) | {"harness_ext": {"version": "0"}}


@pytest.mark.parametrize("name", ["out", "out.json"])
def test_saved_results_are_no_error(tmp_path: Path, name: str) -> None:
    made = tracker(tmp_path / name)
    made.save_results_aggregated(results=ours(), samples=None)
    made.save_results_samples(task_name="natural_sst", samples=[dict(SAMPLE), dict(SAMPLE)])
    assert len(list(tmp_path.rglob("*.json"))) == 1
    (samples,) = tmp_path.rglob("samples_*.jsonl")
    assert len(samples.read_text().splitlines()) == 2


def test_results_that_a_full_disk_cuts_off(tmp_path: Path, full_disk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = tracker(tmp_path)
    full_disk(2000)
    with pytest.raises(OSError, match=r"--output_path .*: the results could not be saved completely"):
        made.save_results_aggregated(results=ours(), samples=None)
    assert list(tmp_path.rglob("results_*.json"))  # what fits
    assert "natural_sst" in capsys.readouterr().out  # the numbers are shown, at least


def test_samples_that_a_full_disk_cuts_off(tmp_path: Path, full_disk: Any) -> None:
    made = tracker(tmp_path)
    made.save_results_aggregated(results=ours(), samples=None)
    full_disk(1000)
    with pytest.raises(OSError, match="the samples of natural_sst could not be saved completely"):
        made.save_results_samples(task_name="natural_sst", samples=[dict(SAMPLE), dict(SAMPLE)])


def test_results_of_others_are_left_to_lm_eval(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = tracker(tmp_path / "file")
    made.save_results_aggregated(results=json.loads(json.dumps(RESULTS)), samples=None)
    made.save_results_samples(task_name="arc", samples=[dict(SAMPLE)])
    EvaluationTracker().save_results_aggregated(results=ours(), samples=None)  # asked to save nothing


@pytest.mark.parametrize("when", ["before the run", "in the run"])
def test_a_run_whose_results_cannot_be_saved_fails(
    when: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    compute = LastStateModel.states

    def states(*args: Any) -> Any:
        computed.append(args)
        (tmp_path / "file").write_text("")
        return compute(*args)

    monkeypatch.setattr(LastStateModel, "states", states)
    if when == "before the run":
        (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "out"
    assert main(arguments(world, "natural_sst", output)) == 1
    captured = capsys.readouterr()
    *_, last = captured.err.strip().splitlines()
    if when == "before the run":
        assert f"--output_path {output}: expected a folder, {tmp_path / 'file'} is a file." in last
        assert not computed
    else:
        assert f"--output_path {output}: the results could not be saved completely" in last
        assert "natural_sst" in captured.out
