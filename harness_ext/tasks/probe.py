"""Probe tasks: how well a linear classifier does on the states of the model.

Source: Saunshi, Malladi, Arora (ICLR 2021), features f. Options under `metadata: {probe: {...}}`, see `ProbeOptions`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from lm_eval.api.instance import Instance

from harness_ext import prompts
from harness_ext.contracts import LAST_LAYER, Feature, PromptRequest, PromptStates
from harness_ext.tasks.base import PromptTask, logger

if TYPE_CHECKING:
    from harness_ext.evaluators.probe import ProbeFit

# scikit-learn takes a second to import, which natural tasks need not pay: it is imported where a probe is fitted.

__all__ = ["ProbeOptions", "ProbeTask"]


@dataclass(frozen=True)
class ProbeOptions:
    """Options of a probe.

    Attributes:
        prompt: False: the state of the bare document. True: of the document under the task's prompt. A prompt's id or path:
            under that prompt.
        layer: "last" for f(s), or an index into the model's hidden states (0 is the embedding).
        pooling: "last" token or "mean" over tokens.
        n_per_class: Training documents of each class; None: all.
        n_train: Training documents in all, classes in their proportions; None: all.
        seeds: One training sample and one probe for each seed; metrics are means over them.
        num_folds: Folds of the cross-validation that chooses C.
        c_grid: Values of C; None: the evaluator's.
    """

    prompt: bool | str = False
    layer: str | int = LAST_LAYER
    pooling: str = "last"
    n_per_class: int | None = None
    n_train: int | None = None
    seeds: tuple[int, ...] = (0,)
    num_folds: int = 5
    c_grid: tuple[float, ...] | None = None

    @classmethod
    def from_metadata(cls, value: Any, where: str) -> ProbeOptions:
        """Read and check the options.

        Raises:
            ValueError: If an option is unknown or has a value that it cannot have; `where` names the task.
        """
        if value is None:
            return cls()
        form = f"{where}: --metadata '{{\"probe\": {{...}}}}'"
        if not isinstance(value, Mapping):
            raise ValueError(f"{form} expects a mapping of options, found {value!r}.")
        known = [option.name for option in fields(cls)]
        for name in value:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"{form}: unknown option {name!r}.{hint} Known: {', '.join(known)}.")
        options = dict(value)
        for name in ("seeds", "c_grid"):
            if options.get(name) is not None:
                given = options[name]
                options[name] = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        result = cls(**options)
        problem = result._problem()
        if problem:
            raise ValueError(f"{form}: {problem}.")
        return result

    def _problem(self) -> str | None:
        def is_count(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 1

        if self.layer != LAST_LAYER and (isinstance(self.layer, bool) or not isinstance(self.layer, int)):
            return f'layer is {self.layer!r}, expected "{LAST_LAYER}" or an integer'
        if self.pooling not in ("last", "mean"):
            return f'pooling is {self.pooling!r}, expected "last" or "mean"'
        if self.n_per_class is not None and self.n_train is not None:
            return "n_per_class and n_train exclude each other, give one"
        for name in ("n_per_class", "n_train"):
            value = getattr(self, name)
            if value is not None and not is_count(value):
                return f"{name} is {value!r}, expected a positive integer"
        if not is_count(self.num_folds) or self.num_folds < 2:
            return f"num_folds is {self.num_folds!r}, expected an integer of at least 2"
        if not self.seeds or not all(isinstance(seed, int) and seed >= 0 for seed in self.seeds):
            return f"seeds is {list(self.seeds)!r}, expected a list of non-negative integers"
        if len(set(self.seeds)) < len(self.seeds):
            return f"seeds is {list(self.seeds)!r}: a seed that occurs twice gives the same sample twice"
        if self.c_grid is not None and (
            not self.c_grid or not all(isinstance(c, int | float) and 0 < c < float("inf") for c in self.c_grid)
        ):
            return f"c_grid is {list(self.c_grid)!r}, expected positive numbers, at least one"
        return None


class ProbeTask(PromptTask):
    """L2 logistic regression on states, C chosen by cross-validation on the training split.

    Metrics, each a mean over the seeds: acc, macro_f1, and lm_eval's f1 (two classes) and mcc of the first seed. The chosen
    C, its cross-validation accuracy, the training accuracy and more are in `configs.<task>.metadata.report`.
    """

    NEEDS_STATES: ClassVar[bool] = True
    METRICS: ClassVar[frozenset[str]] = frozenset({"acc", "macro_f1", "f1", "mcc"})

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        metadata = config.get("metadata") or {}
        self.options = ProbeOptions.from_metadata(metadata.get("probe"), str(config.get("task")))
        self._predictions: dict[str, tuple[int, ...]] = {}
        # Few-shot examples would stand before evaluated documents only.
        super().__init__({**config, "num_fewshot": 0}, **kwargs)
        if self.config.training_split is None:
            raise ValueError(f"{self._source()}: a probe needs `training_split:`.")
        if self.config.training_split == self.eval_split:
            raise ValueError(
                f"{self._source()}: split {self.eval_split!r} is both trained on and evaluated. Give different splits as "
                "`training_split:` and `test_split:`."
            )

    def _load_template(self, task: str) -> prompts.Prompt | None:
        wanted = self.options.prompt
        if wanted is False:
            return None
        option = self._prompt_option(task) if wanted is True else wanted
        if not isinstance(option, str):
            raise ValueError(f"{self._source()}: probe task {task!r} was asked for its prompt, found {option!r}.")
        return prompts.load_prompt(option)

    @property
    def feature(self) -> Feature:
        """Which vector the probe sees."""
        return Feature(self.options.layer, self.options.pooling)

    # ---------------------------------------------------------------------------------------------- requests

    def build_all_requests(self, **kwargs: Any) -> None:
        """Make requests for the evaluated documents and, with negative doc_ids, for the training documents.

        lm_eval runs and filters both; its loop over metrics reads the evaluated ones only. `--limit` does not reach the
        training documents.
        """
        super().build_all_requests(**kwargs)
        context = {
            key: kwargs[key]
            for key in ("system_instruction", "apply_chat_template", "fewshot_as_multiturn", "chat_template")
            if key in kwargs
        }
        documents = self.training_docs()
        usable = self._usable_training_documents(documents)
        labels = np.array([self.label_of({self.label_column: value}) for value in documents[self.label_column]])[usable]
        self._check_classes(labels)
        drawn = [self._draw(labels, seed) for seed in self.options.seeds]
        for sample in drawn:
            self._check_classes(labels[sample])
        self._samples = [usable[sample] for sample in drawn]
        for doc_id in np.unique(np.concatenate(self._samples)).tolist():
            doc = documents[doc_id]
            ctx = self.fewshot_context(doc, num_fewshot=0, gen_prefix=self.doc_to_prefix(doc), **context)
            self._instances += self._state_request(doc, ctx, metadata=(self.config.task, -1 - doc_id, 1))
        self._count_overlap()

    def construct_requests(self, doc: dict[str, Any], ctx: str | list[str], **kwargs: Any) -> list[Instance]:
        """Ask for the state of an evaluated document (lm_eval's hook)."""
        assert isinstance(ctx, str)
        self._check_document(doc, kwargs["metadata"][1], self.eval_split)
        return self._state_request(doc, ctx, metadata=kwargs["metadata"])

    def _state_request(self, doc: Mapping[str, Any], ctx: str, *, metadata: tuple[Any, ...]) -> list[Instance]:
        what = PromptRequest(features=(self.feature,), document=self.document_span(doc, ctx))
        return [self.request(doc, ctx, 0, what, metadata=metadata)]

    def _usable_training_documents(self, documents: Any) -> np.ndarray:
        """Indices of the documents with a text; a handful of empty ones (MPQA has three) is no reason to stop."""
        texts = documents[self.text_column]
        usable = np.array([i for i, text in enumerate(texts) if isinstance(text, str) and text.strip()], dtype=int)
        empty = len(documents) - len(usable)
        if empty:
            logger.warning("%s: %d empty training documents are left out.", self.task_name, empty)
            self._report["empty_training_documents"] = empty
        if not len(usable):
            raise ValueError(
                f"{self.config.dataset_path}, split {self.config.training_split!r}: no document has a text."
            )
        return usable

    def _draw(self, labels: np.ndarray, seed: int) -> np.ndarray:
        """Positions of one training sample, sorted."""
        options, where = self.options, f"{self.config.dataset_path}, split {self.config.training_split!r}"
        counts = np.bincount(labels, minlength=len(self.classes))
        if options.n_per_class is not None:
            if counts.min() < options.n_per_class:
                rarest = int(counts.argmin())
                raise ValueError(
                    f"{where}: class {self.classes[rarest]!r} has {counts[rarest]} documents, n_per_class asks for "
                    f"{options.n_per_class}. Give at most {counts[counts > 0].min()}."
                )
            generator = np.random.default_rng(seed)
            drawn = [
                generator.choice(np.flatnonzero(labels == label), options.n_per_class, replace=False)
                for label in range(len(self.classes))
            ]
            return np.sort(np.concatenate(drawn))
        if options.n_train is not None and options.n_train != len(labels):
            if counts.min() < 2:
                raise ValueError(
                    f"{where}: class {self.classes[int(counts.argmin())]!r} has one document, and a draw in proportion "
                    "needs two. Train on all of them (no n_train), or give n_per_class: 1."
                )
            if not len(self.classes) <= options.n_train <= len(labels) - len(self.classes):
                raise ValueError(
                    f"{where}: n_train is {options.n_train}, expected {len(self.classes)} to "
                    f"{len(labels) - len(self.classes)}, or {len(labels)} for all."
                )
            from sklearn.model_selection import train_test_split

            drawn, _ = train_test_split(
                np.arange(len(labels)), train_size=options.n_train, stratify=labels, random_state=seed
            )
            return np.sort(drawn)
        return np.arange(len(labels))

    def _count_overlap(self) -> None:
        """Count evaluated documents whose text is also trained on: the probe may know them by heart."""
        trained = {i.doc[self.text_column] for i in self._instances if i.doc_id is not None and i.doc_id < 0}
        shared = sum(
            i.doc[self.text_column] in trained for i in self._instances if i.doc_id is not None and i.doc_id >= 0
        )
        self._report["overlap"] = shared
        if shared:
            logger.warning("%s: %d evaluated documents are also among the training documents.", self.task_name, shared)

    # -------------------------------------------------------------------------------------------- evaluation

    def evaluate_answers(self, instances: Mapping[int, Sequence[Instance]]) -> None:
        """Fit one probe for each seed, and predict."""
        from harness_ext.evaluators.probe import fit_probe

        answers = {doc_id: of_document[0].resps[0] for doc_id, of_document in instances.items()}
        labels = {doc_id: self.label_of(of_document[0].doc) for doc_id, of_document in instances.items()}
        evaluated = [doc_id for doc_id in instances if doc_id >= 0]
        test = self._features([answers[doc_id] for doc_id in evaluated])
        runs = []
        fits: list[ProbeFit] = []
        for seed, sample in zip(self.options.seeds, self._samples, strict=True):
            trained = (-1 - sample).tolist()
            train_labels = np.array([labels[doc_id] for doc_id in trained])
            fit = fit_probe(
                self._features([answers[doc_id] for doc_id in trained]),
                train_labels,
                num_classes=len(self.classes),
                c_grid=self.options.c_grid,
                num_folds=self.options.num_folds,
                seed=seed,
            )
            fits.append(fit)
            runs.append(fit.predict(test))
        predictions = np.stack(runs, axis=1)
        self._predictions = {
            answers[doc_id].key: tuple(row) for doc_id, row in zip(evaluated, predictions.tolist(), strict=True)
        }
        correct = predictions == np.array([labels[doc_id] for doc_id in evaluated])[:, np.newaxis]
        cut = [answers[doc_id].cut_tokens > 0 for doc_id in evaluated]
        everywhere = self.gather(list(zip(correct.tolist(), cut, strict=True)))
        accuracies = np.mean([of_runs for of_runs, _ in everywhere], axis=0).tolist()
        self._report |= {
            "documents": len(everywhere),
            "training_documents": [len(sample) for sample in self._samples],
            "cut_documents": sum(was_cut for _, was_cut in everywhere),
            "cut_training_documents": sum(answer.cut_tokens > 0 for doc_id, answer in answers.items() if doc_id < 0),
            "options": asdict(self.options) | {"seeds": list(self.options.seeds)},
            "probes": [
                {"seed": seed, "acc": accuracy} | _describe(fit)
                for seed, accuracy, fit in zip(self.options.seeds, accuracies, fits, strict=True)
            ],
        }
        for fit, seed in zip(fits, self.options.seeds, strict=True):
            logger.info("%s, seed %d: %s", self.task_name, seed, _summary(fit))

    def _features(self, answers: Sequence[PromptStates]) -> np.ndarray:
        source = answers[0].source
        assert source is not None, "the engine answers requests for features with a source"
        return source.take([answer.row for answer in answers], self.feature)

    def _check_classes(self, labels: np.ndarray) -> None:
        counts = Counter(labels.tolist())
        missing = [name for label, name in enumerate(self.classes) if not counts[label]]
        if missing:
            raise ValueError(
                f"{self.config.dataset_path}, split {self.config.training_split!r}: no training document of class "
                f"{', '.join(map(repr, missing))} among {len(labels)}; every class of `doc_to_choice` needs one. Train on "
                "more documents (n_train, n_per_class), or correct `doc_to_choice`."
            )

    def metric_items(self, gold: int, results: Sequence[PromptStates]) -> dict[str, Any]:
        """See the class."""
        predicted = self._predictions[results[0].key]
        return {
            "acc": float(np.mean([run == gold for run in predicted])),
            "macro_f1": (gold, predicted),
            "f1": (gold, predicted[0]),
            "mcc": (gold, predicted[0]),
        }


def _describe(fit: ProbeFit) -> dict[str, Any]:
    """Everything about a fit but its weights, as plain types."""
    return {
        "C": fit.c,
        "cv_accuracy": None if fit.cv_accuracy is None else fit.cv_accuracy[fit.c_grid.index(fit.c)],
        "train_accuracy": fit.training_accuracy,
        "converged": fit.converged,
        "num_iterations": fit.num_iterations,
        "gradient_norm": fit.gradient_norm,
        "num_folds": fit.num_folds,
        "num_cv_unconverged": fit.num_cv_unconverged,
        "c_grid": list(fit.c_grid),
        "cv_accuracy_per_c": None if fit.cv_accuracy is None else list(fit.cv_accuracy),
        "cv_accuracy_stderr_per_c": None if fit.cv_accuracy_stderr is None else list(fit.cv_accuracy_stderr),
        "notes": list(fit.notes),
    }


def _summary(fit: ProbeFit) -> str:
    cv = "no cross-validation"
    if fit.cv_accuracy is not None:
        cv = f"{fit.num_folds}-fold accuracy {fit.cv_accuracy[fit.c_grid.index(fit.c)]:.4f}"
    converged = "" if fit.converged else f"; NOT converged (gradient {fit.gradient_norm:.1e})"
    notes = "".join(f"; {note}" for note in fit.notes)
    return f"C = {fit.c:g} ({cv}), training accuracy {fit.training_accuracy:.4f}{converged}{notes}"
