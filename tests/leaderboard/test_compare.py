"""Pairs on shared documents, loss groups, aggregates and correlations of a board."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness_ext.leaderboard import compare
from harness_ext.leaderboard.contracts import Column, Flatness, Lab, Loss, LossGroup, Metric, Model, Score, Vector


def column(
    identifier: str, *, kind: str = "natural", chance: float | None = 0.5, chat: bool = False, dataset: str = ""
) -> Column:
    return Column(
        id=identifier,
        task=identifier,
        version="1",
        num_fewshot=0,
        chat=chat,
        kind=kind,  # type: ignore[arg-type]
        features="",
        dataset=dataset,
        prompts=(),
        label=identifier,
        metric="acc",
        metrics=("acc",),
        higher_is_better={"acc": True},
        bounded=True,
        is_share=True,
        chance=chance,
        num_documents=100,
        settings={},
        lm_eval_versions=("0.4.13",),
    )


def score(model: str, of: str, value: float | None, stderr: float | None = 0.01) -> Score:
    return Score(model, of, {"acc": Metric(value, stderr)}, None, 100, None, ())


LAB = Lab(
    run="run",
    algorithm="adamw",
    algorithm_settings={},
    objective="cross_entropy",
    seed=0,
    step=1,
    tokens_seen=1,
    language="hmm",
    language_sha256="0" * 64,
    architecture={},
    excess=Metric(0.1, None),
    validation_loss=Metric(1.0, None),
)


def model(name: str, size: int | None = 1_000_000) -> Model:
    return Model(
        id=name,
        name=name,
        revision="main",
        sha=None,
        dtype=None,
        backend="hf",
        chat_template=None,
        system_instruction=None,
        model_args=(),
        family=name,
        num_parameters=size,
        lab=None,
    )


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


def test_a_loss_without_a_standard_error_is_not_taken_as_exact() -> None:
    losses = [loss("a", 1.0), loss("b", 1.0, None), loss("c", 1.001), loss("d", 1.0, None, text="u/full")]
    assert [group.models for group in compare.groups_of_loss(losses)] == [("a", "c")]


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


def test_errors_add_up_within_a_dataset_and_in_quadrature_across() -> None:
    columns = [
        column("c1", dataset="d1", chance=0.5),
        column("c2", dataset="d1", chance=0.75),
        column("c3", dataset="d2", chance=0.0),
    ]
    metrics = [Metric(0.8, 0.01), Metric(0.9, 0.02), Metric(0.5, 0.03)]
    value, stderr = compare.mean_normalised(columns, metrics)
    assert value == pytest.approx((0.6 + 0.6 + 0.5) / 3)
    assert stderr == pytest.approx(math.hypot(0.01 / 0.5 + 0.02 / 0.25, 0.03) / 3)
    assert compare.mean_normalised(columns, [*metrics[:2], Metric(0.5, None)]) == (value, None)
    # A bound: errors of the same documents, of whatever correlation, come to no more.
    rng = np.random.default_rng(0)
    right = rng.random((2000, 1)) < 0.6
    scores = np.where(rng.random((2000, 3)) < 0.8, right, rng.random((2000, 3)) < 0.6)
    same = [column(f"c{place}", dataset="d", chance=0.0) for place in range(3)]
    errors = scores.std(axis=0, ddof=1) / math.sqrt(2000)
    _, bound = compare.mean_normalised(same, [Metric(0.6, float(error)) for error in errors])
    true = scores.mean(axis=1).std(ddof=1) / math.sqrt(2000)
    assert bound is not None
    assert math.hypot(*errors) / 3 < true <= bound


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
    rows = list(map(model, models))
    (found,) = compare.correlations(
        rows, [column("c1"), column("f", kind="flatness")], scores, losses, flatness, groups
    )
    assert found.models == tuple(models)
    assert (found.flatness_measure, found.downstream, found.text) == ("fisher_trace", "c1", "t/full")
    assert found.flatness_downstream.value == pytest.approx(-1)
    assert found.flatness_downstream.p_value is not None
    assert found.flatness_downstream.p_value < 0.01
    assert found.flatness_given_loss.value == pytest.approx(-1)
    assert found.flatness_within_groups.value == pytest.approx(-1)
    assert found.loss_downstream.value is not None
    assert abs(found.loss_downstream.value) < 0.9
    assert (found.comparable, found.num_parameters) == (found.models, 1_000_000)
    again = compare.correlations(
        rows[::-1], [column("c1"), column("f", kind="flatness")], scores[::-1], losses[::-1], flatness[::-1], groups
    )
    assert again == (found,)


def test_too_few_models_have_no_correlation_and_a_constant_has_a_reason() -> None:
    def correlated(count: int) -> tuple[compare.Correlation, ...]:
        models = [f"m{number}" for number in range(count)]
        return compare.correlations(
            list(map(model, models)),
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


def correlated(
    sizes: list[int | None],
    values: list[float],
    *,
    stderr: float | None = 0.01,
    groups: tuple[LossGroup, ...] = (),
    runs: Sequence[int] | None = None,
) -> compare.Correlation:
    """Models m0, m1, … with traces that fall as scores rise; `runs` are their training runs in the lab."""
    rows = [model(f"m{place}", size) for place, size in enumerate(sizes)]
    if runs is not None:
        rows = [replace(row, lab=replace(LAB, run=f"run {run}")) for row, run in zip(rows, runs, strict=True)]
    (found,) = compare.correlations(
        rows,
        [column("c1")],
        [score(row.id, "c1", value, stderr) for row, value in zip(rows, values, strict=True)],
        [loss(row.id, 1.0 + place / 1e6) for place, row in enumerate(rows)],
        [
            Flatness(row.id, "f", {"fisher_trace": Metric(2.0 - value, None)}, (), None)
            for row, value in zip(rows, values, strict=True)
        ],
        groups,
    )
    return found


def of_flatness(found: compare.Correlation) -> list[Any]:
    return [found.flatness_downstream, found.flatness_given_loss, found.flatness_within_groups]


def test_flatness_compares_among_models_of_the_commonest_size() -> None:
    sizes: list[int | None] = [5, 7, 5, None, 5, 7, 5, 5]
    values = [0.5, 0.1, 0.6, 0.9, 0.7, 0.2, 0.65, 0.8]
    one = LossGroup("t/full", 0.01, tuple(f"m{place}" for place in range(8)), 1.0, 1.001)
    found = correlated(sizes, values, groups=(one,))
    assert (found.num_parameters, found.comparable) == (5, ("m0", "m2", "m4", "m6", "m7"))
    assert len(found.models) == 8
    assert [of.value for of in of_flatness(found)] == pytest.approx([-1, -1, -1])
    # The same numbers without the others, whose traces do not compare.
    few = [place for place, size in enumerate(sizes) if size == 5]
    ids = [f"m{place}" for place in few]
    alone = compare.correlations(
        [model(of, 5) for of in ids],
        [column("c1")],
        [score(of, "c1", values[place]) for of, place in zip(ids, few, strict=True)],
        [loss(of, 1.0 + place / 1e6) for of, place in zip(ids, few, strict=True)],
        [
            Flatness(of, "f", {"fisher_trace": Metric(2.0 - values[place], None)}, (), None)
            for of, place in zip(ids, few, strict=True)
        ],
        (one,),
    )
    assert [of.value for of in of_flatness(alone[0])] == [of.value for of in of_flatness(found)]


def test_checkpoints_of_one_run_are_no_independent_models() -> None:
    values = [0.5 + place / 100 for place in range(12)]
    sizes: list[int | None] = [5] * 12
    of_runs = correlated(sizes, values, runs=[place // 3 for place in range(12)])
    apart = correlated(sizes, values, runs=range(12))
    for coefficient in ("loss_downstream", "flatness_downstream"):
        # Of the 4! orders of four runs, each with its checkpoints in order, one is as strong.
        assert getattr(of_runs, coefficient).p_value == pytest.approx(1 / 24)
        assert getattr(apart, coefficient).p_value < 0.001


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [([None] * 5, "no model says how many parameters"), ([1, 2, 3, 3, 3], "too few models of one size (3)")],
)
def test_sizes_that_do_not_compare_are_a_reason(sizes: list[int | None], reason: str) -> None:
    found = correlated(sizes, [0.5, 0.6, 0.7, 0.8, 0.9])
    assert found.loss_downstream.value is not None
    for of in of_flatness(found):
        assert of.value is None
        assert reason in of.reason


def test_scores_within_groups_that_differ_by_no_more_than_their_errors_are_left_out() -> None:
    one = LossGroup("t/full", 0.01, tuple(f"m{place}" for place in range(6)), 1.0, 1.001)
    values = [0.50, 0.51, 0.52, 0.53, 0.54, 0.55]
    assert correlated([1] * 6, values, stderr=0.001, groups=(one,)).flatness_within_groups.value == pytest.approx(-1)
    noise = correlated([1] * 6, values, stderr=0.05, groups=(one,))
    assert noise.flatness_within_groups.value is None
    assert "no more than their errors" in (noise.flatness_within_groups.reason or "")
    assert noise.flatness_downstream.value == pytest.approx(-1)
    unknown = correlated([1] * 6, values, stderr=None, groups=(one,)).flatness_within_groups
    assert unknown.value is None
    assert "no standard error" in (unknown.reason or "")
