"""Values of files that anyone may have written, made safe to keep: bounded, finite, valid Unicode.

What a value means in a page is the page's to escape; here nothing is escaped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MAX_DEPTH", "MAX_NAME", "load_json", "mapping", "name", "number", "parse_json", "text", "whole_number"]

MAX_NAME = 300
"""Characters of a name; longer ones are cut with an ellipsis."""

MAX_DEPTH = 100
"""Of JSON: objects and lists within one another. Deeper values could be parsed and not be written again."""

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]+")
"""Control characters, and those that change the direction or the lines of what follows them."""


def parse_json(data: bytes) -> Any:
    """Parse JSON; NaN and Infinity, which lm_eval writes bare, become None.

    Raises:
        ValueError: If it is no JSON, no UTF-8, or nested too deeply.
    """
    try:
        found = json.loads(data.decode("utf-8-sig"), parse_constant=lambda _: None)
    except UnicodeDecodeError as err:
        raise ValueError(f"expected UTF-8, found other bytes at position {err.start}") from err
    except json.JSONDecodeError as err:
        raise ValueError(f"expected JSON, found something else in line {err.lineno}: {err.msg}") from err
    except ValueError as err:  # a number of more digits than Python converts
        raise ValueError("expected JSON with numbers of ordinary length, found thousands of digits") from err
    except RecursionError as err:
        raise ValueError(f"expected JSON of at most {MAX_DEPTH} levels, found deeper nesting") from err
    # Most lines of samples have too few brackets to be deep.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deep(found):
        raise ValueError(f"expected JSON of at most {MAX_DEPTH} levels, found deeper nesting")
    return found


def _is_deep(value: Any) -> bool:
    """Whether more than `MAX_DEPTH` objects and lists lie within one another."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def load_json(path: Path, *, max_bytes: int) -> tuple[Any, bytes]:
    """Read and parse a file, and return its bytes too.

    Raises:
        ValueError: If it is longer than `max_bytes`, or no JSON; see `parse_json`.
        OSError: If it cannot be read.
    """
    with path.open("rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"expected at most {max_bytes:,} bytes, found more")
    return parse_json(data), data


def number(value: Any) -> float | None:
    """A finite number, also of text that is one; None for anything else, such as "N/A", NaN or a truth value."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        if len(value) > 40:
            return None
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, int | float):
        try:
            result = float(value)
        except OverflowError:
            return None
        return result if math.isfinite(result) else None
    return None


def whole_number(value: Any) -> int | None:
    """A number of things: an integer from 0 to 2^53; None for anything else."""
    found = number(value)
    return int(found) if found is not None and found.is_integer() and 0 <= found <= 2**53 else None


def text(value: Any, most: int) -> str:
    """Valid Unicode of at most `most` characters, without NUL; JSON of what is no text; "" for None."""
    if value is None:
        return ""
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if len(value) > most:
        value = value[: most - 1] + "…"
    if "\x00" in value:
        value = value.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    # A lone surrogate can be written in JSON and not in UTF-8.
    return value.encode("utf-8", errors="replace").decode("utf-8") if not value.isascii() else value


def name(value: Any, most: int = MAX_NAME) -> str:
    """One line of text without characters that control a terminal or the direction of writing."""
    if isinstance(value, str) and len(value) <= most and value.isascii() and value.isprintable():
        return value.strip()  # as below; nearly all are such
    return text(_CONTROLS.sub(" ", text(value, 4 * most)).strip(), most)


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}
