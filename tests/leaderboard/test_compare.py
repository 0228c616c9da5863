"""Pairs on shared documents, loss groups, aggregates and correlations of a board."""

from __future__ import annotations

import numpy as np
import pytest

from harness_ext.leaderboard import compare
from harness_ext.leaderboard.contracts import Column, Flatness, Loss, Metric, Score, Vector


def column(identifier: str, *, kind: str = "natural", chance: float | None = 0.5, chat: bool = False) -> Column:
    return Column(
        id=identifier,
        task=identifier,
        version="1",
        num_fewshot=0,
        chat=chat,
        kind=kind,  # type: ignore[arg-type]
        features="",
        dataset="",
        prompts=(),
        label=identifier,
        metric="acc",
        metrics=("acc",),
        higher_is_better={"acc": True},
        bounded=True,
        chance=chance,
        num_documents=100,
        settings={},
        lm_eval_versions=("0.4.13",),
    )


def score(model: str, of: str, value: float | None) -> Score:
    return Score(model, of, {"acc": Metric(value, 0.01)}, None, 100, None, ())


def loss(
    model: str, value: float | None, stderr: float | None = 0.0, *, text: str = "t/full", limit: str | None = None
) -> Loss:
    return Loss(model, "c", text, "text", Metric(value, stderr), Metric(None, None), None, limit, None)


def vector(model: str, values: list[float], documents: int = 0) -> Vector:
    distinct = sorted(set(values))
    return Vector(model, documents, tuple(distinct), "".join(str(distinct.index(value)) for value in values), None)


def keys(count: int, first: int = 0) -> tuple[str, ...]:
    return tuple(f"{number:012x}" for number in range(first, first + count))


def test_the_known_pair() -> None:
    first = [1.0] * 25 + [0.0] * 8 + [1.0] * 100 + [0.0] * 87
    second = [0.0] * 25 + [1.0] * 8 + [1.0] * 100 + [0.0] * 87
    found = compare.compare_vectors(vector("a", first), vector("b", second), [keys(220)], rng=np.random.default_rng(0))
    assert (found.num_documents, found.first_only, found.second_only) == (220, 25, 8)
    assert found.p_value == pytest.approx(0.00455, abs=5e-6)
    assert found.difference.value == pytest.approx(-17 / 220)
    assert found.difference.high is not None
    assert found.difference.high < 0
    assert not found.is_partial


def test_documents_are_paired_by_key_and_not_by_place() -> None:
    rng = np.random.default_rng(0)
    found = compare.compare_vectors(
        Vector("a", 0, (0.0, 1.0), "110", None),
        Vector("b", 1, (0.0, 1.0), "011", None),
        [("x", "y", "z"), ("z", "y", "x")],
        rng=rng,
    )
    assert (found.first_only, found.second_only) == (0, 0)


def test_other_documents_are_refused() -> None:
    sets = [keys(10), keys(10, first=1), keys(4), keys(4, first=50)]
    a, moved = vector("a", [1.0] * 10), vector("b", [1.0] * 10, 1)
    part, elsewhere = vector("c", [1.0] * 4, 2), vector("d", [1.0] * 4, 3)
    rng = np.random.default_rng(0)
    for other in (moved, elsewhere):
        with pytest.raises(ValueError, match="the documents differ"):
            compare.compare_vectors(a, other, sets, rng=rng)
    found = compare.compare_vectors(a, part, sets, rng=rng)
    assert (found.num_documents, found.is_partial) == (4, True)


def test_documents_that_count_in_part_have_no_mcnemar() -> None:
    found = compare.compare_vectors(
        vector("a", [0.0, 0.5, 1.0]), vector("b", [1.0, 1.0, 1.0]), [keys(3)], rng=np.random.default_rng(0)
    )
    assert (found.p_value, found.first_only) == (None, None)
    assert found.difference.value == pytest.approx(0.5)


def test_disagreements_are_the_documents_that_split_models() -> None:
    vectors = [vector("a", [1.0, 1.0, 0.0, 1.0]), vector("b", [1.0, 0.0, 0.0, 1.0]), vector("c", [1.0, 0.0, 0.0, 0.0])]
    assert compare.disagreements(vectors, [keys(4)], 10) == [keys(4)[1], keys(4)[3]]
    assert compare.disagreements(vectors[:1], [keys(4)], 10) == []
    assert len(compare.disagreements(vectors, [keys(4)], 1)) == 1


# ------------------------------------------------------------------------------------------------------------- groups


def test_groups_are_of_one_text_and_of_full_runs() -> None:
    losses = [
        loss("a", 1.000),
        loss("b", 1.004),
        loss("c", 1.200),
        loss("a", 1.0, text="u/full"),
        loss("c", 1.0, text="u/full"),
        loss("d", 1.0, limit="2 of 10"),
        loss("e", None),
    ]
    groups = compare.groups_of_loss(losses)
    assert [(group.text, group.models) for group in groups] == [("t/full", ("a", "b")), ("u/full", ("a", "c"))]
    assert (groups[0].low, groups[0].high) == (1.0, 1.004)


def test_losses_that_are_not_known_to_the_tolerance_are_in_no_group() -> None:
    assert compare.groups_of_loss([loss("a", 1.0, 0.1), loss("b", 1.0, 0.1)]) == ()


# --------------------------------------------------------------------------------------------------------- aggregates


def test_means_are_of_complete_rows_only() -> None:
    columns = [column("c1"), column("c2", chance=0.25), column("p", kind="probe")]
    scores = [
        score("a", "c1", 0.8),
        score("a", "c2", 0.7),
        score("b", "c1", 0.9),
        score("c", "c1", 0.6),
        score("c", "c2", 0.4),
    ]
    found = {(entry.model, entry.kind): entry for entry in compare.aggregates(columns, scores)}
    a, b, c = (found[model, "natural"] for model in "abc")
    assert (b.present, b.total, b.mean, b.normalised, b.win_rate, b.borda) == (1, 2, None, None, None, None)
    assert a.mean == pytest.approx(0.75)
    assert a.normalised == pytest.approx((0.6 + 0.6) / 2)
    assert (a.win_rate, c.win_rate, a.borda, c.borda) == (1.0, 0.0, 2.0, 0.0)
    assert not any(kind == "probe" for _, kind in found)


def test_a_blank_is_a_missing_task() -> None:
    (entry,) = compare.aggregates([column("c1"), column("c2")], [score("a", "c1", 0.8), score("a", "c2", None)])
    assert (entry.present, entry.total) == (1, 1)
    both = compare.aggregates(
        [column("c1"), column("c2")],
        [score("a", "c1", 0.8), score("a", "c2", None), score("b", "c1", 0.5), score("b", "c2", 0.5)],
    )
    assert [(entry.model, entry.present, entry.mean) for entry in both] == [("a", 1, None), ("b", 2, 0.5)]


def test_chat_columns_are_not_averaged_with_others() -> None:
    found = compare.aggregates([column("c1"), column("c2", chat=True)], [score("a", "c1", 0.8), score("b", "c2", 0.7)])
    assert {entry.kind for entry in found} == {"natural", "natural, chat"}


def test_an_unknown_chance_leaves_the_normalised_score_blank() -> None:
    (entry,) = compare.aggregates([column("c1", chance=None)], [score("a", "c1", 0.8)])
    assert (entry.mean, entry.normalised, entry.win_rate) == (0.8, None, None)


# ------------------------------------------------------------------------------------------------------- correlations


def test_flatness_that_predicts_where_loss_does_not() -> None:
    rng = np.random.default_rng(0)
    models = [f"m{number:02d}" for number in range(20)]
    traces = rng.permutation(20).astype(float)
    losses = [loss(model, float(value), 0.0) for model, value in zip(models, rng.random(20) * 1e-3 + 1, strict=True)]
    flatness = [
        Flatness(model, "f", {"fisher_trace": Metric(trace, 0.1)}, (), None)
        for model, trace in zip(models, traces, strict=True)
    ]
    scores = [score(model, "c1", 0.9 - trace / 100) for model, trace in zip(models, traces, strict=True)]
    groups = compare.groups_of_loss(losses)
    (found,) = compare.correlations([column("c1"), column("f", kind="flatness")], scores, losses, flatness, groups)
    assert found.models == tuple(models)
    assert (found.flatness_measure, found.downstream, found.text) == ("fisher_trace", "c1", "t/full")
    assert found.flatness_downstream.value == pytest.approx(-1)
    assert found.flatness_downstream.p_value is not None
    assert found.flatness_downstream.p_value < 0.01
    assert found.flatness_given_loss.value == pytest.approx(-1)
    assert found.flatness_within_groups.value == pytest.approx(-1)
    assert found.loss_downstream.value is not None
    assert abs(found.loss_downstream.value) < 0.9
    again = compare.correlations(
        [column("c1"), column("f", kind="flatness")], scores[::-1], losses[::-1], flatness[::-1], groups
    )
    assert again == (found,)


def test_too_few_models_have_no_correlation_and_a_constant_has_a_reason() -> None:
    def correlated(count: int) -> tuple[compare.Correlation, ...]:
        models = [f"m{number}" for number in range(count)]
        return compare.correlations(
            [column("c1")],
            [score(model, "c1", 0.5) for model in models],
            [loss(model, 1.0 + place) for place, model in enumerate(models)],
            [
                Flatness(model, "f", {"fisher_trace": Metric(float(place), None)}, (), None)
                for place, model in enumerate(models)
            ],
            (),
        )

    assert correlated(3) == ()
    (found,) = correlated(4)
    assert found.flatness_downstream.value is None
    assert found.flatness_downstream.reason
    assert found.flatness_within_groups.reason
