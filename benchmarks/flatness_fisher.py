"""Measure what `fisher_traces` costs until the mean over a fixed batch has a relative standard error of 1 %.

    python benchmarks/flatness_fisher.py
    python benchmarks/flatness_fisher.py --model FOLDER --corpus FILE.jsonl

Without a model: a GPT-2 of 2 layers, d = 64, V = 200, trained for a moment on a Markov chain, 16 blocks of 16 tokens. With one:
8 blocks of 27 tokens, each the beginning of one line of the corpus (JSON lines with a `text`), in float32.

One fb is a forward and backward pass of the mean loss of the same batch. Times are CPU time of the process, medians of runs
that alternate. For each number of draws in one call: the relative variance over seeds of the batch's mean, and what the call
costs. Draws to 1 % are scaled from the row nearest to 1 %, since the variance falls as the number of draws there; several
draws share a forward pass and a control variate. Blocks are fixed: the error over blocks is no part of this.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

from harness_ext.flatness.fisher import fisher_traces
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters


def blocks_of(sequences: torch.Tensor) -> Blocks:
    return Blocks(sequences[:, :-1], sequences[:, 1:], tuple(range(len(sequences))))


def small_model() -> tuple[torch.nn.Module, Blocks]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    transition = torch.softmax(2.5 * torch.randn(200, 200, generator=generator), -1)
    data = torch.randint(0, 200, (2016, 1), generator=generator)
    for _ in range(16):
        data = torch.cat([data, torch.multinomial(transition[data[:, -1]], 1, generator=generator)], 1)
    config = transformers.GPT2Config(
        vocab_size=200, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        batch = data[torch.randint(0, 2000, (64,), generator=generator)]
        loss = cross_entropy(model(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), blocks_of(data[2000:])


def real_model(folder: Path, corpus: Path) -> tuple[torch.nn.Module, Blocks]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    lines = [tokens for text in texts[:500] if len(tokens := tokenizer(text)["input_ids"]) >= 28]
    return model.eval(), blocks_of(torch.tensor([tokens[:28] for tokens in lines[:8]]))


def seconds(functions: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median CPU seconds of each, in alternation."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(runs):
        for name, function in functions.items():
            started = time.process_time()
            function()
            taken[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal LM")
    parser.add_argument("--corpus", type=Path, help="JSON lines with a `text`; needed with --model")
    parser.add_argument("--draws", type=int, nargs="+", help="numbers of draws to try, in order")
    parser.add_argument("--repeats", type=int, help="seeds for each variance")
    parser.add_argument("--runs", type=int, help="timed runs")
    parser.add_argument("--labels", choices=("signs", "sampled"), default="signs")
    parser.add_argument("--scaled", action=argparse.BooleanOptionalAction, default=False)
    args = parser.parse_args()
    if args.model and not args.corpus:
        parser.error("--model needs --corpus FILE.jsonl")
    model, blocks = real_model(args.model, args.corpus) if args.model else small_model()
    tries = args.draws or ([1, 8, 16] if args.model else [1, 2, 3, 4, 6])
    repeats, runs = args.repeats or (6 if args.model else 200), args.runs or (3 if args.model else 30)
    parameters = select_parameters(model)
    loss = PretrainingLoss(model, device=torch.device("cpu"))

    def plain() -> None:
        logits = model(input_ids=blocks.tokens, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1).float(), blocks.targets.flatten()).backward()
        for parameter in parameters.values():
            parameter.grad = None

    def estimate(draws: int, seed: int) -> float:
        result = fisher_traces(loss, parameters, blocks, seed=seed, draws=draws, labels=args.labels, scaled=args.scaled)
        values = result.scaled_traces if args.scaled else result.traces
        return float(np.mean(values))

    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'draws':>5} {'trace':>10} {'rel. variance':>14} {'rel. s.d.':>9} {'fb':>6}")
    with prepared(model, parameters):
        estimate(1, 0)  # The first batch of a model is also run in part.
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows: list[tuple[int, float, float]] = []
        for draws in tries:
            values = np.array([estimate(draws, seed) for seed in range(repeats)])
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            taken = seconds({"ours": lambda draws=draws: estimate(draws, 0), "fb": plain}, runs)
            variance = float(values.var(ddof=1) / values.mean() ** 2)
            rows.append((draws, variance, taken["ours"] / taken["fb"]))
            print(
                f"{draws:>5} {values.mean():>10.4g} {variance:>14.3g} {variance**0.5:>9.2%} {rows[-1][2]:>6.2f}",
                flush=True,
            )
            if len(rows) == 1:
                before = memory
    draws, variance, _ = min(rows, key=lambda row: abs(np.log(row[1] / 1e-4)))
    needed = draws * variance / 1e-4
    cost = np.polyfit([row[0] for row in rows], [row[2] for row in rows], 1)
    print(f"one draw: relative variance {rows[0][1]:.3g}; draws to 1 %: {needed:.1f}")
    print(
        f"fb to 1 %: {np.polyval(cost, max(1.0, needed)):.1f} (cost of a call: {cost[1]:.2f} + {cost[0]:.2f} per draw)"
    )
    print(
        f"peak RSS in GiB: {loaded:.2f} model loaded, {before:.2f} one draw a call; {memory:.2f} with ordinary passes"
    )


if __name__ == "__main__":
    main()
