"""Time and results of the full suite on one dataset, against lm_eval's own tasks and the usual way of probing.

    HARNESS_EXT_DATA=DIR python benchmarks/full_suite.py --model FOLDER [--rounds 2] [--ways suite]

suite    one `lm_eval` run of natural_<d> under eight prompts, probe, probe_cmean, probe_words, probe_subset, probe_full,
         probe_random and quad; no store
usual    lm_eval's `loglikelihood` on eight multiple_choice tasks; then all training and test documents in batches of 25 in
         file order, the features of each batch from the model's logits; then for each of the feature sets scikit-learn's
         liblinear on 10 values of C in 5 folds on all cores, 200 iterations, no scaling (Saunshi et al., 2021). Fits of all
         of p_f (50,000 columns) are left out of the time, since they alone take hours.

Both print their accuracies. The ways alternate from round to round.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
import warnings
from typing import Any

import numpy as np
import torch
from engine_speed import load_tasks

KINDS = ("probe", "probe_cmean", "probe_words", "probe_subset", "probe_full", "probe_random", "quad")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--dataset", default="sst")
    parser.add_argument("--prompts", nargs="+", help="eight ids (default: the first eight of the dataset)")
    parser.add_argument("--limit", type=int, default=None, help="test documents")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=["suite", "usual"], choices=["suite", "usual"])
    return parser.parse_args()


def suite(lm: Any, args: argparse.Namespace) -> dict[str, float]:
    """One run of lm_eval; accuracies by task."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    from harness_ext import resources

    manager = TaskManager(
        include_path=str(resources.task_configs_folder()), include_defaults=False, metadata={"prompt": args.prompts}
    )
    names = [f"natural_{args.dataset}", *(f"{kind}_{args.dataset}" for kind in KINDS)]
    results = evaluator.simple_evaluate(
        lm, tasks=names, task_manager=manager, limit=args.limit, log_samples=False, bootstrap_iters=0
    )
    assert results is not None
    return {name: results["results"][name]["acc,none"] for name in names}


def usual(lm: Any, args: argparse.Namespace) -> dict[str, float]:
    """lm_eval's multiple_choice tasks, and probes as they are usually made."""
    ours, stock = load_tasks(f"natural_{args.dataset}", args.prompts, args.limit)
    started = time.perf_counter()
    lm.loglikelihood([instance for task in stock for instance in task.instances], disable_tqdm=True)
    print(f"  usual: eight tasks {time.perf_counter() - started:.1f} s", flush=True)
    started = time.perf_counter()
    train = ours.dataset[ours.config.training_split]
    test = ours.eval_docs
    texts = [*train[ours.text_column], *test[ours.text_column][: args.limit]]
    labels = np.array([*train[ours.label_column], *test[ours.label_column][: args.limit]])
    words = [word for of_class in ours.templates[0].label_words.values() for word in of_class]
    features = extract(lm, texts, words, ours.config.metadata["subset_words"])
    print(f"  usual: features {time.perf_counter() - started:.1f} s", flush=True)
    return {name: liblinear(name, values, labels, len(train)) for name, values in features.items()}


def extract(lm: Any, texts: list[str], words: list[str], subset: list[str]) -> dict[str, np.ndarray]:
    """Features of texts, in batches of 25 in file order."""
    tokenizer, model = lm.tokenizer, lm.model
    ids = {word: tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in (*words, *subset)}
    embedding = model.get_output_embeddings().weight.detach().float()
    random = torch.linalg.qr(torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))).Q
    gram = (embedding.T.double() @ embedding.double()).numpy()
    parts: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("probe", "probe_cmean", "probe_words", "probe_subset", "probe_random")
    }
    for start in range(0, len(texts), 25):
        rows = [tokenizer.encode(text) for text in texts[start : start + 25]]
        lengths = torch.tensor([len(row) for row in rows])
        batch = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        mask = (torch.arange(batch.shape[1]) < lengths[:, None]).long()
        with torch.inference_mode():
            output = model(input_ids=batch, attention_mask=mask, output_hidden_states=True)
        last = torch.arange(len(rows)), lengths - 1
        log_probs = output.logits[last].float().log_softmax(-1)
        parts["probe"].append(output.hidden_states[-1][last].float())
        parts["probe_cmean"].append(log_probs.exp() @ embedding)
        parts["probe_random"].append(log_probs.exp() @ random)
        parts["probe_words"].append(log_probs[:, [ids[word] for word in words]])
        parts["probe_subset"].append(log_probs[:, [ids[word] for word in subset]])
    features = {name: torch.cat(values).numpy() for name, values in parts.items()}
    features["quad"] = np.linalg.solve(gram, features["probe_cmean"].T.astype(np.float64)).T
    return features


def liblinear(name: str, features: np.ndarray, labels: np.ndarray, num_train: int) -> float:
    """Test accuracy of the C that is best in 5 folds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.multiclass import OneVsRestClassifier

    started = time.perf_counter()
    model: Any = LogisticRegression(solver="liblinear", max_iter=200)
    grid = {"C": [10.0**power for power in range(-6, 4)]}
    if labels.max() > 1:
        model, grid = OneVsRestClassifier(model), {f"estimator__{key}": value for key, value in grid.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = GridSearchCV(model, grid, cv=5, n_jobs=-1).fit(features[:num_train], labels[:num_train])
    accuracy = float(search.score(features[num_train:], labels[num_train:]))
    print(f"  usual: {name} {time.perf_counter() - started:.1f} s", flush=True)
    return accuracy


def main() -> None:
    args = parse()
    os.environ["HARNESS_EXT_CACHE"] = "off"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from lm_eval.models.huggingface import HFLM

    from harness_ext.prompts import resolve_prompts

    names = resolve_prompts(args.prompts or f"{args.dataset}/*", with_label_words=True)
    args.prompts = list(names[:8])
    print(f"prompts: {', '.join(args.prompts)}; {torch.get_num_threads()} threads")
    lm = HFLM(pretrained=args.model, dtype=args.dtype, batch_size=args.batch_size, device="cpu")
    ways = {"suite": suite, "usual": usual}
    seconds: dict[str, list[float]] = {name: [] for name in args.ways}
    for number in range(args.rounds):
        for name in args.ways if number % 2 == 0 else reversed(args.ways):
            started = time.perf_counter()
            accuracies = ways[name](lm, args)
            seconds[name].append(time.perf_counter() - started)
            print(
                f"{name} {seconds[name][-1]:.1f} s",
                {task: round(value, 4) for task, value in accuracies.items()},
                flush=True,
            )
    if len(seconds) == 2:
        ratios = [theirs / own for own, theirs in zip(seconds["suite"], seconds["usual"], strict=True)]
        print(f"usual / suite: median of rounds {statistics.median(ratios):.2f} (of {len(ratios)})")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
