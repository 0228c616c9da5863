"""`harness-ext prompts list|show|check|new|words`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from harness_ext import prompts, resources
from harness_ext.cli import main
from harness_ext.prompts import PROMPTS_VARIABLE, find_prompts, load_prompt
from harness_ext.scaffold import DATA_VARIABLE


@pytest.fixture(autouse=True)
def no_folders_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROMPTS_VARIABLE, raising=False)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a byte-level tokenizer that splits every word into its letters, except `great`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    merges = [("Ġ", "g"), ("r", "e"), ("a", "t"), ("Ġg", "re"), ("Ġgre", "at")]
    vocabulary = {piece: number for number, piece in enumerate([*sorted(letters), *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random GPT-2, under whose tokenizer the words of `SENTENCES` are one token each."""
    folder = tmp_path_factory.mktemp("language_model")
    tiny_model("gpt2").save_pretrained(folder)
    tiny_tokenizer([f"{text} This movie is" for text in SENTENCES] * 30).save_pretrained(folder)
    return str(folder)


SENTENCES = ["the good film", "the bad film", "a great story", "a terrible story", "so good and great", "bad and worse"]


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local mirror, with an SST-2 of made-up sentences: those of odd number are positive."""
    folder = tmp_path / "data" / "SetFit" / "sst2"
    folder.mkdir(parents=True)
    for split, texts in (("train", SENTENCES * 4), ("test", SENTENCES)):
        rows = [{"text": f"{text} {i}", "label": (i + 1) % 2} for i, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    return folder


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "list", "sst/*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(find_prompts("sst/*"))
    assert any(
        line.startswith("sst/this_movie_is ") and "negative: terrible; positive: great" in line for line in lines
    )
    assert main(["prompts", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(find_prompts("*"))


def test_unknown_names_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["list", "tss/*"], ["show", "sst/it_wsa"], ["check", "sst/it_wsa"], ["show", "../x/y"]):
        assert main(["prompts", *command]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("harness-ext: error: ")
        assert len(captured.err.splitlines()) == 1
    assert main(["prompts", "check", "sst/it_was", "--dataset", "sts"]) == 2
    assert "unknown dataset 'sts'" in capsys.readouterr().err


def test_show_marks_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "show", "sst/it_was"]) == 0
    out = capsys.readouterr().out
    assert "[an example of text] It was" in out
    assert "negative: terrible; positive: great" in out
    assert out.endswith("for acc_pmi\nIt was\n")


def test_show_takes_its_example_from_the_local_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "SetFit" / "sst2"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(json.dumps({"text": "so so .", "label": 0}) + "\n", encoding="utf-8")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert main(["prompts", "show", "sst/it_was"]) == 0
    assert "a document of SetFit/sst2, train split of the local mirror\n[so so .] It was\n" in capsys.readouterr().out


def test_show_several_documents(mirror: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "show", "sst/it_was", "--num-documents", "3"]) == 0
    out = capsys.readouterr().out
    for number, text in enumerate(SENTENCES[:3]):
        heading = f"document {number + 1} of SetFit/sst2, train split of the local mirror"
        assert f"--- what the model reads: {heading}\n[{text} {number}] It was\n" in out
    assert "document 4" not in out
    assert main(["prompts", "show", "sst/it_was", "--num-documents", "0"]) == 2
    assert "--num-documents 0: expected at least 1" in capsys.readouterr().err


def _marked(out: str) -> list[str]:
    """The lines with tokens."""
    lines = out.splitlines()
    return [lines[number + 1] for number, line in enumerate(lines) if line.startswith("--- its ")]


def test_show_marks_the_tokens(model: str, mirror: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fixture's tokenizer splits every word into letters, but for `great` after a blank."""
    command = ["prompts", "show", "sst/this_movie_is", "--model", model, "--num-documents", "3"]
    assert main(command) == 0
    out = capsys.readouterr().out
    marked = _marked(out)
    assert marked[0] == "[t|h|e|·g|o|o|d|·|f|i|l|m|·|0]|·|T|h|i|s|·|m|o|v|i|e|·|i|s"
    assert marked[2].startswith("[a|·great|·|s|t|o|r|y|·|2]|·|T")
    assert "--- its 28 tokens\n" in out
    rows = [line.split() for line in out.splitlines()]
    assert sum(row[:2] == ["positive", "great"] for row in rows) == 1  # the words are the same after each document
    assert next(row for row in rows if row[:2] == ["positive", "great"])[3] == "·great"
    assert next(row for row in rows if row[:2] == ["negative", "terrible"])[-1] == "·|t|e|r|r|i|b|l|e"


def test_show_reads_what_the_engine_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BOS in front, EOS not at the end, and a document cut from its beginning where the context is short."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.model_max_length = 20
    tokenizer.save_pretrained(tmp_path / "model")
    folder = tmp_path / "SetFit" / "sst2"
    folder.mkdir(parents=True)
    text = "the film is bad . this movie is terrible , this movie is great"
    rows = [{"text": "the film", "label": 0}, {"text": text, "label": 1}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "own" / "sst").mkdir(parents=True)
    (tmp_path / "own" / "sst" / "mine.jinja").write_text("so [it] is\n{{ text }} . is\n", encoding="utf-8")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path / "own"))
    arguments = ["prompts", "show", "sst/mine", "--model", str(tmp_path / "model"), "--num-documents", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    first, second = _marked(out)
    assert first.startswith("<eos>|s|")
    assert not first.endswith("<eos>")
    assert first.replace("|", "") == "<eos>so·[it]·is↵[the·film]·.·is"
    assert "more of the document cut off" in out
    head, tail = "<eos>so·[it]·is↵[", "]·.·is"
    body = second.replace("|", "").removeprefix(head).removesuffix(tail)
    assert second.replace("|", "") == head + body + tail
    assert 0 < len(body) < len(text)
    assert text.endswith(body.replace("·", " "))
    assert second.count("|") + 1 <= 20


def test_check_of_everything_that_ships_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "check", "*"]) == 0
    assert capsys.readouterr().out.endswith(f"\n{len(find_prompts('*'))} prompts, 0 errors\n")


def test_check_shows_the_ids_that_are_used(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    assert main(["prompts", "check", "sst/this_movie_is", "--model", model]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    great = tokenizer.encode(" great", add_special_tokens=False)
    assert len(great) == 1
    assert ["positive", "great", str(great[0]), "'Ġgreat'"] in rows
    terrible = tokenizer.encode(" terrible", add_special_tokens=False)
    assert next(row for row in rows if row[:2] == ["negative", "terrible"])[2 : 2 + len(terrible)] == [
        str(number) for number in terrible
    ]
    assert ["info:", "word", "'terrible'", "of", "'negative'", "is", "9", "tokens;"] in [row[:8] for row in rows]


def test_check_warns_of_first_tokens_that_are_the_same(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.jinja"
    path.write_text('{%- set label_words = {"negative": "possible", "positive": "positive"} -%}\n{{ text }} It is\n')
    assert main(["prompts", "check", str(path), "--model", model, "--dataset", "sst"]) == 0
    assert "begin with the same token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ('{%- set label_words = {"negative": "bad"} -%}\n{{ text }} It is\n', "class 'positive'"),
        ('{%- set label_words = {"negative": "bad", "positive": "good"} -%}\n{{ text }} It is \n', "white space"),
        ('{%- set label_words = {"negative": "bad", "positive": "good"} -%}\n{{ label }} It is\n', "label column"),
        ("{% set label_words = text %}", "not a dictionary"),
        ("{{ text ", "unexpected end"),
    ],
)
def test_check_returns_1_for_errors(source: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jinja"
    path.write_text(source)
    assert main(["prompts", "check", str(path), "sst/it_was", "--dataset", "sst"]) == 1
    out = capsys.readouterr().out
    assert part in out
    assert "2 prompts, 1 error" in out  # the second is still checked


def test_the_columns_are_those_of_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sst" / "one.jinja"
    path.parent.mkdir()
    path.write_text('{%- set label_words = {"negative": "bad", "positive": "good"} -%}\n{{ title }} {{ text }} It is\n')
    assert main(["prompts", "check", str(path)]) == 0  # the folder names the dataset, whose columns are not known
    folder = tmp_path / "SetFit" / "sst2"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(json.dumps({"text": "so so .", "label": 0}) + "\n", encoding="utf-8")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert main(["prompts", "check", str(path)]) == 1
    assert "no column 'title'" in capsys.readouterr().out


def test_a_prompt_of_no_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jinja"
    path.write_text("{{ text }} It is\n")
    assert main(["prompts", "check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "dataset not known" in out
    assert "natural tasks refuse it" in out


def _template(folder: Path, name: str, text: str = "{{ text }} It was") -> Path:
    path = folder / f"{name}.jinja"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{%- set label_words = {{"negative": "terrible", "positive": "great"}} -%}}\n{text}\n')
    return path


def test_check_flags_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = "warning: the same text and label words as sst/it_was: a sweep scores them twice"
    path = _template(tmp_path, "sst/mine")
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path))
    assert main(["prompts", "check", "sst/mine"]) == 0  # against the dataset's prompts, which were not given
    out = capsys.readouterr().out
    assert same in out
    assert "nothing to report" not in out
    assert main(["prompts", "check", "sst/it_was"]) == 0  # and the other way round
    assert "as sst/mine: a sweep" in capsys.readouterr().out
    _template(tmp_path, "sst/mine", "{{ text }} Now it was")
    assert main(["prompts", "check", str(path)]) == 0
    assert "scores them twice" not in capsys.readouterr().out


def test_check_flags_duplicates_of_no_known_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = _template(tmp_path, "a/one"), _template(tmp_path, "a/two")
    far = _template(tmp_path, "b/far")
    assert main(["prompts", "check", str(one)]) == 0
    assert f"as {two.as_posix()}: a sweep" in capsys.readouterr().out
    assert main(["prompts", "check", str(far), str(far)]) == 0  # one file is no duplicate of itself
    assert "scores them twice" not in capsys.readouterr().out
    two.unlink()
    assert main(["prompts", "check", str(one), str(far)]) == 0
    assert f"as {one.as_posix()}: a sweep" in capsys.readouterr().out
    (tmp_path / "a" / "broken.jinja").write_text("{{ text ")
    assert main(["prompts", "check", str(one)]) == 0  # of what was not asked about, nothing is reported


# ------------------------------------------------------------------------------------------------- new


def test_new_writes_what_check_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path))
    assert main(["prompts", "new", "sst/mine"]) == 0
    out = capsys.readouterr().out
    path = tmp_path / "sst" / "mine.jinja"
    assert f"wrote {path}\n" in out
    assert """lm_eval --tasks natural_sst --metadata '{"prompt": "sst/mine"}' --model hf""" in out
    assert PROMPTS_VARIABLE not in out  # it is set
    prompt = load_prompt("sst/mine")
    assert prompt.label_words == {"negative": ("negative",), "positive": ("positive",)}
    assert prompt.render({"text": "so so ."}).text == "so so .\nIn one word:"
    assert main(["prompts", "check", "sst/mine"]) == 0
    assert "nothing to report" in capsys.readouterr().out
    before = path.read_bytes()
    assert main(["prompts", "new", "sst/mine", "--template", "It was"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("dataset", sorted({name.partition("/")[0] for name in find_prompts("*")}))
def test_new_for_every_dataset(dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "new", f"{dataset}/mine", "--out", str(tmp_path)]) == 0
    assert f"{PROMPTS_VARIABLE}={tmp_path} lm_eval --tasks natural_{dataset} " in capsys.readouterr().out
    assert main(["prompts", "check", str(tmp_path / dataset / "mine.jinja")]) == 0


def test_words_of_new(tmp_path: Path) -> None:
    """Class names that are words stand for themselves; else the default prompt's words do."""
    template = ["--template", '"{{ text }}" \\ {{ "{{" }} was', "--out", str(tmp_path)]
    given = ["--word", 'negative=b"a}}d', "--word", "negative=p%}oor", "--word", "positive=g=o\\od"]
    assert main(["prompts", "new", "sst/mine", *template, *given]) == 0
    prompt = load_prompt(tmp_path / "sst" / "mine.jinja")
    assert prompt.label_words == {"negative": ('b"a}}d', "p%}oor"), "positive": ("g=o\\od",)}
    assert prompt.render({"text": "x"}).text == '"x" \\ {{ was'
    assert main(["prompts", "new", "agnews/mine", "--out", str(tmp_path), "--word", "Sci/Tech=technology"]) == 0
    default = load_prompt("agnews/this_article_is_about").label_words
    expected = {**default, "Sci/Tech": ("technology",)}
    assert load_prompt(tmp_path / "agnews" / "mine.jinja").label_words == expected
    # `very negative=…` is no word of the class `negative`.
    sst5 = ["prompts", "new", "sst5/mine", "--out", str(tmp_path), "--word", "very negative=awful"]
    assert main(sst5) == 0
    found = load_prompt(tmp_path / "sst5" / "mine.jinja").label_words
    assert (found["very negative"], found["negative"]) == (("awful",), ("bad",))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["sst"], "no prompt id"),
        (["../x"], "no prompt id"),
        (["sst/mine.jinja"], "no prompt id"),
        (["sts/mine"], "unknown dataset 'sts'"),
        (["sst/mine", "--word", "great"], "--word 'great': expected CLASS=WORD"),
        (["sst/mine", "--word", "good=great"], "Classes: 'negative', 'positive'"),
        (["sst/mine", "--word", "negative=same", "--word", "positive=same"], "two classes"),
        (["sst/mine", "--word", "negative="], "an empty word"),
        (["sst/mine", "--template", "It was "], "white space"),
        (["sst/mine", "--template", "{{ text }} {{ label }} was"], "label column"),
        (["sst/mine", "--template", "{{ txt }} was"], "no column 'txt'"),
        (["sst/mine", "--template", "{{ text "], "line 2: unexpected end"),
        (["sst/mine", "--template", "{# nothing #} was"], "no variable"),
    ],
)
def test_what_new_refuses(
    arguments: Sequence[str], part: str, mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["prompts", "new", *arguments, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not out.exists()


def test_where_new_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(resources.prompts_folder(), checkout / "prompts")
    monkeypatch.setattr(resources, "prompts_folder", lambda: checkout / "prompts")
    assert main(["prompts", "new", "sst/mine"]) == 0
    assert (checkout / "prompts" / "sst" / "mine.jinja").is_file()
    assert PROMPTS_VARIABLE not in capsys.readouterr().out
    # A wheel's copy is not written to, nor is a folder that cannot be.
    monkeypatch.setattr(resources, "prompts_folder", lambda: Path(prompts.__file__).parent / "prompts")
    assert main(["prompts", "new", "sst/yours"]) == 2
    assert "installed as a copy" in (err := capsys.readouterr().err)
    assert "Give --out FOLDER" in err
    monkeypatch.setattr(resources, "prompts_folder", lambda: checkout / "prompts")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["prompts", "new", "sst/yours"]) == 2
    assert "is not writable. Give --out FOLDER" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- words


def _table(out: str, title: str) -> dict[str, list[float]]:
    """Rows of a search's table: words -> the four accuracies."""
    lines = out.split(f"best by {title} (")[1].splitlines()[2:]
    rows: dict[str, list[float]] = {}
    for line in lines:
        if not line.strip():
            break
        *name, acc, batch, held_acc, held_batch = line.split()
        rows[" ".join(name)] = [float(acc), float(batch), float(held_acc), float(held_batch)]
    return rows


def test_words_are_scored_as_direct_forwards_score_them(
    language_model: str, mirror: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np
    from oracles import continuation_log_prob
    from transformers import AutoTokenizer

    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    command = ["prompts", "words", "sst", "--model", language_model, "--dtype", "float32", "--device", "cpu"]
    assert main([*command, "--num-documents", "16", "--held-out", "8", "--top", "6"]) == 0
    out = capsys.readouterr().out
    assert "16 choose the words, 8 are held out" in out
    assert "candidates  6 of each class" in out

    rows = [json.loads(line) for line in (mirror / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    model = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32).eval()

    def score(row: dict[str, str], word: str) -> float:
        context = tokenizer(f"{row['text']} This movie is")["input_ids"]
        whole = tokenizer(f"{row['text']} This movie is {word}")["input_ids"]
        return continuation_log_prob(model, context, whole[len(context) :])

    tables = {title: _table(out, title) for title in ("acc", "acc_batch")}
    assert "terrible / great (the prompt's)" in tables["acc"]
    for table in tables.values():
        assert len(table) == 6
        for name, found in table.items():
            pair = name.removesuffix(" (the prompt's)").split(" / ")
            scores = np.array([[score(row, word) for word in pair] for row in rows])
            expected = []
            for part, gold in ((scores[:16], rows[:16]), (scores[16:24], rows[16:24])):
                labels = np.array([row["label"] for row in gold])
                expected += [(part.argmax(1) == labels).mean(), ((part - part.mean(0)).argmax(1) == labels).mean()]
            assert found == pytest.approx(expected, abs=6e-4), name
    for position, title in enumerate(tables):
        column = [found[position] for name, found in tables[title].items() if "prompt's" not in name]
        assert column == sorted(column, reverse=True)
    best = next(name for name in tables["acc"] if "prompt's" not in name).split(" / ")
    assert f'label_words = {{"negative": ["{best[0]}"], "positive": ["{best[1]}"]}}' in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["sts"], "unknown dataset 'sts'"),
        (["sst", "--prompt", "sst/it_wsa"], "Did you mean 'sst/it_was'"),
        (["sst", "--top", "0"], "--top 0: expected at least 1"),
        (["sst", "--num-documents", "0"], "--num-documents 0: expected at least 1"),
        (["sst", "--held-out", "-1"], "--held-out -1: expected 0 or more"),
        (["sst", "--num-documents", "25"], "has 24 documents; --num-documents 25 asks for more"),
        (["sst", "--split", "validation"], "expected validation.jsonl"),
    ],
)
def test_what_words_refuses_before_it_loads_the_model(
    arguments: Sequence[str], part: str, mirror: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prompts", "words", *arguments, "--model", "no/such-model"]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert len([line for line in captured.err.splitlines() if line.startswith("harness-ext: error: ")]) == 1
