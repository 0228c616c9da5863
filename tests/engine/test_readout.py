from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import CONFIGS, tiny_model, tiny_tokenizer

from harness_ext.contracts import CONDITIONAL_MEAN, RANDOM_PROJECTION, Feature
from harness_ext.engine import readout as readout_module
from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.plan import Tree

TEXTS = ("the film is good. This movie is", "I hated it, all of it", "x", "the good and the bad", "a film")


def engine_and_states(model) -> tuple[LastStateModel, torch.Tensor, torch.Tensor]:
    """The engine, f(s) of TEXTS (n, d), and the model's own next-token distributions (n, V), by plain forwards."""
    engine = LastStateModel(model, device=torch.device("cpu"))
    rows = [tuple(tiny_tokenizer()(text)["input_ids"]) for text in TEXTS]
    states = torch.cat(
        [engine.states([Tree((i,), len(row))], rows, []).vectors[Feature()] for i, row in enumerate(rows)]
    )
    with torch.no_grad():
        logits = torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])
    return engine, states, logits.float().softmax(-1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time and blocks of 100 tokens, so that every boundary is crossed."""
    monkeypatch.setattr(readout_module, "CHUNK_VALUES", 2 * 320)
    monkeypatch.setattr(readout_module, "BLOCK_ROWS", 100)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_conditional_means_are_those_of_the_models_own_distribution(family: str) -> None:
    """Soft-capping, logit scale and projections included; Φ is the weight of the output embedding."""
    model = tiny_model(family)
    engine, states, probabilities = engine_and_states(model)
    _, mixed = engine.readout.read(states, [[]] * len(TEXTS), [CONDITIONAL_MEAN])
    expected = probabilities @ model.get_output_embeddings().weight.detach()
    torch.testing.assert_close(mixed[CONDITIONAL_MEAN], expected, atol=1e-4, rtol=1e-4)


def test_log_probabilities_do_not_depend_on_what_else_is_read() -> None:
    engine, states, probabilities = engine_and_states(tiny_model("gemma2"))
    tokens = [[3, 5], [], [7], [0, 1, 2], [319]]
    alone, _ = engine.readout.read(states, tokens)
    beside, _ = engine.readout.read(states, tokens, [CONDITIONAL_MEAN, RANDOM_PROJECTION])
    for row, (first, second) in enumerate(zip(alone, beside, strict=True)):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, probabilities[row, tokens[row]].log(), atol=1e-4, rtol=1e-4)


def test_random_projections_are_orthonormal_and_the_same_in_every_run() -> None:
    first, states, probabilities = engine_and_states(tiny_model("gpt2"))
    matrix = first.readout._random_matrix()
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(matrix.shape[1]), atol=1e-5, rtol=0)
    _, mixed = first.readout.read(states, [[]] * len(TEXTS), [RANDOM_PROJECTION])
    torch.testing.assert_close(mixed[RANDOM_PROJECTION], probabilities @ matrix, atol=1e-5, rtol=1e-5)
    second = LastStateModel(tiny_model("gpt2"), device=torch.device("cpu"))
    assert torch.equal(second.readout._random_matrix(), matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept_bytes", [2**29, 0])
def test_blocks_of_a_large_embedding(dtype: torch.dtype, kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout_module, "KEPT_WEIGHT_BYTES", kept_bytes)
    model = tiny_model("llama", dtype=dtype)
    engine, states, _ = engine_and_states(model)
    weight = model.get_output_embeddings().weight.detach().float()
    probabilities = (states.float() @ weight.T).softmax(-1)
    _, mixed = engine.readout.read(states, [[]] * len(TEXTS), [CONDITIONAL_MEAN])
    torch.testing.assert_close(mixed[CONDITIONAL_MEAN], probabilities @ weight, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(engine.readout.gram(), (weight.double().T @ weight.double()).numpy(), rtol=1e-6)


def test_the_embedding_of_an_adapted_head_is_what_it_does() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    ).eval()
    engine, states, probabilities = engine_and_states(adapted)
    head = adapted.get_output_embeddings()
    expected = head.base_layer.weight + head.get_delta_weight("default")
    torch.testing.assert_close(engine.readout.output_embedding(), expected.detach(), atol=1e-4, rtol=1e-4)
    _, mixed = engine.readout.read(states, [[]] * len(TEXTS), [CONDITIONAL_MEAN])
    torch.testing.assert_close(mixed[CONDITIONAL_MEAN], probabilities @ expected.detach(), atol=1e-4, rtol=1e-4)


def test_a_head_that_is_not_affine_has_no_embedding() -> None:
    model = tiny_model("llama")

    class Curved(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden).square()

    curved = Curved(32, 320)
    model.set_output_embeddings(curved)
    with pytest.raises(TypeError, match="not affine"):
        LastStateModel(model, device=torch.device("cpu")).readout.gram()


def test_a_padded_vocabulary_takes_part_in_the_distribution_as_it_does_in_the_model() -> None:
    """The tokenizer has fewer tokens than the model has rows; the model's own softmax runs over the rows."""
    model = tiny_model("gpt2")
    assert len(tiny_tokenizer()) < model.config.vocab_size
    engine, states, probabilities = engine_and_states(model)
    everything = engine.readout.probabilities(states)
    np.testing.assert_allclose(everything.sum(1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(everything, probabilities, rtol=1e-3, atol=1e-7)


def test_states_of_whole_texts_are_those_of_every_prefix() -> None:
    model = tiny_model("opt")
    engine = LastStateModel(model, device=torch.device("cpu"))
    rows = [tuple(tiny_tokenizer()(text)["input_ids"]) for text in TEXTS]
    for row, states in zip(rows, engine.token_states(rows), strict=True):
        assert len(states) == len(row)
        for length in range(1, len(row) + 1):
            alone = engine.states([Tree((0,), length)], [row[:length]], []).vectors[Feature()][0]
            torch.testing.assert_close(states[length - 1], alone, atol=1e-4, rtol=1e-4)


def test_the_embedding_of_a_head_that_is_offloaded(tmp_path) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = tiny_model("llama").lm_head.weight.detach()
    model = tiny_model("llama")
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    engine = LastStateModel(model, device=torch.device("cpu"))
    torch.testing.assert_close(engine.readout.output_embedding(), expected, atol=1e-5, rtol=1e-5)


def test_a_wrapped_head_keeps_its_wrapper() -> None:
    """accelerate's `device_map` puts a forward of its own into the instance."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    calls: list[int] = []
    original = model.lm_head.forward

    def wrapper(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(hidden)

    model.lm_head.forward = wrapper
    engine, states, _ = engine_and_states(model)
    before = len(calls)
    logits = engine.readout.logits(states)
    assert len(calls) == before
    assert model.lm_head.forward is wrapper
    torch.testing.assert_close(logits, states.float() @ model.lm_head.weight.detach().float().T, atol=1e-4, rtol=1e-4)
