"""`harness-ext demo`: what it makes, what it refuses, and what it prints after a run of lm_eval."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness_ext.cli import demo, main
from harness_ext.lab import train as lab_train


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few documents, and nothing outside the test's folder."""
    for name in ("_NUM_TRAIN", "_NUM_TEST", "_NUM_VALIDATION"):
        monkeypatch.setattr(demo, name, 100)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    monkeypatch.delenv("HARNESS_EXT_DATA", raising=False)


@pytest.fixture
def no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.01, "alias": task} for task in demo.TASKS}}
    results |= {"versions": {}, "n-shot": {}, "higher_is_better": {}, "configs": {}}
    monkeypatch.setattr(demo, "evaluate", lambda folder: results)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_folder_is_a_model_with_its_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "demo"
    record = demo.make_model(folder, seed=1, steps=2)
    assert record == json.loads((folder / "lab.json").read_text())
    assert record["seed"] == 1
    assert record["algorithm"]["name"] == "adamw"
    assert record["tokens_seen"] == 2 * 16 * 64
    loss = record["validation_loss"]
    assert loss["excess"] == pytest.approx(loss["value"] - record["language"]["entropy"]["value"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == record["model"]["num_parameters"]
    assert len(tokenizer) == model.config.vocab_size
    train, test = (rows(folder / "data" / "harness_ext" / "reviews" / f"{split}.jsonl") for split in ("train", "test"))
    assert len(train) == len(test) == 100
    assert not {row["text"] for row in train} & {row["text"] for row in test}
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]


def test_the_dataset_does_not_depend_on_the_steps(tmp_path: Path) -> None:
    for steps in (1, 2):
        demo.make_model(tmp_path / str(steps), seed=0, steps=steps)
    name = Path("data", "harness_ext", "reviews", "test.jsonl")
    assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_a_demo_is_made_once_and_replaced_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_evaluation: None
) -> None:
    folder = tmp_path / "demo"
    command = ["demo", "--out", str(folder), "--steps", "1"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert (
        f"lm_eval --tasks natural_demo,probe_demo --model hf --model_args pretrained={folder} --batch_size auto\n"
        in out
    )
    weights = (folder / "model.safetensors").read_bytes()
    assert main(command) == 0
    assert "holds this demo already" in capsys.readouterr().out

    assert main([*command, "--seed", "7"]) == 2
    assert re.search(r"holds a demo of --seed 0 --steps 1\. .*--force.*--out", capsys.readouterr().err)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert main([*command, "--seed", "7", "--force"]) == 0
    assert (folder / "model.safetensors").read_bytes() != weights
    assert json.loads((folder / "lab.json").read_text())["seed"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    ("name", "content"),
    [("notes.txt", "mine"), ("lab.json", '{"made_by": "someone"}'), ("lab.json", "[]"), ("lab.json", "{")],
)
def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, force: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["demo", "--out", str(tmp_path), *force]) == 2
    assert "not a finished demo" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == content


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo").write_text("mine")
    assert main(["demo", "--out", str(tmp_path / "demo"), "--force"]) == 2
    assert "not a finished demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"), [(["--steps", "0"], "--steps 0: expected at least 1"), (["--seed", "-1"], "--seed -1")]
)
def test_numbers_out_of_range_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str], message: str
) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo"), *option]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_a_run_that_fails_leaves_the_old_demo_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_evaluation: None
) -> None:
    folder = tmp_path / "demo"
    command = ["demo", "--out", str(folder), "--steps", "1"]
    assert main(command) == 0
    before = (folder / "lab.json").read_text()

    def full_disk(target: Path, *_: object) -> None:
        assert (target / "data").is_dir()
        raise OSError("No space left on device")

    monkeypatch.setattr(lab_train, "save", full_disk)
    assert main([*command, "--force"]) == 2
    assert (folder / "lab.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_lm_eval_runs_on_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo"), "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\|natural_demo\|.*\|acc ", out)
    assert re.search(r"\|probe_demo +\|.*\|acc ", out)
    record = json.loads((tmp_path / "demo" / "lab.json").read_text())
    bayes = record["datasets"]["harness_ext/reviews"]["bayes_accuracy"]["accuracy"]
    for task in demo.TASKS:
        assert re.search(rf"^{task} +\d+\.\d% ± \d+\.\d% +{bayes:.1%} +50\.0%$", out, re.MULTILINE)


@pytest.mark.slow
def test_the_demo_is_well_above_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chance is 50 % with a standard error of 1.1 % on 2,000 documents; the Bayes-optimal accuracy is about 94.5 %."""
    for name in ("_NUM_TRAIN", "_NUM_TEST", "_NUM_VALIDATION"):
        monkeypatch.setattr(demo, name, 2000)
    demo.make_model(tmp_path / "demo", seed=0, steps=demo.DEFAULT_STEPS)
    results = demo.evaluate(tmp_path / "demo")["results"]
    assert results["natural_demo"]["acc,none"] > 0.87
    assert results["probe_demo"]["acc,none"] > 0.75
