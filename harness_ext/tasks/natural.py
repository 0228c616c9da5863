"""Natural tasks: classification recast as sentence completion, scored zero-shot by the probability of label words.

Source: Saunshi, Malladi, Arora (ICLR 2021). Calibrations: see `evaluators.natural`. The content-free inputs are those of Zhao
et al. (ICML 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance

from harness_ext import prompts
from harness_ext.contracts import PromptRequest, Span
from harness_ext.evaluators import natural, scores
from harness_ext.tasks.base import PromptTask, logger
from harness_ext.tasks.metrics import INTERVAL_DRAWS, ensemble_accuracies

__all__ = ["NaturalTask"]

MANY_TIES = 0.1
"""Share of tied documents from which accuracy says more about ties than about the model."""

CONTENT_FREE = ("N/A", "[MASK]")
"""What stands in for the document in `acc_context`, beside nothing at all."""

CALIBRATIONS = ("acc", "acc_pmi", "acc_batch", "acc_context")


class BarePrompts(NamedTuple):
    """What is asked of one document under one prompt, beside the prompt itself.

    Attributes:
        premise: The context without the document.
        content_free: The context with each of `CONTENT_FREE` for the document.
    """

    premise: str
    content_free: tuple[str, ...]


@dataclass(frozen=True)
class Calibrated:
    """Class log-scores of all documents under one prompt, by the accuracy that they give.

    Attributes:
        scores: Of shape (n, K); an accuracy that cannot be computed is missing.
        reasons: Why it is missing.
    """

    scores: dict[str, np.ndarray]
    reasons: dict[str, str]


class NaturalTask(PromptTask):
    """A task whose classes are words after a prompt.

    Metrics, each a mean over the prompts of a sweep:
        acc: The class of highest score is the gold class; t tied classes share the point.
        acc_pmi: The same for scores minus those of the prompt without its document (domain-conditional PMI).
        acc_batch: The same for scores centred over the evaluated documents (batch calibration); it uses no labels.
        acc_context: The same for scores minus those of the prompt with content-free documents (contextual calibration).
        balanced_acc, macro_f1, brier, ece: Of the raw scores and the class probabilities normalised over the classes.
        majority_rate: Share of the commonest class.
        brier_score, f1, mcc: lm_eval's own (f1 for two classes), of the `acc_ensemble` of a sweep.
    And for a sweep:
        acc_worst, acc_best: `acc` of the worst and the best prompt.
        acc_ensemble, acc_mixture: Of the mean of all prompts' class log-probabilities, and of their class probabilities.
        acc@NAME: `acc` of one prompt.
    """

    METRICS: ClassVar[frozenset[str]] = frozenset(
        {*CALIBRATIONS, "balanced_acc", "macro_f1", "brier", "ece", "majority_rate", "brier_score", "f1", "mcc"}
    )

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._bare: dict[int, list[BarePrompts]] = {}
        self._asked: set[tuple[str, tuple[str, ...]]] = set()
        self.warn_of_duplicates()

    def _load_templates(self, task: str) -> tuple[prompts.Prompt, ...]:
        option = self._prompt_option(task)
        if not isinstance(option, str | list | tuple) or not option:
            raise ValueError(
                f"{self._source()}: natural task {task!r} needs a prompt, found {option!r}. Give "
                f'--metadata \'{{"prompt": "{task.removeprefix("natural_")}/NAME"}}\'; `harness-ext prompts list` shows them.'
            )
        names = self._resolve_prompts(option, with_label_words=True)
        templates = tuple(self._load_prompt(name) for name in names)
        self._words = [
            prompts.words_by_class(template, self.classes, label_column=self.label_column) for template in templates
        ]
        self._class_of_word = [
            np.repeat(np.arange(len(words)), [len(of_class) for of_class in words]) for words in self._words
        ]
        return templates

    def doc_to_choice(self, doc: Mapping[str, Any], doc_to_choice: Any = None) -> list[str]:
        """The first label word of each class: what answers few-shot examples."""
        return [words[0] for words in self._words[self._active]]

    def build_all_requests(self, **kwargs: Any) -> None:
        """Make the requests of the evaluated documents."""
        self._bare, self._asked = {}, set()
        super().build_all_requests(**kwargs)

    def construct_requests(self, doc: dict[str, Any], ctx: str | list[str], **kwargs: Any) -> list[Instance]:
        """Ask for all label words after each prompt, and after the prompts without their document (lm_eval's hook).

        Prompts without a document are the same for many documents: the first of them asks.
        """
        kwargs.pop("apply_chat_template", None)
        kwargs.pop("chat_template", None)
        doc_id = kwargs["metadata"][1]
        self._check_document(doc, doc_id, self.eval_split)
        main, bare = [], []
        self._bare[doc_id] = []
        for prompt, context in enumerate(self._contexts):
            self._active = prompt
            continuations = tuple(self.delimiter + word for words in self._words[prompt] for word in words)
            span = self.document_span(doc, context)
            main.append((context, PromptRequest(continuations, document=span)))
            of_prompt = BarePrompts(
                self._without_document(doc, context, span),
                tuple(self._with_document(doc, context, span, text) for text in CONTENT_FREE),
            )
            self._bare[doc_id].append(of_prompt)
            documents = [None, *(span and Span(span.start, span.start + len(text)) for text in CONTENT_FREE)]
            for text, document in zip((of_prompt.premise, *of_prompt.content_free), documents, strict=True):
                if (text, continuations) not in self._asked:
                    self._asked.add((text, continuations))
                    bare.append((text, PromptRequest(continuations, document=document)))
        self._active = 0
        return [self.request(doc, text, idx, what, **kwargs) for idx, (text, what) in enumerate(main + bare)]

    def _with_document(self, doc: Mapping[str, Any], context: str, span: Span | None, document: str) -> str:
        """The context with another document, examples and chat template kept."""
        if span is not None:
            return context[: span.start] + document + context[span.end :]
        assert self.template is not None
        name = self.template.document_variable(doc)
        other = self.template.render({**doc, name: document} if name is not None else doc).text
        return self._replaced(doc, context, other)

    def _without_document(self, doc: Mapping[str, Any], context: str, span: Span | None) -> str:
        if span is None:
            assert self.template is not None
            return self._replaced(doc, context, self.template.render_without_document(doc))
        head, tail = context[: span.start], context[span.end :]
        return head + (tail.lstrip() if not head or head[-1].isspace() else tail)

    def _replaced(self, doc: Mapping[str, Any], context: str, prompt: str) -> str:
        """The context with another rendering of the prompt."""
        text = self.rendered(doc).text
        for candidate in (text, text.strip()):
            head, found, tail = context.rpartition(candidate)
            if found:
                return head + prompt + tail
        return prompt

    def evaluate_answers(self, instances: Mapping[int, Sequence[Instance]]) -> None:
        """Score the classes under each prompt, with the calibrations."""
        num_prompts = len(self.templates)
        bare = {
            (instance.args[0], tuple(instance.args[1]["continuations"])): instance.resps[0]
            for of_document in instances.values()
            for instance in of_document[num_prompts:]
        }
        rows = []
        for doc_id, of_document in instances.items():
            of_prompts = [instance.resps[0] for instance in of_document[:num_prompts]]
            reference = [
                [
                    bare[text, tuple(instance.args[1]["continuations"])].log_probs
                    for text in (asked.premise, *asked.content_free)
                ]
                for instance, asked in zip(of_document[:num_prompts], self._bare[doc_id], strict=True)
            ]
            rows.append(
                (
                    tuple(answer.key for answer in of_prompts),
                    self.label_of(of_document[0].doc),
                    any(answer.cut_tokens for answer in of_prompts),
                    [(answer.log_probs, *of_prompt) for answer, of_prompt in zip(of_prompts, reference, strict=True)],
                    [asked.premise for asked in self._bare[doc_id]],
                )
            )
        labels = np.array([label for _, label, *_ in rows])
        by_prompt = [
            self._calibrate([of_prompts[prompt] for *_, of_prompts, _ in rows], self._class_of_word[prompt])
            for prompt in range(num_prompts)
        ]
        premises = zip(*(of_document for *_, of_document in rows), strict=True)
        self._report |= {
            "documents": len(rows),
            "cut_documents": sum(was_cut for _, _, was_cut, *_ in rows),
            "majority_rate": scores.majority_rate(labels, len(self.classes)),
            "prompts": [
                described | self._describe_scores(calibrated, labels, _the_only_one(of_prompt))
                for described, calibrated, of_prompt in zip(self._report["prompts"], by_prompt, premises, strict=True)
            ],
        }
        self._warn()
        self.keep_items([keys for keys, *_ in rows], labels, self._metric_items(by_prompt, labels))

    def _calibrate(self, log_probs: list[Any], class_of_word: np.ndarray) -> Calibrated:
        """Scores of one prompt from (prompt, premise, content-free ...) log-probabilities of the words, by document."""
        of_words = np.array(log_probs, dtype=np.float64)
        num_documents, num_contexts, _ = of_words.shape
        of_classes = natural.class_log_scores(
            of_words.reshape(num_documents * num_contexts, -1), class_of_word, len(self.classes)
        ).reshape(num_documents, num_contexts, -1)
        raw, premise, content_free = of_classes[:, 0], of_classes[:, 1], of_classes[:, 1:]
        found, reasons = {"acc": raw}, {}
        if np.isfinite(premise).all():
            found["acc_pmi"] = natural.pmi_scores(raw, premise)
        else:
            reasons["acc_pmi"] = "after the prompt without its document a class has probability zero"
        if np.isfinite(raw).any(axis=0).all():
            found["acc_batch"] = natural.centred_scores(raw)
        else:
            reasons["acc_batch"] = "a class has probability zero after every document"
        possible = np.isfinite(content_free)
        if possible.any(axis=1).all() and possible.any(axis=2).all():
            found["acc_context"] = natural.context_scores(raw, content_free)
        else:
            reasons["acc_context"] = "after content-free documents a class has probability zero"
        return Calibrated(found, reasons)

    def _describe_scores(self, calibrated: Calibrated, labels: np.ndarray, premise: str) -> dict[str, Any]:
        """Metrics of one prompt with intervals, for the results JSON."""
        raw, num_classes = calibrated.scores["acc"], len(self.classes)
        by_name = {key: scores.tie_aware_accuracy(values, labels) for key, values in calibrated.scores.items()}
        predicted = raw.argmax(axis=1)
        probabilities = natural.class_probabilities(raw)
        brier = scores.brier(probabilities, labels)
        credit = by_name["acc"].values
        metrics = {key: float(accuracy.values.mean()) for key, accuracy in by_name.items()} | {
            "balanced_acc": scores.balanced_accuracy(credit, labels, num_classes),
            "macro_f1": scores.macro_f1(labels, predicted, num_classes),
            "brier": float(brier.mean()),
            "ece": scores.expected_calibration_error(probabilities, labels),
        }
        intervals: dict[str, list[float]] = {}
        if len(labels) > 1:
            draws: dict[str, Any] = {"draws": INTERVAL_DRAWS, "generator": np.random.default_rng(0)}
            found = {key: scores.mean_interval(accuracy.values, **draws) for key, accuracy in by_name.items()} | {
                "balanced_acc": scores.balanced_accuracy_interval(credit, labels, num_classes, **draws),
                "macro_f1": scores.macro_f1_interval(labels, predicted, num_classes, **draws),
                "brier": scores.mean_interval(brier, **draws),
            }
            intervals = {key: [interval.low, interval.high] for key, interval in found.items()}
        low = [key for key in by_name if scores.at_or_below_majority(metrics[key], labels, num_classes)]
        return {
            "metrics": metrics,
            "intervals_95": intervals,
            "at_or_below_majority": low,
            "not_computed": calibrated.reasons,
            "tied_documents": by_name["acc"].num_tied,
            "premise": premise,
            "mean_class_log_score": {
                label: round(float(column.mean()), 6) if np.isfinite(column).all() else None
                for label, column in zip(self.classes, raw.T, strict=True)
            },
        }

    def _warn(self) -> None:
        """Say once what makes accuracies worth little, naming the prompts."""
        described, documents = self._report["prompts"], self._report["documents"]
        self.warn_of_low_accuracy()
        tied = [entry for entry in described if entry["tied_documents"] >= MANY_TIES * documents]
        if tied:
            logger.warning(
                "%s: degenerate, documents tied between classes: %s. They count 1/t for t tied classes. Are the label words "
                "right for this model? `harness-ext prompts check %s --model …` shows their tokens.",
                self.task_name,
                ", ".join(f"{entry['tied_documents']}/{documents} under {entry['name']}" for entry in tied),
                tied[0]["id"],
            )
        for entry in described:
            for name, reason in entry["not_computed"].items():
                logger.warning("%s, %s: %s not computed: %s.", self.task_name, entry["name"], name, reason)

    def _metric_items(self, by_prompt: Sequence[Calibrated], labels: np.ndarray) -> dict[str, Sequence[Any]]:
        """One item a document for each metric; see the class."""
        credit = {
            name: np.stack(
                [scores.tie_aware_accuracy(of_prompt.scores[name], labels).values for of_prompt in by_prompt],
                axis=1,
            )
            for name in CALIBRATIONS
            if all(name in of_prompt.scores for of_prompt in by_prompt)
        }
        raw = np.stack([of_prompt.scores["acc"] for of_prompt in by_prompt])  # (prompts, documents, classes)
        probabilities = np.stack([natural.class_probabilities(of_prompt) for of_prompt in raw])
        brier = np.mean([scores.brier(of_prompt, labels) for of_prompt in probabilities], axis=0)
        together = natural.ensemble_scores(raw, "log")
        gold = labels.tolist()

        def with_gold(items: Iterable[Any]) -> list[Any]:
            return list(zip(gold, items, strict=True))

        return {
            **{name: values.mean(axis=1).tolist() for name, values in credit.items()},
            "balanced_acc": with_gold(map(tuple, credit["acc"].tolist())),
            "macro_f1": with_gold(map(tuple, raw.argmax(axis=2).T.tolist())),
            "brier": brier.tolist(),
            "ece": with_gold(tuple(map(tuple, of_document)) for of_document in probabilities.swapaxes(0, 1).tolist()),
            "majority_rate": gold,
            "brier_score": with_gold(natural.class_probabilities(together).tolist()),
            "f1": with_gold(together.argmax(axis=1).tolist()),
            "mcc": with_gold(together.argmax(axis=1).tolist()),
            **self.sweep_items(credit["acc"], ensemble_accuracies(raw, labels)),
        }


def _the_only_one(premises: Sequence[str]) -> str:
    """The premise, or how many different ones there are (few-shot examples differ from document to document)."""
    distinct = set(premises)
    return premises[0] if len(distinct) == 1 else f"{len(distinct)} different ones"
