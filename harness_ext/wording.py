"""Words for the user that several parts of the package print."""

from __future__ import annotations

__all__ = ["count"]


def count(number: int, noun: str) -> str:
    """`1 model`, `2,000 models`; for nouns that take an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
