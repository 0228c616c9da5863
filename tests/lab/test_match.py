"""Loss-matched groups of checkpoints and of result files."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness_ext.lab.match import Candidate, Loss, from_folders, from_results, match


def model(run: str, step: int | None, loss: float, stderr: float = 0.0) -> Candidate:
    return Candidate(
        f"{run}-{step}", run, step, Loss(loss, stderr), f"out/{run}/{step}", {"algorithm": run.split("-")[0]}
    )


def names(matching: Any) -> list[list[str]]:
    return [[one.name for one in group.models] for group in matching.groups]


def trajectories(runs: int, seed: int = 0) -> list[Candidate]:
    """Runs whose loss falls as 1 / step at speeds of their own."""
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(20, 60, size=runs)
    return [
        model(f"run-{run}", step, float(speeds[run] / step), 2e-4)
        for run in range(runs)
        for step in range(200, 3001, 200)
    ]


# ---------------------------------------------------------------------------------------------------------- matching


def test_one_checkpoint_of_a_run_the_one_nearest_the_middle() -> None:
    found = match(
        [model("a", 10, 1.000), model("b", 10, 1.004), model("c", 10, 1.0035), model("b", 12, 1.0025)],
        tolerance=0.005,
        z=0,
    )
    # With b-10 the middle is 1.002 and b-12 is nearer to it; then c is the largest.
    assert names(found) == [["a-10", "b-12", "c-10"]]
    assert [one.name for one in found.ungrouped] == ["b-10"]
    assert found.groups[0].gap == pytest.approx(0.0035)


def test_longer_training_is_a_contrast_if_steps_differ_by_the_factor() -> None:
    models = [model("a", 1000, 1.0), model("a", 1900, 1.001), model("a", 2000, 1.002), model("b", 500, 1.001)]
    assert names(match(models, tolerance=0.005, z=0)) == [["a-1000", "b-500", "a-2000"]]
    assert names(match(models, tolerance=0.005, z=0, step_factor=1.9)) != []
    with pytest.raises(ValueError, match="4 models of 2 runs make no group of 3, whatever the tolerance"):
        match(models, tolerance=0.005, z=0, step_factor=math.inf)
    assert names(match(models[:3], tolerance=0.005, z=0, min_size=2)) == [["a-1000", "a-2000"]]


def test_checkpoints_of_unknown_step_come_alone() -> None:
    models = [
        model("a", None, 1.0),
        Candidate("a2", "a", None, Loss(1.001, 0), ""),
        model("b", 1, 1.0),
        model("c", 1, 1.001),
    ]
    found = match(models, tolerance=0.005, z=0)
    assert [len({one.run for one in group.models}) for group in found.groups] == [3]
    assert len(found.ungrouped) == 1


@pytest.mark.parametrize("seed", range(3))
def test_every_group_keeps_the_rule(seed: int) -> None:
    found = match(trajectories(6, seed), tolerance=0.005)
    assert len(found.groups) >= 3
    seen: set[str] = set()
    last = -1.0
    for group in found.groups:
        losses = [one.loss.value for one in group.models]
        assert losses == sorted(losses)
        assert losses[0] > last
        last = losses[-1]
        assert group.gap == losses[-1] - losses[0]
        assert group.bound == pytest.approx(group.gap + 1.645 * group.stderr)
        assert group.bound <= 0.005
        assert len(group.models) >= 3
        for one, other in itertools.combinations(group.models, 2):
            steps = sorted([one.step or 0, other.step or 0])
            assert one.run != other.run or steps[1] >= 2 * steps[0]
            assert one.name not in seen
        seen |= {one.name for one in group.models}
    assert len(seen) + len(found.ungrouped) == 6 * 15


def slow_best(models: list[Candidate], tolerance: float, min_size: int, num_groups: int | None) -> tuple[float, ...]:
    """Different runs, models, -groups and -gaps of the best groups of consecutive intervals of loss, by trying all cuts."""
    ordered = sorted(models, key=lambda one: one.loss.value)
    best: tuple[float, ...] = (-1,)
    for cuts in range(2 ** (len(ordered) - 1)):
        pieces: list[list[Candidate]] = [[]]
        for place, one in enumerate(ordered):
            pieces[-1].append(one)
            if cuts >> place & 1:
                pieces.append([])
        good = [p for p in pieces if len(p) >= min_size and p[-1].loss.value - p[0].loss.value <= tolerance]
        for chosen in [good] if num_groups is None else itertools.combinations(good, num_groups):
            score = (
                sum(len(piece) for piece in chosen),
                sum(len(piece) for piece in chosen),
                -len(chosen),
                -sum(piece[-1].loss.value - piece[0].loss.value for piece in chosen),
            )
            best = max(best, score)
    return best


@pytest.mark.parametrize("num_groups", [None, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_runs_of_one_checkpoint_against_all_cuts(seed: int, num_groups: int | None) -> None:
    rng = np.random.default_rng(seed)
    models = [model(f"r{i}", 1, float(loss) / 64) for i, loss in enumerate(rng.integers(0, 24, size=10))]
    found = match(models, tolerance=4 / 64, z=0, min_size=2, num_groups=num_groups)
    score = (
        sum(group.num_runs for group in found.groups),
        sum(len(group.models) for group in found.groups),
        -len(found.groups),
        -sum(group.gap for group in found.groups),
    )
    assert score == slow_best(models, 4 / 64, 2, num_groups)


def test_as_many_groups_as_asked_for_with_the_most_runs() -> None:
    models = [model(f"r{i}", 1, 1.0 + i * 1e-4) for i in range(3)]
    models += [model(f"r{i}", 2, 2.0 + i * 1e-4) for i in range(5)] + [
        model(f"r{i}", 3, 3.0 + i * 1e-4) for i in range(4)
    ]
    assert [group.num_runs for group in match(models, tolerance=0.01, z=0, num_groups=2).groups] == [5, 4]
    # Three of the largest in a group of its own, and so on: five can be split only where three are left.
    with pytest.raises(ValueError, match="asked for 4 groups, found 3"):
        match(models, tolerance=0.01, z=0, num_groups=4)


def test_targets() -> None:
    models = [
        model(f"r{i}", step, level + i * 1e-4) for step, level in ((1, 1.0), (2, 2.0), (3, 3.0)) for i in range(4)
    ]
    found = match(models, tolerance=0.01, z=0, targets=[2.9, 1.001])
    assert [round(group.middle) for group in found.groups] == [1, 3]
    assert [group.num_runs for group in found.groups] == [4, 4]
    assert found.to_dict()["options"]["targets"] == [2.9, 1.001]


def test_a_target_that_no_group_lies_at_is_named_with_the_nearest_losses() -> None:
    models = [model(f"r{i}", step, level + i * 1e-4) for step, level in ((1, 1.0), (2, 2.0)) for i in range(4)]
    found = match(models, tolerance=0.01, z=0, targets=[99, 1.004])
    assert [missed.target for missed in found.missed] == [99]
    assert found.table_lines()[-1] == (
        "no group at the target 99: the nearest, B, is at 2.00015; the nearest losses are 2.00030 (r3-2), 2.00020 (r2-2), "
        "2.00010 (r1-2)"
    )
    # Half a tolerance from the middle, 1.00015, is at the target.
    assert match(models, tolerance=0.01, z=0, targets=[1.0051]).missed == ()
    assert [missed.target for missed in match(models, tolerance=0.01, z=0, targets=[1.0052]).missed] == [1.0052]


def test_a_target_that_no_group_is_left_for_is_named() -> None:
    models = [model(f"r{i}", 1, 1.0 + i * 1e-4) for i in range(4)]
    with pytest.raises(ValueError, match=r"no group is left for the target 2: .*one of those for 1\. ") as caught:
        match(models, tolerance=0.01, z=0, targets=[1.0, 2.0])
    assert "nearest to it are 1.00030 (r3-1), 1.00020 (r2-1), 1.00010 (r1-1)" in str(caught.value)


def test_losses_with_wide_errors_say_so_and_which_tolerance_would_do() -> None:
    rng = np.random.default_rng(5)
    for size in (3, 4, 8):
        models = [model(f"r{i}", 1, float(rng.normal(3, 0.1)), float(rng.uniform(0.007, 0.009))) for i in range(size)]
        with pytest.raises(ValueError, match=r"smallest tolerance with a group is 0\.\d+: --tolerance") as caught:
            match(models, tolerance=0.005)
        errors = [one.loss.stderr for one in models]
        assert f"The losses are known to ± {min(errors):.2g} … {max(errors):.2g} only." in str(caught.value)
        enough = float(str(caught.value).partition("--tolerance ")[2].partition(" ")[0].rstrip("."))
        assert match(models, tolerance=enough).groups
        with pytest.raises(ValueError, match="no 3 models"):
            match(models, tolerance=0.98 * enough)


def test_the_order_of_the_input_does_not_matter() -> None:
    models = trajectories(4)
    assert match(models, tolerance=0.01) == match(models[::-1], tolerance=0.01)


def test_a_tolerance_that_matches_nothing_says_what_would() -> None:
    models = [
        model("a", 1, 1.0, 1e-4),
        model("b", 1, 1.02, 1e-4),
        model("c", 1, 1.05, 1e-4),
        model("c", 2, 1.0501, 1e-4),
    ]
    with pytest.raises(ValueError, match=r"nearest pairs: c-1 and c-2: 0\.0001 ± 0\.00014; a-1 and b-1") as caught:
        match(models, tolerance=0.01)
    assert "--z 0 takes losses as exact" in str(caught.value)
    # Their errors are not what keeps these apart.
    assert "are known to" not in str(caught.value)
    enough = float(str(caught.value).rpartition("--tolerance ")[2].partition(" ")[0].rstrip("."))
    assert match(models, tolerance=enough).groups
    with pytest.raises(ValueError, match="no 3 models"):
        match(models, tolerance=0.99 * enough)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tolerance": -1}, "such as 0.005"),
        ({"min_size": 1}, "at least 2"),
        ({"step_factor": 1}, "more than 1"),
        ({"num_groups": 1, "targets": [1.0]}, "exclude each other"),
        ({"num_groups": 0}, "at least 1"),
        ({"targets": []}, "such as 0.02"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        match(trajectories(2), **({"tolerance": 0.1} | options))


def test_bad_models() -> None:
    with pytest.raises(ValueError, match="found none"):
        match([], tolerance=0.1)
    with pytest.raises(ValueError, match="two models are called a-1"):
        match([model("a", 1, 1.0), model("a", 1, 1.1)], tolerance=0.1)


@pytest.mark.parametrize(("loss", "stderr"), [(math.nan, 0.1), (math.inf, 0.1), (1.0, math.nan), (1.0, -0.1)])
def test_losses_that_are_no_numbers(loss: float, stderr: float) -> None:
    with pytest.raises(ValueError, match="b-1 has the loss"):
        match([model("a", 1, 1.0), model("b", 1, loss, stderr)], tolerance=0.1)


def test_table_and_json() -> None:
    found = match(
        [model("adamw-w64", 600, 1.0), model("sgd-w64", 900, 1.001), model("sam-w8", 10, 1.002), model("x", 1, 5)],
        tolerance=0.005,
    )
    lines = found.table_lines()
    assert lines[0].split() == ["group", "model", "algorithm", "parameters", "step", "excess", "loss", "±"]
    assert lines[2].split() == ["A", "sgd-w64-900", "sgd", "-", "900", "1.00100", "0.00000"]
    assert lines[-2] == "A: 3 models of 3 runs, gap 0.00200 ± 0.00000 nats per token"
    assert lines[-1] == "1 model in no group"
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["groups"][0]["name"] == "A"
    assert content["groups"][0]["models"][0]["loss"] == {"value": 1.0, "stderr": 0.0}
    assert [one["name"] for one in content["ungrouped"]] == ["x-1"]


# ------------------------------------------------------------------------------------------------------- checkpoints


def write_checkpoint(
    folder: Path, run: str, step: int, excess: float, *, language: str = "f00", weights: bool = True
) -> None:
    folder = folder / "runs" / run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    record = {
        "schema_version": 2,
        "made_by": "harness-ext lab",
        "run": run,
        "seed": 0,
        "language": {"kind": "hmm", "seed": 0, "sha256": language, "entropy": {"value": 3.1, "stderr": 0.002}},
        "model": {"architecture": "gpt2", "width": 64, "depth": 2, "heads": 4, "context": 64, "num_parameters": 1000},
        "algorithm": {"name": "adamw", "learning_rate": 0.004},
        "objective": "cross_entropy",
        "step": step,
        "tokens_seen": 10,
        "validation_loss": {"value": 3.12, "stderr": 0.003, "tokens": 51000},
        "excess": {"value": excess, "stderr": 1e-4, "documents": 1000},
        "versions": {},
    }
    (folder / "lab.json").write_text(json.dumps(record), encoding="utf-8")


def test_checkpoints_are_matched_by_excess_loss(tmp_path: Path) -> None:
    for run in "abc":
        write_checkpoint(tmp_path, run, 5, 0.02)
    # Named twice, read once.
    found = match(from_folders([tmp_path, tmp_path / "runs" / "a"]), tolerance=0.005)
    assert names(found) == [["a-00000005", "b-00000005", "c-00000005"]]
    assert found.groups[0].models[0].loss == (0.02, 1e-4)
    assert found.groups[0].models[0].details["num_parameters"] == 1000


def test_checkpoints_of_two_languages(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "a", 5, 0.02)
    write_checkpoint(tmp_path, "b", 5, 0.02, language="bad")
    with pytest.raises(ValueError, match=r"one language, found f00… in .*step_00000005; bad… in"):
        from_folders([tmp_path])


def test_two_checkpoints_of_one_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", "a", 5, 0.02)
    write_checkpoint(tmp_path / "two", "a", 5, 0.02)
    with pytest.raises(ValueError, match="are both a-00000005"):
        from_folders([tmp_path])


def test_checkpoints_without_weights_or_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected checkpoints"):
        from_folders([tmp_path])
    write_checkpoint(tmp_path, "c", 5, 0.02, weights=False)
    with pytest.raises(FileNotFoundError, match="step_00000005"):
        from_folders([tmp_path])


# ------------------------------------------------------------------------------------------------------ result files


def write_results(
    folder: Path,
    name: str,
    loss: float,
    *,
    arguments: Any = None,
    task: str = "loss_wikitext",
    report: dict[str, Any] | None = None,
    stderr: Any = 0.001,
    effective: int = 100,
) -> Path:
    told = {"text_sha256": "abc", "block_tokens": 128, "num_windows": 100} if report is None else report
    content = {
        "results": {task: {"alias": task, "loss,none": loss, "loss_stderr,none": stderr, "bits_per_byte,none": loss / 3,
                           "bits_per_byte_stderr,none": stderr}},
        "configs": {task: {"metadata": {"report": told}}},
        "n-samples": {task: {"original": 100, "effective": effective}},
        "config": {"model_args": {"pretrained": name} if arguments is None else arguments, "model_num_parameters": 7},
    }  # fmt: skip
    path = folder / f"results_{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_results_of_files_and_revisions(tmp_path: Path) -> None:
    write_results(tmp_path, "org/one", 3.0)
    write_results(tmp_path, "", 3.001, arguments="pretrained=org/pythia,revision=step1000,dtype=float32")
    write_results(tmp_path, "", 3.002, arguments={"pretrained": "org/pythia", "revision": "step2000"})
    write_results(tmp_path, "out/runs/sgd-w64/checkpoints/step_00000600", 3.003)
    found = from_results([tmp_path], metric="loss")
    assert [(one.name, one.run, one.step) for one in found] == [
        ("org/one", "org/one", None),
        ("org/pythia@step1000 (float32)", "org/pythia", 1000),
        ("org/pythia@step2000", "org/pythia", 2000),
        ("out/runs/sgd-w64/checkpoints/step_00000600", "out/runs/sgd-w64", 600),
    ]
    assert found[0].loss == (3.0, 0.001)
    assert from_results([tmp_path])[0].loss.value == 1.0
    assert len(match(found, tolerance=0.01).groups[0].models) == 4


def test_a_run_evaluated_twice_counts_once(tmp_path: Path) -> None:
    write_results(tmp_path, "a", 3.0)
    write_results(tmp_path, "a", 3.0)
    assert len(from_results([tmp_path])) == 1
    write_results(tmp_path, "a", 3.1)
    with pytest.raises(ValueError, match=r"results_2.json and .*results_0.json have different bits_per_byte for a"):
        from_results([tmp_path])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"report": {"text_sha256": "xyz", "block_tokens": 128}},
            "same text .*abc in .*results_0.*; xyz in .*results_1",
        ),
        ({"report": {"text_sha256": "abc", "block_tokens": 64}}, "same windows"),
        ({"report": {}}, "same text"),
        ({"effective": 50}, "same documents .*all documents .*50 documents"),
        ({"stderr": "N/A"}, r"results_1.json: expected bits_per_byte_stderr"),
        ({"task": "loss_lines"}, "Say which one: --task loss_lines"),
        ({"arguments": {"model": "x"}}, "no `pretrained`"),
    ],
)
def test_results_that_cannot_be_compared(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    write_results(tmp_path, "a", 3.0)
    write_results(tmp_path, "b", 3.0, **options)
    with pytest.raises(ValueError, match=text):
        from_results([tmp_path])


def test_results_of_plain_lm_eval_say_what_is_missing(tmp_path: Path) -> None:
    write_results(tmp_path, "a", 3.0, task="wikitext", report={})
    with pytest.raises(ValueError, match="loss tasks of harness_ext, such as loss_wikitext"):
        from_results([tmp_path])
    with pytest.raises(ValueError, match="expected a task with word_perplexity in 1 result files, found wikitext"):
        from_results([tmp_path], metric="word_perplexity")
    with pytest.raises(ValueError, match="bits_per_byte of loss_x, found none in 1 files"):
        from_results([tmp_path], task="loss_x")


def test_flatness_tasks_do_not_stand_in_for_loss_tasks(tmp_path: Path) -> None:
    write_results(tmp_path, "a", 3.0)
    write_results(tmp_path, "a", 4.0, task="flatness_wikitext")
    assert from_results([tmp_path], metric="loss")[0].loss.value == 3.0


def test_files_that_are_no_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected results_\*\.json"):
        from_results([tmp_path])
    for content, text in (("{", "something else"), ("[]", "without `results`")):
        path = tmp_path / "results_x.json"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=text):
            from_results([path])
