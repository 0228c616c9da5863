"""Synthetic languages, one module each; a language is a frozen dataclass of explicit probability tables."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from harness_ext.lab.languages.base import Language
from harness_ext.lab.languages.hmm import Hmm, random_hmm
from harness_ext.lab.languages.pcfg import Pcfg, random_pcfg
from harness_ext.lab.languages.reviews import ReviewGrammar, fixed_reviews

__all__ = ["LANGUAGES", "language_from_dict", "make_language"]

LANGUAGES: dict[str, Callable[..., Language]] = {"hmm": random_hmm, "pcfg": random_pcfg, "reviews": fixed_reviews}
"""What draws a language of each kind from a seed and its sizes."""

_READERS: dict[str, Callable[[Mapping[str, Any]], Language]] = {
    "hmm": Hmm.from_dict,
    "pcfg": Pcfg.from_dict,
    "reviews": ReviewGrammar.from_dict,
}


def make_language(kind: str, seed: int = 0, sizes: Mapping[str, Any] | None = None) -> Language:
    """Draw a language. The same arguments give the same tables.

    Args:
        kind: A key of LANGUAGES.
        seed: At least 0.
        sizes: Keyword arguments of that entry; those that are left out have their defaults.

    Raises:
        ValueError: If there is no such kind or size, or a size is of the wrong type or out of its range.
    """
    if kind not in LANGUAGES:
        raise ValueError(f"unknown kind of language {kind!r}.{_known(kind, LANGUAGES)}")
    sizes = dict(sizes or {})
    known = [name for name in inspect.signature(LANGUAGES[kind]).parameters if name != "seed"]
    for name in sizes:
        if name not in known:
            raise ValueError(f"language {kind!r} has no size {name!r}.{_known(name, known)}")
    try:
        return LANGUAGES[kind](seed, **sizes)
    except (TypeError, ValueError) as err:
        given = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
        raise ValueError(f"language {kind!r}, seed {seed!r}{given and ', '}{given}: {err}") from err


def language_from_dict(tables: Mapping[str, Any]) -> Language:
    """Make the language again that its `to_dict` described, such as what a `language.json` holds.

    Raises:
        ValueError: If its kind is unknown, or its tables are missing, of another form, or do not fit together.
    """
    kind = tables.get("kind") if isinstance(tables, Mapping) else None
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(f"not a language: expected its kind under 'kind', found {kind!r}.{_known(kind, _READERS)}")
    try:
        return _READERS[kind](tables)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as err:
        what = f"no entry {err}" if isinstance(err, KeyError) else str(err)
        raise ValueError(f"not the tables of a language of kind {kind!r}: {what}") from err


def _known(name: Any, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(known) or 'none'}."
