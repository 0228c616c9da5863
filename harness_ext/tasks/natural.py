"""Natural tasks: classification recast as sentence completion, scored zero-shot by the probability of label words.

Source: Saunshi, Malladi, Arora (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.utils import ends_with_whitespace

from harness_ext import prompts
from harness_ext.contracts import PromptRequest, PromptStates, Span
from harness_ext.evaluators import natural, scores
from harness_ext.tasks.base import PromptTask, logger

__all__ = ["NaturalTask"]

MANY_TIES = 0.1
"""Share of tied documents from which accuracy says more about ties than about the model."""


class ClassScores(NamedTuple):
    """Log-scores of one document, each of shape (K,): as they are, minus the premise's, minus the documents' mean."""

    raw: np.ndarray
    pmi: np.ndarray | None
    batch: np.ndarray | None


class NaturalTask(PromptTask):
    """A task whose classes are words after a prompt.

    Metrics:
        acc: The class of highest score is the gold class; t tied classes share the point.
        acc_pmi: The same for scores minus those of the prompt without its document (domain-conditional PMI).
        acc_batch: The same for scores centred over the evaluated documents (batch calibration); it uses no labels.
        macro_f1, brier: Of the raw prediction and of the class probabilities normalised over the classes.
        brier_score, f1, mcc: lm_eval's own (f1 for two classes).
    """

    METRICS: ClassVar[frozenset[str]] = frozenset(
        {"acc", "acc_pmi", "acc_batch", "macro_f1", "brier", "brier_score", "f1", "mcc"}
    )

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._scores: dict[tuple[str, ...], ClassScores] = {}

    def _load_template(self, task: str) -> prompts.Prompt:
        option = self._prompt_option(task)
        if not isinstance(option, str):
            raise ValueError(
                f"{self._source()}: natural task {task!r} needs a prompt, found {option!r}. Give "
                f'--metadata \'{{"prompt": "{task.removeprefix("natural_")}/NAME"}}\'; `harness-ext prompts list` shows them.'
            )
        template = prompts.load_prompt(option)
        self.words = prompts.words_by_class(template, self.classes, label_column=self.label_column)
        self.class_of_word = np.repeat(np.arange(len(self.words)), [len(words) for words in self.words])
        return template

    def doc_to_choice(self, doc: Mapping[str, Any], doc_to_choice: Any = None) -> list[str]:
        """The first label word of each class: what answers few-shot examples."""
        return [words[0] for words in self.words]

    def construct_requests(self, doc: dict[str, Any], ctx: str | list[str], **kwargs: Any) -> list[Instance]:
        """Ask for all label words after the prompt, and after the prompt without its document (lm_eval's hook)."""
        assert isinstance(ctx, str)
        chat = kwargs.pop("apply_chat_template", False)
        kwargs.pop("chat_template", None)
        self._check_document(doc, kwargs["metadata"][1], self.eval_split)
        delimiter = self._delimiter(bool(chat))
        continuations = tuple(delimiter + word for words in self.words for word in words)
        span = self.document_span(doc, ctx)
        return [
            self.request(doc, ctx, 0, PromptRequest(continuations, document=span), **kwargs),
            self.request(doc, self._premise(doc, ctx, span), 1, PromptRequest(continuations), **kwargs),
        ]

    def _delimiter(self, chat: bool) -> str:
        """What stands between prompt and label word, by lm_eval's rule: nothing at the start of an assistant's turn."""
        prefix = self.config.gen_prefix
        if chat and (not prefix or ends_with_whitespace(prefix)):
            return ""
        return str(self.config.target_delimiter)

    def _premise(self, doc: Mapping[str, Any], context: str, span: Span | None) -> str:
        """The context without its document, examples and chat template kept."""
        if span is None:
            assert self.template is not None
            text, bare = self.template.render(doc).text, self.template.render_without_document(doc)
            for candidate in (text, text.strip()):
                head, found, tail = context.rpartition(candidate)
                if found:
                    return head + bare + tail
            return bare
        head, tail = context[: span.start], context[span.end :]
        return head + (tail.lstrip() if not head or head[-1].isspace() else tail)

    def evaluate_answers(self, instances: Mapping[int, Sequence[Instance]]) -> None:
        """Score the classes, with the calibrations."""
        documents = list(instances.values())
        answers, premises = ([pair[position].resps[0] for pair in documents] for position in (0, 1))
        raw, premise = (
            natural.class_log_scores([answer.log_probs for answer in column], self.class_of_word, len(self.classes))
            for column in (answers, premises)
        )
        pmi = None
        if np.isfinite(premise).all():
            pmi = natural.pmi_scores(raw, premise)
        else:
            self._report["acc_pmi"] = "not computed: after the prompt without its document a class has probability zero"
            logger.warning("%s: acc_pmi %s.", self.task_name, self._report["acc_pmi"])
        labels = [self.label_of(pair[0].doc) for pair in documents]
        everywhere = self.gather(
            [
                (answer.key, row, label, answer.cut_tokens > 0)
                for answer, row, label in zip(answers, raw, labels, strict=True)
            ]
        )
        all_raw = np.stack([row for _, row, _, _ in everywhere])
        # Centred over all evaluated documents, whichever rank computed them.
        batch_of: dict[str, np.ndarray] = {}
        if np.isfinite(all_raw).any(axis=0).all():
            batch_of = dict(zip((key for key, _, _, _ in everywhere), natural.centred_scores(all_raw), strict=True))
        else:
            self._report["acc_batch"] = "not computed: a class has probability zero after every document"
            logger.warning("%s: acc_batch %s.", self.task_name, self._report["acc_batch"])
        self._scores = {
            (answer.key, bare.key): ClassScores(raw[i], None if pmi is None else pmi[i], batch_of.get(answer.key))
            for i, (answer, bare) in enumerate(zip(answers, premises, strict=True))
        }
        tied = scores.tie_aware_accuracy(all_raw, [label for _, _, label, _ in everywhere]).num_tied
        if tied >= MANY_TIES * len(everywhere):
            logger.warning(
                "%s: degenerate, %d/%d documents tied between classes; they count 1/t for t tied classes. Are the label "
                "words right for this model? `harness-ext prompts check %s --model …` shows their tokens.",
                self.task_name,
                tied,
                len(everywhere),
                self.template.id if self.template is not None else "",
            )
        self._report |= {
            "documents": len(everywhere),
            "tied_documents": tied,
            "cut_documents": sum(was_cut for _, _, _, was_cut in everywhere),
            "premise": _premises_text(pair[1].args[0] for pair in documents),
            "mean_class_log_score": {
                name: round(float(column.mean()), 6) if np.isfinite(column).all() else None
                for name, column in zip(self.classes, all_raw.T, strict=True)
            },
        }

    def metric_items(self, gold: int, results: Sequence[PromptStates]) -> dict[str, Any]:
        """See the class."""
        found = self._scores[results[0].key, results[1].key]
        probabilities = natural.class_probabilities(found.raw[np.newaxis])
        predicted = int(found.raw.argmax())
        by_accuracy = {"acc": found.raw, "acc_pmi": found.pmi, "acc_batch": found.batch}
        accuracies = {
            name: float(scores.tie_aware_accuracy(values[np.newaxis], [gold]).values[0])
            for name, values in by_accuracy.items()
            if values is not None
        }
        return accuracies | {
            "macro_f1": (gold, (predicted,)),
            "brier": float(scores.brier(probabilities, [gold])[0]),
            "brier_score": (gold, probabilities[0].tolist()),
            "f1": (gold, predicted),
            "mcc": (gold, predicted),
        }


def _premises_text(premises: Any) -> str:
    """The premise, or how many different ones there are (few-shot examples differ from document to document)."""
    distinct = dict.fromkeys(premises)
    return next(iter(distinct)) if len(distinct) == 1 else f"{len(distinct)} different ones"
