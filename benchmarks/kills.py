"""Kills evaluations at random moments and runs them again: is anything lost?

    python benchmarks/kills.py [--kills 50] [--ranks 1] [--seed 0] [--tasks natural_sst flatness_wikitext ...] [--json FILE]

A small random GPT-2, slowed down to `--batch_seconds` a batch, is evaluated on made-up documents and a made-up corpus without
interruption; that run is the reference. Then, as often as asked, with an empty store each time: a run is killed at a random
moment by SIGKILL, SIGTERM or an interrupt from the keyboard in turns, and the same run is started again and left alone. The
moment is uniform over the time that a run takes, or with `--during forwards` over its batches and the time of a batch. With
several ranks one of them, drawn at random, gets the signal, and the others are ended by SIGTERM when it is gone, as torchrun
does.

For each kill there is a line: the signal; the moment; how many prompts, windows and blocks had been handed to the model
(batches begun, all ranks); how many there were in the batches that were under way, the last of each rank; how many the second
run computed again; and the largest difference between any number of the second run's results and the reference. The exit
status is 1 if a run did not end well, a number differs by more than `--tolerance`, or more was computed again than was under
way.

Every run is a process of its own, forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

DATASET = "SetFit/sst2"
CORPUS = "Salesforce/wikitext"
CUES = (("bad", "dull", "awful", "terrible"), ("good", "fine", "fun", "great"))
FILLERS = [f"w{i}" for i in range(80)]
OTHER_WORDS = ["This", "movie", "is", "N/A", "[MASK]"]
TASKS = ["natural_sst", "probe_sst", "quad_sst", "loss_wikitext", "flatness_wikitext"]
BATCH_SIZE = 8
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
VOLATILE = {
    "date",
    "start_time",
    "end_time",
    "total_evaluation_time_seconds",
    "seconds",
    "tokens_per_second",
    # What the engine did is what the second run is to do less of.
    "passes",
    "pretty_env_info",
    "upper_git_hash",
    "git_hash",
}
"""Entries of a results file that differ between equal runs."""


@dataclass(frozen=True)
class Outcome:
    """One kill and what came after.

    Attributes:
        signal: Its name.
        moment: Seconds after the start.
        begun: Prompts, windows and blocks of all batches begun before the end.
        under_way: Those of the last batch of each rank.
        lost: Those begun that the second run computed again.
        difference: Largest difference of a number from the reference; infinite where the results have another form.
        ended: Whether the second run ended well.
    """

    signal: str
    moment: float
    begun: int
    under_way: int
    lost: int
    difference: float
    ended: bool


def write_documents(mirror: Path, *, train: int, test: int) -> None:
    """A mirror of SST-2 with distinct made-up documents, whose class shows in one word."""
    rng = random.Random(0)
    folder = mirror / DATASET
    folder.mkdir(parents=True)
    for split, count in (("train", train), ("test", test), ("validation", test)):
        rows = []
        for i in range(count):
            words = [rng.choice(FILLERS) for _ in range(rng.randint(3, 12))]
            words.insert(rng.randrange(len(words)), rng.choice(CUES[i % 2]))
            rows.append({"text": " ".join(words), "label": i % 2})
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    corpus = mirror / CORPUS
    corpus.mkdir(parents=True)
    lines = [json.dumps({"text": " ".join(rng.choices(FILLERS, k=40))}) for _ in range(30)]
    (corpus / "test.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_model(folder: Path) -> None:
    """A random GPT-2 and a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    known = ["<eos>", *FILLERS, *(word for of_class in CUES for word in of_class), *OTHER_WORDS]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", bos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(known), n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.2)
    model.save_pretrained(folder)


def log_batches(path: Path, batch_seconds: float) -> None:
    """Let the model write a line before each batch of prompts, windows or blocks, and take its time for it."""
    from harness_ext.engine import losses
    from harness_ext.engine.forward import LastStateModel
    from harness_ext.flatness.run import _Work

    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def slow(owner: Any, name: str, size: Callable[..., int]) -> None:
        compute = getattr(owner, name)

        def logged(*args: Any, **kwargs: Any) -> Any:
            os.write(descriptor, f"begin {size(*args)}\n".encode())
            time.sleep(batch_seconds / 2)
            found = compute(*args, **kwargs)
            time.sleep(batch_seconds / 2)
            return found

        setattr(owner, name, logged)

    slow(LastStateModel, "states", lambda model, batch, *_: sum(len(tree.sequences) for tree in batch))
    slow(losses, "_nats_of_batch", lambda windows, *_: len(windows))
    slow(_Work, "do", lambda work, piece: len(piece.blocks))


def evaluate(model: Path, tasks: Sequence[str], output: Path) -> None:
    """What `lm_eval` does between its command line and its table."""
    from lm_eval import evaluator
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from harness_ext import resources

    manager = TaskManager(
        include_path=str(resources.task_configs_folder()),
        include_defaults=False,
        metadata={
            "pretrained": str(model),
            "probe": {"n_train": 120, "num_folds": 3, "c_grid": [0.01, 1.0]},
            "flatness": {"max_blocks": 20, "lambda_blocks": 2},
            "block_tokens": 16,
        },
    )
    tracker = EvaluationTracker(output_path=str(output))
    results = evaluator.simple_evaluate(
        "hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=list(tasks),
        batch_size=BATCH_SIZE,
        device="cpu",
        task_manager=manager,
        evaluation_tracker=tracker,
        log_samples=False,
        bootstrap_iters=0,
    )
    if results is not None:
        tracker.save_results_aggregated(results=results, samples=None)


class Job:
    """A run of one or several ranks, each a forked process; its files are `<folder>/<name>.*`."""

    def __init__(self, folder: Path, name: str, cache: Path, args: argparse.Namespace) -> None:
        ranks = args.ranks
        self.logs = [folder / f"{name}.{rank}.batches" for rank in range(ranks)]
        self.output = folder / f"{name}.out"
        self.messages = folder / f"{name}.err"
        port = _free_port() if ranks > 1 else 0
        self.processes = []
        self.statuses: dict[int, int] = {}
        for rank in range(ranks):
            process = os.fork()
            if not process:
                self._run(rank, port, folder / "model", cache, args)
            self.processes.append(process)

    def _run(self, rank: int, port: int, model: Path, cache: Path, args: argparse.Namespace) -> None:
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            descriptor = os.open(self.messages, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            faulthandler.enable(descriptor)
            os.environ["HARNESS_EXT_CACHE"] = str(cache)
            if args.ranks > 1:
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(args.ranks),
                    "LOCAL_WORLD_SIZE": str(args.ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "ACCELERATE_USE_CPU": "true",
                }
            log_batches(self.logs[rank], args.batch_seconds)
            evaluate(model, args.tasks, self.output)
            status = 0
        except SystemExit as done:
            status = done.code if isinstance(done.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(status)

    def running(self) -> bool:
        """Whether any rank has not ended."""
        for process in self.processes:
            if process not in self.statuses:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self.statuses[process] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) < len(self.processes)

    def wait(self) -> None:
        """Wait for all ranks."""
        while self.running():
            time.sleep(0.002)

    def kill(self, rank: int, by: signal.Signals) -> None:
        """Send a signal to a rank, and end the others once it is gone."""
        victim = self.processes[rank]
        if victim not in self.statuses:
            os.kill(victim, by)
        while self.running() and victim not in self.statuses:
            time.sleep(0.002)
        for process in self.processes:
            if process not in self.statuses:
                os.kill(process, signal.SIGTERM)
        self.wait()

    def counts(self, rank: int) -> list[int]:
        """Sizes of the batches that a rank has begun."""
        log = self.logs[rank]
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("begin")]

    def batches(self) -> tuple[int, int]:
        """Sum over the batches begun, and over the last one of each rank."""
        of_ranks = [self.counts(rank) for rank in range(len(self.logs))]
        return sum(map(sum, of_ranks)), sum(counts[-1] for counts in of_ranks if counts)

    def results(self) -> dict[str, Any] | None:
        """The one complete results file, or None."""
        for path in self.output.rglob("results_*.json"):
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return found
        return None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Every number of a results file with its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in VOLATILE:
                yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from numbers(item, (*path, place))
    elif isinstance(value, int | float):
        yield path, float(value)


def largest_difference(results: Mapping[str, Any] | None, reference: Mapping[str, Any]) -> float:
    """Over all numbers; infinite where one of them has numbers that the other has not."""
    if results is None:
        return math.inf
    found, expected = dict(numbers(results)), dict(numbers(reference))
    if found.keys() != expected.keys():
        return math.inf
    return max(abs(found[place] - expected[place]) for place in expected)


def kill_once(
    start: Any,
    number: int,
    *,
    batch: int,
    seconds: float,
    by: signal.Signals,
    victim: int,
    reference: Mapping[str, Any],
    total: int,
) -> Outcome | None:
    """Kill a run some seconds after its victim's batch of a number began, or its start for 0, and run it again.

    Returns:
        None where the run had ended before.
    """
    cache, first = start(f"killed{number}", None)
    started = moment = time.monotonic()
    while first.running() and len(first.counts(victim)) < batch:
        time.sleep(0.0005)
        moment = time.monotonic()
    while first.running() and time.monotonic() < moment + seconds:
        time.sleep(0.0005)
    if not first.running():
        return None
    moment = time.monotonic()
    first.kill(victim, by)
    begun, under_way = first.batches()
    _, second = start(f"again{number}", cache)
    second.wait()
    ended = not any(second.statuses.values())
    results = second.results() if ended else None
    lost = begun + second.batches()[0] - total if ended else begun
    outcome = Outcome(
        by.name,
        round(moment - started, 3),
        begun,
        under_way,
        lost,
        largest_difference(results, reference),
        ended,
    )
    if not ended:
        print(second.messages.read_text(errors="replace")[-2000:], file=sys.stderr)
    shutil.rmtree(cache, ignore_errors=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, nargs=2, default=[400, 160], metavar=("TRAIN", "TEST"))
    parser.add_argument("--during", choices=["run", "forwards"], default="run")
    parser.add_argument("--batch_seconds", type=float, default=0.02)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    args = parser.parse_args()

    import lm_eval.loggers
    import lm_eval.models.huggingface
    import lm_eval.tasks

    import harness_ext.engine.attach
    import harness_ext.tasks  # noqa: F401

    lm_eval.evaluator.add_env_info = lambda results: None
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "data", train=args.documents[0], test=args.documents[1])
        write_model(folder / "model")
        os.environ |= {
            "HARNESS_EXT_DATA": str(folder / "data"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

        def start(name: str, cache: Path | None) -> tuple[Path, Job]:
            cache = cache or folder / f"{name}.cache"
            return cache, Job(folder, name, cache, args)

        seconds = []
        for number in range(2):  # the first fills the caches of the system
            began = time.monotonic()
            _, undisturbed = start(f"reference{number}", None)
            undisturbed.wait()
            seconds.append(time.monotonic() - began)
            reference = undisturbed.results()
            if any(undisturbed.statuses.values()) or reference is None:
                print(undisturbed.messages.read_text(errors="replace")[-4000:], file=sys.stderr)
                return 1
        assert reference is not None, "checked above"
        total, _ = undisturbed.batches()
        print(
            f"undisturbed: {min(seconds):.1f} s, {total} prompts, windows and blocks in batches of at most {BATCH_SIZE} rows, "
            f"{len(dict(numbers(reference)))} numbers"
        )
        print(f"{'signal':8} {'at s':>6} {'begun':>6} {'under way':>9} {'lost':>5} {'difference':>10}")
        while len(outcomes) < args.kills:
            victim = rng.randrange(args.ranks)
            within_forwards = args.during == "forwards"
            outcome = kill_once(
                start,
                len(outcomes),
                batch=rng.randint(1, len(undisturbed.counts(victim))) if within_forwards else 0,
                seconds=rng.uniform(0, args.batch_seconds if within_forwards else min(seconds)),
                by=SIGNALS[len(outcomes) % len(SIGNALS)],
                victim=victim,
                reference=reference,
                total=total,
            )
            if outcome is None:
                shutil.rmtree(folder / f"killed{len(outcomes)}.cache", ignore_errors=True)
                for left in folder.glob(f"killed{len(outcomes)}.*.batches"):
                    left.unlink()
                continue
            outcomes.append(outcome)
            print(
                f"{outcome.signal:8} {outcome.moment:6.2f} {outcome.begun:6} {outcome.under_way:9} {outcome.lost:5} "
                f"{outcome.difference:10.1e}" + ("" if outcome.ended else "  the second run failed"),
                flush=True,
            )
    good = [
        outcome
        for outcome in outcomes
        if outcome.ended and outcome.difference <= args.tolerance and outcome.lost <= outcome.under_way
    ]
    during = [outcome for outcome in outcomes if 0 < outcome.begun < total]
    print(
        f"{len(good)} of {len(outcomes)} good; {len(during)} during the forwards; lost at most "
        f"{max(outcome.lost for outcome in outcomes)}; largest difference "
        f"{max(outcome.difference for outcome in outcomes):.1e}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({"total": total, "outcomes": [asdict(outcome) for outcome in outcomes]}))
    return int(len(good) < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
