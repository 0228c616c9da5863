"""A result file of lm_eval as a record: today's schema and older ones.

Known: lm_eval 0.4.0 to 0.4.13 (`results`, `configs`, `versions`, `n-shot`, metrics named `acc,none`) and 0.3 (metrics named
`acc`, no `configs`). Later versions of 0.4 are read too, as the schema has only grown since; others are refused by name.

A file is untrusted: numbers that are none become blanks, texts are bounded, nothing in it is used as a path.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness_ext.leaderboard import samples as samples_module
from harness_ext.leaderboard import untrusted
from harness_ext.leaderboard.ranges import range_of
from harness_ext.leaderboard.records import ColumnRecord, FileRecord, ModelRecord, Samples, TaskRecord
from harness_ext.parameter_names import place_of

__all__ = [
    "LAB_SCHEMA",
    "MAX_RESULT_BYTES",
    "credentials",
    "lab_of",
    "model_arguments",
    "read_results",
    "result_record",
]

MAX_RESULT_BYTES = 64_000_000
MAX_TASKS = 5_000
MAX_METRICS = 500
MAX_PROMPTS = 500
MAX_TEXT = 4_000
MAX_SETTING = 600

LAB_SCHEMA = 2
"""Of lab.json."""

_KNOWN_LM_EVAL = ("0.3", "0.4")

_LOWER_IS_BETTER = {"loss", "ppl", "bits_per_byte", "brier", "brier_score", "ece", "ter", "wer", "cer", "lambda_max"}

_SECRET = re.compile(r"api[_-]?key|passw|secret|auth|header|credential|bearer|cookie|(^|[_-])tokens?$", re.IGNORECASE)
"""Names of model arguments whose values are not shown."""

_SPECIAL_TOKEN = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|prefix|begin|start|end)_tokens?$", re.IGNORECASE)
"""Names that look like the former and are a tokenizer's."""

_SECRET_VALUE = re.compile(
    r"\bbearer\s+\S|\bauthorization\b|[?&](api[_-]?key|key|sig|signature|password|(\w+_)?token)="
    r"|\b(sk-[\w-]{20,}|hf_[a-z0-9]{30,}|gh[pousr]_[a-z0-9]{30,}|github_pat_\w{30,})",
    re.IGNORECASE,
)
"""Values that hold a credential whatever their name."""

_USER_INFO = re.compile(r"(?<=://)[^\s/?#]*@")
"""Name and password in an address."""

_NO_CREDENTIALS = ("", "true", "false", "none", "null", "empty")
"""Values of an argument with a secret's name that give none away."""

_NO_METRICS = {"alias", "name", "sample_len", "samples", "sample_count", "tab", " "}

_INDIFFERENT_ARGUMENTS = {
    "pretrained", "model", "revision", "dtype", "device", "device_map", "device_map_option", "batch_size", "max_batch_size",
    "parallelize", "max_memory_per_gpu", "max_cpu_memory", "offload_folder", "cache_dir", "low_cpu_mem_usage",
    "trust_remote_code", "use_fast_tokenizer", "num_concurrent", "max_retries", "timeout", "tensor_parallel_size",
    "data_parallel_size", "gpu_memory_utilization", "swap_space", "base_url", "use_cache",
}  # fmt: skip
"""Model arguments that have a field of their own, or say how a model is run and not which one."""

_OTHERS_OPTIONS = {"version", "report", "config_source", "prompt", "probe", "quad", "flatness", "kernel", "finetune"} | {
    "corpus", "block_tokens", "subset_words",
}  # fmt: skip
"""Keys of `metadata` that are no settings of lm_eval's own tasks. --metadata gives all tasks of a run the same options."""

_SETTINGS_OF_OTHERS = (
    "dataset_name", "doc_to_text", "doc_to_target", "doc_to_choice", "process_docs",
    "description", "target_delimiter", "fewshot_delimiter", "output_type", "generation_kwargs", "filter_list", "gen_prefix",
    "repeats", "use_prompt",
)  # fmt: skip

_DEFAULTS = {"target_delimiter": " ", "fewshot_delimiter": "\n\n", "repeats": 1}

_MAIN_METRICS = {
    "natural": ("acc",),
    "probe": ("acc",),
    "quad": ("acc",),
    "loss": ("bits_per_byte", "loss"),
    "flatness": ("fisher_trace", "hessian_trace", "ggn_trace"),
}

_PREFERRED = ("acc", "exact_match", "em", "f1", "pass@1", "mcc", "bleu", "rouge1", "word_perplexity", "perplexity")
"""What the table shows of a task of lm_eval's, the first that there is; then the others by name."""

_FLATNESS_OPTIONS = ("labels", "probes", "lambda_blocks", "rel_stderr")

_TRACES = ("fisher_trace", "fisher_trace_scaled")


def read_results(path: Path, *, lab: dict[str, Any] | None = None) -> FileRecord:
    """Read a result file and the samples beside it.

    Args:
        path: The file.
        lab: The model's lab.json, from `lab_of`.

    Raises:
        ValueError: If it is no result file, or of a schema that is not known; the message does not name the file.
        OSError: If it cannot be read.
    """
    results, data = untrusted.load_json(path, max_bytes=MAX_RESULT_BYTES)
    return result_record(results, digest=hashlib.sha256(data).hexdigest(), lab=lab, beside=path)


def result_record(
    results: Any, *, digest: str, lab: dict[str, Any] | None = None, beside: Path | None = None
) -> FileRecord:
    """Check the JSON of a result file; see `read_results`.

    Args:
        results: The JSON.
        digest: SHA-256 of the file.
        lab: The model's lab.json, from `lab_of`.
        beside: The file, for its samples; None: those inside the JSON only.
    """
    _check_schema(results)
    config = untrusted.mapping(results.get("config"))
    arguments = model_arguments(config.get("model_args"))
    versions = _versions(results)
    problems: list[str] = []
    tasks = []
    entries = list(results["results"].items())
    if len(entries) > MAX_TASKS:
        problems.append(f"has {len(entries):,} tasks; the first {MAX_TASKS:,} are read")
    for name, entry in entries[:MAX_TASKS]:
        if not isinstance(entry, dict):
            problems.append(f"task {untrusted.name(name)!r}: expected a JSON object, found {type(entry).__name__}")
            continue
        reader = _Task(results, config, arguments, str(name), entry)
        task = reader.record()
        if task is None:
            continue  # a heading of a group, or --predict_only
        problems += reader.problems
        try:
            found = _samples(results, beside, task, str(name))
        except (ValueError, OSError, RecursionError) as err:
            problems.append(f"samples of {task.column.task} are left out: {err}")
            found = None
        tasks.append(task if found is None else TaskRecord(**{**vars(task), "samples": found}))
    if not tasks:
        raise ValueError("has no metrics; was it run with --predict_only?")
    return FileRecord(
        digest=digest,
        date=_date(results.get("date")),
        versions=versions,
        model=_model(results, config, arguments, lab),
        tasks=tuple(tasks),
        problems=tuple(problems),
    )


def _date(value: Any) -> float | None:
    """Seconds since 1970, up to the year 2100."""
    found = untrusted.number(value)
    return found if found is not None and 0 < found < 4.1e9 else None


def _check_schema(results: Any) -> None:
    if not isinstance(results, dict) or not isinstance(results.get("results"), dict):
        raise ValueError(
            "expected a result file of lm_eval, with `results` by task as --output_path writes it, found "
            + (
                f"the keys {', '.join(untrusted.name(key, 40) for key in sorted(results)[:6])}"
                if isinstance(results, dict)
                else "no JSON object"
            )
        )
    version = results.get("lm_eval_version")
    if version is not None:
        release = re.match(r"(\d+\.\d+)(\.|$|[^\d.])", str(version))
        if release is None or release[1] not in _KNOWN_LM_EVAL:
            raise ValueError(
                f"lm_eval_version is {untrusted.name(version, 40)!r}; the result files of lm_eval {', '.join(_KNOWN_LM_EVAL)} "
                "are known, and those of another version may mean other things"
            )


def _versions(results: Mapping[str, Any]) -> dict[str, str]:
    found = {
        "lm_eval": results.get("lm_eval_version"),
        "harness_ext": untrusted.mapping(results.get("harness_ext")).get("version"),
        "transformers": results.get("transformers_version"),
    }
    if found["lm_eval"] is None:
        # Releases up to 0.4.7 at least do not name themselves.
        names = [name for entry in results["results"].values() if isinstance(entry, dict) for name in entry]
        found["lm_eval"] = "0.4.?" if any("," in name for name in names) else "0.3"
    return {name: untrusted.name(value, 40) for name, value in found.items() if value is not None}


# ------------------------------------------------------------------------------------------------------------- model


def model_arguments(value: Any) -> dict[str, str]:
    """Model arguments by name, of a mapping or of "name=value,name=value", without those that hold a credential.

    An address loses the name and password in it.
    """
    # A value keeps its slashes and quotes; only what would break a line goes.
    return {
        untrusted.name(key, 100): untrusted.name(_without_user_info(given))
        for key, given in _argument_pairs(value)[:100]
        if given is not None and not _is_secret(key, given)
    }


def credentials(results: Any) -> list[str]:
    """Where a result file holds a credential, as `config.model_args.api_key`; names, never values."""
    found = untrusted.mapping(results)
    config = untrusted.mapping(found.get("config"))
    places = [("config.model_args", config.get("model_args"))]
    # lm_eval copies the arguments of a model into the metadata of each task.
    for task, of_task in untrusted.mapping(found.get("configs")).items():
        metadata = untrusted.mapping(untrusted.mapping(of_task).get("metadata"))
        places.append((f"configs.{task}.metadata", {key: metadata[key] for key in metadata if key != "report"}))
    places.append(("", {key: found.get(key) for key in ("model_name", "model_source")}))
    return [
        untrusted.name(f"{place}.{key}" if place else key, 200)
        for place, value in places
        for key, given in _argument_pairs(value)
        if _is_credential(key, given)
    ]


def _argument_pairs(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, str):
        return [(str(key), given) for key, given in untrusted.mapping(value).items()]
    pairs: list[tuple[str, Any]] = []
    for part in value.split(","):
        key, equals, given = part.partition("=")
        if pairs and not (equals and re.fullmatch(r"\s*[\w.-]+\s*", key)):  # a comma within a value
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part}")
        elif key.strip():
            pairs.append((key.strip(), given))
    return pairs


def _is_secret_name(key: str) -> bool:
    return _SECRET.search(key) is not None and not _SPECIAL_TOKEN.search(key)


def _is_secret(key: str, value: Any) -> bool:
    """Whether an argument is not to be shown."""
    if _is_secret_name(key):
        return True
    if isinstance(value, dict):
        return any(_is_secret(str(inner), given) for inner, given in value.items())
    if isinstance(value, list):
        return any(_is_secret("", given) for given in value)
    return isinstance(value, str) and _SECRET_VALUE.search(value) is not None


def _is_credential(key: str, value: Any) -> bool:
    """Whether an argument gives a credential away: a secret, or an address with a password, and no mere switch."""
    if value is None or isinstance(value, bool | int | float):
        return False
    if isinstance(value, str) and value.strip().lower() in _NO_CREDENTIALS:
        return False
    return _is_secret(key, value) or _USER_INFO.search(untrusted.text(value, MAX_RESULT_BYTES)) is not None


def _without_user_info(value: Any) -> str:
    return _USER_INFO.sub("", untrusted.text(value, MAX_RESULT_BYTES))


def _model(
    results: Mapping[str, Any], config: Mapping[str, Any], arguments: Mapping[str, str], lab: dict[str, Any] | None
) -> ModelRecord:
    backend = untrusted.name(config.get("model") or results.get("model_source") or "", 60)
    given = arguments.get("pretrained") or arguments.get("model")
    # Without such an argument lm_eval makes up a name, another one for each run.
    is_named = given or (results.get("model_name") and backend not in ("dummy", ""))
    name = (given or untrusted.name(_without_user_info(results.get("model_name")))) if is_named else backend
    if lab is not None:
        name = f"{lab['run']}-{lab['step']:08d}" if lab["step"] is not None else lab["run"]
    dtype = config.get("model_dtype") or arguments.get("dtype")
    template = results.get("chat_template_sha") or config.get("chat_template_sha")
    if template is None and results.get("chat_template"):
        template = hashlib.sha256(str(results["chat_template"]).encode("utf-8", errors="replace")).hexdigest()
    system = results.get("system_instruction_sha")
    if system is None and results.get("system_instruction"):
        system = hashlib.sha256(str(results["system_instruction"]).encode("utf-8", errors="replace")).hexdigest()
    return ModelRecord(
        name=name or "unnamed",
        revision=untrusted.name(config.get("model_revision") or arguments.get("revision") or "main", 100),
        sha=untrusted.name(config.get("model_sha") or "", 64) or None,
        dtype=untrusted.name(dtype, 40).removeprefix("torch.") if dtype not in (None, "", "auto") else None,
        backend=backend,
        chat_template=_short_hash(template),
        system_instruction=_short_hash(system),
        model_args=sorted([key, value] for key, value in arguments.items() if key not in _INDIFFERENT_ARGUMENTS),
        num_parameters=untrusted.whole_number(config.get("model_num_parameters")) or None,
        lab=lab,
    )


def _short_hash(value: Any) -> str | None:
    return untrusted.name(value, 64)[:12] or None if value else None


def lab_of(path: Path) -> dict[str, Any]:
    """Check a lab.json; fields as in `contracts.Lab`, pairs of value and standard error as lists.

    Raises:
        ValueError: If it is none, or of another schema.
        OSError: If it cannot be read.
    """
    found, _ = untrusted.load_json(path, max_bytes=1_000_000)
    if not isinstance(found, dict) or found.get("schema_version") != LAB_SCHEMA:
        version = found.get("schema_version") if isinstance(found, dict) else None
        raise ValueError(f"{path.name}: expected schema_version {LAB_SCHEMA} of the lab, found {version!r}")
    language, algorithm = untrusted.mapping(found.get("language")), untrusted.mapping(found.get("algorithm"))
    run, sha256 = untrusted.name(found.get("run")), untrusted.name(language.get("sha256"), 64)
    if not run or not sha256:
        raise ValueError(f"{path.name}: expected `run` and `language.sha256`, found {run!r} and {sha256!r}")
    model = untrusted.mapping(found.get("model"))
    return {
        "run": run,
        "algorithm": untrusted.name(algorithm.get("name"), 60),
        "algorithm_settings": _plain_settings(algorithm, without=("name",)),
        "objective": untrusted.name(found.get("objective"), 60),
        "seed": untrusted.whole_number(found.get("seed")),
        "step": untrusted.whole_number(found.get("step")),
        "tokens_seen": untrusted.whole_number(found.get("tokens_seen")),
        "language": untrusted.name(language.get("kind"), 60),
        "language_sha256": sha256,
        "architecture": _plain_settings(model),
        "excess": _pair(found.get("excess")),
        "validation_loss": _pair(found.get("validation_loss")),
    }


def _plain_settings(value: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, str]:
    return {
        untrusted.name(key, 60): untrusted.name(given, 100)
        for key, given in sorted(value.items())[:40]
        if key not in without and given is not None
    }


def _pair(value: Any) -> list[float | None]:
    found = untrusted.mapping(value)
    return [untrusted.number(found.get("value")), untrusted.number(found.get("stderr"))]


# -------------------------------------------------------------------------------------------------------------- task


class _Task:
    """Reads one entry of `results` with what the rest of the file says about it."""

    def __init__(
        self,
        results: Mapping[str, Any],
        config: Mapping[str, Any],
        arguments: Mapping[str, str],
        name: str,
        entry: Mapping[str, Any],
    ) -> None:
        self.results, self.run, self.arguments, self.name, self.entry = results, config, arguments, name, entry
        self.config = untrusted.mapping(untrusted.mapping(results.get("configs")).get(name))
        self.metadata = untrusted.mapping(self.config.get("metadata"))
        self.report = untrusted.mapping(self.metadata.get("report"))
        self.kind, self.features = self._kind()
        self.problems: list[str] = []
        """Of `record`: values that are left blank."""

    def _of_task(self, section: str) -> Any:
        return untrusted.mapping(self.results.get(section)).get(self.name)

    def _kind(self) -> tuple[str, str]:
        """What the report of our tasks says that it is; the name of a task says nothing."""
        if "window_flatness" in self.report:
            return "flatness", ""
        if "text_sha256" in self.report:
            return "loss", ""
        features = untrusted.name(self.report.get("features"), 60)
        if features:
            return ("quad" if features == "quad" else "probe"), features
        prompts = self.report.get("prompts")
        if isinstance(prompts, list) and any(untrusted.mapping(entry).get("label_words") for entry in prompts):
            return "natural", ""
        return "other", ""

    def record(self) -> TaskRecord | None:
        metrics = self._metrics()
        if not metrics:
            return None
        shots = self._of_task("n-shot")
        if shots is None:
            shots = self.config.get("num_fewshot", self.run.get("num_fewshot"))
        version = self._of_task("versions")
        if version in (None, "N/A", "Yaml"):
            version = self.metadata.get("version", "")
        documents, full, limit = self._documents()
        is_chat = bool(self.results.get("chat_template") or self.results.get("chat_template_sha"))
        column = ColumnRecord(
            task=untrusted.name(self.name),
            version=_version_text(version),
            num_fewshot=untrusted.whole_number(shots),
            # Running text is read as it is, whatever the run's template.
            chat=is_chat and self.kind not in ("loss", "flatness"),
            kind=self.kind,
            features=self.features,
            dataset=self._dataset(),
            prompts=self._prompts(),
            settings=self._settings(),
        )
        return TaskRecord(
            column=column,
            metrics=metrics,
            lower_is_better=self._lower_is_better(metrics),
            main_metrics=self._main_metrics(metrics),
            chance=self._chance(metrics),
            num_documents=documents,
            full_documents=full,
            limit=limit,
            command=self._command(limit),
            notes=self._notes(),
            prompt_results=self._prompt_results() if self.kind in ("natural", "probe", "quad") else [],
            loss=self._loss(limit),
            parts=self._parts(),
        )

    def _metrics(self) -> dict[str, list[float | None]]:
        """[value, standard error] by metric; `acc,none` and the older `acc` are the same metric."""
        found: dict[str, list[float | None]] = {}
        for key, value in list(self.entry.items())[: 2 * MAX_METRICS]:
            metric, _, filter_name = str(key).partition(",")
            if metric in _NO_METRICS or metric.endswith("_stderr") or isinstance(value, dict | list | bool):
                continue
            if (
                isinstance(value, str)
                and untrusted.number(value) is None
                and value.strip() not in ("N/A", "nan", "NaN")
            ):
                continue  # text beside the metrics
            stderr = untrusted.number(
                self.entry.get(f"{metric}_stderr,{filter_name}" if filter_name else f"{metric}_stderr")
            )
            name = untrusted.name(metric if filter_name in ("", "none") else f"{metric},{filter_name}", 120)
            number = self._possible(name, value)
            found[name] = [number, stderr if number is not None and stderr is not None and stderr >= 0 else None]
        return found

    def _possible(self, metric: str, value: Any, prompt: str = "") -> float | None:
        """A number that the metric can have; any other is a problem of the file, and left blank."""
        number, possible = untrusted.number(value), range_of(metric, self.kind)
        if number is None or possible is None or number in possible:
            return number
        of_prompt = f", prompt {prompt}" if prompt else ""
        self.problems.append(f"{metric} of {untrusted.name(self.name)}{of_prompt} is {number:g}, expected {possible}")
        return None

    def _lower_is_better(self, metrics: Mapping[str, Any]) -> list[str]:
        given = dict(untrusted.mapping(self._of_task("higher_is_better")))
        for entry in _list(self.config.get("metric_list")):
            described = untrusted.mapping(entry)
            given.setdefault(str(described.get("metric")), described.get("higher_is_better"))
        found = []
        for name in metrics:
            is_higher = given.get(name.partition(",")[0])
            if not (is_higher if isinstance(is_higher, bool) else _is_better_higher(name)):
                found.append(name)
        return found

    def _main_metrics(self, metrics: Mapping[str, Any]) -> list[str]:
        preferred = _MAIN_METRICS.get(self.kind, _PREFERRED)

        def order(name: str) -> tuple[int, str]:
            base = name.partition(",")[0]
            return (preferred.index(base) if base in preferred else len(preferred), name)

        return sorted(metrics, key=order)[:3]

    def _documents(self) -> tuple[int | None, int | None, str | None]:
        """How many documents were evaluated, how many there are, and why they are fewer."""
        counts = untrusted.mapping(self._of_task("n-samples"))
        effective, original = (untrusted.whole_number(counts.get(key)) for key in ("effective", "original"))
        if effective is None:
            effective = untrusted.whole_number(self.entry.get("sample_len"))
        given = untrusted.number(self.run.get("limit"))
        if original is not None and effective is not None:
            return effective, original, f"{effective:,} of {original:,}" if effective < original else None
        # Without the counts of the task, a limit is taken at its word.
        return effective, None, None if given is None else f"--limit {given:g}"

    def _dataset(self) -> str:
        if not self.config.get("dataset_path") and self.config.get("group"):
            return ""
        parts = [self.config.get("dataset_path"), self.config.get("dataset_name")]
        return untrusted.name("/".join(untrusted.text(part, 200) for part in parts if part))

    def _prompts(self) -> list[dict[str, Any]]:
        entries = self.report.get("prompts")
        if self.kind == "other" or not isinstance(entries, list):
            source = self.config.get("doc_to_text")
            if source is None or self.kind != "other":
                return []
            return [{"name": "", "template": _settled(source), "label_words": {}, "digest": None}]
        return [
            {
                "name": untrusted.name(entry.get("name"), 120),
                "template": untrusted.text(entry.get("template"), MAX_TEXT),
                "label_words": {
                    untrusted.name(label, 120): [untrusted.text(word, 120) for word in words[:50]]
                    for label, words in list(untrusted.mapping(entry.get("label_words")).items())[:200]
                    if isinstance(words, list)
                },
                "digest": untrusted.name(entry.get("digest"), 64) or None,
            }
            for entry in map(untrusted.mapping, entries[:MAX_PROMPTS])
        ]

    def _settings(self) -> dict[str, str]:
        """What makes the configuration: other settings, other column."""
        found: dict[str, Any] = {"split": self.config.get("test_split") or self.config.get("validation_split")}
        if self.kind == "other":
            found |= {name: self.config.get(name) for name in _SETTINGS_OF_OTHERS}
            given = {key for key, _ in _argument_pairs(self.run.get("model_args"))}
            found |= {
                f"metadata.{key}": value
                for key, value in self.metadata.items()
                if key not in _OTHERS_OPTIONS and key not in given and not _is_credential(key, value)
            }
            members = untrusted.mapping(self.results.get("group_subtasks")).get(self.name)
            if members:
                found["group"] = sorted(map(str, members)) if isinstance(members, list) else members
            found["metric_options"] = [
                rest
                for entry in _list(self.config.get("metric_list"))
                if len(rest := {k: v for k, v in untrusted.mapping(entry).items() if k not in _OF_EVERY_METRIC}) > 1
            ]
        elif self.kind in ("loss", "flatness"):
            found |= {"block_tokens": self.report.get("block_tokens"), "text_sha256": self.report.get("text_sha256")}
            if self.kind == "flatness":
                run = untrusted.mapping(self.report.get("window_flatness"))
                found |= {key: run.get(key) for key in ("include", "exclude", "seed")}
                options = untrusted.mapping(self.metadata.get("flatness"))
                # Which quantities were measured besides does not change the others.
                found["options"] = {key: options[key] for key in _FLATNESS_OPTIONS if options.get(key) is not None}
                if options.get("rel_stderr") is None:
                    found["blocks"] = run.get("blocks")
        else:
            found |= {"options": self.report.get("options"), "sample": self.report.get("sample")}
            if self.features == "subset_words":
                found["subset_words"] = self.metadata.get("subset_words")
            if self.kind == "quad":
                found["quad"] = self.metadata.get("quad")
        return {
            name: text
            for name, value in sorted(found.items())
            if value not in (None, "", [], {})
            and _DEFAULTS.get(name) != value
            and (text := _settled(value, MAX_SETTING))
        }

    def _chance(self, metrics: Mapping[str, list[float | None]]) -> float | None:
        rate = untrusted.number(self.report.get("majority_rate"))
        if rate is None and "majority_rate" in metrics:
            rate = metrics["majority_rate"][0]
        if rate is not None:
            return rate if 0 <= rate < 1 else None
        choices = self.config.get("doc_to_choice")
        if self.config.get("output_type") == "multiple_choice" and isinstance(choices, list) and len(choices) > 1:
            return 1 / len(choices)
        return None

    def _notes(self) -> list[str]:
        notes = []
        report, documents = self.report, untrusted.whole_number(self.report.get("documents"))
        for name, meaning in (
            ("cut_documents", "cut to the model's length"),
            ("overlap", "also in the training split"),
        ):
            count = untrusted.whole_number(report.get(name))
            if count:
                notes.append(f"{count:,} of {documents or 'the'} documents {meaning}")
        for split, rows in untrusted.mapping(report.get("sample")).items():
            notes.append(f"a sample: of split {untrusted.name(split, 60)} {untrusted.name(rows, 60)} rows")
        for entry in self._report_prompts():
            name = untrusted.name(entry.get("name"), 120)
            tied = untrusted.whole_number(entry.get("tied_documents"))
            if tied and documents and tied >= 0.1 * documents:
                notes.append(f"{name}: {tied:,} of {documents:,} documents tie between classes")
            if "acc" in _strings(entry.get("at_or_below_majority")):
                notes.append(f"{name}: not better than the commonest class")
            probes = entry.get("probes")
            if isinstance(probes, list) and any(untrusted.mapping(probe).get("converged") is False for probe in probes):
                notes.append(f"{name}: a probe did not converge")
        return notes[:50]

    def _report_prompts(self) -> list[Mapping[str, Any]]:
        entries = self.report.get("prompts")
        return [untrusted.mapping(entry) for entry in entries[:MAX_PROMPTS]] if isinstance(entries, list) else []

    def _prompt_results(self) -> list[dict[str, Any]]:
        """See `contracts.PromptResult`."""
        found = []
        for entry in self._report_prompts():
            given = untrusted.mapping(entry.get("metrics")) or {"acc": entry.get("acc")}
            prompt = untrusted.name(entry.get("name"), 120)
            metrics = {
                name: self._possible(name, value, prompt)
                for name, value in ((untrusted.name(key, 60), value) for key, value in list(given.items())[:50])
            }
            intervals = {
                untrusted.name(key, 60): [untrusted.number(end) for end in ends]
                for key, ends in list(untrusted.mapping(entry.get("intervals_95")).items())[:50]
                if isinstance(ends, list) and len(ends) == 2
            }
            layers = [
                [layer, untrusted.number(of_layer.get("acc")), untrusted.number(of_layer.get("cv_accuracy"))]
                for of_layer in map(untrusted.mapping, _list(entry.get("layers"))[:500])
                if (layer := untrusted.whole_number(of_layer.get("layer"))) is not None
            ]
            fits = [untrusted.mapping(probe).get("converged") for probe in _list(entry.get("probes"))]
            found.append(
                {
                    "name": prompt,
                    "metrics": {key: value for key, value in metrics.items() if value is not None},
                    "intervals": {key: ends for key, ends in intervals.items() if None not in ends},
                    "layers": layers,
                    "tied_documents": untrusted.whole_number(entry.get("tied_documents")),
                    "at_or_below_majority": _strings(entry.get("at_or_below_majority")),
                    "converged": all(fits) if fits else None,
                    "premise": untrusted.text(entry.get("premise"), 400) or None,
                }
            )
        return found

    def _loss(self, limit: str | None) -> dict[str, Any] | None:
        """See `contracts.Loss`. Windows are cut by the tokenizer, so a part of a text is the same part within one only."""
        if self.kind != "loss":
            return None
        sha256 = untrusted.name(self.report.get("text_sha256"), 64)
        tokens = untrusted.whole_number(self.report.get("num_tokens"))
        tokenizer = untrusted.name(self.report.get("tokenizer_sha256"), 64)[:12] or None
        if tokenizer is None and tokens:
            # What older files say of it: [token, its number], which some versions write as text.
            special = [
                [str(of) for of in _list(self.results.get(f"tokenizer_{name}_token"))] for name in ("bos", "eos")
            ]
            made = json.dumps([sha256, tokens, special], sort_keys=True)
            tokenizer = hashlib.sha256(made.encode("utf-8", errors="replace")).hexdigest()[:12]
        # What a model may look back to, in tokens, changes the loss of every tokenizer.
        part = f"full, blocks of {self.report.get('block_tokens')}"
        if limit is not None:
            part = f"{limit} blocks of {self.report.get('block_tokens')}, tokenizer {tokenizer}"
        label = (
            f"{self._dataset()} {self.config.get('test_split') or self.config.get('validation_split') or ''}".strip()
        )
        return {
            "text": f"{sha256}/{untrusted.name(part, 100)}",
            "text_label": untrusted.name(label),
            "tokenizer": tokenizer,
            "num_tokens": tokens if limit is None else None,
        }

    def _parts(self) -> list[list[Any]]:
        """Traces summed over the parameters of a kind in a layer; see `contracts.ModulePart`."""
        rows = untrusted.mapping(untrusted.mapping(self.report.get("window_flatness")).get("by_parameter"))
        sums: dict[tuple[int, str], dict[str, float]] = {}
        for name, row in list(rows.items())[:20_000]:
            total = sums.setdefault(place_of(untrusted.name(name)), {})
            for key, value in untrusted.mapping(row).items():
                found = untrusted.number(value)
                if found is not None and key in ("size", *_TRACES):
                    total[key] = total.get(key, 0.0) + found
        return [
            [layer, kind, int(total.get("size", 0)), {key: total[key] for key in _TRACES if key in total}]
            for (layer, kind), total in sums.items()
        ]

    def _command(self, limit: str | None) -> str:
        """The command line that would repeat the run of this task."""
        words = ["lm_eval", "--model", str(self.run.get("model") or "hf")]
        if self.arguments:
            words += ["--model_args", ",".join(f"{key}={value}" for key, value in self.arguments.items())]
        words += ["--tasks", self.name]
        shots = untrusted.whole_number(self._of_task("n-shot"))
        if shots:
            words += ["--num_fewshot", str(shots)]
        given = untrusted.number(self.run.get("limit"))
        if given is not None and limit is not None:
            words += ["--limit", f"{given:g}"]
        if self.results.get("chat_template") or self.results.get("chat_template_sha"):
            words += ["--apply_chat_template"]
        if self.results.get("fewshot_as_multiturn") is True:
            words += ["--fewshot_as_multiturn"]
        if self.results.get("system_instruction"):
            words += ["--system_instruction", untrusted.name(self.results["system_instruction"], 1000)]
        options = {
            key: self.metadata[key]
            for key in {"natural": ("prompt",), "probe": ("prompt", "probe"), "quad": ("prompt", "probe", "quad")}.get(
                self.kind, ("block_tokens", "flatness") if self.kind == "flatness" else ("block_tokens",)
            )
            if key in self.metadata and self.kind != "other"
        }
        if options:
            words += ["--metadata", json.dumps(options, ensure_ascii=False, sort_keys=True)]
        return untrusted.text(shlex.join(untrusted.name(word, 2000) for word in words), MAX_TEXT)


_OF_EVERY_METRIC = ("aggregation", "higher_is_better")


def _samples(results: Mapping[str, Any], beside: Path | None, task: TaskRecord, name: str) -> Samples | None:
    """Right and wrong by document, of the file beside the result file or of the results themselves."""
    wanted = [metric.partition(",") for metric in task.main_metrics]
    if not wanted or task.column.kind in ("loss", "flatness"):
        return None
    filter_name = wanted[0][2] or "none"
    names = [metric for metric, _, of_filter in wanted if (of_filter or "none") == filter_name]
    inside = untrusted.mapping(results.get("samples")).get(name)
    lines: Iterable[Mapping[str, Any]]
    if isinstance(inside, list):
        lines, file = (sample for sample in inside if isinstance(sample, dict)), ""
    else:
        path = samples_module.sample_files(beside, name) if beside is not None else None
        if path is None:
            return None
        lines, file = samples_module.samples_lines(path), path.name
    found = samples_module.join_samples(lines, names, filter_name=filter_name, file=file)
    if found is not None and task.num_documents is not None and len(found.keys) != task.num_documents:
        raise ValueError(f"there are {len(found.keys):,} documents, and the result is of {task.num_documents:,}")
    return found


def _is_better_higher(metric: str) -> bool:
    """What a file before lm_eval 0.4.3 does not say, of metrics that it had then, and ours."""
    base = metric.partition(",")[0]
    return base not in _LOWER_IS_BETTER and not base.endswith(("perplexity", "_trace", "_loss"))


def _version_text(value: Any) -> str:
    found = untrusted.number(value)
    return f"{found:g}" if found is not None and not isinstance(value, str) else untrusted.name(value, 40)


def _settled(value: Any, most: int = MAX_TEXT) -> str:
    """A setting as text that is the same in every run: functions without their addresses; long texts with their hash."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    found = re.sub(r" at 0x[0-9a-f]+", "", untrusted.text(value, MAX_RESULT_BYTES))
    if len(found) <= most:
        return found
    return f"{found[: most - 20]}… ({hashlib.sha256(found.encode()).hexdigest()[:12]})"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [untrusted.name(item, 60) for item in _list(value)[:50] if isinstance(item, str)]
