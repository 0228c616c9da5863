"""What the figures of the lab have in common: colours, and files that depend on the figure alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BLACK", "COLOURS", "save_figure"]

BLACK = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", BLACK)
"""Okabe and Ito (2008): told apart with any colour vision."""


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG of 200 dpi and as SVG, and return their paths.

    Args:
        figure: Of matplotlib.
        path: Without an ending.
    """
    from matplotlib import rc_context

    images = [(path.with_name(f"{path.name}.png"), None), (path.with_name(f"{path.name}.svg"), {"Date": None})]
    for image, metadata in images:
        # Otherwise the SVG has a time and random ids, and the same results give another file.
        with rc_context({"svg.hashsalt": "harness-ext"}):
            figure.savefig(image, dpi=200, metadata=metadata)
    return [image for image, _ in images]
