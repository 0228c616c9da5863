"""Loss tasks: lm_eval's own rolling log-likelihood, any text, and what cannot be used."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from tiny import tiny_model, tiny_tokenizer
from worlds import World, corpus_config, evaluate, hf_model, loss_task, report, samples

from harness_ext.tasks import FlatnessTask, LossTask
from harness_ext.tasks.corpus import CorpusOptions

ROWS = [
    " = The film = ",
    "",
    " this movie is great , this movie is terrible . Größe und Maß , naïve café €5 . ",
    " the good and the bad and the film , over and over again , and the end of it all . ",
] * 6
LENGTH = 24


@pytest.fixture(scope="module")
def corpus(world: World) -> str:
    return world.add_dataset("tests/lines", {"test": [{"text": row} for row in ROWS]})


TEXT = "\n".join(row.rstrip(" ") for row in ROWS)


# ----------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "gemma2"])
def test_the_loss_is_that_of_lm_evals_rolling_log_likelihood(corpus: str, family: str) -> None:
    lm = hf_model(tiny_model(family), max_length=LENGTH)
    results = evaluate(lm, loss_task())
    (log_likelihood,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (TEXT,), 0)])
    found, told = results["results"]["loss_lines"], report(results, "loss_lines")
    assert found["loss,none"] == pytest.approx(-log_likelihood / told["num_tokens"], rel=1e-5)
    assert found["bits_per_byte,none"] == pytest.approx(-log_likelihood / math.log(2) / len(TEXT.encode()), rel=1e-5)
    assert told["num_tokens"] == len(lm.tok_encode(TEXT))
    assert told["num_bytes"] == len(TEXT.encode())


def test_tokenizers_are_told_by_the_tokens_of_the_text(corpus: str) -> None:
    first, again = (report(evaluate(hf_model(), loss_task(), limit=limit), "loss_lines") for limit in (1, 2))
    lm = hf_model()
    expected = np.asarray(lm.tok_encode(TEXT), dtype="<i8").tobytes()
    assert first["tokenizer_sha256"] == again["tokenizer_sha256"] == hashlib.sha256(expected).hexdigest()
    # Other windows are of the same tokens; another tokenizer's tokens of the same text are not.
    shorter = report(evaluate(hf_model(), loss_task(metadata={"block_tokens": 8}), limit=1), "loss_lines")
    assert (shorter["block_tokens"], shorter["tokenizer_sha256"]) == (8, first["tokenizer_sha256"])
    other_tokenizer = tiny_tokenizer(["over and over again and over and over again , it was all over"] * 20)
    other = report(evaluate(hf_model(tokenizer=other_tokenizer), loss_task(), limit=1), "loss_lines")
    assert other["text_sha256"] == first["text_sha256"]
    assert other["tokenizer_sha256"] != first["tokenizer_sha256"]


def test_the_error_is_that_of_a_ratio_over_windows(corpus: str) -> None:
    results = evaluate(hf_model(), loss_task())
    pairs = np.array([sample["loss"] for sample in samples(results, "loss_lines")])
    value = pairs[:, 0].sum() / pairs[:, 1].sum()
    residuals = pairs[:, 0] - value * pairs[:, 1]
    expected = math.sqrt(residuals @ residuals / (len(pairs) * (len(pairs) - 1))) / pairs[:, 1].mean()
    assert results["results"]["loss_lines"]["loss_stderr,none"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 3, 64, "auto"])
def test_batches_do_not_matter(corpus: str, batch_size: Any) -> None:
    found = evaluate(hf_model(batch_size=batch_size), loss_task())["results"]["loss_lines"]
    expected = evaluate(hf_model(batch_size=8), loss_task())["results"]["loss_lines"]
    assert found["loss,none"] == pytest.approx(expected["loss,none"], rel=1e-6)


def test_a_limit_takes_the_same_random_windows_every_time(corpus: str) -> None:
    whole = samples(evaluate(hf_model(), loss_task()), "loss_lines")
    few = samples(evaluate(hf_model(), loss_task(), limit=5), "loss_lines")
    assert [sample["doc"] for sample in few] == [sample["doc"] for sample in whole[:5]]
    numbers = [sample["doc"]["window"] for sample in whole]
    assert sorted(numbers) == list(range(len(numbers)))
    assert numbers != sorted(numbers)


def test_a_head_in_half_precision_reads_out_in_float32(corpus: str) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    found = evaluate(hf_model(model), loss_task())["results"]["loss_lines"]["loss,none"]
    exact = evaluate(hf_model(model.float()), loss_task())["results"]["loss_lines"]["loss,none"]
    assert found == pytest.approx(exact, rel=5e-3)


# -------------------------------------------------------------------------------------------------- texts


def test_rows_are_texts_of_their_own_unless_they_are_joined(corpus: str) -> None:
    lm = hf_model()
    results = evaluate(lm, loss_task(metadata={"corpus": {}}))
    texts = [row for row in ROWS if row.strip()]
    answers = lm.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    )
    told = report(results, "loss_lines")
    assert told["num_texts"] == len(texts)
    # lm's own windows are longer; give it the same by taking texts that fit one.
    assert told["num_tokens"] == sum(len(lm.tok_encode(text)) for text in texts)
    assert len(answers) == len(texts)


def test_ends_of_text_are_predicted_where_asked_for(corpus: str) -> None:
    lm = hf_model()
    plain = report(evaluate(lm, loss_task(metadata={"corpus": {}})), "loss_lines")
    results = evaluate(lm, loss_task(metadata={"corpus": {"end_of_text": True}}))
    told = report(results, "loss_lines")
    assert told["num_tokens"] == plain["num_tokens"] + plain["num_texts"]
    assert told["num_bytes"] == plain["num_bytes"]
    # By hand, for one text: its tokens and the end, from the prefix token on.
    text = " = The film = "
    ids = lm.tok_encode(text)
    with torch.no_grad():
        logits = lm.model(torch.tensor([[lm.prefix_token_id, *ids]])).logits[0].log_softmax(-1)
    nats = -logits[range(len(ids) + 1), [*ids, lm.tokenizer.eos_token_id]].sum()
    sample = next(sample for sample in samples(results, "loss_lines") if sample["doc"]["text"] == text)
    assert sample["loss"][0] == pytest.approx(float(nats), rel=1e-5)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".md"])
def test_a_file_is_a_corpus(corpus: str, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine{suffix}"
    path.write_text(json.dumps({"body": TEXT}) if suffix == ".jsonl" else TEXT, encoding="utf-8")
    option: Any = str(path) if suffix != ".jsonl" else {"file": str(path), "column": "body"}
    settings = corpus_config(
        "loss", dataset_path=None, test_split=None, doc_to_text=None, task="loss_corpus", metadata={"corpus": option}
    )
    results = evaluate(hf_model(), LossTask(config=settings))
    expected = evaluate(hf_model(), loss_task())
    assert results["results"]["loss_corpus"]["loss,none"] == expected["results"]["loss_lines"]["loss,none"]
    told = report(results, "loss_corpus")
    assert told["text_sha256"] == report(expected, "loss_lines")["text_sha256"]
    assert told["data"] == f"local file {path}"


def test_a_dataset_is_a_corpus(corpus: str) -> None:
    settings = corpus_config(
        "loss",
        dataset_path=None,
        test_split=None,
        doc_to_text=None,
        task="loss_corpus",
        metadata={"corpus": {"dataset": "tests/lines", "join": "\n"}},
    )
    results = evaluate(hf_model(), LossTask(config=settings))
    assert report(results, "loss_corpus")["num_bytes"] == len(TEXT.encode())


def test_rows_with_and_without_line_ends_are_the_same_text(world: World, corpus: str) -> None:
    world.add_dataset("tests/ended", {"test": [{"text": f"{row}\n" if row else ""} for row in ROWS]})
    told = [
        report(evaluate(hf_model(), loss_task(dataset_path=path), limit=1), "loss_lines")["text_sha256"]
        for path in ("tests/lines", "tests/ended")
    ]
    assert told[0] == told[1]


def test_a_long_corpus_ends_at_a_row(corpus: str) -> None:
    told = report(evaluate(hf_model(), loss_task(metadata={"corpus": {"join": "\n", "max_bytes": 100}})), "loss_lines")
    assert told["rows_left_out"] == len(ROWS) - 4
    assert told["num_bytes"] == len("\n".join(row.rstrip(" ") for row in ROWS[:4]).encode())


def test_a_window_is_no_longer_than_the_models_context(corpus: str) -> None:
    results = evaluate(hf_model(max_length=16), loss_task(metadata={"block_tokens": 1000}))
    assert report(results, "loss_lines")["block_tokens"] == 16
    assert {sample["doc"]["num_tokens"] for sample in samples(results, "loss_lines")[:3]} == {16}


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_tokens": 1}, "block_tokens is 1, expected an integer of at least 2"),
        ({"corpus": {"colum": "x"}}, "Did you mean 'column'"),
        ({"corpus": 3}, "expects a mapping of options, found 3"),
        ({"corpus": {"max_bytes": 0}}, "max_bytes is 0, expected a positive integer"),
        ({"corpus": {"end_of_text": "yes"}}, "end_of_text is 'yes', expected true or false"),
        ({"corpus": {"file": "x.txt"}}, "Use --tasks loss_corpus with this `corpus`"),
    ],
)
def test_wrong_options(corpus: str, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(hf_model(), loss_task(metadata=metadata))


def test_file_and_dataset_exclude_each_other() -> None:
    assert CorpusOptions(file="a", dataset="b").problem() == "file and dataset exclude each other, give one"


def no_dataset(corpus: Any = None, kind: type[Any] = LossTask) -> Any:
    metadata = {"version": 1.0} | ({} if corpus is None else {"corpus": corpus})
    return kind(config={"task": "loss_corpus", "output_type": "loglikelihood_rolling", "metadata": metadata})


def test_no_corpus_at_all(world: World) -> None:
    with pytest.raises(ValueError, match="loss_corpus needs a corpus: --metadata"):
        no_dataset()


def test_no_such_file(world: World) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt: no such file"):
        no_dataset("nowhere.txt")


def test_a_file_that_is_no_text(world: World, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ValueError, match="expected text in UTF-8"):
        no_dataset(str(tmp_path / "x.txt"))


def test_no_text_in_the_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(" \n\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no text"):
        evaluate(hf_model(), no_dataset(str(tmp_path / "x.txt")))


def test_no_such_column(corpus: str) -> None:
    with pytest.raises(ValueError, match="has no column 'body', found text"):
        loss_task(doc_to_text="body")


def test_a_row_that_is_no_text(world: World) -> None:
    world.add_dataset("tests/null", {"test": [{"text": "a film"}, {"text": None}]})
    with pytest.raises(ValueError, match=r"row 1 of .* is None, expected a text"):
        evaluate(hf_model(), loss_task(dataset_path="tests/null"))


def test_few_shots_mean_nothing(corpus: str) -> None:
    with pytest.raises(ValueError, match="--num_fewshot has no meaning for running text"):
        loss_task(num_fewshot=2)


def test_a_metric_that_the_task_has_not(corpus: str) -> None:
    with pytest.raises(ValueError, match=r"no metric 'fisher_trace'\. It has loss, bits_per_byte"):
        loss_task(metric_list=[{"metric": "fisher_trace"}])


def test_a_tokenizer_without_a_first_token(corpus: str) -> None:
    tokenizer = tiny_tokenizer()
    lm = hf_model(tokenizer=tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither BOS nor EOS to start a text with"):
        evaluate(lm, loss_task())


def test_other_models_are_refused_before_any_work(corpus: str) -> None:
    from lm_eval.models.dummy import DummyLM

    with pytest.raises(TypeError, match="loss_lines needs the model's hidden states"):
        evaluate(DummyLM(), loss_task())


def test_flatness_options_are_checked_when_the_task_is_made(corpus: str) -> None:
    for options, message in (
        ({"quantities": ["trace"]}, "quantities is .* expected some of fisher_trace"),
        ({"rel_stderr": 2}, "rel_stderr is 2, expected a number between 0 and 1"),
        ({"rel_stderr": 0.1, "max_blocks": 4}, "expected max_blocks of at least"),
        ({"labels": "gold"}, 'labels is \'gold\', expected "signs" or "sampled"'),
        ({"max_block": 4}, "Did you mean 'max_blocks'"),
    ):
        with pytest.raises(ValueError, match=message):
            FlatnessTask(config=corpus_config("flatness", metadata={"flatness": options}))
