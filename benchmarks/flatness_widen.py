"""Traces of a small GPT-2 and of its embedding in one twice as wide, against what the algebra predicts.

    python benchmarks/flatness_widen.py [--model FOLDER] [--blocks 64]

Both models are measured on the same blocks, as `flatness_*` tasks do; the prediction is
`harness_ext.flatness.widen.predict_traces` of the small model's traces by parameter. Without --model a two-layer GPT-2
(d = 64) is trained for a minute on the demo's language.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from harness_ext.flatness.excess import hessian_excess
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters
from harness_ext.flatness.options import FlatnessOptions
from harness_ext.flatness.run import Block, measure
from harness_ext.flatness.widen import predict_traces, widen

LENGTH = 32
CPU = torch.device("cpu")


def trained_model(steps: int) -> tuple[Any, np.ndarray]:
    """A two-layer GPT-2, and text of its language as token ids."""
    from harness_ext.lab.languages import reviews
    from harness_ext.lab.model import ModelConfig, build_model
    from harness_ext.lab.train import TrainConfig, encode, pack, train

    grammar = reviews.default_grammar()
    config = ModelConfig()
    tokenizer = reviews.build_tokenizer(grammar, max_length=config.context)
    rng = np.random.default_rng(0)
    documents = [review.document for review in grammar.sample_many(steps * 40, rng)]
    blocks = pack(encode(documents, tokenizer), end_of_text=tokenizer.eos_token_id, block_size=config.context)
    model = build_model(config, tokenizer, seed=0)
    train(model, blocks, TrainConfig(steps=steps), seed=0)
    held_out = encode([review.document for review in grammar.sample_many(2000, rng)], tokenizer)
    return model.eval(), np.concatenate([np.array(ids) for ids in held_out])


def hessian_by_parameter(model: Any, blocks: list[Block], probes: int) -> dict[str, float]:
    """tr H of each parameter by v·(Hv) with random signs and exact products, averaged over blocks and probes."""
    from harness_ext.flatness.exact import hessian_vector_product, second_derivatives
    from harness_ext.flatness.signs import generator_of, random_signs

    parameters = select_parameters(model)
    totals = dict.fromkeys(parameters, 0.0)
    loss = PretrainingLoss(model, device=CPU)
    with prepared(model, parameters), second_derivatives(model):
        for block in blocks:
            batch = Blocks(torch.tensor([block.tokens]), torch.tensor([block.targets]), (block.number,))
            for probe in range(probes):
                generator = generator_of(0, block.number, f"benchmark {probe}")
                signs = {name: random_signs(p.shape, generator) for name, p in parameters.items()}
                for name, product in hessian_vector_product(loss, parameters, batch, signs).items():
                    totals[name] += float((product * signs[name]).sum()) / (len(blocks) * probes)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a GPT-2 or Llama; random tokens are its text")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--probes", type=int, default=8)
    options = parser.parse_args()
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        ids = np.random.default_rng(0).integers(model.config.vocab_size, size=options.blocks * LENGTH + 1)
    else:
        model, ids = trained_model(options.steps)
    large_config = copy.deepcopy(model.config)
    if isinstance(large_config, GPT2Config):
        large_config.n_embd, large_config.n_head = 2 * large_config.n_embd, 2 * large_config.n_head
    else:
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            setattr(large_config, name, 2 * getattr(large_config, name))
    wide = widen(model, large_config).eval()
    starts = range(0, options.blocks * LENGTH, LENGTH)
    blocks = [
        Block(ids[s : s + LENGTH].tolist(), ids[s + 1 : s + LENGTH + 1].tolist(), number)
        for number, s in enumerate(starts)
    ]
    tokens = torch.tensor([block.tokens for block in blocks[:8]])
    with torch.inference_mode():
        before, after = model(input_ids=tokens).logits, wide(input_ids=tokens).logits
    print(f"logits differ by {float((before - after).abs().max() / before.abs().max()):.1e} of the largest one")

    measured = {}
    for name, each in (("small", model), ("wide", wide)):
        asked = FlatnessOptions(
            quantities=("fisher_trace", "hessian_trace", "scaled"), max_blocks=len(blocks), probes=options.probes
        )
        measured[name] = measure(each, blocks, asked, device=CPU, max_tokens=1024, progress=False)
    estimates = {name: run.report["estimates"] for name, run in measured.items()}
    for name in ("fisher_trace", "fisher_trace_scaled"):
        rows = measured["small"].report["by_parameter"]
        predicted = predict_traces(
            model.config,
            large_config,
            {parameter: row[name] for parameter, row in rows.items()},
            kind="ggn",
            weighted=name.endswith("scaled"),
        )
        print_line(name, estimates, predicted)
    excess: dict[str, float] = {}
    for block in blocks:
        targets = torch.tensor([block.targets])

        def loss(logits: torch.Tensor, targets: torch.Tensor = targets) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        for name, value in hessian_excess(model, torch.tensor([block.tokens]), loss).items():
            excess[name] = excess.get(name, 0.0) + float(value.sum()) / len(blocks)
    of_parameters = hessian_by_parameter(model, blocks, options.probes)
    predicted = predict_traces(model.config, large_config, of_parameters, kind="hessian", excess=excess)
    print_line("hessian_trace", estimates, predicted)


def print_line(name: str, estimates: dict[str, Any], predicted: Any) -> None:
    small, wide = estimates["small"][name], estimates["wide"][name]
    missing = f", without {', '.join(predicted.missing)}" if predicted.missing else ""
    print(
        f"{name}: small {small['value']:.5g} ± {small['stderr']:.2g}, predicted for wide {predicted.total:.5g}{missing}, "
        f"measured {wide['value']:.5g} ± {wide['stderr']:.2g}, ratio {wide['value'] / predicted.total:.4f}"
    )


if __name__ == "__main__":
    main()
