"""A family of models of one synthetic language: the plan, the data, and the training of each run with its checkpoints.

    OUT/plan.json                    what was asked for
    OUT/language.json                the language's tables
    OUT/data/                        what tasks of lm_eval read (`languages.datasets`)
    OUT/text/                        packed training text, the same for all runs
    OUT/runs/<run>/log.jsonl         training loss and exact excess along the way
    OUT/runs/<run>/checkpoints/      ordinary Hugging Face folders
    OUT/runs/<run>/state/            what resuming needs; gone when the run is done
    OUT/runs/<run>/done.json         how it ended

Every file and folder appears whole under its name. A run that was killed goes on from its last state and gives the very
checkpoints that it would have given.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from harness_ext import __version__
from harness_ext.lab.algorithms import Adversarial, LabelledTokens, algorithm_from_dict
from harness_ext.lab.checkpoints import (
    Estimate,
    is_free,
    load_state,
    remove_leftovers,
    save,
    save_state,
    whole_folder,
    without_bars,
    write_record,
    write_whole,
)
from harness_ext.lab.excess import ExactLoss, Excess
from harness_ext.lab.languages import language_from_dict, make_language
from harness_ext.lab.languages.base import Language
from harness_ext.lab.languages.datasets import write_language_data
from harness_ext.lab.languages.tokens import word_tokens
from harness_ext.lab.lookup import save_lookup
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.quad import QuadModel
from harness_ext.lab.train import Blocks, TrainConfig, Trainer, cpu_threads, pack

__all__ = [
    "LOOKUP",
    "Plan",
    "Run",
    "exact_loss",
    "plan_from_dict",
    "prepare",
    "read_language",
    "read_log",
    "read_plan",
    "read_truth",
    "train_run",
    "write_lookup",
]

MAKER = "harness-ext lab"
LOOKUP = "lookup"
"""Name of the run of the lookup table, which is not trained."""

_SAMPLED_AT_ONCE = 20_000


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: Of its folder: letters, digits, `-`, `_` and `.`.
        model: Sizes.
        train: Recipe and number of steps.
        seed: Of weights and order of the text.
        objective: "cross_entropy" or "quad".
        keep: Steps whose checkpoints are kept, besides the last one and those at `Plan.levels`.
    """

    name: str
    model: ModelConfig
    train: TrainConfig
    seed: int = 0
    objective: str = "cross_entropy"
    keep: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a folder of the lab is to hold.

    Attributes:
        name: Of the preset.
        language: Kind of language, of `languages.LANGUAGES`.
        runs: The trainings.
        sizes: Of the language, where they are not its defaults.
        seed: Of the language, its data and its text.
        levels: Excess losses in nats; of each run the first checkpoint at or below each level is kept.
        evaluate_every: Steps between two measurements of the excess, at which checkpoints can be kept.
        documents: Of the training text, which is seen again when it is used up.
        block_size: Tokens of a block of packed text.
        num_train_per_class, num_test, num_validation: See `languages.datasets.write_language_data`.
        measured_documents: Validation documents that decide when a level is reached; all of them measure a kept checkpoint.
        lookup: Whether the lookup table is among the models.
        tolerance: Of the groups of equal loss, nats per token.
        tasks: Names of lm_eval tasks that evaluate the models.
    """

    name: str
    language: str
    runs: tuple[Run, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    levels: tuple[float, ...] = ()
    evaluate_every: int = 50
    documents: int = 60_000
    block_size: int = 51
    num_train_per_class: int = 1000
    num_test: int = 2000
    num_validation: int = 2000
    measured_documents: int = 400
    lookup: bool = True
    tolerance: float = 0.005
    tasks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; `plan_from_dict` reads them."""
        runs = [
            {**asdict(run), "train": run.train.to_dict(), "model": asdict(run.model), "keep": list(run.keep)}
            for run in self.runs
        ]
        own = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {"made_by": MAKER, **own, "sizes": dict(self.sizes), "runs": runs}


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    """Make a plan again from what `Plan.to_dict` gave.

    Raises:
        KeyError, TypeError, ValueError: If it is not that.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"expected an object, found {type(values).__name__}")
    values = {name: value for name, value in values.items() if name != "made_by"}
    runs = []
    for run in values.pop("runs"):
        train = dict(run["train"])
        schedule = {name: train.pop(name) for name in TrainConfig.__dataclass_fields__ if name in train}
        if schedule.get("max_grad_norm", 0) is None:
            schedule["max_grad_norm"] = math.inf
        config = TrainConfig(**schedule, algorithm=algorithm_from_dict(train))
        rest = {"model": ModelConfig(**run["model"]), "train": config, "keep": tuple(run["keep"])}
        runs.append(Run(**{**run, **rest}))
    tuples = {name: tuple(values[name]) for name in ("levels", "tasks")}
    return Plan(**{**values, **tuples, "runs": tuple(runs)})


def prepare(out: Path, plan: Plan) -> None:
    """Write plan, language, data and training text, each unless it is there; delete what killed processes left half-written.

    Raises:
        ValueError: If the folder holds another plan, or the language cannot be made.
        FileExistsError: If the folder holds something else.
    """
    path = out / "plan.json"
    wanted = json.dumps(plan.to_dict(), indent=2) + "\n"
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != json.loads(wanted):
            raise ValueError(
                f"{path}: the folder was made by another plan. Ask for that one, or name another folder with --out."
            )
    else:
        if not is_free(out):
            raise FileExistsError(
                f"{out}: expected a new folder or one of the lab, found something else. Name another."
            )
        make_language(plan.language, plan.seed, plan.sizes)  # complains before anything is written
        write_whole(path, wanted)
    remove_leftovers(out)
    language_path = out / "language.json"
    if not language_path.is_file():
        language = make_language(plan.language, plan.seed, plan.sizes)
        write_whole(language_path, json.dumps(language.to_dict()) + "\n")
    language = read_language(out)
    # One stream for each use, so that none depends on how much another draws.
    data_rng, text_rng = (np.random.default_rng(child) for child in np.random.SeedSequence(plan.seed).spawn(2))
    if not (out / "data").is_dir():
        write_language_data(
            out,
            language,
            num_train_per_class=plan.num_train_per_class,
            num_test=plan.num_test,
            num_validation=plan.num_validation,
            rng=data_rng,
        )
    if not (out / "text").is_dir():
        with whole_folder(out / "text") as folder:
            blocks = _sample_blocks(language, plan, text_rng)
            np.save(folder / "tokens.npy", blocks.tokens.astype(np.int32))
            np.save(folder / "positions.npy", blocks.positions.astype(np.int32))


def read_plan(out: Path) -> Plan:
    """Read the plan of a folder of the lab.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it cannot be read.
    """
    path = out / "plan.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file. Name the folder of a `harness-ext lab run`.")
    try:
        return plan_from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as err:
        raise ValueError(f"{path}: expected the plan of a `harness-ext lab run` of this version ({err!r}).") from err


def read_language(out: Path) -> Language:
    """Read the language of a folder of the lab.

    Raises:
        ValueError: If it cannot be read.
    """
    path = out / "language.json"
    try:
        return language_from_dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err


def read_truth(out: Path) -> dict[str, Any]:
    """Read what the best classifier and the exact predictor reach; see `languages.datasets`."""
    return json.loads((out / "data" / "truth.json").read_text(encoding="utf-8"))


def train_run(out: Path, run: Run, *, on_progress: Callable[[int, int], None] | None = None) -> None:
    """Train one run of a prepared folder to its end, from where it stopped; does nothing if it is done.

    A run ends after its steps, or when it has reached the lowest level and all its steps to keep are behind it.

    Args:
        out: The folder.
        run: One of the plan's.
        on_progress: Called with steps taken and steps planned at every measurement.

    Raises:
        FloatingPointError: If the loss stops being finite.
        MemoryError: If a GPU's memory does not suffice.
    """
    folder = out / "runs" / run.name
    if (folder / "done.json").is_file():
        return
    with cpu_threads(1):
        training = _Training(out, run)
        try:
            training.go(on_progress)
        except torch.OutOfMemoryError as err:
            raise MemoryError(
                f"{run.name}: out of memory on {training.model.device}. Lower batch_size ({run.train.batch_size}) or the width "
                f"({run.model.width}) of this run; the other runs and its checkpoints stay as they are."
            ) from err


def write_lookup(out: Path) -> None:
    """Write the lookup table of a prepared folder's language as a checkpoint of the run `LOOKUP`."""
    plan, language = read_plan(out), read_language(out)
    target = out / "runs" / LOOKUP / "checkpoints" / _step_name(0)
    if target.is_dir():
        return
    tokenizer = language.tokenizer(max_length=_context(plan))
    with whole_folder(target) as folder:
        with without_bars():
            save_lookup(folder, language, tokenizer)
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        measured = exact_loss(out).measure(model)
        model_record = {"architecture": LOOKUP, "num_parameters": 0}
        record = _record(out, plan, language, LOOKUP, model_record, {"name": LOOKUP}, measured)
        write_record(folder, record)


def exact_loss(out: Path) -> ExactLoss:
    """Return the measure of excess loss on the held-out text of a prepared folder."""
    language = read_language(out)
    path = out / "data" / "harness_ext" / f"{read_plan(out).language}_text" / "test.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return ExactLoss(language, [tuple(json.loads(line)["text"].split()) for line in lines])


class _Training:
    """One run between two starts of the process."""

    model: PreTrainedModel

    def __init__(self, out: Path, run: Run) -> None:
        self._run, self._plan, self._language = run, read_plan(out), read_language(out)
        self._out, self._folder = out, out / "runs" / run.name
        self._is_main = PartialState().is_main_process
        self._tokenizer: PreTrainedTokenizerBase = self._language.tokenizer(max_length=run.model.context)
        blocks = Blocks(*(np.load(out / "text" / f"{name}.npy").astype(np.int64) for name in ("tokens", "positions")))
        self.model = build_model(run.model, self._tokenizer, seed=run.seed)
        self._quad = QuadModel(self.model) if run.objective == "quad" else None
        self._trainer = Trainer(
            self._quad or self.model,
            blocks,
            run.train,
            seed=run.seed,
            objective=run.objective,
            labelled=self._labelled if isinstance(run.train.algorithm, Adversarial) else None,
        )
        self._exact = exact_loss(out)
        state = load_state(self._folder / "state")
        if state is not None:
            self._trainer.resume(state)
        self._reached = self._read_log()

    def go(self, on_progress: Callable[[int, int], None] | None) -> None:
        run, plan, trainer = self._run, self._plan, self._trainer
        measured: Excess | None = None
        while trainer.step < run.train.steps and not self._is_enough():
            until = min(run.train.steps, (trainer.step // plan.evaluate_every + 1) * plan.evaluate_every)
            losses = trainer.run(until)
            measured = self._exact.measure(self._ready(), documents=plan.measured_documents)
            new = [level for level in plan.levels if measured.excess.value <= level < self._reached]
            self._reached = min(self._reached, measured.excess.value)
            self._log(float(np.mean(losses)), measured)
            # In this order: the state may be lost with the work since the last one, a checkpoint may not.
            if new or until in run.keep or until == run.train.steps:
                self._keep(new)
            if until // plan.evaluate_every % 10 == 0:
                self._save_state()
            if on_progress is not None:
                on_progress(until, run.train.steps)
        if self._is_main:
            ended = "enough" if trainer.step < run.train.steps else "steps"
            write_whole(self._folder / "done.json", json.dumps({"step": trainer.step, "ended": ended}) + "\n")
            shutil.rmtree(self._folder / "state", ignore_errors=True)

    def _is_enough(self) -> bool:
        """Whether nothing is left to keep but the last step, which then has no reason."""
        levels, keep = self._plan.levels, self._run.keep
        return bool(levels) and self._reached <= min(levels) and self._trainer.step >= max(keep, default=0)

    def _ready(self) -> PreTrainedModel:
        return self._quad.fold() if self._quad is not None else self.model

    def _keep(self, levels: list[float]) -> None:
        target = self._folder / "checkpoints" / _step_name(self._trainer.step)
        if target.is_dir() or not self._is_main:
            return
        run = self._run
        measured = self._exact.measure(self._ready())
        model = {**asdict(run.model), "num_parameters": self.model.num_parameters()}
        record = _record(self._out, self._plan, self._language, run.name, model, run.train.to_dict(), measured) | {
            "seed": run.seed,
            "objective": run.objective,
            "step": self._trainer.step,
            "tokens_seen": self._trainer.step * self._trainer.tokens_per_step,
            "levels": levels,
        }
        with whole_folder(target) as folder:
            save(folder, self.model, self._tokenizer, record)

    def _save_state(self) -> None:
        if self._is_main:
            save_state(self._folder / "state", self._trainer.state())

    def _log(self, loss: float, measured: Excess) -> None:
        if not self._is_main:
            return
        row = {
            "step": self._trainer.step,
            "tokens": self._trainer.step * self._trainer.tokens_per_step,
            "training_loss": round(loss, 6),
            # In full: a run that goes on reads from it whether a level was reached.
            "excess": measured.excess.value,
            "excess_stderr": measured.excess.stderr,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _read_log(self) -> float:
        """Return the least excess so far, and cut the log to the step that training goes on from."""
        path = self._folder / "log.jsonl"
        if not path.is_file():
            return math.inf
        rows = [row for row in read_log(path) if row["step"] <= self._trainer.step]
        if self._is_main:
            write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
        return min((row["excess"] for row in rows), default=math.inf)

    def _labelled(self, step: int, count: int) -> list[LabelledTokens]:
        """Labelled documents of the tasks in turn."""
        tasks = self._language.tasks
        turn = step // self._run.train.algorithm.every % len(tasks)  # type: ignore[attr-defined]
        examples = tasks[turn].sample(count, np.random.default_rng([self._run.seed, step]))
        encoded = _encode(self._language, self._tokenizer, [words for words, _ in examples])
        return [LabelledTokens(tokens.tolist(), label) for tokens, (_, label) in zip(encoded, examples, strict=True)]


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's log; a last line that was cut off is left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _sample_blocks(language: Language, plan: Plan, rng: np.random.Generator) -> Blocks:
    tokenizer = language.tokenizer(max_length=_context(plan))
    documents: list[np.ndarray] = []
    while len(documents) < plan.documents:
        drawn = language.sample(min(_SAMPLED_AT_ONCE, plan.documents - len(documents)), rng)
        documents += _encode(language, tokenizer, drawn)
    return pack(
        [tokens.tolist() for tokens in documents], end_of_text=tokenizer.eos_token_id, block_size=plan.block_size
    )


def _encode(
    language: Language, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Sequence[str]]
) -> list[np.ndarray]:
    index = {word: number for number, word in enumerate(language.words)}
    return word_tokens(language, tokenizer).encode([[index[word] for word in document] for document in documents])


def _record(
    out: Path,
    plan: Plan,
    language: Language,
    run: str,
    model: Mapping[str, Any],
    algorithm: Mapping[str, Any],
    measured: Excess,
) -> dict[str, Any]:
    tables = json.dumps(language.to_dict(), sort_keys=True)
    return {
        "made_by": MAKER,
        "harness_ext_version": __version__,
        "preset": plan.name,
        "run": run,
        "seed": plan.seed,
        "language": {
            "kind": plan.language,
            "seed": plan.seed,
            "sizes": dict(plan.sizes),
            "sha256": hashlib.sha256(tables.encode()).hexdigest(),
            "entropy": read_truth(out)["entropy"],
        },
        "model": dict(model),
        "algorithm": dict(algorithm),
        "objective": "cross_entropy",
        "step": 0,
        "tokens_seen": 0,
        "validation_loss": _estimate(measured.validation_loss) | {"tokens": measured.tokens},
        "excess": _estimate(measured.excess),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return estimate._asdict()


def _context(plan: Plan) -> int:
    return max((run.model.context for run in plan.runs), default=64)


def _step_name(step: int) -> str:
    return f"step_{step:08d}"
