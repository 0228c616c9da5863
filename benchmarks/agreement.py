"""Agreement with lm_eval's own multiple_choice scores, and invariance of ours to the batch size, both in float32.

    HARNESS_EXT_DATA=DIR python benchmarks/agreement.py --model FOLDER [--documents 300]

The real model is one family; the others are random models of some size with the same tokenizer, whose scores are as hard to
get right. Words of one and of several tokens are compared document by document.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import torch
import transformers

WORDS = ["terrible", "great", "unbelievably boring", "a masterpiece", "so-so", "Kafkaesque"]
BATCH_SIZES = (1, 7, 64)


def models(folder: str) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    vocabulary = len(tokenizer)
    torch.manual_seed(0)
    random = {
        "gpt2 (random)": transformers.GPT2Config(vocab_size=vocabulary, n_embd=192, n_layer=4, n_head=6),
        "neox (random)": transformers.GPTNeoXConfig(
            vocab_size=vocabulary, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6
        ),
    }
    result = {"llama (real)": folder}
    for name, config in random.items():
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)  # the usual initialisation gives nearly uniform scores
        result[name] = model
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", type=int, default=300)
    args = parser.parse_args()
    os.environ["HARNESS_EXT_CACHE"] = "off"
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from harness_ext.contracts import PromptRequest
    from harness_ext.engine.attach import REQUEST_TYPE, attach
    from harness_ext.tasks.data import open_dataset

    attach()
    rows = open_dataset("SetFit/sst2", None)["test"]
    prompts = [f"{text} This movie is" for text in rows["text"][: args.documents]]
    request = PromptRequest(tuple(f" {word}" for word in WORDS)).to_argument()

    for name, pretrained in models(args.model).items():
        scores = {}
        for batch_size in BATCH_SIZES:
            lm = HFLM(pretrained=pretrained, tokenizer=args.model, dtype="float32", batch_size=batch_size, device="cpu")
            ours = [Instance(REQUEST_TYPE, {}, (prompt, request), 0, ("t", i, 1)) for i, prompt in enumerate(prompts)]
            scores[batch_size] = np.array([answer.log_probs for answer in lm.prompt_states(ours)])
        stock = [
            Instance("loglikelihood", {}, (prompt, f" {word}"), 0, ("t", i, 1))
            for i, prompt in enumerate(prompts)
            for word in WORDS
        ]
        reference = np.array([score for score, _ in lm.loglikelihood(stock)]).reshape(len(prompts), -1)
        lengths = [len(lm.tok_encode(prompts[0] + f" {word}")) - len(lm.tok_encode(prompts[0])) for word in WORDS]
        against = np.abs(scores[64] - reference).max(axis=0)
        between = max(np.abs(scores[size] - scores[1]).max() for size in BATCH_SIZES)
        moved = max(int((scores[size][:, :2].argmax(1) != scores[1][:, :2].argmax(1)).sum()) for size in BATCH_SIZES)
        print(f"{name}: {len(prompts)} documents")
        for word, length, difference in zip(WORDS, lengths, against, strict=True):
            print(f"  {word!r}, {length} tokens: largest difference from lm_eval {difference:.1e}")
        print(
            f"  batch sizes {BATCH_SIZES}: largest difference {between:.1e}, predictions that differ {moved}",
            flush=True,
        )


if __name__ == "__main__":
    main()
