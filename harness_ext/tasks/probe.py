"""Probe tasks: how well a linear classifier does on features of the documents.

Source: Saunshi, Malladi, Arora (ICLR 2021), Tables 1 and 2. The kinds of features are in `tasks.features`, one task class for
each; options under `metadata: {probe: {...}}` are in `tasks.options`.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from lm_eval.api.instance import Instance

from harness_ext import prompts
from harness_ext.contracts import ALL_LAYERS, LAST_LAYER, Feature, PromptRequest
from harness_ext.evaluators import scores
from harness_ext.tasks import features, metrics, table
from harness_ext.tasks.base import PromptTask, logger
from harness_ext.tasks.features import Answers, FeatureSet
from harness_ext.tasks.options import ProbeOptions, QuadOptions, read_options

if TYPE_CHECKING:
    from harness_ext.evaluators.probe import ProbeFit

MOST_ROWS = 20_000
"""Training documents that the natural-task coefficients are computed from; of a convex problem in a few words, enough."""

# scikit-learn takes a second to import, which natural tasks need not pay: it is imported where a probe is fitted.

__all__ = [
    "ClassWordsProbe",
    "ConditionalMeanProbe",
    "ProbabilitiesProbe",
    "ProbeTask",
    "QuadProbe",
    "RandomProjectionProbe",
    "SubsetWordsProbe",
]


class ProbeTask(PromptTask):
    """L2 logistic regression on features, C chosen by cross-validation on the training split.

    Metrics, each a mean over the seeds and over the prompts of a sweep: acc, balanced_acc, macro_f1, ece, majority_rate, and
    lm_eval's f1 (two classes) and mcc of the first of them. A sweep over prompts also has acc_worst, acc_best, acc_ensemble,
    acc_mixture and acc@NAME, as natural tasks do. The chosen C, its cross-validation accuracy, the training accuracy and more
    are in `configs.<task>.metadata.report`.
    """

    NEEDS_STATES: ClassVar[bool] = True
    METRICS: ClassVar[frozenset[str]] = frozenset(
        {"acc", "balanced_acc", "macro_f1", "ece", "majority_rate", "f1", "mcc"}
    )

    FEATURES: ClassVar[str] = "f"
    """Which of `features.KINDS` the probe sees."""

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        metadata = config.get("metadata") or {}
        name = str(config.get("task"))
        self.options = read_options(ProbeOptions, "probe", metadata.get("probe"), name)
        self.quad_options = read_options(QuadOptions, "quad", metadata.get("quad"), name)
        self.kind = features.KINDS[self.FEATURES]
        if not self.kind.layers and (self.options.layer, self.options.pooling) != (LAST_LAYER, "last"):
            # One --metadata serves all tasks of a command, and a sweep over layers is meant for those that have them.
            logger.info("%s: its features come from f(s); `layer` and `pooling` are for probe_<dataset> only.", name)
            self.options = replace(self.options, layer=LAST_LAYER, pooling="last")
        # Few-shot examples would stand before evaluated documents only.
        super().__init__({**config, "num_fewshot": 0}, **kwargs)
        self.words = self._load_words()
        if self.config.training_split is None:
            raise ValueError(f"{self._source()}: a probe needs `training_split:`.")
        if self.config.training_split == self.eval_split:
            raise ValueError(
                f"{self._source()}: split {self.eval_split!r} is both trained on and evaluated. Give different splits as "
                "`training_split:` and `test_split:`."
            )
        self.warn_of_duplicates()

    def _load_templates(self, task: str) -> tuple[prompts.Prompt | None, ...]:
        wanted = self.options.prompt
        if wanted is False:
            return (None,)
        option = self._prompt_option(task) if wanted is True else wanted
        if not isinstance(option, str | list | tuple) or not option:
            raise ValueError(f"{self._source()}: probe task {task!r} was asked for its prompt, found {option!r}.")
        return tuple(self._load_prompt(name) for name in self._resolve_prompts(option))

    def _load_words(self) -> tuple[str, ...]:
        """The words whose log-probabilities are the features; empty for other kinds."""
        key = self.kind.words
        if not key:
            return ()
        words = self._metadata.get(key)
        if words is None and key == "class_words":
            option = self._prompt_option(self.task_name)
            if option and (not isinstance(option, str) or prompts.is_pattern(option)):
                # Which words a sweep means is open: the dataset's own prompt decides, or the first of the sweep.
                option = self._prompt_of_yaml() or self._resolve_prompts(option, with_label_words=True)[0]
            label_words = self._load_prompt(option).label_words if option else {}
            words = [word for of_class in label_words.values() for word in of_class]
        valid = isinstance(words, list) and all(isinstance(word, str) and word.strip() for word in words)
        if not valid or not words:
            raise ValueError(
                f"{self._source()}: {self.task_name} needs a list of words, found {words!r}. Give `{key}: [word, ...]` under "
                f'`metadata:`, or --metadata \'{{"{key}": ["word", ...]}}\'.'
            )
        return tuple(dict.fromkeys(words))

    @property
    def layers(self) -> tuple[str | int, ...]:
        """The layers of the options."""
        return self.options.layer if isinstance(self.options.layer, tuple) else (self.options.layer,)

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
            self.fewshot_context(doc, num_fewshot=0, gen_prefix=self.doc_to_prefix(doc), **context)
            self._instances += self._state_requests(doc, metadata=(self.config.task, -1 - doc_id, 1))
        self._count_overlap()

    def construct_requests(self, doc: dict[str, Any], ctx: str | list[str], **kwargs: Any) -> list[Instance]:
        """Ask for the state of an evaluated document (lm_eval's hook)."""
        self._check_document(doc, kwargs["metadata"][1], self.eval_split)
        return self._state_requests(doc, metadata=kwargs["metadata"])

    def _state_requests(self, doc: Mapping[str, Any], *, metadata: tuple[Any, ...]) -> list[Instance]:
        """One request for each prompt."""
        wanted = {Feature(layer, self.options.pooling): None for layer in self.layers} | dict.fromkeys(self.kind.asked)
        # f(s) beside every other kind: the probe on it is what the others are compared with.
        if not self.kind.layers:
            wanted[features.F_OF_S] = None
        continuations = tuple(self.delimiter + word for word in self.words)
        requests = []
        for prompt, context in enumerate(self._contexts):
            self._active = prompt
            what = PromptRequest(
                continuations,
                tuple(wanted),
                document=self.document_span(doc, context),
                one_token=self.options.one_token_words,
            )
            requests.append(self.request(doc, context, prompt, what, metadata=metadata))
        self._active = 0
        return requests

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
        # The first request of a document stands for it.
        documents = [i for i in self._instances if i.doc_id is not None and i.idx == 0]
        trained = {i.doc[self.text_column] for i in documents if i.doc_id < 0}
        shared = sum(i.doc[self.text_column] in trained for i in documents if i.doc_id >= 0)
        self._report["overlap"] = shared
        if shared:
            # Loud once: the other kinds of a run have the same documents as the probe on f.
            level = logging.WARNING if self.kind.layers else logging.INFO
            logger.log(
                level, "%s: %d evaluated documents are also among the training documents.", self.task_name, shared
            )

    # -------------------------------------------------------------------------------------------- evaluation

    def evaluate_answers(self, instances: Mapping[int, Sequence[Instance]]) -> None:
        """Fit one probe for each prompt and seed, and predict."""
        labels = {doc_id: self.label_of(of_document[0].doc) for doc_id, of_document in instances.items()}
        tested = [doc_id for doc_id in instances if doc_id >= 0]
        trained = [doc_id for doc_id in instances if doc_id < 0]
        train_labels = np.array([labels[doc_id] for doc_id in trained])
        test_labels = np.array([labels[doc_id] for doc_id in tested])
        self._report |= {
            "features": self.FEATURES,
            "documents": len(tested),
            "majority_rate": scores.majority_rate(test_labels, len(self.classes)),
            "training_documents": [len(sample) for sample in self._samples],
            "cut_documents": sum(_was_cut(instances[doc_id]) for doc_id in tested),
            "cut_training_documents": sum(_was_cut(instances[doc_id]) for doc_id in trained),
            "options": _plain(asdict(self.options)),
        }
        position = {doc_id: place for place, doc_id in enumerate(trained)}
        samples = [np.array([position[-1 - int(doc)] for doc in sample]) for sample in self._samples]
        by_prompt = []
        for prompt, entry in enumerate(self._report["prompts"]):
            answers = Answers(
                train=[instances[doc_id][prompt].resps[0] for doc_id in trained],
                test=[instances[doc_id][prompt].resps[0] for doc_id in tested],
                train_texts=[instances[doc_id][prompt].args[0] for doc_id in trained],
                test_texts=[instances[doc_id][prompt].args[0] for doc_id in tested],
                words=self.words,
            )
            sets = self._feature_sets(answers)
            fits = self._fit(sets, answers, train_labels, samples)
            chosen = [_best_layer(fits, seed) for seed in range(len(samples))]
            log_probs = [sets[best].log_probabilities(fits[best][seed]) for seed, best in enumerate(chosen)]
            by_prompt.append(np.stack(log_probs, axis=1))
            entry |= self._describe_prompt(sets, fits, chosen, test_labels)
            is_low = scores.at_or_below_majority(entry["acc"], test_labels, len(self.classes))
            entry["at_or_below_majority"] = ["acc"] if is_low else []
            if not self.kind.layers:
                entry |= self._compare_with_f(answers, entry["acc"], train_labels, test_labels, samples)
                entry |= self._diagnose(answers, sets[0], train_labels, test_labels)
        self.warn_of_low_accuracy()
        keys = [tuple(instance.resps[0].key for instance in instances[doc_id]) for doc_id in tested]
        self.keep_items(keys, test_labels, self._metric_items(np.stack(by_prompt, axis=1), test_labels))

    def _feature_sets(self, answers: Answers) -> list[_Probed]:
        """What the probe sees: one set, or one for each layer of a sweep."""
        if not self.kind.layers:
            return [_Probed(self.kind.make(answers, self.quad_options))]
        layers = range(answers.source.num_hidden_states) if self.layers == (ALL_LAYERS,) else self.layers
        return [
            _Probed(features.states(answers, Feature(layer, self.options.pooling)), layer=layer) for layer in layers
        ]

    def _fit(
        self, sets: Sequence[_Probed], answers: Answers, labels: np.ndarray, samples: Sequence[np.ndarray]
    ) -> list[list[ProbeFit]]:
        """Fit every set under every seed; fits that another task of the run has made are taken from it."""
        known = _FITS.setdefault(answers.source, {})
        key = (
            tuple(probed.features.name for probed in sets),
            hash(tuple(answers.train_rows)),
            labels.tobytes(),
            tuple(sample.tobytes() for sample in samples),
            self.options.seeds,
            self.options.num_folds,
            self.options.c_grid,
        )
        if key not in known:
            known[key] = self._fit_all(sets, answers.source.device, labels, samples)
        return known[key]

    def _fit_all(
        self, sets: Sequence[_Probed], device: str, labels: np.ndarray, samples: Sequence[np.ndarray]
    ) -> list[list[ProbeFit]]:
        from harness_ext.evaluators.probe import fit_probes

        def fit(sample: np.ndarray | slice, seeds: Sequence[int]) -> list[list[ProbeFit]]:
            return fit_probes(
                (probed.features.make_train()[sample] for probed in sets),
                labels[sample],
                num_classes=len(self.classes),
                seeds=seeds,
                c_grid=self.options.c_grid,
                num_folds=self.options.num_folds,
                scaling=sets[0].features.scaling,
                total_variance=sets[0].features.total_variance,
                device=device,
            )

        if all(len(sample) == len(labels) for sample in samples):
            return fit(slice(None), self.options.seeds)
        by_seed = [fit(sample, [seed]) for sample, seed in zip(samples, self.options.seeds, strict=True)]
        return [[of_seed[place][0] for of_seed in by_seed] for place in range(len(sets))]

    def _describe_prompt(
        self, sets: Sequence[_Probed], fits: Sequence[Sequence[ProbeFit]], chosen: Sequence[int], labels: np.ndarray
    ) -> dict[str, Any]:
        """Accuracies and fits of one prompt, for the results JSON."""
        credit = self._credit(sets, fits, labels)
        accuracies = credit.mean(axis=0)
        probes = []
        for place, (best, seed) in enumerate(zip(chosen, self.options.seeds, strict=True)):
            fit = fits[best][place]
            layer = {"layer": sets[best].layer} if self.kind.layers else {}
            probes.append({"seed": seed, "acc": float(accuracies[best, place])} | layer | _describe(fit))
            logger.info("%s, seed %d: %s", self.task_name, seed, _summary(fit))
        result: dict[str, Any] = {"acc": float(np.mean([probe["acc"] for probe in probes])), "probes": probes}
        if len(credit) > 1:
            predicting = np.mean([credit[:, best, place] for place, best in enumerate(chosen)], axis=0)
            generator = np.random.default_rng(0)
            interval = scores.mean_interval(predicting, draws=metrics.INTERVAL_DRAWS, generator=generator)
            result["intervals_95"] = {"acc": [interval.low, interval.high]}
        if len(sets) > 1:
            result["layers"] = [
                {
                    "layer": probed.layer,
                    "acc": float(of_set.mean()),
                    "cv_accuracy": _mean_or_none([_cv_accuracy(fit) for fit in of_fits]),
                }
                for probed, of_set, of_fits in zip(sets, accuracies, fits, strict=True)
            ]
        return result | dict(sets[0].features.report)

    def _credit(self, sets: Sequence[_Probed], fits: Sequence[Sequence[ProbeFit]], labels: np.ndarray) -> np.ndarray:
        """Tie-aware accuracy, shape (documents, sets, seeds)."""
        credit = [[probed.credit(fit, labels) for fit in of_set] for probed, of_set in zip(sets, fits, strict=True)]
        return np.moveaxis(np.array(credit, dtype=np.float64), 2, 0)

    def _compare_with_f(
        self,
        answers: Answers,
        accuracy: float,
        train_labels: np.ndarray,
        test_labels: np.ndarray,
        samples: Sequence[np.ndarray],
    ) -> dict[str, Any]:
        """The probe on f(s) of the same documents, and the share of its gain over chance that these features recover."""
        from harness_ext.evaluators.theory import share_of_gain

        probed = _Probed(features.states(answers, features.F_OF_S))
        fits = self._fit([probed], answers, train_labels, samples)
        reference = float(self._credit([probed], fits, test_labels).mean())
        share = share_of_gain(accuracy, reference, self._report["majority_rate"])
        return {"f_accuracy": reference, "share_of_f_gain": share.value, "share_of_f_gain_reason": share.reason}

    def _diagnose(
        self, answers: Answers, probed: _Probed, train_labels: np.ndarray, test_labels: np.ndarray
    ) -> dict[str, Any]:
        """What the paper's theory asks of these features."""
        from harness_ext.evaluators import theory

        if self.FEATURES == "conditional_mean":
            f_of_s = features.states(answers, features.F_OF_S)
            fit = theory.affine_fit(
                f_of_s.make_train(),
                probed.features.make_train(),
                held_out=(f_of_s.make_test(), probed.features.make_test()),
            )
            return {"affine_fit_of_f": _plain(asdict(fit))}
        if self.FEATURES == "class_words":
            try:
                coefficients = theory.natural_coefficients(
                    np.exp(probed.features.make_train()[:MOST_ROWS]),
                    train_labels[:MOST_ROWS],
                    len(self.classes),
                    held_out=(np.exp(probed.features.make_test()), test_labels),
                )
            except ValueError as err:  # words of which one begins the other have no disjoint probabilities
                return {"natural_coefficients": {"reason": str(err)}}
            return {"natural_coefficients": _plain(asdict(coefficients))}
        return {}

    def _check_classes(self, labels: np.ndarray) -> None:
        counts = Counter(labels.tolist())
        missing = [name for label, name in enumerate(self.classes) if not counts[label]]
        if missing:
            raise ValueError(
                f"{self.config.dataset_path}, split {self.config.training_split!r}: no training document of class "
                f"{', '.join(map(repr, missing))} among {len(labels)}; every class of `doc_to_choice` needs one. Train on "
                "more documents (n_train, n_per_class), or correct `doc_to_choice`."
            )

    @staticmethod
    def summarise_run(tasks: Sequence[Any]) -> dict[str, Any]:
        """What the probes of a run say together, for the results JSON; see `engine.attach`."""
        reports = [
            ("/".join(filter(None, (task.config.dataset_path, task.config.dataset_name))), task._report)
            for task in tasks
            if isinstance(task, ProbeTask)
        ]
        rows = table.feature_rows(reports)
        return {"features": rows} if rows else {}

    def _metric_items(self, log_probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Sequence[Any]]:
        """One item a document for each metric, for log-probabilities (documents, prompts, seeds, classes); see the class."""
        predicted = log_probabilities.argmax(axis=3)
        best = log_probabilities == log_probabilities.max(axis=3, keepdims=True)
        right = np.take_along_axis(best, labels[:, np.newaxis, np.newaxis, np.newaxis], axis=3)[..., 0]
        credit = (right / best.sum(axis=3)).mean(axis=2)
        by_seed = [metrics.ensemble_accuracies(of_seed, labels) for of_seed in log_probabilities.transpose(2, 1, 0, 3)]
        ensembles = {name: np.mean([of_seed[name] for of_seed in by_seed], axis=0) for name in metrics.ENSEMBLES}
        runs = np.exp(log_probabilities).reshape(len(labels), -1, log_probabilities.shape[3])
        gold = labels.tolist()

        def with_gold(items: Iterable[Any]) -> list[Any]:
            return list(zip(gold, items, strict=True))

        return {
            "acc": credit.mean(axis=1).tolist(),
            "balanced_acc": with_gold(map(tuple, credit.tolist())),
            "macro_f1": with_gold(map(tuple, predicted.reshape(len(labels), -1).tolist())),
            "ece": with_gold(tuple(map(tuple, of_document)) for of_document in runs.tolist()),
            "majority_rate": gold,
            "f1": with_gold(predicted[:, 0, 0].tolist()),
            "mcc": with_gold(predicted[:, 0, 0].tolist()),
            **self.sweep_items(credit, ensembles),
        }


class ConditionalMeanProbe(ProbeTask):
    """A probe on the conditional mean features Φᵀp_f(·|s); reports the R² of the affine fit of f(s) to them."""

    FEATURES = "conditional_mean"


class ClassWordsProbe(ProbeTask):
    """A probe on log p_f of the label words; reports the natural-task coefficients (τ, B) of these words."""

    FEATURES = "class_words"


class SubsetWordsProbe(ProbeTask):
    """A probe on log p_f of a list of words that the task is about."""

    FEATURES = "subset_words"


class ProbabilitiesProbe(ProbeTask):
    """A probe on p_f of all words, along the directions in which it varies; see `evaluators.directions`."""

    FEATURES = "probabilities"


class RandomProjectionProbe(ProbeTask):
    """A probe on a random d-dimensional projection of p_f: what the conditional mean is worth without Φ."""

    FEATURES = "random_projection"


class QuadProbe(ProbeTask):
    """A probe on Quad features."""

    FEATURES = "quad"


_FITS: weakref.WeakKeyDictionary[Any, dict[Any, list[list[ProbeFit]]]] = weakref.WeakKeyDictionary()
"""Fits by the source of their features: every task of a run compares itself with the same probe on f(s)."""


class _Probed:
    """A feature set and what probes say of its evaluated documents."""

    def __init__(self, of_set: FeatureSet, layer: str | int = LAST_LAYER) -> None:
        self.features, self.layer = of_set, layer

    def log_probabilities(self, fit: ProbeFit) -> np.ndarray:
        """Of the classes, float64 of shape (n, K)."""
        return fit.log_probabilities(self.features.make_test())

    def credit(self, fit: ProbeFit, labels: np.ndarray) -> np.ndarray:
        """Tie-aware accuracy of each evaluated document, shape (n,)."""
        return scores.tie_aware_accuracy(self.log_probabilities(fit), labels).values


def _best_layer(fits: Sequence[Sequence[ProbeFit]], seed: int) -> int:
    """The set of highest cross-validation accuracy under a seed, of several the first; the last where there is no CV."""
    accuracies = [_cv_accuracy(of_set[seed]) for of_set in fits]
    known = [value for value in accuracies if value is not None]
    return accuracies.index(max(known)) if known else len(fits) - 1


def _cv_accuracy(fit: ProbeFit) -> float | None:
    return None if fit.cv_accuracy is None else fit.cv_accuracy[fit.c_grid.index(fit.c)]


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _was_cut(of_document: Sequence[Instance]) -> bool:
    return any(instance.resps[0].cut_tokens for instance in of_document)


def _plain(value: Any) -> Any:
    """Tuples as lists, for JSON to give back what it was given."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _describe(fit: ProbeFit) -> dict[str, Any]:
    """Everything about a fit but its weights, as plain types."""
    return {
        "C": fit.c,
        "cv_accuracy": _cv_accuracy(fit),
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
