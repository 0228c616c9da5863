"""Tasks that see all their documents at once, however many processes share the work.

lm_eval gives each process some of the documents, and gathers what becomes of them. Our tasks need all of them in one place: the
training documents of a probe, the other documents of a calibration. So each process makes the requests of all documents, the
engine shares out what they ask for, and rank 0, to which the answers come, evaluates all documents in their order, as one
process does. Nothing is gathered afterwards, and a process without a document is none that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_eval.api.task import ConfigurableTask

__all__ = ["WholeTask"]


class WholeTask(ConfigurableTask):
    """Base of the tasks; see the module."""

    _rank = 0

    def build_all_requests(self, *, rank: int = 0, world_size: int = 1, **kwargs: Any) -> None:
        """Make the requests of all documents (lm_eval's hook)."""
        self._rank = rank
        super().build_all_requests(rank=0, world_size=1, **kwargs)

    def doc_iterator(self, *, rank: int = 0, world_size: int = 1, **kwargs: Any) -> Iterator[tuple[int, Any]]:
        """All documents on rank 0 and none on other ranks (lm_eval's hook)."""
        return super().doc_iterator(rank=0, world_size=1, **kwargs) if rank == 0 else iter(())

    def apply_filters(self) -> None:
        """Evaluate on rank 0; the instances of other ranks stay without filtered responses (lm_eval's hook)."""
        if self._rank == 0:
            super().apply_filters()
            self.evaluate_all()

    def evaluate_all(self) -> None:
        """Look at all answers together, before lm_eval asks for what becomes of each document."""
        raise NotImplementedError
