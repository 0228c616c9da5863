"""Quad heads: the closed form, what the trained heads gain over it, and what they refuse."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_ext.contracts import TokenStates
from harness_ext.engine.quad_head import QuadHead, train_quad_head

VOCABULARY, DIM = 30, 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def embedding(rng: np.random.Generator, *, condition: float = 1e3, rank: int = DIM) -> np.ndarray:
    """Φ whose singular values span `condition`, so that those of ΦᵀΦ span its square."""
    left, _, right = np.linalg.svd(rng.normal(size=(VOCABULARY, DIM)), full_matrices=False)
    values = np.geomspace(condition, 1, DIM) * (np.arange(DIM) < rank)
    return (left * values @ right).astype(np.float32)


def random_texts(rng: np.random.Generator, count: int) -> list[TokenStates]:
    """States that say something linear about the next token, with entries of very different sizes and means."""
    reader = rng.normal(size=(DIM, VOCABULARY))
    texts = []
    for _ in range(count):
        length = int(rng.integers(1, 9))
        states = rng.normal(size=(length, DIM))
        logits = states @ reader
        chosen = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        tokens = np.concatenate([rng.integers(0, VOCABULARY, size=1), chosen[:-1]])
        scaled = 5.0 + states * np.geomspace(0.1, 10, DIM)
        texts.append(TokenStates(tokens.astype(np.int64), scaled.astype(np.float32)))
    return texts


def quad_loss(features: np.ndarray, next_tokens: np.ndarray, phi: np.ndarray) -> float:
    """The definition, through all of V."""
    wide, phi = features.astype(np.float64), phi.astype(np.float64)
    linear = np.einsum("nd,nd->n", wide, phi[next_tokens])
    return float((-linear + 0.5 * ((wide @ phi.T) ** 2).sum(axis=1)).mean())


def pairs(texts: list[TokenStates]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.concatenate([text.states[:-1] for text in texts]),
        np.concatenate([text.token_ids[1:] for text in texts]),
    )


def loss_of(head: QuadHead, texts: list[TokenStates], phi: np.ndarray) -> float:
    """Of every prefix by itself, as prompts are."""
    prefixes = [text.states[:end] for text in texts for end in range(1, len(text.token_ids))]
    return quad_loss(head.features_of_texts(prefixes), pairs(texts)[1], phi)


def closed_form(states: np.ndarray, next_tokens: np.ndarray, phi: np.ndarray, *, ridge: float = 0.0) -> np.ndarray:
    """(ΦᵀΦ)⁻¹ E[φ_w hᵀ] (E[h hᵀ] + λI)⁻¹ in float64, λ the ridge times the mean eigenvalue of E[h hᵀ]."""
    wide, phi = states.astype(np.float64), phi.astype(np.float64)
    cross = phi[next_tokens].T @ wide / len(wide)
    second = wide.T @ wide / len(wide)
    second += ridge * np.trace(second) / DIM * np.eye(DIM)
    return np.linalg.inv(phi.T @ phi) @ cross @ np.linalg.inv(second)


def test_the_linear_head_is_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    phi, texts = embedding(rng), random_texts(rng, 400)
    # The second text is held out; with a share of almost 0 it is the only one.
    head = train_quad_head("linear", texts, phi, seed=0, validation_share=1e-9, ridges=(0.0,))
    long_enough = [text for text in texts if len(text.token_ids) > 1]
    states, next_tokens = pairs([long_enough[0], *long_enough[2:]])
    assert head.report.train_tokens == len(states)
    assert head.report.validation_tokens == len(long_enough[1].token_ids) - 1
    matrix = closed_form(states, next_tokens, phi)
    np.testing.assert_allclose(head.features(states), states @ matrix.T, rtol=1e-3, atol=1e-6)
    best = quad_loss(states @ matrix.T, next_tokens, phi)
    assert head.report.linear_train_loss == pytest.approx(best, rel=1e-5)
    assert quad_loss(head.features(states), next_tokens, phi) == pytest.approx(best, rel=1e-4)
    # An optimum: whatever is added, the loss is higher.
    for _ in range(20):
        other = matrix * (1 + 0.01 * rng.normal(size=matrix.shape))
        assert quad_loss(states @ other.T, next_tokens, phi) > best


def test_a_ridge_is_that_of_the_mean_eigenvalue_and_is_chosen_by_held_out_texts() -> None:
    rng = np.random.default_rng(1)
    phi, texts = embedding(rng), random_texts(rng, 40)
    heads = [train_quad_head("linear", texts, phi, seed=0, validation_share=0.5, ridges=(r,)) for r in (0.0, 1e-3, 1.0)]
    chosen = train_quad_head("linear", texts, phi, seed=0, validation_share=0.5, ridges=(0.0, 1e-3, 1.0))
    losses = [head.report.linear_validation_loss for head in heads]
    assert len(set(losses)) == 3
    assert chosen.report.linear_validation_loss == min(losses)
    assert chosen.report.ridge == (0.0, 1e-3, 1.0)[int(np.argmin(losses))]

    head = train_quad_head("linear", texts, phi, seed=0, validation_share=1e-9, ridges=(0.1,))
    long_enough = [text for text in texts if len(text.token_ids) > 1]
    states, next_tokens = pairs([long_enough[0], *long_enough[2:]])
    matrix = closed_form(states, next_tokens, phi, ridge=0.1)
    np.testing.assert_allclose(head.features(states), states @ matrix.T, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "mlp", "block"])
def test_the_reported_loss_is_the_definition(kind: str) -> None:
    rng = np.random.default_rng(2)
    phi, texts = embedding(rng), random_texts(rng, 60)
    head = train_quad_head(kind, texts, phi, seed=0, validation_share=1e-9, epochs=3, batch_tokens=32)
    held_out = [text for text in texts if len(text.token_ids) > 1][1:2]
    assert loss_of(head, held_out, phi) == pytest.approx(head.report.validation_loss, abs=1e-5)
    if kind == "linear":
        assert head.report.train_losses == head.report.validation_losses == ()
    else:
        assert len(head.report.train_losses) == len(head.report.validation_losses) == 3
        assert head.report.validation_loss <= head.report.linear_validation_loss


def markov_texts(rng: np.random.Generator, count: int) -> tuple[list[TokenStates], np.ndarray]:
    """Texts of a Markov chain, whose table is returned; states are codes of their tokens.

    The best head is a function of the state that is not linear: 30 tokens share 6 dimensions.
    """
    table = rng.dirichlet(np.full(VOCABULARY, 0.05), size=VOCABULARY)
    codes = rng.normal(size=(VOCABULARY, DIM))
    texts = []
    for _ in range(count):
        tokens = [int(rng.integers(0, VOCABULARY))]
        while len(tokens) < 12:
            tokens.append(int(rng.choice(VOCABULARY, p=table[tokens[-1]])))
        texts.append(TokenStates(np.array(tokens), codes[tokens].astype(np.float32)))
    return texts, table


def topic_texts(rng: np.random.Generator, count: int) -> tuple[list[TokenStates], np.ndarray]:
    """Texts of independent tokens of one of 4 topics, whose distributions are returned.

    The first state shows the topic, and that it does; the others are noise.
    """
    topics = rng.dirichlet(np.full(VOCABULARY, 0.1), size=4)
    codes = rng.normal(size=(4, DIM)) + 4 * np.eye(DIM)[0]
    texts = []
    for number in range(count):
        topic = number % 4
        states = rng.normal(size=(11, DIM))
        states[0] = codes[topic]
        tokens = np.concatenate([[topic], rng.choice(VOCABULARY, size=10, p=topics[topic])])
        texts.append(TokenStates(tokens, states.astype(np.float32)))
    return texts, topics


def least_loss(distributions: np.ndarray, phi: np.ndarray) -> float:
    """−½E‖Π p‖² over distributions (n, V), Π the projection on the columns of Φ."""
    basis = np.linalg.svd(phi.astype(np.float64), full_matrices=False)[0]
    return float(-0.5 * ((distributions @ basis) ** 2).sum(axis=1).mean())


def test_an_mlp_comes_close_to_the_optimum_where_a_linear_head_cannot() -> None:
    rng = np.random.default_rng(3)
    phi = embedding(rng)
    texts, table = markov_texts(rng, 700)
    seen, fresh = texts[:500], texts[500:]
    linear = train_quad_head("linear", seen, phi, seed=0)
    mlp = train_quad_head("mlp", seen, phi, seed=0, batch_tokens=512, learning_rate=2e-2)
    optimum = least_loss(table[np.concatenate([text.token_ids[:-1] for text in fresh])], phi)
    assert linear.report.linear_validation_loss == mlp.report.linear_validation_loss
    assert loss_of(mlp, fresh, phi) < optimum + 0.25 * (loss_of(linear, fresh, phi) - optimum)


def test_a_block_uses_earlier_tokens() -> None:
    rng = np.random.default_rng(4)
    phi = embedding(rng)
    texts, topics = topic_texts(rng, 800)
    seen, fresh = texts[:600], texts[600:]
    losses = {}
    for kind in ("linear", "mlp", "block"):
        head = train_quad_head(kind, seen, phi, seed=0, epochs=8, batch_tokens=512, learning_rate=2e-2)
        losses[kind] = loss_of(head, fresh, phi)
    # One state alone says at most what the tokens' frequencies say.
    assert losses["mlp"] < losses["linear"]
    optimum = least_loss(topics, phi)
    assert losses["block"] < optimum + 0.6 * (losses["mlp"] - optimum)


def test_the_result_depends_on_the_seed_alone() -> None:
    rng = np.random.default_rng(6)
    phi, texts = embedding(rng), random_texts(rng, 40)
    states = [text.states for text in texts]
    for kind in ("mlp", "block"):
        results = []
        for global_seed, seed in ((0, 1), (1, 1), (1, 2)):
            torch.manual_seed(global_seed)
            before = torch.get_rng_state()
            head = train_quad_head(kind, texts, phi, seed=seed, epochs=2, batch_tokens=64, validation_share=0.3)
            assert torch.equal(torch.get_rng_state(), before)
            results.append((head.report, head.features_of_texts(states)))
        assert results[0][0] == results[1][0]
        np.testing.assert_array_equal(results[0][1], results[1][1])
        assert results[0][0] != results[2][0]


def test_training_stops_early_and_keeps_the_best_epoch() -> None:
    rng = np.random.default_rng(7)
    phi = embedding(rng)
    # Tokens that nothing predicts: an addition can only overfit.
    texts = [
        TokenStates(rng.integers(0, VOCABULARY, size=6), rng.normal(size=(6, DIM)).astype(np.float32))
        for _ in range(60)
    ]
    options = {"seed": 0, "epochs": 50, "batch_tokens": 16, "learning_rate": 3e-2, "validation_share": 0.5}
    report = train_quad_head("mlp", texts, phi, patience=2, **options).report
    losses = [report.linear_validation_loss, *report.validation_losses]
    assert len(report.validation_losses) == report.best_epoch + 2 < 50
    assert report.best_epoch == int(np.argmin(losses))
    assert report.validation_loss == min(losses)


@pytest.mark.parametrize("kind", ["linear", "mlp", "block"])
def test_a_singular_gram_matrix_leaves_out_the_directions_that_do_not_matter(kind: str) -> None:
    rng = np.random.default_rng(8)
    phi, texts = embedding(rng, condition=10, rank=DIM - 2), random_texts(rng, 60)
    head = train_quad_head(kind, texts, phi, seed=0, epochs=2, batch_tokens=64)
    assert head.report.gram_rank == DIM - 2
    features = head.features_of_texts([text.states for text in texts])
    null = np.linalg.svd(phi.astype(np.float64))[2][DIM - 2 :]
    assert np.abs(features @ null.T).max() < 1e-5 * np.abs(features).max()
    assert np.isfinite(features).all()
    assert np.abs(features).max() > 0


@pytest.mark.parametrize("kind", ["linear", "mlp", "block"])
def test_constant_and_repeated_state_entries_do_no_harm(kind: str) -> None:
    rng = np.random.default_rng(9)
    phi = embedding(rng)
    texts = [
        TokenStates(
            text.token_ids, np.concatenate([text.states[:, :3], text.states[:, :2], 0 * text.states[:, :1]], axis=1)
        )
        for text in random_texts(rng, 60)
    ]
    head = train_quad_head(kind, texts, phi, seed=0, epochs=2, batch_tokens=64)
    assert np.isfinite(head.features_of_texts([text.states for text in texts])).all()
    assert -0.5 <= head.report.validation_loss <= 0


def test_a_linear_head_keeps_no_text() -> None:
    rng = np.random.default_rng(10)
    phi = embedding(rng)
    alive: list[weakref.ref[np.ndarray]] = []

    def stream() -> Iterator[TokenStates]:
        for _ in range(20):
            [text] = random_texts(rng, 1)
            tokens, states = np.tile(text.token_ids, 4000), np.tile(text.states, (4000, 1))
            alive.append(weakref.ref(states))
            yield TokenStates(tokens, states)
            del states
            assert sum(reference() is not None for reference in alive) <= 4

    train_quad_head("linear", stream(), phi, seed=0)


GOOD = TokenStates(np.array([1, 2, 3]), np.ones((3, DIM), dtype=np.float32))
PHI = embedding(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("texts", "phi", "options", "error", "message"),
    [
        ([GOOD] * 3, PHI, {"kind": "tree"}, KeyError, "unknown kind of Quad head 'tree'. Known: linear, mlp, block"),
        ([GOOD] * 3, PHI, {"epochs": 0}, ValueError, "epochs, patience and batch_tokens must be at least 1, got 0"),
        ([GOOD] * 3, PHI, {"validation_share": 1.0}, ValueError, "between 0 and 1"),
        ([GOOD] * 3, PHI, {"ridges": ()}, ValueError, "ridges must be"),
        ([], PHI, {}, ValueError, "at least 2 texts of at least 2 tokens.*got 0"),
        ([GOOD, TokenStates(np.array([1]), GOOD.states[:1])], PHI, {}, ValueError, "at least 2 texts.*got 1"),
        ([GOOD, GOOD._replace(token_ids=np.array([1, 2]))], PHI, {}, ValueError, r"got \(3, 6\) for 2 token ids"),
        (
            [GOOD, GOOD._replace(token_ids=np.array([1, 2, VOCABULARY]))],
            PHI,
            {},
            ValueError,
            "from 0 to 29, got 1 to 30",
        ),
        (
            [GOOD, GOOD._replace(states=GOOD.states * np.nan)],
            PHI,
            {},
            ValueError,
            "text 1 has states that are not finite",
        ),
        ([GOOD] * 3, PHI[:, :4], {}, ValueError, r"expected states of shape \(T, 4\).*as Φ has 4 columns"),
        ([GOOD] * 3, PHI[0], {}, ValueError, r"shape \(V, d\), got \(6,\)"),
        ([GOOD] * 3, PHI * 0, {}, ValueError, "the output embedding is 0"),
        ([GOOD] * 3, PHI * np.nan, {}, ValueError, "the output embedding holds values that are not finite"),
    ],
)
def test_wrong_input_is_an_error(
    texts: list[TokenStates], phi: np.ndarray, options: dict, error: type[Exception], message: str
) -> None:
    options = {"kind": "linear", "seed": 0, **options}
    with pytest.raises(error, match=message):
        train_quad_head(options.pop("kind"), texts, phi, **options)


def test_single_states_are_not_enough_for_a_block() -> None:
    with pytest.raises(TypeError, match="expected features_of_texts"):
        HEADS["block"].features(np.ones((2, DIM), dtype=np.float32))


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_features_do_not_depend_on_the_other_texts(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [rng.normal(size=(length, DIM)).astype(np.float32) for length in lengths]
    for head in HEADS.values():
        together = head.features_of_texts(texts)
        assert together.dtype == np.float32
        apart = np.concatenate([head.features_of_texts([text]) for text in texts])
        np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-5)
        if head.kind != "block":
            np.testing.assert_allclose(together, head.features(np.stack([text[-1] for text in texts])), rtol=1e-5)


def _heads() -> dict[str, QuadHead]:
    rng = np.random.default_rng(5)
    phi, texts = embedding(rng), random_texts(rng, 60)
    return {
        kind: train_quad_head(kind, texts, phi, seed=0, epochs=2, batch_tokens=64, learning_rate=3e-2)
        for kind in ("linear", "mlp", "block")
    }


HEADS = _heads()
