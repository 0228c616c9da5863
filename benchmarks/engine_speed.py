"""Time of the engine against lm_eval's own scoring and against a bare loop over the same tokens, runs alternating.

    HARNESS_EXT_DATA=DIR python benchmarks/engine_speed.py --model FOLDER --dtype bfloat16 --batch_size 64
    HARNESS_EXT_DATA=DIR python benchmarks/engine_speed.py --model FOLDER --prompts sst/it_was sst/this_movie_is …

Three ways to score the documents of `natural_sst` under its default prompt or under those of a sweep, in one process, one
after the other in every round, the order turned from round to round:

engine     `lm.prompt_states`, with the readout of all label words and without the store
lm_eval    `lm.loglikelihood` on the requests of one ordinary multiple_choice task a prompt, with its text and the first word
           of each class, all in one call as lm_eval does
bare       the body alone on each distinct token sequence in batches of equal length, so without padding, head or readout
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from typing import Any

import torch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--task", default="natural_sst")
    parser.add_argument("--prompts", nargs="+", help="ids or patterns (default: the task's prompt)")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-bare", action="store_true", help="leave the bare loop out, which takes as long")
    return parser.parse_args()


def load_tasks(name: str, prompt: list[str] | None, limit: int | None) -> tuple[Any, list[Any]]:
    """Our task, and a stock multiple_choice task a prompt with the same documents, text and words; requests built."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    from harness_ext import prompts, resources

    metadata = {} if prompt is None else {"prompt": prompt}
    manager = TaskManager(include_path=str(resources.task_configs_folder()), include_defaults=False, metadata=metadata)
    ours = manager.load([name])["tasks"][name]

    class Stock(ConfigurableTask):
        def download(self, *args: Any, **kwargs: Any) -> None:
            self.dataset = {ours.eval_split: ours.dataset[ours.eval_split]}

    stock = [
        Stock(
            config={
                "task": f"stock_{number}",
                "dataset_path": ours.config.dataset_path,
                "test_split": ours.eval_split,
                "doc_to_text": template.source,
                "doc_to_target": ours.label_column,
                "doc_to_choice": [words[0] for words in prompts.words_by_class(template, ours.classes)],
                "output_type": "multiple_choice",
                "num_fewshot": 0,
            }
        )
        for number, template in enumerate(ours.templates)
    ]
    for task in (ours, *stock):
        task.set_fewshot_seed(0)
        task.build_all_requests(limit=limit)
    return ours, stock


def bare_loop(model: Any, sequences: list[tuple[int, ...]], batch_size: int) -> int:
    """Forward the body; return the number of tokens."""
    sequences = sorted(sequences, key=len, reverse=True)
    tokens, start = 0, 0
    with torch.inference_mode():
        while start < len(sequences):
            end = start + 1
            while end < min(start + batch_size, len(sequences)) and len(sequences[end]) == len(sequences[start]):
                end += 1
            batch = torch.tensor(sequences[start:end])
            model.base_model(input_ids=batch, use_cache=False)
            tokens += batch.numel()
            start = end
    return tokens


def main() -> None:
    args = parse()
    os.environ["HARNESS_EXT_CACHE"] = "off"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from lm_eval.models.huggingface import HFLM

    from harness_ext.contracts import PromptRequest
    from harness_ext.engine.tokens import PromptEncoder

    lm = HFLM(pretrained=args.model, dtype=args.dtype, batch_size=args.batch_size, device="cpu")
    ours, stock = load_tasks(args.task, args.prompts, args.limit)
    encoder = PromptEncoder(
        lm.tokenizer,
        max_length=lm.max_length,
        add_special_tokens=lm.add_bos_token,
        prefix_token_id=lm.prefix_token_id,
    )
    encoded = encoder.encode_requests(
        [request.args[0] for request in ours.instances],
        [PromptRequest.from_argument(request.args[1]) for request in ours.instances],
    )
    sequences = list({prompt.context for prompt in encoded})

    asked_of_lm_eval = [instance for task in stock for instance in task.instances]
    ways = {
        "engine": lambda: lm.prompt_states(ours.instances),
        "lm_eval": lambda: lm.loglikelihood(asked_of_lm_eval, disable_tqdm=True),
        "bare": lambda: bare_loop(lm.model, sequences, args.batch_size),
    }
    if args.without_bare:
        del ways["bare"]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    bare_loop(lm.model, sequences[:64], args.batch_size)  # warm-up
    tokens = sum(map(len, sequences))
    print(
        f"{args.task}: {len(stock[0].instances) // len(ours.classes)} documents under {len(stock)} prompts, "
        f"{len(asked_of_lm_eval)} requests of lm_eval; {len(sequences)} distinct prompts, "
        f"{tokens} tokens; {args.dtype}, batch size {args.batch_size}, {torch.get_num_threads()} threads"
    )
    names = list(ways)
    for number in range(args.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            started = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - started)
        print("  ".join(f"{name} {seconds[name][-1]:.2f} s" for name in ways), flush=True)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        "median:  "
        + "  ".join(f"{name} {value:.2f} s ({tokens / value:,.0f} tokens/s)" for name, value in median.items())
    )
    for other, label in (("lm_eval", "lm_eval / engine"), ("bare", "engine / bare")):
        if other not in ways:
            continue
        pairs = zip(seconds["engine"], seconds[other], strict=True)
        ratios = [theirs / own if other == "lm_eval" else own / theirs for own, theirs in pairs]
        print(
            f"{label}: median of rounds {statistics.median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f})"
        )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
