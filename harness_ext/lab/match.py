"""Chooses loss-matched groups among checkpoints: models whose losses are equal within a tolerance and differ in how they
were made.

The gap between the smallest and the largest loss of a group, and z standard errors of it, are within the tolerance, as in
`harness_ext.loss_groups`. Here the models of a group also have to differ: a run gives it one checkpoint, or several whose
steps differ by `step_factor`, which is the contrast of longer training at equal loss. A group is cut from the models between
two losses; of a run's checkpoints there it takes as many as it may, those nearest to the middle.

Of all ways to choose groups that do not overlap in loss, that with the most different runs, summed over groups; then with
the most models, fewest groups, and smallest sum of gaps. Found by dynamic programming over the sorted losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness_ext import loss_groups
from harness_ext.lab.checkpoints import Checkpoint, find_checkpoints
from harness_ext.lab.result_files import ResultFile, read_result_files
from harness_ext.wording import count

__all__ = [
    "SCHEMA_VERSION",
    "Candidate",
    "Group",
    "Matching",
    "MissedTarget",
    "from_checkpoints",
    "from_folders",
    "from_results",
    "match",
]

SCHEMA_VERSION = 1
"""Of `groups.json`."""


class Loss(NamedTuple):
    """A loss and its standard error."""

    value: float
    stderr: float


@dataclass(frozen=True)
class Candidate:
    """A model that may be matched.

    Attributes:
        name: Of the model, unique.
        run: Training run.
        step: Step of the run; None if it is not known.
        loss: What is matched.
        folder: Folder of the model, or its Hub id.
        details: What else is known, for tables and figures: algorithm, num_parameters, tokens_seen, …
    """

    name: str
    run: str
    step: int | None
    loss: Loss
    folder: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Models of equal loss, by ascending loss.

    Attributes:
        models: The models.
        gap: Largest loss less smallest.
        stderr: Of the gap.
        bound: gap + z · stderr.
    """

    models: tuple[Candidate, ...]
    gap: float
    stderr: float
    bound: float

    @property
    def middle(self) -> float:
        """Halfway between the smallest loss and the largest."""
        return (self.models[0].loss.value + self.models[-1].loss.value) / 2

    @property
    def num_runs(self) -> int:
        """Different training runs."""
        return len({model.run for model in self.models})


class MissedTarget(NamedTuple):
    """A loss that was asked for and that no group lies at.

    Attributes:
        target: The loss.
        group: The nearest group, more than half a tolerance away.
        nearest: Models of the nearest losses, the nearest first.
    """

    target: float
    group: Group
    nearest: tuple[Candidate, ...]


@dataclass(frozen=True)
class Matching:
    """Groups by ascending loss, and how they were found.

    Attributes:
        groups: The groups.
        ungrouped: Models in none, by ascending loss.
        quantity: What was matched, such as "excess loss".
        unit: Of the loss and the tolerance.
        options: Arguments of `match`.
        missed: Targets without a group at them.
    """

    groups: tuple[Group, ...]
    ungrouped: tuple[Candidate, ...]
    quantity: str
    unit: str
    options: Mapping[str, Any]
    missed: tuple[MissedTarget, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `groups.json`; `name` of a group is A for the smallest loss, and so on."""
        return {
            "schema_version": SCHEMA_VERSION,
            "made_by": "harness-ext lab match",
            "quantity": self.quantity,
            "unit": self.unit,
            "options": dict(self.options),
            "groups": [
                {
                    "name": _letter(number),
                    "gap": {"value": group.gap, "stderr": group.stderr, "bound": group.bound},
                    "num_runs": group.num_runs,
                    "models": [_model_to_dict(model) for model in group.models],
                }
                for number, group in enumerate(self.groups)
            ],
            "ungrouped": [_model_to_dict(model) for model in self.ungrouped],
            "missed_targets": [
                {
                    "target": missed.target,
                    "nearest_group": _letter(self.groups.index(missed.group)),
                    "nearest_models": [model.name for model in missed.nearest],
                }
                for missed in self.missed
            ],
        }

    def table_lines(self) -> list[str]:
        """The groups as lines of text, columns aligned."""
        headers = ("group", "model", "algorithm", "parameters", "step", self.quantity, "±")
        rows = []
        for number, group in enumerate(self.groups):
            for model in group.models:
                parameters = model.details.get("num_parameters")
                rows.append(
                    (
                        _letter(number),
                        model.name,
                        str(model.details.get("algorithm") or "-"),
                        f"{parameters:,}" if parameters else "-",
                        f"{model.step:,}" if model.step is not None else "-",
                        f"{model.loss.value:.5f}",
                        f"{model.loss.stderr:.5f}",
                    )
                )
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        is_text = (True, True, True, False, False, False, False)
        lines = [
            "  ".join(
                cell.ljust(width) if text else cell.rjust(width)
                for cell, width, text in zip(row, widths, is_text, strict=True)
            ).rstrip()
            for row in (headers, *rows)
        ]
        lines.append("")
        for number, group in enumerate(self.groups):
            lines.append(
                f"{_letter(number)}: {count(len(group.models), 'model')} of {count(group.num_runs, 'run')}, gap "
                f"{group.gap:.5f} ± {group.stderr:.5f} {self.unit}"
            )
        lines.append(f"{count(len(self.ungrouped), 'model')} in no group")
        for missed in self.missed:
            lines.append(
                f"no group at the target {missed.target:g}: the nearest, {_letter(self.groups.index(missed.group))}, is at "
                f"{missed.group.middle:.5f}; the nearest losses are {_losses_of(missed.nearest)}"
            )
        return lines


def _losses_of(models: Sequence[Candidate]) -> str:
    return ", ".join(f"{model.loss.value:.5f} ({model.name})" for model in models)


def _letter(number: int) -> str:
    """A … Z, AA, AB, …"""
    result = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        result = chr(ord("A") + digit) + result
    return result


def _model_to_dict(model: Candidate) -> dict[str, Any]:
    return {
        "name": model.name,
        "run": model.run,
        "step": model.step,
        "loss": {"value": model.loss.value, "stderr": model.loss.stderr},
        "folder": model.folder,
        "details": dict(model.details),
    }


# -------------------------------------------------------------------------------------------------------- candidates


def from_folders(folders: Sequence[Path]) -> list[Candidate]:
    """All checkpoints of the lab under some folders; see `from_checkpoints`.

    Raises:
        FileNotFoundError: If there are none, or one has no weights.
        ValueError: As `from_checkpoints` raises it.
    """
    found: dict[Path, Checkpoint] = {}
    for folder in folders:
        found.update((checkpoint.folder.resolve(), checkpoint) for checkpoint in find_checkpoints(folder))
    return from_checkpoints(list(found.values()))


def from_checkpoints(checkpoints: Sequence[Checkpoint]) -> list[Candidate]:
    """Checkpoints of the lab, to be matched by their exact excess loss.

    Raises:
        ValueError: If they are of different languages, or two have the same name.
    """
    languages: dict[str, Checkpoint] = {}
    names: dict[str, Checkpoint] = {}
    candidates = []
    for checkpoint in checkpoints:
        languages.setdefault(checkpoint.language_sha256, checkpoint)
        if len(languages) > 1:
            examples = "; ".join(f"{sha[:12]}… in {example.folder}" for sha, example in languages.items())
            raise ValueError(
                f"expected checkpoints of one language, found {examples}. Losses of different languages are not "
                "comparable: match each language's folder by itself."
            )
        other = names.setdefault(checkpoint.name, checkpoint)
        if other is not checkpoint:
            raise ValueError(
                f"{checkpoint.folder} and {other.folder} are both {checkpoint.name}, expected one checkpoint of a run "
                "and step. Leave one out, or rename the run."
            )
        candidates.append(
            Candidate(
                name=checkpoint.name,
                run=checkpoint.run,
                step=checkpoint.step,
                loss=Loss(float(checkpoint.excess.value), float(checkpoint.excess.stderr)),
                folder=str(checkpoint.folder),
                details={
                    "algorithm": checkpoint.algorithm,
                    "objective": checkpoint.objective,
                    "seed": checkpoint.seed,
                    "num_parameters": checkpoint.num_parameters,
                    "tokens_seen": checkpoint.tokens_seen,
                },
            )
        )
    return candidates


def from_results(paths: Sequence[Path], *, metric: str = "bits_per_byte", task: str | None = None) -> list[Candidate]:
    """Models with a loss in lm_eval result files, to be matched by that loss.

    Args:
        paths: Result files, or folders in which to look for them.
        metric: `bits_per_byte`, which models of different tokenizers have in common, or `loss`, nats per token.
        task: Task whose loss it is. None: the only one that has the metric; tasks named `loss_…` come before others, such as
            flatness tasks, whose loss is over a few windows only.

    Returns:
        One candidate a model. A model in several files counts once where they agree.

    Raises:
        ValueError: If a file is wrong, the metric has no error, the task is not clear, the models saw different texts, or files
            disagree on a model's loss.
        OSError: If a file cannot be read.
    """
    files = read_result_files(paths)
    task = task or _only_task(files, metric)
    used = [file for file in files if file.measured(task, metric) is not None]
    if not used:
        raise ValueError(f"expected result files with {metric} of {task}, found none in {len(files)} files.")
    for what, of_file in (
        ("text (report.text_sha256)", lambda file: file.report(task).get("text_sha256")),
        ("windows (report.block_tokens)", lambda file: file.report(task).get("block_tokens")),
    ):
        values = _first_with(used, of_file)
        if len(values) > 1:
            examples = "; ".join(f"{value} in {file.path}" for value, file in values.items())
            raise ValueError(
                f"expected {task} on the same {what} in all files, found {examples}. Losses are comparable on one "
                "text only: run the task again with the same corpus and block_tokens."
            )
        if None in values:
            raise ValueError(
                f"{values[None].path}: expected {what} of {task}, found none, so nothing says that models read the "
                "same text. Use the loss tasks of harness_ext, such as loss_wikitext."
            )
    limited = _first_with(used, lambda file: _share(file, task))
    if len(limited) > 1:
        examples = "; ".join(f"{value} in {file.path}" for value, file in limited.items())
        raise ValueError(f"expected {task} on the same documents in all files, found {examples}. Use the same --limit.")

    found: dict[str, tuple[Candidate, ResultFile]] = {}
    for file in used:
        measured = file.measured(task, metric)
        assert measured is not None
        if not math.isfinite(measured.stderr):
            raise ValueError(
                f"{file.path}: expected {metric}_stderr of {task}, found none. Evaluate more than one window."
            )
        candidate = Candidate(
            name=file.model,
            run=file.run,
            step=file.step,
            loss=Loss(measured.value, measured.stderr),
            folder=file.folder,
            details={"num_parameters": file.num_parameters} if file.num_parameters else {},
        )
        other, other_file = found.setdefault(candidate.name, (candidate, file))
        if not math.isclose(other.loss.value, candidate.loss.value, rel_tol=1e-6):
            raise ValueError(
                f"{file.path} and {other_file.path} have different {metric} for {candidate.name}: "
                f"{candidate.loss.value:.6g} and {other.loss.value:.6g}. Leave one out."
            )
    return [candidate for candidate, _ in found.values()]


def _first_with(files: Sequence[ResultFile], of_file: Callable[[ResultFile], Any]) -> dict[Any, ResultFile]:
    """The values that files have, with the first file of each."""
    result: dict[Any, ResultFile] = {}
    for file in files:
        result.setdefault(of_file(file), file)
    return result


def _only_task(files: Sequence[ResultFile], metric: str) -> str:
    tasks = sorted({task for file in files for task in file.tasks_with(metric)})
    if not tasks:
        known = sorted({task for file in files for task in file.results})
        raise ValueError(
            f"expected a task with {metric} in {len(files)} result files, found {', '.join(known) or 'no task'}. Run "
            "a loss task: lm_eval --tasks loss_wikitext … --output_path FOLDER."
        )
    own = [task for task in tasks if task.startswith("loss_")] or tasks
    if len(own) > 1:
        raise ValueError(f"several tasks have {metric}: {', '.join(own)}. Say which one: --task {own[0]}.")
    return own[0]


def _share(file: ResultFile, task: str) -> str:
    """Which of a task's documents were evaluated: with a limit, their number says it, for they come in one order."""
    number, windows = file.num_documents.get(task), file.report(task).get("num_windows")
    return "all documents" if number is None or windows is None or number == windows else f"{number} documents"


# ---------------------------------------------------------------------------------------------------------- matching


def match(
    candidates: Sequence[Candidate],
    *,
    tolerance: float,
    z: float = loss_groups.Z,
    min_size: int = 3,
    step_factor: float = 2.0,
    num_groups: int | None = None,
    targets: Sequence[float] | None = None,
    quantity: str = "excess loss",
    unit: str = "nats per token",
) -> Matching:
    """Choose loss-matched groups; see the module.

    Args:
        candidates: Models, in any order.
        tolerance: Largest gap of a group and z standard errors of it, in the unit of the losses.
        z: See `loss_groups`; 0 takes losses as exact.
        min_size: Models of a group, at least 2.
        step_factor: Two checkpoints of one run may be in a group if their steps differ by this factor or more; more than 1.
            `inf` lets no run in twice.
        num_groups: So many groups. None: as the module says.
        targets: Losses, one group at each: the one whose middle is nearest, with distances in whole tolerances, within half a
            tolerance being none; of equals that with the most different runs. Excludes `num_groups`.
        quantity: What the loss is called in the result.
        unit: Of the loss, for the result.

    Returns:
        The groups, at least one.

    Raises:
        ValueError: If no group, or fewer than asked for, can be made (the text says which tolerance would do), or an
            argument is out of range.
    """
    _check_options(candidates, tolerance, min_size, step_factor, num_groups, targets)
    ordered = sorted(candidates, key=_order)
    segments = list(_segments(ordered, tolerance, z, min_size, step_factor))
    if not segments:
        raise ValueError(_nothing_matches(ordered, tolerance, z, min_size, step_factor, unit))
    missed: tuple[MissedTarget, ...] = ()
    if targets is not None:
        chosen = _at_targets(segments, targets, tolerance)
        if len(chosen) < len(targets):
            without, others = targets[len(chosen)], ", ".join(f"{target:g}" for target in targets[: len(chosen)])
            raise ValueError(
                f"no group is left for the target {without:g}: with a tolerance of {tolerance:g} {unit} and {min_size} models "
                f"or more in each, every group overlaps one of those for {others}. "
                f"The losses nearest to it are {_losses_of(_nearest(ordered, without))}. Leave the target out, lower "
                "--tolerance, or save checkpoints more often."
            )
        missed = tuple(
            MissedTarget(target, segment.group, _nearest(ordered, target))
            for target, segment in zip(targets, chosen, strict=True)
            if abs(segment.group.middle - target) > tolerance / 2
        )
    else:
        chosen = _best(segments, len(ordered), num_groups)
        if len(chosen) < (num_groups or 1):
            most = len(_best(segments, len(ordered), None, most_groups=True))
            raise ValueError(
                f"asked for {num_groups} groups, found {most} that do not overlap, with a tolerance of {tolerance:g} {unit} "
                f"and {min_size} models or more in each. Ask for fewer, or save checkpoints more often."
            )
    groups = tuple(segment.group for segment in sorted(chosen, key=lambda segment: segment.first))
    used = {model.name for group in groups for model in group.models}
    return Matching(
        groups=groups,
        ungrouped=tuple(model for model in ordered if model.name not in used),
        quantity=quantity,
        unit=unit,
        options={
            "tolerance": tolerance,
            "z": z,
            "min_size": min_size,
            "step_factor": step_factor if math.isfinite(step_factor) else None,
            "num_groups": num_groups,
            "targets": None if targets is None else list(targets),
        },
        missed=missed,
    )


def _check_options(
    candidates: Sequence[Candidate],
    tolerance: float,
    min_size: int,
    step_factor: float,
    num_groups: int | None,
    targets: Sequence[float] | None,
) -> None:
    if not candidates:
        raise ValueError("expected models to match, found none.")
    names = [model.name for model in candidates]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two models are called {twice}, expected different names.")
    for model in candidates:
        if not (math.isfinite(model.loss.value) and math.isfinite(model.loss.stderr) and model.loss.stderr >= 0):
            raise ValueError(
                f"{model.name} has the loss {model.loss.value} ± {model.loss.stderr}, expected numbers. Leave it out, "
                "or measure it on two documents or more."
            )
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance}, expected a number of at least 0, such as 0.005.")
    if min_size < 2:
        raise ValueError(f"min_size is {min_size}, expected at least 2.")
    if not step_factor > 1:
        raise ValueError(f"step_factor is {step_factor}, expected more than 1, such as 2.")
    if num_groups is not None and targets is not None:
        raise ValueError("num_groups and targets exclude each other: there is one group at each target.")
    if num_groups is not None and num_groups < 1:
        raise ValueError(f"num_groups is {num_groups}, expected at least 1.")
    if targets is not None and (not targets or not all(map(math.isfinite, targets))):
        raise ValueError(f"targets are {list(targets)}, expected losses, such as 0.02.")


@dataclass(frozen=True)
class _Segment:
    """The group cut from models first … last in order of loss, both of them in it."""

    first: int
    last: int
    group: Group


def _segments(
    ordered: Sequence[Candidate], tolerance: float, z: float, min_size: int, step_factor: float
) -> Iterator[_Segment]:
    """Every group between two losses."""
    for first, low in enumerate(ordered):
        runs: dict[str, list[Candidate]] = {}
        for last in range(first, len(ordered)):
            high = ordered[last]
            gap = high.loss.value - low.loss.value
            if gap > tolerance:
                break
            if z * high.loss.stderr > tolerance:
                continue
            runs.setdefault(high.run, []).append(high)
            stderr = math.sqrt(low.loss.stderr**2 + high.loss.stderr**2)
            if last == first or gap + z * stderr > tolerance:
                continue
            middle = (low.loss.value + high.loss.value) / 2
            # Where an end is left out, the segment without it gives a group of as many; most segments are such, so look first.
            if low not in _differing(runs[low.run], middle, step_factor):
                continue
            if high not in _differing(runs[high.run], middle, step_factor):
                continue
            models = [model for of_run in runs.values() for model in _differing(of_run, middle, step_factor)]
            if len(models) >= min_size:
                models.sort(key=_order)
                yield _Segment(first, last, Group(tuple(models), gap, stderr, gap + z * stderr))


def _nearest(models: Sequence[Candidate], loss: float) -> tuple[Candidate, ...]:
    return tuple(sorted(models, key=lambda model: (abs(model.loss.value - loss), model.name))[:3])


def _order(model: Candidate) -> tuple[float, str]:
    return model.loss.value, model.name


def _differing(of_run: Sequence[Candidate], middle: float, step_factor: float) -> list[Candidate]:
    """As many checkpoints of one run as differ enough in steps, and of such choices those nearest to the middle."""
    if len(of_run) == 1:
        return list(of_run)
    by_step = sorted(of_run, key=lambda model: (model.step is not None, model.step or 0, model.name))
    # best[i]: checkpoints, -distance from the middle, and which, the last of them by_step[i].
    best: list[tuple[int, float, tuple[int, ...]]] = []
    for place, model in enumerate(by_step):
        before: tuple[int, float, tuple[int, ...]] = (0, 0.0, ())
        for earlier in range(place):
            if _steps_differ(by_step[earlier], model, step_factor):
                before = max(before, best[earlier])
        number, distance, places = before
        best.append((number + 1, distance - abs(model.loss.value - middle), (*places, place)))
    return [by_step[place] for place in max(best)[2]]


def _steps_differ(earlier: Candidate, later: Candidate, step_factor: float) -> bool:
    return bool(earlier.step and later.step and later.step >= step_factor * earlier.step)


Score = tuple[int, int, int, float]


def _score(segment: _Segment) -> Score:
    return segment.group.num_runs, len(segment.group.models), -1, -segment.group.gap


def _best(
    segments: Sequence[_Segment], num_models: int, num_groups: int | None, *, most_groups: bool = False
) -> list[_Segment]:
    """The best choice of segments that do not overlap: of `num_groups`, or of any number; empty if there is none.

    With `most_groups`, the most segments.
    """
    ending: dict[int, list[_Segment]] = {}
    for segment in segments:
        ending.setdefault(segment.last, []).append(segment)
    levels = 1 if num_groups is None else num_groups
    zero: Score = (0, 0, 0, 0.0)
    # best[level][j]: score and segments among the first j models; without a number of groups there is one level.
    Chain = tuple[Score, Any]  # the segments as nested pairs, which share their tails
    previous: list[Chain | None] = [(zero, None)] * (num_models + 1)
    for _ in range(levels):
        current: list[Chain | None] = [(zero, None) if num_groups is None else None]
        for end in range(num_models):
            choice = current[-1]
            for segment in ending.get(end, ()):
                before = current[segment.first] if num_groups is None else previous[segment.first]
                if before is None:
                    continue
                own = (1, 0, 0, 0.0) if most_groups else _score(segment)
                runs, models, groups, gaps = (a + b for a, b in zip(before[0], own, strict=True))
                total: Score = (int(runs), int(models), int(groups), float(gaps))
                if choice is None or total > choice[0]:
                    choice = (total, (segment, before[1]))
            current.append(choice)
        previous = current
    result = []
    chain = previous[num_models][1] if previous[num_models] is not None else None  # type: ignore[index]
    while chain is not None:
        result.append(chain[0])
        chain = chain[1]
    return result


def _at_targets(segments: Sequence[_Segment], targets: Sequence[float], tolerance: float) -> list[_Segment]:
    chosen: list[_Segment] = []
    for target in targets:
        free = [
            segment
            for segment in segments
            if all(segment.last < other.first or other.last < segment.first for other in chosen)
        ]
        if not free:
            break

        def order(segment: _Segment, target: float = target) -> tuple[float, ...]:
            # In whole tolerances, so that a group is not robbed of models to bring its middle nearer.
            distance = abs(segment.group.middle - target)
            away = math.ceil(max(0.0, distance - tolerance / 2) / tolerance) if tolerance > 0 else distance
            runs, models, _, gap = _score(segment)
            return away, -runs, -models, -gap, distance

        chosen.append(min(free, key=order))
    return chosen


def _nothing_matches(
    ordered: Sequence[Candidate], tolerance: float, z: float, min_size: int, step_factor: float, unit: str
) -> str:
    """Why there is no group, and what would make one."""
    # With no limit on the gap, who may be together?
    by_run: dict[str, list[Candidate]] = {}
    for model in ordered:
        by_run.setdefault(model.run, []).append(model)
    runs = len(by_run)
    most = sum(len(_differing(of_run, ordered[0].loss.value, step_factor)) for of_run in by_run.values())
    if most < min_size:
        return (
            f"{count(len(ordered), 'model')} of {count(runs, 'run')} make no group of {min_size}, whatever the tolerance: a "
            f"run gives one checkpoint, or several whose steps differ by a factor of {step_factor:g}. Train more runs, or "
            "lower --min-size, which is at least 2."
        )
    pairs = []
    for first, low in enumerate(ordered):
        for high in ordered[first + 1 :]:
            if low.run != high.run or any(_steps_differ(*both, step_factor) for both in ((low, high), (high, low))):
                gap = high.loss.value - low.loss.value
                stderr = math.sqrt(low.loss.stderr**2 + high.loss.stderr**2)
                pairs.append((gap + z * stderr, gap, stderr, low.name, high.name))
    pairs.sort()
    nearest = "; ".join(f"{low} and {high}: {gap:.3g} ± {stderr:.2g}" for _, gap, stderr, low, high in pairs[:3])
    # A larger tolerance lets more models in and so never loses the last group.
    bounds = sorted({pair[0] for pair in pairs if pair[0] > tolerance} | {z * model.loss.stderr for model in ordered})
    low_place, high_place = 0, len(bounds) - 1
    while low_place < high_place:
        middle = (low_place + high_place) // 2
        if any(True for _ in _segments(ordered, bounds[middle], z, min_size, step_factor)):
            high_place = middle
        else:
            low_place = middle + 1
    enough = loss_groups.round_up(bounds[low_place])
    share = " Models that read one text share most of their error; --z 0 takes losses as exact." if z > 0 else ""
    errors = [model.loss.stderr for model in ordered]
    wide = (
        f" The losses are known to ± {min(errors):.2g} … {max(errors):.2g} only."
        if z * min(errors) * math.sqrt(2) > tolerance
        else ""
    )
    return (
        f"no {min_size} models have losses within {tolerance:g} {unit}, {z:g} standard errors included. The smallest tolerance "
        f"with a group is {enough:g}: --tolerance {enough:g}.{wide}{share} The nearest pairs: {nearest}."
    )
