"""What is in the wheel, what an editable install adds, and that the .pth line is harmless whatever it meets."""

from __future__ import annotations

import configparser
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PTH = ROOT / "harness_ext" / "harness_ext.pth"


def build(root: Path, folder: Path, version: str = "standard") -> zipfile.ZipFile:
    (wheel,) = WheelBuilder(str(root)).build(directory=str(folder), versions=[version])
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts)
    }


# ---------------------------------------------------------------------------------------------------------- wheels


@pytest.mark.parametrize("folder", ["task_configs", "prompts"])
def test_the_wheel_has_every_task_config_and_prompt(wheel: zipfile.ZipFile, folder: str) -> None:
    ours = files_below(ROOT / folder)
    assert ours
    prefix = f"harness_ext/{folder}/"
    packed = {name.removeprefix(prefix) for name in wheel.namelist() if name.startswith(prefix)}
    assert packed == ours
    name = min(ours)
    assert wheel.read(prefix + name) == (ROOT / folder / name).read_bytes()


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"harness_ext", "harness_ext.pth"}
    code = {name.removeprefix("harness_ext/") for name in names if name.endswith((".py", "py.typed"))}
    assert code == {name for name in files_below(ROOT / "harness_ext") if name.endswith((".py", "py.typed"))}
    assert sum(name.endswith(".pth") for name in names) == 1


def test_the_pth_file_is_at_the_root_of_site_packages(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("harness_ext.pth") == PTH.read_bytes()


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(name).decode())
    assert parser["console_scripts"]["harness-ext"] == "harness_ext.cli:main"
    assert parser["lm_eval.tasks"]["harness_ext"] == "harness_ext"


def test_an_editable_install_copies_nothing_of_the_checkout(tmp_path: Path) -> None:
    """So that edits to YAMLs and prompts count on the next run. The path file must sort before ours: it comes first."""
    editable = build(ROOT, tmp_path, "editable")
    names = sorted(name for name in editable.namelist() if ".dist-info/" not in name)
    assert names == ["_harness_ext.pth", "harness_ext.pth"]
    assert editable.read("_harness_ext.pth").decode().split("\n") == [str(ROOT)]
    assert editable.read("harness_ext.pth") == PTH.read_bytes()


def test_a_wheel_from_the_sdist_is_the_same(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (root,) = (tmp_path / "unpacked").iterdir()
    again = build(root, tmp_path / "wheel")
    assert sorted(again.namelist()) == sorted(wheel.namelist())
    assert again.read("harness_ext.pth") == wheel.read("harness_ext.pth")


def test_the_constraints_are_within_the_declared_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            pin = Requirement(line)
            pinned[pin.name.lower().replace("_", "-")] = pin
    for declared in map(Requirement, project["dependencies"]):
        pin = pinned[declared.name.lower().replace("_", "-")]
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert declared.specifier.contains(exact.version), f"{pin} is outside {declared}"


# ------------------------------------------------------------------------------------------------------ the .pth line


def start_with(folder: Path, then: str = "print('alive')") -> subprocess.CompletedProcess[str]:
    """Let `site` process a folder's .pth files in an interpreter that has no other site-packages."""
    code = f"import site, sys; site.addsitedir({str(folder)!r}); {then}"
    return subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True)


@pytest.fixture
def site_folder(tmp_path: Path) -> Path:
    shutil.copy(PTH, tmp_path)
    return tmp_path


def test_the_pth_file_is_one_import_line() -> None:
    text = PTH.read_text(encoding="ascii")
    assert text.startswith("import ")  # `site` takes other lines for paths
    assert text.count("\n") == 1
    assert text.endswith("\n")


def test_the_pth_line_is_silent_without_the_package(site_folder: Path) -> None:
    done = start_with(site_folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_the_pth_line_imports_nothing_and_leaves_one_finder(site_folder: Path) -> None:
    """Every start of Python in the environment pays for it."""
    (site_folder / "_harness_ext.pth").write_text(f"{ROOT}\n")
    plain = site_folder / "plain"
    plain.mkdir()
    (plain / "plain.pth").write_text("import sys\n")
    code = "print(*sorted(sys.modules)); print(*[getattr(f, '__name__', type(f).__name__) for f in sys.meta_path])"
    modules, finders = start_with(site_folder, code).stdout.splitlines()
    plain_modules, plain_finders = start_with(plain, code).stdout.splitlines()
    assert modules == plain_modules
    assert finders == f"HarnessExtWaiter {plain_finders}"


IMPORT_MANAGER = """
try:
    from lm_eval.tasks import manager
    print(vars(manager.TaskManager())['scanned'])
except ModuleNotFoundError as err:
    print(err.name)
"""


def test_the_pth_line_without_lm_eval_changes_no_error(site_folder: Path) -> None:
    (site_folder / "_harness_ext.pth").write_text(f"{ROOT}\n")
    done = start_with(site_folder, IMPORT_MANAGER)
    assert (done.stdout, done.stderr) == ("lm_eval\n", "")


@pytest.fixture
def fake_lm_eval(site_folder: Path) -> Path:
    folder = site_folder / "lm_eval" / "tasks"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "manager.py").write_text(
        "class TaskManager:\n    def __init__(self, include_path=None, include_defaults=True):\n"
        "        self.scanned = include_path and len(include_path)\n        self.task_index = {}\n"
    )
    return site_folder


def test_the_pth_line_adds_our_folder_to_lm_eval(fake_lm_eval: Path) -> None:
    (fake_lm_eval / "_harness_ext.pth").write_text(f"{ROOT}\n")
    done = start_with(fake_lm_eval, IMPORT_MANAGER + "print(*[type(f).__name__ for f in sys.meta_path])")
    assert done.stderr == ""
    scanned, finders = done.stdout.splitlines()
    assert scanned == "1"
    assert "HarnessExtWaiter" not in finders


def test_two_pth_files_add_our_folder_once(fake_lm_eval: Path) -> None:
    """As in a virtual environment that sees the system's packages, both with an install of ours."""
    shutil.copy(PTH, fake_lm_eval / "harness_ext_again.pth")
    (fake_lm_eval / "_harness_ext.pth").write_text(f"{ROOT}\n")
    done = start_with(fake_lm_eval, IMPORT_MANAGER)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    "plugin",
    [
        None,
        "def find_manager(:",
        "import no_such_module",
        "",
        "def find_manager(path, target):\n    raise RuntimeError('no')",
    ],
    ids=["no package", "syntax error", "missing import", "other version", "fails"],
)
def test_a_broken_install_of_ours_leaves_lm_eval_as_it_was(fake_lm_eval: Path, plugin: str | None) -> None:
    if plugin is not None:
        package = fake_lm_eval / "harness_ext"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "plugin.py").write_text(plugin)
    done = start_with(fake_lm_eval, IMPORT_MANAGER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


# ------------------------------------------------------------------------------------------------------------- .ci/run


@pytest.mark.parametrize(
    ("output", "make_status", "status", "closing"),
    [
        ("===== 3 passed in 1.20s =====", 0, 0, "===== 3 passed in 1.20s ====="),
        ("==== 1 failed, 2 passed in 75.20s (0:01:15) ====", 2, 2, "==== 1 failed, 2 passed in 75.20s (0:01:15) ===="),
        ("No rule to make target", 2, 2, ""),
        ("nothing ran", 0, 1, ""),
    ],
    ids=["passed", "failed", "make failed", "no tests"],
)
def test_ci_run_ends_with_the_closing_line_and_the_status_of_pytest(
    tmp_path: Path, output: str, make_status: int, status: int, closing: str
) -> None:
    script = tmp_path / "main" / ".ci" / "run"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", script)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(f'#!/bin/sh\necho "data $HARNESS_EXT_DATA"\necho "{output}"\necho later\nexit {make_status}\n')
    make.chmod(make.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        ["bash", str(script)],
        env={**os.environ, "PATH": f"{make.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == status
    assert lines[0] == f"data {tmp_path / 'shared' / 'data'}"
    assert (lines[-1] if closing else "") == closing
