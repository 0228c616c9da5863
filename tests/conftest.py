"""Shared by all tests: golden files, remade by `pytest --update-golden`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ anew; read the diff before you commit it"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return `compare(name, text)`: the text must equal the file `tests/golden/<name>`."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        assert path.is_file(), f"{path} is missing: write it with `pytest --update-golden {request.node.fspath}`"
        hint = f"if the change is meant, run `pytest --update-golden {request.node.fspath}` and read the diff"
        assert text == path.read_text(encoding="utf-8"), hint

    return compare
