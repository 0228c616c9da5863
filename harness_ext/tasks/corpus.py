"""Tasks on running text: the pretraining loss of a corpus, window by window, and the curvature of that loss.

Such a task is an lm_eval YAML whose `doc_to_text` names the column of the text. Its options stand under `metadata`:

    corpus        how rows become text, and which text it is where the YAML names no dataset; see `CorpusOptions`
    block_tokens  tokens that the model reads at once, 128 in our YAMLs; at most the model's context
    flatness      options of flatness tasks; see `flatness.options.FlatnessOptions`
    report        not an option: what the run found out about itself, written into the results JSON

The documents that lm_eval sees are windows of the corpus, so they are known only together with the model's tokenizer: `attach`
calls `cut_windows` before lm_eval asks for them. They come in random order, the same for every task on the corpus, so that
the first N (`--limit N`) are a sample of it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.tasks._yaml_loader import load_yaml

from harness_ext.contracts import WindowAnswer, WindowRequest
from harness_ext.engine.attach import FLATNESS_REQUEST_TYPE, LOSS_REQUEST_TYPE
from harness_ext.engine.tokens import refuse_unknown_ids
from harness_ext.engine.windows import Window, encode_text, windows_of_text
from harness_ext.flatness.options import FlatnessOptions
from harness_ext.tasks import metrics
from harness_ext.tasks.data import LazySplits, TextFile, open_dataset, open_text_file
from harness_ext.tasks.options import check_settings, read_options
from harness_ext.tasks.whole import WholeTask

__all__ = ["CorpusOptions", "FlatnessTask", "LossTask"]

logger = logging.getLogger("lm_eval.harness_ext.tasks")

ORDER_SEED = 0
"""Of the order of windows: the same in all runs, so that tasks and models meet on the same first N."""

Pair = tuple[float, float]


@dataclass(frozen=True)
class CorpusOptions:
    """What the text is, `--metadata '{"corpus": {...}}'`; a string is short for `{"file": ...}`.

    Attributes:
        file: A text file in UTF-8, one text; or `.jsonl` or `.parquet` with a column of texts. None: the dataset.
        dataset: A dataset, as `dataset_path` of a YAML; of the mirror, the lab or the Hub.
        name: Its configuration.
        split: Its split.
        column: Column of the texts.
        join: What stands between rows that are pieces of one text; None: every row is a text of its own, which follows the
            model's BOS and not the row before it.
        end_of_text: Whether the end of each text, as the tokenizer's EOS, is predicted too.
        max_bytes: The corpus ends after so many bytes of UTF-8, at the end of a row.
    """

    file: str | None = None
    dataset: str | None = None
    name: str | None = None
    split: str = "test"
    column: str = "text"
    join: str | None = None
    end_of_text: bool = False
    max_bytes: int = 20_000_000

    def problem(self) -> str | None:
        """What is wrong with them, or None."""
        for option in ("file", "dataset", "name", "join"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, str):
                return f"{option} is {value!r}, expected a string"
        for option in ("split", "column"):
            value = getattr(self, option)
            if not isinstance(value, str) or not value:
                return f"{option} is {value!r}, expected a name"
        if self.file is not None and self.dataset is not None:
            return "file and dataset exclude each other, give one"
        if self.end_of_text not in (True, False):
            return f"end_of_text is {self.end_of_text!r}, expected true or false"
        if not isinstance(self.max_bytes, int) or isinstance(self.max_bytes, bool) or self.max_bytes < 1:
            return f"max_bytes is {self.max_bytes!r}, expected a positive integer"
        return None


class CorpusTask(WholeTask):
    """Base of the tasks; see the module.

    Raises:
        ValueError: If an option is wrong, or the corpus has no text.
        FileNotFoundError: If the corpus is not there.
    """

    NEEDS_STATES: ClassVar[bool] = True
    REQUEST: ClassVar[str]
    METRICS: ClassVar[tuple[str, ...]]
    """Metrics that the task can compute."""

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        settings = {key: value for key, value in config.items() if key != "class"}
        check_settings(settings)
        self._metadata: dict[str, Any] = dict(settings.get("metadata") or {})
        self._metadata.pop("report", None)
        settings["metadata"] = self._metadata
        self._name = str(settings.get("task"))
        given = self._metadata.get("corpus")
        self.corpus = read_options(
            CorpusOptions, "corpus", {"file": given} if isinstance(given, str) else given, self._name
        )
        if settings.get("num_fewshot"):
            raise ValueError(f"{self._name}: --num_fewshot has no meaning for running text. Leave it out.")
        self._choose_dataset(settings)
        for key in ("dataset_path", "doc_to_text"):
            if not isinstance(settings.get(key), str):
                raise ValueError(f"{self._name} needs `{key}:`, found {settings.get(key)!r}.")
        self._windows: list[dict[str, Any]] | None = None
        self._requests: list[WindowRequest] = []
        self._report: dict[str, Any] = {}
        self._items: dict[int, dict[str, Pair]] = {}
        settings["metric_list"] = self._complete_metrics(settings.get("metric_list"))
        super().__init__(config=settings, **kwargs)
        # lm_eval checks the configured output type against its own four, and counts padding by this attribute.
        self.OUTPUT_TYPE = self.REQUEST  # type: ignore[assignment]

    # ------------------------------------------------------------------------------------------------- options

    def _choose_dataset(self, settings: dict[str, Any]) -> None:
        own = settings.get("dataset_path")
        if own is None:
            if self.corpus.file is None and self.corpus.dataset is None:
                raise ValueError(
                    f'{self._name} needs a corpus: --metadata \'{{"corpus": "FILE.txt"}}\', or \'{{"corpus": {{"dataset": '
                    '"ORG/NAME", "split": "test"}}\'.'
                )
            settings["dataset_path"] = self.corpus.dataset or self.corpus.file
            settings["dataset_name"] = self.corpus.name
            settings["test_split"] = self.corpus.split
            settings["doc_to_text"] = self.corpus.column
        elif self.corpus.file is not None or self.corpus.dataset is not None:
            kind = self._name.split("_")[0]
            raise ValueError(
                f"{self._name} is the {kind} of {own}; another corpus would stand under its name in the results. Use "
                f"--tasks {kind}_corpus with this `corpus`."
            )

    def _corpus_of_yaml(self) -> dict[str, Any]:
        source = self._metadata.get("config_source")
        metadata = load_yaml(str(source), resolve_func=False).get("metadata", {}) if source else {}
        return dict(metadata.get("corpus") or {})

    def _complete_metrics(self, entries: Any) -> list[dict[str, Any]]:
        result = []
        for entry in entries or [{"metric": name} for name in self.METRICS]:
            name = entry.get("metric")
            if name not in self.METRICS:
                raise ValueError(f"{self._name}: no metric {name!r}. It has {', '.join(self.METRICS)}.")
            result.append({"aggregation": "over_windows", "higher_is_better": False} | entry)
        return result

    @property
    def block_tokens(self) -> int:
        """Tokens that the model reads at once, as asked for."""
        value = self._metadata.get("block_tokens", 128)
        if not isinstance(value, int) or isinstance(value, bool) or value < 2:
            raise ValueError(
                f"{self._name}: block_tokens is {value!r}, expected an integer of at least 2, such as 128."
            )
        return value

    # ----------------------------------------------------------------------------------------------- documents

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Open the corpus (lm_eval's hook); see `tasks.data`."""
        self.dataset: LazySplits | TextFile
        if self.corpus.file is not None:
            self.dataset = open_text_file(Path(self.corpus.file), split=self.corpus.split, column=self.corpus.column)
        else:
            pretrained = self._metadata.get("pretrained")
            self.dataset = open_dataset(
                self.config.dataset_path,
                self.config.dataset_name,
                pretrained=pretrained if isinstance(pretrained, str) else None,
                options=dataset_kwargs,
            )
        self._report["data"] = self.dataset.source

    @property
    def eval_docs(self) -> Any:
        """Windows of the corpus once the model is known, and its rows before."""
        return self._rows if self._windows is None else self._windows

    @property
    def _rows(self) -> datasets.Dataset:
        split = self.config.test_split or self.config.validation_split
        rows = self.dataset[str(split)]
        if self.config.doc_to_text not in rows.column_names:
            raise ValueError(
                f"{self._name}: {self._report['data']}, split {split!r} has no column {self.config.doc_to_text!r}, found "
                f'{", ".join(rows.column_names)}. Name the column of the text: --metadata \'{{"corpus": {{"column": …}}}}\' or '
                "`doc_to_text` in the task's YAML."
            )
        return rows

    def fewshot_docs(self) -> None:
        """No few-shot examples (lm_eval's hook)."""
        return

    def texts(self) -> list[str]:
        """The texts of the corpus, none of them blank.

        Raises:
            ValueError: If there is none, or one is no string.
        """
        rows, size, left_out = [], 0, 0
        for number, row in enumerate(self._rows[self.config.doc_to_text]):
            if not isinstance(row, str):
                raise ValueError(f"{self._name}: row {number} of {self._report['data']} is {row!r}, expected a text.")
            # Some copies of a corpus keep the line ends of its rows and some do not.
            row = row.removesuffix("\n").rstrip(" ") if self.corpus.join is not None else row
            if size >= self.corpus.max_bytes:
                left_out += 1
                continue
            rows.append(row)
            size += len(row.encode("utf-8", errors="surrogatepass"))
        if left_out:
            logger.info("%s: the corpus ends after %d bytes; %d more rows are left out.", self._name, size, left_out)
            self._report["rows_left_out"] = left_out
        texts = rows if self.corpus.join is None else [self.corpus.join.join(rows)]
        texts = [text for text in texts if text.strip()]
        if not texts:
            raise ValueError(f"{self._name}: {self._report['data']} has no text.")
        return texts

    def cut_windows(self, lm: Any) -> None:
        """Make the documents: windows of the corpus under the model's tokenizer, in random order.

        Raises:
            ValueError: If the model has no token to start a text with or no embedding of a token, or no window can be used.
        """
        length = min(self.block_tokens, lm.max_length)
        if length < self.block_tokens:
            logger.warning("%s: the model reads %d tokens at most, so block_tokens is %d.", self._name, length, length)
        prefix = lm.prefix_token_id
        if prefix is None:
            raise ValueError(
                f"{self._name}: the tokenizer has neither BOS nor EOS to start a text with. Give --model_args "
                "prefix_token_id=ID."
            )
        end = None
        if self.corpus.end_of_text:
            end = lm.tokenizer.eos_token_id
            if end is None:
                raise ValueError(
                    f"{self._name}: `end_of_text` asks for the tokenizer's EOS, and it has none. Set it to false."
                )
        num_embeddings = getattr(lm.model.get_input_embeddings(), "num_embeddings", None)
        texts = self.texts()
        windows: list[Window] = []
        for text in texts:
            encoded = encode_text(lm.tokenizer, text)
            refuse_unknown_ids(encoded.ids, num_embeddings)
            windows += windows_of_text(text, encoded, length=length, prefix=prefix, end=end)
        order = list(range(len(windows)))
        random.Random(ORDER_SEED).shuffle(order)
        order = self.choose(order, windows)
        self._windows = [
            {
                "window": number,
                "text": windows[number].text,
                "num_tokens": len(windows[number].targets),
                "num_bytes": windows[number].num_bytes,
            }
            for number in order
        ]
        self._requests = [self.window_request(number, windows[number]) for number in order]
        digest = hashlib.sha256("\0".join(texts).encode("utf-8", errors="surrogatepass")).hexdigest()
        # Losses in nats per token compare where the text is cut into the same tokens.
        cut = hashlib.sha256()
        for window in windows:
            cut.update(np.asarray(window.targets, dtype="<i8").tobytes())
        self._report |= {
            "text_sha256": digest,
            "tokenizer_sha256": cut.hexdigest(),
            "num_texts": len(texts),
            "num_bytes": sum(len(text.encode("utf-8", errors="surrogatepass")) for text in texts),
            "num_tokens": sum(len(window.targets) for window in windows),
            "num_windows": len(windows),
            "block_tokens": length,
        }

    def choose(self, order: list[int], windows: Sequence[Window]) -> list[int]:
        """The windows that are documents of the task, of all in the given order."""
        return order

    def window_request(self, number: int, window: Window) -> WindowRequest:
        """What the engine is asked about a window."""
        return WindowRequest(window.tokens, window.targets, number)

    # ------------------------------------------------------------------------------------------------ requests

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """The text of a window, or of a row before there are windows (lm_eval's hook)."""
        return str(doc["text" if "window" in doc else self.config.doc_to_text])

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> str:
        """Nothing: the text is its own target (lm_eval's hook)."""
        return ""

    def fewshot_context(self, doc: dict[str, Any], *args: Any, **kwargs: Any) -> str:
        """The text of a window, never in a chat template (lm_eval's hook)."""
        return self.doc_to_text(doc)

    def build_all_requests(self, **kwargs: Any) -> None:
        """Make the requests; lm_eval's cache of requests does not know the model's tokens and is not used."""
        kwargs |= {"cache_requests": False, "rewrite_requests_cache": False}
        self._place = {doc["window"]: place for place, doc in enumerate(self._windows or [])}
        super().build_all_requests(**kwargs)

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Instance:
        """One request a window (lm_eval's hook)."""
        request = self._requests[self._place[doc["window"]]]
        kwargs.pop("apply_chat_template", None)
        kwargs.pop("chat_template", None)
        return Instance(self.REQUEST, doc=doc, arguments=(ctx, request.to_argument()), idx=0, **kwargs)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------- results

    def evaluate_all(self) -> None:
        """Write down what the engine did."""
        for instance in self._instances or []:
            answer = instance.resps[0]
            if answer.run:
                self._report[self.REQUEST] = dict(answer.run)
                break
        self._metadata["report"] = self._report
        self.config.metadata = self._metadata

    def process_results(self, doc: Mapping[str, Any], results: Sequence[WindowAnswer]) -> dict[str, Any]:
        """Items of the configured metrics for one window; none for a window that was not measured (lm_eval's hook)."""
        values = results[0].values
        if values is None or "bypass" in self._metric_fn_list:
            return {}
        items = self.items(values, doc["num_tokens"], doc["num_bytes"])
        return {name: items[name] for name in self._metric_fn_list if name in items}

    def items(self, values: Mapping[str, float], num_tokens: int, num_bytes: float) -> dict[str, Pair]:
        """Numerator and denominator of each metric for one window; see `metrics.OverWindows`."""
        raise NotImplementedError


class LossTask(CorpusTask):
    """Cross-entropy of a corpus: `loss` in nats per token, and `bits_per_byte`, which tokenizers have in common."""

    REQUEST = LOSS_REQUEST_TYPE
    METRICS = metrics.FLATNESS[:2]

    def items(self, values: Mapping[str, float], num_tokens: int, num_bytes: float) -> dict[str, Pair]:
        """See the base class. A window without bytes (an end of text alone) counts with its bits."""
        nats = values["loss"] * num_tokens
        return {"loss": (nats, num_tokens), "bits_per_byte": (nats / math.log(2), num_bytes)}


class FlatnessTask(CorpusTask):
    """Curvature of the pretraining loss on windows of a corpus; see `flatness.run`."""

    REQUEST = FLATNESS_REQUEST_TYPE
    METRICS = metrics.FLATNESS

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        name = str(config.get("task"))
        self.flatness = read_options(FlatnessOptions, "flatness", (config.get("metadata") or {}).get("flatness"), name)
        super().__init__(config, **kwargs)

    def choose(self, order: list[int], windows: Sequence[Window]) -> list[int]:
        """Windows of which every position is scored, `max_blocks` at most."""
        whole = [number for number in order if windows[number].is_whole]
        self._report["windows_left_out"] = len(order) - len(whole)
        if not whole:
            raise ValueError(f"{self._name}: the corpus has no window whose positions are all scored. Give more text.")
        return whole[: self.flatness.max_blocks]

    def window_request(self, number: int, window: Window) -> WindowRequest:
        """See the base class."""
        options = {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self.flatness).items()
        }
        return WindowRequest(window.tokens, window.targets, number, options)

    def evaluate_all(self) -> None:
        """See the base class."""
        super().evaluate_all()
        self._num_parameters = self._report.get(self.REQUEST, {}).get("num_parameters", 0)

    def items(self, values: Mapping[str, float], num_tokens: int, num_bytes: float) -> dict[str, Pair]:
        """See the base class."""
        found: dict[str, Pair] = {name: (value * num_tokens, num_tokens) for name, value in values.items()}
        for name in ("fisher_trace", "hessian_trace"):
            if name in values:
                # A million: lm_eval prints four decimals.
                found[f"{name}_per_mparam"] = (values[name] * num_tokens / self._num_parameters * 1e6, num_tokens)
        if "lambda_max" in self.flatness.quantities and "lambda_max" not in values:
            # It is of the first blocks only, and lm_eval warns of metrics that not all documents have.
            found["lambda_max"] = (0.0, 0.0)
        if "fisher_trace" in values and "hessian_trace" in values:
            found["hessian_over_fisher"] = (values["hessian_trace"] * num_tokens, values["fisher_trace"] * num_tokens)
        if "loss" in values:
            found["bits_per_byte"] = (values["loss"] * num_tokens / math.log(2), num_bytes)
        return found
