"""Tasks of several processes: every rank asks for all documents, and rank 0 evaluates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from worlds import World, feature_probe, hf_model, loss_task, natural

from harness_ext.engine.attach import _gather
from harness_ext.tasks.whole import WholeTask

TASKS: dict[str, Callable[[], WholeTask]] = {
    "natural": natural,
    "probe": lambda: feature_probe("probe"),
    "quad": lambda: feature_probe("quad", {"seeds": [0, 1], "n_per_class": 8}),
}


def asked(task: WholeTask, **kwargs: Any) -> list[tuple[Any, ...]]:
    task.build_all_requests(**kwargs)
    return [(instance.doc_id, instance.idx, instance.args) for instance in task.instances]


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("limit", [None, 1])
def test_every_rank_asks_for_what_one_process_does(world: World, kind: str, limit: int | None) -> None:
    make = TASKS[kind]
    alone = asked(make(), limit=limit)
    for rank in range(3):
        assert asked(make(), limit=limit, rank=rank, world_size=3) == alone


@pytest.mark.parametrize("kind", TASKS)
def test_rank_0_evaluates_all_documents_and_the_others_none(world: World, kind: str) -> None:
    lm = hf_model()
    found = []
    for rank in (0, 1):
        task = TASKS[kind]()
        task.build_all_requests(rank=rank, world_size=2)
        for instance, answer in zip(task.instances, lm.prompt_states(task.instances), strict=True):
            instance.resps.append(answer)
        task.apply_filters()
        found.append(task)
        documents = [doc_id for doc_id, _ in task.doc_iterator(rank=rank, world_size=2, limit=None)]
        assert documents == (list(range(len(world.splits["test"]))) if rank == 0 else [])
    assert found[0].config.metadata["report"]["documents"] == len(world.splits["test"])
    assert "report" not in found[1].config.metadata
    # lm_eval asks for the names of the filters, and goes through the documents for each.
    assert not found[1].instances[0].filtered_resps


def test_windows_of_a_corpus_are_rank_0s(world: World) -> None:
    world.add_dataset("tests/lines", {"test": [{"text": row["text"]} for row in world.splits["test"]]})
    lm, tasks = hf_model(), [loss_task(), loss_task()]
    for rank, task in enumerate(tasks):
        task.cut_windows(lm)
        task.build_all_requests(rank=rank, world_size=2)
    assert [i.args for i in tasks[0].instances] == [i.args for i in tasks[1].instances]
    assert len(list(tasks[0].doc_iterator(rank=0, world_size=2))) == len(tasks[0].instances)
    assert list(tasks[1].doc_iterator(rank=1, world_size=2)) == []


def test_what_lm_eval_gathers_has_all_metrics_of_ranks_without_documents() -> None:
    sent: list[Any] = []
    ours = {"natural": {("acc", "none"): [1.0, 0.0]}, "theirs": {("acc", "none"): [1.0]}}
    others = {"natural": {}, "theirs": {("acc", "none"): [0.0]}}

    def gather_object(value: Any, dst: int) -> Any:
        sent.append(value)
        return [value, others]

    class First:
        rank = 0

    found = _gather(gather_object, First(), ours, dst=0)
    assert sent == [None], "rank 0 does not send itself what it has"
    assert found[0] is ours
    assert found[1] == {"natural": {("acc", "none"): []}, "theirs": {("acc", "none"): [0.0]}}
    samples = {"natural": [{"doc_id": 0}]}
    assert _gather(lambda value, dst: [value, {"natural": []}], First(), samples) == [samples, {"natural": []}]


def test_numbers_of_a_rank_are_those_of_one_process(world: World) -> None:
    lm, task, alone = hf_model(), natural(), natural()
    for each, kwargs in ((task, {"rank": 0, "world_size": 4}), (alone, {})):
        each.build_all_requests(**kwargs)
        for instance, answer in zip(each.instances, lm.prompt_states(each.instances), strict=True):
            instance.resps.append(answer)
        each.apply_filters()
    for name in ("acc", "brier"):
        np.testing.assert_array_equal(task._items[name], alone._items[name])
