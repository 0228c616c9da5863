"""What natural and probe tasks share: documents with labels, prompts, requests to the engine, metrics.

A task is an ordinary lm_eval YAML: `doc_to_text` names the column of the document, `doc_to_target` the column of the label,
`doc_to_choice` lists the classes in the order of the labels (or, for a column of strings, its values); without it the classes
are what the column `label_text` of the training split calls the labels. Our own options live under `metadata`, the only key
where lm_eval accepts what it does not know, so `--metadata` overrides them for one run:

    prompt      id or path of the prompt template, or a pattern or a list of them: a sweep, whose prompts are evaluated in one
                pass; a mapping from task name to any of these sets it task by task
    eval_split  split to evaluate, instead of the YAML's
    report      not an option: what the run found out about itself, written into the results JSON

lm_eval calls, in this order: the constructor, `build_all_requests`, the engine with all tasks' requests, `apply_filters`
(where a task sees all its answers at once), and `process_results` for each document. Of several processes, rank 0 alone
evaluates; see `tasks.whole`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
from lm_eval.api import samplers
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.api.utils import ends_with_whitespace
from lm_eval.tasks._yaml_loader import load_yaml

from harness_ext import prompts
from harness_ext.contracts import PromptRequest, PromptStates, Span
from harness_ext.engine.attach import REQUEST_TYPE
from harness_ext.tasks import metrics
from harness_ext.tasks.data import LazySplits, data_folders, open_dataset
from harness_ext.tasks.options import check_settings
from harness_ext.tasks.whole import WholeTask

__all__ = ["PromptTask"]

logger = logging.getLogger("lm_eval.harness_ext.tasks")

HIDDEN_LABEL = -1

LABEL_NAMES = "label_text"
"""Column with the names of the labels, in datasets that have one."""


class PromptTask(WholeTask):
    """Base of the tasks; see the module.

    Raises:
        ValueError: If the evaluated split has no labels, or labels that are not among the classes, or the YAML asks for a
            metric that the task does not have.
        KeyError: If the prompt does not exist.
    """

    NEEDS_STATES: ClassVar[bool] = False
    """Whether the task needs f(s), which only transformers models give."""

    METRICS: ClassVar[frozenset[str]] = frozenset()
    """Metrics the task can compute, beside those of the `evaluate` library."""

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        settings = {key: value for key, value in config.items() if key != "class"}
        check_settings(settings)
        self._metadata: dict[str, Any] = dict(settings.get("metadata") or {})
        self._metadata.pop("report", None)
        settings["metadata"] = self._metadata
        name = settings.get("task")
        for key in ("doc_to_text", "doc_to_target", "dataset_path"):
            if not isinstance(settings.get(key), str):
                raise ValueError(f"{self._source()}: task {name!r} needs `{key}:`, found {settings.get(key)!r}.")
        if settings.get("doc_to_choice") is None:
            settings["doc_to_choice"] = self._classes_of_data(settings)
        classes = settings["doc_to_choice"]
        if not isinstance(classes, list) or len(classes) < 2:
            raise ValueError(
                f"{self._source()}: task {name!r} needs `doc_to_choice:` with the names of at least two classes, in the "
                f"order of the labels, or a training split with them in a column {LABEL_NAMES!r}; found {classes!r}."
            )
        sizes = self._metadata.get("split_sizes") or {}
        if not isinstance(sizes, Mapping) or not all(type(rows) is int for rows in sizes.values()):
            raise ValueError(
                f"{self._source()}: `split_sizes:` of task {name!r} takes the published number of rows of each split, such "
                f"as {{train: 120000, test: 7600}}; found {sizes!r}."
            )
        self._split_sizes: Mapping[str, int] = sizes
        if (split := self._metadata.get("eval_split")) is not None:
            settings["test_split"] = str(split)
        self.classes: tuple[str, ...] = tuple(str(name) for name in classes)
        self.text_column: str = settings["doc_to_text"]
        self.label_column: str = settings["doc_to_target"]
        self.templates = self._load_templates(str(name))
        self._active = 0
        self._contexts: list[str] = []
        self._rendered: dict[int, tuple[Mapping[str, Any], prompts.Rendered]] = {}
        self._report: dict[str, Any] = {}
        self._row_of: dict[tuple[tuple[str, ...], int], int] = {}
        self._items: Mapping[str, Sequence[Any]] = {}
        self._chat = False
        settings["metric_list"] = self._complete_metrics(str(name), settings.get("metric_list"))
        super().__init__(config=settings, **kwargs)
        # lm_eval checks the configured output type against its own four, and counts padding by this attribute.
        self.OUTPUT_TYPE = REQUEST_TYPE  # type: ignore[assignment]
        self._bind_aggregations()

    # ------------------------------------------------------------------------------------------------- options

    def _source(self) -> str:
        return str(self._metadata.get("config_source", "task config"))

    @property
    def _pretrained(self) -> str | None:
        """The evaluated model, where it has a name."""
        pretrained = self._metadata.get("pretrained")
        return pretrained if isinstance(pretrained, str) else None

    def _classes_of_data(self, settings: Mapping[str, Any]) -> list[str] | None:
        """What `label_text` of the training split calls the labels 0 … K - 1; None where it does not name all of them."""
        split, column = settings.get("training_split"), settings["doc_to_target"]
        if split is None:
            return None
        rows = open_dataset(
            settings["dataset_path"],
            settings.get("dataset_name"),
            pretrained=self._pretrained,
            options=settings.get("dataset_kwargs"),
        )[split]
        if not {column, LABEL_NAMES} <= set(rows.column_names):
            return None
        names = dict(zip(rows[column], rows[LABEL_NAMES], strict=True))
        return [names[label] for label in range(len(names))] if names.keys() == set(range(len(names))) else None

    def _resolve_prompts(self, option: str | Sequence[str], *, with_label_words: bool = False) -> tuple[str, ...]:
        return prompts.resolve_prompts(
            option, with_label_words=with_label_words, data_folders=data_folders(self._pretrained)
        )

    def _load_prompt(self, name: str) -> prompts.Prompt:
        return prompts.load_prompt(name, data_folders=data_folders(self._pretrained))

    def _load_templates(self, task: str) -> tuple[prompts.Prompt | None, ...]:
        """The prompts of this task, at least one; None stands for the bare document."""
        raise NotImplementedError

    @property
    def template(self) -> prompts.Prompt | None:
        """The prompt that contexts are being built with."""
        return self.templates[self._active]

    @property
    def sweep_names(self) -> tuple[str, ...]:
        """A name for each prompt of a sweep, for its metrics: the last part of its id where that is unique."""
        ids = [str(template.id) if template is not None else "document" for template in self.templates]
        short = [name.rpartition("/")[2].removesuffix(".jinja") for name in ids]
        # lm_eval separates the name of a metric from that of its filter by a comma.
        return tuple(
            (last if short.count(last) == 1 else name).replace(",", "_") for name, last in zip(ids, short, strict=True)
        )

    def _prompt_option(self, task: str) -> Any:
        option = self._metadata.get("prompt")
        if not isinstance(option, Mapping):
            return option
        return option[task] if task in option else self._prompt_of_yaml()

    def _prompt_of_yaml(self) -> Any:
        """The prompt of the YAML itself, which a mapping by `--metadata` has replaced."""
        if not Path(self._source()).is_file():
            return None
        prompt = load_yaml(self._source(), resolve_func=False).get("metadata", {}).get("prompt")
        return None if isinstance(prompt, Mapping) else prompt

    def _complete_metrics(self, task: str, entries: Any) -> list[dict[str, Any]]:
        """Check `metric_list`, and give metrics of the `evaluate` library what lm_eval needs to accept them."""
        result = []
        for entry in entries or [{"metric": name} for name in ("acc", "macro_f1")]:
            name = entry.get("metric")
            if entry.get("hf_evaluate"):
                entry = {"aggregation": "mean", "higher_is_better": True, **entry}
            elif name == "f1" and len(self.classes) > 2:
                raise ValueError(
                    f"{self._source()}: task {task!r} has {len(self.classes)} classes, and lm_eval's f1 is for two. Use "
                    "`macro_f1`."
                )
            elif name not in self.METRICS:
                raise ValueError(
                    f"{self._source()}: task {task!r} has no metric {name!r}. It has {', '.join(sorted(self.METRICS))}, and "
                    f"those of the evaluate library with `hf_evaluate: true`."
                )
            result.append(entry)
        return result

    def _bind_aggregations(self) -> None:
        for name in metrics.OF_CLASSES:
            if name in self._metric_fn_list:
                self._aggregation_list[name] = metrics.OF_CLASSES[name](len(self.classes))
        if len(self.templates) > 1 and "bypass" not in self._metric_fn_list:
            for name, aggregation in metrics.of_sweep(self.sweep_names).items():
                self._metric_fn_list[name] = metrics.pass_through
                self._metric_fn_kwargs[name] = {}
                self._aggregation_list[name] = aggregation
                self._higher_is_better[name] = True
        self._of_evaluate = [entry["metric"] for entry in self.config.metric_list or [] if entry.get("hf_evaluate")]
        for name in self._of_evaluate:
            compute = self._metric_fn_list[name] or metrics.load_evaluate_metric(name, source=self._source())
            self._aggregation_list[name] = functools.partial(
                metrics.aggregate_evaluate_metric, name=name, compute=compute, options=self._metric_fn_kwargs[name]
            )

    # ----------------------------------------------------------------------------------------------- documents

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Open the dataset (lm_eval's hook); see `tasks.data`."""
        self.dataset: LazySplits = open_dataset(
            self.config.dataset_path,
            self.config.dataset_name,
            pretrained=self._pretrained,
            options=dataset_kwargs,
        )
        self._report["data"] = self.dataset.source
        # Here, since lm_eval's constructor goes on to try the first document, whatever its label.
        self._check_labels()

    @property
    def eval_split(self) -> str:
        """Name of the evaluated split."""
        split = self.config.test_split or self.config.validation_split
        if split is None:
            raise ValueError(f"{self._source()}: needs `test_split:` or `validation_split:`.")
        return str(split)

    def fewshot_docs(self) -> None:
        """No documents at start-up: lm_eval would list the whole training split, needed or not; see `sampler`."""
        return

    @functools.cached_property
    def sampler(self) -> samplers.ContextSampler:
        """Draws few-shot examples, the same ones as lm_eval would."""
        chosen = self.fewshot_cfg.sampler
        sampler = samplers.get_sampler(chosen) if isinstance(chosen, str) else chosen
        return sampler(_Documents(lambda: ConfigurableTask.fewshot_docs(self)))

    def label_of(self, doc: Mapping[str, Any]) -> int:
        """Class index of a document, in 0..K-1.

        Raises:
            ValueError: If the label is hidden (-1) or none of the classes.
        """
        value = doc[self.label_column]
        if isinstance(value, str) and value in self.classes:
            return self.classes.index(value)
        if isinstance(value, int) and 0 <= value < len(self.classes):
            return int(value)
        raise ValueError(
            f"{self.config.dataset_path}: column {self.label_column!r} has {value!r}, expected 0 to {len(self.classes) - 1} "
            f"or one of {', '.join(map(repr, self.classes))}. Correct `doc_to_choice` or `doc_to_target` in {self._source()}."
        )

    def _check_labels(self) -> None:
        name = f"{self.config.dataset_path}, split {self.eval_split!r}"
        docs = self.eval_docs
        for column in (self.text_column, self.label_column):
            if column not in docs.column_names:
                raise ValueError(
                    f"{name}: no column {column!r}, found {', '.join(docs.column_names)}. Correct `doc_to_text` and "
                    f"`doc_to_target` in {self._source()}."
                )
        values = list(docs[self.label_column])
        hidden = sum(value == HIDDEN_LABEL or value is None for value in values)
        if hidden:
            raise ValueError(
                f"{name}: {hidden} of {len(values)} documents have no label ({HIDDEN_LABEL}), so nothing can be scored. "
                f'Evaluate a split with labels: --metadata \'{{"eval_split": "validation"}}\'.'
            )
        for value in {repr(value): value for value in values}.values():  # a list is no label, and cannot be hashed
            self.label_of({self.label_column: value})

    def _check_document(self, doc: Mapping[str, Any], doc_id: int, split: str) -> None:
        text = doc[self.text_column]
        if not isinstance(text, str) or not text.strip():
            doc_id = self._chosen[doc_id] if self._chosen else doc_id  # lm_eval numbers chosen documents from 0
            raise ValueError(
                f"{self.config.dataset_path}, split {split!r}, document {doc_id}: column {self.text_column!r} is empty "
                f"({text!r}), so there is nothing to evaluate. Leave it out with `process_docs:` in the task's YAML, or "
                "choose other documents with --samples."
            )

    # ------------------------------------------------------------------------------------------------- prompts

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """The prompt of a document, without few-shot examples (lm_eval's hook)."""
        if doc[self.text_column] is None:
            return ""  # refused, by its number, in `construct_requests`
        return self.rendered(doc).text

    def rendered(self, doc: Mapping[str, Any]) -> prompts.Rendered:
        """The active prompt of a document, and where the document stands in it.

        Each prompt keeps its last, since lm_eval and we ask for it in turns.
        """
        kept = self._rendered.get(self._active)
        if kept is None or kept[0] is not doc:
            text = str(doc[self.text_column])
            whole = prompts.Rendered(text, Span(0, len(text)))
            kept = (doc, whole if self.template is None else self.template.render(doc))
            self._rendered[self._active] = kept
        return kept[1]

    def fewshot_context(self, doc: dict[str, Any], *args: Any, **kwargs: Any) -> str | list[str]:
        """The context of a document (lm_eval's hook), under each prompt of a sweep with the same few-shot examples.

        lm_eval passes the first on to `construct_requests`, which finds all of them in `_contexts`.
        """
        sampler = self.sampler if (args or kwargs.get("num_fewshot")) and len(self.templates) > 1 else None
        drawn = None if sampler is None else sampler.rnd.getstate()
        self._contexts = []
        for prompt in range(len(self.templates)):
            self._active = prompt
            if sampler is not None:
                sampler.rnd.setstate(drawn)
            context = super().fewshot_context(doc, *args, **kwargs)
            assert isinstance(context, str), "our tasks have one context a document"
            self._contexts.append(context)
        self._active = 0
        return self._contexts[0]

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> int:
        """The class index of a document (lm_eval's hook)."""
        return self.label_of(doc)

    def doc_to_choice(self, doc: Mapping[str, Any], doc_to_choice: Any = None) -> list[str]:
        """What answers few-shot examples, one string a class (lm_eval's hook)."""
        return list(self.classes)

    def build_all_requests(
        self, *, cache_requests: bool = False, rewrite_requests_cache: bool = False, **kwargs: Any
    ) -> None:
        """Make the requests of the evaluated documents.

        lm_eval's cache of requests knows neither template nor label words and would serve old prompts, so it is not used;
        making the requests takes less time than reading that cache.
        """
        self._chat = bool(kwargs.get("apply_chat_template"))
        self._chosen = sorted(set(kwargs.get("samples") or ()))
        super().build_all_requests(**kwargs)

    @property
    def delimiter(self) -> str:
        """What stands between prompt and word, by lm_eval's rule: nothing at the start of an assistant's turn."""
        prefix = self.config.gen_prefix
        if self._chat and (not prefix or ends_with_whitespace(prefix)):
            return ""
        return str(self.config.target_delimiter)

    def document_span(self, doc: Mapping[str, Any], context: str) -> Span | None:
        """Where the document stands in a context of the active prompt, between few-shot examples and a chat template."""
        text, span = self.rendered(doc)
        if span is None:
            return None
        # Chat templates trim what they are given. The evaluated prompt is the last occurrence: examples come before it.
        for candidate in (text, text.strip()):
            start = context.rfind(candidate)
            if start >= 0:
                shift = start - (len(text) - len(text.lstrip()) if candidate is not text else 0)
                return Span(max(span.start + shift, start), min(span.end + shift, start + len(candidate)))
        return None

    def request(self, doc: Mapping[str, Any], context: str, idx: int, what: PromptRequest, **kwargs: Any) -> Instance:
        """One request to the engine."""
        return Instance(
            REQUEST_TYPE,
            doc=doc if isinstance(doc, dict) else dict(doc),
            arguments=(context, what.to_argument()),
            idx=idx,
            **kwargs,
        )  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------- results

    def evaluate_all(self) -> None:
        """Evaluate, and write down what the run has found out about itself."""
        self._report["prompts"] = self.describe_prompts()
        self._note_sample()
        if "bypass" not in self._metric_fn_list:  # --predict_only
            by_document: dict[int, list[Instance]] = {}
            for instance in self._instances or []:
                by_document.setdefault(int(instance.doc_id or 0), []).append(instance)
            self.evaluate_answers(by_document)
        self._metadata["report"] = self._report
        self.config.metadata = self._metadata

    def evaluate_answers(self, instances: Mapping[int, Sequence[Instance]]) -> None:
        """Compute all metrics and call `keep_items`: instances by doc_id, in the order in which they were made."""
        raise NotImplementedError

    def describe_prompts(self) -> list[dict[str, Any]]:
        """What identifies each prompt, for the results JSON; for the bare document its name only."""
        return [
            {"name": name}
            if template is None
            else {
                "name": name,
                "id": template.id,
                "digest": template.digest,
                "template": template.source,
                "label_words": {label: list(words) for label, words in template.label_words.items()},
            }
            for name, template in zip(self.sweep_names, self.templates, strict=True)
        ]

    def _note_sample(self) -> None:
        """Report and warn where a split is not as large as the YAML's `split_sizes` say that the published one is."""
        published, loaded = self._split_sizes, self.dataset
        other = {
            split: f"{len(loaded[split]):,} of {published[split]:,}"
            for split in sorted(loaded)
            if split in published and len(loaded[split]) != published[split]
        }
        if other:
            self._report["sample"] = other
            logger.warning(
                "%s: this copy of %s is not the published one (rows of %s); figures on it do not compare with published ones.",
                self.task_name,
                self.config.dataset_path,
                "; ".join(f"{split}: {rows}" for split, rows in other.items()),
            )

    def warn_of_duplicates(self) -> None:
        """Say which prompts of a sweep are the same text with the same words, so that they count twice."""
        of_sweep = [template for template in self.templates if template is not None]
        found = [list(ids) for ids in prompts.duplicate_prompts(of_sweep)]
        if found:
            self._report["duplicate_prompts"] = found
            logger.warning(
                "%s: prompts of the same text and words: %s. Each counts in the means of the sweep.",
                self.task_name,
                "; ".join(" = ".join(ids) for ids in found),
            )

    def warn_of_low_accuracy(self) -> None:
        """Say once under which prompts accuracy is no better than always saying the commonest class."""
        low = [entry["name"] for entry in self._report["prompts"] if "acc" in entry["at_or_below_majority"]]
        if low:
            logger.warning(
                "%s: acc is not above the share of the commonest class, %.4f (prompt: %s).",
                self.task_name,
                self._report["majority_rate"],
                ", ".join(low),
            )

    def sweep_items(self, accuracies: np.ndarray, ensembles: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
        """Items of the metrics of a sweep; none for one prompt.

        Args:
            accuracies: Of each document under each prompt, shape (n, T).
            ensembles: Of each document by all prompts together, shape (n,), by name of the metric.
        """
        if len(self.templates) == 1:
            return {}
        values = list(map(tuple, accuracies.tolist()))
        named = {f"acc@{name}": column for name, column in zip(self.sweep_names, accuracies.T.tolist(), strict=True)}
        return {"acc_worst": values, "acc_best": values} | {k: v.tolist() for k, v in ensembles.items()} | named

    def keep_items(
        self, keys: Sequence[tuple[str, ...]], labels: np.ndarray, items: Mapping[str, Sequence[Any]]
    ) -> None:
        """Keep what `process_results` will hand to lm_eval.

        Args:
            keys: For each document those of the answers under each prompt.
            labels: Gold classes, shape (n,).
            items: For each of `METRICS` that can be computed, one item a document.
        """
        self._row_of = {key: row for row, key in enumerate(zip(keys, labels.tolist(), strict=True))}
        self._items = items

    def process_results(self, doc: Mapping[str, Any], results: Sequence[PromptStates]) -> dict[str, Any]:
        """Items of the configured metrics for one document (lm_eval's hook)."""
        if "bypass" in self._metric_fn_list:
            return {}
        row = self._row_of[tuple(answer.key for answer in results[: len(self.templates)]), self.label_of(doc)]
        source = {name: "macro_f1" if name in self._of_evaluate else name for name in self._metric_fn_list}
        return {name: self._items[column][row] for name, column in source.items() if column in self._items}


class _Documents(Sequence[Mapping[str, Any]]):
    """A split as a sequence that is loaded when it is first read; random.sample wants a sequence."""

    def __init__(self, load: Callable[[], datasets.Dataset | Sequence[Mapping[str, Any]]]) -> None:
        self._load = load

    @functools.cached_property
    def _rows(self) -> Any:
        rows = self._load()
        if rows is None:
            raise ValueError("--num_fewshot needs `training_split:` or `fewshot_split:` in the task's YAML.")
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        # A slice of a Dataset is a mapping of columns.
        return [self[i] for i in range(*index.indices(len(self)))] if isinstance(index, slice) else self._rows[index]

    def __bool__(self) -> bool:
        # lm_eval asks `df or []`, which would load the split.
        return True
