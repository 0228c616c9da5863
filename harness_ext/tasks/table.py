"""The probes of one run side by side: Tables 1 and 2 of Saunshi, Malladi, Arora (ICLR 2021), one row a dataset and prompt."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["feature_rows"]

logger = logging.getLogger("lm_eval.harness_ext.tasks")


def feature_rows(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Gather accuracies by kind of features.

    Args:
        reports: For each probe task of a run, its dataset and its report.

    Returns:
        For each dataset and prompt a row: `dataset`, `prompt`, `majority_rate`, `accuracy` by kind of features, and
        `share_of_f_gain` by kind of features other than f: the share of the f-probe's gain over the majority rate that these
        features recover, None where f gains nothing. Rows of one run on one model and the same documents.
    """
    rows: dict[tuple[str, str | None], dict[str, Any]] = {}
    for dataset, report in reports:
        for entry in report.get("prompts", ()):
            if "acc" not in entry:  # --predict_only
                continue
            row = rows.setdefault(
                (dataset, entry.get("id")),
                {
                    "dataset": dataset,
                    "prompt": entry.get("id"),
                    "majority_rate": report["majority_rate"],
                    "accuracy": {},
                    "share_of_f_gain": {},
                },
            )
            row["accuracy"][report["features"]] = entry["acc"]
            if "f_accuracy" in entry:
                # The f-probe with the same training documents; the task `probe_<d>` says the same unless its options differ.
                row["accuracy"].setdefault("f", entry["f_accuracy"])
                row["share_of_f_gain"][report["features"]] = entry["share_of_f_gain"]
    found = [row for row in rows.values() if len(row["accuracy"]) > 1]
    for row in found:
        parts = []
        for kind, accuracy in sorted(row["accuracy"].items(), key=lambda item: -item[1]):
            share = row["share_of_f_gain"].get(kind)
            parts.append(f"{kind} {accuracy:.4f}" + (f" ({share:.0%} of f’s gain)" if share is not None else ""))
        where = f"{row['dataset']}, {row['prompt'] or 'no prompt'}"
        logger.info("Features on %s: %s; majority %.4f", where, ", ".join(parts), row["majority_rate"])
    return found
