"""The processes of one job: how they share out work, what they tell each other, and how they end together.

Every process ("rank") of a job that accelerate or torchrun has started has the whole model and sees all requests. Each computes
its share, and what rank 0 needs to evaluate travels there by collectives of plain tensors on the model's device, so gloo and
NCCL serve alike and no file system has to be shared. Rank 0 alone evaluates and writes.

Three things do not go through collectives, which block and cannot be interrupted, but through the job's key-value store: how
far all ranks are, for one progress bar; that a rank is alive; and that a rank has failed. A thread of every rank sees to the
last two, so that no rank waits for one that raised an error or was killed, whatever it is doing. (accelerate and torchrun end
all ranks when one ends, but srun and mpirun may not.)

Models whose weights are spread over the ranks (FSDP, ZeRO-3) gather them in every forward pass, on all ranks at once. A
`Lockstep` lets each rank forward what and as often as it likes: ranks without work forward a dummy.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

__all__ = [
    "ALONE",
    "Lockstep",
    "Progress",
    "Ranks",
    "are_several",
    "end_together",
    "share_out",
    "show_first_error_only",
]

logger = logging.getLogger("lm_eval.harness_ext.engine")

CHUNK_BYTES = 2**26
"""Vectors sent at once, which are on the model's device twice meanwhile."""

POLL_SECONDS = 0.5
"""How often a rank looks whether another has failed, and rank 0 how far the others are."""

GRACE_SECONDS = 4.0
"""What a rank leaves the one that failed first for showing its error: launchers end all ranks when one of them ends."""

STORE_SECONDS = 30
"""How long the store may take to answer."""

PULSE_SECONDS = 5.0
"""How often rank 0 looks which ranks are alive."""

SILENT_SECONDS = 45.0
"""After how long without a sign of life a rank counts as killed. A sign takes no more than Python's lock for a moment."""

ENDED = "harness_ext/ended"
"""Key of the job's store: a rank whose process ends with an error."""


class Ranks:
    """The ranks of a job, seen from one of them.

    Args:
        rank: Place of this process, 0 to size - 1, over all nodes.
        size: Number of processes.
        device: Where tensors of collectives have to be: that of the model.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self.device = device or torch.device("cpu")
        self._counters = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Add arrays of equal shape, float64 or int64, of all ranks; every rank gets the sum."""
        if self.is_alone:
            return values
        tensor = torch.from_numpy(np.array(values)).to(self.device)
        torch.distributed.all_reduce(tensor)
        return tensor.cpu().numpy()

    def share(self, value: Any) -> list[Any]:
        """Return the values of all ranks in their order; plain JSON types, of a few megabytes at most."""
        if self.is_alone:
            return [value]
        data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        lengths = self.sum(np.eye(self.size, dtype=np.int64)[self.rank] * len(data)).tolist()
        padded = np.zeros(max(lengths), dtype=np.uint8)
        padded[: len(data)] = data
        return [
            json.loads(of_rank[:length].tobytes())
            for of_rank, length in zip(self._gather(padded), lengths, strict=True)
        ]

    def gather_flags(self, flags: np.ndarray) -> np.ndarray:
        """Return booleans (n,) of all ranks, shape (size, n)."""
        if self.is_alone:
            return flags[np.newaxis]
        return np.array(
            [np.unpackbits(bits, count=len(flags)) for bits in self._gather(np.packbits(flags))], dtype=bool
        )

    def _gather(self, values: np.ndarray) -> list[np.ndarray]:
        """Arrays of equal shape, uint8, of all ranks."""
        mine = torch.from_numpy(values).to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(found, mine)
        return [of_rank.cpu().numpy() for of_rank in found]

    def check_same(self, digest: str, what: str) -> None:
        """Raise RuntimeError where ranks do not have the same of something that they share out."""
        digests = self.share(digest)
        if len(set(digests)) > 1:
            odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
            raise RuntimeError(
                f"Rank {', '.join(map(str, odd))} of {self.size} has other {what} than rank 0. All ranks need the same data, "
                "prompts, tokenizer and options: compare the dataset copies, HARNESS_EXT_* variables and package versions of "
                "the nodes."
            )

    def to_first(self, places: np.ndarray, table: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Send rows of a table to rank 0, which yields those of the others, a part at a time. All ranks must run through it.

        Args:
            places: Rows of the table to send, int64 of shape (n,).
            table: float32 of shape (m, d).

        Yields:
            On rank 0: places, and rows of shape (k, d) that belong there.
        """
        if self.is_alone:
            return
        if not self.is_first:
            sizes = torch.tensor([len(places), table.shape[1]], device=self.device)
            torch.distributed.send(sizes, 0)
            for part in _parts(len(places), table.shape[1]):
                torch.distributed.send(torch.from_numpy(places[part]).to(self.device), 0)
                torch.distributed.send(torch.from_numpy(table[places[part]]).to(self.device), 0)
            return
        for rank in range(1, self.size):
            sizes = torch.zeros(2, dtype=torch.int64, device=self.device)
            torch.distributed.recv(sizes, rank)
            count, dim = sizes.tolist()
            for part in _parts(count, dim):
                size = part.stop - part.start
                numbers = torch.empty(size, dtype=torch.int64, device=self.device)
                vectors = torch.empty(size, dim, device=self.device)
                torch.distributed.recv(numbers, rank)
                torch.distributed.recv(vectors, rank)
                yield numbers.cpu().numpy(), vectors.cpu().numpy()

    def counter(self) -> Callable[[int], int]:
        """A number that all ranks add to: a function that adds and returns the sum so far. Every rank must call this."""
        self._counters += 1
        store = _store()
        if self.is_alone or store is None:
            total = 0

            def add_here(number: int) -> int:
                nonlocal total
                total += number
                return total

            return add_here
        key = f"harness_ext/counter/{id_of_job()}/{self._counters}"
        return lambda number: int(store.add(key, number))


ALONE = Ranks()
"""The ranks of a job of one process."""

_jobs = 0


def id_of_job() -> int:
    """Number of evaluations that this process has begun, the same on all ranks."""
    return _jobs


def _parts(count: int, dim: int) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // max(1, 4 * dim))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def share_out(costs: Sequence[float], size: int, *, possible: Sequence[Sequence[int]] | None = None) -> list[int]:
    """Give pieces of work to ranks so that the busiest has little more than the others.

    Largest first, each to the rank that has least (LPT, Graham 1969: at most 4/3 of the best).

    Args:
        costs: Of the pieces.
        size: Number of ranks.
        possible: Ranks that may take each piece; None: all may.

    Returns:
        The rank of each piece.
    """
    load = [0.0] * size
    rank_of = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        ranks = range(size) if possible is None else possible[piece]
        rank_of[piece] = min(ranks, key=lambda rank: (load[rank], rank))
        load[rank_of[piece]] += costs[piece]
    return rank_of


class Progress:
    """A progress bar on rank 0 that counts what all ranks do.

    Args:
        ranks: The ranks; each must make one.
        total: What all ranks together will have done.
        initial: What was done before.
        shown: Whether rank 0 shows it.
        kwargs: Of tqdm.
    """

    def __init__(self, ranks: Ranks, *, total: int, initial: int = 0, shown: bool = True, **kwargs: Any) -> None:
        self._ranks, self._initial = ranks, initial
        self._done, self._finished = ranks.counter(), ranks.counter()
        self._bar: Any = tqdm(total=total, initial=initial, disable=not (shown and ranks.is_first), **kwargs)

    def update(self, number: int, note: str = "") -> None:
        """Count what this rank has done."""
        done = self._initial + self._done(number)
        if self._ranks.is_first:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)

    def finish(self) -> None:
        """Wait on rank 0 until all ranks have called this, and close the bar."""
        finished = self._finished(1)
        while self._ranks.is_first and finished < self._ranks.size:
            time.sleep(POLL_SECONDS / 10)
            finished = self._finished(0)
            self.update(0)
        self.update(0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


# ---------------------------------------------------------------------------------------------------------- lockstep


class Lockstep:
    """Forward passes of a model that all ranks must make together.

    Before each call of the model a rank tells the others, by a sum over ranks, that it makes one. A rank whose own work is done
    goes on taking part with a dummy, until a sum is zero: then the work of all ranks is done.

    Args:
        ranks: The ranks.
        model: The model, whose weights are spread over them.
        dummy: Makes one forward pass of the model.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, dummy: Callable[[], Any]) -> None:
        self._ranks, self._model, self._dummy = ranks, model, dummy
        self._is_dummy = False
        self.num_dummies = 0

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Work of this rank that calls the model, some other number of times than the others do; all ranks must enter."""
        # First of the hooks, since a sharded model gathers its weights in one of its own.
        handle = self._model.register_forward_pre_hook(self._announce, prepend=True)
        try:
            yield
            while self._active(0):
                self._is_dummy = True
                self._dummy()
                self._is_dummy = False
                self.num_dummies += 1
        finally:
            self._is_dummy = False
            handle.remove()

    def _announce(self, module: nn.Module, args: Any) -> None:
        if not self._is_dummy:
            self._active(1)

    def _active(self, number: int) -> bool:
        return bool(self._ranks.sum(np.array([number], dtype=np.int64))[0])


# ---------------------------------------------------------------------------------------------------------- failures


def _store() -> Any:
    """The key-value store of the job, over a connection of its own; None where there is no job of several processes."""
    global _own_store, _default_store
    if not are_several():
        return None
    default = torch.distributed.distributed_c10d._get_default_store()
    if _default_store is not default:  # the first time, or that of another process group
        _own_store = _default_store = default
        # A thread may wait for a key over the default connection, and hold it meanwhile.
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            _own_store = default.clone()
            _own_store.set_timeout(datetime.timedelta(seconds=STORE_SECONDS))
    return _own_store


_own_store: Any = None
_default_store: Any = None


def are_several() -> bool:
    """Whether this process is one of a process group. Some builds of torch know no such thing."""
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


_IS_FIRST = "_harness_ext_is_first"
"""Attribute of an error: whether it was the first of an evaluation in the job."""


def _failed_key(evaluation: int) -> str:
    """Key of the job's store: the first rank that failed in an evaluation."""
    return f"harness_ext/failed/{evaluation}"


def _is_first(key: str) -> bool:
    """Whether this process is the first of its job to set a key of the store. It says the same when asked again."""
    store = _store()
    if store is None:
        return True
    me = str(torch.distributed.get_rank())
    try:
        return bool(store.compare_set(key, "", me).decode() == me)
    except Exception:
        _say(f"rank {me} ends: the process that keeps the job's store does not answer, see there")
        return False


@contextlib.contextmanager
def end_together(ranks: Ranks) -> Iterator[None]:
    """End this process where another of the job fails meanwhile, and tell the others of an error that leaves the block.

    An error that leaves it on every rank may be caught: the next block knows nothing of it.
    """
    global _jobs
    _jobs += 1
    if ranks.is_alone:
        yield
        return
    watch = _Watch(ranks, _jobs)
    watch.start()
    try:
        yield
    except BaseException as err:  # an interrupt, too, ends a process for which the others would wait
        is_first = not watch.is_ending and _is_first(_failed_key(_jobs))
        with contextlib.suppress(AttributeError):  # of a class with slots
            setattr(err, _IS_FIRST, is_first)
        raise
    finally:
        watch.stop()


class _Watch(threading.Thread):
    """Tells the others that this rank is alive, and ends it where another has failed or, seen from rank 0, is silent."""

    def __init__(self, ranks: Ranks, evaluation: int) -> None:
        super().__init__(name="harness_ext watches the job", daemon=True)
        self._ranks, self._store = ranks, _store()
        self._key = _failed_key(evaluation)
        self._pulse_key = f"harness_ext/pulse/{evaluation}"
        self._done = threading.Event()
        self.is_ending = False
        # Of each rank, its last sign of life and in how many looks since there was no other. Not seconds since: a job that was
        # stopped as a whole, as SLURM does, goes on with all ranks silent for as long.
        self._seen: dict[int, tuple[int, int]] = {}
        self._next_look = 0.0

    def run(self) -> None:
        """Look about until `stop`."""
        is_done = False
        while not is_done:
            try:
                self._store.add(f"{self._pulse_key}/{self._ranks.rank}", 1)
                if self._ranks.is_first:
                    self._look_for_silent_ranks()
                failed = next((key for key in (self._key, ENDED) if self._store.check([key])), None)
                of_rank = self._store.get(failed).decode() if failed else ""
            except Exception:
                self._end("the process that keeps the job's store does not answer")
                return
            if of_rank == str(self._ranks.rank):
                return  # its own error is on its way
            if of_rank:
                self._end(f"rank {of_rank} has failed")
                return
            is_done = self._done.wait(POLL_SECONDS)

    def stop(self) -> None:
        """Say that this rank is done, which is no reason to end the others."""
        self._done.set()
        self.join(timeout=POLL_SECONDS)
        with contextlib.suppress(Exception):
            self._store.set(f"{self._pulse_key}/{self._ranks.rank}", "-1")

    def _look_for_silent_ranks(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + PULSE_SECONDS
        for rank in range(1, self._ranks.size):
            key = f"{self._pulse_key}/{rank}"
            pulse = int(self._store.get(key)) if self._store.check([key]) else 0
            last, looks = self._seen.get(rank, (0, 0))
            self._seen[rank] = pulse, looks + 1 if pulse == last else 0
            if pulse > 0 and self._seen[rank][1] * PULSE_SECONDS >= SILENT_SECONDS:
                self._store.compare_set(self._key, "", str(rank))
                _say(
                    f"rank {rank} has given no sign of life for {SILENT_SECONDS:.0f} s: it was killed, or its node is gone"
                )
                return

    def _end(self, why: str) -> None:
        """End this process, unless its launcher does or an error of a connection to the one that has failed."""
        self.is_ending = True
        _say(f"rank {self._ranks.rank} ends: {why}")
        if self._done.wait(GRACE_SECONDS):
            return
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _say(text: str) -> None:
    # In one write, where print makes two, between which another rank may write.
    sys.stderr.write(f"{text}\n")


def show_first_error_only() -> None:
    """Let the processes of a job show the first error that ends one of them and no other; calling it again changes nothing."""
    shown = sys.excepthook
    if getattr(shown, "_shows_first_error_only", False):
        return
    _store()  # opened while it is there

    def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if not issubclass(kind, Exception):
            shown(kind, value, traceback)
            return
        if not (getattr(value, _IS_FIRST, True) and _is_first(ENDED)):
            time.sleep(GRACE_SECONDS)
            return
        shown(kind, value, traceback)
        if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # The store, in which the others see that this one has failed, ends with this process.
            time.sleep(GRACE_SECONDS + 2 * POLL_SECONDS)

    show._shows_first_error_only = True  # type: ignore[attr-defined]
    sys.excepthook = show
