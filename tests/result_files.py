"""Result files in the shape of lm_eval 0.4.13, for tests of the leaderboard: small, and with any field to be set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATE = 1_790_000_000.0


def task_config(**changes: Any) -> dict[str, Any]:
    """Config of a classification of lm_eval's own."""
    return {
        "dataset_path": "org/reviews",
        "test_split": "test",
        "doc_to_text": "{{text}} Sentiment:",
        "doc_to_target": "label",
        "doc_to_choice": ["negative", "positive"],
        "output_type": "multiple_choice",
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    } | changes


def result_file(
    tasks: Mapping[str, Mapping[str, Any]] | Sequence[str] = ("reviews",),
    *,
    model: str = "org/tiny-1M",
    acc: Any = 0.75,
    stderr: Any = 0.05,
    documents: int = 100,
    effective: int | None = None,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    shots: int = 0,
    version: Any = 1.0,
    date: float | None = DATE,
    config: Mapping[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A result file; `tasks` are names, or results by name."""
    results = (
        {name: dict(entry) for name, entry in tasks.items()}
        if isinstance(tasks, Mapping)
        else {name: {"alias": name, "acc,none": acc, "acc_stderr,none": stderr} for name in tasks}
    )
    return {
        "results": results,
        "group_subtasks": {},
        "configs": {name: (configs or {}).get(name, task_config()) for name in results},
        "versions": dict.fromkeys(results, version),
        "n-shot": dict.fromkeys(results, shots),
        "higher_is_better": {name: {"acc": True} for name in results},
        "n-samples": {name: {"original": documents, "effective": effective or documents} for name in results},
        "config": {
            "model": "hf",
            "model_args": {"pretrained": model},
            "model_num_parameters": 1_000_000,
            "model_dtype": "torch.float32",
            "model_revision": "main",
            "model_sha": "",
            "limit": None,
        }
        | dict(config or {}),
        "date": date,
        "lm_eval_version": "0.4.13",
        "model_name": model,
        "chat_template": None,
    } | top


def loss_config(**report: Any) -> dict[str, Any]:
    """Config of a loss task of ours; with `window_flatness=` of a flatness task."""
    made = {"text_sha256": "ab" * 32, "num_tokens": 5000, "num_bytes": 20000, "block_tokens": 128} | report
    return {
        "dataset_path": "org/text",
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "metadata": {"version": 1.0, "block_tokens": 128, "report": made},
    }


def lab_json(run: str = "adamw-w64", *, excess: float = 0.02, **changes: Any) -> dict[str, Any]:
    """A lab.json."""
    return {
        "schema_version": 2,
        "made_by": "harness-ext lab",
        "run": run,
        "seed": 0,
        "language": {"kind": "hmm", "seed": 0, "sha256": "cd" * 32},
        "model": {"architecture": "gpt2", "width": 64, "num_parameters": 104000},
        "algorithm": {"name": "adamw", "learning_rate": 0.004},
        "objective": "cross_entropy",
        "step": 600,
        "tokens_seen": 489600,
        "validation_loss": {"value": 3.12, "stderr": 0.003, "tokens": 51000},
        "excess": {"value": excess, "stderr": 0.0003, "documents": 1000},
    } | changes


def write(path: Path, value: Any) -> Path:
    """Write JSON as lm_eval does: NaN and Infinity bare."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    return path


def sample(doc_id: int, value: float, text: str | None = None, **changes: Any) -> dict[str, Any]:
    """A line of a samples file, of a document that `text` identifies."""
    doc = {"text": text if text is not None else f"This is review number {doc_id}.", "label": doc_id % 2}
    made = json.dumps(doc, indent=2, ensure_ascii=False)
    return {
        "doc_id": doc_id,
        "doc": doc,
        "target": str(doc_id % 2),
        "arguments": {"gen_args_0": {"arg_0": doc["text"], "arg_1": " positive"}},
        "resps": [[["-1.0", "False"]]],
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": hashlib.sha256(made.encode()).hexdigest(),
        "acc": value,
    } | changes


def write_samples(path: Path, samples: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in samples), encoding="utf-8")
    return path
