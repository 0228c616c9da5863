"""Templates: golden renderings, where the document stands, hostile files, ids, and what `check_prompt` finds."""

from __future__ import annotations

import datetime
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_ext import prompts as module
from harness_ext import resources
from harness_ext.prompts import (
    PROMPTS_VARIABLE,
    Prompt,
    PromptError,
    check_prompt,
    compose_source,
    duplicate_prompts,
    example_document,
    find_prompts,
    load_prompt,
    parse_prompt,
    resolve_prompts,
    tokenize_words,
    words_by_class,
)

WORDS = '{%- set label_words = {"negative": ["terrible", "bad"], "positive": "great"} -%}\n'


@pytest.fixture(autouse=True)
def only_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROMPTS_VARIABLE, raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_template(source: str | bytes, name: str = "mine/one") -> Path:
        path = tmp_path / f"{name}.jinja"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        return path

    return write_template


@pytest.fixture
def parse(write: Callable[..., Path]) -> Callable[[str], Prompt]:
    return lambda source: load_prompt(write(source))


# ------------------------------------------------------------------------------------------------- golden

DOCUMENT = 'a quiet film<br /><br />that stays with you , " they say " .'


def _golden_text(dataset: str) -> str:
    """Every prompt of a dataset, with ⟦⟧ around the document, the bare prompt, and the label words."""
    blocks = []
    for prompt_id in find_prompts(f"{dataset}/*"):
        prompt = load_prompt(prompt_id)
        doc = dict.fromkeys(prompt.variables, DOCUMENT)
        text, span = prompt.render(doc)
        assert span is not None
        marked = f"{text[: span.start]}⟦{text[span.start : span.end]}⟧{text[span.end :]}|"
        words = "".join(f"{label}: {', '.join(words)}\n" for label, words in prompt.label_words.items())
        blocks.append(f"== {prompt_id}\n{marked}\n-- bare\n{prompt.render_without_document(doc)}|\n-- words\n{words}")
    return re.sub(r" (?=\n)", "␠", "\n".join(blocks))  # a blank that no editor strips


@pytest.mark.parametrize("dataset", sorted({name.partition("/")[0] for name in find_prompts("*")}))
def test_renderings_are_as_recorded(dataset: str, golden: Callable[[str, str], None]) -> None:
    golden(f"prompts/{dataset}.txt", _golden_text(dataset))


def test_golden_files_of_removed_datasets_are_removed() -> None:
    recorded = {path.stem for path in (Path(__file__).parent / "golden" / "prompts").glob("*.txt")}
    assert recorded <= {name.partition("/")[0] for name in find_prompts("*")}


# ------------------------------------------------------------------------------------------------- the document


def _make(source: str) -> Prompt:
    """A prompt without a file, for hypothesis, which fixtures and temporary folders do not suit."""
    tree = module._ENVIRONMENT.parse(source)
    return Prompt("x/y", Path("y.jinja"), source, {}, frozenset(module.jinja2.meta.find_undeclared_variables(tree)), "")


PLAIN = ["{{ text }} This is", "Review: {{ text }}\nIt was", "{{ text }}", '"{{text}}" is what they say {{ text[:0] }}']
FILTERED = ["{{ text | trim }} This is", 'A: {{ text | replace("<br />", " ") }}. It', "{{ text | upper }}\nB"]


@given(st.text(), st.sampled_from(PLAIN))
def test_the_span_is_the_document(text: str, source: str) -> None:
    rendered = _make(source).render({"text": text})
    assert rendered.document is not None
    assert rendered.text[slice(*rendered.document)] == text


@given(st.text(), st.sampled_from(FILTERED))
def test_the_span_is_the_filtered_document(text: str, source: str) -> None:
    rendered = _make(source).render({"text": text})
    assert rendered.document is not None
    expected = {0: text.strip(), 1: text.replace("<br />", " "), 2: text.upper()}[FILTERED.index(source)]
    assert rendered.text[slice(*rendered.document)] == expected


@given(st.text(), st.text(max_size=8), st.sampled_from(PLAIN + FILTERED))
def test_cutting_the_document_leaves_the_template(text: str, other: str, source: str) -> None:
    prompt = _make(source)
    one, two = prompt.render({"text": text}), prompt.render({"text": other})
    assert one.document is not None
    assert two.document is not None
    assert (one.text[: one.document.start], one.text[one.document.end :]) == (
        two.text[: two.document.start],
        two.text[two.document.end :],
    )


@given(st.text(alphabet="\ue000\ue001ab \n", max_size=6))
def test_private_use_characters_of_a_document_do_no_harm(text: str) -> None:
    rendered = _make("\ue002{{ text }} is").render({"text": text})
    assert rendered.document is not None
    assert rendered.text[slice(*rendered.document)] == text


@pytest.mark.parametrize(
    "source",
    ["{{ text }} and again {{ text }}", "{% if text | length > 3 %}long{% endif %} {{ text }}", "no document"],
)
def test_no_span_where_the_document_is_not_one_stretch(source: str) -> None:
    assert _make(source).render({"text": "a document"}).document is None


def test_the_document_is_the_longest_string_that_the_template_uses() -> None:
    prompt = _make("{{ title }}: {{ text }} ({{ year }})")
    doc = {"title": "Up", "text": "a balloon", "year": 2009, "unused": "a much longer string than the others"}
    text, span = prompt.render(doc)
    assert span is not None
    assert text[slice(*span)] == "a balloon"
    assert prompt.render_without_document(doc) == "Up:  (2009)"
    assert prompt.document_variable({"title": "A balloon ride", "text": "up", "year": 1}) == "title"


def test_without_the_document_there_is_no_leading_white_space() -> None:
    assert _make("{{ text }} This movie is").render_without_document({"text": "good ."}) == "This movie is"
    assert _make("{{ text }}\n\nIt was").render_without_document({"text": "good ."}) == "It was"
    assert _make("Q: {{ text }}\nA:").render_without_document({"text": "good ."}) == "Q: \nA:"


# ------------------------------------------------------------------------------------------------- reading a file


def test_the_example_of_the_readme(parse: Callable[[str], Prompt]) -> None:
    prompt = parse(WORDS + "{{ text }} This movie is\n")
    assert prompt.label_words == {"negative": ("terrible", "bad"), "positive": ("great",)}
    assert prompt.variables == {"text"}
    assert prompt.render({"text": "fine ."}).text == "fine . This movie is"


def test_newlines_and_byte_order_marks_of_editors_change_nothing(write: Callable[..., Path]) -> None:
    source = WORDS + "{{ text }}\nIt was"
    variants = [source, source + "\n", source.replace("\n", "\r\n") + "\r\n", "\ufeff" + source]
    loaded = [load_prompt(write(variant)) for variant in variants]
    assert len({prompt.digest for prompt in loaded}) == 1
    assert {prompt.render({"text": "x"}).text for prompt in loaded} == {"x\nIt was"}
    assert load_prompt(write(source + "\n\n")).render({"text": "x"}).text == "x\nIt was\n"


def test_prompts_can_be_hashed_and_pickled() -> None:
    prompt = load_prompt("sst/it_was")
    assert pickle.loads(pickle.dumps(prompt)) == prompt
    assert hash(prompt) == hash(load_prompt("sst/it_was"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('{% set label_words = {"a": text} %}', "not a literal string"),
        ('{% set label_words = {"a": "x" ~ "y"} %}', "not a literal string"),
        ('{% set label_words = {"a": ["x", 1]} %}', "not a literal string"),
        ('{% set label_words = {0: "x"} %}', "class name is not a literal string"),
        ('{% set label_words = {"a": "x", "a": "y"} %}', "class 'a' occurs twice"),
        ("{% set label_words = text %}", "not a dictionary"),
        ("{% set label_words %}x{% endset %}", "set to a block"),
        ('{% if true %}{% set label_words = {"a": "x"} %}{% endif %}', "inside a block"),
        ('{% set label_words = {"a": "x"} %}{% set label_words = {"a": "y"} %}', "set twice"),
        ("{{ text ", "line 1: unexpected end of template"),
        ("{{ text }}\n{{ text | shout }}", "line 2: No filter named 'shout'"),
        ("{{ text | random }}", "No filter named 'random'"),
        ('{% set label_words = {"a": "\\ud800"} %}', "word of class 'a' has U+D800"),
        (b"caf\xe9 {{ text }}", "not UTF-8"),
        ("(" * 5000, ""),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    ],
)
def test_a_malformed_file_is_named(source: str | bytes, problem: str, write: Callable[..., Path]) -> None:
    path = write(source)
    if not problem:
        assert load_prompt(path).render({}).text == source
        return
    with pytest.raises(PromptError) as caught:
        load_prompt(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


# ------------------------------------------------------------------------------------------------- hostile templates


HOSTILE = {
    # out of the sandbox
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ text.__class__ }}": "unsafe",
    "{{ text['__class__'] }}": "unsafe",
    "{{ text | attr('__class__') }}": "No filter named 'attr'",
    "{{ [text] | map(attribute='__class__') | list }}": "unsafe",
    "{{ text.format.__globals__ }}": "no attribute '__globals__'",
    "{{ '{0.__class__}'.format(text) }}": "unsafe",
    "{{ '{0[__class__]}'.format(text) }}": "unsafe",
    "{{ '{a.__init__.__globals__}'.format_map({'a': text}) }}": "unsafe",
    "{{ ('{0.__class__}' | string).format(text) }}": "unsafe",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
    "{{ self.__init__ }}": "unsafe",
    "{{ self._TemplateReference__context }}": "unsafe",
    "{{ namespace.__init__.__globals__.os.popen('id') }}": "unsafe",
    "{{ text.encode() }}": "unsafe",
    "{{ text.translate({32: 'x'}) }}": "unsafe",
    "{% autoescape true %}{{ text }}{% endautoescape %}": "autoescape is refused",
    # what is no text
    "{{ range }}": "prints a function",
    "{{ text.upper }}": "prints a function",
    "{{ text.format }}": "prints a function",
    "{{ namespace() }}": "prints a value of type Namespace",
    "{{ [cycler('a')] }}": "prints a value of type Cycler",
    "{{ text ~ none }}": "prints a null value",
    "{{ tags | default([text]) | map('upper') }}": "prints a value of type generator",
    "{{ '\\ud800' ~ text }}": "renders to U+D800",
    "{{ 1 / 0 }}": "division by zero",
    # time
    "{% for i in range(1000000) %}a{% endfor %}": "Range too big",
    "{% for i in range(10**9) %}a{% endfor %}": "uses **",
    "{{ range(10) | sum(start=[]) }}": "no numbers",
    "{% for i in range(999) %}{% for j in range(999) %}{% for k in text %}{% endfor %}{% endfor %}{% endfor %}": "steps",
    (
        "{% macro m() %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{% endmacro %}{{ m() }}"
    ): "100,000 steps",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}": "100,000 steps",
    "{% for i in range(99999) %}{{ range(99999) | map('abs') | list | length }}{% endfor %}": "steps",
    "{% set ns = namespace(n=9) %}{% for i in range(9999) %}{% set ns.n = ns.n * ns.n %}{% endfor %}": "integer of more than",
    "{{ 9 ** 999999999 }}": "uses **",
    "{{ 1.5 | round(1000000000, 'ceil') }}": "rounds to more than",
    "{% for i in 'ab' recursive %}{{ loop('ab') }}{% endfor %}": "recursion",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recursion",
    "{% block b %}{{ self.b() }}{% endblock %}": "recursion",
    (
        "{% set ns = namespace(a=['x'], b=['x']) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
        "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
    ): "characters in all",
    "{% set ns = namespace(a=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ ns.a in {} }}": (
        "characters in all"
    ),
    # memory
    "{% for i in range(90000) %}{{ text }}{% endfor %}": "more than 1,000,000 characters",
    "{{ 'x' * 10000000000 }}": "repeats a value",
    "{{ 9999999999 * [1] }}": "repeats a value",
    "{{ text | center(1000000000) }}": "pads to more than",
    "{{ text.ljust(1000000000) }}": "pads to more than",
    "{{ [text] | map('center', 1000000000) | list }}": "pads to more than",
    "{% filter center(1000000000) %}{{ text }}{% endfilter %}": "pads to more than",
    "{{ '%1000000000d' % 1 }}": "formats to more than",
    "{{ '%*d' % (1000000000, 1) }}": "width of *",
    "{{ '%.1000000000f' | format(1) }}": "formats to more than",
    "{{ '%(a)1000000000s' | format(a=1) }}": "formats to more than",
    "{{ '{:1000000000}'.format(1) }}": "formats to more than",
    "{{ '{:{}}'.format(1, 1000000000) }}": "formats to more than",
    "{{ ('a\n' * 9999) | indent(9999) }}": "indents to more than",
    "{{ ('a' * 99999).replace('', text * 100) }}": "replaces to more than",
    "{{ ('a' * 99999) | replace('a', text * 100) }}": "replaces to more than",
    "{{ (text * 100).join(range(99999)) }}": "joins to more than",
    "{{ range(99999) | join(text * 100) }}": "joins to more than",
    "{{ [text] | tojson(indent=1000000000) }}": "indents JSON",
    "{{ [1] | batch(1000000000, text) | list }}": "pads to more than",
    "{% set ns = namespace(t=text) %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}": "characters in all",
    "{% set ns = namespace(t=text) %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}": "characters in all",
    "{% set ns = namespace(t=[text]) %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t }}": (
        "characters in all"
    ),
    "{% set t %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}": "characters in all",
    "{% set t = text * 9999 %}{% for i in range(99999) %}{% set u = t[1:] %}{% endfor %}": "characters in all",
    "{{ lipsum(1000) }}": "no column 'lipsum'",
}


@pytest.mark.parametrize("source", list(HOSTILE), ids=lambda source: source[:60])
def test_hostile_templates_stop_soon(source: str, parse: Callable[[str], Prompt]) -> None:
    start = time.process_time()
    with pytest.raises(PromptError, match=r"one\.jinja") as caught:
        parse(source).render({"text": "a document of some length"})
    assert HOSTILE[source] in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - start < 10


class Image:
    """What a dataset may have in a column: an object with methods that do things."""

    size = (1, 1)

    def save(self, path: str) -> None:
        Path(path).write_text("gotcha")

    def __getitem__(self, index: object) -> None:
        raise AssertionError("run by a template")


@pytest.mark.parametrize(
    "call",
    ["image.save(path)", "image['save'](path)", "[image] | map('string') | list", "image", "image[0]", "image.size"],
)
def test_a_template_calls_nothing_of_what_is_no_plain_data(
    call: str, parse: Callable[[str], Prompt], tmp_path: Path
) -> None:
    with pytest.raises(PromptError, match=r"unsafe|prints a value of type Image|no attribute|has no element"):
        parse(f"{{{{ {call} }}}}").render({"image": Image(), "path": str(tmp_path / "out")})
    assert not (tmp_path / "out").exists()


ORDINARY = {
    "{{ text | trim | upper }}!": "A B C!",
    "{{ text.split() | map('capitalize') | join('-') }}": "A-B-C",
    "{{ '%s (%d)' | format(text, year) }} {{ '%05.1f' % 2.25 }}": "a b c (2009) 002.2",
    "{{ '{0:>6}|{y!s}'.format(text, y=year) }}": " a b c|2009",
    "{{ (text ~ '!') * 2 }}": "a b c!a b c!",
    "{{ text[:3] }}{{ text[-1] }}{{ tags[0] }}{{ meta.title }}{{ meta['title'] }}": "a bcxUpUp",
    "{% for k, v in meta.items() if k == 'title' %}{{ loop.index }}{{ k }}{{ v }}{% else %}none{% endfor %}": "1titleUp",
    "{% for t in tags %}{{ t }}{% if not loop.last %}, {% endif %}{% endfor %}": "x, y",
    "{% set ns = namespace(n=0) %}{% for t in tags %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}": "2",
    "{% macro say(x, n=2) %}{{ x * n }}{% endmacro %}{{ say('ab') }}{{ say('c', n=3) }}": "ababccc",
    "{% macro each() %}{{ caller(1) }}{% endmacro %}{% call(x) each() %}<{{ x }}>{% endcall %}": "<1>",
    "{% if text is string and year is divisibleby(7) and 'x' in tags %}yes{% endif %}": "yes",
    "{{ tags | sort(reverse=true) | first }}{{ tags | length }}{{ [3, 1, 2] | sum }}{{ [1.25] | map('round', 1) | first }}": (
        "y261.2"
    ),
    "{{ day.year }}-{{ day.isoformat() }}": "2020-2020-02-03",
    "{{ '<br />a &amp; b' | striptags }}{{ '<' | e }}{{ tags | tojson }}": 'a & b&lt;["x", "y"]',
    "{{ cycler('a', 'b').next() }}{{ range(3) | list }}{{ dict(a=1).a }}": "a[0, 1, 2]1",
    "{% with %}{% set z = 1 %}{{ z }}{% endwith %}{% raw %}{{ z }}{% endraw %}": "1{{ z }}",
    "{{ text if year > 2000 else none }}{{ missing | default('d') }}": "a b cd",
    "{{ none is none }} {{ tags == ['x', 'y'] }} {{ (1, 2) < (1, 3) }} {{ 7 // 2 }}": "True True True 3",
}


@pytest.mark.parametrize("source", list(ORDINARY))
def test_ordinary_templates_render_as_plain_jinja_does(source: str, parse: Callable[[str], Prompt]) -> None:
    doc = {
        "text": "a b c",
        "year": 2009,
        "tags": ["x", "y"],
        "meta": {"title": "Up"},
        "day": datetime.date(2020, 2, 3),
    }
    assert parse(source).render(doc).text == ORDINARY[source]
    assert jinja2.Environment().from_string(source).render(doc) == ORDINARY[source]


def test_filters_are_not_computed_while_a_template_is_read(parse: Callable[[str], Prompt]) -> None:
    """Jinja folds constants when it compiles."""
    assert parse("{% if text %}{{ 'x' | center(999999) | length }}{% endif %}").render({"text": "t"}).text == "999999"
    prompt = parse("{% if text %}ok{% else %}{{ 'x' | center(1000000000) }}{% endif %}")
    assert prompt.render({"text": "t"}).text == "ok"


def test_long_documents_render(parse: Callable[[str], Prompt]) -> None:
    text = "word " * 100_000
    rendered = parse(
        "{{ text | trim | replace('<br />', ' ') }} {% for w in text.split()[:3] %}{{ w }}{% endfor %} It"
    ).render({"text": text})
    assert rendered.text == text.strip() + " wordwordword It"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in text %}" * 60 + "{% endfor %}" * 60,
        "{% if text %}" * 300 + "x" + "{% endif %}" * 300,
        "{{ " + "1 + " * 20000 + "1 }}",
        "{{ " + "not " * 20000 + "1 }}",
        "{{ " + "[" * 500 + "]" * 500 + " }}",
        "{{ text" + ".a" * 20000 + " }}",
        "{{ text" + "|trim" * 15000 + " }}",
        "{{ 1 if 1 else " * 3000 + "2" + " }}" * 3000,
        "{% set label_words = " + "{'a': " * 900 + "'b'" + "}" * 900 + " %}",
    ],
    ids=lambda source: source[:20],
)
def test_deep_templates_are_refused_or_render(source: str, write: Callable[..., Path]) -> None:
    try:
        load_prompt(write(source)).render({"text": "x"})
    except PromptError as err:
        assert "one.jinja" in str(err)  # noqa: PT017
        assert len(str(err)) < 1000  # noqa: PT017


def test_a_template_of_any_length_is_no_prompt(write: Callable[..., Path]) -> None:
    with pytest.raises(PromptError, match="100,001 characters; a prompt has at most 100,000"):
        load_prompt(write("a" * 100_001))


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/hostname' %}",
        "{% import 'other.jinja' as other %}",
        "{% from 'other.jinja' import x %}",
        "{% extends 'other.jinja' %}",
    ],
)
def test_other_files_are_refused(source: str, write: Callable[..., Path]) -> None:
    with pytest.raises(PromptError, match="self-contained"):
        load_prompt(write(source))


def test_a_template_cannot_change_its_document(parse: Callable[[str], Prompt]) -> None:
    doc = {"text": "x", "tags": ["a"]}
    with pytest.raises(PromptError, match="unsafe"):
        parse("{{ tags.append('b') }}").render(doc)
    assert doc == {"text": "x", "tags": ["a"]}


def test_a_missing_column_is_named_with_those_that_exist(parse: Callable[[str], Prompt]) -> None:
    with pytest.raises(PromptError) as caught:
        parse("{{ text }} It").render({"sentence": "x", "label": 1})
    assert "one.jinja: the document has no column 'text'. Its columns: label, sentence." in str(caught.value)


def test_a_column_that_is_asked_about_may_be_missing(parse: Callable[[str], Prompt]) -> None:
    prompt = parse("{% if title is defined %}{{ title }}: {% endif %}{{ text }} It")
    assert prompt.render({"text": "x"}).text == "x It"
    assert prompt.render({"text": "x", "title": "T"}).text == "T: x It"


def test_null_is_not_printed_as_none(parse: Callable[[str], Prompt]) -> None:
    with pytest.raises(PromptError, match=r"null value.*Null in this document: 'text'"):
        parse("{{ text }} It").render({"text": None})
    assert parse("{% if title %}{{ title }} {% endif %}{{ text }}").render({"text": "x", "title": None}).text == "x"


def test_rendering_has_no_side_channels(parse: Callable[[str], Prompt]) -> None:
    prompt = parse("{{ text }}{% for word in text.split() %} {{ loop.index }}/{{ loop.length }} {{ word }}{% endfor %}")
    texts = {prompt.render({"text": "a b c"}).text for _ in range(5)}
    assert texts == {"a b c 1/3 a 2/3 b 3/3 c"}
    with pytest.raises(PromptError, match="no column 'lipsum'"):
        parse("{{ lipsum }}").render({"text": "x"})


# ------------------------------------------------------------------------------------------------- ids


def test_an_unknown_id_names_the_nearest_and_the_known() -> None:
    with pytest.raises(KeyError) as caught:
        load_prompt("sst/this_moive_is")
    message = caught.value.args[0]
    assert "Did you mean 'sst/this_movie_is'" in message
    assert "sst/it_was" in message
    assert "agnews/" not in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("this_movie_is", "'sst/this_movie_is'"),
        ("sts/this_movie_is", "'sst/this_movie_is'"),
        ("sst", "Prompts of sst:"),
        ("sst/*", "is a pattern"),
        ("nothing/like/it", "no prompt id"),
        ("", "Datasets with prompts:"),
    ],
)
def test_what_to_type_instead(name: str, expected: str) -> None:
    with pytest.raises((KeyError, PromptError)) as caught:
        load_prompt(name)
    assert expected in caught.value.args[0]


@pytest.mark.parametrize(
    "name",
    ["../secret/one", "mine/../../secret/one", "/etc/hostname", "mine/..", "..\\secret\\one", "mine/a\0b", "./one/x"],
)
def test_ids_stay_in_their_folder(
    name: str, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("{{ text }}", "secret/one")
    write("{{ text }}", "root/mine/one")
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path / "root"))
    with pytest.raises((PromptError, KeyError)):
        load_prompt(name)
    assert load_prompt("mine/one").id == "mine/one"


@pytest.mark.parametrize("link_folder", [False, True])
def test_links_out_of_the_folder_are_refused(
    link_folder: bool, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write("{{ text }}", "secret/one")
    (tmp_path / "root").mkdir()
    if link_folder:
        (tmp_path / "root" / "mine").symlink_to(target.parent)
    else:
        (tmp_path / "root" / "mine").mkdir()
        (tmp_path / "root" / "mine" / "one.jinja").symlink_to(target)
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path / "root"))
    with pytest.raises(PromptError, match="leads out of"):
        load_prompt("mine/one")


def test_the_users_folder_comes_first(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(WORDS + "{{ text }} Mine is", "sst/this_movie_is")
    write(WORDS + "{{ text }} New is", "sst/of_my_own")
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path))
    assert load_prompt("sst/this_movie_is").render({"text": "x"}).text == "x Mine is"
    found = find_prompts("sst/*")
    assert "sst/of_my_own" in found
    assert "sst/it_was" in found
    assert len(found) == len(set(found))
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(NotADirectoryError, match=f"{PROMPTS_VARIABLE}=.*nowhere: no such folder"):
        load_prompt("sst/it_was")


def test_paths(write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = write("{{ text }}", "mine/one"), write("{{ text }}", "mine/two")
    assert load_prompt(one) == load_prompt(str(one))
    assert load_prompt(one).id == one.as_posix()
    assert find_prompts(str(one.parent / "*.jinja")) == (one.as_posix(), two.as_posix())
    monkeypatch.chdir(tmp_path)
    assert find_prompts("mine/*.jinja") == ("mine/one.jinja", "mine/two.jinja")
    assert load_prompt(resources.prompts_folder() / "sst" / "it_was.jinja").id == "sst/it_was"
    with pytest.raises(FileNotFoundError, match="Did you mean the id 'sst/it_was'"):
        load_prompt("sst/it_was.jinja")
    with pytest.raises(KeyError, match="no such file"):
        find_prompts("mine/three*.jinja")


def test_patterns() -> None:
    assert find_prompts("sst/it_was") == ("sst/it_was",)
    assert set(find_prompts("*/it_was")) >= {"sst/it_was", "mr/it_was"}
    assert list(find_prompts("*")) == sorted(find_prompts("*"))
    with pytest.raises(KeyError, match="Prompts of sst"):
        find_prompts("sst/zzz*")


# ------------------------------------------------------------------------------------------------- sweeps


def test_one_name_is_itself(write: Callable[..., Path]) -> None:
    path = str(write("{{ text }}"))
    assert resolve_prompts("sst/it_was") == ("sst/it_was",)
    assert resolve_prompts(path) == (path,)
    assert resolve_prompts(["sst/it_was"]) == resolve_prompts(("sst/it_was",)) == ("sst/it_was",)


def test_patterns_are_expanded_in_place_and_a_prompt_is_taken_once() -> None:
    every = find_prompts("sst/*")
    assert resolve_prompts("sst/*") == every
    last = every[-1]
    assert resolve_prompts([last, "sst/*"]) == (last, *every[:-1])
    assert resolve_prompts(["sst/*", last, "sst/*"]) == every
    assert resolve_prompts(["mr/it_was", "sst/it_*", "cr/it_was"]) == ("mr/it_was", "sst/it_was", "cr/it_was")
    as_path = str(resources.prompts_folder() / "sst" / "it_was.jinja")
    assert resolve_prompts([as_path, "sst/it_was"]) == (as_path,)
    assert resolve_prompts(["sst/it_was", as_path]) == ("sst/it_was",)


def test_patterns_of_paths(write: Callable[..., Path], tmp_path: Path) -> None:
    two, one = write("{{ text }}", "mine/two"), write("{{ text }}", "mine/one")
    assert resolve_prompts(str(tmp_path / "mine" / "*.jinja")) == (one.as_posix(), two.as_posix())
    odd = write("{{ text }}", "mine/odd[1]")  # a file that looks like a pattern
    assert resolve_prompts(str(odd)) == (str(odd),)


def test_prompts_for_probes_are_left_out_of_patterns(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(WORDS + "{{ text }} It was", "mine/with_words")
    bare = write("{{ text }} It was", "mine/bare")
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path))
    assert resolve_prompts("mine/*") == ("mine/bare", "mine/with_words")
    assert not caplog.records
    assert resolve_prompts("mine/*", with_label_words=True) == ("mine/with_words",)
    assert "mine/*: left out, for want of label words: mine/bare." in caplog.text
    # Who names it means it, and is told where it is used.
    assert resolve_prompts(["mine/*", "mine/bare"], with_label_words=True) == ("mine/with_words", "mine/bare")
    assert resolve_prompts(str(bare), with_label_words=True) == (str(bare),)
    with pytest.raises(KeyError, match=r"'mine/b\*' matches only prompts without label words.*: mine/bare"):
        resolve_prompts("mine/b*", with_label_words=True)


@pytest.mark.parametrize(
    ("option", "error", "part"),
    [
        ("sst/it_wsa", KeyError, "Did you mean 'sst/it_was'"),
        (["sst/it_was", "sst/zzz*"], KeyError, "Prompts of sst"),
        ("mine/*.jinja", KeyError, "no such file"),
        ("sst/it_was.jinja", FileNotFoundError, "Did you mean the id 'sst/it_was'"),
        ("../sst/it_was", PromptError, "no prompt id"),
        ([], ValueError, "the list of prompts is empty"),
        (None, TypeError, "expected a name such as"),
        (["sst/it_was", 3], TypeError, "expected a name such as"),
        ({"natural_sst": "sst/it_was"}, TypeError, "or a list of names"),
    ],
)
def test_what_no_prompt_goes_by(option: object, error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        resolve_prompts(option)  # type: ignore[arg-type]
    assert part in caught.value.args[0]


# ------------------------------------------------------------------------------------------------- compose

# What no check refuses in a word: it is not empty, and neither begins nor ends in white space.
LABEL_WORDS = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1),
    st.lists(
        st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(lambda word: word == word.strip()),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)
LITERALS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r")).filter(
    lambda text: not any(sign in text for sign in ("{{", "{%", "{#"))
)


@given(LABEL_WORDS, LITERALS)
def test_what_is_composed_reads_back_the_same(label_words: dict[str, list[str]], text: str) -> None:
    source = compose_source(text, label_words, column="text")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.jinja"
        path.write_text(source, encoding="utf-8", newline="\n")
        prompt = load_prompt(path)
    assert prompt.label_words == {name: tuple(words) for name, words in label_words.items()}
    blank = "" if text[:1].isspace() else " "
    assert prompt.render({"text": "a document"}).text == f"a document{blank}{text}"
    assert prompt.render({"text": "{{ text }}"}).text == f"{{{{ text }}}}{blank}{text}"


def test_a_template_with_braces_is_taken_as_it_is(tmp_path: Path) -> None:
    source = compose_source('"{{ title | trim }}" was', {"a": ['"}}{%', "\\n"]}, column="text")
    prompt = parse_prompt("x/y", tmp_path / "y.jinja", source.removesuffix("\n"))
    assert prompt.label_words == {"a": ('"}}{%', "\\n")}
    assert prompt.render({"title": " Up "}).text == '"Up" was'
    assert not prompt.path.exists()


# ------------------------------------------------------------------------------------------------- duplicates


def _duplicates(*sources: str) -> list[tuple[str, ...]]:
    prompts = [parse_prompt(f"x/{number}", Path("y.jinja"), source) for number, source in enumerate(sources)]
    return duplicate_prompts(prompts)


@pytest.mark.parametrize(
    "other",
    [
        WORDS + "{{ text }} It was",
        "{#- A comment. -#}\n" + WORDS + "{{text}} It was",
        "{{ text }}{# A comment. #} It was" + WORDS.strip(),
        "{{ text }} It{%- set label_words = {'positive': ['great'], 'negative': ['bad', 'terrible']} %} was",
    ],
)
def test_the_same_prompt_under_two_names(other: str) -> None:
    assert _duplicates(WORDS + "{{ text }} It was", "{{ text }} It was", other) == [("x/0", "x/2")]


@pytest.mark.parametrize(
    "other",
    [
        WORDS + "{{ text }} It is",
        WORDS + "{{ text }}\nIt was",
        WORDS + "{{ text | trim }} It was",
        WORDS + "{{ title }} It was",
        WORDS.replace("great", "good") + "{{ text }} It was",
        WORDS.replace('"terrible", ', "") + "{{ text }} It was",
        WORDS.replace("positive", "very positive") + "{{ text }} It was",
        "{{ text }} It was",
    ],
)
def test_different_prompts(other: str) -> None:
    assert _duplicates(WORDS + "{{ text }} It was", other) == []


def test_label_words_that_are_printed_are_part_of_the_text() -> None:
    printing = "{{ text }} {{ label_words['positive'] }} or not? It was"
    assert _duplicates(WORDS + printing, WORDS + printing) == [("x/0", "x/1")]
    assert _duplicates(WORDS + printing, WORDS.replace("bad", "poor") + printing) == []


def test_groups_of_duplicates() -> None:
    one, two = WORDS + "{{ text }} It was", "{{ text }} It is"
    assert _duplicates(one, two, one, "{{ text }}", two, one) == [("x/0", "x/2", "x/5"), ("x/1", "x/4")]
    assert _duplicates() == []
    same = load_prompt("sst/it_was")
    assert duplicate_prompts([same, same]) == []  # one prompt, given twice


def test_no_prompts_that_ship_are_duplicates() -> None:
    for dataset in {name.partition("/")[0] for name in find_prompts("*")}:
        assert duplicate_prompts(map(load_prompt, find_prompts(f"{dataset}/*"))) == []


def test_importing_is_light() -> None:
    code = "import sys, harness_ext.prompts, harness_ext.scaffold; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(module.__file__).parents[1]), *sys.path])}
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert not {"torch", "transformers", "lm_eval", "datasets", "pyarrow"} & set(loaded.stdout.split())


# ------------------------------------------------------------------------------------------------- checks


def _messages(prompt: Prompt, **kwargs: object) -> list[str]:
    return [str(finding) for finding in check_prompt(prompt, **kwargs)]  # type: ignore[arg-type]


CLASSES = ("negative", "positive")


def test_a_good_prompt_has_no_findings(parse: Callable[[str], Prompt]) -> None:
    prompt = parse(WORDS + "{{ text }} This movie is\n")
    assert check_prompt(prompt, columns=["text", "label"], classes=CLASSES, label_column="label") == []
    assert words_by_class(prompt, ("positive", "negative")) == (("great",), ("terrible", "bad"))


@pytest.mark.parametrize(
    ("source", "severity", "part"),
    [
        (WORDS + "{{ text }} This movie is ", "error", "ends in white space"),
        (WORDS + "{{ text }}\nAnswer:\n\n", "error", "ends in white space"),
        (WORDS + "This movie is", "error", "no variable"),
        (WORDS + "{{ txt }} It was", "error", "no column 'txt'. Did you mean 'text'?"),
        (WORDS + "{{ text }} {{ label }} It was", "error", "'label' is the label column"),
        (WORDS + "{{ text }} {{ label_text }} It was", "warning", "may show the model the answer"),
        (WORDS + "{{ text }} {{ text }} It was", "warning", "not one stretch"),
        (WORDS + "{{ text }}", "warning", "nothing is left without the document"),
        (WORDS.replace("-", "") + "{{ text }} It was", "warning", "starts with white space"),
        ("{{ text }} It was", "warning", "no label_words"),
        ('{%- set label_words = {"negative": "bad"} -%}{{ text }} It', "error", "no label words for class 'positive'"),
        (
            '{%- set label_words = {"negative": "bad", "positve": "good"} -%}{{ text }} It',
            "error",
            "no label words for class 'positive' (is 'positve' meant?)",
        ),
        (
            '{%- set label_words = {"negative": "bad", "positive": "good", "neutral": "so"} -%}{{ text }} It',
            "error",
            "'neutral', which is no class",
        ),
        ('{%- set label_words = {"negative": [], "positive": "x"} -%}{{ text }} It', "error", "empty list of words"),
        ('{%- set label_words = {"negative": "", "positive": "x"} -%}{{ text }} It', "error", "an empty word"),
        ('{%- set label_words = {"negative": " y", "positive": "x"} -%}{{ text }} It', "error", "white space"),
        ('{%- set label_words = {"negative": "x", "positive": "x"} -%}{{ text }} It', "error", "two classes"),
        ('{%- set label_words = {"negative": ["y", "y"], "positive": "x"} -%}{{ text }} It', "error", "twice"),
    ],
)
def test_what_ruins_scores_is_found(source: str, severity: str, part: str, parse: Callable[[str], Prompt]) -> None:
    messages = _messages(parse(source), columns=["text", "label", "label_text"], classes=CLASSES, label_column="label")
    assert any(message.startswith(severity) and part in message for message in messages), messages


def test_an_example_of_the_dataset_is_rendered(parse: Callable[[str], Prompt]) -> None:
    prompt = parse(WORDS + "{{ text }} was rated {{ stars + 1 }} and is")
    assert any(message.startswith("warning") and "made-up" in message for message in _messages(prompt))
    assert _messages(prompt, example={"text": "x", "stars": 3}) == []
    assert any(message.startswith("error") for message in _messages(prompt, example={"text": "x", "stars": "3"}))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ text }} It", "sets no label_words, so it serves probes only. Add words for 'negative', 'positive'"),
        ('{%- set label_words = {"negative": "bad"} -%}{{ text }} It', "no label words for class 'positive'"),
        (WORDS + "{{ text }} It was ", "ends in white space"),
        (WORDS + "{{ text }} {{ grade }} It was", "'grade' is the label column"),
        ('{%- set label_words = {"negative": [], "positive": "x"} -%}{{ text }} It', "empty list of words"),
    ],
)
def test_natural_tasks_refuse_what_ruins_scores(source: str, problem: str, parse: Callable[[str], Prompt]) -> None:
    with pytest.raises(PromptError, match=problem):
        words_by_class(parse(source), CLASSES, label_column="grade")


def _encode_pieces(text: str) -> list[int]:
    """A tokenizer that knows a few words and splits the others into pieces of three characters."""
    ids = []
    for word in text.split(" "):
        pieces = [word] if word in ("This", "is", "bad", "good") else [word[i : i + 3] for i in range(0, len(word), 3)]
        ids += [int.from_bytes(piece.encode(), "big") for piece in pieces]
    return ids


def test_words_that_begin_alike_are_named(parse: Callable[[str], Prompt]) -> None:
    words = '{%- set label_words = {"negative": "possible", "positive": ["positive", "good"]} -%}'
    prompt = parse(words + "{{ text }} This is")
    messages = _messages(prompt, encode=_encode_pieces)
    alike = [message for message in messages if "begin with the same token" in message]
    assert len(alike) == 1
    assert "'possible' (negative), 'positive' (positive). " in alike[0]
    assert "the first token alone would be wrong" in alike[0]
    assert "info: word 'possible' of 'negative' is 3 tokens; the score is that of all of them" in messages
    assert not any("'good'" in message for message in messages)


def test_words_that_contain_each_other_are_named(parse: Callable[[str], Prompt]) -> None:
    words = '{%- set label_words = {"negative": "good grief", "positive": "good"} -%}'
    messages = _messages(parse(words + "{{ text }} This is"), encode=_encode_pieces)
    assert any("one begins with all of the other" in message for message in messages)


def test_words_that_the_tokenizer_cannot_tell_apart_are_an_error(parse: Callable[[str], Prompt]) -> None:
    prompt = parse(WORDS + "{{ text }} This is")
    messages = _messages(prompt, encode=lambda text: [len(word) > 0 for word in text.split(" ")])
    assert any(message.startswith("error") and "cannot tell them apart" in message for message in messages)
    messages = _messages(prompt, encode=lambda text: [1])
    assert any(message.startswith("error") and "no token of its own" in message for message in messages)


def test_tokens_are_those_that_follow_the_prompt(parse: Callable[[str], Prompt]) -> None:
    prompt = parse(WORDS + "{{ text }} This is")
    context = prompt.render(example_document(prompt)).text
    for _, word, ids, clean in tokenize_words(prompt, _encode_pieces, context=context):
        assert [*_encode_pieces(context), *ids] == _encode_pieces(f"{context} {word}")
        assert clean

    def merging(text: str) -> list[int]:  # "is great" is one token
        return [hash(piece) for piece in text.replace("is great", "is_great").split(" ")]

    great = tokenize_words(prompt, merging, context=context)[-1]
    assert great.word == "great"
    assert not great.clean
    assert len(great.ids) == 1
    assert any("changes how the end of the prompt" in message for message in _messages(prompt, encode=merging))
