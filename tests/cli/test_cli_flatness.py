"""`harness-ext flatness widen`: the folder that it leaves, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import CONFIGS, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness_ext.cli import flatness, main


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def save_small(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    tiny_model(family, dtype=dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_large(folder: Path, family: str, **changes: Any) -> Path:
    """A folder with a config.json and nothing else."""
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


LARGER = {
    "gpt2": {"n_embd": 64, "n_head": 8, "n_layer": 3},
    "llama": {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 100, "head_dim": 8},
    "qwen2": {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
}


@pytest.mark.parametrize("family", LARGER)
def test_the_folder_has_the_large_architecture_and_the_small_function(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = save_small(tmp_path / "small", family)
    (small / "data" / "org").mkdir(parents=True)
    (small / "data" / "org" / "test.jsonl").write_text("{}\n")
    like, out = save_large(tmp_path / "large", family, **LARGER[family]), tmp_path / "new" / "wide"
    assert main(["flatness", "widen", str(small), "--like", str(like), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"--model_args pretrained={out}" in printed

    before, after = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (small, out))
    assert {name: getattr(after.config, name) for name in LARGER[family]} == LARGER[family]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(small).get_vocab()
    tokens = tokenizer("this movie is terrible , and the good film is great .", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = [model(tokens).logits for model in (before, after)]
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[0].abs().max()

    record = json.loads((out / flatness.WIDEN_FILE).read_text())
    assert (record["small"], record["like"]) == (str(small), str(like))
    assert record["parameters"] == {"small": before.num_parameters(), "large": after.num_parameters()}
    assert record["largest_difference_of_logits"] < 1e-5
    assert (out / "data" / "org" / "test.jsonl").read_text() == "{}\n"
    assert [path.name for path in out.parent.iterdir()] == ["wide"]


def test_half_precision_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = save_small(tmp_path / "small", "gpt2", torch.bfloat16)
    like, out = save_large(tmp_path / "large", "gpt2", n_embd=64), tmp_path / "wide"
    assert main(["flatness", "widen", str(small), "--like", str(like), "--out", str(out)]) == 0
    assert "saved in bfloat16" in capsys.readouterr().out
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in (small, out))
    assert after.dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    block, wide = (model.transformer.h[0].mlp.c_fc.weight.float() for model in (before, after))
    assert torch.equal(wide, block.repeat(2, 2) / 2)


@pytest.mark.parametrize("kind", ["hmm", "pcfg", "reviews"])
def test_a_model_of_the_lab_is_measured_on_its_own_language(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    like, text = save_large(tmp_path / "large", "gpt2", n_embd=64), f"harness_ext/{kind}_text"
    lab = tmp_path / "a lab"
    small = save_small(lab / "runs" / "sgd" / "checkpoints" / "step_1", "gpt2")
    tasks = {"reviews": "loss_demo,flatness_demo"}.get(kind, f"loss_{kind},flatness_{kind}")

    def told(name: str) -> str:
        assert main(["flatness", "widen", str(small), "--like", str(like), "--out", str(tmp_path / name)]) == 0
        return capsys.readouterr().out

    assert "  lm_eval --tasks loss_wikitext,flatness_wikitext --model hf" in told("of_anyone")
    # As `harness-ext quad train` writes it.
    (small / "lab.json").write_text('{"made_by": "harness-ext quad train"}')
    assert "  lm_eval --tasks loss_wikitext,flatness_wikitext --model hf" in told("of_quad")
    (small / "lab.json").write_text(json.dumps({"language": {"kind": kind}}))
    assert f"  HARNESS_EXT_DATA=FOLDER_OF_THE_LAB/data lm_eval --tasks {tasks} --model hf" in told("without_data")
    (lab / "data" / text).mkdir(parents=True)
    assert f"  HARNESS_EXT_DATA='{lab / 'data'}' lm_eval --tasks {tasks} --model hf" in told("of_the_lab")
    (small / "data" / text).mkdir(parents=True)
    assert f"  lm_eval --tasks {tasks} --model hf" in told("with_data")
    (small / "lab.json").write_text(json.dumps({"language": {"kind": "runes"}}))
    assert "lm_eval --tasks loss_NAME,flatness_NAME --model hf" in told("of_another")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["flatness", "widen", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, out = save_small(tmp_path / "small", "gpt2"), tmp_path / "wide"
    like = save_large(tmp_path / "large", "gpt2", n_embd=48, vocab_size=400)
    message = refused(capsys, small, "--like", like, "--out", out)
    assert f"--like {like}" in message
    assert "vocab_size is 400, expected 320" in message
    assert "n_embd is 48, expected a multiple of the small model's 32, such as 64" in message
    assert "model_type is 'llama', expected 'gpt2'" in refused(
        capsys, small, "--like", save_large(tmp_path / "llama", "llama"), "--out", out
    )
    assert str(tmp_path / "nothing") in refused(capsys, small, "--like", tmp_path / "nothing", "--out", out)
    assert "expected a new or empty folder" in refused(capsys, small, "--like", like, "--out", small)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "llama", "small"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_without_a_tokenizer_is_refused(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(family).save_pretrained(tmp_path / "small")
    like = save_large(tmp_path / "large", family, **LARGER[family])
    message = refused(capsys, tmp_path / "small", "--like", like, "--out", tmp_path / "wide")
    assert f"{tmp_path / 'small'}: expected a tokenizer beside the weights" in message
    assert not (tmp_path / "wide").exists()


def test_a_wrong_embedding_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness_ext.flatness import widen as widening

    real = widening.widen

    def slightly_wrong(model: Any, large: transformers.PretrainedConfig) -> Any:
        wide = real(model, large)
        with torch.no_grad():
            wide.transformer.h[1].mlp.c_fc.weight[0, 0] += 0.5
        return wide

    monkeypatch.setattr(widening, "widen", slightly_wrong)
    small = save_small(tmp_path / "small", "gpt2")
    like = save_large(tmp_path / "large", "gpt2", n_embd=64)
    with pytest.raises(RuntimeError, match="nothing was written"):
        main(["flatness", "widen", str(small), "--like", str(like), "--out", str(tmp_path / "wide")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


def test_a_run_that_fails_while_it_saves_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    small = save_small(tmp_path / "small", "gpt2")
    like = save_large(tmp_path / "large", "gpt2", n_embd=64)
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
    assert main(["flatness", "widen", str(small), "--like", str(like), "--out", str(tmp_path / "wide")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


# ------------------------------------------------------------------------------------------------- chart


def save_results(path: Path, rows: Any) -> Path:
    report = {"window_flatness": {"by_parameter": rows}}
    results = {"model_name": "a/b", "configs": {"flatness_x": {"metadata": {"report": report}}}}
    path.write_text(json.dumps(results), encoding="utf-8")
    return path


ROWS = {
    "transformer.wte.weight": {"size": 8, "fisher_trace": 3.0, "fisher_trace_scaled": 0.5},
    "transformer.h.0.mlp.c_fc.weight": {"size": 4, "fisher_trace": 1.0, "fisher_trace_scaled": 1.5},
}


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_chart_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    out = tmp_path / "new" / f"chart{suffix}"
    assert main(["flatness", "chart", str(save_results(tmp_path / "r.json", ROWS)), "--out", str(out), "--scaled"]) == 0
    printed = capsys.readouterr().out
    assert "| wte | 8 | 3 | 75.0 | 0.5 | 25.0 |" in printed
    assert "| layer 0 | 4 | 1 | 25.0 | 1.5 | 75.0 |" in printed
    assert out.stat().st_size > 1000


def test_charts_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = save_results(tmp_path / "r.json", ROWS)

    def message(*arguments: object) -> str:
        assert main(["flatness", "chart", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "chart.jpg: expected a name that ends in .svg, .png, .pdf" in message(
        results, "--out", tmp_path / "chart.jpg"
    )
    assert "nowhere.json" in message(tmp_path / "nowhere.json")
    assert "has no traces by parameter" in message(save_results(tmp_path / "none.json", {}))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'harness-ext[plots]'" in message(results, "--out", tmp_path / "chart.svg")
