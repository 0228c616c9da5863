"""Steps of each algorithm against what its definition says, on models small enough to enumerate all randomness."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from harness_ext.lab import algorithms
from harness_ext.lab.algorithms import (
    ALGORITHMS,
    AdamW,
    Adversarial,
    Algorithm,
    Batch,
    LabelledTokens,
    LabelNoise,
    Rule,
    Sam,
    Setting,
    Sgd,
    Svag,
    algorithm_from_dict,
    algorithm_to_dict,
    linear_fit,
)
from harness_ext.lab.languages.hmm import random_hmm
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.quad import IGNORED
from harness_ext.lab.train import Blocks, TrainConfig, Trainer, cpu_threads, encode, pack

RATE = 0.3
WORDS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with cpu_threads(1):
        yield


class Output(NamedTuple):
    logits: Tensor


class Bigram(nn.Module):
    """Logits of the next word from the present one, through a narrow layer: not convex, 2 * 4 + 4 * 2 weights, float64."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.Parameter(torch.randn(WORDS, 2, generator=generator, dtype=torch.float64))
        self.outer = nn.Parameter(torch.randn(2, WORDS, generator=generator, dtype=torch.float64))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Output:
        return Output((self.inner @ self.outer)[input_ids])

    def vector(self) -> np.ndarray:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()]).numpy().copy()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch.inputs).logits
    return cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)


def gradient_of(model: Bigram, batch: Batch) -> np.ndarray:
    gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]).numpy()


def batch_of(words: Sequence[int], following: Sequence[int]) -> Batch:
    return Batch({"input_ids": torch.tensor([words])}, torch.tensor([following]))


BATCHES = [
    batch_of([0, 1, 2], [1, 2, IGNORED]),
    batch_of([3, 3, 0], [3, 0, 0]),
    batch_of([2, 1, 0], [2, IGNORED, 3]),
    batch_of([1, 1, 1], [0, 1, 2]),
    batch_of([0, 2, 3], [0, 1, 1]),
]


def setting_of(model: nn.Module, *, weight_decay: float = 0.0, max_grad_norm: float = math.inf) -> Setting:
    return Setting(
        model=model,
        forward=model,
        loss=lambda batch: loss_of(model, batch),
        backward=lambda scalar: scalar.backward(),
        max_grad_norm=max_grad_norm,
        parameter_groups=[{"params": list(model.parameters()), "weight_decay": weight_decay}],
    )


def started(algorithm: Algorithm, model: nn.Module, *, rate: float = RATE, **options: Any) -> Rule:
    rule = algorithm.start(setting_of(model, **options))
    for group in rule.optimizer.param_groups:
        group["lr"] = rate
    return rule


def moved(algorithm: Algorithm, batches: Sequence[Batch], *, seed: int = 0, **options: Any) -> np.ndarray:
    """What one step of a fresh model adds to its weights, over −rate: the gradient that SGD was handed."""
    model = Bigram()
    before = model.vector()
    started(algorithm, model, **options).step(0, batches, torch.Generator().manual_seed(seed))
    return (before - model.vector()) / RATE


# SVAG. ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amplification", [1, 1.5, 2, 8])
def test_svag_has_the_mean_and_so_many_times_the_covariance_of_one_batch(amplification: float) -> None:
    """Over all pairs of independent batches, so exactly."""
    model = Bigram()
    single = np.array([gradient_of(model, batch) for batch in BATCHES])
    pairs = np.array([moved(Svag(amplification), pair) for pair in itertools.product(BATCHES, repeat=2)])
    np.testing.assert_allclose(pairs.mean(axis=0), single.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(
        np.cov(pairs.T, bias=True), amplification * np.cov(single.T, bias=True), atol=1e-12, rtol=1e-10
    )


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"max_grad_norm": 0.05}])
def test_svag_without_amplification_is_sgd_to_the_bit(options: dict[str, Any]) -> None:
    sgd, svag = Bigram(), Bigram()
    sgd_rule, svag_rule = started(Sgd(), sgd, **options), started(Svag(1), svag, **options)
    for number, (batch, other) in enumerate(itertools.product(BATCHES, repeat=2)):
        generator = torch.Generator().manual_seed(number)
        loss = sgd_rule.step(number, [batch], generator)
        assert svag_rule.step(number, [batch, other], generator) == loss
    assert np.array_equal(sgd.vector(), svag.vector())


def test_svag_reports_the_mean_loss_of_both_batches() -> None:
    model = Bigram()
    expected = np.mean([loss_of(model, batch).item() for batch in BATCHES[:2]])
    assert started(Svag(4), model).step(0, BATCHES[:2], torch.Generator()) == pytest.approx(expected)


@given(st.floats(1, 1e6))
def test_svag_coefficients(amplification: float) -> None:
    first, second = Svag(amplification).coefficients
    assert first + second == pytest.approx(1, abs=1e-9)
    assert first**2 + second**2 == pytest.approx(amplification)


# SAM. -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [math.inf, 0.2])
@pytest.mark.parametrize("base", [Sgd(), Sgd(momentum=0.9), AdamW()])
def test_sam_equals_a_hand_written_reference(base: AdamW | Sgd, max_grad_norm: float) -> None:
    rho, model, reference = 0.2, Bigram(), Bigram()
    rule = started(Sam(rho, base), model, weight_decay=0.1, max_grad_norm=max_grad_norm)
    optimizer = base.start(setting_of(reference, weight_decay=0.1)).optimizer
    for group in optimizer.param_groups:
        group["lr"] = RATE
    for number, batch in enumerate(BATCHES * 3):
        loss = rule.step(number, [batch], torch.Generator())
        at = list(reference.parameters())
        assert loss == pytest.approx(loss_of(reference, batch).item(), rel=1e-12)
        gradients = torch.autograd.grad(loss_of(reference, batch), at)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        there = Bigram()
        with torch.no_grad():
            for parameter, origin, gradient in zip(there.parameters(), at, gradients, strict=True):
                parameter.copy_(origin + rho * gradient / norm)
        steepest = torch.autograd.grad(loss_of(there, batch), list(there.parameters()))
        size = math.sqrt(sum(float(gradient.square().sum()) for gradient in steepest))
        for parameter, gradient in zip(at, steepest, strict=True):
            parameter.grad = gradient * min(1.0, max_grad_norm / (size + 1e-6))  # as torch clips
        optimizer.step()
        np.testing.assert_allclose(model.vector(), reference.vector(), rtol=1e-8)


def test_sam_puts_the_weights_back_to_the_bit() -> None:
    model = Bigram()
    before = model.vector()
    rule = started(Sam(0.7, Sgd()), model, rate=0.0)
    for batch in BATCHES:
        rule.step(0, [batch], torch.Generator())
    assert np.array_equal(model.vector(), before)


# Label noise. ---------------------------------------------------------------------------------------------------------


def drawing(labels: Sequence[int]) -> Callable[..., Tensor]:
    return lambda probabilities, count, generator: torch.tensor(labels)[:, None]


def test_label_noise_has_no_mean_and_the_covariance_of_the_fisher_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all labels of the two tokens of a batch, each with its probability, so exactly."""
    strength, batch, model = 0.7, BATCHES[0], Bigram()
    words = [0, 1]  # the third has no target
    log_probs = model(**batch.inputs).logits[0].log_softmax(dim=-1)
    probabilities = log_probs.detach().exp().numpy()
    plain = gradient_of(model, batch)
    weights, handed = [], []
    for labels in itertools.product(range(WORDS), repeat=len(words)):
        monkeypatch.setattr(torch, "multinomial", drawing(labels))
        handed.append(moved(LabelNoise(strength), [batch]))
        weights.append(np.prod([probabilities[word, label] for word, label in zip(words, labels, strict=True)]))
    assert sum(weights) == pytest.approx(1)
    mean = np.average(handed, axis=0, weights=weights)
    # The rule takes its logits to float32.
    np.testing.assert_allclose(mean, plain, atol=1e-6)
    covariance = np.cov(np.array(handed).T, aweights=weights, bias=True)
    fisher = np.zeros_like(covariance)
    for word, label in itertools.product(words, range(WORDS)):
        gradients = torch.autograd.grad(log_probs[word, label], list(model.parameters()), retain_graph=True)
        score = torch.cat([gradient.flatten() for gradient in gradients]).numpy()
        fisher += probabilities[word, label] * np.outer(score, score) / len(words)
    np.testing.assert_allclose(covariance, strength**2 * fisher / len(words), atol=1e-6)


def test_label_noise_draws_from_the_model_by_the_generator_it_is_given() -> None:
    batch, model, draws = batch_of([2], [0]), Bigram(), 3000
    plain = gradient_of(model, batch)
    probabilities = model(**batch.inputs).logits[0, 0].softmax(dim=-1).detach().numpy()
    noise = {}
    for label in range(WORDS):
        noise[label] = gradient_of(model, batch_of([2], [label]))
    counts = np.zeros(WORDS)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for seed in range(draws):
        handed = moved(LabelNoise(1.0), [batch], seed=seed) - plain
        counts[min(noise, key=lambda label: float(np.abs(handed - noise[label]).max()))] += 1
    assert torch.equal(torch.get_rng_state(), before)
    # Each within 5 standard deviations: false alarms below 4 * 6e-7.
    deviation = np.sqrt(draws * probabilities * (1 - probabilities))
    assert (np.abs(counts - draws * probabilities) < 5 * deviation).all()
    assert np.array_equal(moved(LabelNoise(1.0), [batch], seed=3), moved(LabelNoise(1.0), [batch], seed=3))


# The adversary. -------------------------------------------------------------------------------------------------------


def numpy_fit(features: np.ndarray, targets: np.ndarray, ridge: float) -> float:
    half = len(features) // 2
    mean, target_mean = features[:half].mean(axis=0), targets[:half].mean(axis=0)
    penalty = ridge * np.square(features[:half] - mean).sum(axis=0).mean()
    model = Ridge(alpha=penalty, solver="svd").fit(features[:half], targets[:half])
    predicted = model.predict(features[half:]).reshape(targets[half:].shape)  # it drops an axis of one class
    residual = np.square(targets[half:] - predicted).sum()
    return float(1 - residual / np.square(targets[half:] - target_mean).sum())


@pytest.mark.parametrize(("rows", "width", "classes"), [(40, 3, 2), (12, 9, 1), (200, 8, 5)])
def test_linear_fit_equals_ridge_regression(rows: int, width: int, classes: int) -> None:
    rng = np.random.default_rng(rows)
    features = rng.standard_normal((rows, width)) * 3 + 1
    targets = features[:, :1] @ rng.standard_normal((1, classes)) + rng.standard_normal((rows, classes))
    found = linear_fit(torch.from_numpy(features), torch.from_numpy(targets)).item()
    assert found == pytest.approx(numpy_fit(features, targets, 1e-3), rel=1e-9)
    assert found <= 1


def test_linear_fit_of_targets_that_are_linear_and_of_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    exact = features @ torch.randn(5, 2, generator=generator, dtype=torch.float64) + 7
    assert linear_fit(features, exact) == pytest.approx(1, abs=1e-5)
    # Held out, so noise is explained less than not at all: about −d/n with deviation of that order.
    noise = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    assert -0.2 < linear_fit(features, noise).item() < 0.05
    assert math.isfinite(linear_fit(torch.ones(8, 3), torch.eye(2).repeat(4, 1)).item())


def test_the_gradient_of_linear_fit_equals_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    # The ridge follows the features' scale and is taken for a constant; without it the derivative is whole.
    monkeypatch.setattr(algorithms, "_FIT_RIDGE", 0.0)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(20, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda given: linear_fit(given, targets), (features,))


@pytest.fixture(scope="module")
def language() -> Any:
    return random_hmm(0, states=4, words=12, lengths=(6, 8), emission_temperature=0.2)


@pytest.fixture(scope="module")
def tokenizer(language: Any) -> Any:
    return language.tokenizer(max_length=16)


@pytest.fixture(scope="module")
def blocks(language: Any, tokenizer: Any) -> Blocks:
    documents = encode([" ".join(words) for words in language.sample(600, np.random.default_rng(0))], tokenizer)
    return pack(documents, end_of_text=tokenizer.eos_token_id, block_size=16)


def labelled_documents(language: Any, tokenizer: Any, number: int, count: int) -> list[LabelledTokens]:
    [task] = [task for task in language.tasks if task.name == "hmm_state"]
    examples = task.sample(count, np.random.default_rng([5, number]))
    tokens = encode([" ".join(example.words) for example in examples], tokenizer)
    return [LabelledTokens(row, example.label) for row, example in zip(tokens, examples, strict=True)]


def explained(model: Any, documents: Sequence[LabelledTokens]) -> float:
    states, labels = [], []
    with torch.no_grad():
        for document in documents:
            output = model(torch.tensor([list(document.tokens)]), output_hidden_states=True)
            states.append(output.hidden_states[-1][0, -1])
            labels.append(document.label)
    targets = torch.nn.functional.one_hot(torch.tensor(labels)).float()
    return linear_fit(torch.stack(states), targets).item()


def test_the_adversary_hides_the_labels_and_keeps_the_loss(language: Any, tokenizer: Any, blocks: Blocks) -> None:
    def labelled(number: int, count: int) -> list[LabelledTokens]:
        return labelled_documents(language, tokenizer, number, count)

    held_out = labelled(10**6, 400)
    shares, losses = {}, {}
    for algorithm in (AdamW(), Adversarial(strength=2.0, documents=64, every=2)):
        model = build_model(ModelConfig(width=16, depth=1, heads=2, context=16), tokenizer, seed=0)
        config = TrainConfig(steps=150, batch_size=8, learning_rate=1e-2, algorithm=algorithm)
        trainer = Trainer(model, blocks, config, seed=0, labelled=labelled)
        losses[algorithm.name] = np.mean(trainer.run(150)[-20:])
        shares[algorithm.name] = explained(model, held_out)
    assert shares["adamw"] > 0.5
    assert shares["adversarial"] < shares["adamw"] / 2
    assert losses["adversarial"] < losses["adamw"] + 0.2 < math.log(12)


def test_the_adversary_sees_the_last_state_of_each_document(language: Any, tokenizer: Any) -> None:
    documents = labelled_documents(language, tokenizer, 0, 64)
    model = build_model(ModelConfig(width=16, depth=1, heads=2, context=16), tokenizer, seed=0).eval()
    setting = Setting(
        model=model,
        forward=model,
        loss=lambda batch: torch.zeros(()),
        backward=lambda scalar: scalar.backward(),
        max_grad_norm=math.inf,
        parameter_groups=[{"params": list(model.parameters())}],
        labelled=lambda number, count: documents[:count],
    )
    rule: Any = Adversarial(documents=64).start(setting)
    assert len({len(document.tokens) for document in documents}) > 1
    assert rule._explained(0).item() == pytest.approx(explained(model, documents), abs=1e-4)


@pytest.mark.parametrize("algorithm", [Sgd(), Sam(), Svag(2), LabelNoise(), Adversarial(documents=8, every=1)])
def test_every_forward_pass_is_in_the_dtype_of_the_training(
    language: Any, tokenizer: Any, blocks: Blocks, algorithm: Algorithm
) -> None:
    model = build_model(ModelConfig(width=16, depth=1, heads=2, context=16), tokenizer, seed=0)
    config = TrainConfig(steps=1, batch_size=2, algorithm=algorithm)
    trainer = Trainer(
        model,
        blocks,
        config,
        seed=0,
        dtype=torch.bfloat16,
        labelled=lambda number, count: labelled_documents(language, tokenizer, number, count),
    )
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.run(1)
    assert len(seen) >= 1
    assert {*seen} == {torch.bfloat16}


def test_the_adversary_without_documents_is_an_error(tokenizer: Any, blocks: Blocks) -> None:
    model = build_model(ModelConfig(width=16, depth=1, heads=2, context=16), tokenizer, seed=0)
    with pytest.raises(ValueError, match="adversarial: expected a source of labelled documents, got none"):
        Trainer(model, blocks, TrainConfig(steps=1, algorithm=Adversarial()), seed=0)


# In the trainer. ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amplification", [1, 4])
def test_the_trainer_gives_svag_its_share_of_the_rate(tokenizer: Any, blocks: Blocks, amplification: int) -> None:
    """With one block over and over, SVAG's gradient is that of SGD, and the step is in proportion to the rate."""
    same = Blocks(blocks.tokens[:1].repeat(8, axis=0), blocks.positions[:1].repeat(8, axis=0))
    steps = {}
    for algorithm in (Sgd(), Svag(amplification)):
        model = build_model(ModelConfig(width=16, depth=1, heads=2, context=16), tokenizer, seed=0)
        before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
        config = TrainConfig(
            steps=1, batch_size=2, learning_rate=0.5, weight_decay=0, max_grad_norm=math.inf, algorithm=algorithm
        )
        Trainer(model, same, config, seed=0).run(1)
        steps[algorithm.name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before
    torch.testing.assert_close(amplification * steps["svag"], steps["sgd"], rtol=1e-3, atol=1e-6)


_ONE_AND_TWO_PROCESSES = """
import os, sys, traceback
import numpy as np, torch
from accelerate import PartialState
from harness_ext.lab.languages.hmm import random_hmm
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.train import Blocks, TrainConfig, train
from harness_ext.lab.algorithms import Sgd, Svag

def work(rank, processes):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    if processes == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    torch.set_num_threads(1)
    tokenizer = random_hmm(0, states=4, words=12, lengths=(6, 8)).tokenizer(max_length=8)
    # Each block one document, so that all have as many predicted tokens and means of means are means.
    tokens = np.random.default_rng(0).integers(12, size=(48, 8))
    blocks = Blocks(tokens, np.tile(np.arange(8), (48, 1)))
    saved = {}
    for algorithm in (Sgd(momentum=0.5), Svag(2)):
        model = build_model(ModelConfig(width=16, depth=1, heads=2, context=8), tokenizer, seed=0)
        # Through two batches of SVAG the order of blocks differs between one process and two.
        size, steps = (8, 10) if algorithm.name == "sgd" else (24, 1)
        config = TrainConfig(steps=steps, batch_size=size // processes, learning_rate=0.2, algorithm=algorithm)
        result = train(model, blocks, config, seed=0, show_progress=False)
        saved |= {f"{algorithm.name}.{name}": value for name, value in model.state_dict().items()}
        saved[f"{algorithm.name}.tokens"] = torch.tensor(result.tokens)
    assert PartialState().num_processes == processes
    if PartialState().is_main_process:
        torch.save(saved, f"{sys.argv[1]}/{processes}")
    PartialState().destroy_process_group()

# As forks of a process that has imported what takes seconds, and met like those of a launcher.
for processes in (1, 2):
    children = []
    for rank in range(processes):
        child = os.fork()
        if not child:
            try:
                work(rank, processes)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(1)
"""


def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _ONE_AND_TWO_PROCESSES, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (torch.load(tmp_path / processes, weights_only=True) for processes in ("1", "2"))
    assert one.keys() == two.keys()
    for name in one:
        if name.startswith("sgd."):
            torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6, msg=name)
    assert two["svag.tokens"] == one["svag.tokens"]


# Settings. ------------------------------------------------------------------------------------------------------------

_bases = st.one_of(
    st.builds(AdamW, betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99))),
    st.builds(Sgd, momentum=st.floats(0, 0.99)),
)
_positive = st.floats(1e-6, 1e6)
_all = st.one_of(
    _bases,
    st.builds(Sam, rho=_positive, base=_bases),
    st.builds(LabelNoise, strength=_positive, base=_bases),
    st.builds(Svag, amplification=st.floats(1, 1e6)),
    st.builds(
        Adversarial, strength=_positive, documents=st.integers(2, 99).map(lambda n: 2 * n), every=st.integers(1, 9)
    ),
)


@settings(max_examples=200, deadline=None)
@given(_all)
def test_settings_survive_json(algorithm: Algorithm) -> None:
    assert algorithm_from_dict(json.loads(json.dumps(algorithm_to_dict(algorithm)))) == algorithm


def test_all_algorithms_have_defaults_and_their_own_name() -> None:
    assert sorted(ALGORITHMS) == ["adamw", "adversarial", "label_noise", "sam", "sgd", "svag"]
    for name in ALGORITHMS:
        algorithm = algorithm_from_dict({"name": name})
        assert algorithm.name == name
        assert algorithm_to_dict(algorithm)["name"] == name


@pytest.mark.parametrize(
    ("given_settings", "error", "message"),
    [
        (
            {"name": "adam"},
            KeyError,
            "unknown algorithm 'adam'. Known: adamw, sgd, sam, label_noise, svag, adversarial",
        ),
        ({}, KeyError, "unknown algorithm None"),
        ({"name": "sgd", "nesterov": True}, ValueError, "sgd: unknown setting 'nesterov'. Known: momentum"),
        ({"name": "sgd", "momentum": 1.0}, ValueError, "sgd: momentum must be at least 0 and below 1, got 1.0"),
        ({"name": "sam", "rho": 0}, ValueError, "sam: rho must be above 0"),
        ({"name": "sam", "rho": math.nan}, ValueError, "sam: rho must be above 0"),
        ({"name": "sam", "base": "adamw"}, ValueError, "sam: base must be the settings of adamw or sgd"),
        (
            {"name": "sam", "base": {"name": "sam"}},
            ValueError,
            "sam: base must be the settings of adamw or sgd.* got sam",
        ),
        ({"name": "sam", "base": {"name": "sgdd"}}, KeyError, "unknown algorithm 'sgdd'"),
        ({"name": "label_noise", "strength": -1}, ValueError, "label_noise: strength must be above 0"),
        ({"name": "label_noise", "base": {"name": "svag"}}, ValueError, "label_noise: base must be.* got svag"),
        ({"name": "svag", "amplification": 0.5}, ValueError, "svag: amplification must be at least 1"),
        ({"name": "svag", "amplification": math.inf}, ValueError, "svag: amplification must be at least 1"),
        ({"name": "adversarial", "documents": 5}, ValueError, "adversarial: documents must be even and at least 4"),
        ({"name": "adversarial", "every": 0}, ValueError, "every at least 1"),
        ({"name": "adversarial", "strength": 0}, ValueError, "adversarial: strength must be above 0"),
    ],
)
def test_wrong_settings_are_named(given_settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        algorithm_from_dict(given_settings)


@pytest.mark.parametrize("algorithm", [LabelNoise(), Adversarial()])
def test_algorithms_of_the_cross_entropy_refuse_the_quad_loss(
    algorithm: Algorithm, blocks: Blocks, tokenizer: Any
) -> None:
    from harness_ext.lab.quad import QuadModel

    model = QuadModel(build_model(ModelConfig(width=16, depth=1, heads=2, context=16), tokenizer, seed=0))
    with pytest.raises(ValueError, match=f"{algorithm.name} has the objective cross_entropy, not quad"):
        Trainer(model, blocks, TrainConfig(steps=1, algorithm=algorithm), seed=0, objective="quad")
