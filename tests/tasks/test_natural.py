"""Natural tasks run by lm_eval, against plain forwards of the model and numbers recomputed from the samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import continuation_log_prob
from sklearn.metrics import f1_score
from tiny import POSITIONS, tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from worlds import (
    NATURAL_METRICS,
    World,
    evaluate,
    hf_model,
    metric_list,
    natural,
    probe,
    report,
    reviews,
    samples,
    stock_task,
)

from harness_ext.engine import plan
from harness_ext.engine.attach import REQUEST_TYPE
from harness_ext.prompts import load_prompt

pytestmark = pytest.mark.usefixtures("world")

SEVERAL = {"metadata": {"prompt": "films/several"}}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


@pytest.fixture(scope="module")
def lm(world: World) -> Any:
    return hf_model()


@pytest.fixture(scope="module")
def several(lm: Any) -> dict[str, Any]:
    """A run with several label words a class, of one to three tokens."""
    return evaluate(lm, natural(**SEVERAL))


def word_log_probs(sample: dict[str, Any], position: int = 0) -> tuple[float, ...]:
    """Of the prompt (position 0), or of the bare prompts that this document was the first to need, as logged."""
    return sample["resps"][position][0].log_probs


def of_text(results: dict[str, Any], text: str) -> tuple[float, ...]:
    """Log-probabilities of the words after a text, whichever document asked for it."""
    for sample in samples(results, "natural_films"):
        for (context, _), (answer,) in zip(sample["arguments"], sample["resps"], strict=True):
            if context == text:
                return answer.log_probs
    raise AssertionError(f"nobody asked for {text!r}")


def told_of_prompt(results: dict[str, Any], task: str = "natural_films") -> dict[str, Any]:
    """The report's entry of the only prompt."""
    (entry,) = report(results, task)["prompts"]
    return entry


def class_scores(log_probs: Sequence[float], words: Sequence[Sequence[str]]) -> np.ndarray:
    """log of the summed probabilities of each class's words; the obvious way, which underflows for long prompts."""
    values = iter(log_probs)
    return np.log([sum(math.exp(next(values)) for _ in of_class) for of_class in words])


def words_of(prompt_id: str) -> list[tuple[str, ...]]:
    return list(load_prompt(prompt_id).label_words.values())


def logged_scores(results: dict[str, Any], prompt_id: str, position: int = 0) -> np.ndarray:
    """Class scores (n, K) of the prompt at a position of the sweep."""
    words = words_of(prompt_id)
    return np.stack([class_scores(word_log_probs(s, position), words) for s in samples(results, "natural_films")])


def golds(results: dict[str, Any]) -> np.ndarray:
    return np.array([sample["doc"]["label"] for sample in samples(results, "natural_films")])


def log_probs_of(results: dict[str, Any]) -> list[tuple[float, ...]]:
    """Of everything that was asked, in order."""
    return [answer.log_probs for s in samples(results, "natural_films") for (answer,) in s["resps"]]


# ------------------------------------------------------------------------------------------------- scores


def test_words_have_the_probabilities_of_plain_forwards(lm: Any, several: dict[str, Any], world: World) -> None:
    tokenizer, words = tiny_tokenizer(), words_of("films/several")
    lengths = {len(tokenizer(f" {word}")["input_ids"]) for of_class in words for word in of_class}
    assert 1 in lengths
    assert max(lengths) > 2
    documents = world.splits["test"]
    for sample, doc in zip(samples(several, "natural_films"), documents, strict=True):
        assert sample["arguments"][0][0] == f"Review: {doc['text']} It was"
        # What the prompts of all documents have in common is asked once, by the first.
        assert len(sample["arguments"]) == (4 if doc is documents[0] else 1)
    bare = ("Review: It was", "Review: N/A It was", "Review: [MASK] It was")
    for text in (*(f"Review: {doc['text']} It was" for doc in documents[:8]), *bare):
        context = tokenizer(text)["input_ids"]
        expected = [
            continuation_log_prob(lm.model, context, tokenizer(f"{text} {word}")["input_ids"][len(context) :])
            for of_class in words
            for word in of_class
        ]
        assert of_text(several, text) == pytest.approx(expected, abs=1e-4)


def test_metrics_are_those_of_the_summed_word_probabilities(several: dict[str, Any]) -> None:
    scores, gold = logged_scores(several, "films/several"), golds(several)
    found = several["results"]["natural_films"]
    predicted = scores.argmax(axis=1)
    assert found["acc,none"] == pytest.approx(np.mean(predicted == gold))
    assert found["macro_f1,none"] == pytest.approx(f1_score(gold, predicted, average="macro"))
    probabilities = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    brier = np.square(probabilities - np.eye(2)[gold]).sum(axis=1)
    assert found["brier,none"] == pytest.approx(brier.mean())
    of_documents = [(s["acc"], s["brier"]) for s in samples(several, "natural_films")]
    assert of_documents == [(float(hit), pytest.approx(b)) for hit, b in zip(predicted == gold, brier, strict=True)]


def test_acc_pmi_subtracts_the_premise(several: dict[str, Any]) -> None:
    scores = logged_scores(several, "films/several")
    premise = class_scores(of_text(several, "Review: It was"), words_of("films/several"))
    hits = (scores - premise).argmax(axis=1) == golds(several)
    assert [s["acc_pmi"] for s in samples(several, "natural_films")] == hits.astype(float).tolist()
    assert several["results"]["natural_films"]["acc_pmi,none"] == pytest.approx(hits.mean())
    assert told_of_prompt(several)["premise"] == "Review: It was"


def test_acc_batch_subtracts_the_mean_over_the_evaluated_documents(lm: Any, several: dict[str, Any]) -> None:
    for results in (several, evaluate(lm, natural(**SEVERAL), limit=5)):
        scores = logged_scores(results, "films/several")
        hits = (scores - scores.mean(axis=0)).argmax(axis=1) == golds(results)
        assert [s["acc_batch"] for s in samples(results, "natural_films")] == hits.astype(float).tolist()
        means = told_of_prompt(results)["mean_class_log_score"]
        assert list(means.values()) == pytest.approx(scores.mean(axis=0), abs=1e-5)


def test_calibrations_change_something(several: dict[str, Any]) -> None:
    """Otherwise the tests above would pass with all three metrics the same."""
    rows = [[s[name] for s in samples(several, "natural_films")] for name in ("acc", "acc_pmi", "acc_batch")]
    assert rows[0] != rows[1]
    assert rows[0] != rows[2]


def test_plain_accuracy_does_not_depend_on_the_other_metrics(lm: Any, several: dict[str, Any]) -> None:
    alone = evaluate(lm, natural(**SEVERAL, metric_list=metric_list("acc")))
    assert log_probs_of(alone) == log_probs_of(several)
    assert alone["results"]["natural_films"]["acc,none"] == several["results"]["natural_films"]["acc,none"]
    assert "acc_pmi,none" not in alone["results"]["natural_films"]


@pytest.mark.parametrize("metrics", [NATURAL_METRICS[::-1], ("brier", "acc")])
def test_the_order_of_metrics_does_not_matter(lm: Any, several: dict[str, Any], metrics: tuple[str, ...]) -> None:
    found = evaluate(lm, natural(**SEVERAL, metric_list=metric_list(*metrics)))["results"]["natural_films"]
    for name in metrics:
        assert found[f"{name},none"] == several["results"]["natural_films"][f"{name},none"]


def test_the_batch_size_does_not_matter(several: dict[str, Any]) -> None:
    for size in (1, 7, "auto"):
        results = evaluate(hf_model(batch_size=size), natural(**SEVERAL))
        assert np.array(log_probs_of(results)) == pytest.approx(np.array(log_probs_of(several)), abs=1e-4)
        assert [s["acc"] for s in samples(results, "natural_films")] == [
            s["acc"] for s in samples(several, "natural_films")
        ]


def test_the_order_of_classes_does_not_matter(lm: Any, world: World) -> None:
    """Label words belong to class names, so reordering the classes moves the columns and no metric."""
    rows = [{**row, "label": ("negative", "positive")[row["label"]]} for row in world.splits["test"]]
    name = world.add_dataset("tests/named", {"test": rows, "train": rows})
    results = [
        evaluate(lm, natural(**SEVERAL, dataset_path=name, doc_to_choice=classes))["results"]["natural_films"]
        for classes in (["negative", "positive"], ["positive", "negative"])
    ]
    for metric in NATURAL_METRICS:
        assert results[0][f"{metric},none"] == pytest.approx(results[1][f"{metric},none"])
    # Labels may be given as names, with the same outcome as numbers.
    numbered = evaluate(lm, natural(**SEVERAL))["results"]["natural_films"]
    assert results[0] == {**numbered, "name": "natural_films", "alias": "natural_films"}


# ------------------------------------------------------------------------------------------------- ties


class Flat(torch.nn.Module):
    """Stands for `lm_head`: every token is equally likely."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(*hidden.shape[:-1], self.vocabulary)


@pytest.mark.parametrize("order", [["negative", "positive"], ["positive", "negative"]])
def test_ties_share_the_point_and_are_reported(
    caplog: pytest.LogCaptureFixture, world: World, order: list[str]
) -> None:
    """A model that scores all choices alike has no accuracy that depends on the share of the first class."""
    rows = [{"text": row["text"], "label": "negative"} for row in world.splits["test"]]
    name = world.add_dataset("tests/one_sided", {"test": rows, "train": rows})
    model = tiny_model("gpt2")
    model.set_output_embeddings(Flat(model.config.vocab_size))
    with caplog.at_level(logging.WARNING):
        results = evaluate(hf_model(model), natural(dataset_path=name, doc_to_choice=order))
    found = results["results"]["natural_films"]
    for metric in ("acc", "acc_pmi", "acc_batch", "brier"):
        assert found[f"{metric},none"] == pytest.approx(0.5)
    assert told_of_prompt(results)["tied_documents"] == len(rows)
    assert (
        f"natural_films: degenerate, documents tied between classes: {len(rows)}/{len(rows)} under plain."
        in caplog.text
    )
    assert "harness-ext prompts check films/plain" in caplog.text


def test_no_ties_no_warning(caplog: pytest.LogCaptureFixture, lm: Any) -> None:
    with caplog.at_level(logging.WARNING):
        results = evaluate(lm, natural())
    assert told_of_prompt(results)["tied_documents"] == 0
    assert "degenerate" not in caplog.text


def test_a_tie_of_two_out_of_three_classes_counts_a_half(world: World) -> None:
    world.add_prompt(
        "films/three_words", '{%- set label_words = {"a": "bad", "b": "good", "c": "great"} -%}{{ text }} This movie is'
    )
    rows = [{"text": f"film {i}", "label": i % 3} for i in range(6)]
    name = world.add_dataset("tests/three", {"test": rows, "train": rows})
    model = tiny_model("llama")
    ids = [tiny_tokenizer()(f" {word}")["input_ids"] for word in ("bad", "good", "great")]
    assert [len(of_word) for of_word in ids] == [1, 1, 1]
    with torch.no_grad():  # "bad" and "good" become the same token to the model, and far ahead of "great"
        head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.weight[ids[1][0]] = head.weight[ids[0][0]]
        head.bias[[ids[0][0], ids[1][0]]] = 1000.0
    model.set_output_embeddings(head)
    results = evaluate(
        hf_model(model),
        natural(dataset_path=name, doc_to_choice=["a", "b", "c"], metadata={"prompt": "films/three_words"}),
    )
    assert [s["acc"] for s in samples(results, "natural_films")] == [0.5, 0.5, 0.0] * 2
    assert told_of_prompt(results)["tied_documents"] == len(rows)


# ------------------------------------------------------------------------------------------------- prompts


def test_the_prompt_of_the_metadata_is_used(lm: Any) -> None:
    for option in ("films/several", {"natural_films": "films/several", "other": "films/plain"}):
        results = evaluate(lm, natural(metadata={"prompt": option}), limit=2)
        told = told_of_prompt(results)
        assert told["id"] == "films/several"
        assert told["label_words"] == {"negative": ["bad", "terrible"], "positive": ["good", "fine"]}
        assert told["digest"] == load_prompt("films/several").digest
        assert all(s["arguments"][0][0].startswith("Review: ") for s in samples(results, "natural_films"))


def test_a_prompt_may_be_a_path(lm: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text('{%- set label_words = {"negative": "bad", "positive": "good"} -%}{{ text }} so')
    results = evaluate(lm, natural(metadata={"prompt": str(path)}), limit=2)
    assert told_of_prompt(results)["id"] == path.as_posix()
    assert told_of_prompt(results)["premise"] == "so"


def test_the_eval_split_of_the_metadata_is_evaluated(lm: Any, world: World) -> None:
    results = evaluate(lm, natural(metadata={"eval_split": "train"}))
    assert [s["doc"] for s in samples(results, "natural_films")] == world.splits["train"]
    assert results["configs"]["natural_films"]["test_split"] == "train"
    assert report(results, "natural_films")["documents"] == len(world.splits["train"])


def test_the_validation_split_where_there_is_no_test_split(lm: Any, world: World) -> None:
    name = world.add_dataset("tests/validated", {"train": world.splits["train"], "dev": world.splits["test"][:4]})
    results = evaluate(lm, natural(dataset_path=name, test_split=None, validation_split="dev"))
    assert [s["doc"] for s in samples(results, "natural_films")] == world.splits["test"][:4]


# ------------------------------------------------------------------------------------------------- few-shot and chat


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fewshot_delimiter": "#", "target_delimiter": " so ", "description": "Films.\n"},
        {"fewshot_split": "test"},
        pytest.param(
            {"fewshot_config": {"sampler": "first_n"}},
        ),
    ],
)
def test_few_shot_prompts_are_those_of_lm_eval(lm: Any, world: World, changes: dict[str, Any]) -> None:
    ours, stock = (
        evaluate(lm, task, num_fewshot=2, fewshot_random_seed=7, limit=5)
        for task in (natural(**changes), stock_task(world, **changes))
    )
    found = [(s["arguments"][0][0], s["arguments"][0][1]["continuations"]) for s in samples(ours, "natural_films")]
    expected = [
        (s["arguments"][0][0], [continuation for _, continuation in s["arguments"]]) for s in samples(stock, "stock")
    ]
    assert found == expected
    assert len({context for context, _ in found}) == 5
    scores = np.array([word_log_probs(s) for s in samples(ours, "natural_films")])
    assert scores == pytest.approx(np.array([[r[0][0] for r in s["resps"]] for s in samples(stock, "stock")]), abs=1e-4)
    assert ours["n-shot"]["natural_films"] == 2


def test_the_premise_of_a_few_shot_prompt_keeps_its_examples(lm: Any, world: World) -> None:
    results = evaluate(lm, natural(), num_fewshot=2, limit=4)
    for sample, doc in zip(samples(results, "natural_films"), world.splits["test"], strict=False):
        context, premise, *content_free = (arguments[0] for arguments in sample["arguments"])
        examples, found, rest = context.rpartition(f"{doc['text']} This movie is")
        assert (bool(found), rest) == (True, "")
        assert examples.count("\n\n") == 2
        assert premise == f"{examples}This movie is"
        assert content_free == [f"{examples}N/A This movie is", f"{examples}[MASK] This movie is"]
    assert told_of_prompt(results)["premise"] == "4 different ones"


def test_the_premise_keeps_its_examples_where_the_document_is_shown_twice(lm: Any, world: World) -> None:
    words = '{%- set label_words = {"negative": "bad", "positive": "good"} -%}'
    world.add_prompt("films/twice", f"{words}{{{{ text }}}} Again: {{{{ text }}}} This movie is")
    results = evaluate(lm, natural(metadata={"prompt": "films/twice"}), num_fewshot=1, limit=3)
    for sample in samples(results, "natural_films"):
        (context, _), (premise, _), *_ = sample["arguments"]
        assert premise.split("\n\n")[:-1] == context.split("\n\n")[:-1]
        assert premise.endswith("\n\nAgain:  This movie is")


def test_the_premise_loses_the_last_of_equal_texts(lm: Any, world: World) -> None:
    rows = [{"text": "the same film", "label": 1}] * 2
    name = world.add_dataset("tests/same", {"train": rows, "test": rows})
    results = evaluate(lm, natural(dataset_path=name), num_fewshot=1)
    example = "the same film This movie is great\n\n"
    first, second = ([arguments[0] for arguments in s["arguments"]] for s in samples(results, "natural_films"))
    assert first[:2] == [f"{example}the same film This movie is", f"{example}This movie is"]
    assert second == first[:1]


def test_a_few_shot_example_has_the_first_word_of_its_class(lm: Any, world: World) -> None:
    results = evaluate(lm, natural(**SEVERAL), num_fewshot=4, limit=1)
    context = samples(results, "natural_films")[0]["arguments"][0][0]
    label_of = {row["text"]: row["label"] for row in world.splits["train"]}
    examples = context.split("\n\n")[:-1]
    assert len(examples) == 4
    for example in examples:
        text, word = example.removeprefix("Review: ").split(" It was ")
        assert word == ("bad", "good")[label_of[text]]


def test_an_example_that_is_evaluated_is_not_shown(lm: Any, world: World) -> None:
    rows = world.splits["test"][:4]
    name = world.add_dataset("tests/small_pool", {"train": rows, "test": rows})
    results = evaluate(lm, natural(dataset_path=name, fewshot_split="test"), num_fewshot=3)
    for sample in samples(results, "natural_films"):
        assert sample["arguments"][0][0].count(sample["doc"]["text"] + " This movie is") == 1


def chat_model() -> tuple[Any, Any]:
    """A model whose tokenizer puts BOS in front of every text, as Llama's does, and has a chat template with BOS."""
    tokenizer = tiny_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", pair="<eos> $A $B", special_tokens=[("<eos>", 0)]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    model = tiny_model("gpt2")
    return hf_model(model, tokenizer), model


def forwarded(model: Any) -> list[list[int]]:
    """Token ids of every row that the model is given from now on, padding included."""
    rows: list[list[int]] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        rows.extend((args[0] if args else kwargs["input_ids"]).tolist())

    model.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    return rows


@pytest.fixture
def one_row_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt shares a row with another, so that rows are prompts."""
    monkeypatch.setattr(plan, "MIN_SHARED", 2.0)


@pytest.mark.usefixtures("one_row_a_prompt")
@pytest.mark.parametrize("apply_chat_template", [True, False])
def test_every_prompt_has_one_bos(apply_chat_template: bool) -> None:
    lm, model = chat_model()
    lm.batch_size_per_gpu = 1  # no padding, whose id is that of BOS
    rows = forwarded(model)
    tasks = [natural(), probe()]
    evaluate(lm, *tasks, apply_chat_template=apply_chat_template, limit=3)
    # A chat template writes BOS itself; elsewhere the tokenizer adds it.
    contexts = {instance.args[0] for task in tasks for instance in task.instances}
    assert len(contexts) == 3 + 3 + 3 + 40  # bare prompts: without a document, N/A, [MASK]
    expected = [lm.tokenizer(text, add_special_tokens=not apply_chat_template)["input_ids"] for text in contexts]
    assert all(ids[0] == 0 and ids.count(0) == 1 for ids in expected)
    assert all(ids in rows for ids in expected)


def test_the_chat_template_surrounds_prompt_and_premise(world: World) -> None:
    lm, model = chat_model()
    results = evaluate(lm, natural(), apply_chat_template=True, system_instruction="Judge.", limit=3)
    tokenizer = lm.tokenizer
    for sample, doc in zip(samples(results, "natural_films"), world.splits["test"], strict=False):
        context, asked = sample["arguments"][0]
        head = "<eos>[system] Judge.\n[user] "
        assert context == f"{head}{doc['text']} This movie is\n[assistant]\n"
        start, end = asked["document"]
        assert context[start:end].strip() == doc["text"]
        # lm_eval's rule: an assistant's turn starts without a delimiter.
        assert asked["continuations"] == ["terrible", "great"]
        ids = tokenizer(context, add_special_tokens=False)["input_ids"]
        expected = [
            continuation_log_prob(
                model, ids, tokenizer(context + word, add_special_tokens=False)["input_ids"][len(ids) :]
            )
            for word in ("terrible", "great")
        ]
        assert word_log_probs(sample) == pytest.approx(expected, abs=1e-4)
    bare = [arguments[0] for arguments in samples(results, "natural_films")[0]["arguments"][1:]]
    assert bare == [f"{head}{document}This movie is\n[assistant]\n" for document in ("", "N/A ", "[MASK] ")]


def test_a_chat_template_may_trim_the_document(world: World) -> None:
    rows = [{"text": "  \n padded film ", "label": 0}, {"text": "plain film", "label": 1}]
    name = world.add_dataset("tests/padded", {"train": rows, "test": rows})
    results = evaluate(chat_model()[0], natural(dataset_path=name), apply_chat_template=True)
    (context, asked), (premise, _), *_ = samples(results, "natural_films")[0]["arguments"]
    assert context == "<eos>[user] padded film  This movie is\n[assistant]\n"
    start, end = asked["document"]
    assert context[start:end] == "padded film "
    assert premise == "<eos>[user] This movie is\n[assistant]\n"


@pytest.mark.parametrize(("prefix", "delimiter"), [("It is", " "), ("It is ", ""), ("Answer:\n", "")])
def test_the_delimiter_after_an_assistants_prefix(world: World, prefix: str, delimiter: str) -> None:
    lm, _ = chat_model()
    changes = {"gen_prefix": prefix}
    ours, stock = (
        evaluate(lm, task, apply_chat_template=True, limit=2)
        for task in (natural(**changes), stock_task(world, **changes))
    )
    found = [(s["arguments"][0][0], s["arguments"][0][1]["continuations"]) for s in samples(ours, "natural_films")]
    assert [words for _, words in found] == [[f"{delimiter}terrible", f"{delimiter}great"]] * 2
    assert found == [(s["arguments"][0][0], [word for _, word in s["arguments"]]) for s in samples(stock, "stock")]


@pytest.mark.parametrize("multiturn", [True, False])
def test_few_shot_in_a_chat(world: World, multiturn: bool) -> None:
    lm, _ = chat_model()
    ours, stock = (
        evaluate(lm, task, apply_chat_template=True, fewshot_as_multiturn=multiturn, num_fewshot=2, limit=3)
        for task in (natural(), stock_task(world))
    )
    contexts = [s["arguments"][0][0] for s in samples(ours, "natural_films")]
    assert contexts == [s["arguments"][0][0] for s in samples(stock, "stock")]
    for sample in samples(ours, "natural_films"):
        (context, asked), (premise, _), *_ = sample["arguments"]
        start, end = asked["document"]
        assert context[start:end].strip() == sample["doc"]["text"]
        assert len(context) - len(premise) in (end - start, end - start + 1)
        assert premise.startswith(context[:start])


# ------------------------------------------------------------------------------------------------- long documents


@pytest.mark.usefixtures("one_row_a_prompt")
def test_long_documents_are_cut_and_counted(lm: Any, world: World) -> None:
    long = " ".join(f"word{i}" for i in range(100))
    rows = [{"text": text, "label": 0} for text in ("a short film", long + " good", "another", long + " bad end")]
    name = world.add_dataset("tests/long", {"train": world.splits["train"], "test": rows})
    model = tiny_model("gpt2")
    seen = forwarded(model)
    results = evaluate(hf_model(model, batch_size=1), natural(**SEVERAL, dataset_path=name))
    assert report(results, "natural_films")["cut_documents"] == 2
    assert results["harness_ext"]["passes"][0]["cut_prompts"] == 2
    found = samples(results, "natural_films")
    tokenizer = tiny_tokenizer()
    longest_word = max(len(tokenizer(f" {word}")["input_ids"]) for words in words_of("films/several") for word in words)
    for sample, row in zip(found, rows, strict=True):
        answer = sample["resps"][0][0]
        whole = tokenizer(f"Review: {row['text']} It was")["input_ids"]
        assert (answer.cut_tokens > 0) == (len(whole) > POSITIONS)
        if not answer.cut_tokens:
            continue
        # The template stays, the words fit behind it, and no more of the document's beginning is lost than must be.
        kept = len(whole) - answer.cut_tokens
        assert POSITIONS - longest_word - 8 < kept <= POSITIONS - longest_word + 1
        texts = [tokenizer.decode(ids) for ids in seen if len(ids) == kept]
        ending = f"{row['text'][-30:]} It was"
        assert any(text.startswith("Review: ") and text.endswith(ending) for text in texts)
    assert max(map(len, seen)) <= POSITIONS


def test_the_length_option_of_the_model_counts(world: World) -> None:
    results = evaluate(hf_model(max_length=14), natural())
    short = sum(
        len(tiny_tokenizer()(f"{row['text']} This movie is")["input_ids"]) <= 14 for row in world.splits["test"]
    )
    assert 0 < short < len(world.splits["test"])
    assert report(results, "natural_films")["cut_documents"] == len(world.splits["test"]) - short


# ------------------------------------------------------------------------------------------------- lm_eval's options


def test_limit_and_samples(lm: Any, world: World) -> None:
    whole = samples(evaluate(lm, natural()), "natural_films")
    for limit, count in ((3, 3), (0.25, 4)):
        results = evaluate(lm, natural(), limit=limit)
        assert results["n-samples"]["natural_films"] == {"original": 16, "effective": count}
        found = np.array([word_log_probs(s) for s in samples(results, "natural_films")])
        assert found == pytest.approx(np.array([word_log_probs(s) for s in whole[:count]]), abs=1e-4)
    chosen = evaluate(lm, natural(), samples={"natural_films": [2, 11]})
    assert [s["doc_id"] for s in samples(chosen, "natural_films")] == [2, 11]
    assert [s["doc"] for s in samples(chosen, "natural_films")] == [world.splits["test"][i] for i in (2, 11)]


def test_predict_only_gives_answers_and_no_metrics(lm: Any, several: dict[str, Any]) -> None:
    results = evaluate(lm, natural(**SEVERAL), predict_only=True)
    assert log_probs_of(results) == log_probs_of(several)
    assert not [name for name in results["results"]["natural_films"] if "," in name]
    assert told_of_prompt(results)["id"] == "films/several"


def test_without_logged_samples_metrics_are_the_same(lm: Any, several: dict[str, Any]) -> None:
    results = evaluate(lm, natural(**SEVERAL), log_samples=False)
    assert "samples" not in results
    assert results["results"] == several["results"]


def test_a_cache_of_requests_never_serves_an_old_prompt(
    lm: Any, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "requests"))
    world.add_prompt("films/edited", load_prompt("films/plain").source)
    options = {"metadata": {"prompt": "films/edited"}}
    before = evaluate(lm, natural(**options), cache_requests=True)
    world.add_prompt("films/edited", load_prompt("films/plain").source.replace("This movie", "The film"))
    after = evaluate(lm, natural(**options), cache_requests=True, limit=4)
    for results, ending in ((before, " This movie is"), (after, " The film is")):
        assert all(s["arguments"][0][0].endswith(ending) for s in samples(results, "natural_films"))


def test_a_cache_of_responses_is_no_obstacle(lm: Any, several: dict[str, Any], tmp_path: Path) -> None:
    """lm_eval's cache has no model in its key; ours is the feature store, so an other model gets its own answers."""
    cache = str(tmp_path / "responses")
    for model, expected in ((lm, True), (hf_model(tiny_model("gpt2", seed=1)), False)):
        for _ in range(2):
            found = evaluate(model, natural(**SEVERAL), use_cache=cache)
            assert (log_probs_of(found) == log_probs_of(several)) == expected


def test_write_out_shows_the_first_prompt(lm: Any, world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        evaluate(lm, natural(), probe(), write_out=True, limit=2)
    text = world.splits["test"][0]["text"]
    assert f"{text} This movie is\n(end of prompt" in caplog.text
    assert f"\n{text}\n(end of prompt" in caplog.text


def test_a_task_can_be_evaluated_again(lm: Any, several: dict[str, Any]) -> None:
    task = natural(**SEVERAL)
    first, second = (evaluate(lm, task) for _ in range(2))
    assert first["results"] == second["results"] == several["results"]
    assert report(first, "natural_films") == report(several, "natural_films")


# ------------------------------------------------------------------------------------------------- one pass


@pytest.mark.usefixtures("one_row_a_prompt")
def test_natural_and_probe_together_forward_their_distinct_prompts_once(world: World) -> None:
    model = tiny_model("gpt2")
    rows = forwarded(model)
    tokenizer = tiny_tokenizer()
    train, test = (world.splits[split] for split in ("train", "test"))
    tasks = [
        natural(),
        probe(),
        probe({"prompt": True}, task="probe_prompted"),
        natural(task="natural_again"),
    ]
    results = evaluate(hf_model(model, batch_size=1), *tasks)
    prompts = {"This movie is", "N/A This movie is", "[MASK] This movie is"}
    prompts |= {f"{row['text']} This movie is" for row in [*test, *train]}
    prompts |= {row["text"] for row in [*test, *train]}
    expected = sorted(tokenizer(prompt)["input_ids"] for prompt in prompts)
    assert sorted(row for row in rows if len(row) > 1) == expected
    (summary,) = results["harness_ext"]["passes"]
    assert summary["distinct_prompts"] == summary["forwarded"] == len(prompts)
    assert summary["prompts"] == 2 * (len(test) + 3) + 2 * (len(test) + len(train))
    assert summary["documents"] == 4 * len(test) + 2 * len(train)
    assert summary["tokens"] == sum(map(len, expected))
    assert summary["padding"] == summary["cut_prompts"] == summary["from_store"] == 0


def test_a_second_run_takes_everything_from_the_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(world.cache))
    model = tiny_model("gpt2")
    first = evaluate(hf_model(model), natural(**SEVERAL), probe())
    rows = forwarded(model)
    second = evaluate(hf_model(model), natural(**SEVERAL), probe())
    assert all(len(row) == 1 for row in rows)  # the readout's single token
    (passed,) = second["harness_ext"]["passes"]
    assert (passed["forwarded"], passed["tokens"]) == (0, 0)
    assert passed["from_store"] == first["harness_ext"]["passes"][0]["forwarded"] > 0
    assert second["results"] == first["results"]
    # Another model under the same cache computes its own.
    other = evaluate(hf_model(tiny_model("gpt2", seed=1)), natural(**SEVERAL), probe())
    assert other["harness_ext"]["passes"][0]["from_store"] == 0


def test_requests_are_of_one_type(lm: Any) -> None:
    task = natural()
    evaluate(lm, task)
    assert {instance.request_type for instance in task.instances} == {REQUEST_TYPE} == {task.OUTPUT_TYPE}


def test_documents_that_occur_twice_count_twice(lm: Any, world: World) -> None:
    rows = reviews(3)
    name = world.add_dataset("tests/twice", {"train": rows, "test": [*rows, *rows]})
    once, twice = (evaluate(lm, natural(dataset_path=name), **options) for options in ({"limit": 3}, {}))
    for metric in ("acc", "acc_pmi", "acc_batch", "macro_f1", "brier"):
        assert twice["results"]["natural_films"][f"{metric},none"] == pytest.approx(
            once["results"]["natural_films"][f"{metric},none"]
        )
    assert twice["harness_ext"]["passes"][0]["distinct_prompts"] == 3 + 3
