"""Variance and cost of estimators of tr H on a fixed batch: what one probe leaves, and what 1 % relative standard error takes.

    python benchmarks/flatness_hessian.py
    python benchmarks/flatness_hessian.py --model FOLDER --text FILE.jsonl --blocks 8 --probes 8

Without `--model`, a GPT-2 with 2 layers, d = 64 and V = 200 is trained on sentences of a hidden Markov chain, and the batch
is 16 blocks of 16 tokens. The estimators:

- `held`: `hessian_probes`, a direction for each block, inputs of weights held (harness_ext/flatness/hessian.py);
- `plain`: the same differences of the loss with the weights themselves moved, a direction for each block;
- `gaussian`: double backward with one Gaussian direction for the batch, as in the code of Liu et al. (ICML 2023);
- `signs`: the same with random signs;
- `pyhessian`, `curvlinops`: those packages (pyhessian, curvlinops-for-pytorch), if they are installed, on the batch as one;
  they need the unfused attention that is switched on for them.

One fb is a forward and backward pass of the batch, block by block, or as one for the packages. It is measured here, and
everything is in multiples of it, in CPU seconds, with the forward passes at θ of `held` and `plain` shared by the probes of a
block. `passes` counts a forward as 1/3 fb, a double backward as 2 fb (what is beside forwards in `held`, the products with
the sign matrices, is not in it).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn

from harness_ext.flatness.exact import second_derivatives
from harness_ext.flatness.hessian import choose_step, hessian_probes
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters
from harness_ext.flatness.signs import generator_of, random_signs
from harness_ext.flatness.weights import Weights

ESTIMATORS = ["held", "plain", "gaussian", "signs", "pyhessian", "curvlinops"]
STATES, WORDS, TOKENS = 20, 200, 16


class Logits(nn.Module):
    """A model that gives its logits, (tokens, V), as the packages want them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)


def sample(count: int, generator: torch.Generator) -> torch.Tensor:
    """Sentences of a hidden Markov chain, int64 of shape (count, TOKENS + 1)."""
    fixed = torch.Generator().manual_seed(5)
    transitions = (2 * torch.randn(STATES, STATES, generator=fixed)).softmax(-1)
    emissions = (2 * torch.randn(STATES, WORDS, generator=fixed)).softmax(-1)
    state, words = torch.randint(0, STATES, (count,), generator=generator), []
    for _ in range(TOKENS + 1):
        words.append(torch.multinomial(emissions[state], 1, generator=generator)[:, 0])
        state = torch.multinomial(transitions[state], 1, generator=generator)[:, 0]
    return torch.stack(words, 1)


def train(steps: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model, generator = transformers.GPT2LMHeadModel(config), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        words = sample(64, generator)
        loss = nn.functional.cross_entropy(model(input_ids=words[:, :-1]).logits.mT, words[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def read(folder: str, text: Path, count: int) -> list[Blocks]:
    """The first `count` texts of a JSON-lines file as blocks of their own lengths."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with text.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(count), lines, strict=False)]
    ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    return [Blocks(x[:, :-1], x[:, 1:], (i,)) for i, x in enumerate(ids)]


def seconds(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal language model; by default one is trained")
    parser.add_argument("--text", type=Path, help="JSON lines with a field `text`, for --model")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--probes", type=int, default=50, help="probes of each block and estimator")
    parser.add_argument("--train-steps", type=int, default=1500)
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS)
    arguments = parser.parse_args()
    if arguments.model:
        if arguments.text is None:
            parser.error("--model needs --text FILE.jsonl")
        model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model)
        blocks = read(arguments.model, arguments.text, arguments.blocks)
    else:
        model = train(arguments.train_steps)
        words = sample(arguments.blocks, torch.Generator().manual_seed(99))
        blocks = [Blocks(row[None, :-1], row[None, 1:], (i,)) for i, row in enumerate(words)]
    weights = np.array([block.tokens.numel() for block in blocks], dtype=float)
    weights /= weights.sum()
    parameters = select_parameters(model)
    loss = PretrainingLoss(model, device=torch.device("cpu"))
    probes = range(arguments.probes)

    with prepared(model, parameters):
        step = choose_step(loss, parameters, blocks[0], seed=0)
        print(step)

        def held(block: Blocks) -> list[float]:
            found = hessian_probes(loss, parameters, block, seed=0, probes=probes, step=step.step)
            return [probe.hessian for probe in found]

        def plain(block: Blocks) -> list[float]:
            losses, values = loss.token_losses(block).double(), []
            for probe in probes:
                total = -2 * losses
                with Weights(parameters) as moved:
                    for sign in (1.0, -1.0):
                        generator = generator_of(1, block.numbers[0], f"{probe}")
                        moved.perturb(lambda name, weight, g=generator: random_signs(weight.shape, g), sign * step.step)
                        total = total + loss.token_losses(block)
                values.append(float(total.mean()) / step.step**2)
            return values

        def double_backward(probe: int, gaussian: bool) -> float:
            generator, total = generator_of(2, probe, "double"), 0.0
            v = [
                torch.randn(p.shape, generator=generator) if gaussian else random_signs(p.shape, generator)
                for p in parameters.values()
            ]
            for weight, block in zip(weights, blocks, strict=True):
                slopes = torch.autograd.grad(loss.mean_loss(block), list(parameters.values()), create_graph=True)
                products = torch.autograd.grad(slopes, list(parameters.values()), grad_outputs=v)
                total += weight * float(sum((h * s).sum() for h, s in zip(products, v, strict=True)))
            return total

        def of_package(name: str) -> tuple[list[float], float]:
            """Values of a package's probes, and the CPU seconds of its fb."""
            inputs, targets = (torch.cat(parts) for parts in zip(*[(b.tokens, b.targets) for b in blocks], strict=True))
            targets = targets.flatten()
            network, criterion = Logits(model), nn.CrossEntropyLoss()

            def whole() -> None:
                torch.autograd.grad(criterion(network(inputs), targets), list(parameters.values()))

            whole()
            of_one = min(seconds(whole) for _ in range(3))
            if name == "pyhessian":
                from pyhessian import hessian

                # It stops by itself when its running mean changes little; a tolerance of 0 keeps it going.
                return hessian(network, criterion, data=(inputs, targets), cuda=False).trace(len(probes), tol=0), of_one
            from curvlinops import HessianLinearOperator

            weights_of = [p for p in network.parameters() if p.requires_grad]
            operator = HessianLinearOperator(
                network, criterion, weights_of, [(inputs, targets)], check_deterministic=False, progressbar=False
            )
            found = []
            for probe in probes:
                signs = [random_signs(p.shape, generator_of(3, probe, str(i))) for i, p in enumerate(weights_of)]
                products = operator @ signs
                found.append(float(sum((h * v).sum() for h, v in zip(products, signs, strict=True))))
            return found, of_one

        def backward() -> None:
            for block in blocks:
                torch.autograd.grad(loss.mean_loss(block), list(parameters.values()))

        backward()
        unit = min(seconds(backward) for _ in range(3))
        print(f"one fb: {unit:.3f} CPU seconds; peak so far {peak():.2f} GB")
        print(
            f"{'estimator':10s} {'tr H':>9s} {'± ':>7s} {'var/tr²':>9s} {'passes':>7s} {'to 1 %':>8s} {'CPU fb':>7s} {'to 1 %':>8s}"  # noqa: E501
        )
        for name in arguments.estimators:
            of_name = unit
            started = time.process_time()
            if name in ("pyhessian", "curvlinops"):
                if importlib.util.find_spec(name) is None:
                    print(f"{name:10s} is not installed")
                    continue
                with second_derivatives(model):
                    found, of_name = of_package(name)
                values, passes = np.array(found), 2.0
            elif name in ("held", "plain"):
                values = weights @ np.array([(held if name == "held" else plain)(block) for block in blocks])
                passes = 2 / 3
            else:
                with second_derivatives(model):
                    values = np.array([double_backward(probe, name == "gaussian") for probe in probes])
                passes = 2.0
            cost = (time.process_time() - started) / len(probes) / of_name
            variance = values.var(ddof=1) / values.mean() ** 2
            print(
                f"{name:10s} {values.mean():9.2f} {values.std(ddof=1) / len(values) ** 0.5:7.2f} {variance:9.5f} {passes:7.2f} "
                f"{variance * passes * 1e4:8.0f} {cost:7.2f} {variance * cost * 1e4:8.0f}   peak {peak():.2f} GB",
                flush=True,
            )


def peak() -> float:
    """Peak resident memory in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
