"""Probes on functions of f(s) and Φ, against plain forwards, an explicit softmax and dense algebra."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from oracles import continuation_log_prob, last_state, next_token_probabilities
from sklearn.linear_model import LogisticRegression
from tiny import tiny_model, tiny_tokenizer
from worlds import FEATURE_PROBES, World, evaluate, feature_probe, hf_model, natural, probe, report, reviews, samples

from harness_ext.contracts import TokenStates
from harness_ext.evaluators.probe import fit_probe
from harness_ext.tasks import features
from harness_ext.tasks.features import FeatureSet

WORDS = ["bad", "good", "fine", "terrible"]
"""One to three tokens under the tiny tokenizer."""

ONE_TOKEN = ["bad", "good", "great", "the", "film"]

KINDS = [kind for kind in FEATURE_PROBES if kind != "probe"]


def biased() -> Any:
    """Llama with an output embedding that has a bias."""
    model = tiny_model("llama")
    head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.copy_(torch.randn(head.bias.shape, generator=generator))
    model.set_output_embeddings(head)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tiny_model("gpt2"),  # tied
    "gemma2": lambda: tiny_model("gemma2"),  # soft-capping
    "opt": lambda: tiny_model("opt"),  # a projection before Φ
    "biased": biased,
}


@pytest.fixture(scope="module")
def lm(world: World) -> Any:
    return hf_model()


@pytest.fixture(scope="module", params=MODELS)
def any_lm(world: World, request: pytest.FixtureRequest) -> Any:
    return hf_model(MODELS[request.param]())


def of_words(**more: Any) -> dict[str, Any]:
    return {"class_words": WORDS[:2], "subset_words": WORDS, **more}


def run(lm: Any, kind: str, options: Any = None, **changes: Any) -> tuple[dict[str, Any], list[FeatureSet]]:
    """A run, and the features that its probe saw, one set for each prompt."""
    changes["metadata"] = of_words(**changes.get("metadata", {}))
    task = feature_probe(kind, options, **changes)
    made: list[FeatureSet] = []

    def make(answers: Any, quad_options: Any) -> FeatureSet:
        made.append(make_features(answers, quad_options))
        return made[-1]

    make_features = task.kind.make
    task.kind = dataclasses.replace(task.kind, make=make)
    return evaluate(lm, task), made


def told_of(results: dict[str, Any], kind: str) -> dict[str, Any]:
    (entry,) = report(results, f"{kind}_films")["prompts"]
    return entry


def texts(world: World) -> dict[str, list[str]]:
    return {split: [row["text"] for row in world.splits[split]] for split in ("train", "test")}


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


@pytest.fixture(scope="module")
def distributions(any_lm: Any, world: World) -> dict[str, np.ndarray]:
    """p_f(·|s) of every document, (n, V), by split."""
    return {
        split: np.stack([next_token_probabilities(any_lm.model, ids(text)).numpy() for text in of_split])
        for split, of_split in texts(world).items()
    }


def output_embedding(lm: Any) -> np.ndarray:
    return lm.model.get_output_embeddings().weight.detach().double().numpy()


def compare(made: FeatureSet, expected: Callable[[str], np.ndarray]) -> None:
    for split, found in (("train", made.make_train()), ("test", made.make_test())):
        assert found == pytest.approx(expected(split), abs=1e-4), split


# ------------------------------------------------------------------------------------------------- values


def test_conditional_means(any_lm: Any, distributions: dict[str, np.ndarray]) -> None:
    _, (made,) = run(any_lm, "probe_cmean")
    compare(made, lambda split: distributions[split] @ output_embedding(any_lm))


def test_random_projections(any_lm: Any, distributions: dict[str, np.ndarray]) -> None:
    _, (made,) = run(any_lm, "probe_random")
    shape = output_embedding(any_lm).shape
    orthonormal, triangle = torch.linalg.qr(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    matrix = (orthonormal * triangle.diagonal().sign()).double().numpy()
    assert matrix.T @ matrix == pytest.approx(np.eye(shape[1]), abs=1e-5)
    compare(made, lambda split: distributions[split] @ matrix)


@pytest.mark.parametrize(("kind", "words"), [("probe_words", WORDS[:2]), ("probe_subset", WORDS)])
def test_words_of_any_number_of_tokens(any_lm: Any, world: World, kind: str, words: list[str]) -> None:
    results, (made,) = run(any_lm, kind)

    for split, found in (("train", made.make_train()), ("test", made.make_test())):
        for text, row in list(zip(texts(world)[split], found, strict=True))[::4]:
            expected = [continuation_log_prob(any_lm.model, ids(text), ids(f" {word}")) for word in words]
            assert row == pytest.approx(expected, abs=1e-4)
    told = told_of(results, kind)
    assert told["words"] == words
    assert told["words_of_several_tokens"] == {word: len(ids(f" {word}")) for word in words if len(ids(f" {word}")) > 1}
    assert told["words_left_out"] == []


def test_a_probe_on_all_probabilities_is_that_of_scikit_learn(
    any_lm: Any, world: World, distributions: dict[str, np.ndarray]
) -> None:
    """On the dense p_f, centred and divided by the one number that makes its variances 1 on average; up and down the grid."""
    results, (made,) = run(any_lm, "probe_full")
    train, test = (distributions[split].astype(np.float64) for split in ("train", "test"))
    told = told_of(results, "probe_full")
    assert told["vocabulary"] == train.shape[1] > told["directions"] == made.make_train().shape[1]
    assert told["variance_left_out"] < 1e-6
    (fitted,) = told["probes"]
    assert fitted["converged"]
    assert fitted["num_cv_unconverged"] == 0

    mean, labels = train.mean(axis=0), np.array([row["label"] for row in world.splits["train"]])
    scale = np.sqrt(train.var(axis=0).mean())
    for c in fitted["c_grid"][::3]:
        fit = fit_probe(
            made.make_train(),
            labels,
            num_classes=2,
            c_grid=[c],
            scaling=made.scaling,
            total_variance=made.total_variance,
            seed=0,
        )
        model = LogisticRegression(C=c, solver="newton-cg", tol=1e-10, max_iter=5000).fit(
            (train - mean) / scale, labels
        )
        for found, expected in ((made.make_train(), train), (made.make_test(), test)):
            logits = model.decision_function((expected - mean) / scale)
            assert fit.decision_scores(found)[:, 1] * 2 == pytest.approx(logits, abs=2e-3 * np.abs(logits).max())


def test_probabilities_along_fewer_directions(lm: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they leave out is measured."""
    monkeypatch.setattr(features, "MOST_DIRECTIONS", 8)
    monkeypatch.setattr(features, "ROWS_AT_ONCE", 7)
    results, (made,) = run(lm, "probe_full")
    dense = np.stack([next_token_probabilities(lm.model, ids(text)).numpy() for text in texts(world)["train"]])
    told, total = told_of(results, "probe_full"), dense.var(axis=0).sum()
    singular = np.linalg.svd(dense - dense.mean(axis=0), compute_uv=False)
    best = np.square(singular[8:]).sum() / np.square(singular).sum()
    assert told["directions"] == 8
    assert told["variance_left_out"] == pytest.approx(1 - made.make_train().var(axis=0).sum() / total, abs=1e-5)
    assert best - 1e-5 <= told["variance_left_out"] < 3 * best


@pytest.mark.parametrize("ridge", [None, 0.5])
def test_plug_in_quad(any_lm: Any, distributions: dict[str, np.ndarray], ridge: float | None) -> None:
    results, (made,) = run(any_lm, "quad", metadata={"quad": {"ridge": ridge}})
    told = told_of(results, "quad")["quad"]
    if ridge is not None:
        assert told["ridge"] == ridge
    embedding = output_embedding(any_lm)
    gram = embedding.T @ embedding  # a bias of the output embedding has no part in it
    regular = gram + told["ridge"] * np.eye(len(gram))
    compare(made, lambda split: np.linalg.solve(regular, embedding.T @ distributions[split].T).T)
    assert told["gram_rank"] == len(gram)
    assert told["gram_condition_number"] == pytest.approx(np.linalg.cond(gram), rel=1e-6)
    has_bias = any_lm.model.get_output_embeddings().bias is not None
    assert told["notes"] == ["The output embedding has a bias: it is part of p_f, and no part of Φ."] * has_bias


def test_the_reference_of_every_kind_is_the_probe_on_f(any_lm: Any, world: World) -> None:
    rows = reviews(90, seed=2, noise=0.3)
    name = world.add_dataset("tests/shares", {"train": rows[:50], "test": rows[50:]})
    tasks = [
        feature_probe(kind, dataset_path=name, metadata=of_words(), task=f"{kind}_films") for kind in FEATURE_PROBES
    ]
    results = evaluate(any_lm, *tasks)
    accuracy = results["results"]["probe_films"]["acc,none"]
    rate = np.bincount([row["label"] for row in rows[50:]]).max() / 40
    for kind in KINDS:
        told = told_of(results, kind)
        assert told["acc"] == results["results"][f"{kind}_films"]["acc,none"]
        assert told["f_accuracy"] == accuracy
        if accuracy > rate:
            assert told["share_of_f_gain"] == pytest.approx((told["acc"] - rate) / (accuracy - rate))
        else:
            assert told["share_of_f_gain"] is None
            assert "not above chance" in told["share_of_f_gain_reason"]
    # The same as one row, as the source's tables have it.
    (row,) = results["harness_ext"]["features"]
    assert (row["dataset"], row["prompt"], row["majority_rate"]) == (name, None, rate)
    expected = {task.FEATURES: told_of(results, kind)["acc"] for kind, task in zip(FEATURE_PROBES, tasks, strict=True)}
    assert row["accuracy"] == expected
    assert row["share_of_f_gain"] == {
        FEATURE_PROBES[kind].FEATURES: told_of(results, kind)["share_of_f_gain"] for kind in KINDS
    }
    json.dumps([results["configs"], results["harness_ext"]], allow_nan=False)


def test_the_affine_fit_of_f_is_that_of_least_squares(lm: Any, world: World) -> None:
    """200 documents, so that the small ridge of the fit does not show."""
    rows = reviews(260, seed=7)
    splits = {"train": rows[:200], "test": rows[200:]}
    name = world.add_dataset("tests/affine", splits)
    results, (made,) = run(lm, "probe_cmean", dataset_path=name)
    told = told_of(results, "probe_cmean")["affine_fit_of_f"]
    states, targets = {}, {"train": made.make_train().astype(float), "test": made.make_test().astype(float)}
    for split, documents in splits.items():
        states[split] = np.array([[*last_state(lm.model, ids(row["text"])).tolist(), 1.0] for row in documents])
    weights, *_ = np.linalg.lstsq(states["train"], targets["train"], rcond=None)
    for split, key in (("train", "r2_train"), ("test", "r2_held_out")):
        residual = targets[split] - states[split] @ weights
        spread = targets[split] - targets["train"].mean(axis=0)
        assert told[key] == pytest.approx(1 - np.square(residual).sum() / np.square(spread).sum(), abs=5e-3), key


def test_the_coefficients_of_the_label_words_are_reported(lm: Any) -> None:
    results, _ = run(lm, "probe_words")
    told = told_of(results, "probe_words")["natural_coefficients"]
    assert told["label_entropy"] == pytest.approx(math.log(2))
    assert (told["num_rows"], told["num_held_out_rows"], told["num_words"]) == (40, 16, 2)
    losses = [entry["tau"] for entry in told["coefficients"]]
    # A wider bound never does worse, up to the last digit of the solver.
    assert all(wide <= narrow + 1e-12 for narrow, wide in pairwise(losses))
    assert losses[-1] < told["label_entropy"]


# ------------------------------------------------------------------------------------------------- Quad heads


@pytest.mark.parametrize("head", ["linear", "mlp", "block"])
def test_a_learned_quad_head(lm: Any, head: str) -> None:
    results, (made,) = run(lm, "quad", metadata={"quad": {"head": head, "epochs": 2}})
    told = told_of(results, "quad")["quad"]
    assert told["kind"] == head
    assert told["linear_train_loss"] < 0  # that of g = 0
    assert math.isfinite(told["validation_loss"])
    assert told["train_tokens"] > told["validation_tokens"] > 0
    assert len(told["validation_losses"]) == len(told["train_losses"]) == (0 if head == "linear" else 2)
    train, test = made.make_train(), made.make_test()
    assert (train.shape, test.shape) == ((40, 32), (16, 32))
    assert np.isfinite(train).all()
    assert np.isfinite(test).all()
    json.dumps(results["configs"], allow_nan=False)
    again, (same,) = run(lm, "quad", metadata={"quad": {"head": head, "epochs": 2}})
    assert np.array_equal(same.make_test(), test)
    assert again["results"] == results["results"]


def test_a_head_does_not_look_at_labels_or_evaluated_documents(lm: Any, world: World) -> None:
    rows = [{**row, "label": 1 - row["label"]} for row in world.splits["train"]]
    name = world.add_dataset("tests/other_labels", {"train": rows, "test": world.splits["test"][:5]})
    options = {"quad": {"head": "mlp", "epochs": 1}}
    _, (made,) = run(lm, "quad", metadata=options)
    _, (other,) = run(lm, "quad", metadata=options, dataset_path=name)
    assert made.make_train() == pytest.approx(other.make_train(), abs=1e-5)


# ------------------------------------------------------------------------------------------------- words


def test_one_token_words_leave_the_others_out(lm: Any) -> None:
    results, (made,) = run(lm, "probe_subset", {"one_token_words": True})
    told = told_of(results, "probe_subset")
    kept = [word for word in WORDS if len(ids(f" {word}")) == 1]
    assert told["words"] == kept
    assert (
        told["words_left_out"] == [word for word in WORDS if word not in kept] == list(told["words_of_several_tokens"])
    )
    _, (all_words,) = run(lm, "probe_subset")
    columns = [WORDS.index(word) for word in kept]
    assert made.make_test() == pytest.approx(all_words.make_test()[:, columns], abs=1e-5)
    assert results["harness_ext"]["passes"][0]["word_continuations"] == 0


def test_no_word_is_one_token(lm: Any) -> None:
    with pytest.raises(ValueError, match=r"none of the words 'fine' is one token.*one_token_words"):
        evaluate(lm, feature_probe("probe_subset", {"one_token_words": True}, metadata={"subset_words": ["fine"]}))


@pytest.mark.parametrize("words", [None, [], "good", [1, 2], ["good", " "], {"a": "good"}])
def test_a_subset_that_is_no_list_of_words(words: Any) -> None:
    with pytest.raises(ValueError, match=r"probe_subset_films needs a list of words, found.*subset_words: \[word"):
        feature_probe("probe_subset", metadata={"subset_words": words})


def test_class_words_are_those_of_the_first_prompt_that_has_some(lm: Any) -> None:
    for prompt, expected in (
        ("films/several", ["bad", "terrible", "good", "fine"]),
        (["films/plain", "films/several"], ["terrible", "great"]),
    ):
        task = feature_probe("probe_words", metadata={"prompt": prompt})
        assert told_of(evaluate(lm, task, limit=4), "probe_words")["words"] == expected


def test_words_in_a_chat_are_those_that_natural_tasks_ask_for(world: World) -> None:
    lm = hf_model()
    lm.tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}\n{% endfor %}a"
    tasks = [natural(), feature_probe("probe_words", {"prompt": True})]
    for chat, words in ((True, ["terrible", "great"]), (False, [" terrible", " great"])):
        evaluate(lm, *tasks, apply_chat_template=chat, limit=2)
        asked = [instance.args[1]["continuations"] for task in tasks for instance in task.instances]
        assert asked == [words] * len(asked)


def test_a_prompt_without_words_gives_no_class_words() -> None:
    with pytest.raises(ValueError, match=r"probe_words_films needs a list of words.*class_words"):
        feature_probe("probe_words", metadata={"prompt": "films/wordless"})


def test_a_word_that_is_listed_twice_is_one_feature(lm: Any) -> None:
    task = feature_probe("probe_subset", metadata={"subset_words": ["good", "bad", "good"]})
    assert told_of(evaluate(lm, task, limit=4), "probe_subset")["words"] == ["good", "bad"]


# ------------------------------------------------------------------------------------------------- models


class Bent(torch.nn.Module):
    """An output embedding that is not affine."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.head = head
        self.in_features = head.in_features

    @property
    def weight(self) -> torch.Tensor:
        return self.head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(hidden))


@pytest.fixture(scope="module")
def bent(world: World) -> Any:
    model = tiny_model("llama")
    model.set_output_embeddings(Bent(model.lm_head))
    return hf_model(model)


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        ("probe_cmean", {}),
        ("probe_random", {}),
        ("quad", {}),
        ("quad", {"quad": {"head": "linear"}}),
    ],
)
def test_an_output_embedding_that_is_not_affine(bent: Any, kind: str, metadata: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"\(Bent\) is not affine, so it has no Φ.*probe_words_<dataset>"):
        evaluate(bent, feature_probe(kind, metadata=metadata))


@pytest.mark.parametrize("kind", ["probe", "probe_words", "probe_subset", "probe_full"])
def test_what_needs_no_output_embedding_runs_without_one(bent: Any, kind: str) -> None:
    results, _ = run(bent, kind)
    assert 0 <= results["results"][f"{kind}_films"]["acc,none"] <= 1


@pytest.mark.parametrize("damage", ["duplicate", "zero"])
def test_a_singular_gram_matrix_is_noted(world: World, damage: str) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[:, 3] = model.lm_head.weight[:, 5] if damage == "duplicate" else 0.0
    results, (made,) = run(hf_model(model), "quad")
    told = told_of(results, "quad")["quad"]
    assert told["gram_rank"] == 31
    assert any("ΦᵀΦ" in note for note in told["notes"])
    assert np.isfinite(made.make_train()).all()


def test_a_model_that_says_the_same_after_everything(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Features without variance: a probe predicts the prior, and there is nothing in p_f to fit."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.zero_()  # f(s) = 0
    lm = hf_model(model)
    for kind in ("probe", "probe_cmean", "probe_random", "probe_words", "quad"):
        results, _ = run(lm, kind)
        assert results["results"][f"{kind}_films"]["acc,none"] == 0.5
        assert told_of(results, kind)["at_or_below_majority"] == ["acc"]
        message = f"{kind}_films: acc is not above the share of the commonest class, 0.5000 (prompt: document)."
        assert caplog.text.count(message) == 1
    with pytest.raises(ValueError, match="the same after every training document"):
        run(lm, "probe_full")


@pytest.mark.parametrize("kind", ["probe_cmean", "probe_full", "quad"])
def test_fewer_documents_than_folds(lm: Any, world: World, kind: str) -> None:
    rows = [row for row in world.splits["train"] if row["label"] == 0][:3]
    rows += [row for row in world.splits["train"] if row["label"] == 1][:2]
    name = world.add_dataset("tests/five", {"train": rows, "test": world.splits["test"]})
    results, _ = run(lm, kind, {"num_folds": 8}, dataset_path=name)
    (fit,) = told_of(results, kind)["probes"]
    assert fit["num_folds"] == 2
    assert any("2 folds instead of 8" in note for note in fit["notes"])


# ------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"heads": "linear"}, "unknown option 'heads'. Did you mean 'head'.*Known: head, ridge"),
        ([], "expects a mapping"),
        ({"head": "transformer"}, "head is 'transformer', expected one of plug_in, linear"),
        ({"ridge": -1}, "ridge is -1"),
        ({"ridge": "small"}, "ridge is 'small'"),
        ({"ridge": True}, "ridge is True"),
        ({"head": "mlp", "ridge": 1.0}, "ridge belongs to the plug-in"),
        ({"seed": -1}, "seed is -1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"seed": True}, "seed is True"),
    ],
)
def test_an_option_of_quad(options: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf'quad_films: --metadata .*"quad".*{problem}'):
        feature_probe("quad", metadata={"quad": options})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layer": []}, "at least one"),
        ({"layer": [1, 1]}, "distinct layers"),
        ({"layer": ["all", 1]}, "distinct layers"),
        ({"layer": [1, "first"]}, "layer is 'first'"),
        ({"one_token_words": "yes"}, "one_token_words is 'yes'"),
        ({"seeds": [True]}, "seeds is"),
        ({"prompt": []}, "asked for its prompt, found"),
    ],
)
def test_an_option_of_a_probe(options: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"probe_films.*{problem}"):
        probe(options)


def test_seeds_draw_samples_for_every_kind_alike(lm: Any) -> None:
    options = {"n_per_class": 8, "seeds": [3, 4, 5]}
    tasks = [feature_probe(kind, options, metadata=of_words()) for kind in ("probe", "probe_cmean")]
    results = evaluate(lm, *tasks)
    drawn = [[sample.tolist() for sample in task._samples] for task in tasks]
    assert drawn[0] == drawn[1]
    assert len({tuple(sample) for sample in drawn[0]}) == 3
    accuracies = [fit["acc"] for fit in told_of(results, "probe")["probes"]]
    assert told_of(results, "probe_cmean")["f_accuracy"] == pytest.approx(np.mean(accuracies))
    assert [s["doc_id"] for s in samples(results, "probe_cmean_films")] == list(range(16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"layer": "all"}, {"layer": 1}, {"pooling": "mean"}])
def test_other_kinds_have_no_layers(kind: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """One --metadata serves all tasks of a command, so a sweep over layers must not stop the others."""
    caplog.set_level("INFO")
    task = feature_probe(kind, options, metadata=of_words())
    assert f"{kind}_films: its features come from f(s)" in caplog.text
    assert (task.options.layer, task.options.pooling) == ("last", "last")


def test_a_sweep_over_layers_beside_other_kinds(lm: Any, world: World) -> None:
    tasks = [feature_probe(kind, {"layer": "all"}, metadata=of_words()) for kind in ("probe", "probe_cmean")]
    results = evaluate(lm, *tasks)
    assert len(told_of(results, "probe")["layers"]) == 3
    alone = evaluate(lm, feature_probe("probe", metadata=of_words()))
    assert told_of(results, "probe_cmean")["f_accuracy"] == alone["results"]["probe_films"]["acc,none"]


def test_a_bias_of_the_output_embedding_is_noted(world: World) -> None:
    with_bias = hf_model(biased())
    for lm, expected in ((with_bias, 1), (hf_model(), 0)):
        assert len(told_of(run(lm, "probe_cmean")[0], "probe_cmean")["feature_notes"]) == expected
        assert len(told_of(run(lm, "quad")[0], "quad")["quad"]["notes"]) == expected
    assert "no part of Φ" in told_of(run(with_bias, "quad")[0], "quad")["quad"]["notes"][0]


def test_a_head_without_an_embedding_stops_before_the_pass(world: World) -> None:
    model = tiny_model("llama")

    class Curved(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden).square()

    model.set_output_embeddings(Curved(32, 320))
    passes: list[int] = []
    model.model.register_forward_pre_hook(lambda *args: passes.append(1))
    with pytest.raises(TypeError, match="not affine"):
        run(hf_model(model), "quad", metadata={"quad": {"head": "linear"}})
    assert not passes


def test_heads_are_trained_on_a_bounded_number_of_tokens() -> None:
    texts = [TokenStates(np.zeros(length, dtype=np.int64), np.zeros((length, 2))) for length in (3, 4, 5, 6)]
    assert list(features._first_tokens(texts, 7)) == texts[:2]
    assert list(features._first_tokens(texts, 8)) == texts[:3]
    assert list(features._first_tokens(texts, 100)) == texts
