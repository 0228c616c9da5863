from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import World, a_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with a_world(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the copies that `evaluate` makes of metric scripts, which it imports as `evaluate_modules`."""
    import evaluate

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
            del sys.modules[name]

    folder = tmp_path / "modules"
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", folder)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "metrics")
    # First in the path: transformers, too, appends the user's own folder, which may have an `evaluate_modules`.
    monkeypatch.syspath_prepend(folder)
    forget()
    yield tmp_path
    forget()
