"""Flatness of a model on a corpus: goes through blocks until the errors are small enough, and says what it did.

Every number comes block by block, each block with random directions of its own, so that the mean over blocks is the estimate
and its standard error covers both the sampling of the corpus and that of the directions. Both matter: on SST-2 the Hessian
trace of SmolLM2-135M differs by about 100 % from sentence to sentence, which no number of directions on few sentences removes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from harness_ext.flatness.eigenvalue import top_eigenvalue
from harness_ext.flatness.fisher import FisherTraces, fisher_traces
from harness_ext.flatness.hessian import choose_step, hessian_probes
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters
from harness_ext.flatness.options import MIN_BLOCKS, FlatnessOptions
from harness_ext.ratio import Ratio, ratio_of_sums

__all__ = ["Block", "FlatnessRun", "measure"]

logger = logging.getLogger("lm_eval.harness_ext.flatness")

LAMBDA_TOLERANCE = 0.01
LAMBDA_ITERATIONS = 50


class Block(NamedTuple):
    """One block of a corpus: T tokens, and the token that follows each of them.

    Attributes:
        tokens: T token ids.
        targets: T token ids.
        number: Its place in the corpus, which seeds what is random about it.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    number: int


class FlatnessRun(NamedTuple):
    """What was measured.

    Attributes:
        values: By the number of a block that was measured, its value of each quantity: traces of the block's mean loss over its
            tokens, named as in the metrics of flatness tasks.
        report: Plain JSON types: what was done, and the estimates by parameter; None for a number that cannot be computed.
    """

    values: dict[int, dict[str, float]]
    report: dict[str, Any]


def measure(
    model: nn.Module,
    blocks: Sequence[Block],
    options: FlatnessOptions,
    *,
    device: torch.device,
    max_tokens: int,
    progress: bool = True,
) -> FlatnessRun:
    """Measure the flatness of a model on blocks, in their order.

    Args:
        model: A transformers causal LM; unchanged afterwards.
        blocks: The blocks, at least one, in random order if they are a sample of a corpus.
        options: See `FlatnessOptions`.
        device: Where the model takes its token ids.
        max_tokens: Tokens of blocks that go through a backward pass at once, at most; a longer block goes alone.
        progress: Whether to show a progress bar with the current estimates.

    Raises:
        ValueError: If there is no block, or patterns choose no parameter.
        TypeError: If a chosen parameter has no derivative.
        MemoryError: If the model does not fit into memory in float32 as often as it has to.
    """
    if not blocks:
        raise ValueError("flatness: expected at least one block, got none")
    started = time.perf_counter()
    parameters = select_parameters(model, include=options.include, exclude=options.exclude)
    _check_memory(model, options)
    loss = PretrainingLoss(model, device=device)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype != torch.float32})
    if dtypes:
        logger.info("Flatness: weights in %s are taken to float32, as derivatives need.", ", ".join(dtypes))
    chosen = list(blocks[: options.max_blocks])
    accumulated = _Accumulated(options, sum(p.numel() for p in parameters.values()))
    report: dict[str, Any] = {
        "num_parameters": accumulated.num_parameters,
        "num_tensors": len(parameters),
        "include": list(options.include),
        "exclude": list(options.exclude),
        "seed": options.seed,
        "dtype": "float32",
        "dtype_of_model": dtypes or ["float32"],
        "attention": str(getattr(model.config.get_text_config(), "_attn_implementation", "unknown")),
    }
    stopped = "max_blocks" if len(chosen) < len(blocks) else "end of corpus"
    with prepared(model, parameters):
        step = None
        if "hessian_trace" in options.quantities:
            # On the same block in whatever order they come.
            first = min(chosen, key=lambda block: block.number)
            step = choose_step(loss, parameters, _batch([first]), seed=options.seed)
            report["difference_step"] = step._asdict()
        bar: Any = tqdm(total=len(chosen), desc="Flatness", unit=" blocks", disable=not progress)
        # Precision is looked at after rounds of the same blocks, however they are batched.
        for start in range(0, len(chosen), MIN_BLOCKS):
            for group in _groups(chosen[start : start + MIN_BLOCKS], max_tokens):
                if "fisher_trace" in options.quantities or "ggn_trace" in options.quantities:
                    _add_fisher(accumulated, loss, parameters, group, options)
                for block in group:
                    if step is not None:
                        _add_hessian(accumulated, loss, parameters, block, options, step.step)
                bar.update(len(group))
                bar.set_postfix_str(accumulated.describe())
            if options.rel_stderr is not None and accumulated.is_precise(options.rel_stderr):
                stopped = "rel_stderr"
                break
        bar.close()
        if "lambda_max" in options.quantities:
            of_lambda = chosen[: options.lambda_blocks]
            top = top_eigenvalue(
                loss,
                parameters,
                [_batch([block]) for block in of_lambda],
                seed=options.seed,
                max_iterations=LAMBDA_ITERATIONS,
                tolerance=LAMBDA_TOLERANCE,
            )
            for block, value in zip(of_lambda, top.per_block.tolist(), strict=True):
                accumulated.add(block, {"lambda_max": value})
            report["lambda_max"] = {
                "value": top.value,
                "residual": top.residual,
                "iterations": top.iterations,
                "converged": top.converged,
                "blocks": len(of_lambda),
            }
            if not top.converged:
                logger.warning(
                    "lambda_max: not converged after %d iterations, residual %.2g of %.4g.",
                    top.iterations,
                    top.residual,
                    top.value,
                )
    report |= {
        "blocks": len(accumulated.values),
        "tokens": sum(len(block.tokens) for block in chosen if block.number in accumulated.values),
        "stopped": stopped,
        "estimates": {name: ratio._asdict() for name, ratio in accumulated.estimates().items()},
        # Parameters in modules that the identities of the gradient norms do not cover.
        "gradients_block_by_block": list(accumulated.looped),
        "by_parameter": accumulated.by_parameter(parameters),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return FlatnessRun(accumulated.values, _without_nan(report))


class _Accumulated:
    """What was measured so far."""

    def __init__(self, options: FlatnessOptions, num_parameters: int) -> None:
        self.num_parameters = num_parameters
        self.values: dict[int, dict[str, float]] = {}
        self._weights: dict[int, int] = {}
        self._traces = [name for name in options.quantities if name.endswith("_trace")]
        self._by_parameter: dict[str, dict[str, float]] = {}
        self._tokens_by_parameter = 0
        self.looped: dict[str, None] = {}

    def add(self, block: Block, values: Mapping[str, float]) -> None:
        self.values.setdefault(block.number, {}).update(values)
        self._weights[block.number] = len(block.tokens)

    def add_by_parameter(self, traces: FisherTraces, weights: np.ndarray) -> None:
        self._tokens_by_parameter += int(weights.sum())
        self.looped |= dict.fromkeys(traces.looped)
        for column, of_parameters in (
            ("fisher_trace", traces.by_parameter),
            ("fisher_trace_scaled", traces.scaled_by_parameter),
        ):
            for name, values in (of_parameters or {}).items():
                row = self._by_parameter.setdefault(name, {})
                row[column] = row.get(column, 0.0) + float(values @ weights)

    def estimates(self) -> dict[str, Ratio]:
        names = dict.fromkeys(name for values in self.values.values() for name in values)
        found = {}
        for name in names:
            pairs = [(values[name], self._weights[n]) for n, values in self.values.items() if name in values]
            found[name] = ratio_of_sums([value * weight for value, weight in pairs], [weight for _, weight in pairs])
        return found

    def is_precise(self, rel_stderr: float) -> bool:
        if len(self.values) < MIN_BLOCKS:
            return False
        estimates = self.estimates()
        return all(estimates[name].stderr <= rel_stderr * abs(estimates[name].value) for name in self._traces)

    def describe(self) -> str:
        estimates = self.estimates()
        parts = []
        for name in ("fisher_trace", "hessian_trace"):
            if name in estimates:
                value, stderr = estimates[name]
                error = "" if math.isnan(stderr) else f" ± {stderr:.2g}"
                parts.append(f"{name.removesuffix('_trace')} {value:.4g}{error}")
        return ", ".join(parts)

    def by_parameter(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, float]]:
        return {
            name: {"size": parameters[name].numel()}
            | {column: total / self._tokens_by_parameter for column, total in row.items()}
            for name, row in self._by_parameter.items()
        }


def _add_fisher(
    accumulated: _Accumulated,
    loss: PretrainingLoss,
    parameters: Mapping[str, nn.Parameter],
    group: Sequence[Block],
    options: FlatnessOptions,
) -> None:
    weights = np.array([len(block.tokens) for block in group], dtype=np.float64)

    def draw(labels: str) -> FisherTraces:
        return fisher_traces(
            loss,
            parameters,
            _batch(group),
            seed=options.seed,
            labels=labels,  # type: ignore[arg-type]
            scaled="scaled" in options.quantities,
        )

    fisher = draw(options.labels) if "fisher_trace" in options.quantities else None
    # The Fisher matrix with labels drawn from the model is the Gauss-Newton matrix of this loss: one estimate serves both
    # where it is drawn in the same way.
    ggn = None
    if "ggn_trace" in options.quantities:
        ggn = fisher if fisher is not None and options.labels == "signs" else draw("signs")
    for name, traces in (("fisher_trace", fisher), ("ggn_trace", ggn)):
        if traces is None:
            continue
        for i, block in enumerate(group):
            values = {"loss": traces.losses[i], name: traces.traces[i]}
            if traces.scaled_traces is not None:
                values[f"{name}_scaled"] = traces.scaled_traces[i]
            accumulated.add(block, {key: float(value) for key, value in values.items()})
    by_parameter = fisher if fisher is not None else ggn
    assert by_parameter is not None, "one of the two is asked for"
    accumulated.add_by_parameter(by_parameter, weights)


def _add_hessian(
    accumulated: _Accumulated,
    loss: PretrainingLoss,
    parameters: Mapping[str, nn.Parameter],
    block: Block,
    options: FlatnessOptions,
    step: float,
) -> None:
    for scaled in (False, True) if "scaled" in options.quantities else (False,):
        probes = hessian_probes(
            loss,
            parameters,
            _batch([block]),
            seed=options.seed,
            probes=range(options.probes),
            scaled=scaled,
            step=step,
        )
        name = "hessian_trace_scaled" if scaled else "hessian_trace"
        accumulated.add(block, {"loss": probes[0].loss, name: float(np.mean([probe.hessian for probe in probes]))})


def _batch(blocks: Sequence[Block]) -> Blocks:
    return Blocks(
        torch.tensor([list(block.tokens) for block in blocks]),
        torch.tensor([list(block.targets) for block in blocks]),
        tuple(block.number for block in blocks),
    )


def _groups(blocks: Sequence[Block], max_tokens: int) -> Iterator[list[Block]]:
    """Neighbours of equal length, `max_tokens` together."""
    group: list[Block] = []
    for block in blocks:
        length = len(block.tokens)
        if group and (len(group[0].tokens) != length or (len(group) + 1) * length > max_tokens):
            yield group
            group = []
        group.append(block)
    yield group


def _without_nan(value: Any) -> Any:
    """Return plain JSON types with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_memory(model: nn.Module, options: FlatnessOptions) -> None:
    """Refuse a model whose float32 copies do not fit, before anything is computed."""
    # Beside float32 weights, `lambda_max` holds moved weights, a gradient and a product in float32, four vectors in bfloat16.
    copies = 5 if "lambda_max" in options.quantities else 0
    needed: dict[torch.device, int] = {}
    for parameter in model.parameters():
        upcast = int(parameter.dtype != torch.float32)
        num_bytes = 4 * parameter.numel() * (copies + upcast)
        needed[parameter.device] = needed.get(parameter.device, 0) + num_bytes
    for device, num_bytes in needed.items():
        free = _free_bytes(device)
        if free is not None and num_bytes > free:
            gibibytes = f"{num_bytes / 2**30:.1f} GiB on {device}, {free / 2**30:.1f} GiB are free"
            raise MemoryError(
                f"flatness: derivatives need float32 weights{', lambda_max five times more' if copies else ''}: {gibibytes}. "
                'Leave lambda_max out, --metadata \'{"flatness": {"quantities": ["fisher_trace", "hessian_trace"]}}\', or '
                "use a device with more memory."
            )


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    return None
