"""Peak memory of a whole lm_eval run of probes on many documents, beyond that of the loaded model.

    python benchmarks/many_documents.py [--documents 120000] [--dim 768] [--vocabulary 50257] [--batch_size auto]
        [--kinds probe probe_cmean]

120,000 training documents of a few made-up words, four classes, under a GPT-2 of one block with 768 dimensions and a
vocabulary of 50,257, random but for its size; the classes prefer different words, so that the probes have something to find.

Most of the time goes into the vocabulary, most of the memory into the documents: `--dim 48 --vocabulary 2000` shows in a minute
what a document takes beside its vectors.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

DATASET = "fancyzhx/ag_news"


class Peak(threading.Thread):
    """Largest resident size, in GiB, sampled every 10 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.value = self.now()

    @staticmethod
    def now() -> float:
        """Resident size of this process."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**30

    def run(self) -> None:
        while True:
            self.value = max(self.value, self.now())
            time.sleep(0.01)


def write_documents(mirror: Path, count: int, vocabulary: int) -> None:
    """A mirror of AG News with made-up documents."""
    folder = mirror / DATASET
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, size in (("train", count), ("test", 400)):
        labels = np.arange(size) % 4
        # A third of the words come from a quarter of the vocabulary that the class prefers.
        words = rng.integers(1, vocabulary, (size, 4))
        preferred = 1 + labels[:, None] * (vocabulary // 4) + rng.integers(0, vocabulary // 4 - 1, words.shape)
        words = np.where(rng.random(words.shape) < 1 / 3, preferred, words)
        rows = (
            json.dumps({"text": " ".join(f"w{word}" for word in of_row), "label": int(label)})
            for of_row, label in zip(words, labels, strict=True)
        )
        (folder / f"{split}.jsonl").write_text("\n".join(rows))


def model_and_tokenizer(dim: int, vocabulary: int) -> tuple[Any, Any]:
    """A random GPT-2 of one block, and a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0} | {f"w{i}": i for i in range(1, vocabulary)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocabulary, n_embd=dim, n_layer=1, n_head=12, bos_token_id=0, eos_token_id=0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", bos_token="<eos>")
    return GPT2LMHeadModel(config).eval(), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=120_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument(
        "--batch_size", default="auto", help="as lm_eval's: rows of a forward pass, whose activations count too"
    )
    parser.add_argument("--kinds", nargs="+", default=["probe", "probe_cmean"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HARNESS_EXT_DATA"] = folder
        os.environ["HARNESS_EXT_CACHE"] = str(Path(folder) / "cache")
        write_documents(Path(folder), args.documents, args.vocabulary)
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from harness_ext import resources

        model, tokenizer = model_and_tokenizer(args.dim, args.vocabulary)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch_size, device="cpu")
        manager = TaskManager(include_path=str(resources.task_configs_folder()), include_defaults=False)
        before, peak, started = Peak.now(), Peak(), time.perf_counter()
        peak.start()
        results = evaluator.simple_evaluate(
            lm,
            tasks=[f"{kind}_agnews" for kind in args.kinds],
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
        assert results is not None
        beyond = peak.value - before
        for name, values in results["results"].items():
            print(name, round(values["acc,none"], 4))
        print(
            f"{args.documents:,} documents x {args.dim}: {time.perf_counter() - started:.0f} s, peak {peak.value:.2f} GiB, "
            f"{beyond:.2f} GiB ({beyond * 2**30 / 1e9:.2f} GB) beyond the loaded model ({before:.2f} GiB)"
        )


if __name__ == "__main__":
    main()
