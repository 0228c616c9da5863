"""The search of label words against brute force, and what it reads off a vocabulary of any tokenizer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SIZES, VOCABULARY, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from harness_ext.engine import readout as readout_module
from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.label_words import search_words, token_texts, top_tokens, whole_words
from harness_ext.engine.tokens import PromptEncoder
from harness_ext.evaluators.scores import tie_aware_accuracy

# ------------------------------------------------------------------------------------------------- the search


def brute_force(
    scores: np.ndarray, labels: np.ndarray, candidates: list[list[int]]
) -> list[tuple[tuple[int, ...], float]]:
    """Every assignment of distinct words with its accuracy, best first; equal ones by the sum of ranks, then the ranks."""
    found = []
    for ranks in itertools.product(*(range(len(of_class)) for of_class in candidates)):
        columns = tuple(of_class[rank] for of_class, rank in zip(candidates, ranks, strict=True))
        if len(set(columns)) == len(columns):
            accuracy = tie_aware_accuracy(scores[:, list(columns)], labels).values.mean()
            found.append((-round(float(accuracy), 9), sum(ranks), ranks, columns))
    return [(columns, -negative) for negative, _, _, columns in sorted(found)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Scores with many ties, and candidates that the classes share in part."""
    num_classes = draw(st.integers(2, 4))
    num_words = draw(st.integers(num_classes, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_documents = draw(st.integers(1, 12))
    scores = generator.integers(-2, 3, size=(num_documents, num_words)).astype(float)
    labels = generator.integers(0, num_classes, size=num_documents)
    candidates = [
        generator.permutation(num_words)[: draw(st.integers(num_classes, num_words))].tolist()
        for _ in range(num_classes)
    ]
    return scores, labels, candidates


@given(problems(), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_the_search_of_all_is_brute_force(
    problem: tuple[np.ndarray, np.ndarray, list[list[int]]], num_best: int
) -> None:
    scores, labels, candidates = problem
    found = search_words(scores, labels, candidates, num_best=num_best)
    assert found.exhaustive
    expected = brute_force(scores, labels, candidates)[:num_best]
    assert [assignment.columns for assignment in found.best] == [columns for columns, _ in expected]
    assert [assignment.accuracy for assignment in found.best] == pytest.approx([accuracy for _, accuracy in expected])


@given(problems(), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_a_search_class_by_class_reports_true_accuracies_and_stops_where_no_single_change_helps(
    problem: tuple[np.ndarray, np.ndarray, list[list[int]]], num_best: int
) -> None:
    scores, labels, candidates = problem
    found = search_words(scores, labels, candidates, num_best=num_best, max_comparisons=0)
    assert not found.exhaustive
    accuracy_of = dict(brute_force(scores, labels, candidates))
    for assignment in found.best:
        assert assignment.accuracy == pytest.approx(accuracy_of[assignment.columns])
    accuracies = [assignment.accuracy for assignment in found.best]
    assert accuracies == sorted(accuracies, reverse=True)
    best = found.best[0]
    for label, of_class in enumerate(candidates):
        for column in of_class:
            changed = (*best.columns[:label], column, *best.columns[label + 1 :])
            assert accuracy_of.get(changed, 0.0) <= best.accuracy + 1e-9


def test_planted_words_are_found_among_too_many_assignments() -> None:
    """Six classes of 40 candidates, 4·10⁹ assignments, of which one is right for every document."""
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 20)
    scores = generator.normal(size=(120, 240))
    planted = [40 * label + 7 for label in range(6)]
    scores[:, planted] = 20 * np.eye(6)[labels]
    candidates = np.arange(240).reshape(6, 40)
    found = search_words(scores, labels, candidates, num_best=3)
    assert not found.exhaustive
    assert found.best[0].columns == tuple(planted)
    assert found.best[0].accuracy == 1.0
    assert len(found.best) == 3


def test_half_a_point_for_a_tie() -> None:
    found = search_words([[0.0, 0.0], [1.0, 0.0]], [0, 0], [[0], [1]], num_best=5)
    assert found.best == (((0, 1), 0.75),)


def test_words_that_are_ruled_out_lose() -> None:
    found = search_words([[-np.inf, -1.0, -2.0]] * 2, [0, 0], [[0, 2], [1]], num_best=5)
    assert [assignment.accuracy for assignment in found.best] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [[0.0, np.nan]]}, "has a NaN"),
        ({"labels": [0, 1]}, r"expected \(n, W\) and \(n,\)"),
        ({"labels": [2]}, r"expected classes in 0\.\.1"),
        ({"candidates": [[0, 1]]}, "two or more"),
        ({"candidates": [[0], []]}, "at least one for each"),
        ({"candidates": [[0], [0]]}, "a word of its own"),
        ({"candidates": [[0], [0]], "max_comparisons": 0}, "a word of its own"),
        ({"num_best": 0}, "expected at least 1"),
    ],
)
def test_bad_arguments_of_the_search(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"scores": [[0.0, 1.0]], "labels": [0], "candidates": [[0], [1]], "num_best": 1}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        search_words(
            arguments.pop("scores"),
            arguments.pop("labels"),
            arguments.pop("candidates"),
            **arguments,  # type: ignore[arg-type]
        )


# ------------------------------------------------------------------------------------------------- the candidates


def states_and_labels(n: int, num_classes: int) -> tuple[torch.Tensor, np.ndarray]:
    states = 5 * torch.randn(n, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    return states, np.arange(n) % num_classes


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("num_classes", [1, 2, 3])
def test_class_means_are_those_of_the_dense_table(rows: int, num_classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    states, labels = states_and_labels(17, num_classes)
    readout = LastStateModel(tiny_model("gemma2"), device=torch.device("cpu")).readout
    dense = readout.logits(states).double().log_softmax(-1).numpy()
    expected = np.stack([dense[labels == label].mean(axis=0) for label in range(num_classes)])
    sizes: list[int] = []
    logits = readout.logits

    def recording(chunk: torch.Tensor) -> torch.Tensor:
        sizes.append(len(chunk))
        return logits(chunk)

    monkeypatch.setattr(readout_module, "CHUNK_VALUES", VOCABULARY * rows)
    monkeypatch.setattr(readout, "logits", recording)
    found = readout.class_means(states, labels, num_classes)
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(sizes) == min(rows, 17)
    assert sum(sizes) == 17


def test_a_token_that_is_ruled_out_spoils_no_other() -> None:
    """The padding of a vocabulary may have logits of -inf."""
    states, labels = states_and_labels(6, 2)
    model = tiny_model("llama")
    readout = LastStateModel(model, device=torch.device("cpu")).readout
    dense = readout.logits(states)[:, :-1].double().log_softmax(-1).numpy()
    model.lm_head.bias = torch.nn.Parameter(torch.tensor([0.0] * (VOCABULARY - 1) + [-torch.inf]))
    means = readout.class_means(states, labels, 2)
    assert means[:, :-1] == pytest.approx(np.stack([dense[labels == label].mean(axis=0) for label in (0, 1)]), abs=1e-5)
    assert np.isneginf(means[:, -1]).all()


def test_a_class_without_documents() -> None:
    states, _ = states_and_labels(3, 1)
    readout = LastStateModel(tiny_model("gpt2"), device=torch.device("cpu")).readout
    with pytest.raises(ValueError, match="No document of class 1 among 3"):
        readout.class_means(states, np.array([0, 0, 2]), 3)


def test_the_top_tokens_are_those_allowed_and_ties_go_to_the_lower_id() -> None:
    means = np.array([[5.0, 1.0, 2.0, 2.0, 9.0], [0.0, 1.0, -np.inf, 3.0, 9.0]])
    assert top_tokens(means, [3, 1, 2], 2).tolist() == [[2, 3], [3, 1]]
    assert top_tokens(means, [3, 1, 2], 9).tolist() == [[2, 3, 1], [3, 1, 2]]
    for tokens, count in (([], 1), ([1], 0)):
        with pytest.raises(ValueError, match="expected at least 1"):
            top_tokens(means, tokens, count)


# ------------------------------------------------------------------------------------------------- vocabularies

CORPUS = ["the film is great", "the film is bad , naïve and 5 stars", "great films are well made"] * 30


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A BPE with ▁ for blanks and a token for each byte that it does not know, as Llama-2 has it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_level() -> PreTrainedTokenizerFast:
    """Every word a token, blanks being dropped; it does not know the word `a`."""
    words = sorted({word for text in CORPUS for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS = {
    "byte level": lambda: tiny_tokenizer(CORPUS),
    "sentencepiece": sentencepiece_like,
    "words": word_level,
}


def encoder_of(tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    return PromptEncoder(tokenizer, max_length=64, add_special_tokens=None, prefix_token_id=0)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_whole_words_continue_a_prompt_as_one_token(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    encode = encoder_of(tokenizer).encode
    found = whole_words(tokenizer, encode, context="the film is", num_tokens=len(tokenizer))
    assert set(found.values()) >= {"great", "film", "is"}
    assert len(set(found.values())) == len(found)
    [context] = encode(["the film is"])
    for token, word in found.items():
        assert word.isalnum()
        assert encode([f"the film is {word}"]) == [[*context, token]]
    # Every word of the corpus that goes on from the prompt as one token is among them.
    for word in {word for text in CORPUS for word in text.split() if word.isalnum()}:
        [ids] = encode([f"the film is {word}"])
        assert (word in found.values()) == (ids[:-1] == context)


def test_tokens_without_a_logit_are_no_words() -> None:
    tokenizer = word_level()
    encode = encoder_of(tokenizer).encode
    every = whole_words(tokenizer, encode, context="the film is", num_tokens=len(tokenizer))
    some = whole_words(tokenizer, encode, context="the film is", num_tokens=6)
    assert some == {token: word for token, word in every.items() if token < 6}
    assert 0 < len(some) < len(every)


@given(st.text(alphabet="the film is great bad,\n!?5", min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_the_texts_of_tokens_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = _CACHED[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    joined = "".join(token_texts(tokenizer, ids))
    # SentencePiece puts a blank before a text.
    assert joined.removeprefix(" " if kind == "sentencepiece" and not text.startswith(" ") else "") == text


_CACHED = {kind: TOKENIZERS[kind]() for kind in ("byte level", "sentencepiece")}


def test_a_part_of_a_character_is_shown_as_the_tokenizer_writes_it() -> None:
    tokenizer = _CACHED["byte level"]
    ids = tokenizer("ł", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    assert token_texts(tokenizer, ids) == tokenizer.convert_ids_to_tokens(ids)
    assert token_texts(tokenizer, []) == []


def test_a_model_end_to_end() -> None:
    """States and readout of the engine: the suggested words are those of direct forwards."""
    from harness_ext.contracts import Feature, PromptRequest
    from harness_ext.engine.answer import answer_requests

    model, tokenizer = tiny_model("gpt2"), _CACHED["byte level"]
    engine = LastStateModel(model, device=torch.device("cpu"))
    texts = [f"{word} film is" for word in ("great", "bad", "the", "5", "well made", "naive")]
    labels = np.array([0, 1, 0, 1, 0, 1])
    answers, _ = answer_requests(
        texts,
        [PromptRequest(features=(Feature(),))] * len(texts),
        model=engine,
        encoder=encoder_of(tokenizer),
        store=None,
        max_rows=None,
        max_tokens=512,
        progress=False,
    )
    source = answers[0].source
    assert source is not None
    states = torch.tensor(source.take([answer.row for answer in answers], Feature()))
    with torch.no_grad():
        dense = np.stack(
            [
                model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1].log_softmax(-1).numpy()
                for text in texts
            ]
        )
    means = engine.readout.class_means(states, labels, 2)
    assert means == pytest.approx(np.stack([dense[labels == label].mean(axis=0) for label in (0, 1)]), abs=1e-4)
    columns, _ = engine.readout.read(states, [[3, 5]] * len(states))
    assert torch.stack(columns).numpy() == pytest.approx(dense[:, [3, 5]], abs=1e-4)
