"""Time and memory of building the leaderboard from many result files, and of building it again after adding one.

    python benchmarks/leaderboard_build.py [--files 10000] [--models 1000] [--tasks 6] [--lab 40] [--folder FOLDER]

Writes synthetic result files in the shape that lm_eval 0.4.13 writes, each with some of sixty tasks (classification with one
prompt each, natural and probe), some with a loss and a flatness, then runs `harness-ext leaderboard build` in processes of its
own: without a cache, with the cache, and after adding one file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TASKS = 60
DOCUMENTS = 1821
TEXT_SHA256 = "5762fdc724500f6047ec59c16a992886d8d2afff63feee92692032d69c924e65"


def task_entry(number: int, accuracy: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results and config of one task."""
    is_probe = number % 2 == 1
    stderr = (accuracy * (1 - accuracy) / DOCUMENTS) ** 0.5
    results: dict[str, Any] = {"sample_len": DOCUMENTS}
    for metric in (
        "acc",
        "balanced_acc",
        "macro_f1",
        "ece",
        *(() if is_probe else ("acc_pmi", "acc_batch", "acc_context")),
    ):
        results |= {f"{metric},none": accuracy, f"{metric}_stderr,none": stderr}
    results |= {"majority_rate,none": 0.5008, "majority_rate_stderr,none": "N/A"}
    prompt: dict[str, Any] = {
        "name": "document",
        "acc": accuracy,
        "probes": [{"seed": 0, "acc": accuracy, "converged": True}],
    }
    if not is_probe:
        prompt = {
            "name": "this_movie_is",
            "digest": f"{number:012d}",
            "template": "{{ text }} This movie is",
            "label_words": {"negative": ["terrible"], "positive": ["great"]},
            "metrics": {"acc": accuracy, "acc_pmi": accuracy, "macro_f1": accuracy},
        }
    prompt |= {"intervals_95": {"acc": [accuracy - 0.02, accuracy + 0.02]}, "at_or_below_majority": []}
    report = {"documents": DOCUMENTS, "majority_rate": 0.5008, "prompts": [prompt]}
    if is_probe:
        report |= {"features": "f", "options": {"layer": "last", "seeds": [0], "num_folds": 5}}
    config = {
        "dataset_path": f"made/up{number // 2}",
        "test_split": "test",
        "doc_to_text": "text",
        "doc_to_choice": ["negative", "positive"],
        "output_type": "multiple_choice",
        "num_fewshot": 0,
        "metadata": {"version": 1.0, "report": report},
    }
    return results, config


def result_file(model: int, part: int, *, tasks: int, is_lab: bool, rng: random.Random) -> dict[str, Any]:
    """A whole result file: the next tasks of a model; of a lab model, its first part has loss and flatness too."""
    skill = rng.gauss(0, 0.05)
    results: dict[str, Any] = {}
    configs: dict[str, Any] = {}
    for place in range(tasks):
        number = (part * tasks + place) % TASKS
        name = f"{'probe' if number % 2 else 'natural'}_made{number // 2}"
        results[name], configs[name] = task_entry(number, min(max(0.7 + skill + rng.gauss(0, 0.03), 0.05), 0.98))
    if is_lab and part == 0:
        loss = rng.uniform(0.9, 1.2)
        corpus = {"text_sha256": TEXT_SHA256, "num_tokens": 310678, "block_tokens": 128}
        results["loss_made"] = {"loss,none": 2.5 * loss, "bits_per_byte,none": loss, "bits_per_byte_stderr,none": 0.001}
        configs["loss_made"] = {"metadata": {"report": corpus}, "dataset_path": "made/text", "test_split": "test"}
        traces = {f"layers.{layer}.mlp.weight": {"size": 1000, "fisher_trace": rng.random()} for layer in range(12)}
        flat = {"blocks": 64, "include": ["*"], "exclude": [], "seed": 0, "by_parameter": traces}
        results["flatness_made"] = {"fisher_trace,none": 5000 * rng.random(), "fisher_trace_stderr,none": 50.0}
        configs["flatness_made"] = {"metadata": {"report": corpus | {"window_flatness": flat}}, "test_split": "test"}
    return {
        "results": results,
        "configs": configs,
        "versions": dict.fromkeys(results, 1.0),
        "n-shot": dict.fromkeys(results, 0),
        "higher_is_better": {name: {"acc": True, "ece": False} for name in results},
        "n-samples": {name: {"original": DOCUMENTS, "effective": DOCUMENTS} for name in results},
        "config": {
            "model": "hf",
            "model_args": {"pretrained": f"made/family{model % 20}-{model}m", "dtype": "bfloat16"},
            "model_num_parameters": 1_000_000 * (model + 1),
            "model_dtype": "torch.bfloat16",
            "model_revision": "main",
            "limit": None,
        },
        "date": 1.7e9 + model * 100 + part,
        "pretty_env_info": "x" * 5000,
        "lm_eval_version": "0.4.13",
        "model_name": f"made/family{model % 20}-{model}m",
    }


def write_files(folder: Path, *, files: int, models: int, tasks: int, lab: int, seed: int = 0) -> None:
    """Write so many result files of so many models, of which `lab` have loss and flatness."""
    rng = random.Random(seed)
    for number in range(files):
        model, part = number % models, number // models
        target = folder / f"model{model}" / f"results_{part}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result_file(model, part, tasks=tasks, is_lab=model < lab, rng=rng), indent=2))


def build(results: Path, out: Path, cache: Path) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak megabytes of one build in a process of its own."""
    environment = os.environ | {"HARNESS_EXT_CACHE": str(cache)}
    start = time.perf_counter()
    command = [sys.executable, "-m", "harness_ext", "leaderboard", "build", str(results), "--out", str(out)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"the build ended with {process.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=1_000)
    parser.add_argument("--tasks", type=int, default=6, help="of a file")
    parser.add_argument("--lab", type=int, default=40, help="models with loss and flatness")
    parser.add_argument("--folder", type=Path, help="keep the files there (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        results, out, cache = folder / "results", folder / "site", folder / "cache"
        write_files(results, files=args.files, models=args.models, tasks=args.tasks, lab=args.lab)
        lab = f"{args.lab} models with loss and flatness"
        print(f"{args.files:,} files, {args.models:,} models, {args.tasks} of {TASKS} tasks a file, {lab}")
        for name, change in (("first build", False), ("nothing new", False), ("one file added", True)):
            if change:
                added = result_file(args.models, 0, tasks=args.tasks, is_lab=False, rng=random.Random(1))
                (results / "added").mkdir(exist_ok=True)
                (results / "added" / "results_0.json").write_text(json.dumps(added, indent=2))
            wall, cpu, memory = build(results, out, cache)
            print(f"{name:15} {wall:6.2f} s wall  {cpu:6.2f} s CPU  {memory:6.0f} MB")


if __name__ == "__main__":
    main()
