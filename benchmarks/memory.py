"""Memory over the time of a whole lm_eval run on 100,000 documents: what grows, in which part of the run, and by how much.

    python benchmarks/memory.py [--documents 100000] [--kinds natural probe] [--store] [--csv FILE] [--svg FILE]

100,000 test and 4,000 training documents of a few made-up words under a small GPT-2 of one block, random but for its size. The
resident size of the process is sampled twenty times a second, with the part of the run that it is in:

    start      model, tasks and dataset are opened
    requests   prompts are rendered: lm_eval keeps one object a request, so memory grows with the documents
    forwards   from the first batch to the last; a run that holds steady memory grows here by what it has to keep, one vector a
               document and probe, one number a document and label word
    answers    one object a request, which lm_eval asks for
    results    fits, metrics and lm_eval's own tables

The table has the resident size at ten moments of each part; below it, growth in the forwards from one tenth of the batches on,
in bytes a document.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

DATASET = "fancyzhx/ag_news"
TRAINING_DOCUMENTS = 4000
CLASS_WORDS = ("foreign", "sports", "financial", "scientific")
PARTS = ("start", "requests", "forwards", "answers", "results")
COLOURS = ("#888888", "#3366cc", "#dc3912", "#ff9900", "#109618")


class Sample(NamedTuple):
    """Resident size of the process.

    Attributes:
        seconds: Since the start.
        bytes: Resident.
        part: Of the run, one of `PARTS`.
        batches: Forwarded so far.
    """

    seconds: float
    bytes: int
    part: str
    batches: int


class Sampler(threading.Thread):
    """Samples until `stop`; `part` and `batches` are set by the run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self.part = PARTS[0]
        self.batches = 0
        self._start_time = time.perf_counter()
        self._stopped = threading.Event()

    def sample(self) -> None:
        """Take one sample now."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        size = pages * os.sysconf("SC_PAGE_SIZE")
        self.samples.append(Sample(time.perf_counter() - self._start_time, size, self.part, self.batches))

    def enter(self, part: str) -> None:
        """The run is in another part from here on."""
        if self.part != part:
            self.sample()
            self.part = part
            self.sample()

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            self.sample()

    def stop(self) -> None:
        """Take the last sample."""
        self._stopped.set()
        self.join()
        self.sample()


def write_documents(mirror: Path, count: int, vocabulary: Sequence[str]) -> None:
    """A mirror of AG News with distinct made-up documents of four classes."""
    folder = mirror / DATASET
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, size in (("train", TRAINING_DOCUMENTS), ("test", count)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for number, words in enumerate(rng.integers(0, len(vocabulary), (size, 6))):
                text = " ".join(vocabulary[word] for word in words)
                file.write(json.dumps({"text": text, "label": number % 4}) + "\n")


def model_and_tokenizer(dim: int, words: Sequence[str]) -> tuple[Any, Any]:
    """A random GPT-2 of one block, and a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate(["<eos>", *CLASS_WORDS, *words])}
    of_words = Tokenizer(models.WordLevel(known, unk_token="<eos>"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(known), n_positions=64, n_embd=dim, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_words, eos_token="<eos>", bos_token="<eos>")
    return GPT2LMHeadModel(config).eval(), tokenizer


def watch(sampler: Sampler) -> None:
    """Let the run say in which part it is."""
    from harness_ext.engine.forward import LastStateModel
    from harness_ext.tasks import NaturalTask, ProbeTask

    states = LastStateModel.states

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampler.enter("forwards")
        found = states(self, *args, **kwargs)
        sampler.batches += 1
        return found

    LastStateModel.states = counted  # type: ignore[method-assign]

    def entering(task_class: Any, method: str, part: str) -> None:
        original = getattr(task_class, method)

        def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
            sampler.enter(part)
            return original(self, *args, **kwargs)

        setattr(task_class, method, entered)

    for task_class in (NaturalTask, ProbeTask):
        entering(task_class, "build_all_requests", "requests")
        entering(task_class, "evaluate_answers", "results")


def with_answers(samples: Sequence[Sample]) -> list[Sample]:
    """What comes after the last batch is another part, which nothing announces."""
    last = max(sample.batches for sample in samples)
    after = [sample for sample in samples if sample.part == "forwards" and sample.batches == last][1:]
    moved = {sample.seconds for sample in after}
    return [sample._replace(part="answers") if sample.seconds in moved else sample for sample in samples]


def table(samples: Sequence[Sample]) -> str:
    """Resident size at ten moments of each part."""
    lines = [f"{'part':9} {'seconds':>8} {'batches':>8} {'MiB':>8}"]
    for part in PARTS:
        of_part = [sample for sample in samples if sample.part == part]
        places = sorted({round(place) for place in np.linspace(0, len(of_part) - 1, min(10, len(of_part)))})
        lines += [
            f"{part:9} {sample.seconds:8.1f} {sample.batches:8,} {sample.bytes / 2**20:8.1f}"
            for sample in (of_part[place] for place in places)
        ]
    return "\n".join(lines)


def growth_in_forwards(samples: Sequence[Sample]) -> float:
    """Bytes of growth from one tenth of the batches to the last, scaled to all batches."""
    forwards = [sample for sample in samples if sample.part == "forwards"]
    last = forwards[-1].batches
    settled = next(sample for sample in forwards if sample.batches >= last / 10)
    return (forwards[-1].bytes - settled.bytes) * last / max(1, last - settled.batches)


def svg(samples: Sequence[Sample], *, width: int = 720, height: int = 320, margin: int = 48) -> str:
    """The curve, one colour a part."""
    seconds = max(sample.seconds for sample in samples)
    largest = max(sample.bytes for sample in samples) * 1.05

    def point(sample: Sample) -> str:
        x = margin + (width - 2 * margin) * sample.seconds / seconds
        y = height - margin - (height - 2 * margin) * sample.bytes / largest
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<path d="M{margin},{margin}V{height - margin}H{width - margin}" fill="none" stroke="black"/>',
        f'<text x="{margin}" y="{margin - 8}">resident, MiB (top: {largest / 2**20:.0f})</text>',
        f'<text x="{width - margin}" y="{height - margin + 16}" text-anchor="end">{seconds:.0f} s</text>',
    ]
    for place, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        points = " ".join(point(sample) for sample in samples if sample.part == part)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{margin + 90 * place}" y="{height - 12}" fill="{colour}">{part}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--batch_size", default="64")
    parser.add_argument("--kinds", nargs="+", default=["natural", "probe"])
    parser.add_argument("--store", action="store_true", help="keep states on disk, in a temporary folder")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    words = [f"w{i}" for i in range(args.vocabulary)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HARNESS_EXT_DATA"] = folder
        os.environ["HARNESS_EXT_CACHE"] = str(Path(folder) / "cache") if args.store else "off"
        write_documents(Path(folder), args.documents, words)
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from harness_ext import resources

        model, tokenizer = model_and_tokenizer(args.dim, words)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch_size, device="cpu")
        manager = TaskManager(include_path=str(resources.task_configs_folder()), include_defaults=False)
        sampler = Sampler()
        watch(sampler)
        sampler.start()
        results = evaluator.simple_evaluate(
            lm,
            tasks=[f"{kind}_agnews" for kind in args.kinds],
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
        sampler.stop()
        assert results is not None, "one process has the results"
    samples = with_answers(sampler.samples)
    print(table(samples))
    (passed,) = results["harness_ext"]["passes"]
    growth = growth_in_forwards(samples)
    print(
        f"{args.documents:,} documents, {passed['distinct_prompts']:,} distinct prompts, {passed['tokens']:,} tokens; growth "
        f"in the forwards: {growth / 2**20:.1f} MiB, {growth / args.documents:.0f} bytes a document; one float32 vector of "
        f"{args.dim} is {4 * args.dim} bytes; peak {max(sample.bytes for sample in samples) / 2**20:.0f} MiB"
    )
    if args.csv is not None:
        rows = (f"{one.seconds:.2f},{one.bytes},{one.part},{one.batches}\n" for one in samples)
        args.csv.write_text("seconds,bytes,part,batches\n" + "".join(rows), encoding="utf-8")
    if args.svg is not None:
        args.svg.write_text(svg(samples), encoding="utf-8")


if __name__ == "__main__":
    main()
