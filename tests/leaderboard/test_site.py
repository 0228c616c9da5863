"""The folder of pages: what is written, that it is the same each time, that nothing in it runs or loads what it should not."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from boards import HOSTILE_NAMES, HOSTILE_TEXT, synthetic_board

from harness_ext.leaderboard import site
from harness_ext.leaderboard.contracts import Board, Metric, plain
from harness_ext.leaderboard.site import data_script, page_folder, write_site

FIRST_LOAD = 1_500_000
SOURCES = page_folder()
VENDOR = SOURCES / "vendor"


@pytest.fixture(scope="module")
def board() -> Board:
    return synthetic_board()


@pytest.fixture(scope="module")
def folder(board: Board, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_site(board, folder)
    return folder


def content(path: Path) -> tuple[str, Any]:
    """Name and value of a data file, read by the rules of JavaScript's strings, which for what is escaped are Python's."""
    found = re.fullmatch(
        r"harnessExt\.data\((\"[a-z0-9/]+\"),JSON\.parse\(('.*')\)\);\n", path.read_text("ascii"), re.S
    )
    assert found, path
    return json.loads(found[1]), json.loads(ast.literal_eval(found[2]))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------------------------------------- files


def test_every_part_of_the_board_has_its_file(board: Board, folder: Path) -> None:
    names = {name.removeprefix("data/").removesuffix(".js") for name in files_of(folder) if name.startswith("data/")}
    assert names == (
        {"index"}
        | {f"models/{model.id}" for model in board.models}
        | {f"{part}/{column.id}" for part in ("columns", "documents") for column in board.columns}
    )
    for path in (folder / "data").rglob("*.js"):
        assert content(path)[0] == path.relative_to(folder / "data").with_suffix("").as_posix()


def test_files_hold_what_the_contract_says(board: Board, folder: Path) -> None:
    def as_json(value: Any) -> Any:
        return json.loads(json.dumps(value))

    for model in board.models:
        assert content(folder / "data" / "models" / f"{model.id}.js")[1] == as_json(board.model_file(model.id))
    for column in board.columns:
        assert content(folder / "data" / "columns" / f"{column.id}.js")[1] == as_json(board.column_file(column.id))
        assert content(folder / "data" / "documents" / f"{column.id}.js")[1] == as_json(board.documents_file(column.id))


def test_the_same_board_gives_the_same_bytes_and_is_not_written_again(
    board: Board, folder: Path, tmp_path: Path
) -> None:
    first = write_site(synthetic_board(), tmp_path)
    assert files_of(tmp_path) == files_of(folder)
    assert first.changed == first.files
    assert first.removed == ()
    again = write_site(board, tmp_path)
    assert again.files == first.files
    assert again.changed == ()


def test_another_board_takes_away_what_the_first_left_and_nothing_else(board: Board, tmp_path: Path) -> None:
    write_site(board, tmp_path)
    (tmp_path / "leaderboard.csv").write_text("kept")
    (tmp_path / "data" / "notes.txt").write_text("kept")
    gone = board.models[0].id
    smaller = dataclasses.replace(
        board,
        models=board.models[1:],
        **{
            name: tuple(one for one in getattr(board, name) if one.model != gone)
            for name in ("scores", "limited", "losses", "flatness")
        },
    )
    written = write_site(smaller, tmp_path)
    assert written.removed == (f"data/models/{gone}.js",)
    assert not (tmp_path / written.removed[0]).exists()
    assert (tmp_path / "leaderboard.csv").read_text() == (tmp_path / "data" / "notes.txt").read_text() == "kept"
    assert "data/index.js" in written.changed
    assert f"data/models/{board.models[1].id}.js" not in written.changed


def test_an_empty_board_is_a_site(tmp_path: Path) -> None:
    write_site(Board((), (), ()), tmp_path)
    assert content(tmp_path / "data" / "index.js")[1]["models"] == {"length": 0, "keys": {}}


def test_downloads_are_listed(board: Board, tmp_path: Path) -> None:
    write_site(board, tmp_path, downloads={"leaderboard.json": "JSON", "leaderboard.csv": "CSV"})
    listed = content(tmp_path / "data" / "index.js")[1]["downloads"]
    assert listed == [{"path": "leaderboard.csv", "label": "CSV"}, {"path": "leaderboard.json", "label": "JSON"}]


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("identifier", ["../../x", "m012", "m0123456789AB", "m0123456789ab/..", "x0123456789ab", ""])
def test_an_id_that_is_not_safe_in_a_path_is_refused(board: Board, tmp_path: Path, identifier: str) -> None:
    model = dataclasses.replace(board.models[0], id=identifier)
    with pytest.raises(ValueError, match="not be safe as a file name"):
        write_site(Board((model,), (), ()), tmp_path)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(board: Board, tmp_path: Path, number: float) -> None:
    loss = dataclasses.replace(board.losses[0], bits_per_byte=Metric(number, None))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_site(dataclasses.replace(board, losses=(loss,)), tmp_path)


@pytest.mark.parametrize(
    "text",
    [*HOSTILE_NAMES, HOSTILE_TEXT, "\\u003c", "\\'", "'", "a lone surrogate \ud800", "\x00\x1f\x7f", "*/ // <!--"],
)
def test_text_comes_back_as_it_was_and_is_never_markup(tmp_path: Path, text: str) -> None:
    script = data_script("index", {text: [text]})
    assert b"<" not in script
    assert script.isascii()
    assert script.count(b"\n") == 1
    path = tmp_path / "index.js"
    path.write_bytes(script)
    assert content(path)[1] == {text: [text]}


# ------------------------------------------------------------------------------------------------------- the index


def unpack_columnar(packed: dict[str, Any]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{} for _ in range(packed["length"])]
    for key, values in packed["keys"].items():
        if isinstance(values, dict):
            values = [values["values"][place] for place in values["at"]]
        assert len(values) == len(records)
        for record, value in zip(records, values, strict=True):
            if value is not None:
                record[key] = value
    return records


def without_none(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None and key not in names}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("missing", [0.0, 0.06, 0.6])
def test_the_packed_index_has_what_the_index_has(seed: int, missing: float) -> None:
    board = synthetic_board(30, 11, seed=seed, missing=missing, vectors=False)
    index = json.loads(json.dumps(board.index()))
    packed = json.loads(json.dumps(site._packed_index(board.index(), {})))
    assert unpack_columnar(packed["models"]) == [without_none(model, "sha", "lab") for model in index["models"]]
    for packed_column, column, of in zip(
        packed["scores"] + packed["limited"], index["columns"] * 2, index["scores"] + index["limited"], strict=True
    ):
        if of is None:
            assert packed_column is None
            continue
        scale = packed_column.get("scale", 1)
        # Half a unit, and for a standard error that is worked out anew one unit.
        value_error, stderr_error = (0.5e-5, 1.5e-5) if column["bounded"] else (0.0, 0.0)
        places = packed_column.get("places", list(range(len(board.models))))
        found = dict(zip(places, packed_column["value"], strict=True))
        counts = packed_column["n"]
        for place, value in enumerate(of["value"]):
            if value is None:
                assert found.get(place) is None
                continue
            assert found[place] / scale == pytest.approx(value, abs=value_error + 1e-12)
            n = counts[places.index(place)] if isinstance(counts, list) else counts
            assert n == (of["n"][place] if isinstance(of["n"], list) else of["n"])
            if packed_column.get("share") and str(place) not in packed_column["stderr"]:
                share = found[place] / scale
                stderr = math.sqrt(share * (1 - share) / (n - 1))
            else:
                stderr = packed_column["stderr"][str(place) if packed_column.get("share") else places.index(place)]
                stderr = None if stderr is None else stderr / scale
            assert stderr == (
                None if of["stderr"][place] is None else pytest.approx(of["stderr"][place], abs=stderr_error)
            )
        flags = {(place, flag) for place, of_score in of["flags"].items() for flag in of_score}
        assert {(str(place), flag) for flag, places in packed_column["flags"].items() for place in places} == flags
    for loss, of_loss in zip(unpack_columnar(packed["losses"]), index["losses"], strict=True):
        assert loss["bits_per_byte"] == pytest.approx(of_loss["bits_per_byte"], rel=1e-7)
        assert {key: loss.get(key) for key in ("model", "column", "text", "tokenizer", "limit")} == {
            key: of_loss[key] for key in ("model", "column", "text", "tokenizer", "limit")
        }
    for record, of_model in zip(unpack_columnar(packed["flatness"]), index["flatness"], strict=True):
        measures = {key.removeprefix("measure "): value for key, value in record.items() if key.startswith("measure ")}
        assert measures.keys() == of_model["measures"].keys()
        for name, (value, stderr) in of_model["measures"].items():
            assert measures[name] == [
                pytest.approx(value, rel=1e-4),
                None if stderr is None else pytest.approx(stderr, rel=1e-4),
            ]
    assert packed["groups"] == plain(board.groups)


def test_the_first_load_is_small_for_a_thousand_models_and_sixty_tasks(folder: Path) -> None:
    board = synthetic_board(1000, 60, num_documents=100, vectors=False)
    page = sum(
        len(data) for name, data in files_of(folder).items() if not name.startswith(("data/", "vendor/LICENSES"))
    )
    assert page + len(data_script("index", site._packed_index(board.index(), {}))) < FIRST_LOAD


# ------------------------------------------------------------------------------------- what the pages may load and run


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_policy_comes_first_and_allows_files_of_the_folder_only() -> None:
    page = Page((SOURCES / "index.html").read_text("utf-8"))
    policies = [at for at, (tag, attrs) in enumerate(page.tags) if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    loading = [at for at, (tag, _) in enumerate(page.tags) if tag in {"script", "link", "style", "img", "iframe"}]
    assert policies[0] < min(loading)
    policy = dict(part.strip().split(" ", 1) for part in (page.tags[policies[0]][1]["content"] or "").split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["base-uri"] == policy["form-action"] == "'none'"
    style = policy["style-src"].split()
    assert style[0] == "'self'"
    assert all(re.fullmatch(r"'sha256-[\w+/=]+'", one) for one in style[1:])
    assert policy["img-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "data-files"
    assert len(policy) == 8


def test_the_page_has_nothing_inline_and_all_that_it_names(folder: Path) -> None:
    page = Page((SOURCES / "index.html").read_text("utf-8"))
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert all(attrs.get("src") and "defer" in attrs and "type" not in attrs for attrs in scripts)
    assert not any(name.startswith("on") or name == "style" for _, attrs in page.tags for name in attrs)
    named = [attrs["src"] for attrs in scripts] + ["style.css", "icon.svg"]
    assert len(set(named)) == len(named)
    assert {name for name in files_of(folder) if name.startswith("app/")} == {
        n for n in named if str(n).startswith("app/")
    }
    assert all((folder / str(name)).is_file() for name in named)


@pytest.mark.parametrize(
    "path", [*sorted(SOURCES.glob("app/*.js")), VENDOR / "libraries.js"], ids=lambda path: path.name
)
def test_no_script_makes_markup_or_code_of_text(path: Path) -> None:
    text = path.read_text("utf-8")
    if path.name == "libraries.js":
        # Of d3-selection, which nobody calls: selection.html().
        text = text.replace("innerHTML", "")
    forbidden = (
        r"(inner|outer|insertAdjacent)HTML|document\.write|createContextualFragment|DOMParser|\beval\(|new Function"
    )
    assert not re.findall(forbidden, text)
    assert ".html(" not in text


@pytest.mark.parametrize(
    "path", [*sorted(SOURCES.glob("app/*.js")), SOURCES / "index.html", SOURCES / "style.css"], ids=lambda p: p.name
)
def test_no_source_names_a_place_outside(path: Path) -> None:
    text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://|//cdn|@import|url\(", text)


# -------------------------------------------------------------------------------------------------------- libraries


def test_the_libraries_are_those_of_the_manifest() -> None:
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    for name, of in manifest["files"].items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == of["sha256"], f"{name}: npm run build"
    licences = (VENDOR / "LICENSES.txt").read_text("utf-8")
    assert len(manifest["packages"]) > 5
    for package in manifest["packages"]:
        assert f"{package['name']} {package['version']}\n" in licences
        assert package["license"] in {"ISC", "MIT", "BSD-3-Clause", "0BSD"}


def test_versions_are_pinned_and_those_of_the_lock_file() -> None:
    wanted = json.loads((VENDOR / "package.json").read_text())
    lock = json.loads((VENDOR / "package-lock.json").read_text())["packages"]
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    for package in manifest["packages"]:
        locked = lock[f"node_modules/{package['name']}"]
        assert (locked["version"], locked["integrity"]) == (package["version"], package["integrity"])
    for name, version in (wanted["dependencies"] | wanted["devDependencies"]).items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert lock[f"node_modules/{name}"]["version"] == version
    assert manifest["esbuild"] == wanted["devDependencies"]["esbuild"]
