"""`harness-ext run` does not scan lm_eval's own tasks where names of ours are all that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness_ext import plugin, resources


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether lm_eval's own tasks were to be scanned, for each TaskManager; they are not, and have one task `arc_easy`."""
    plugin.install()
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry, Kind

    made: list[bool] = []
    original = TaskManager.__init__

    def scan(self: Any, *args: Any, include_defaults: bool = True, **kwargs: Any) -> None:
        made.append(include_defaults)
        original(self, *args, **kwargs, include_defaults=False)
        if include_defaults:
            self._index["arc_easy"] = Entry("arc_easy", Kind.TASK, None)
            self._all_tasks = sorted(self._index)

    monkeypatch.setattr(TaskManager, "__init__", scan)
    return made


def process(tasks: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What `lm_eval run` does with `--tasks`: the TaskManager, and the tasks."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    config = EvaluatorConfig(tasks=tasks, **kwargs)
    with plugin.spare_scans():
        manager = config.process_tasks({"prompt": "sst/it_was"})
    return manager, config.tasks


@pytest.mark.parametrize("tasks", ["natural_sst", ["natural_sst", "probe_sst,quad_sst"], ["natural"], "loss_wikitext"])
def test_names_of_ours_need_no_scan_of_lm_evals_tasks(scans: list[bool], tasks: Any) -> None:
    manager, found = process(tasks)
    assert scans == [False]
    assert found == [name for entry in ([tasks] if isinstance(tasks, str) else tasks) for name in entry.split(",")]
    assert manager.metadata == {"prompt": "sst/it_was"}
    assert manager.include_path is None


@pytest.mark.parametrize(
    "tasks",
    ["arc_easy", ["natural_sst", "arc_easy"], "natural_s*", ["natural_sst", "arc_*"]],
    ids=["theirs", "both", "pattern", "patterns"],
)
def test_other_names_and_patterns_are_looked_up_in_all_tasks(scans: list[bool], tasks: Any) -> None:
    manager, found = process(tasks)
    assert scans == [False, True]
    assert "arc_easy" in manager.all_tasks
    assert found


def test_an_unknown_name_is_lm_evals_error(scans: list[bool]) -> None:
    with pytest.raises(ValueError, match="natural_stt"):
        process("natural_stt")
    assert scans[-1]


def test_a_path_is_looked_up_as_lm_eval_does(scans: list[bool]) -> None:
    process(str(resources.task_configs_folder() / "sst" / "natural_sst.yaml"))
    assert scans == [False, True]


def test_a_folder_of_the_user_may_have_our_names(scans: list[bool], tmp_path: Path) -> None:
    (tmp_path / "natural_sst.yaml").write_text("task: natural_sst\ndataset_path: json\noutput_type: multiple_choice\n")
    manager, _ = process("natural_sst", include_path=str(tmp_path))
    assert scans == [True]
    assert Path(manager.task_index["natural_sst"].yaml_path).parent == tmp_path


def test_lm_eval_is_as_it_was_afterwards(scans: list[bool]) -> None:
    from lm_eval import tasks
    from lm_eval.config.evaluate_config import EvaluatorConfig

    before = tasks.TaskManager, EvaluatorConfig.process_tasks
    process("natural_sst")
    assert (tasks.TaskManager, EvaluatorConfig.process_tasks) == before
    EvaluatorConfig(tasks="natural_sst").process_tasks()
    assert scans == [False, True]
