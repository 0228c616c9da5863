"""Plans of the lab: which models of which language `harness-ext lab run --preset NAME` makes.

Every plan makes models of equal loss in the three ways of Liu et al. (ICML 2023): longer training, other sizes, other
algorithms. Steps and rates of `cpu` were chosen so that every run reaches its levels within a few CPU minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness_ext.lab.algorithms import AdamW, Adversarial, Algorithm, LabelNoise, Sam, Sgd
from harness_ext.lab.model import ModelConfig
from harness_ext.lab.run import Plan, Run
from harness_ext.lab.train import TrainConfig

__all__ = ["PRESETS"]

_HMM_TASKS = ("hmm_regime", "hmm_switch", "hmm_switch_and_state", "hmm_two_states", "hmm_earlier_state")
_PCFG_TASKS = ("pcfg_top_rule", "pcfg_level1_first", "pcfg_level1_last", "pcfg_level2_first", "pcfg_level2_last")
_KINDS = ("natural", "probe", "probe_cmean", "quad")


def _cpu(seed: int) -> Plan:
    return Plan(
        name="cpu",
        language="hmm",
        seed=seed,
        runs=_family(steps=10_000, base=ModelConfig(), seed=seed),
        levels=(0.05, 0.035, 0.025),
        tasks=_tasks("hmm", _HMM_TASKS),
    )


def _demo(seed: int) -> Plan:
    """Three small models of the language of reviews, at one loss, and its lookup table."""
    base = ModelConfig()

    def run(name: str, model: ModelConfig, algorithm: Algorithm, rate: float, steps: int) -> Run:
        return Run(name, model, TrainConfig(steps, learning_rate=rate, algorithm=algorithm), seed=seed, keep=(steps,))

    return Plan(
        name="demo",
        language="reviews",
        seed=seed,
        runs=(
            run("adamw-w64", base, AdamW(), 4e-3, 1000),
            run("adamw-w32", replace(base, width=32), AdamW(), 4e-3, 1000),
            run("sam-w64", base, Sam(rho=0.05), 4e-3, 1000),
        ),
        levels=(0.06,),
        # Wide, since the loss still falls fast between two measurements.
        tolerance=0.02,
        evaluate_every=20,
        documents=32_000,
        block_size=64,
        tasks=("natural_demo", "probe_demo", "loss_demo", "flatness_demo"),
    )


def _paper(seed: int) -> Plan:
    """Sizes of Liu et al.: a grammar of four levels, a million sentences, models up to width 512; for GPUs."""
    base = ModelConfig(width=256, depth=4, heads=8)
    return Plan(
        name="paper",
        language="pcfg",
        sizes={"symbols": [10, 10, 10, 10], "words": 200},
        seed=seed,
        runs=_family(steps=100_000, base=base, seed=seed),
        levels=(0.1, 0.06, 0.04, 0.03, 0.02),
        evaluate_every=200,
        documents=1_000_000,
        block_size=64,
        num_train_per_class=4096,
        num_test=5000,
        num_validation=5000,
        tasks=_tasks("pcfg", _PCFG_TASKS),
    )


def _family(*, steps: int, base: ModelConfig, seed: int) -> tuple[Run, ...]:
    """Runs in the three ways; other sizes are made from `base`."""

    def run(name: str, algorithm: Algorithm, rate: float, *, model: ModelConfig = base, **recipe: float) -> Run:
        decay = 0.01 if isinstance(algorithm, AdamW | Adversarial) else 0.0
        settings = {"steps": steps, "weight_decay": decay} | recipe
        return Run(name, model, TrainConfig(learning_rate=rate, algorithm=algorithm, **settings), seed=seed)  # type: ignore[arg-type]

    width, depth = base.width, base.depth
    # A constant rate: no schedule tells when the training is over.
    longer = run(f"adamw-w{width}-long", AdamW(), 2e-3, steps=2 * steps, final_fraction=1.0)
    return (
        run(f"adamw-w{width}", AdamW(), 4e-3),
        replace(longer, keep=(steps, 3 * steps // 2, 2 * steps)),
        run(f"adamw-w{width // 2}", AdamW(), 4e-3, model=replace(base, width=width // 2)),
        run(f"adamw-w{2 * width}", AdamW(), 2e-3, model=replace(base, width=2 * width)),
        run(f"adamw-w{width}-d{2 * depth}", AdamW(), 3e-3, model=replace(base, depth=2 * depth)),
        run(f"llama-w{width}", AdamW(), 4e-3, model=replace(base, architecture="llama")),
        run(f"sgd-w{width}", Sgd(), 2.0),
        run(f"momentum-w{width}", Sgd(momentum=0.9), 0.3),
        run(f"sam-w{width}", Sam(rho=0.05), 4e-3),
        run(f"label-noise-w{width}", LabelNoise(strength=1.0), 2.0),
        run(f"adversarial-w{width}", Adversarial(strength=0.001), 4e-3),
    )


def _tasks(kind: str, datasets: tuple[str, ...]) -> tuple[str, ...]:
    return (*(f"{task}_{dataset}" for task in _KINDS for dataset in datasets), f"loss_{kind}", f"flatness_{kind}")


PRESETS: dict[str, Callable[[int], Plan]] = {"cpu": _cpu, "demo": _demo, "paper": _paper}
"""By name, from the seed."""
