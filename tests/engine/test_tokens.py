from __future__ import annotations

import pytest
from tiny import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from harness_ext.contracts import PromptRequest, Span
from harness_ext.engine.tokens import PromptEncoder

BOS = 0


def encoder(tokenizer=None, *, max_length: int = 128, add_special_tokens: bool | None = None, prefix: int | None = BOS):
    return PromptEncoder(
        tokenizer or tiny_tokenizer(),
        max_length=max_length,
        add_special_tokens=add_special_tokens,
        prefix_token_id=prefix,
    )


def with_specials(single: str):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=[("<eos>", BOS)]
    )
    return tokenizer


def test_a_continuation_is_what_follows_the_context() -> None:
    tokenizer = tiny_tokenizer()
    (prompt,) = encoder(tokenizer).encode_requests(["the movie is"], [PromptRequest((" great", " outstanding"))])
    whole = [tokenizer(f"the movie is{word}")["input_ids"] for word in (" great", " outstanding")]
    assert [[*prompt.context, *word] for word in prompt.continuations] == whole
    assert len(prompt.continuations[1]) > 1


@pytest.mark.parametrize("text", ["this movie", "<eos>this movie", ""])
def test_exactly_one_bos(text: str) -> None:
    (ids,) = encoder(with_specials("<eos> $A")).encode([text])
    assert ids.count(BOS) == 1
    assert ids[0] == BOS


def test_each_text_of_a_batch_decides_on_its_own_bos() -> None:
    texts = ["<eos>this movie", "this movie", "<eos>a film", "a film"]
    together = encoder(with_specials("<eos> $A")).encode(texts)
    assert together == [encoder(with_specials("<eos> $A")).encode([text])[0] for text in texts]
    assert together[0] == together[1]


def test_a_tokenizer_that_appends_eos_does_not_score_eos() -> None:
    plain, appending = tiny_tokenizer(), with_specials("<eos> $A <eos>")
    request = PromptRequest((" great", " bad"))
    (prompt,) = encoder(appending).encode_requests(["this movie is"], [request])
    (expected,) = encoder(plain).encode_requests(["this movie is"], [request])
    assert prompt.context == (BOS, *expected.context)
    assert prompt.continuations == expected.continuations


def test_an_empty_prompt_is_bos() -> None:
    (prompt,) = encoder().encode_requests([""], [PromptRequest((" great",))])
    assert prompt.context == (BOS,)


def test_an_empty_prompt_without_bos_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"neither BOS nor EOS.*prefix_token_id"):
        encoder(prefix=None).encode_requests([""], [PromptRequest((" great",))])


def test_a_merge_across_the_boundary_loses_no_token(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer(["xyz xyz xyz xyz"] * 50)
    assert len(tokenizer("xyz")["input_ids"]) == 1
    (prompt,) = encoder(tokenizer).encode_requests(["xy"], [PromptRequest(("z", "zz"))])
    assert prompt.context == tuple(tokenizer("xy")["input_ids"])
    assert [tokenizer.decode(word) for word in prompt.continuations] == ["z", "zz"]
    assert "merges the end of the prompt" in caplog.text


@pytest.mark.parametrize("template", ["{} This movie is", "Review: {}\nVerdict: this movie is", "{}"])
def test_the_document_is_cut_and_the_template_stays(template: str) -> None:
    document = " ".join(f"word{i}" for i in range(60))
    text = template.format(document)
    start = template.index("{}")
    request = PromptRequest((" great", " outstanding"), document=Span(start, start + len(document)))
    tokenizer = tiny_tokenizer()
    (prompt,) = encoder(tokenizer, max_length=64).encode_requests([text], [request])
    head, tail = template.split("{}")
    kept = tokenizer.decode(prompt.context)
    assert kept.startswith(head)
    assert kept.endswith(document.split()[-1] + tail)
    assert kept[len(head) :] in document + tail
    assert len(prompt.context) + max(len(word) for word in prompt.continuations) - 1 <= 64
    assert len(prompt.context) + prompt.cut_tokens == len(tokenizer(text)["input_ids"])
    # Cut at a word, and no more than needed: the next word would not fit.
    first_word = kept[len(head) :].split()[0]
    assert first_word in document.split()
    longer = head + document[document.index(first_word) - len("word10 ") :] + tail
    assert len(tokenizer(longer)["input_ids"]) > 64 - (max(len(word) for word in prompt.continuations) - 1)


def test_a_document_without_blanks_is_cut_between_characters() -> None:
    request = PromptRequest(document=Span(0, 300))
    (prompt,) = encoder(max_length=32).encode_requests(["x" * 300 + " This movie is"], [request])
    assert len(prompt.context) <= 32
    assert tiny_tokenizer().decode(prompt.context).endswith("x This movie is")


def test_a_prompt_that_fits_is_not_touched() -> None:
    tokenizer = tiny_tokenizer()
    text = "a film that goes on and on"
    length = len(tokenizer(text)["input_ids"])
    (prompt,) = encoder(tokenizer, max_length=length).encode_requests([text], [PromptRequest(document=Span(0, 6))])
    assert (len(prompt.context), prompt.cut_tokens) == (length, 0)


def test_a_template_that_does_not_fit_is_an_error() -> None:
    text = "doc " + "template " * 60
    with pytest.raises(ValueError, match=r"even without its document.*num_fewshot"):
        encoder(max_length=32).encode_requests([text], [PromptRequest(document=Span(0, 3))])
    with pytest.raises(ValueError, match="does not show which part of it is the document"):
        encoder(max_length=32).encode_requests([text], [PromptRequest()])
