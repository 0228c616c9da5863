"""Imports point one way, as the source says, and the light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "harness_ext"

# A module may import modules of a lower layer and of its own entry here, and nothing else of the package.
LAYERS = (
    {
        "contracts",
        "correlation",
        "halves",
        "loss_groups",
        "parameter_names",
        "paths",
        "ranks",
        "ratio",
        "resources",
        "sandbox",
        "wording",
    },
    {
        "evaluators",
        "flatness",
        "engine.plan",
        "engine.store",
        "engine.tokens",
        "engine.windows",
        "prompts",
        "plugin",
        "scaffold",
    },
    {"engine.readout", "engine.gradients", "engine.fingerprint", "engine.kept", "engine.quad_head"},
    {"engine.forward"},
    {"engine.answer", "engine.losses"},
    {"engine.label_words"},
    {"engine.attach"},
    {"engine"},  # its __init__, which may name what is below
    {"tasks"},
    {"cli"},
    {"__main__"},
)
# These meet the rest only through model folders and JSON files, and only the command line starts them.
APART = {"lab", "leaderboard"}
FORBIDDEN_TO_APART = {"lm_eval"}
# Statistics of numbers, names of parameters and words for the user, which they may share.
OPEN_TO_APART = {
    "harness_ext.correlation",
    "harness_ext.loss_groups",
    "harness_ext.parameter_names",
    "harness_ext.wording",
}
HEAVY = {"torch", "transformers", "lm_eval", "datasets", "sklearn", "scipy"}


def module_name(path: Path) -> str:
    """`engine.forward` for harness_ext/engine/forward.py; an empty string for harness_ext/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Every module that the file imports, in functions too, with `harness_ext.` in front of our own."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["harness_ext", *package.split(".")] if package else ["harness_ext"]
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, node.module] if node.module else kept)
            # `from harness_ext.engine import store` imports harness_ext.engine.store.
            for alias in node.names:
                below = PACKAGE.parent.joinpath(*base.split("."), alias.name)
                is_module = below.is_dir() or below.with_suffix(".py").exists()
                yield f"{base}.{alias.name}" if is_module else base


def place(module: str) -> tuple[str, int] | None:
    """The entry of LAYERS that a module belongs to, the longest one, and its layer."""
    found = [
        (entry, layer)
        for layer, entries in enumerate(LAYERS)
        for entry in entries
        if module == entry or module.startswith(f"{entry}.")
    ]
    return max(found, key=lambda item: len(item[0]), default=None)


def is_apart(module: str) -> bool:
    return module.split(".")[0] in APART


FILES = sorted(PACKAGE.rglob("*.py"))


def test_there_are_files() -> None:
    assert {module_name(path) for path in FILES} >= {"", "contracts", "plugin", "cli", "engine.plan"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "__init__")
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    if not module or is_apart(module):
        return  # tested below
    here = place(module)
    assert here is not None, f"{path}: add harness_ext.{module} to a layer of {__file__}"
    for name in imported(path):
        if name == "harness_ext" or not name.startswith("harness_ext."):
            continue
        target = name.removeprefix("harness_ext.")
        if is_apart(target):
            assert here[0] == "cli", f"{path} imports {name}: only the command line starts what stands apart"
            continue
        there = place(target)
        assert there is not None, f"{path} imports {name}, which is in no layer of {__file__}"
        assert there[1] < here[1] or there[0] == here[0], f"{path} imports {name}, which is not below it"


@pytest.mark.parametrize(
    "path", [path for path in FILES if is_apart(module_name(path))], ids=lambda path: module_name(path)
)
def test_what_stands_apart_knows_nothing_of_the_rest(path: Path) -> None:
    own = f"harness_ext.{module_name(path).split('.')[0]}"
    for name in imported(path):
        assert name.split(".")[0] not in FORBIDDEN_TO_APART, f"{path} imports {name}"
        if name.startswith("harness_ext."):
            is_open = name in OPEN_TO_APART or name.rpartition(".")[0] in OPEN_TO_APART
            assert name == own or name.startswith(f"{own}.") or is_open, f"{path} imports {name}"


def test_the_contracts_import_numpy_and_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "numpy"}
    assert {name.split(".")[0] for name in imported(PACKAGE / "contracts.py")} <= allowed


def loaded_after(statement: str) -> set[str]:
    """Names in sys.modules after a statement, in an interpreter of its own that reads no .pth file."""
    paths = [str(PACKAGE.parent), *(path for path in sys.path if path.endswith("site-packages"))]
    code = f"import sys; sys.path[:0] = {paths!r}; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["harness_ext", "harness_ext.plugin", "harness_ext.contracts", "harness_ext.cli", "harness_ext.evaluators"],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert module in loaded
    assert not loaded & HEAVY
