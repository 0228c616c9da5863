"""Extends lm-evaluation-harness to tasks recast as sentence completion, feature probes and loss-matched comparison."""

__version__ = "0.1.0"

__all__ = ["__version__"]
