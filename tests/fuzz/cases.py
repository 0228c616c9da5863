"""Properties of what comes from outside: templates, texts and words under many tokenizers, options, files of all kinds.

Each property ends in a right result, by an oracle that is slow and obvious, or in one error of ours that says what is wrong.
The tests run each for a few examples, always the same; `benchmarks/fuzz.py` runs them for as long as one likes.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import result_files
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from tiny import CONFIGS
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from worlds import hf_model, task_config

import harness_ext
from harness_ext.contracts import Feature, PromptRequest, Span
from harness_ext.engine.attach import REQUEST_TYPE
from harness_ext.engine.store import FeatureStore
from harness_ext.flatness.options import FlatnessOptions
from harness_ext.leaderboard.read import read_results
from harness_ext.prompts import PromptError, parse_prompt
from harness_ext.tasks import FlatnessTask, LossTask, NaturalTask, ProbeTask, QuadProbe
from harness_ext.tasks.corpus import CorpusOptions
from harness_ext.tasks.data import _read_rows
from harness_ext.tasks.options import ProbeOptions, QuadOptions, read_options

__all__ = ["CASES", "TOKENIZERS", "ask", "check_scores", "counted", "language_model", "require_clear"]

PACKAGE = str(Path(harness_ext.__file__).parent)
CLEAR = (ValueError, KeyError, OSError, TypeError)
"""What an error about outer things may be, where one of our statements raises it."""


def require_clear(error: BaseException, *parts: str) -> None:
    """Fail unless an error was raised by a statement of ours, is short, and says these things."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error)
    is_ours = last.filename.startswith(PACKAGE) and str(last.line).startswith("raise ")
    if not (is_ours and 0 < len(message) < 4000 and all(part in message for part in parts)):
        raise AssertionError(f"no clear error: {type(error).__name__}: {message[:1000]}") from error


# ------------------------------------------------------------------------------------------------- texts

SNIPPETS = (
    "this movie is great", "terrible", " ", "  ", "\n", "\t", "\0", "e\u0301\u0301\u0323", "\u0301", "Å", "A\u030a",
    "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷", "שלום", "مرحبا", "\u202eabc\u202c", "\ufeff", "\u2028", "\xa0", "\u3000", "漢字", "ﬁ", "ß", "İ",
    "<eos>", "<bos>", "<pad>", "<unk>", "</s>", "<extra>", "▁", "Ġ", "<0x0A>", "a" * 60, "\U0010ffff", "\x7f", "'", "don't",
)  # fmt: skip
CHARACTERS = st.characters(exclude_categories=("Cs",))
TEXTS = st.one_of(
    st.lists(st.sampled_from(SNIPPETS), max_size=5).map("".join),
    st.lists(st.sampled_from(SNIPPETS), max_size=5).map(" ".join),
    st.text(CHARACTERS, max_size=30),
)
LONG_TEXTS = st.tuples(st.sampled_from(SNIPPETS), st.integers(0, 80), TEXTS).map(lambda t: f"{t[0]} " * t[1] + t[2])
WORDS = st.one_of(
    st.sampled_from((" great", " terrible", " good and bad", " e\u0301", " 👩‍👩‍👧‍👦", " שלום", "")), TEXTS
)

# ------------------------------------------------------------------------------------------------- tokenizers


@dataclass(frozen=True)
class Convention:
    """A tokenizer and what it does, said independently of the code that finds it out.

    Attributes:
        make: Makes it.
        before: Special tokens that it puts before a text.
        after: Special tokens that it puts after a text.
        prefix: What stands for an empty prompt; None where there is nothing.
        vocabulary: Tokens of the model's embedding beyond those of the tokenizer.
        max_length: Most tokens of the model.
    """

    make: Callable[[], PreTrainedTokenizerFast]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    prefix: str | None = "<eos>"
    vocabulary: int = 0


CORPUS = [
    "this movie is great , this movie is terrible .",
    "the good and the bad and the film",
    "a great film , don't miss it ; Å is good",
] * 20
SPECIAL = ["<eos>", "<bos>", "<pad>", "<unk>"]


def _byte_level(
    *,
    template: str | None = None,
    added: Sequence[AddedToken] = (),
    special: Sequence[str] = ("<eos>", "<bos>"),
    **named: Any,
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if template is not None:
        ids = [(token, tokenizer.token_to_id(token)) for token in re.findall(r"<\w+>", template)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<eos>", **named})


def _unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def _byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: SentencePiece's BPE with bytes for unknown characters, a blank before every text, BOS first."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=100, special_tokens=SPECIAL, show_progress=False)
    )
    state = json.loads(trained.to_str())["model"]
    vocabulary = dict(state["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(pair) for pair in state["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )


def _word_level(unknown: bool) -> PreTrainedTokenizerFast:
    """Lower-cased words; others are `<unk>`, or vanish."""
    words = sorted({word for line in CORPUS for word in line.lower().split()})
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, **({"unk_token": "<unk>"} if unknown else {})))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    options = {"unk_token": "<unk>"} if unknown else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", **options)


ADDED = [
    AddedToken("<extra>"),
    AddedToken("great", lstrip=True),
    AddedToken("movie", rstrip=True),
    AddedToken("bad", single_word=True),
]

TOKENIZERS: dict[str, Convention] = {
    "byte-level": Convention(lambda: _byte_level(bos_token="<eos>")),
    "unigram": Convention(_unigram),
    "byte fallback, BOS": Convention(_byte_fallback, before=("<bos>",), prefix="<bos>"),
    "BOS": Convention(lambda: _byte_level(template="<bos> $A", bos_token="<bos>"), before=("<bos>",), prefix="<bos>"),
    "EOS appended": Convention(lambda: _byte_level(template="$A <eos>"), after=("<eos>",)),
    "BOS and EOS": Convention(
        lambda: _byte_level(template="<bos> $A <eos>", bos_token="<bos>"),
        before=("<bos>",),
        after=("<eos>",),
        prefix="<bos>",
    ),
    "no BOS, no EOS": Convention(
        lambda: _byte_level(special=["<pad>"], eos_token=None, pad_token="<pad>"), prefix=None
    ),
    "added tokens": Convention(lambda: _byte_level(added=ADDED)),
    "words": Convention(lambda: _word_level(True)),
    "words without unknown": Convention(lambda: _word_level(False)),
    "padded vocabulary": Convention(_byte_level, vocabulary=64),
}


@functools.cache
def language_model(name: str) -> Any:
    """lm_eval's model of a random GPT-2 and a tokenizer of `TOKENIZERS`."""
    convention = TOKENIZERS[name]
    tokenizer = convention.make()
    config = CONFIGS["gpt2"]()
    config.vocab_size = len(tokenizer) + convention.vocabulary
    config.bos_token_id = config.eos_token_id = None if convention.prefix is None else 0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    model.tie_weights()
    tokenizer.model_max_length = 10**9
    return hf_model(model, tokenizer)


def _ids(name: str, text: str) -> list[int]:
    """A text as a prompt: by the convention, and not by what the encoder finds out about it."""
    convention, tokenizer = TOKENIZERS[name], language_model(name).tokenizer
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    if convention.prefix is not None and text.startswith(convention.prefix):
        return list(plain)
    return [*tokenizer.convert_tokens_to_ids(list(convention.before)), *plain]


def _words(name: str, context: str, words: Sequence[str]) -> list[list[int]]:
    """What follows the context where the two are encoded together; alone where they merge."""
    tokenizer, before = language_model(name).tokenizer, _ids(name, context)
    result = []
    for word in words:
        whole = _ids(name, context + word)
        is_continued = before and whole[: len(before)] == before and len(whole) > len(before)
        result.append(whole[len(before) :] if is_continued else tokenizer(word, add_special_tokens=False)["input_ids"])
    return result


def direct_log_prob(model: Any, context: Sequence[int], word: Sequence[int]) -> float:
    """log p(word | context) by one forward of both, but for the last token, which is never an input."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *word[:-1]]])).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(context) + i - 1, token]) for i, token in enumerate(word))


def ask(name: str, contexts: Sequence[str], requests: Sequence[PromptRequest]) -> list[Any]:
    """The engine's answers, as lm_eval asks for them."""
    instances = [
        Instance(REQUEST_TYPE, doc={}, arguments=(context, request.to_argument()), idx=0, metadata=("fuzz", i, 1))
        for i, (context, request) in enumerate(zip(contexts, requests, strict=True))
    ]
    return language_model(name).prompt_states(instances)


def check_scores(name: str, context: str, words: Sequence[str], *, document: Span | None) -> bool:
    """Compare the engine's log-probabilities with those of full forwards; True where there are any."""
    lm, convention = language_model(name), TOKENIZERS[name]
    try:
        (answer,) = ask(name, [context], [PromptRequest(tuple(words), document=document)])
    except CLEAR as error:
        require_clear(error)
        message = str(error)
        assert _ids(name, context) == [] or "has no tokens" not in message or "label word" in message
        if "has no tokens" in message and "label word" not in message:
            assert convention.prefix is None
        elif "label word" in message:
            assert any(not lm.tokenizer(word, add_special_tokens=False)["input_ids"] for word in words)
        else:
            assert len(_ids(name, context)) + max(map(len, _words(name, context, words)), default=0) > lm.max_length
        return False
    texts = [context]
    if answer.cut_tokens:
        assert document is not None
        head, body, tail = context[: document.start], context[document.start : document.end], context[document.end :]
        starts = [match.start() for match in re.finditer(r"\S+", body)]
        starts = [*(starts if len(starts) > 1 else range(len(body))), len(body)]
        texts = [head + body[start:] + tail for start in starts]
    prefix = [] if convention.prefix is None else [lm.tokenizer.convert_tokens_to_ids(convention.prefix)]
    for text in texts:
        before = _ids(name, text) or prefix
        continued = _words(name, text, words)
        fits = len(before) + max(map(len, continued), default=1) - 1 <= lm.max_length
        if not before or not fits or not all(continued):
            continue
        expected = [direct_log_prob(lm.model, before, word) for word in continued]
        if np.allclose(expected, answer.log_probs, rtol=1e-4, atol=1e-3):
            return True
        if not answer.cut_tokens:
            raise AssertionError(f"{name}: {text!r} {words}: found {answer.log_probs}, expected {expected}")
    raise AssertionError(f"{name}: {context!r} {words}, cut by {answer.cut_tokens}: found {answer.log_probs}")


@given(
    st.sampled_from(sorted(TOKENIZERS)), TEXTS, LONG_TEXTS, TEXTS, st.lists(WORDS, min_size=1, max_size=4, unique=True),
    st.booleans(),
)  # fmt: skip
def scores(name: str, head: str, body: str, tail: str, words: list[str], may_be_cut: bool) -> None:
    """Log-probabilities of words after prompts, under every kind of tokenizer."""
    span = Span(len(head), len(head) + len(body)) if may_be_cut else None
    check_scores(name, head + body + tail, words, document=span)


@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.lists(TEXTS, min_size=2, max_size=5),
    st.lists(TEXTS, min_size=2, max_size=3),
)
def batches(name: str, heads: list[str], tails: list[str]) -> None:
    """A prompt's answer is the same in company, with shared beginnings, as alone."""
    contexts = [head + tail for head in heads for tail in tails]
    request = PromptRequest((" great", " terrible"), document=Span(0, 0))
    try:
        together = ask(name, contexts, [request] * len(contexts))
    except CLEAR as error:
        require_clear(error)
        return
    for context, answer in zip(contexts, together, strict=True):
        (alone,) = ask(name, [context], [request])
        assert alone.key == answer.key
        np.testing.assert_allclose(answer.log_probs, alone.log_probs, rtol=1e-4, atol=1e-3)


# ------------------------------------------------------------------------------------------------- templates

NAMES = ("text", "title", "tags", "n", "x", "meta", "missing", "label")
FILTERS = (
    "trim", "upper", "lower", "title", "capitalize", "length", "first", "last", "list", "join", "join(', ')", "sort",
    "reverse", "unique", "int", "float", "abs", "round", "string", "wordcount", "replace('a', 'bb')", "truncate(9)",
    "default('d')", "center(9)", "center(99999999)", "indent", "sum", "min", "max", "batch(2)", "slice(2)", "map('upper')",
    "select('string')", "items", "dictsort", "format(1)", "urlencode", "striptags", "map(attribute='a')", "attr('x')",
    "rejectattr('a')", "groupby('a')", "d", "random", "pprint", "safe", "nothing",
)  # fmt: skip
METHODS = (
    ".upper()", ".split()", ".strip()", ".join(tags)", ".replace('', 'zz')", ".format(1)", ".items()", ".get('a')", ".a",
    ".__class__", ".count('a')", ".title()", ".ljust(9)", ".zfill(99999999)", "[0]", "[1:]", "[::-1]", "['a']", "[-1]", "()",
    ".encode()", ".append(1)", ".startswith('a')", ".splitlines()", ".partition(' ')",
)  # fmt: skip
TESTS = (
    "string",
    "number",
    "defined",
    "none",
    "even",
    "divisibleby(3)",
    "in(tags)",
    "iterable",
    "mapping",
    "odd",
    "true",
)
OPERATORS = ("+", "-", "*", "/", "//", "%", "~", "**", "==", "!=", "<", ">=", "in", "not in", "and", "or")
ATOMS = st.one_of(
    st.sampled_from(NAMES),
    st.integers(-3, 12).map(str),
    st.sampled_from(("99999999", "0.5", "1e308", "none", "true", "[]", "{}", "()", "range(3)", "'%s'", "'{}'", "''")),
    st.text(CHARACTERS, max_size=5).map(lambda text: json.dumps(text, ensure_ascii=False)),
)


def _wrap(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(FILTERS)).map(lambda t: f"({t[0]}|{t[1]})"),
        st.tuples(inner, st.sampled_from(METHODS)).map(lambda t: f"({t[0]}){t[1]}"),
        st.tuples(inner, st.sampled_from(OPERATORS), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(TESTS)).map(lambda t: f"({t[0]} is {t[1]})"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.tuples(inner, inner).map(lambda t: f"{{{t[0]}: {t[1]}}}"),
    )


EXPRESSIONS = st.recursive(ATOMS, _wrap, max_leaves=6)


def _block(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(EXPRESSIONS, inner).map(lambda t: f"{{% if {t[0]} %}}{t[1]}{{% endif %}}"),
        st.tuples(EXPRESSIONS, inner).map(lambda t: f"{{% for x in {t[0]} %}}{t[1]}{{% endfor %}}"),
        st.tuples(EXPRESSIONS, inner).map(lambda t: f"{{% set x = {t[0]} %}}{t[1]}"),
        st.tuples(inner, inner).map(lambda t: f"{{% macro m(x) %}}{t[0]}{{% endmacro %}}{t[1]}{{{{ m(1) }}}}"),
        st.tuples(st.sampled_from(FILTERS), inner).map(lambda t: f"{{% filter {t[0]} %}}{t[1]}{{% endfilter %}}"),
        st.tuples(inner, inner).map("".join),
    )


PRINTED = EXPRESSIONS.map(lambda expression: f"{{{{ {expression} }}}}")
SOURCES = st.one_of(
    st.recursive(st.one_of(PRINTED, PRINTED, st.text(CHARACTERS, max_size=6)), _block, max_leaves=4),
    st.lists(
        st.sampled_from(("{{", "}}", "{%", "%}", "{#", "#}", "-", "text", "|", "set label_words = ", "{'a': 'b'}", "for", "if")
        ),
        max_size=10,
    ).map(" ".join),
    st.text(CHARACTERS, max_size=40),
)  # fmt: skip
PLAIN_JINJA = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
DOCUMENT = {
    "text": "a great film <b>",
    "title": "Å",
    "tags": ["b", "a"],
    "n": 3,
    "meta": {"a": [1, 2]},
    "label": 1,
    "none": None,
}


@given(SOURCES)
def templates(source: str) -> None:
    """A template renders as plain Jinja renders it, or is refused by name, and soon."""
    path = Path("somewhere/one.jinja")
    start = time.process_time()
    try:
        prompt = parse_prompt("somewhere/one", path, source)
        text = prompt.render(DOCUMENT).text
        prompt.render_without_document(DOCUMENT)
    except PromptError as error:
        require_clear(error, str(path))
        return
    finally:
        assert time.process_time() - start < 20, source
    plain = PLAIN_JINJA.from_string(source.removesuffix("\n")).render(DOCUMENT)
    # Plain Jinja prints generators by their addresses, and markup escapes what is added to it.
    if "<generator object" not in plain and "safe" not in source:
        assert text == plain


# ------------------------------------------------------------------------------------------------- options and tasks

PRIMITIVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 5), st.floats(),
    st.sampled_from(("", "last", "all", "first", "test", "train", "text", "label", "films/plain")),
    st.sampled_from(("films/*", "../x", "a\0b", "x" * 300)),
    st.text(CHARACTERS, max_size=8),
)  # fmt: skip
KEYS = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=6
)  # a name of Arrow ends at NUL
JSON = st.recursive(
    PRIMITIVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
OPTION_CLASSES = {"probe": ProbeOptions, "quad": QuadOptions, "flatness": FlatnessOptions, "corpus": CorpusOptions}


def _names_of(cls: type) -> list[str]:
    return [*cls.__dataclass_fields__, "unknown"]  # type: ignore[attr-defined]


@given(
    st.sampled_from(sorted(OPTION_CLASSES)).flatmap(
        lambda key: st.tuples(
            st.just(key),
            st.one_of(JSON, st.dictionaries(st.sampled_from(_names_of(OPTION_CLASSES[key])), JSON, max_size=3)),
        )
    )
)
def options(of: tuple[str, Any]) -> None:
    """Options are read, and then are what they were, or refused by name."""
    key, value = of
    try:
        found = read_options(OPTION_CLASSES[key], key, value, "films")
    except ValueError as error:
        require_clear(error, "films", key)
        return
    given_options = value or {}
    for name, one in given_options.items():
        kept = getattr(found, name)
        assert repr(kept) in (repr(tuple(one) if isinstance(one, list) else one), repr((one,)))
    assert found.problem() is None


CONFIG_KEYS = (
    "doc_to_text", "doc_to_target", "doc_to_choice", "dataset_path", "dataset_name", "training_split", "test_split",
    "validation_split", "metric_list", "target_delimiter", "num_fewshot", "dataset_kwargs",
)  # fmt: skip
METADATA_KEYS = ("prompt", "probe", "quad", "eval_split", "subset_words", "report", "pretrained", "version", "unknown")
TASK_CLASSES: dict[str, type] = {"natural": NaturalTask, "probe": ProbeTask, "quad": QuadProbe}


@given(
    st.sampled_from(sorted(TASK_CLASSES)),
    st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON, max_size=2),
    st.dictionaries(st.sampled_from(METADATA_KEYS), JSON, max_size=2),
)
def task_configs(kind: str, changes: dict[str, Any], metadata: dict[str, Any]) -> None:
    """A task is made of its YAML, or refused in one error; it needs the world of the tests."""
    config = task_config(kind) | changes
    config["metadata"] = config["metadata"] | metadata
    try:
        TASK_CLASSES[kind](config=config)
    except CLEAR as error:
        require_clear(error)


CORPUS_KEYS = ("corpus", "block_tokens", "flatness", "report", "unknown")


@given(
    st.sampled_from((LossTask, FlatnessTask)),
    st.dictionaries(st.sampled_from(("doc_to_text", "metric_list", "num_fewshot", "dataset_path")), JSON, max_size=1),
    st.dictionaries(st.sampled_from(CORPUS_KEYS), JSON, max_size=2),
)
def corpus_configs(cls: Any, changes: dict[str, Any], metadata: dict[str, Any]) -> None:
    """The same for tasks on running text."""
    config = {
        "task": "loss_lines",
        "output_type": "loglikelihood_rolling",
        "dataset_path": "tests/films",
        "test_split": "test",
        "doc_to_text": "text",
        "num_fewshot": 0,
        **changes,
        "metadata": {"version": 1.0, "corpus": {"join": "\n"}, **metadata},
    }
    try:
        task = cls(config=config)
        task.texts()
        _ = task.block_tokens
    except CLEAR as error:
        require_clear(error)


# ------------------------------------------------------------------------------------------------- files


def _parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _parts(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _parts(inner, (*path, index))


def _replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], other)
    return copy


RESULTS = [
    result_files.result_file(("reviews", "natural_sst")),
    result_files.result_file(("loss_text",), configs={"loss_text": result_files.loss_config()}),
    result_files.result_file(
        ("reviews",), samples={"reviews": [result_files.sample(i, float(i % 2)) for i in range(3)]}
    ),
]
ODD_NAMES = st.sampled_from(
    ("../../../etc/passwd", "/etc/passwd", "..\\x", "a\0b", "<script>alert(1)</script>", "x" * 5000, "\ud800", "", "con")
)  # fmt: skip


@given(st.sampled_from(range(len(RESULTS))), st.data())
def result_jsons(which: int, data: st.DataObject) -> None:
    """A result file is read or refused whatever stands at any place of it."""
    value: Any = RESULTS[which]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(_parts(value))))
        value = _replaced(value, path, data.draw(st.one_of(JSON, ODD_NAMES)))
    text = json.dumps(value)
    if data.draw(st.integers(0, 4)) == 0:
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(("", "[" * 3000, "\0", "NaN", '"', "1e999999", "{}", "9" * 5000)))
            + text[at + 1 :]
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results_2026.json"
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            record = read_results(file)
        except CLEAR as error:
            require_clear(error)
            return
    assert record.tasks
    json.dumps(record.digest)


@given(
    st.lists(st.dictionaries(st.sampled_from(("text", "label", "a b", "")), JSON, max_size=3), max_size=4), st.data()
)
def data_files(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    """A file of rows is read as what it says, or refused by name."""
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    if is_damaged := data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(content)))
        content = content[:at] + data.draw(st.binary(max_size=4)) + content[at + data.draw(st.integers(0, 3)) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.jsonl"
        path.write_bytes(content)
        try:
            rows_found = _read_rows(path, "test")
            found = rows_found.to_list()
        except ValueError as error:
            require_clear(error, str(path))
            return
    if not is_damaged:
        assert len(found) == len(rows)
        for row, expected in zip(found, rows, strict=True):
            for key, value in expected.items():
                # Arrow makes times of a column of ISO dates, and the library numbers of strings beside other types.
                if isinstance(value, str | bool) and getattr(rows_found.features[key], "dtype", "") in (
                    "string",
                    "bool",
                ):
                    assert row[key] == value


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**20), st.binary(max_size=8)), max_size=4), st.booleans())
def stores(damages: list[tuple[int, int, bytes]], is_shard: bool) -> None:
    """What a store gives is what was put in, whatever has become of its files."""
    rng = np.random.default_rng(0)
    keys = [rng.bytes(16) for _ in range(12)]
    states = rng.standard_normal((12, 5)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = FeatureStore(root, "ab12", description="tiny")
        for start in range(0, 12, 4):
            store.add(Feature(), keys[start : start + 4], states[start : start + 4])
            if is_shard:
                store.close()
                store = FeatureStore(root, "ab12", description="tiny")
        if is_shard:
            store.close()
        files = sorted(path for path in root.rglob("*") if path.is_file())
        assume(files)
        for which, at, patch in damages:
            file = files[which % len(files)]
            content = file.read_bytes()
            at %= len(content) + 1
            file.write_bytes(content[:at] + patch + (content[at + len(patch) :] if patch else b""))
        reader = FeatureStore(root, "ab12", description="tiny")
        mask, found = reader.get(Feature(), keys)
        reader.close()
        if found is not None:
            np.testing.assert_array_equal(found, states[np.asarray(mask)])
        if not damages:
            assert all(mask)
        if not is_shard:
            store.close()


def counted(case: Callable[..., None]) -> tuple[Callable[..., None], list[int]]:
    """The same property, and a list whose only item counts its examples."""
    inner, count = case.hypothesis.inner_test, [0]  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def counting(*args: Any, **kwargs: Any) -> None:
        count[0] += 1
        inner(*args, **kwargs)

    case.hypothesis.inner_test = counting  # type: ignore[attr-defined]
    return case, count


CASES: dict[str, Callable[..., None]] = {
    case.__name__: case  # type: ignore[attr-defined]
    for case in (scores, batches, templates, options, task_configs, corpus_configs, result_jsons, data_files, stores)
}
