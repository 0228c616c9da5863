"""`harness-ext demo`: a synthetic language, a tiny GPT-2 trained on it, and both kinds of task run on it by lm_eval.

It needs no network and no data. The folder that it leaves is an ordinary Hugging Face model with the downstream dataset
under `data/`, so that `lm_eval` runs `natural_demo` and `probe_demo` on it without further options.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from harness_ext.lab.languages.reviews import ReviewGrammar

__all__ = ["TASKS", "add_parser", "evaluate", "make_model", "run"]

TASKS = ("natural_demo", "probe_demo")

DEFAULT_FOLDER = "harness_ext_demo"
DEFAULT_STEPS = 1000
# The record of a folder that may be used again, or replaced with --force, names its maker.
_MAKER = "harness-ext demo"

_NUM_TRAIN, _NUM_TEST, _NUM_VALIDATION = 2000, 2000, 2000
_BATCH_SIZE = 64


def add_parser(subparsers: Any) -> None:
    """Add `demo`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="make a synthetic language, train a tiny model on it and evaluate it; no network, about a minute",
        description="Makes a synthetic language of movie reviews, trains a tiny GPT-2 on it, saves it as an ordinary "
        f"Hugging Face folder and runs {' and '.join(TASKS)} on it through lm_eval. A finished demo is used again.",
    )
    parser.add_argument("--out", default=DEFAULT_FOLDER, metavar="DIR", help="folder to make (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of language and model (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, metavar="N", help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--force", action="store_true", help="if DIR holds a demo, replace it and everything else in its folder"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Make the model unless it is there, evaluate it, and print accuracies beside the Bayes-optimal one.

    Raises:
        ValueError: If the seed or the steps are out of range, or differ from those of the demo that is there.
        FileExistsError: If the folder holds something that is not a demo.
    """
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: expected at least 1; the default is {DEFAULT_STEPS}")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed}: expected a number from 0 to {2**63 - 1}")
    # Nothing of the demo is on the Hub, and where there is no network the libraries wait for it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = Path(args.out).expanduser()
    record = _finished_demo(folder)
    if record is None or args.force:
        record = make_model(folder, seed=args.seed, steps=args.steps)
    elif (record["seed"], record["algorithm"]["steps"]) != (args.seed, args.steps):
        raise ValueError(
            f"{folder} holds a demo of --seed {record['seed']} --steps {record['algorithm']['steps']}. Ask for these, add "
            "--force to replace it, or name another folder with --out."
        )
    else:
        print(f"{folder} holds this demo already; it is evaluated as it is (--force makes it anew).")
    _print_model(folder, record)
    _print_results(evaluate(folder), record)
    print(
        "\nTo evaluate it by hand:\n"
        f"  lm_eval --tasks {','.join(TASKS)} --model hf --model_args {shlex.quote(f'pretrained={folder}')} "
        "--batch_size auto"
    )
    return 0


def make_model(folder: Path, *, seed: int, steps: int) -> dict[str, Any]:
    """Make language, tokenizer, model and dataset; `folder` appears, or is replaced, only when all is written.

    Args:
        folder: Does not exist, or holds a demo or nothing.
        seed: Of everything that is random.
        steps: Training steps.

    Returns:
        What the folder's `lab.json` holds.
    """
    import numpy as np

    from harness_ext import __version__
    from harness_ext.lab.languages import reviews
    from harness_ext.lab.model import ModelConfig, build_model
    from harness_ext.lab.train import TrainConfig, cpu_threads, encode, pack, save, train, validation_loss

    # One stream for each use, so that the test set, say, does not depend on the number of steps.
    rngs = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4)]
    text_rng, validation_rng, train_rng, test_rng = rngs
    grammar = reviews.default_grammar()
    model_config, train_config = ModelConfig(), TrainConfig(steps=steps)
    tokenizer = reviews.build_tokenizer(grammar, max_length=model_config.context)
    end_of_text = tokenizer.eos_token_id
    validation = grammar.sample_many(_NUM_VALIDATION, validation_rng)
    train_reviews = grammar.sample_many(_NUM_TRAIN, train_rng)
    test = grammar.sample_many(_NUM_TEST, test_rng, without=[review.body for review in train_reviews])
    entropy, bayes = reviews.entropy(grammar, validation), reviews.bayes_accuracy(grammar, test)
    print(
        f"Language: movie reviews of {len(grammar.words)} words with a hidden sentiment and one of {len(grammar.topics)} "
        f"topics; entropy {entropy.value:.3f} nats per token. For example:\n  {validation[0].document}"
    )
    num_tokens = steps * train_config.batch_size * model_config.context
    documents = _enough_documents(grammar, num_tokens, text_rng)
    blocks = pack(encode(documents, tokenizer), end_of_text=end_of_text, block_size=model_config.context)
    model = build_model(model_config, tokenizer, seed=seed)
    with cpu_threads(1):
        result = train(model, blocks, train_config, seed=seed)
        loss = validation_loss(
            model, encode([review.document for review in validation], tokenizer), end_of_text=end_of_text
        )
    record = {
        "made_by": _MAKER,
        "harness_ext_version": __version__,
        "language": {"name": "reviews", "num_words": len(grammar.words), "entropy": entropy._asdict()},
        "seed": seed,
        "model": {"num_parameters": model.num_parameters(), **vars(model_config)},
        "algorithm": {"name": "adamw", **vars(train_config)},
        "tokens_seen": result.tokens,
        "train_seconds": round(result.seconds, 1),
        "validation_loss": {**loss._asdict(), "excess": loss.value - entropy.value},
        "datasets": {
            reviews.DATASET: {"train": _NUM_TRAIN, "test": _NUM_TEST, "bayes_accuracy": bayes._asdict()},
        },
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        reviews.write_dataset(partial / "data", train=train_reviews, test=test)
        reviews.write_text(partial / "data", validation)
        record = save(partial, model, tokenizer, record)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return record


def evaluate(folder: Path) -> dict[str, Any]:
    """Run the two tasks on a demo's folder and return lm_eval's results."""
    from harness_ext import plugin, resources

    plugin.install()

    import lm_eval
    import torch
    from lm_eval.tasks import TaskManager

    model_args = {"pretrained": str(folder.resolve())}
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=model_args,
        tasks=list(TASKS),
        batch_size=_BATCH_SIZE,
        # Left out, lm_eval's API takes "cuda" even where there is none; its command line does not.
        device="cuda" if torch.cuda.is_available() else "cpu",
        # Without lm_eval's own tasks, whose thousands of files take seconds to list. Tasks learn the model's folder from
        # the metadata, as from the command line.
        task_manager=TaskManager(
            include_path=str(resources.task_configs_folder()), include_defaults=False, metadata=model_args
        ),
        log_samples=False,
    )
    assert results is not None, "lm_eval gives results on the main process, and the demo has no other"
    return results


def _finished_demo(folder: Path) -> dict[str, Any] | None:
    """Return the record of the demo in `folder`, None if the folder is free, and raise if something else is there."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        record = json.loads((folder / "lab.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict) or record.get("made_by") != _MAKER:
        raise FileExistsError(
            f"{folder} holds something that is not a finished demo (no lab.json of `{_MAKER}`). It is left alone, also "
            "with --force; name another folder with --out."
        )
    return record


def _enough_documents(grammar: ReviewGrammar, num_tokens: int, rng: np.random.Generator) -> list[str]:
    """Sample documents of at least `num_tokens` tokens in all, so that no block has to be seen twice."""
    documents: list[str] = []
    while num_tokens > 0:
        review = grammar.sample(rng)
        documents.append(review.document)
        num_tokens -= len(review.body) + len(review.verdict) + 1
    return documents


def _print_model(folder: Path, record: dict[str, Any]) -> None:
    model, loss = record["model"], record["validation_loss"]
    print(
        f"Model: {folder}, a GPT-2 of {model['num_parameters']:,} parameters (width {model['width']}, "
        f"{model['depth']} layers), trained on {record['tokens_seen']:,} tokens in {record['train_seconds']:.0f} s; "
        f"validation loss {loss['value']:.3f} nats per token, {loss['excess']:.3f} above the entropy.",
        flush=True,
    )


def _print_results(results: dict[str, Any], record: dict[str, Any]) -> None:
    from lm_eval.utils import make_table

    print(f"\n{make_table(results)}")
    [dataset] = record["datasets"].values()
    bayes = dataset["bayes_accuracy"]["accuracy"]
    print("Accuracy        measured   Bayes-optimal   chance")
    for task in TASKS:
        scores = results["results"][task]
        measured, stderr = scores["acc,none"], scores["acc_stderr,none"]
        print(f"{task:<14} {measured:6.1%} ± {stderr:.1%}      {bayes:.1%}         50.0%")
