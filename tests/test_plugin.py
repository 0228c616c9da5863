"""Discovery: lm_eval's own TaskManager without its defaults, and stand-ins for releases that do not exist yet."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness_ext import plugin, resources

OURS = resources.task_configs_folder()
USER_TASK = "task: natural_sst\ndataset_path: json\noutput_type: multiple_choice\n"


@pytest.fixture
def task_manager() -> Any:
    plugin.install()
    from lm_eval.tasks import TaskManager

    return TaskManager


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "natural_sst.yaml").write_text(USER_TASK)
    return folder


# ------------------------------------------------------------------------------------------------- the real TaskManager


def test_every_task_manager_knows_our_tasks_and_tags(task_manager: Any) -> None:
    manager = task_manager(include_defaults=False)
    assert {"natural_sst", "probe_agnews"} <= set(manager.all_subtasks)
    assert {"natural", "probe"} <= set(manager.all_tags)
    assert Path(manager.task_index["natural_sst"].yaml_path) == OURS / "sst" / "natural_sst.yaml"
    assert manager.include_path is None


@pytest.mark.parametrize("form", [str, Path, lambda path: [path], lambda path: (str(path),)])
def test_a_task_of_the_user_wins(task_manager: Any, user_folder: Path, form: Callable[[Path], Any]) -> None:
    given = form(user_folder)
    manager = task_manager(include_path=given, include_defaults=False)
    assert Path(manager.task_index["natural_sst"].yaml_path).parent == user_folder
    assert Path(manager.task_index["probe_sst"].yaml_path).is_relative_to(OURS)
    assert manager.include_path is given


def test_include_path_may_be_the_second_positional_argument(task_manager: Any, user_folder: Path) -> None:
    manager = task_manager(None, user_folder, False)
    assert Path(manager.task_index["natural_sst"].yaml_path).parent == user_folder
    assert "probe_sst" in manager.all_subtasks


@pytest.mark.parametrize("named", [OURS, str(OURS), OURS / ".." / OURS.name])
def test_our_folder_is_not_scanned_twice(
    task_manager: Any, named: str | Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        manager = task_manager(include_path=named, include_defaults=False)
    assert "natural_sst" in manager.all_subtasks
    assert manager.include_path == named
    assert [record.getMessage() for record in caplog.records if "overrides" in record.getMessage()] == []


def test_lm_eval_says_so_itself_when_it_is_called_wrongly(task_manager: Any) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        task_manager(no_such_argument=1)


def test_no_name_of_ours_is_one_of_lm_eval(task_manager: Any) -> None:
    """Ours are scanned after lm_eval's, so that they would silently replace them."""
    import lm_eval.tasks

    ours = set(task_manager(include_defaults=False).task_index)
    for path in Path(lm_eval.tasks.__file__).parent.rglob("*.yaml"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        names = {re.sub(r"^(task|group|tag):", "", line).strip(" -\"'") for line in lines}
        assert not names & ours, path


def test_the_command_of_lm_eval_finds_our_tasks() -> None:
    """The whole way: `site` reads the .pth of this environment's install, nothing else names our folder."""
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "validate", "--tasks", "natural_sst,probe_agnews"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"is harness_ext installed here (`pip install -e .`)?\n{done.stdout}{done.stderr}"


# ----------------------------------------------------------------------------------------- lm_eval as it is and may be


def fake_manager(discover: Callable[[], list[Path]] | None = None) -> Any:
    """A stand-in for the module lm_eval.tasks.manager; with `discover`, for one that finds plugins' folders itself."""

    class TaskManager:
        def __init__(
            self, verbosity: str | None = None, include_path: Any = None, include_defaults: bool = True, **_: Any
        ) -> None:
            self.include_path = include_path
            user = include_path if isinstance(include_path, (list, tuple)) else [include_path] if include_path else []
            plugins = discover() if discover else []
            self.scanned = [*(["defaults"] if include_defaults else []), *plugins, *user]
            yamls = (path for folder in self.scanned for path in Path(folder).rglob("*.yaml"))
            self.task_index = {path.stem: SimpleNamespace(yaml_path=path) for path in yamls}

    return SimpleNamespace(TaskManager=TaskManager)


def test_our_folder_is_scanned_after_the_defaults_and_before_the_users() -> None:
    manager = fake_manager()
    plugin.add_task_folder(manager)
    assert manager.TaskManager(include_path=["a", "b"]).scanned == ["defaults", OURS, "a", "b"]
    assert manager.TaskManager().scanned == ["defaults", OURS]


def test_adding_the_folder_twice_changes_nothing() -> None:
    manager = fake_manager()
    plugin.add_task_folder(manager)
    once = manager.TaskManager.__init__
    plugin.add_task_folder(manager)
    assert manager.TaskManager.__init__ is once


@pytest.mark.parametrize("folder", [OURS, OURS.parent], ids=["the folder itself", "a folder above it"])
def test_we_step_aside_where_lm_eval_finds_our_folder(folder: Path) -> None:
    """As a release with EleutherAI/lm-evaluation-harness#4015 would through our entry point."""
    manager = fake_manager(lambda: [folder])
    plugin.add_task_folder(manager)
    assert manager.TaskManager(include_path="a").scanned == ["defaults", folder, "a"]


def test_we_do_not_step_aside_where_lm_eval_finds_only_others(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").touch()
    manager = fake_manager(lambda: [tmp_path])
    plugin.add_task_folder(manager)
    assert manager.TaskManager().scanned == ["defaults", tmp_path, OURS]


def test_a_task_manager_that_we_do_not_understand_still_gets_our_folder() -> None:
    class TaskManager:
        def __init__(self, include_path: Any = None) -> None:
            self.include_path = include_path
            self.scanned = include_path

    manager: Any = SimpleNamespace(TaskManager=TaskManager)
    plugin.add_task_folder(manager)
    assert manager.TaskManager("a").scanned == [OURS, "a"]
    assert manager.TaskManager("a").include_path == "a"


def test_without_our_folder_lm_eval_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost() -> Path:
        raise FileNotFoundError("no task_configs")

    monkeypatch.setattr(resources, "task_configs_folder", lost)
    manager = fake_manager()
    plugin.add_task_folder(manager)
    with caplog.at_level(logging.INFO):
        assert manager.TaskManager(include_path="a").scanned == ["defaults", "a"]
    assert not caplog.records


# -------------------------------------------------------------------------------- waiting, in interpreters of their own

MANAGER = """
import os
if os.environ.pop("FAIL_ONCE", None):
    raise ImportError("not yet")
class TaskManager:
    def __init__(self, include_path=None, include_defaults=True):
        self.include_path = include_path
        self.scanned = list(include_path or [])
        self.task_index = {}
"""

CHECK = """
def report():
    from lm_eval.tasks import manager
    waiting = [f for f in sys.meta_path if type(f).__name__ == "_Waiter"]
    print(len(manager.TaskManager(include_path=["a"]).scanned), len(waiting), sorted(vars(manager.__loader__)))
"""


@pytest.fixture
def fake_lm_eval(tmp_path: Path) -> Path:
    folder = tmp_path / "lm_eval" / "tasks"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "manager.py").write_text(MANAGER)
    return tmp_path


def run_with(folder: Path, code: str, **environment: str) -> str:
    paths = [str(Path(plugin.__file__).parents[1]), str(folder)]
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"import sys; sys.path[:0] = {paths!r}\n{CHECK}\n{code}"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "from harness_ext import plugin; plugin.install(); plugin.install(); report()",
        "import lm_eval.tasks.manager; from harness_ext import plugin; plugin.install(); plugin.install(); report()",
        "from harness_ext import plugin; plugin.install(); import importlib.util as u; "
        "u.find_spec('lm_eval.tasks.manager'); u.find_spec('lm_eval.tasks.manager'); report()",
        "from harness_ext import plugin; plugin.install(); import lm_eval.tasks.manager; plugin.install(); report()",
    ],
    ids=["before lm_eval", "after lm_eval", "a look before the import", "again after it"],
)
def test_the_manager_is_found_and_nothing_is_left_behind(fake_lm_eval: Path, code: str) -> None:
    assert run_with(fake_lm_eval, code) == "2 0 ['name', 'path']\n"


def test_an_import_that_fails_once_is_waited_for_again(fake_lm_eval: Path) -> None:
    code = (
        "from harness_ext import plugin; plugin.install()\n"
        "try:\n    import lm_eval.tasks.manager\nexcept ImportError as err:\n    print(err)\n"
        "report()"
    )
    assert run_with(fake_lm_eval, code, FAIL_ONCE="1") == "not yet\n2 0 ['name', 'path']\n"


def test_an_lm_eval_without_task_manager_imports_as_it_would_without_us(fake_lm_eval: Path) -> None:
    (fake_lm_eval / "lm_eval" / "tasks" / "manager.py").write_text("kept = 1")
    code = "from harness_ext import plugin; plugin.install(); import lm_eval.tasks.manager as m; print(m.kept)"
    assert run_with(fake_lm_eval, code) == "1\n"


def test_a_loader_that_takes_no_hook_is_left_alone(fake_lm_eval: Path) -> None:
    code = """
import importlib.machinery, importlib.util
class Loader:
    __slots__ = ()
    def create_module(self, spec): return None
    def exec_module(self, module): module.kept = 1
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "lm_eval.tasks.manager":
            return importlib.machinery.ModuleSpec(name, Loader())
sys.meta_path.insert(0, Finder())
from harness_ext import plugin; plugin.install()
import lm_eval.tasks.manager as m; print(m.kept)
"""
    assert run_with(fake_lm_eval, code) == "1\n"
