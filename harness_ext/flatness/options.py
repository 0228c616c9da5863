"""Options of a measurement of flatness."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIN_BLOCKS", "QUANTITIES", "FlatnessOptions"]

QUANTITIES = ("fisher_trace", "hessian_trace", "ggn_trace", "scaled", "lambda_max")
"""What can be measured; `scaled` adds the weight-scaled forms of the traces that are measured."""

MIN_BLOCKS = 16
"""How often precision is looked at: before so many blocks a standard error is too uncertain itself to stop at."""


@dataclass(frozen=True)
class FlatnessOptions:
    """Options of flatness tasks, `--metadata '{"flatness": {...}}'`.

    Attributes:
        quantities: Some of `QUANTITIES`.
        max_blocks: Blocks measured at most.
        rel_stderr: Stop when the relative standard error of every trace is at most this, which is looked at after every
            `MIN_BLOCKS` blocks; None: measure `max_blocks`.
        labels: How labels are drawn from the model for `fisher_trace`: "signs" (random signs through the square root of their
            covariance, lower variance) or "sampled" (one label a token, as in the definition).
        probes: Random directions a block for the Hessian. More help only where a block's own value is wanted.
        lambda_blocks: Blocks whose mean loss `lambda_max` belongs to.
        include: Patterns of the parameters that count.
        exclude: Patterns of parameters that do not, with priority.
        seed: Of everything random.
    """

    quantities: tuple[str, ...] = ("fisher_trace", "hessian_trace", "scaled", "lambda_max")
    max_blocks: int = 64
    rel_stderr: float | None = None
    labels: str = "signs"
    probes: int = 1
    lambda_blocks: int = 8
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    seed: int = 0

    def problem(self) -> str | None:
        """What is wrong with them, or None."""
        known = ", ".join(QUANTITIES)
        for name in ("quantities", "include", "exclude"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(entry, str) for entry in value):
                return f"{name} is {value!r}, expected a list of strings"
        if not self.quantities or not set(self.quantities) <= set(QUANTITIES):
            return f"quantities is {list(self.quantities)!r}, expected some of {known}"
        if self.quantities == ("scaled",):
            return 'quantities is ["scaled"], expected the traces that are to be scaled beside it'
        for name in ("max_blocks", "probes", "lambda_blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                return f"{name} is {value!r}, expected a positive integer"
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            return f"seed is {self.seed!r}, expected a non-negative integer"
        if self.rel_stderr is not None:
            if not isinstance(self.rel_stderr, int | float) or not 0 < self.rel_stderr < 1:
                return f"rel_stderr is {self.rel_stderr!r}, expected a number between 0 and 1, such as 0.05"
            if self.max_blocks < MIN_BLOCKS:
                return (
                    f"max_blocks is {self.max_blocks}, and rel_stderr is looked at after {MIN_BLOCKS} blocks at the earliest; "
                    f"expected max_blocks of at least {MIN_BLOCKS}"
                )
        if self.labels not in ("signs", "sampled"):
            return f'labels is {self.labels!r}, expected "signs" or "sampled"'
        if not self.include:
            return 'include is empty, expected patterns of parameter names, such as ["*"]'
        return None
