"""`harness-ext quad train`: the folder that it leaves, the texts that it reads, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness_ext.cli import main
from harness_ext.cli.evaluation import Evaluation, evaluate_all
from harness_ext.cli.quad import read_documents
from harness_ext.lab.checkpoints import save
from harness_ext.lab.languages.base import write_dataset
from harness_ext.lab.languages.reviews import build_tokenizer, default_grammar
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.train import encode, validation_loss


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    monkeypatch.delenv("HARNESS_EXT_DATA", raising=False)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of the reviews language, with its dataset."""
    grammar = default_grammar()
    tokenizer = build_tokenizer(grammar, max_length=64)
    folder = tmp_path_factory.mktemp("start")
    train, test = (grammar.sample_many(100, np.random.default_rng(seed)) for seed in (0, 1))
    task = grammar.tasks[0]
    splits = {"train": train, "test": test}
    write_dataset(
        folder / "data", task, {name: [task.example(review) for review in drawn] for name, drawn in splits.items()}
    )
    save(folder, build_model(ModelConfig(width=16, depth=1, heads=2), tokenizer, seed=0), tokenizer, {})
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reviews = default_grammar().sample_many(300, np.random.default_rng(2))
    path = tmp_path_factory.mktemp("text") / "reviews.txt"
    path.write_text("\n".join(review.document for review in reviews) + "\n")
    return path


def test_a_model_is_continued_and_lm_eval_runs_on_it(
    start: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "quad"
    command = ["quad", "train", "--model", str(start), "--text", str(text), "--out", str(out), "--steps", "30"]
    assert main([*command, "--batch-size", "8", "--lr", "1e-2"]) == 0
    printed = capsys.readouterr().out
    assert f"lm_eval --tasks natural_demo,probe_demo --model hf --model_args pretrained={out}" in printed
    record = json.loads((out / "lab.json").read_text())
    assert record["made_by"] == "harness-ext quad train"
    assert record["objective"]["name"] == "quad"
    assert record["objective"]["embedding"] == "fixed"
    assert record["tokens_seen"] == 30 * 8 * 64
    assert record["text"] == {"sources": [str(text)], "documents": 300, "held_out": 15}
    before, after = record["quad_loss"]["linear_layer_only"], record["quad_loss"]["trained"]
    assert -0.5 < after["value"] < before["value"] < 0

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert not model.config.tie_word_embeddings
    # Another seed would hold out other documents; here all of them, so that the loss is near, not equal.
    documents = encode(text.read_text().splitlines(), tokenizer)
    loss = validation_loss(model, documents, end_of_text=tokenizer.eos_token_id, objective="quad")
    assert loss.value == pytest.approx(after["value"], abs=0.01)
    assert (out / "data" / "harness_ext" / "reviews" / "test.jsonl").read_bytes() == (
        start / "data" / "harness_ext" / "reviews" / "test.jsonl"
    ).read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["quad"]

    tasks = ("natural_demo", "probe_demo")
    evaluation = Evaluation("quad", "quad", tasks, log_samples=True)
    results = evaluate_all([evaluation], where=out.parent, out=tmp_path / "results", workers=1, threads=1)
    found = json.loads(results["quad"].read_text())["results"]
    assert all(0 <= found[task]["acc,none"] <= 1 for task in tasks)
    for task in tasks:
        (samples,) = results["quad"].parent.glob(f"samples_{task}_*.jsonl")
        scores = [json.loads(line)["acc"] for line in samples.read_text().splitlines()]
        assert sum(scores) / len(scores) == pytest.approx(found[task]["acc,none"])


def test_the_result_depends_on_the_seed_alone(start: Path, text: Path, tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        out = tmp_path / str(number)
        command = ["quad", "train", "--model", str(start), "--text", str(text), "--out", str(out), "--steps", "2"]
        assert main([*command, "--seed", str(seed)]) == 0
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_model_from_scratch(start: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quad"
    command = ["quad", "train", "--architecture", "gpt2", "--tokenizer", str(start), "--text", str(text)]
    sizes = ["--width", "8", "--depth", "1", "--heads", "2", "--context", "32"]
    options = ["--out", str(out), "--steps", "2", "--batch-size", "4", "--train-embedding", "--dtype", "bfloat16"]
    assert main([*command, *sizes, *options]) == 0
    assert "--tasks natural_sst,probe_sst" in capsys.readouterr().out
    record = json.loads((out / "lab.json").read_text())
    assert record["start"] == {"architecture": "gpt2", "width": 8, "depth": 1, "heads": 2, "context": 32}
    assert record["objective"]["embedding"] == "trained"
    assert record["algorithm"]["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.get_output_embeddings().weight.shape[1] == 8
    assert model.config.n_positions == 32
    assert not (out / "data").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--batch-size", "0"], "--batch-size 0: expected at least 1"),
        (["--lr", "nan"], "--lr nan: expected a number above 0"),
        (["--seed", "-1"], "--seed -1: expected a number from 0"),
        (["--length", "65"], "--length 65: expected 2 to 64 tokens"),
        (["--length", "1"], "--length 1: expected 2 to 64 tokens"),
        (["--width", "8"], "--width is for --architecture"),
        (["--batch-size", "1000"], "and one step takes 1000. Give more text, a smaller --batch-size (at most 9"),
        (["--text", "missing.txt"], "--text missing.txt: expected a text file, a .jsonl file or the id of a dataset"),
    ],
)
def test_wrong_options_are_an_error_and_leave_nothing(
    start: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    command = ["quad", "train", "--model", str(start), "--text", str(text), "--out", str(tmp_path / "quad")]
    assert main([*command, "--steps", "1", *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected documents, found none"),
        ("the acting was superb .\n", "expected at least 4 documents"),
        ("good .\n" * 8, "expected at least 64 tokens to fill one block, got"),
        ("the acting was superb .\n" * 40, "Give more text, a smaller --batch-size"),
    ],
)
def test_a_text_that_is_too_short_is_an_error(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (tmp_path / "short.txt").write_text(content)
    out = tmp_path / "quad"
    assert main(["quad", "train", "--model", str(start), "--text", str(tmp_path / "short.txt"), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_what_is_in_the_folder_is_left_alone(
    start: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for out, message in (
        (tmp_path, "expected a new or empty folder"),
        (tmp_path / "notes.txt", "expected a folder, found a file"),
    ):
        assert main(["quad", "train", "--model", str(start), "--text", str(text), "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_models_that_cannot_be_trained_so_are_an_error(
    start: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(start)
    for family, message in (
        ("cohere", "scaled, soft-capped or padded"),
        ("mamba", "cannot be trained on packed documents"),
        ("gpt2", "and the model has 320"),
    ):
        folder = tmp_path / family
        model = tiny_model(family)
        if family != "gpt2":  # whose vocabulary of 320 tokens is too small for the tokenizer
            model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        out = tmp_path / "quad"
        assert main(["quad", "train", "--model", str(folder), "--text", str(text), "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()


def test_documents_of_text_files(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for content, expected in (
        ("one\ntwo\n", ["one", "two"]),
        ("one\ntwo", ["one", "two"]),
        ("\n\none\ntwo\n\n\n", ["one", "two"]),
        ("one\nmore\n\n \ntwo\n", ["one\nmore", "two"]),
        ("one\r\n\r\ntwo\r\nmore\r\n", ["one", "two\nmore"]),
    ):
        path.write_bytes(content.encode())
        assert read_documents([str(path)], column="text", split="train") == expected


def test_documents_of_json_lines_and_of_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some" / "set"
    folder.mkdir(parents=True)
    rows = [{"text": "one\n\nmore", "title": "a"}, {"text": "  ", "title": "b"}, {"text": "two", "title": "c"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("HARNESS_EXT_DATA", str(tmp_path))
    for source in ("some/set", str(folder / "train.jsonl")):
        assert read_documents([source], column="text", split="train") == ["one\n\nmore", "two"]
        assert read_documents([source, source], column="title", split="train") == list("abcabc")
        with pytest.raises(KeyError, match=r"no column 'body'\. .*text, title; choose by --column"):
            read_documents([source], column="body", split="train")
    with pytest.raises(FileNotFoundError, match=r"test\.jsonl"):
        read_documents(["some/set"], column="text", split="test")


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("{", ValueError, "line 1: expected a JSON object"),
        ("[1]", KeyError, "line 1: no column 'text'. Found: list"),
        ('{"text": 3}', ValueError, "row 1: expected a text, found int"),
    ],
)
def test_wrong_json_lines_are_an_error(tmp_path: Path, line: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(error) as caught:
        read_documents([str(path)], column="text", split="train")
    assert message in caught.value.args[0]


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="expected a text in UTF-8"):
        read_documents([str(tmp_path / "text.txt")], column="text", split="train")
