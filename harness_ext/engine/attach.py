"""Gives lm_eval's models the request type `prompt_states`, and checks models before a run starts.

lm_eval hands all requests of one type to `getattr(lm, request_type)` in one call. `attach` adds that method to lm_eval's
base class LM, when our tasks are imported; a model that exists by then has it too. Transformers models (`--model hf` and
its relatives) answer with the engine. Any other model answers label words by its own `loglikelihood`, one request a word,
and has no states: `attach` also wraps `lm_eval.evaluator.evaluate`, which is where the model and the tasks are first known
together, so that a task that needs states stops there, before any model work. The wrapper adds what the engine did, and what
our tasks have to say together, to the results as `results["harness_ext"]`. Last, lm_eval gives a standard error to a fixed
list of aggregations only; `attach` lets an aggregation bring its own.

The other place that patches lm_eval is `harness_ext.plugin`.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

from lm_eval import evaluator, evaluator_utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CachingLM

from harness_ext import __version__
from harness_ext.contracts import PromptRequest, PromptStates, WindowAnswer, WindowRequest

__all__ = ["FLATNESS_REQUEST_TYPE", "LOSS_REQUEST_TYPE", "REQUEST_TYPE", "attach", "gives_states"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

REQUEST_TYPE = "prompt_states"
LOSS_REQUEST_TYPE = "window_losses"
FLATNESS_REQUEST_TYPE = "window_flatness"

SUMMARIES = "_harness_ext_summaries"
"""Attribute of a model: what the engine did for it in the current run."""

CACHE = "_harness_ext_cache"
"""Attribute of a model: lm_eval's wrapper that remembers its responses (--use_cache), or the model itself."""

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
    setattr(LM, REQUEST_TYPE, prompt_states)
    setattr(LM, LOSS_REQUEST_TYPE, window_losses)
    setattr(LM, FLATNESS_REQUEST_TYPE, window_flatness)
    evaluator.evaluate = _checked(evaluator.evaluate)
    evaluator_utils.stderr_for_metric = _with_own_stderr(evaluator_utils.stderr_for_metric)


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
    nats = window_nats(
        [(window.tokens, window.targets) for window in asked],
        model=_last_state_model(model),
        max_rows=max_rows,
        max_tokens=max_tokens,
        progress=model.rank == 0,
    )
    return [
        WindowAnswer({"loss": of_window / len(window.targets)}) for of_window, window in zip(nats, asked, strict=True)
    ]


def window_flatness(lm: Any, requests: Sequence[Instance]) -> list[WindowAnswer]:
    """Answer requests of arguments (text, `WindowRequest.to_argument()`); becomes a method of lm_eval's LM.

    The windows of a task are one run, in the order of the requests.
    """
    from harness_ext.flatness.options import FlatnessOptions
    from harness_ext.flatness.run import Block, measure

    model = lm.lm if isinstance(lm, CachingLM) else lm
    asked = [WindowRequest.from_argument(request.args[1]) for request in requests]
    of_tasks: dict[str, list[WindowRequest]] = {}
    for request, window in zip(requests, asked, strict=True):
        of_tasks.setdefault(str(request.task_name), []).append(window)
    runs = {}
    for task, windows in of_tasks.items():
        options: dict[str, Any] = dict(windows[0].options or {})
        options |= {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
        # Ranks are padded with a window that was asked for already.
        blocks = {window.number: Block(window.tokens, window.targets, window.number) for window in windows}
        runs[task] = measure(
            model.model,
            list(blocks.values()),
            FlatnessOptions(**options),
            device=model.device,
            max_tokens=BACKWARD_TOKENS,
            progress=model.rank == 0,
        )
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

    return LastStateModel(lm.model, device=lm.device, autocast_dtype=lm.mixed_precision_dtype)


def _answer_with_engine(
    lm: Any, instances: Sequence[Instance], contexts: list[str], asked: list[PromptRequest]
) -> list[PromptStates]:
    from harness_ext.engine.answer import answer_requests
    from harness_ext.engine.fingerprint import model_fingerprint
    from harness_ext.engine.store import FeatureStore, cache_root
    from harness_ext.engine.tokens import PromptEncoder

    root = cache_root()
    fingerprint = None if root is None else model_fingerprint(lm.model, autocast_dtype=lm.mixed_precision_dtype)
    store = None
    if root is not None and fingerprint is not None:
        name = lm.pretrained if isinstance(lm.pretrained, str) else type(lm.model).__name__
        dtype = str(next(lm.model.parameters()).dtype).removeprefix("torch.")
        store = FeatureStore(root, fingerprint, description=f"{name} ({dtype})")

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
        ),
        store=store,
        max_rows=max_rows,
        max_tokens=max_tokens,
        batch_cost=CPU_BATCH_COST if lm.device.type == "cpu" else GPU_BATCH_COST,
        # A task's first request of a document is the document; further ones, such as the bare template, are its context.
        documents=[int(instance.idx == 0) for instance in instances],
        progress=lm.rank == 0,
    )
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
    instances = [
        Instance("loglikelihood", doc={}, arguments=pair, idx=i, metadata=("harness_ext", i, 1))
        for i, pair in enumerate(pairs)
    ]
    answers = getattr(lm, CACHE, lm).loglikelihood(instances)
    scores = {pair: float(score) for pair, (score, _) in zip(pairs, answers, strict=True)}
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


def _checked(evaluate: Any) -> Any:
    """Wrap lm_eval's `evaluate`: check first, and say afterwards what the engine did."""

    @functools.wraps(evaluate)
    def checked(lm: Any, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
        tasks = task_dict.get("tasks", task_dict)
        for name, task in tasks.items():
            if getattr(task, "NEEDS_STATES", False) and not gives_states(lm):
                raise _no_states(lm, str(name))
            # The windows of a corpus are made of the model's tokens, so such a task has its documents from here on.
            if hasattr(task, "cut_windows"):
                task.cut_windows(lm)
        model = lm.lm if isinstance(lm, CachingLM) else lm
        summaries: list[dict[str, Any]] = []
        setattr(model, SUMMARIES, summaries)
        setattr(model, CACHE, lm)
        try:
            results = evaluate(lm, task_dict, *args, **kwargs)
        finally:
            delattr(model, SUMMARIES)
            delattr(model, CACHE)
        ours = [task for task in tasks.values() if hasattr(task, "cut_windows")]
        if results is not None and (summaries or ours):
            results["harness_ext"] = {"version": __version__, "passes": summaries}
            # What our tasks have to say together; one of them speaks for all.
            speaker = next((task for task in tasks.values() if hasattr(task, "summarise_run")), None)
            if speaker is not None:
                results["harness_ext"] |= speaker.summarise_run(list(tasks.values()))
        return results

    return checked


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
