"""The flatness of models of unlike sizes, each viewed as a model of the largest architecture.

The trace of a Hessian depends on how many weights share the work, so that traces of unlike models do not compare. Liu, Xie, Li
and Ma (ICML 2023) view a small transformer as a large one that computes the same function (`harness_ext.flatness.widen`), and
compare those.
"""

from __future__ import annotations

import copy
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_ext.cli.evaluation import Evaluation, evaluate_all, find_results, link_data
from harness_ext.cli.lab.report import WIDENED_RESULTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from harness_ext.lab.checkpoints import Checkpoint
    from harness_ext.lab.run import Plan

__all__ = ["common_architecture", "measure_widened"]

_FOLDER = "widened"
_QUANTITIES = ("fisher_trace", "hessian_trace")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def measure_widened(out: Path, plan: Plan, groups: Mapping[str, Any], *, workers: int, threads: int) -> dict[str, str]:
    """Measure the traces of the models in groups as models of the largest architecture, where their sizes differ.

    Result files of lm_eval go to `OUT/results_widened/<name>`; models that have one are left alone. The widened models
    themselves are deleted.

    Args:
        out: Folder of the lab.
        plan: Its plan; without a flatness task nothing is done.
        groups: Content of `groups.json`.
        workers: Processes at a time.
        threads: CPU threads of each.

    Returns:
        Models that cannot be viewed so, by name, and why.

    Raises:
        RuntimeError: If lm_eval fails on a model; the others have been finished.
    """
    from transformers import AutoConfig

    from harness_ext.flatness.widen import plan as plan_widening
    from harness_ext.lab.checkpoints import find_checkpoints

    tasks = [task for task in plan.tasks if task.startswith("flatness")]
    wanted = {model["name"] for group in groups["groups"] for model in group["models"]}
    checkpoints = [one for one in find_checkpoints(out / "runs") if one.name in wanted]
    if not tasks or not checkpoints:
        return {}
    configs = {one.name: AutoConfig.from_pretrained(one.folder) for one in checkpoints}
    family = statistics.mode(config.model_type for config in configs.values())
    of_family = [one for one in checkpoints if configs[one.name].model_type == family]
    if len({one.num_parameters for one in of_family}) < 2:
        return {}
    left_out = {
        name: f"a {config.model_type}, where most are {family}"
        for name, config in configs.items()
        if config.model_type != family
    }
    large = common_architecture([configs[one.name] for one in of_family])
    evaluations, missing = [], []
    for checkpoint in of_family:
        try:
            plan_widening(configs[checkpoint.name], large)
        except ValueError as err:
            left_out[checkpoint.name] = str(err)
            continue
        folder = out / _FOLDER / checkpoint.run / "checkpoints" / checkpoint.folder.name
        options = {"flatness": {"quantities": list(_QUANTITIES)}}
        evaluations.append(Evaluation(checkpoint.name, folder.relative_to(out).as_posix(), tasks, metadata=options))
        if find_results(out / WIDENED_RESULTS, checkpoint.name) is None:
            missing.append((checkpoint, folder))
    try:
        for checkpoint, folder in missing:
            _write(checkpoint, large, folder, data=out / "data")
        evaluate_all(
            evaluations,
            where=out,
            out=out / WIDENED_RESULTS,
            workers=workers,
            threads=threads,
            what="Measuring flatness as the largest",
        )
    finally:
        shutil.rmtree(out / _FOLDER, ignore_errors=True)
    return left_out


def common_architecture(configs: Sequence[PretrainedConfig]) -> PretrainedConfig:
    """Return the configuration of one family whose every size is the largest of those given."""
    from harness_ext.flatness.widen import Sizes

    large = copy.deepcopy(configs[0])
    name = Sizes.of(large).name
    for size in map(name, _SIZES):
        found = [getattr(config, size) for config in configs if getattr(config, size, None) is not None]
        if found:
            setattr(large, size, max(found))
    if getattr(large, "head_dim", None) is not None:
        large.head_dim = large.hidden_size // large.num_attention_heads
    return large


def _write(checkpoint: Checkpoint, large: PretrainedConfig, folder: Path, *, data: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from harness_ext.flatness.widen import widen
    from harness_ext.lab.checkpoints import without_bars

    with without_bars():
        widen(AutoModelForCausalLM.from_pretrained(checkpoint.folder), large).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint.folder).save_pretrained(folder)
    link_data(data, folder / "data")
