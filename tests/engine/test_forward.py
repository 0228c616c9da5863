from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracles import continuation_log_prob, hidden_states, last_state
from tiny import CONFIGS, tiny_model, tiny_tokenizer

from harness_ext.contracts import Feature, PromptRequest
from harness_ext.engine.answer import RunSummary, answer_requests
from harness_ext.engine.fingerprint import model_fingerprint
from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.tokens import PromptEncoder

TEXTS = (
    "the film is good. This movie is",
    "I hated it, all of it and then some more of it. It was",
    "x",
    "the good and the bad This movie is",
)
WORDS = (" great", " terrible", " gr", " outstanding work")
SINGLE = (" the", " is", " movie", " ,")  # one token each
FEATURES = (Feature(), Feature(1), Feature(0), Feature(-1, "mean"), Feature("last", "mean"))


def run(model, requests=None, *, texts=TEXTS, max_rows: int | None = 3, max_length: int = 128, is_spread=False):
    requests = requests or [PromptRequest(WORDS, FEATURES)] * len(texts)
    return answer_requests(
        texts,
        requests,
        model=LastStateModel(model, device=torch.device("cpu"), is_spread=is_spread),
        encoder=PromptEncoder(tiny_tokenizer(), max_length=max_length, add_special_tokens=None, prefix_token_id=0),
        store=None,
        max_rows=max_rows,
        max_tokens=4096,
        progress=False,
    )


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest):
    model = tiny_model(request.param)
    return model, run(model)[0]


def test_states_are_those_of_separate_unpadded_forwards(family) -> None:
    model, answers = family
    tokenizer = tiny_tokenizer()
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = tokenizer(text)["input_ids"]
        layers = hidden_states(model, ids)
        final = last_state(model, ids)
        expected = {
            Feature(): final,
            Feature(1): layers[1][-1],
            Feature(0): layers[0][-1],
            Feature(-1, "mean"): layers[-1].mean(0),
        }
        for feature, value in expected.items():
            found = torch.from_numpy(answer.source.take([answer.row], feature)[0])
            torch.testing.assert_close(found, value, atol=1e-4, rtol=1e-4, msg=f"{text!r}, {feature}")


def test_log_probabilities_of_words_of_any_number_of_tokens(family) -> None:
    """Soft-capping (Gemma-2), logit scale (Cohere), projections (OPT), windows and state spaces included."""
    model, answers = family
    tokenizer = tiny_tokenizer()
    for text, answer in zip(TEXTS, answers, strict=True):
        context = tokenizer(text)["input_ids"]
        for word, found in zip(WORDS, answer.log_probs, strict=True):
            continuation = tokenizer(text + word)["input_ids"][len(context) :]
            assert found == pytest.approx(continuation_log_prob(model, context, continuation), abs=1e-4)


@pytest.mark.parametrize("family_name", ["gpt2", "llama", "gemma2", "mamba"])
def test_batch_size_changes_nothing(family_name: str) -> None:
    model = tiny_model(family_name)
    texts = [" ".join(["film"] * n) + " is" for n in (9, 1, 4, 4, 7, 2, 12, 3)]
    requests = [PromptRequest(WORDS, (Feature(),))] * len(texts)
    by_rows = {rows: run(model, requests, texts=texts, max_rows=rows)[0] for rows in (1, 3, 64, None)}
    for rows, answers in by_rows.items():
        for answer, reference in zip(answers, by_rows[1], strict=True):
            assert answer.log_probs == pytest.approx(reference.log_probs, abs=1e-4), rows
            assert answer.source.take([answer.row], Feature()) == pytest.approx(
                reference.source.take([reference.row], Feature()), abs=1e-4
            )


def test_head_bias_is_part_of_the_readout() -> None:
    model = tiny_model("llama")
    head = model.lm_head
    biased = torch.nn.Linear(head.in_features, head.out_features)
    with torch.no_grad():
        biased.weight.copy_(head.weight)
        biased.bias.normal_(0.0, 3.0)
    model.set_output_embeddings(biased)
    context = tiny_tokenizer()(TEXTS[0])["input_ids"]
    continuation = tiny_tokenizer()(TEXTS[0] + WORDS[0])["input_ids"][len(context) :]
    found = run(model)[0][0].log_probs[0]
    assert found == pytest.approx(continuation_log_prob(model, context, continuation), abs=1e-4)


def test_half_precision_reads_out_in_float32() -> None:
    """bfloat16 logits of magnitude 16 come in steps of 1/8; read out in float32, scores are those of the state itself."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    words = SINGLE[:2]
    answers, _ = run(model, [PromptRequest(words, (Feature(),))] * len(TEXTS))
    tokens = [tiny_tokenizer()(TEXTS[0] + word)["input_ids"][-1] for word in words]
    for answer in answers:
        state = torch.from_numpy(answer.source.take([answer.row], Feature())[0])
        exact = (model.lm_head.weight.detach().float() @ state).log_softmax(-1)
        assert answer.log_probs == pytest.approx([float(exact[token]) for token in tokens], abs=1e-4)


def test_words_come_from_one_pass_over_distinct_prompts() -> None:
    model = tiny_model("gpt2")
    calls: list[int] = []
    handle = model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    texts = [TEXTS[0]] * 5 + [TEXTS[1]] * 3
    _, summary = run(model, [PromptRequest(SINGLE)] * 8, texts=texts, max_rows=64)
    handle.remove()
    assert isinstance(summary, RunSummary)
    assert (summary.prompts, summary.distinct_prompts, summary.forwarded, summary.word_continuations) == (8, 2, 2, 0)
    tokenizer = tiny_tokenizer()
    assert summary.tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS[:2])
    # One padded batch, and the readout's single token.
    assert calls == [summary.tokens + summary.padding, 1]


def test_no_logits_of_the_whole_sequence_are_computed() -> None:
    model = tiny_model("llama")
    sizes: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    run(model, [PromptRequest(SINGLE)] * len(TEXTS))
    handle.remove()
    vocabulary = model.config.vocab_size
    assert max(sizes) <= len(TEXTS) * vocabulary


@pytest.mark.parametrize("layer", [3, -4, 99])
def test_a_layer_that_does_not_exist(layer: int) -> None:
    with pytest.raises(ValueError, match=r"hidden states 0 \(embedding\) to 2"):
        run(tiny_model("gpt2"), [PromptRequest(features=(Feature(layer),))], texts=TEXTS[:1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_states_that_are_not_finite_name_the_prompt_and_the_layer(bad: float) -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = bad
    with pytest.raises(ValueError, match=r"(?s)film is good.*not finite \(layer last.*float32.*dtype="):
        run(model, [PromptRequest(WORDS)], texts=TEXTS[:1])


DOCUMENTS = ("the film is good", "I hated it, all of it and then some more of it.", "the good and the bad")
TEMPLATES = (" This movie is", " It was", " In short it is a", "", " This movie was the")
SWEEP = [document + template for document in DOCUMENTS for template in TEMPLATES]
WAYS = dict.fromkeys(CONFIGS, "packed") | {
    # ALiBi takes its positions from the mask; the windows of these three are shorter than the prompts; state spaces mix tokens.
    "bloom": "cached",
    **dict.fromkeys(("gemma2", "gemma3", "mistral", "mamba", "mamba2"), "separate"),
}


@pytest.mark.parametrize(
    ("family_name", "max_rows"), [*((name, 3) for name in sorted(CONFIGS)), ("llama", 1), ("llama", None), ("bloom", 1)]
)
def test_prompts_that_share_a_beginning_are_those_of_separate_forwards(family_name: str, max_rows: int | None) -> None:
    model = tiny_model(family_name)
    answers, summary = run(
        model, [PromptRequest(WORDS, (Feature(), Feature(1)))] * len(SWEEP), texts=SWEEP, max_rows=max_rows
    )
    assert summary.sharing == WAYS[family_name]
    assert (summary.tokens < summary.separate_tokens) == (WAYS[family_name] != "separate")
    tokenizer = tiny_tokenizer()
    for text, answer in zip(SWEEP, answers, strict=True):
        ids = tokenizer(text)["input_ids"]
        for feature, expected in ((Feature(), last_state(model, ids)), (Feature(1), hidden_states(model, ids)[1][-1])):
            found = torch.from_numpy(answer.source.take([answer.row], feature)[0])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=f"{text!r}, {feature}")
        for word, found in zip(WORDS, answer.log_probs, strict=True):
            continuation = tokenizer(text + word)["input_ids"][len(ids) :]
            assert found == pytest.approx(continuation_log_prob(model, ids, continuation), abs=1e-4)


@pytest.mark.parametrize("family_name", ["mistral", "gemma2"])
def test_prompts_within_a_sliding_window_are_packed(family_name: str) -> None:
    model = tiny_model(family_name)
    model.config.sliding_window = 128
    for module in model.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = 128
    answers, summary = run(model, [PromptRequest(SINGLE)] * len(SWEEP), texts=SWEEP)
    assert summary.sharing == "packed"
    for text, answer in zip(SWEEP, answers, strict=True):
        alone = run(model, [PromptRequest(SINGLE)], texts=[text])[0][0]
        assert answer.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


@pytest.mark.parametrize("family_name", ["gpt2", "llama", "bloom", "mamba"])
def test_means_over_tokens_of_prompts_that_share_a_beginning(family_name: str) -> None:
    model = tiny_model(family_name)
    feature = Feature(1, "mean")
    answers, _ = run(model, [PromptRequest(features=(feature,))] * len(SWEEP), texts=SWEEP)
    for text, answer in zip(SWEEP, answers, strict=True):
        expected = hidden_states(model, tiny_tokenizer()(text)["input_ids"])[1].mean(0)
        torch.testing.assert_close(
            torch.from_numpy(answer.source.take([answer.row], feature)[0]), expected, atol=1e-4, rtol=1e-4
        )


def test_each_beginning_is_forwarded_once() -> None:
    model = tiny_model("llama")
    tokenizer = tiny_tokenizer()
    beginnings = {
        tuple(ids[:length])
        for ids in (tokenizer(text)["input_ids"] for text in SWEEP)
        for length in range(1, len(ids) + 1)
    }
    engine = LastStateModel(model, device=torch.device("cpu"))
    engine._exact = {("packed", padded): True for padded in (False, True)}  # no comparison, which forwards more
    encoder = PromptEncoder(tokenizer, max_length=128, add_special_tokens=None, prefix_token_id=0)
    _, summary = answer_requests(
        SWEEP,
        [PromptRequest(SINGLE)] * len(SWEEP),
        model=engine,
        encoder=encoder,
        store=None,
        max_rows=None,
        max_tokens=4096,
        progress=False,
    )
    assert summary.tokens <= 1.1 * len(beginnings)  # "the" begins two documents, too little to make one row of them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family_name", ["gpt2", "llama", "neox", "opt"])
def test_rounding_is_no_reason_not_to_share(family_name: str, dtype: torch.dtype) -> None:
    model = tiny_model(family_name, dtype=dtype)
    _, summary = run(model, [PromptRequest(SINGLE)] * len(SWEEP), texts=SWEEP)
    assert summary.sharing == "packed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_way_of_sharing_that_is_not_exact_is_noticed(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that ignores the mask and the positions it is given; the engine must see it and go another way."""
    model = tiny_model("llama", dtype=dtype)
    requests = [PromptRequest(WORDS)] * len(SWEEP)
    expected = run(model, requests, texts=SWEEP)[0]
    forward = model.model.forward

    def ignores_positions(*args, **kwargs):
        kwargs.pop("position_ids", None)
        kwargs.pop("attention_mask", None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", ignores_positions)
    found, summary = run(model, requests, texts=SWEEP)
    assert "not exact when packed" in caplog.text
    assert "not exact when cached" in caplog.text
    assert summary.sharing == "separate"
    for answer, reference in zip(found, expected, strict=True):
        assert answer.log_probs == pytest.approx(reference.log_probs, abs=1e-4 if dtype == torch.float32 else 0.5)


def test_a_model_that_refuses_masks_of_its_own_shape_is_forwarded_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    requests = [PromptRequest(WORDS)] * len(SWEEP)
    expected = run(model, requests, texts=SWEEP)[0]
    forward = model.model.forward

    def refuses(*args, **kwargs):
        if kwargs.get("attention_mask") is not None and kwargs["attention_mask"].dim() == 4:
            raise ValueError("attention_mask must be two-dimensional")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", refuses)
    found, summary = run(model, requests, texts=SWEEP)
    assert summary.sharing == "cached"
    for answer, reference in zip(found, expected, strict=True):
        assert answer.log_probs == pytest.approx(reference.log_probs, abs=1e-4)


def test_out_of_memory_halves_the_batch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2")
    expected = run(model)[0]
    forward = model.transformer.forward

    def small_memory(*args, **kwargs):
        tokens = args[0] if args else kwargs["input_ids"]
        if tokens.shape[0] > 1:
            raise torch.OutOfMemoryError("out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.transformer, "forward", small_memory)
    found = run(model, max_rows=4)[0]
    assert "does not fit the memory" in caplog.text
    for answer, reference in zip(found, expected, strict=True):
        assert answer.log_probs == pytest.approx(reference.log_probs, abs=1e-4)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such mask"), "no such mask"),
        (torch.OutOfMemoryError("out of memory"), "does not fit the memory, and cannot be split .* --batch_size"),
    ],
)
def test_a_pass_that_other_processes_have_begun_too_is_not_tried_again(error, expected, monkeypatch) -> None:
    model = tiny_model("gpt2")

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(model.transformer, "forward", fails)
    with pytest.raises((ValueError, RuntimeError), match=expected):
        run(model, [PromptRequest(WORDS)] * len(SWEEP), texts=SWEEP, is_spread=True)


def test_peft_adapters_count() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    plain = run(model)[0]
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    ).eval()
    found = run(adapted)[0]
    context = tiny_tokenizer()(TEXTS[0])["input_ids"]
    continuation = tiny_tokenizer()(TEXTS[0] + WORDS[1])["input_ids"][len(context) :]
    assert found[0].log_probs[1] == pytest.approx(continuation_log_prob(adapted, context, continuation), abs=1e-4)
    assert abs(found[0].log_probs[1] - plain[0].log_probs[1]) > 1e-3


def test_weights_offloaded_to_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What `device_map` with too little memory does: weights come in for each module's call and leave again."""
    accelerate = pytest.importorskip("accelerate")
    expected = run(tiny_model("llama"))[0]
    model = tiny_model("llama")
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    for answer, reference in zip(run(model)[0], expected, strict=True):
        assert answer.log_probs == pytest.approx(reference.log_probs, abs=1e-5)
    assert model_fingerprint(model) is None
    assert "offloaded" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision(dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    engine = LastStateModel(model, device=torch.device("cpu"), autocast_dtype=dtype)
    answers, _ = answer_requests(
        TEXTS,
        [PromptRequest(WORDS, (Feature(),))] * len(TEXTS),
        model=engine,
        encoder=PromptEncoder(tiny_tokenizer(), max_length=128, add_special_tokens=None, prefix_token_id=0),
        store=None,
        max_rows=3,
        max_tokens=4096,
        progress=False,
    )
    exact = run(model)[0]
    for answer, reference in zip(answers, exact, strict=True):
        # Eight bits of mantissa through two blocks: right to a few per cent, and visibly not float32.
        assert answer.log_probs == pytest.approx(reference.log_probs, rel=0.05, abs=0.2)
        assert answer.log_probs != pytest.approx(reference.log_probs, abs=1e-6)
