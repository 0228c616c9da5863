"""Where the values of a metric lie: a number outside is a mistake of the file, whatever made it."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

__all__ = ["Range", "is_bounded", "is_share", "range_of"]

_SHARES = {
    "acc",
    "acc_norm",
    "acc_bytes",
    "acc_mutual_info",
    "acc_context",
    "acc_pmi",
    "acc_batch",
    "exact_match",
    "em",
}
"""Names of metrics that are shares of documents; pass@k is one too."""

_BOUNDED = {"f1", "macro_f1", "balanced_acc", "ece", "mc1", "mc2"}
"""Names of other metrics between 0 and 1. The Brier score of several classes goes up to 2."""

_PER_CENT = {"exact_match", "em", "f1"}
"""Of these names some tasks of lm_eval's give per cent, such as SQuAD 2.0."""

_OWN = ("natural", "probe", "quad")
"""Kinds whose metrics are ours, all accuracies of which begin with `acc`: `acc_worst`, `acc@it_was`."""

_ROUNDING = 1e-6
"""What a mean of documents may exceed its range by."""


class Range(NamedTuple):
    """Numbers from `low` to `high`; without `low` itself where it is open."""

    low: float
    high: float
    is_open: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        if self.is_open and value <= self.low:
            return False
        return self.low - _ROUNDING <= value <= self.high + _ROUNDING

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"a number above {self.low:g}" if self.is_open else f"{self.low:g} or more"
        return f"{self.low:g} to {self.high:g}"


_SHARE = Range(0.0, 1.0)

_RANGES = {
    "brier": Range(0.0, 2.0),
    "brier_score": Range(0.0, 2.0),
    "mcc": Range(-1.0, 1.0),
    "bleu": Range(0.0, 100.0),
    "chrf": Range(0.0, 100.0),
    "majority_rate": _SHARE,
    "loss": Range(0.0, math.inf),
    "bits_per_byte": Range(0.0, math.inf),
    "fisher_trace": Range(0.0, math.inf),
    "ppl": Range(0.0, math.inf, is_open=True),
    "perplexity": Range(0.0, math.inf, is_open=True),
    "word_perplexity": Range(0.0, math.inf, is_open=True),
    "byte_perplexity": Range(0.0, math.inf, is_open=True),
}


def is_share(metric: str) -> bool:
    """Whether a metric is a share of documents; a filter's name after a comma says nothing."""
    base = metric.partition(",")[0]
    return base in _SHARES or re.fullmatch(r"pass@\d+", base) is not None


def is_bounded(metric: str) -> bool:
    """Whether the values of a metric lie between 0 and 1, per cent left aside."""
    return is_share(metric) or metric.partition(",")[0] in _BOUNDED


def range_of(metric: str, kind: str) -> Range | None:
    """Where the values of a metric lie; None where nothing is known of it.

    Args:
        metric: Its name, with a filter's after a comma.
        kind: Of the task, as `contracts.Kind`.
    """
    base = metric.partition(",")[0]
    is_own = kind in _OWN
    if base in _PER_CENT and not is_own:
        return Range(0.0, 100.0)
    if is_bounded(base) or (is_own and re.match(r"acc([_@]|$)", base)):
        return _SHARE
    return _RANGES.get(base)
