"""The rules by which records become rows, columns and scores."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from result_files import lab_json, loss_config, result_file, sample, task_config

from harness_ext.leaderboard.contracts import Metric
from harness_ext.leaderboard.read import result_record
from harness_ext.leaderboard.rows import Rows, Source, family_of, make_rows


def rows(*files: Any, names: list[str] | None = None) -> Rows:
    """Rows of result files, each with a name and a digest of its own."""
    return make_rows(sources(*files, names=names))


def sources(*files: Any, names: list[str] | None = None, lab: Any = None) -> list[Source]:
    return [
        Source(names[place] if names else f"f{place}.json", result_record(value, digest=f"{place:064d}", lab=lab))
        for place, value in enumerate(files)
    ]


def test_one_row_for_each_of_model_revision_dtype_shots_template_and_a_repeat_collapses() -> None:
    """Every combination once, and one of them twice."""
    files = [
        result_file(
            shots=shots,
            config={"model_revision": revision, "model_dtype": dtype},
            chat_template=template,
            chat_template_sha=template and "e" * 64,
            date=1.7e9 + place,
        )
        for place, (revision, dtype, shots, template) in enumerate(
            itertools.product(("main", "v2"), ("torch.float32", "torch.bfloat16"), (0, 5), (None, "{{ chat }}"))
        )
    ]
    again = result_file(shots=5, acc=0.75, config={"model_revision": "v2"}, date=1.8e9)
    made = rows(*files, again)
    assert len(made.models) == 2 * 2 * 2  # revision, dtype, template
    assert len(made.columns) == 2 * 2  # shots, chat
    assert len(made.scores) == 16
    assert [len(score.runs) for score in made.scores].count(2) == 1
    for column in made.columns:
        in_column = {score.model for score in made.scores if score.column == column.id}
        chats = {model.chat_template is not None for model in made.models if model.id in in_column}
        assert chats == {column.chat}  # a ranking has one protocol


def test_the_same_run_twice_keeps_both_values_and_shows_the_later() -> None:
    made = rows(result_file(acc=0.75, date=2e9), result_file(acc=0.75, date=1e9))
    (score,) = made.scores
    assert [run.date for run in score.runs] == [2e9, 1e9]
    assert not score.conflict


def test_other_numbers_of_the_same_run_are_both_kept_and_flagged() -> None:
    made = rows(result_file(acc=0.75, date=1e9), result_file(acc=0.70, date=2e9))
    (score,) = made.scores
    assert score.conflict
    assert score.metrics["acc"].value == 0.70
    assert [run.metrics["acc"].value for run in score.runs] == [0.70, 0.75]


def test_a_metric_that_only_one_run_has_is_no_conflict() -> None:
    both = {"reviews": {"acc,none": 0.75, "acc_norm,none": 0.8}}
    assert not rows(result_file({"reviews": {"acc,none": 0.75}}), result_file(both)).scores[0].conflict


def test_copies_of_a_file_are_one_run() -> None:
    record = result_record(result_file(), digest="0" * 64)
    (score,) = make_rows([Source("b.json", record), Source("a.json", record)]).scores
    (run,) = score.runs
    assert (run.source, run.copies) == ("a.json", ("b.json",))


def test_a_copy_with_samples_stands_for_one_without() -> None:
    bare = result_record(result_file(documents=2), digest="0" * 64)
    with_samples = result_record(
        result_file(documents=2) | {"samples": {"reviews": [sample(0, 1.0), sample(1, 0.0)]}}, digest="0" * 64
    )
    made = make_rows([Source("a.json", bare), Source("b.json", with_samples)])
    assert made.vectors
    assert made.scores[0].runs[0].source == "b.json"


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_files_is_no_matter(seed: int) -> None:
    files = [
        result_file(
            ["reviews", f"task{place % 3}"], model=f"org/m{place % 4}", acc=0.5 + place / 50, date=1.7e9 + place // 6
        )
        for place in range(12)
    ]
    ordered = sources(*files)
    shuffled = random.Random(seed).sample(ordered, len(ordered))
    assert make_rows(shuffled) == make_rows(ordered)


def test_limited_runs_are_apart_and_marked() -> None:
    made = rows(result_file(), result_file(effective=20, acc=0.9), result_file(model="org/b", effective=20))
    (score,) = made.scores
    assert score.limit is None
    assert [limited.limit for limited in made.limited] == ["20 of 100", "20 of 100"]
    assert not score.conflict
    (column,) = made.columns
    assert column.num_documents == 100


def test_models_whose_branch_moved_are_two_rows() -> None:
    def at(sha: str) -> dict[str, Any]:
        return result_file(config={"model_sha": sha})

    assert len(rows(at("aa"), at("bb"), at("")).models) == 3
    (model,) = rows(at("aa"), at("")).models
    assert model.sha == "aa"


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"model_args": {"pretrained": "org/tiny-1M", "batch_size": 8, "device_map": "auto"}}, 1),
        ({"model": "huggingface"}, 1),
        ({"model": "vllm"}, 2),
        ({"model_args": {"pretrained": "org/tiny-1M", "peft": "org/adapter"}}, 2),
        ({"model_args": {"pretrained": "org/tiny-1M", "load_in_4bit": True}}, 2),
    ],
)
def test_arguments_that_change_results_make_rows(config: dict[str, Any], count: int) -> None:
    assert len(rows(result_file(), result_file(config=config)).models) == count


def test_system_instructions_make_rows() -> None:
    assert len(rows(result_file(), result_file(system_instruction="Be brief.")).models) == 2


def test_columns_of_one_task_have_headings_that_tell_them_apart() -> None:
    made = rows(
        result_file(["other"]),
        result_file(),
        result_file(shots=5),
        result_file(version=2.0),
        result_file(configs={"reviews": task_config(doc_to_text="x" * 50)}),
        result_file(configs={"reviews": task_config(doc_to_text="y" * 50)}),
    )
    labels = [column.label for column in made.columns]
    assert len(set(labels)) == len(labels) == 6
    assert "other" in labels
    assert "reviews (v1, 5-shot)" in labels
    assert "reviews (v2, 0-shot)" in labels
    assert sum(label.startswith("reviews (v1, 0-shot, ") for label in labels) == 3


def test_a_sample_says_so_also_where_it_is_the_only_column_of_its_task() -> None:
    def news(**report: Any) -> dict[str, Any]:
        config = task_config(metadata={"version": 1.0, "report": {"features": "f"} | report})
        return result_file(["probe_news"], configs={"probe_news": config})

    sample = news(sample={"test": "100 of 7,600"})
    assert [column.label for column in rows(sample).columns] == ["probe_news (sample)"]
    assert {column.label for column in rows(sample, news()).columns} == {"probe_news (sample)", "probe_news"}


def test_the_metric_of_a_column_and_its_chance() -> None:
    made = rows(
        result_file({"reviews": {"f1,none": 0.4, "acc_norm,none": 0.6, "acc,none": 0.5, "acc_stderr,none": 0.01}})
    )
    (column,) = made.columns
    assert column.metrics == ("acc", "acc_norm", "f1")
    assert column.bounded
    assert column.chance == 0.5
    (other,) = rows(result_file({"text": {"word_perplexity,none": 20.0}})).columns
    assert (other.metric, other.bounded, other.chance) == ("word_perplexity", False, 0.5)
    assert not rows(result_file({"text": {"ppl": 20.0}}, higher_is_better={})).columns[0].higher_is_better["ppl"]


@pytest.mark.parametrize(
    ("metric", "value", "bounded", "is_share"),
    [
        ("acc", 0.5, True, True),
        ("acc_norm", 0.5, True, True),
        ("exact_match", 0.5, True, True),
        ("exact_match,strict-match", 0.5, True, True),
        ("em", 0.5, True, True),
        ("pass@10", 0.5, True, True),
        ("f1", 0.5, True, False),
        ("macro_f1", 0.5, True, False),
        ("f1", 70.0, False, False),
        ("brier_score", 1.3, False, False),
        ("brier", 0.3, False, False),
        ("embedding_distance", 0.5, False, False),
        ("ece_of_some_kind", 0.5, False, False),
        ("accumulated_cost", 0.5, False, False),
    ],
)
def test_which_metrics_are_shares_and_which_lie_between_0_and_1(
    metric: str, value: float, bounded: bool, is_share: bool
) -> None:
    base, _, of_filter = metric.partition(",")
    names = {f"{base},{of_filter or 'none'}": value, f"{base}_stderr,{of_filter or 'none'}": "N/A"}
    made = rows(result_file({"reviews": names}))
    (column,), (score,) = made.columns, made.scores
    assert (column.metric, column.bounded, column.is_share) == (metric, bounded, is_share)
    assert (score.interval is not None) == is_share
    names[f"{base}_stderr,{of_filter or 'none'}"] = 0.4
    (score,) = rows(result_file({"reviews": names})).scores
    assert score.interval is not None
    low, high = score.interval
    assert low <= value <= high
    assert (high <= 1 and low >= 0) == bounded


def test_a_blank_stays_a_blank() -> None:
    (score,) = rows(result_file(acc=float("nan"), stderr="N/A")).scores
    assert score.metrics["acc"] == Metric(None, None)
    assert score.interval is None


def test_a_task_with_another_number_of_documents_is_noted() -> None:
    made = rows(*(result_file(model=f"org/m{place}", documents=100 if place else 90) for place in range(3)))
    notes = {score.num_documents: score.notes for score in made.scores}
    assert notes == {90: ("evaluated on 90 documents, most others on 100",), 100: ()}


def test_two_versions_of_lm_eval_in_a_column_are_named() -> None:
    made = rows(result_file(model="org/a"), result_file(model="org/b", lm_eval_version="0.4.9"))
    assert made.columns[0].lm_eval_versions == ("0.4.13", "0.4.9")


def test_losses_and_flatness() -> None:
    loss = {"loss,none": 3.0, "loss_stderr,none": 0.01, "bits_per_byte,none": 1.1, "bits_per_byte_stderr,none": 0.004}
    report = loss_config(
        window_flatness={
            "blocks": 64,
            "by_parameter": {
                "wte.weight": {"size": 10, "fisher_trace": 1.0},
                "h.0.mlp.c_fc.weight": {"size": 4, "fisher_trace": 2.0},
                "h.0.mlp.c_fc.bias": {"size": 2, "fisher_trace": 0.5},
            },
        }
    )
    made = rows(
        result_file(
            {"loss_text": loss, "flatness_text": {**loss, "fisher_trace,none": 3.5, "fisher_trace_stderr,none": 0.1}},
            configs={"loss_text": loss_config(), "flatness_text": report},
        )
    )
    (found,) = made.losses
    assert (found.bits_per_byte, found.nats_per_token) == (Metric(1.1, 0.004), Metric(3.0, 0.01))
    assert found.axis == ("bits_per_byte", Metric(1.1, 0.004))
    (flat,) = made.flatness
    assert flat.measures == {"fisher_trace": Metric(3.5, 0.1)}
    assert {(part.layer, part.kind): (part.size, part.traces["fisher_trace"]) for part in flat.parts} == {
        (-1, "wte"): (10, 1.0),
        (0, "mlp.c_fc"): (6, 2.5),
    }


def test_models_of_the_lab_have_their_exact_excess_loss(tmp_path: Any) -> None:
    from result_files import write

    from harness_ext.leaderboard.read import lab_of

    lab = lab_of(write(tmp_path / "lab.json", lab_json()))
    made = make_rows(sources(result_file(model="/tmp/x"), lab=lab))
    (model,) = made.models
    assert (model.name, model.family) == ("adamw-w64-00000600", "adamw-w64")
    assert model.lab is not None
    assert model.lab.excess == Metric(0.02, 0.0003)
    (loss,) = made.losses
    assert loss.text == "excess/" + "cd" * 32
    assert loss.axis == ("nats_per_token", Metric(0.02, 0.0003))


def test_vectors_share_their_sets_of_documents() -> None:
    def with_samples(model: str, values: list[float], first: int = 0) -> dict[str, Any]:
        lines = [sample(first + place, value) for place, value in enumerate(values)]
        return result_file(model=model, documents=len(values)) | {"samples": {"reviews": lines}}

    made = rows(
        with_samples("org/a", [1.0, 0.0, 0.5]),
        with_samples("org/b", [0.0, 0.0, 1.0]),
        with_samples("org/c", [1.0] * 3, 7),
    )
    (column,) = made.columns
    a, b, c = made.vectors[column.id]
    assert a.documents == b.documents != c.documents
    assert a.values == (0.0, 0.5, 1.0)
    assert len(a.codes) == len(made.document_sets[column.id][a.documents]) == 3


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2"),
        ("EleutherAI/pythia-160m-deduped", "pythia"),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1"),
        ("gpt2-xl", "gpt2"),
        ("facebook/opt-1.3b", "opt"),
        ("mistralai/Mixtral-8x7B-v0.1", "Mixtral"),
        ("/work/models/mine/", "mine"),
        ("plain", "plain"),
        ("135M", "135M"),
        ("", ""),
    ],
)
def test_families(name: str, family: str) -> None:
    assert family_of(name) == family
