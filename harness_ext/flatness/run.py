"""Flatness of a model on a corpus: goes through blocks until the errors are small enough, and says what it did.

Every number comes block by block, each block with random directions of its own, so that the mean over blocks is the estimate
and its standard error covers both the sampling of the corpus and that of the directions. Both matter: on SST-2 the Hessian
trace of SmolLM2-135M differs by about 100 % from sentence to sentence, which no number of directions on few sentences removes.

Several processes, each with the whole model, share the blocks of a round, and one of them takes `lambda_max`, which is not cut
into parts: its products would have to be summed over processes, vectors as large as the model.

Results of batches of blocks are kept as soon as they are there, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from harness_ext.flatness.eigenvalue import top_eigenvalue
from harness_ext.flatness.fisher import FisherTraces, fisher_traces
from harness_ext.flatness.hessian import choose_step, hessian_probes
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters
from harness_ext.flatness.options import MIN_BLOCKS, FlatnessOptions
from harness_ext.ranks import ALONE, Progress, Ranks, share_out
from harness_ext.ratio import Ratio, ratio_of_sums

__all__ = ["Block", "FlatnessRun", "measure"]

logger = logging.getLogger("lm_eval.harness_ext.flatness")

ESTIMATORS = 1
"""Goes up with every change of the estimators' numbers, so that none is taken from a store in which older ones lie."""

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


class Kept(Protocol):
    """Where results outlive a process; see `engine.kept`."""

    def find(self, questions: Sequence[str]) -> Sequence[Any | None]:
        """Results by a text that says what they depend on besides the model; None for those that are not there."""

    def keep(self, question: str, result: Any) -> None:
        """Keep a result of plain JSON types."""


def measure(
    model: nn.Module,
    blocks: Sequence[Block],
    options: FlatnessOptions,
    *,
    device: torch.device,
    max_tokens: int,
    progress: bool = True,
    ranks: Ranks = ALONE,
    kept: Kept | None = None,
) -> FlatnessRun:
    """Measure the flatness of a model on blocks, in their order.

    Args:
        model: A transformers causal LM; unchanged afterwards.
        blocks: The blocks, at least one, in random order if they are a sample of a corpus.
        options: See `FlatnessOptions`.
        device: Where the model takes its token ids.
        max_tokens: Tokens of blocks that go through a backward pass at once, at most; a longer block goes alone.
        progress: Whether to show a progress bar with the current estimates.
        ranks: The processes that share the blocks; all call this with the same ones, and all get what was measured.
        kept: Where results of blocks of this model outlive the process, and are taken from; None: nowhere.

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
    text = repr([(block.number, list(block.tokens), list(block.targets)) for block in chosen])
    ranks.check_same(blake2b(text.encode(), digest_size=16).hexdigest(), "blocks")
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
        work = _Work(loss, parameters, options, max_tokens, kept)
        if "hessian_trace" in options.quantities:
            report["difference_step"] = work.choose_step(chosen, ranks)
        total = len(chosen) if work.wants_traces else 0
        with Progress(ranks, total=total, desc="Flatness", unit=" blocks", shown=progress) as bar:
            for pieces in work.rounds(chosen):
                for result in _results(work, pieces, ranks, bar):
                    accumulated.take(result)
                    bar.update(0, accumulated.describe())
                    if "lambda_max" in result:
                        report["lambda_max"] = result["lambda_max"]
                if options.rel_stderr is not None and accumulated.is_precise(options.rel_stderr):
                    stopped = "rel_stderr"
                    break
            bar.finish()
        if "lambda_max" in options.quantities and "lambda_max" not in report:
            for result in _results(work, [work.last_piece(chosen)], ranks, None):
                accumulated.take(result)
                report["lambda_max"] = result["lambda_max"]
    top = report.get("lambda_max")
    if top is not None and not top["converged"]:
        logger.warning(
            "lambda_max: not converged after %d iterations, residual %.2g of %.4g.",
            top["iterations"],
            top["residual"],
            top["value"],
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

    def take(self, result: Mapping[str, Any]) -> None:
        """Take what `_Work.do` has found."""
        for number, num_tokens, values in result["values"]:
            self.values.setdefault(number, {}).update(values)
            self._weights[number] = num_tokens
        self._tokens_by_parameter += result.get("tokens_by_parameter", 0)
        self.looped |= dict.fromkeys(result.get("looped", ()))
        for name, sums in result.get("by_parameter", {}).items():
            row = self._by_parameter.setdefault(name, {})
            for column, value in sums.items():
                row[column] = row.get(column, 0.0) + value

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


class _Piece(NamedTuple):
    """Work of one process: a batch of blocks for Fisher traces, a block for Hessian traces or their step, or `lambda_max`."""

    kind: Literal["fisher", "hessian", "step", "lambda_max"]
    blocks: tuple[Block, ...]


class _Work:
    """Does pieces of a measurement. Results are plain JSON types, since they may be those of another process."""

    def __init__(
        self,
        loss: PretrainingLoss,
        parameters: Mapping[str, nn.Parameter],
        options: FlatnessOptions,
        max_tokens: int,
        kept: Kept | None,
    ) -> None:
        self._loss, self._parameters, self._options, self._max_tokens = loss, parameters, options, max_tokens
        self._kept = kept
        self._step = 0.0
        self._wants_fisher = not {"fisher_trace", "ggn_trace"}.isdisjoint(options.quantities)
        self._wants_hessian = "hessian_trace" in options.quantities

    @property
    def wants_traces(self) -> bool:
        return self._wants_fisher or self._wants_hessian

    def choose_step(self, blocks: Sequence[Block], ranks: Ranks) -> dict[str, Any]:
        """Choose the step of differences, on the same block in whatever order they come."""
        found: dict[str, Any] | None = None
        if ranks.is_first:
            first = min(blocks, key=lambda block: block.number)
            (found,) = self.find([_Piece("step", (first,))])
            if found is None:
                found = choose_step(self._loss, self._parameters, _batch([first]), seed=self._options.seed)._asdict()
                self._keep(_Piece("step", (first,)), found)
        chosen: dict[str, Any] = ranks.share(found)[0]
        self._step = chosen["step"]
        return chosen

    def rounds(self, blocks: Sequence[Block]) -> list[list[_Piece]]:
        """Pieces in the order in which one process does them: rounds after which precision is looked at, or one with all."""
        found = []
        # Batches end with a round of so many blocks, whether precision is looked at or not.
        for start in range(0, len(blocks), MIN_BLOCKS):
            pieces: list[_Piece] = []
            for group in _groups(blocks[start : start + MIN_BLOCKS], self._max_tokens):
                if self._wants_fisher:
                    pieces.append(_Piece("fisher", tuple(group)))
                if self._wants_hessian:
                    pieces += [_Piece("hessian", (block,)) for block in group]
            found.append(pieces)
        if self._options.rel_stderr is not None:
            return found
        # It needs nothing of the traces, so that one rank may take it while others do those.
        last = [self.last_piece(blocks)] if "lambda_max" in self._options.quantities else []
        return [[piece for pieces in found for piece in pieces] + last]

    def last_piece(self, blocks: Sequence[Block]) -> _Piece:
        """The one that is not a part of a trace."""
        return _Piece("lambda_max", tuple(blocks[: self._options.lambda_blocks]))

    def cost(self, piece: _Piece) -> float:
        """About how long a piece takes, in forward passes of a token; a backward pass takes two."""
        options, num_tokens = self._options, sum(len(block.tokens) for block in piece.blocks)
        forms = 2 if "scaled" in options.quantities else 1
        if piece.kind == "fisher":
            draws = 2 if {"fisher_trace", "ggn_trace"} <= set(options.quantities) and options.labels != "signs" else 1
            return 3.0 * num_tokens * draws
        products = options.probes * forms if piece.kind == "hessian" else LAMBDA_ITERATIONS / 2
        return 6.0 * num_tokens * products

    def counts(self, piece: _Piece) -> int:
        """Blocks that are done with this piece."""
        is_last = piece.kind == ("hessian" if self._wants_hessian else "fisher")
        return len(piece.blocks) if is_last else 0

    def find(self, pieces: Sequence[_Piece]) -> list[dict[str, Any] | None]:
        """What `do` has found for pieces in this or an earlier run; None for those that are still to be done."""
        if self._kept is None:
            return [None] * len(pieces)
        return list(self._kept.find([self._question(piece) for piece in pieces]))

    def do(self, piece: _Piece) -> dict[str, Any]:
        """What `_Accumulated.take` takes."""
        if piece.kind == "fisher":
            found = self._fisher(piece.blocks)
        elif piece.kind == "hessian":
            found = self._hessian(piece.blocks[0])
        else:
            found = self._lambda_max(piece.blocks)
        self._keep(piece, found)
        return found

    def _keep(self, piece: _Piece, found: dict[str, Any]) -> None:
        if self._kept is not None:
            self._kept.keep(self._question(piece), found)

    def _question(self, piece: _Piece) -> str:
        """All that a result depends on besides the model."""
        options = self._options
        settings: list[Any] = [ESTIMATORS, piece.kind, options.seed, options.include, options.exclude]
        if piece.kind == "fisher":
            settings += [sorted({"fisher_trace", "ggn_trace", "scaled"} & set(options.quantities)), options.labels]
        elif piece.kind == "hessian":
            settings += ["scaled" in options.quantities, options.probes, self._step]
        return json.dumps([*settings, [(block.number, [*block.tokens], [*block.targets]) for block in piece.blocks]])

    def _fisher(self, group: Sequence[Block]) -> dict[str, Any]:
        options = self._options
        weights = np.array([len(block.tokens) for block in group], dtype=np.float64)

        def draw(labels: str) -> FisherTraces:
            return fisher_traces(
                self._loss,
                self._parameters,
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
        of_blocks: list[dict[str, float]] = [{} for _ in group]
        for name, traces in (("fisher_trace", fisher), ("ggn_trace", ggn)):
            if traces is None:
                continue
            for i, values in enumerate(of_blocks):
                values |= {"loss": float(traces.losses[i]), name: float(traces.traces[i])}
                if traces.scaled_traces is not None:
                    values[f"{name}_scaled"] = float(traces.scaled_traces[i])
        shown = fisher if fisher is not None else ggn
        assert shown is not None, "one of the two is asked for"
        sums: dict[str, dict[str, float]] = {}
        for column, of_parameters in (
            ("fisher_trace", shown.by_parameter),
            ("fisher_trace_scaled", shown.scaled_by_parameter),
        ):
            for name, of_parameter in (of_parameters or {}).items():
                sums.setdefault(name, {})[column] = float(of_parameter @ weights)
        return {
            "values": [
                (block.number, len(block.tokens), values) for block, values in zip(group, of_blocks, strict=True)
            ],
            "by_parameter": sums,
            "tokens_by_parameter": int(weights.sum()),
            "looped": list(shown.looped),
        }

    def _hessian(self, block: Block) -> dict[str, Any]:
        options = self._options
        values: dict[str, float] = {}
        for scaled in (False, True) if "scaled" in options.quantities else (False,):
            probes = hessian_probes(
                self._loss,
                self._parameters,
                _batch([block]),
                seed=options.seed,
                probes=range(options.probes),
                scaled=scaled,
                step=self._step,
            )
            name = "hessian_trace_scaled" if scaled else "hessian_trace"
            values |= {"loss": probes[0].loss, name: float(np.mean([probe.hessian for probe in probes]))}
        return {"values": [(block.number, len(block.tokens), values)]}

    def _lambda_max(self, blocks: Sequence[Block]) -> dict[str, Any]:
        top = top_eigenvalue(
            self._loss,
            self._parameters,
            [_batch([block]) for block in blocks],
            seed=self._options.seed,
            max_iterations=LAMBDA_ITERATIONS,
            tolerance=LAMBDA_TOLERANCE,
        )
        return {
            "values": [
                (block.number, len(block.tokens), {"lambda_max": value})
                for block, value in zip(blocks, top.per_block.tolist(), strict=True)
            ],
            "lambda_max": {
                "value": top.value,
                "residual": top.residual,
                "iterations": top.iterations,
                "converged": top.converged,
                "blocks": len(blocks),
            },
        }


def _results(work: _Work, pieces: Sequence[_Piece], ranks: Ranks, bar: Progress | None) -> Iterator[dict[str, Any]]:
    """Do pieces, each on one rank, and yield all results on every rank, in the order of the pieces."""
    known = work.find(pieces)
    if num_known := sum(result is not None for result in known):
        logger.info("Flatness: %d of %d results of blocks are in the store.", num_known, len(pieces))
    where = ranks.gather_flags(np.array([result is not None for result in known], dtype=bool))
    owners = [np.flatnonzero(where[:, place]).tolist() for place in range(len(pieces))]
    rank_of = share_out(
        [0.0 if of_piece else work.cost(piece) for piece, of_piece in zip(pieces, owners, strict=True)],
        ranks.size,
        possible=[of_piece or range(ranks.size) for of_piece in owners],
    )
    done: list[tuple[int, dict[str, Any]]] = []
    for place, (piece, rank, found) in enumerate(zip(pieces, rank_of, known, strict=True)):
        if rank != ranks.rank:
            continue
        result = work.do(piece) if found is None else found
        if bar is not None:
            bar.update(work.counts(piece))
        if ranks.is_alone:
            yield result
        else:
            done.append((place, result))
    everything = dict(entry for of_rank in ranks.share(done) for entry in of_rank)
    for place in sorted(everything):
        yield everything[place]


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
