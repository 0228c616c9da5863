"""The board as a folder of static pages, which open from `file://` as well as from a server.

What the pages are made of lies in `leaderboard/page/`, and is copied as it is: `index.html`, `style.css`, the scripts of
`app/`, and one script of libraries (`vendor/`, which says how it is made). Nothing is put into the HTML: results go into data
files, scripts of one call `harnessExt.data(NAME, JSON.parse('…'))`, which a page loads when it first needs them. They are
ASCII, so that neither a lone surrogate nor an unknown encoding can spoil them, and text in them is never code: it is parsed
as JSON.

The same board gives the same bytes. Files whose bytes are already there are not written again, and data files of models and
columns that are no longer on the board are removed; other files of the folder are left alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_ext.leaderboard.contracts import Board, Flatness, Model, Score
from harness_ext.leaderboard.made import Made, replace

__all__ = ["Written", "data_script", "page_folder", "write_site"]

_PAGE_FILES = ("index.html", "style.css", "icon.svg", "app/*.js", "vendor/libraries.js", "vendor/LICENSES.txt")
_DATA_FOLDERS = ("models", "columns", "documents")
_ID = re.compile(r"[mc][0-9a-f]{12}")
_SCALE = 100_000


@dataclass(frozen=True)
class Written:
    """What `write_site` did.

    Attributes:
        files: All files of the site, relative to its folder, sorted.
        changed: Those of them that were not there before, or had other bytes.
        removed: Data files of models and columns that are no longer there.
        first_load: Bytes that a browser reads before it shows the table.
    """

    files: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    first_load: int


def write_site(
    board: Board, folder: Path | str, *, downloads: Mapping[str, str] | None = None, made: Made | None = None
) -> Written:
    """Write the pages of a board, and remove what an earlier board left.

    Args:
        board: What to show.
        folder: Where to; made if it is not there.
        downloads: Label of each exported file by its path relative to `folder`, such as {"leaderboard.csv": "CSV"}. The table
            links to them; writing them is the caller's.
        made: What is known of the folder; pages that it has are not made again.

    Raises:
        FileNotFoundError: If the installation lacks the sources of the pages.
        ValueError: If an id of the board is not safe in a file name, or a number is not finite.
    """
    folder = Path(folder)
    made = made or Made(folder)
    changed, files = [], []
    first_load = 0
    for name, stamp, make in _files(board, made, downloads or {}):
        files.append(name)
        if made.has(name, stamp):
            continue
        content = make()
        if name.startswith("data/index") or not name.startswith(("data/", "vendor/LICENSES")):
            first_load += len(content)
        if replace(folder / name, content):
            changed.append(name)
        made.wrote(name, stamp)
    kept = set(files)
    removed = []
    for part in _DATA_FOLDERS:
        for path in sorted((folder / "data" / part).glob("*.js")):
            name = path.relative_to(folder).as_posix()
            if name not in kept:
                path.unlink()
                removed.append(name)
    return Written(tuple(sorted(files)), tuple(sorted(changed)), tuple(removed), first_load)


def page_folder() -> Path:
    """Return the folder of the pages' sources: inside the package in a wheel install, `leaderboard/page` in a checkout.

    Raises:
        FileNotFoundError: If neither place has it.
    """
    package = Path(__file__).resolve().parent
    inside, beside = package / "page", package.parent.parent / "leaderboard" / "page"
    for folder in (inside, beside):
        if (folder / "index.html").is_file():
            return folder
    raise FileNotFoundError(
        f"the leaderboard's pages are neither at {inside} (a wheel install) nor at {beside} (a checkout). "
        "Install again with `pip install --force-reinstall --no-deps harness-ext`, or from a whole checkout."
    )


def data_script(name: str, value: Any) -> bytes:
    """One data file: a script that hands a value to the page as JSON.

    A string and `JSON.parse`, not a literal: in a literal the key `__proto__`, which a result file may have, would not be one.

    Raises:
        ValueError: If a number is not finite.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=_fields)
    text = text.replace("\\", "\\\\").replace("'", "\\'").replace("<", "\\x3c")
    return f"harnessExt.data({json.dumps(name)},JSON.parse('{text}'));\n".encode("ascii")


def _files(
    board: Board, made: Made, downloads: Mapping[str, str]
) -> Iterator[tuple[str, str | None, Callable[[], bytes]]]:
    """Name, stamp if it is known, and what makes the content, of each file."""
    source = page_folder()
    for pattern in _PAGE_FILES:
        paths = sorted(source.glob(pattern))
        if not paths:
            raise FileNotFoundError(
                f"{source / pattern} is missing: the installation lacks a part of the leaderboard's pages"
            )
        for path in paths:
            yield path.relative_to(source).as_posix(), None, path.read_bytes
    yield "data/index.js", None, lambda: data_script("index", _packed_index(board.index(), downloads))
    pages: list[tuple[str, Callable[[], Any]]] = []
    model_file = _model_files(board)
    for model in board.models:
        pages.append((f"models/{_checked(model.id)}", functools.partial(model_file, model)))
    for column in board.columns:
        pages.append((f"columns/{_checked(column.id)}", functools.partial(board.column_file, column.id)))
        pages.append((f"documents/{column.id}", functools.partial(board.documents_file, column.id)))
    for name, make in pages:
        yield f"data/{name}.js", made.stamp(name), functools.partial(_page, name, make)


def _page(name: str, make: Callable[[], Any]) -> bytes:
    return data_script(name, make())


def _model_files(board: Board) -> Callable[[Model], dict[str, Any]]:
    """`Board.model_file`, which itself makes dictionaries of all scores: for 60,000 that takes far longer."""
    scores: dict[str, list[Score]] = {model.id: [] for model in board.models}
    flatness: dict[str, list[Flatness]] = {model.id: [] for model in board.models}
    for score in (*board.scores, *board.limited):
        scores[score.model].append(score)
    for of_model in board.flatness:
        flatness[of_model.model].append(of_model)
    return lambda model: {"model": model, "scores": scores[model.id], "flatness": flatness[model.id]}


def _fields(record: Any) -> dict[str, Any]:
    """A part of a board as a dictionary of its fields, for JSON; a score without what is blank."""
    if isinstance(record, Score):
        fields = ((name, getattr(record, name)) for name in Score.__dataclass_fields__)
        return {name: value for name, value in fields if value or value in (0, "")}
    if dataclasses.is_dataclass(record):
        return vars(record)
    raise TypeError(f"{type(record).__name__} is no part of a board: {record!r}")


def _checked(identifier: str) -> str:
    if not _ID.fullmatch(identifier):
        raise ValueError(
            f"id {identifier!r} is not an m or a c and 12 hexadecimal digits: it would not be safe as a file name"
        )
    return identifier


# ----------------------------------------------------------------------------------- fewer bytes for the first load


def _packed_index(index: Mapping[str, Any], downloads: Mapping[str, str]) -> dict[str, Any]:
    """The index, with the same content to the digits that a table or a plot can show; `app/data.js` unpacks it.

    Left out is what the first page does without: aggregates (it makes its own, over the tasks that are shown), commits and
    training of models (in their files), and the lists of models of each correlation, of which the numbers stay.
    """
    columns = index["columns"]
    return {
        **{key: value for key, value in index.items() if key != "aggregates"},
        "models": _columnar([_without(model, "sha", "lab") for model in index["models"]]),
        "scores": [_packed_scores(of, column) for of, column in zip(index["scores"], columns, strict=True)],
        "limited": [_packed_scores(of, column) for of, column in zip(index["limited"], columns, strict=True)],
        "losses": _columnar([_rounded(loss, 8) for loss in index["losses"]]),
        "flatness": _columnar([_flat_measures(record) for record in index["flatness"]]),
        "correlations": [
            one | {"models": len(one["models"]), "comparable": len(one["comparable"])} for one in index["correlations"]
        ],
        "downloads": [{"path": path, "label": label} for path, label in sorted(downloads.items())],
    }


def _without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


def _columnar(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Records as one list for each key; a list that repeats itself as places in a list of its values.

    {"length": n, "keys": {key: [value, …] or {"values": [value, …], "at": [place, …]}}}. None is a blank: no key.
    """
    keys = list(dict.fromkeys(key for record in records for key in record))
    result: dict[str, Any] = {}
    for key in keys:
        values = [record.get(key) for record in records]
        texts = [json.dumps(value) for value in values]
        distinct = dict(zip(texts, values, strict=True))
        if len(distinct) * 2 <= len(values):
            places = {text: place for place, text in enumerate(distinct)}
            result[key] = {"values": list(distinct.values()), "at": [places[text] for text in texts]}
        else:
            result[key] = values
    return {"length": len(records), "keys": result}


def _packed_scores(of_column: Mapping[str, Any] | None, column: Mapping[str, Any]) -> dict[str, Any] | None:
    """Scores of a column in fewer bytes.

    Values of a bounded metric are whole numbers of 1/100,000, and so are standard errors. Most are those of a share,
    √(p (1 - p) / (n - 1)): where they are, to a unit, the column has "share": true and "stderr" only what differs, by place.
    Where few models have a score, "places" says which, and "value" and "n" are of these. "flags" has the places of each flag.
    """
    if of_column is None:
        return None
    value, stderr, counts = of_column["value"], of_column["stderr"], of_column["n"]
    flags: dict[str, list[int]] = {}
    for place_text, of_score in of_column["flags"].items():
        for flag in of_score:
            flags.setdefault(flag, []).append(int(place_text))
    packed: dict[str, Any] = {"flags": flags}
    if column["bounded"]:
        packed["scale"] = _SCALE
        value, stderr = [_scaled(one) for one in value], [_scaled(one) for one in stderr]
    places = [place for place, one in enumerate(value) if one is not None]
    if column["bounded"]:
        differing = {}
        for place in places:
            n = counts[place] if isinstance(counts, list) else counts
            guess = _share_stderr(value[place] / _SCALE, n)
            known = stderr[place]
            if guess is None or known is None or abs(known - guess * _SCALE) > 1:
                differing[place] = known
        if len(differing) * 2 < len(places):
            packed["share"] = True
            stderr = differing
    if len(places) * 4 < len(value) * 3:
        packed["places"] = places
        value = [value[place] for place in places]
        counts = [counts[place] for place in places] if isinstance(counts, list) else counts
        if isinstance(stderr, list):
            stderr = [stderr[place] for place in places]
    return packed | {"value": value, "stderr": stderr, "n": counts}


def _share_stderr(share: float, count: int | None) -> float | None:
    """The standard error of a mean of zeros and ones as lm_eval computes it."""
    return None if count is None or count < 2 else math.sqrt(max(0.0, share * (1 - share)) / (count - 1))


def _scaled(value: float | None) -> int | None:
    return None if value is None else round(value * _SCALE)


def _flat_measures(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of flatness with a key `measure NAME` for each of its measures."""
    flat = _without(record, "measures")
    for name, metric in record["measures"].items():
        flat[f"measure {name}"] = _rounded(metric, 5)
    return flat


def _rounded(value: Any, digits: int) -> Any:
    """All floats in lists and mappings to significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_rounded(item, digits) for item in value]
    return value
