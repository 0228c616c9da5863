"""Makes lm_eval find our tasks without `--include_path`.

lm_eval 0.4.13 has no plugin mechanism for tasks. So `harness_ext.pth`, whose one line Python's `site` runs at every
interpreter start, puts a finder into `sys.meta_path` that does nothing until `lm_eval.tasks.manager` is imported. Then
it calls `find_manager` here, and from then on every TaskManager scans our task folder after lm_eval's own and before
the user's `--include_path`, so that a user's task of the same name wins.

Every Python process of the environment runs that line. It imports nothing, so it costs a fraction of a millisecond,
and a broken install of ours cannot be noticed by programs that do not use lm_eval.

Where `.pth` files are not read (PYTHONPATH, `pip install --target`), `harness-ext run` calls `install`. It also calls
`spare_scans`, since lm_eval takes seconds to scan its own 14,000 tasks for names that are ours.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from harness_ext import resources

__all__ = ["add_task_folder", "find_manager", "install", "spare_scans"]

_MANAGER = "lm_eval.tasks.manager"
_MARK = "_scans_harness_ext"

logger = logging.getLogger(__name__)


class _Waiter:
    """The finder of `harness_ext.pth`, for processes that did not read it."""

    waits_for = _MANAGER

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return find_manager(path, target) if name == self.waits_for else None


def install() -> None:
    """Add our task folder to lm_eval's TaskManager, now or once it is imported. Calling it again changes nothing."""
    manager = sys.modules.get(_MANAGER)
    if manager is not None:
        add_task_folder(manager)
    elif not any(_is_waiter(finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiter())


def find_manager(path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Let the other finders find `lm_eval.tasks.manager`, and add our folder as soon as it has run.

    Args:
        path: As in `find_spec` of a finder.
        target: As in `find_spec` of a finder.

    Returns:
        What the first finder found that is not waiting like us; None if none did.
    """
    for finder in sys.meta_path:
        find_spec = None if _is_waiter(finder) else getattr(finder, "find_spec", None)
        spec = None if find_spec is None else find_spec(_MANAGER, path, target)
        if spec is not None:
            try:
                _hook(spec.loader)
            except Exception:
                _log_failure()
            return spec
    return None


def _is_waiter(finder: Any) -> bool:
    return getattr(finder, "waits_for", None) == _MANAGER


def _hook(loader: Any) -> None:
    exec_module = loader.exec_module

    def exec_and_add(module: ModuleType) -> None:
        # Left as it was found: a finder may give the same loader again, for this module or another.
        vars(loader).pop("exec_module", None)
        exec_module(module)
        try:
            # Not before: a look for the module or an import that failed is no reason to stop waiting.
            sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_waiter(finder)]
            add_task_folder(module)
        except Exception:
            _log_failure()

    loader.exec_module = exec_and_add


def add_task_folder(manager: ModuleType) -> None:
    """Make `manager.TaskManager` scan our task folder. `TaskManager.include_path` stays what the user gave.

    Args:
        manager: The module `lm_eval.tasks.manager`.

    Raises:
        AttributeError: If the module has no TaskManager.
    """
    task_manager = manager.TaskManager
    original = task_manager.__init__
    if getattr(original, _MARK, False):
        return
    signature = inspect.signature(original)

    @functools.cache
    def ours() -> Path | None:
        return _folder_to_add(task_manager, original)

    @functools.wraps(original)
    def scan_ours_too(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
            theirs = bound.arguments.get("include_path")
            paths = list(theirs) if isinstance(theirs, (list, tuple)) else [theirs] if theirs else []
            folder = ours()
            if folder is not None and not any(_is_same_folder(path, folder) for path in paths):
                bound.arguments["include_path"] = [folder, *paths]
        except Exception:
            _log_failure()
            original(self, *args, **kwargs)
            return
        original(*bound.args, **bound.kwargs)
        self.include_path = theirs

    setattr(scan_ours_too, _MARK, True)
    task_manager.__init__ = scan_ours_too


@contextlib.contextmanager
def spare_scans() -> Iterator[None]:
    """Let `lm_eval run` scan our folder only where that is enough: all tasks are names that our folder has.

    Such a name is ours in a full scan, too, where our folder comes after lm_eval's own. Patterns, paths and groups are looked
    up in a full scan, and so is everything where the user includes another folder.
    """
    from lm_eval.config.evaluate_config import EvaluatorConfig

    process_tasks = EvaluatorConfig.process_tasks

    @functools.wraps(process_tasks)
    def process_tasks_quickly(self: Any, *args: Any, **kwargs: Any) -> Any:
        from lm_eval import tasks

        task_manager = tasks.TaskManager

        def manager(*, include_path: Any = None, **options: Any) -> Any:
            if not include_path:
                ours = task_manager(include_defaults=False, **options)
                if _has_all(ours, self.tasks):
                    return ours
            return task_manager(include_path=include_path, **options)

        tasks.TaskManager = manager
        try:
            return process_tasks(self, *args, **kwargs)
        finally:
            tasks.TaskManager = task_manager

    EvaluatorConfig.process_tasks = process_tasks_quickly
    try:
        yield
    finally:
        EvaluatorConfig.process_tasks = process_tasks


def _has_all(manager: Any, tasks: Any) -> bool:
    """Whether what `--tasks` says are names of tasks and tags that a TaskManager knows."""
    entries = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        return False
    names = [name for entry in entries for name in entry.split(",")]
    return bool(names) and set(names) <= {*manager.all_subtasks, *manager.all_tags}


def _folder_to_add(task_manager: Any, original: Callable[..., None]) -> Path | None:
    """Return our task folder, or None where lm_eval scans it by itself (our entry point in pyproject.toml).

    Whether it does is seen from what a TaskManager without defaults knows, whatever the mechanism is called. Where
    lm_eval has none, such a TaskManager scans nothing and costs nothing.
    """
    folder = resources.task_configs_folder()
    try:
        bare = task_manager.__new__(task_manager)
        original(bare, include_defaults=False)
        known = [entry.yaml_path for entry in bare.task_index.values()]
    except Exception:  # another lm_eval's TaskManager: our tasks named twice are better than not at all
        _log_failure()
        return folder
    found = any(path is not None and Path(path).resolve().is_relative_to(folder.resolve()) for path in known)
    return None if found else folder


def _is_same_folder(path: str | Path, folder: Path) -> bool:
    return Path(path).expanduser().resolve() == folder.resolve()


def _log_failure() -> None:
    # At debug level: this runs inside other programs, where a message would be noise on every run.
    logger.debug("harness_ext could not add its tasks to lm_eval", exc_info=True)
