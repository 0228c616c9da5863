"""Gives lm_eval's models the request type `prompt_states`, and checks models before a run starts.

lm_eval hands all requests of one type to `getattr(lm, request_type)` in one call. `attach` adds that method to lm_eval's
base class LM, when our tasks are imported; a model that exists by then has it too. Transformers models (`--model hf` and
its relatives) answer with the engine. Any other model answers label words by its own `loglikelihood`, one request a word,
and has no states: `attach` also wraps `lm_eval.evaluator.evaluate`, which is where the model and the tasks are first known
together, so that a task that needs states stops there, before any model work. The wrapper adds what the engine did, and what
our tasks have to say together, to the results as `results["harness_ext"]`. Last, lm_eval gives a standard error to a fixed
list of aggregations only; `attach` lets an aggregation bring its own. And where lm_eval cannot save results it only logs a
warning and ends with status 0; results of ours that are not there afterwards are an error, and so is a path that cannot be
written to, before the run.

Where accelerate or torchrun has started several processes, the wrapper gives the model its place among all of them, which
lm_eval leaves out on the CPU and takes for that on its node elsewhere; `ranks` says how the work is shared.

The other place that patches lm_eval is `harness_ext.plugin`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import evaluator, evaluator_utils
from lm_eval.api import task as lm_eval_task
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CachingLM
from lm_eval.loggers import EvaluationTracker
from lm_eval.utils import make_table

from harness_ext import __version__
from harness_ext.contracts import PromptRequest, PromptStates, WindowAnswer, WindowRequest
from harness_ext.paths import require_place
from harness_ext.ranks import ALONE, Lockstep, Ranks, are_several, end_together, share_out, show_first_error_only

__all__ = ["FLATNESS_REQUEST_TYPE", "LOSS_REQUEST_TYPE", "REQUEST_TYPE", "attach", "gives_states"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

REQUEST_TYPE = "prompt_states"
LOSS_REQUEST_TYPE = "window_losses"
FLATNESS_REQUEST_TYPE = "window_flatness"

SUMMARIES = "_harness_ext_summaries"
"""Attribute of a model: what the engine did for it in the current run."""

CACHE = "_harness_ext_cache"
"""Attribute of a model: lm_eval's wrapper that remembers its responses (--use_cache), or the model itself."""

FINGERPRINT = "_harness_ext_fingerprint"
"""Attribute of a model: a list with its fingerprint, once it is known in the current run, for which all weights are read."""

RANKS = "_harness_ext_ranks"
"""Attribute of a model: the processes that share the work of the current run, where they are several."""

LOCKSTEP = "_harness_ext_lockstep"
"""Attribute of a model that is spread over the ranks: what makes its forward passes in the current run."""

CPU_TOKENS = 4096
GPU_TOKENS = 16384
ROWS_TOKENS = 65536
"""Tokens in a batch: on the CPU and on an accelerator with `--batch_size auto`, and at most when N rows are asked for."""

BACKWARD_TOKENS = 1024
"""Tokens of a batch of blocks whose gradient norms are taken: activations of all layers are kept."""

CPU_BATCH_COST = 64
GPU_BATCH_COST = 2048
"""What the fixed work of a batch costs, in tokens. On two CPU cores and 135M parameters, batches of 16 short prompts took 8 %
longer a token than batches of 64; an accelerator is idle below thousands of tokens."""


def attach() -> None:
    """Patch lm_eval; calling it again changes nothing."""
    if getattr(LM, REQUEST_TYPE, None) is prompt_states:
        return
    size = os.environ.get("WORLD_SIZE", "")  # some schedulers set it empty
    if size.isdigit() and int(size) > 1:
        show_first_error_only()
        if os.environ.get("RANK") != "0":
            # All ranks make the same tasks, which rank 0 speaks of.
            for name in ("tasks", "flatness"):
                logging.getLogger(f"lm_eval.harness_ext.{name}").setLevel(logging.ERROR)
    setattr(LM, REQUEST_TYPE, prompt_states)
    setattr(LM, LOSS_REQUEST_TYPE, window_losses)
    setattr(LM, FLATNESS_REQUEST_TYPE, window_flatness)
    evaluator.evaluate = _checked(evaluator.evaluate)
    evaluator_utils.stderr_for_metric = _with_own_stderr(evaluator_utils.stderr_for_metric)
    EvaluationTracker.__init__ = _remembered(EvaluationTracker.__init__)
    EvaluationTracker.save_results_aggregated = _checked_results(EvaluationTracker.save_results_aggregated)
    EvaluationTracker.save_results_samples = _checked_samples(EvaluationTracker.save_results_samples)


def gives_states(lm: Any) -> bool:
    """Whether a model is a causal transformers model in this process, so that f(s) can be read."""
    if isinstance(lm, CachingLM):
        lm = lm.lm
    # Not imported here: lm_eval imports it only for models that need it, and it costs seconds.
    huggingface = sys.modules.get("lm_eval.models.huggingface")
    if huggingface is None or not isinstance(lm, huggingface.HFLM) or getattr(lm, "backend", None) != "causal":
        return False
    head = getattr(lm.model, "get_output_embeddings", None)
    return head is not None and head() is not None


def prompt_states(lm: LM, requests: Sequence[Instance]) -> list[PromptStates]:
    """Answer requests of arguments (context, `PromptRequest.to_argument()`); becomes a method of lm_eval's LM."""
    contexts = [request.args[0] for request in requests]
    asked = [PromptRequest.from_argument(request.args[1]) for request in requests]
    if gives_states(lm):
        return _answer_with_engine(lm, requests, contexts, asked)
    for request, what in zip(requests, asked, strict=True):
        if what.features:
            raise _no_states(lm, str(request.task_name))
    return _answer_with_loglikelihood(lm, contexts, asked)


def window_losses(lm: Any, requests: Sequence[Instance]) -> list[WindowAnswer]:
    """Answer requests of arguments (text, `WindowRequest.to_argument()`) with losses; becomes a method of lm_eval's LM."""
    from harness_ext.engine.losses import window_nats

    asked = [WindowRequest.from_argument(request.args[1]) for request in requests]
    model = lm.lm if isinstance(lm, CachingLM) else lm
    max_rows, max_tokens = _batch_limits(model)
    store, _ = _open_store(model)
    try:
        nats = window_nats(
            [(window.tokens, window.targets) for window in asked],
            model=_last_state_model(model),
            max_rows=max_rows,
            max_tokens=max_tokens,
            ranks=_ranks(model),
            lockstep=getattr(model, LOCKSTEP, None),
            store=store,
        )
    finally:
        if store is not None:
            store.close()
    return [
        WindowAnswer({"loss": of_window / len(window.targets)}) for of_window, window in zip(nats, asked, strict=True)
    ]


def window_flatness(lm: Any, requests: Sequence[Instance]) -> list[WindowAnswer]:
    """Answer requests of arguments (text, `WindowRequest.to_argument()`); becomes a method of lm_eval's LM.

    The windows of a task are one run, in the order of the requests.
    """
    from harness_ext.engine.kept import KeptResults
    from harness_ext.flatness.options import FlatnessOptions
    from harness_ext.flatness.run import Block, measure

    model = lm.lm if isinstance(lm, CachingLM) else lm
    if hasattr(model, LOCKSTEP):
        raise TypeError(
            "flatness: the model's weights are spread over processes, and derivatives need all of them in each. Start one "
            "process, or as many as hold a copy of the model each."
        )
    asked = [WindowRequest.from_argument(request.args[1]) for request in requests]
    of_tasks: dict[str, list[WindowRequest]] = {}
    for request, window in zip(requests, asked, strict=True):
        of_tasks.setdefault(str(request.task_name), []).append(window)
    runs = {}
    store, _ = _open_store(model)
    try:
        for task, windows in of_tasks.items():
            options: dict[str, Any] = dict(windows[0].options or {})
            options |= {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
            # A window is asked for as often as the task's `repeats` say.
            blocks = {window.number: Block(window.tokens, window.targets, window.number) for window in windows}
            runs[task] = measure(
                model.model,
                list(blocks.values()),
                FlatnessOptions(**options),
                device=model.device,
                max_tokens=BACKWARD_TOKENS,
                ranks=_ranks(model),
                kept=KeptResults(store, "flatness") if store is not None else None,
            )
    finally:
        if store is not None:
            store.close()
    answers = []
    for request, window in zip(requests, asked, strict=True):
        run = runs[str(request.task_name)]
        answers.append(WindowAnswer(run.values.get(window.number), run.report))
    return answers


def _batch_limits(lm: Any) -> tuple[int, int]:
    """Rows and tokens of a batch at most, as --batch_size says."""
    if str(lm.batch_size).startswith("auto"):
        return lm.max_batch_size, CPU_TOKENS if lm.device.type == "cpu" else GPU_TOKENS
    return int(lm.batch_size), ROWS_TOKENS


def _last_state_model(lm: Any) -> Any:
    from harness_ext.engine.forward import LastStateModel

    return LastStateModel(
        _module(lm), device=lm.device, autocast_dtype=lm.mixed_precision_dtype, is_spread=hasattr(lm, LOCKSTEP)
    )


def _open_store(lm: Any) -> tuple[Any, str | None]:
    """The model's store and fingerprint; None where there is none."""
    from harness_ext.engine.fingerprint import model_fingerprint
    from harness_ext.engine.store import FeatureStore, cache_root

    root = cache_root()
    if root is None or hasattr(lm, LOCKSTEP):  # of a part of the weights there is none
        return None, None
    known: list[str | None] = getattr(lm, FINGERPRINT, [])
    if not known:
        known.append(model_fingerprint(lm.model, autocast_dtype=lm.mixed_precision_dtype))
    fingerprint = known[0]
    if fingerprint is None:
        return None, None
    name = lm.pretrained if isinstance(lm.pretrained, str) else type(lm.model).__name__
    dtype = str(next(lm.model.parameters()).dtype).removeprefix("torch.")
    return FeatureStore(root, fingerprint, description=f"{name} ({dtype})"), fingerprint


def _answer_with_engine(
    lm: Any, instances: Sequence[Instance], contexts: list[str], asked: list[PromptRequest]
) -> list[PromptStates]:
    from harness_ext.engine.answer import answer_requests
    from harness_ext.engine.tokens import PromptEncoder

    store, fingerprint = _open_store(lm)
    max_rows, max_tokens = _batch_limits(lm)
    answers, summary = answer_requests(
        contexts,
        asked,
        model=_last_state_model(lm),
        encoder=PromptEncoder(
            lm.tokenizer,
            max_length=lm.max_length,
            add_special_tokens=lm.add_bos_token,
            prefix_token_id=lm.prefix_token_id,
            num_embeddings=getattr(lm.model.get_input_embeddings(), "num_embeddings", None),
        ),
        store=store,
        max_rows=max_rows,
        max_tokens=max_tokens,
        batch_cost=CPU_BATCH_COST if lm.device.type == "cpu" else GPU_BATCH_COST,
        # A task's first request of a document is the document; further ones, such as the bare template, are its context.
        documents=[int(instance.idx == 0) for instance in instances],
        ranks=_ranks(lm),
        lockstep=getattr(lm, LOCKSTEP, None),
    )
    if lm.rank == 0:
        logger.info("%s", summary)
    getattr(lm, SUMMARIES, []).append(summary.to_dict() | {"model_fingerprint": fingerprint})
    return answers


def _answer_with_loglikelihood(lm: LM, contexts: list[str], asked: list[PromptRequest]) -> list[PromptStates]:
    from hashlib import blake2b

    pairs = list(
        dict.fromkeys(
            (context, word) for context, request in zip(contexts, asked, strict=True) for word in request.continuations
        )
    )
    ranks = _ranks(lm)
    ranks.check_same(blake2b(repr(pairs).encode(), digest_size=16).hexdigest(), "prompts")
    rank_of = share_out([len(context) + len(word) for context, word in pairs], ranks.size)
    mine = [i for i, rank in enumerate(rank_of) if rank == ranks.rank]
    instances = [
        Instance("loglikelihood", doc={}, arguments=pairs[i], idx=i, metadata=("harness_ext", i, 1)) for i in mine
    ]
    found = np.zeros(len(pairs))
    if instances:
        found[mine] = [float(score) for score, _ in getattr(lm, CACHE, lm).loglikelihood(instances)]
    scores = dict(zip(pairs, ranks.sum(found).tolist(), strict=True))
    return [
        PromptStates(
            key=blake2b(context.encode(), digest_size=16).hexdigest(),
            log_probs=tuple(scores[context, word] for word in request.continuations),
        )
        for context, request in zip(contexts, asked, strict=True)
    ]


def _no_states(lm: Any, task: str) -> TypeError:
    lm = lm.lm if isinstance(lm, CachingLM) else lm
    return TypeError(
        f"{task} needs the model's hidden states, which {type(lm).__name__} does not give. Expected a causal transformers "
        "model: use --model hf --model_args pretrained=NAME_OR_FOLDER. On this model only natural_* tasks of harness_ext run."
    )


def _tensor_parallel(task: str) -> TypeError:
    return TypeError(
        f"{task}: the model's matrices are split over processes (tp_plan), which harness_ext does not support. A model that is "
        "too large for one device runs in one process with --model_args parallelize=True, or under accelerate's FSDP."
    )


def _checked(evaluate: Any) -> Any:
    """Wrap lm_eval's `evaluate`: check first, and say afterwards what the engine did."""

    @functools.wraps(evaluate)
    def checked(lm: Any, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
        tasks = task_dict.get("tasks", task_dict)
        model = lm.lm if isinstance(lm, CachingLM) else lm
        ranks = _find_ranks(model)
        summaries: list[dict[str, Any]] = []
        known = {SUMMARIES: summaries, CACHE: lm, RANKS: ranks, FINGERPRINT: []}
        with end_together(ranks), _known_to(model, known):
            if ranks.is_first and any(hasattr(task, "evaluate_all") for task in tasks.values()):
                _check_output_path()
            for name, task in tasks.items():
                if getattr(task, "NEEDS_STATES", False) and not gives_states(lm):
                    raise _no_states(lm, str(name))
                if hasattr(task, "evaluate_all") and _is_tensor_parallel(_module(model)):
                    raise _tensor_parallel(str(name))
                # The windows of a corpus are made of the model's tokens, so such a task has its documents from here on.
                if hasattr(task, "cut_windows"):
                    task.cut_windows(lm)
            with _in_place(model, ranks, tasks.values()):
                results = evaluate(lm, task_dict, *args, **kwargs)
        ours = [task for task in tasks.values() if hasattr(task, "cut_windows")]
        if results is not None and (summaries or ours):
            results["harness_ext"] = {"version": __version__, "passes": summaries}
            # What our tasks have to say together; one of them speaks for all.
            speaker = next((task for task in tasks.values() if hasattr(task, "summarise_run")), None)
            if speaker is not None:
                results["harness_ext"] |= speaker.summarise_run(list(tasks.values()))
        return results

    return checked


@contextlib.contextmanager
def _known_to(model: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give a model attributes for a while."""
    for name, value in attributes.items():
        setattr(model, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(model, name)


# -------------------------------------------------------------------------------------------------- several processes


def _find_ranks(lm: Any) -> Ranks:
    """The processes that share the work of a model: those that accelerate has started, each with the whole model."""
    accelerator = getattr(lm, "accelerator", None)
    if accelerator is not None and accelerator.num_processes > 1:
        # lm_eval has the index on the node.
        return Ranks(accelerator.process_index, accelerator.num_processes, accelerator.device)
    if lm.world_size > 1 and are_several():
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device(lm.device))
    return ALONE


def _ranks(lm: Any) -> Ranks:
    return getattr(lm, RANKS, ALONE)


@contextlib.contextmanager
def _in_place(lm: Any, ranks: Ranks, tasks: Collection[Any]) -> Iterator[None]:
    """Let lm_eval know the rank of this process among all, which stays known, and let one of them show bars."""
    if ranks.is_alone:
        yield
        return
    lm._rank, lm._world_size = ranks.rank, ranks.size
    gathering = {"gather_object": functools.partial(_gather, lm.gather_object, lm)}
    bar = lm_eval_task.tqdm
    if not ranks.is_first:
        lm_eval_task.tqdm = functools.partial(bar, disable=True)
    module = _module(lm)
    try:
        if module is None or not _is_spread(module):
            with _known_to(lm, gathering):
                yield
            return
        lockstep = Lockstep(ranks, module, functools.partial(_dummy_pass, lm, module))
        with _known_to(lm, {LOCKSTEP: lockstep, **gathering}):
            evaluated = [task for task in tasks if hasattr(task, "evaluate_all")]
            for task in evaluated:
                # Rank 0 may call the model there, and the others have to.
                task.apply_filters = _in_lockstep(task.apply_filters, lockstep)
            try:
                yield
            finally:
                for task in evaluated:
                    del task.apply_filters
    finally:
        lm_eval_task.tqdm = bar


def _gather(gather_object: Any, lm: Any, value: Any, dst: int = 0) -> Any:
    """lm_eval's gathering of samples and metrics by task, where a rank may have no document of a task.

    The receiving rank, which has all documents of our tasks, does not send its own to itself as a pickle.
    """
    found = gather_object(None if lm.rank == dst else value, dst=dst)
    if found is None:
        return None
    found[dst] = value
    for task, of_task in value.items():
        if isinstance(of_task, dict):
            for of_rank in found:
                for metric in of_task:
                    of_rank[task].setdefault(metric, [])
    return found


def _module(lm: Any) -> Any:
    """What to call to run a model; None for a model of another process."""
    wrapped = getattr(lm, "_model", None)
    if not isinstance(wrapped, torch.nn.Module):
        return None
    # The wrapper of fully sharded weights is what gathers them; lm_eval's property takes off all wrappers.
    return wrapped if _is_spread(wrapped) else lm.model


def _is_spread(module: torch.nn.Module) -> bool:
    """Whether the weights of a model are spread over processes (FSDP 1 and 2, ZeRO-3)."""
    if not are_several():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    of_fsdp = any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in module.modules())
    return of_fsdp or any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def _is_tensor_parallel(module: torch.nn.Module | None) -> bool:
    """Whether matrices are split over processes, each of which computes a part of every product."""
    if module is None or not are_several() or _is_spread(module):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _dummy_pass(lm: Any, module: torch.nn.Module) -> None:
    from harness_ext.engine.readout import inference

    with inference(lm.device, lm.mixed_precision_dtype):
        module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=lm.device), use_cache=False)


def _in_lockstep(function: Any, lockstep: Lockstep) -> Any:
    @functools.wraps(function)
    def work(*args: Any, **kwargs: Any) -> Any:
        with lockstep.work():
            return function(*args, **kwargs)

    return work


def _with_own_stderr(stderr_for_metric: Any) -> Any:
    """Let an aggregation bring its standard error as its method `stderr`; lm_eval has a fixed list of its own."""

    @functools.wraps(stderr_for_metric)
    def stderr(metric: Any, bootstrap_iters: int) -> Any:
        own = getattr(metric, "stderr", None)
        if own is None or bootstrap_iters <= 0:
            return stderr_for_metric(metric, bootstrap_iters)

        def of_items(items: Any) -> float | str:
            # lm_eval writes NaN bare, which is no JSON; "N/A" is what it says itself where there is no error.
            value = float(own(items))
            return "N/A" if math.isnan(value) else value

        return of_items

    return stderr


_newest_tracker: Callable[[], Any] = lambda: None  # noqa: E731
"""What will save the results of the run that starts next, if that is known and still there."""


def _remembered(init: Any) -> Any:
    """Wrap the tracker's `__init__`: the newest one is known before its run starts."""

    @functools.wraps(init)
    def remembered(self: Any, *args: Any, **kwargs: Any) -> None:
        global _newest_tracker
        init(self, *args, **kwargs)
        _newest_tracker = weakref.ref(self)

    return remembered


def _check_output_path() -> None:
    """Raise before hours of work where the results could not be saved for sure."""
    output = getattr(_newest_tracker(), "output_path", None)
    if output:
        path = Path(output)
        require_place(path.parent if path.suffix == ".json" else path, "--output_path", is_folder=True)


def _checked_results(save: Any) -> Any:
    """Wrap the tracker's `save_results_aggregated`: an error, after the table, where our results are not in their file."""

    @functools.wraps(save)
    def checked(self: Any, results: dict[str, Any], samples: dict[str, Any] | None = None) -> None:
        before = getattr(self, "date_id", None)
        save(self, results=results, samples=samples)
        self._has_harness_ext = "harness_ext" in results
        if not self.output_path or not self._has_harness_ext:
            return
        # Without a new date nothing was written; a full disk leaves the beginning of a file.
        found = _saved_files(self, "*DATE.json") if getattr(self, "date_id", None) != before else []
        if not any(_is_json(path) for path in found):
            print(make_table(results))
            raise _not_saved(self, "the results")

    return checked


def _checked_samples(save: Any) -> Any:
    """Wrap the tracker's `save_results_samples`: an error where the samples of a run with our tasks are not in their file."""

    @functools.wraps(save)
    def checked(self: Any, task_name: str, samples: Any) -> None:
        save(self, task_name=task_name, samples=samples)
        if not self.output_path or not getattr(self, "_has_harness_ext", False):
            return
        found = _saved_files(self, f"samples_{glob.escape(task_name)}_DATE.jsonl")
        if not any(_count_lines(path) >= len(samples) for path in found):
            raise _not_saved(self, f"the samples of {task_name}")

    return checked


def _saved_files(tracker: Any, pattern: str) -> list[Path]:
    """Files of the tracker's last save, by a pattern in which DATE is its date."""
    path = Path(tracker.output_path)
    return list((path.parent if path.suffix == ".json" else path).rglob(pattern.replace("DATE", tracker.date_id)))


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(line.endswith(b"\n") for line in file)
    except OSError:
        return 0


def _not_saved(tracker: Any, what: str) -> OSError:
    return OSError(
        f"--output_path {tracker.output_path}: {what} could not be saved completely. Give a folder that can be written to, on "
        "a disk that has space. The second run takes the model's states from the store."
    )
