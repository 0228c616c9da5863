"""`harness-ext prompts` on the datasets of synthetic languages, whose data, classes and prompts lie in folders of the lab."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness_ext.cli import main
from harness_ext.lab.languages import make_language
from harness_ext.lab.languages.datasets import write_language_data
from harness_ext.lab.model import ModelConfig, build_model

PROMPT = "hmm_regime/next_word"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a language whose tasks have three classes, not the four of the default language."""
    folder = tmp_path_factory.mktemp("lab") / "model"
    language = make_language("hmm", 1, {"states": 3, "words": 12, "lengths": (8, 10), "settings": 3, "switches": 1})
    write_language_data(
        folder, language, num_train_per_class=40, num_test=20, num_validation=20, rng=np.random.default_rng(0)
    )
    tokenizer = language.tokenizer(max_length=32)
    build_model(ModelConfig(width=8, depth=1, heads=2, context=32), tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HARNESS_EXT_DATA", "HARNESS_EXT_PROMPTS"):
        monkeypatch.delenv(name, raising=False)


def test_a_prompt_beside_data_is_checked_against_them(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model / "data" / "prompts" / f"{PROMPT}.jinja"
    assert main(["prompts", "check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"(harness_ext/hmm_regime, train split of {model / 'data'})" in printed
    assert "1 prompt, 0 errors" in printed

    wrong = path.with_name("wrong.jinja")
    wrong.write_text(path.read_text().replace("class2", "class3"))
    try:
        assert main(["prompts", "check", str(wrong)]) == 1
    finally:
        wrong.unlink()
    assert "class2" in capsys.readouterr().out


def test_a_prompt_of_a_model_goes_by_its_id(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "check", PROMPT, "--model", str(model)]) == 0
    assert "0 errors" in capsys.readouterr().out
    assert main(["prompts", "check", "hmm_*/next_word", "--model", str(model)]) == 0
    assert PROMPT in capsys.readouterr().out
    assert main(["prompts", "show", PROMPT, "--model", str(model)]) == 0
    assert f"file         {model / 'data' / 'prompts' / PROMPT}.jinja" in capsys.readouterr().out


def test_without_data_classes_are_not_known(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "next_word.jinja"
    alone.write_text((model / "data" / "prompts" / f"{PROMPT}.jinja").read_text())
    command = ["prompts", "check", str(alone), "--dataset", "hmm_regime"]
    assert main(command) == 0
    assert "no data here, so that classes are not checked" in capsys.readouterr().out
    assert main(["prompts", "new", "hmm_regime/mine", "--out", str(tmp_path / "own")]) == 2
    assert "its data name its classes, and they are not here. Set HARNESS_EXT_DATA" in capsys.readouterr().err
    monkeypatch.setenv("HARNESS_EXT_DATA", str(model / "data"))
    assert main(command) == 0
    assert "train split of" in capsys.readouterr().out


def test_words_of_a_language(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-documents", "60", "--held-out", "30", "--top", "4"]
    assert main(["prompts", "words", "hmm_regime", "--model", str(model), *options]) == 0
    printed = capsys.readouterr().out
    assert str(model / "data") in printed
    assert '"class2": ["w' in printed
    assert main(["prompts", "words", "hmm_regime", "--model", str(tmp_path)]) == 2
    assert "Name as --model a folder of `harness-ext lab run`" in capsys.readouterr().err
