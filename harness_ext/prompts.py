"""Find, render and check prompt templates: `prompts/<dataset>/<name>.jinja`, one file per prompt.

    {%- set label_words = {"negative": ["terrible", "bad"], "positive": ["great", "good"]} -%}
    {{ text }} This movie is

A template sees the columns of one row of its dataset. `label_words` is read from the syntax tree, never computed, so
that listing prompts runs none of them. A label word is scored as the continuation `" " + word` of the rendered text.

Templates run in a sandbox with limits on time and memory, see `harness_ext.sandbox`: a template of unknown origin renders, or
is refused with its file and the reason.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
import jinja2.meta
from jinja2 import nodes

from harness_ext import resources, sandbox
from harness_ext.contracts import Span

__all__ = [
    "PROMPTS_VARIABLE",
    "Finding",
    "Prompt",
    "PromptError",
    "Rendered",
    "WordTokens",
    "check_prompt",
    "compose_source",
    "duplicate_prompts",
    "example_document",
    "find_prompts",
    "is_pattern",
    "is_prompt_id",
    "load_prompt",
    "parse_prompt",
    "prompt_folders",
    "resolve_prompts",
    "tokenize_words",
    "words_by_class",
]

logger = logging.getLogger("lm_eval.harness_ext.prompts")

PROMPTS_VARIABLE = "HARNESS_EXT_PROMPTS"
"""Environment variable that names a folder of the user's own prompts, which is searched before the package's."""

_SUFFIX = ".jinja"
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_MAX_SOURCE = 100_000
_MAX_REASON = 300
_PRIVATE_USE = range(0xE000, 0xF900)


class PromptError(ValueError):
    """A template cannot be read, or cannot be rendered for a document."""


class Rendered(NamedTuple):
    """A prompt for one document.

    Attributes:
        text: What the model reads.
        document: Where the document stands in `text`; None where that is not one stretch of it.
    """

    text: str
    document: Span | None


@dataclass(frozen=True)
class Prompt:
    """One template.

    Attributes:
        id: `dataset/name`, or the path it was loaded from where that lies in no prompt folder.
        path: The file.
        source: Its text, without the newline that ends the file.
        label_words: Class name -> words that stand for it. Empty: the prompt serves probes only.
        variables: The columns it uses.
        digest: First 12 hexadecimal digits of the SHA-256 of `source`.
    """

    id: str
    path: Path
    source: str
    label_words: Mapping[str, tuple[str, ...]] = field(hash=False)
    variables: frozenset[str]
    digest: str

    def document_variable(self, doc: Mapping[str, Any]) -> str | None:
        """Return the column that holds the document: the longest string among those that the template uses."""
        strings = sorted(name for name in self.variables if isinstance(doc.get(name), str))
        return max(strings, key=lambda name: len(doc[name]), default=None)

    def render(self, doc: Mapping[str, Any]) -> Rendered:
        """Render the prompt for `doc`, a mapping from column to value.

        Raises:
            PromptError: If a column is missing or null, or the template breaks a limit or fails.
        """
        text = self._text(doc)
        return Rendered(text, self._document_span(doc, text))

    def render_without_document(self, doc: Mapping[str, Any]) -> str:
        """Render the prompt with an empty document and no leading white space, the premise of domain-conditional PMI.

        For `{{ text }} This movie is` that is `This movie is`. Source: Holtzman et al. (2021), arXiv:2104.08315.
        """
        name = self.document_variable(doc)
        return self._text(doc if name is None else {**doc, name: ""}).lstrip()

    def _document_span(self, doc: Mapping[str, Any], text: str) -> Span | None:
        """Put a marker where the document stands: what precedes and follows it is the template's own.

        So the span is right under filters such as `trim`, which a search for the column's value would miss.
        """
        name = self.document_variable(doc)
        if name is None:
            return None
        marker = next(chr(code) for code in _PRIVATE_USE if chr(code) not in text and chr(code) not in self.source)
        try:
            before, found, after = self._text({**doc, name: marker}).partition(marker)
        except PromptError:  # the template needs more of its document than one character
            return None
        start, end = len(before), len(text) - len(after)
        once = bool(found) and marker not in after
        if not once or start > end or not text.startswith(before) or not text.endswith(after):
            return None
        return Span(start, end)

    def _text(self, doc: Mapping[str, Any]) -> str:
        try:
            text = "".join(_ENVIRONMENT.pieces(_compile(self.source), doc))
        except jinja2.UndefinedError as err:
            missing = ", ".join(repr(name) for name in sorted(self.variables - doc.keys()))
            reason = f"the document has no column {missing}" if missing else _reason(err)
            raise PromptError(f"{self.path}: {reason}. Its columns: {', '.join(sorted(map(str, doc)))}.") from err
        except Exception as err:  # whatever the template's own expressions raise
            null = ", ".join(repr(name) for name in sorted(self.variables) if doc.get(name, "") is None)
            hint = f" Null in this document: {null}." if null else ""
            raise PromptError(f"{self.path}: cannot be rendered: {_reason(err)}.{hint}") from err
        if half := _lone_surrogate(text):
            raise PromptError(
                f"{self.path}: renders to {half}, half of a surrogate pair, which is no character. Correct the template, or "
                "the document where it comes from there."
            )
        return text


def _reason(error: Exception) -> str:
    text = str(error).rstrip(".") or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} …"


def _lone_surrogate(text: str) -> str | None:
    """The first character that is none, such as `U+D800`: tokenizers take UTF-8, which cannot say it."""
    try:
        text.encode()
    except UnicodeEncodeError as err:
        return f"U+{ord(text[err.start]):04X}"
    return None


# ------------------------------------------------------------------------------------------------- find and load


def prompt_folders(data_folders: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Return the folders that hold prompts, in the order in which an id is looked up.

    Args:
        data_folders: Folders of data, each of which may have prompts for them in a folder `prompts/`. They come last, so that
            what lies beside a model adds prompts and replaces none.

    Raises:
        NotADirectoryError: If the environment variable HARNESS_EXT_PROMPTS names no folder.
    """
    beside_data = [folder / "prompts" for folder in data_folders if (folder / "prompts").is_dir()]
    own = os.environ.get(PROMPTS_VARIABLE)
    if not own:
        return (resources.prompts_folder(), *beside_data)
    folder = Path(own).expanduser()
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{PROMPTS_VARIABLE}={own}: no such folder. Make it name a folder of <dataset>/<name>.jinja, or unset it."
        )
    return (folder, resources.prompts_folder(), *beside_data)


def find_prompts(pattern: str, *, data_folders: Sequence[Path] = ()) -> tuple[str, ...]:
    """Return the sorted ids that match a shell pattern such as `sst/*`, or the paths if it ends in `.jinja`.

    Args:
        pattern: Of ids or of paths.
        data_folders: See `prompt_folders`.

    Raises:
        KeyError: If none matches; the message names the nearest ids.
    """
    if pattern.endswith(_SUFFIX):
        path = Path(pattern).expanduser()
        found = sorted(hit.as_posix() for hit in Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        if not found:
            raise KeyError(f"{pattern}: no such file. A prompt of the package goes by its id, such as 'sst/it_was'.")
        return tuple(found)
    known = _known_ids(data_folders)
    matches = tuple(prompt_id for prompt_id in known if fnmatch.fnmatchcase(prompt_id, pattern))
    if not matches:
        raise _unknown(pattern, known)
    return matches


def is_pattern(name: str) -> bool:
    """Say whether a name is a shell pattern, one with `*`, `?` or `[`, and not a file that is called so."""
    return any(sign in name for sign in "*?[") and not Path(name).expanduser().is_file()


def is_prompt_id(name: str) -> bool:
    """Say whether a name has the form of an id, `dataset/name`."""
    return _ID.fullmatch(name) is not None and not name.endswith(_SUFFIX)


def resolve_prompts(
    option: str | Sequence[str], *, with_label_words: bool = False, data_folders: Sequence[Path] = ()
) -> tuple[str, ...]:
    """Return the prompts that an option names, in its order: ids and paths for `load_prompt`.

    A pattern stands for its matches, sorted. A prompt that is named twice, be it by a pattern, its id or its path, is
    taken where it is named first. Prompts of equal text under different names stay; see `duplicate_prompts`.

    Args:
        option: An id, a path that ends in `.jinja`, a pattern such as `sst/*`, or a list of any of them.
        with_label_words: Leave out prompts without label words, which natural tasks cannot use, where a pattern brought
            them in; a warning names them. One that is named itself stays, for its user to find out.
        data_folders: See `prompt_folders`.

    Raises:
        KeyError: If there is no such id, or a pattern matches nothing; the message names the nearest ids.
        FileNotFoundError: If there is no such file.
        PromptError: If an id is malformed, or `with_label_words` is set and a pattern matches a file that is no template.
        TypeError: If `option` is neither a string nor a list of strings.
        ValueError: If the list is empty.
    """
    names = [option] if isinstance(option, str) else option
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"prompt is {option!r}; expected a name such as 'sst/it_was' or 'sst/*', or a list of names.")
    if not names:
        raise ValueError("the list of prompts is empty; expected at least one name, such as 'sst/it_was' or 'sst/*'.")
    by_file: dict[Path, str] = {}
    for name in names:
        if is_pattern(name):
            matches = find_prompts(name, data_folders=data_folders)
            if with_label_words:
                matches = _with_label_words(name, matches, data_folders)
        else:
            matches = (name,)
        for match in matches:
            path = _existing(match) if match.endswith(_SUFFIX) else _locate(match, data_folders)
            by_file.setdefault(path.resolve(), match)
    return tuple(by_file.values())


def _with_label_words(pattern: str, matches: Sequence[str], data_folders: Sequence[Path]) -> tuple[str, ...]:
    kept = tuple(name for name in matches if load_prompt(name, data_folders=data_folders).label_words)
    left_out = ", ".join(name for name in matches if name not in kept)
    if not kept:
        raise KeyError(
            f"{pattern!r} matches only prompts without label words, which serve probes alone: {left_out}. Add label_words "
            "to one of them, or name another prompt."
        )
    if left_out:
        logger.warning("%s: left out, for want of label words: %s.", pattern, left_out)
    return kept


def load_prompt(prompt: str | Path, *, data_folders: Sequence[Path] = ()) -> Prompt:
    """Load a prompt by id (`sst/it_was`) or by a path that ends in `.jinja`.

    Args:
        prompt: The id or the path.
        data_folders: See `prompt_folders`.

    Raises:
        KeyError: If there is no such id; the message names the nearest ones.
        FileNotFoundError: If there is no such file.
        PromptError: If the name leads out of the prompt folders, or the file is no valid template.
    """
    name = str(prompt)
    if not name.endswith(_SUFFIX):
        return _read(name, _locate(name, data_folders))
    path = _existing(name)
    resolved = path.resolve()
    if any(resolved.parent.parent == folder.resolve() for folder in prompt_folders(data_folders)):
        return _read(f"{resolved.parent.name}/{resolved.stem}", path)
    return _read(path.as_posix(), path)


def _existing(name: str) -> Path:
    """Return the file that a path names."""
    path = Path(name).expanduser()
    if not path.is_file():
        as_id = "/".join(path.with_suffix("").parts[-2:])
        hint = f" Did you mean the id {as_id!r}?" if as_id in _known_ids() else ""
        raise FileNotFoundError(f"{name}: no such prompt file.{hint}")
    return path


def _known_ids(data_folders: Sequence[Path] = ()) -> list[str]:
    files = (path for folder in prompt_folders(data_folders) for path in folder.glob(f"*/*{_SUFFIX}"))
    return sorted({f"{path.parent.name}/{path.stem}" for path in files})


def _locate(prompt_id: str, data_folders: Sequence[Path] = ()) -> Path:
    if not is_prompt_id(prompt_id):
        if "/" not in prompt_id or any(sign in prompt_id for sign in "*?["):
            raise _unknown(prompt_id, _known_ids(data_folders))
        raise PromptError(
            f"{prompt_id!r} is no prompt id. Expected dataset/name, such as 'sst/it_was', or a path to a .jinja file."
        )
    for folder in prompt_folders(data_folders):
        path = folder / f"{prompt_id}{_SUFFIX}"
        if path.is_file():
            if not path.resolve().is_relative_to(folder.resolve()):
                raise PromptError(f"{path} leads out of {folder}, to {path.resolve()}. Put the file itself there.")
            return path
    raise _unknown(prompt_id, _known_ids(data_folders))


def _unknown(name: str, known: Sequence[str]) -> KeyError:
    dataset = name.partition("/")[0]
    siblings = [prompt_id for prompt_id in known if prompt_id.startswith(f"{dataset}/")]
    same_name = [prompt_id for prompt_id in known if prompt_id.partition("/")[2] == name]
    close = same_name or difflib.get_close_matches(name, siblings or known, n=3, cutoff=0.5)
    if any(fnmatch.fnmatchcase(prompt_id, name) for prompt_id in known):
        return KeyError(f"{name!r} is a pattern that several prompts may match; expected one id, such as {known[0]!r}.")
    parts = [f"unknown prompt {name!r}."]
    if close:
        parts.append("Did you mean " + " or ".join(repr(prompt_id) for prompt_id in close) + "?")
    if siblings:
        parts.append(f"Prompts of {dataset}: {', '.join(siblings)}.")
    else:
        datasets = sorted({prompt_id.partition("/")[0] for prompt_id in known})
        parts.append(f"Datasets with prompts: {', '.join(datasets)}.")
    return KeyError(" ".join(parts))


# ------------------------------------------------------------------------------------------------- parse


_ENVIRONMENT = sandbox.Environment()


@functools.lru_cache(maxsize=1024)
def _compile(source: str) -> jinja2.Template:
    return _ENVIRONMENT.metered(_ENVIRONMENT.parse(source))


def _read(prompt_id: str, path: Path) -> Prompt:
    try:
        source = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as err:
        raise PromptError(f"{path}: not UTF-8 text ({err}). Save it as UTF-8.") from err
    return parse_prompt(prompt_id, path, source)


def parse_prompt(prompt_id: str, path: Path, source: str) -> Prompt:
    """Make a prompt of the text of a template, which `path` need not hold yet.

    Raises:
        PromptError: If it is no valid template.
    """
    if len(source) > _MAX_SOURCE:
        raise PromptError(f"{path}: {len(source):,} characters; a prompt has at most {_MAX_SOURCE:,}.")
    if half := _lone_surrogate(source):
        raise PromptError(f"{path}: has {half}, half of a surrogate pair, which is no character. Remove it.")
    source = source.removesuffix("\n")  # editors add it
    try:
        # Compiling finds unknown filters and tests, and what a prompt may not do, which parsing does not.
        _compile(source)
        tree = _ENVIRONMENT.parse(source)
        label_words = _read_label_words(tree, path)
        variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
    except jinja2.TemplateSyntaxError as err:
        raise PromptError(f"{path}, line {err.lineno}: {_reason(err)}.") from err
    except PromptError:
        raise
    except RecursionError as err:
        raise PromptError(f"{path}: nested too deeply.") from err
    except Exception as err:  # of Python's compiler: so many nested blocks, so deep an expression
        raise PromptError(f"{path}: cannot be compiled: {_reason(err)}.") from err
    return Prompt(
        id=prompt_id,
        path=path,
        source=source,
        label_words=label_words,
        variables=variables,
        digest=hashlib.sha256(source.encode()).hexdigest()[:12],
    )


def _read_label_words(tree: nodes.Template, path: Path) -> dict[str, tuple[str, ...]]:
    """Read `{% set label_words = {...} %}` without running the template; {} where there is none."""
    form = '{%- set label_words = {"class": ["word", "word"], ...} -%}'

    def error(node: nodes.Node, problem: str) -> PromptError:
        return PromptError(f"{path}, line {node.lineno}: {problem}. Expected {form}, with literal strings.")

    for block in tree.find_all(nodes.AssignBlock):
        if _is_label_words(block.target):
            raise error(block, "label_words is set to a block of text")
    found = [assign for assign in tree.find_all(nodes.Assign) if _is_label_words(assign.target)]
    if not found:
        return {}
    if len(found) > 1:
        raise error(found[1], "label_words is set twice")
    assign, literal = found[0], found[0].node
    if assign not in tree.body:
        raise error(assign, "label_words is set inside a block")
    if not isinstance(literal, nodes.Dict):
        raise error(assign, "label_words is not a dictionary")

    def string(node: nodes.Node, what: str) -> str:
        if not isinstance(node, nodes.Const) or not isinstance(node.value, str):
            raise error(node, f"{what} is not a literal string")
        if half := _lone_surrogate(node.value):
            raise error(node, f"{what} has {half}, half of a surrogate pair, which is no character")
        return node.value

    label_words: dict[str, tuple[str, ...]] = {}
    for pair in literal.items:
        name = string(pair.key, "a class name")
        if name in label_words:
            raise error(pair, f"class {name!r} occurs twice")
        items = pair.value.items if isinstance(pair.value, nodes.List | nodes.Tuple) else [pair.value]
        label_words[name] = tuple(string(item, f"a word of class {name!r}") for item in items)
    return label_words


# ------------------------------------------------------------------------------------------------- compose


def compose_source(text: str, label_words: Mapping[str, Sequence[str]], *, column: str) -> str:
    """Return the source of a template whose file says `label_words` and then `text`.

    Words and class names come back from `parse_prompt` as they are given, whatever quotes, braces or backslashes they
    have.

    Args:
        text: A template, such as `{{ text }} It was`. Text without Jinja's `{{`, `{%` or `{#` is put after the document.
        label_words: Class name -> words.
        column: The column of the document.
    """
    if not any(sign in text for sign in ("{{", "{%", "{#")):
        text = f"{{{{ {column} }}}}{'' if text[:1].isspace() else ' '}{text}"
    # JSON's strings, lists and objects are Jinja's literals too, if characters beyond ASCII stay as they are: Jinja
    # would read the two halves of a surrogate pair as two characters.
    words = {name: list(of_class) for name, of_class in label_words.items()}
    return f"{{%- set label_words = {json.dumps(words, ensure_ascii=False)} -%}}\n{text}\n"


# ------------------------------------------------------------------------------------------------- duplicates


def duplicate_prompts(prompts: Iterable[Prompt]) -> list[tuple[str, ...]]:
    """Return the groups of ids that are one prompt under several names: they give every document the same scores.

    They have the same text, by their syntax trees without the statement that sets `label_words`, so that comments,
    blanks inside of tags and the way of quoting do not count; and the same words for each class, in any order.
    Templates that come to the same text by different expressions are not found. Those of the same text with other label
    words are no duplicates: they share all forward work and are scored differently.
    """
    groups: dict[tuple[str, frozenset[tuple[str, frozenset[str]]]], dict[str, None]] = {}
    for prompt in prompts:
        words = frozenset((name, frozenset(of_class)) for name, of_class in prompt.label_words.items())
        groups.setdefault((_text_key(prompt.source), words), {})[prompt.id] = None
    return [tuple(ids) for ids in groups.values() if len(ids) > 1]


def _text_key(source: str) -> str:
    """Return what is equal for two templates of the same text, whatever their label words."""
    body = _ENVIRONMENT.parse(source).body
    # A template may print its label words, and then they are part of its text.
    used = any(name.name == "label_words" and name.ctx == "load" for node in body for name in node.find_all(nodes.Name))
    pieces: list[nodes.Node] = []
    for node in body:
        if not used and isinstance(node, nodes.Assign) and _is_label_words(node.target):
            continue
        pieces += node.nodes if isinstance(node, nodes.Output) else [node]
    # The statement, or a comment, may stand between two stretches of plain text.
    key: list[str] = []
    for plain, run in itertools.groupby(pieces, key=lambda piece: isinstance(piece, nodes.TemplateData)):
        if plain:
            key.append(repr("".join(piece.data for piece in run if isinstance(piece, nodes.TemplateData))))
        else:
            key += map(repr, run)
    return "\n".join(key)


def _is_label_words(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "label_words"


# ------------------------------------------------------------------------------------------------- check


class Finding(NamedTuple):
    """What `check_prompt` has to say: an error makes scores wrong, a warning may, an info is good to know."""

    severity: Literal["error", "warning", "info"]
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}"


class WordTokens(NamedTuple):
    """How a label word continues a prompt.

    Attributes:
        label: The class.
        word: The word, without the blank that precedes it.
        ids: The tokens that follow those of the prompt.
        clean: Whether the prompt's own tokens are left as they are.
    """

    label: str
    word: str
    ids: tuple[int, ...]
    clean: bool


def words_by_class(
    prompt: Prompt, classes: Sequence[str], *, label_column: str | None = None
) -> tuple[tuple[str, ...], ...]:
    """Return the label words in the order of `classes`.

    Raises:
        PromptError: If a class has none, or `check_prompt` finds another error that needs no data to be seen.
    """
    if not prompt.label_words:
        wanted = ", ".join(repr(name) for name in classes)
        raise PromptError(f"{prompt.path}: sets no label_words, so it serves probes only. Add words for {wanted}.")
    findings = check_prompt(prompt, classes=classes, label_column=label_column)
    errors = [finding.message for finding in findings if finding.severity == "error"]
    if errors:
        raise PromptError(f"{prompt.path}: {'; '.join(errors)}.")
    return tuple(prompt.label_words[name] for name in classes)


def example_document(prompt: Prompt) -> dict[str, str]:
    """Return a made-up document that has every column the prompt uses."""
    return {name: f"an example of {name}" for name in prompt.variables}


def tokenize_words(prompt: Prompt, encode: Callable[[str], Sequence[int]], *, context: str) -> tuple[WordTokens, ...]:
    """Return how each label word tokenises after `context`, a rendering of the prompt.

    Args:
        encode: Text -> token ids, without a token that ends the text.
    """
    context_ids = tuple(encode(context))
    result = []
    for label, words in prompt.label_words.items():
        for word in words:
            ids = tuple(encode(f"{context} {word}"))
            shared = _shared_prefix(context_ids, ids)
            result.append(WordTokens(label, word, ids[shared:], clean=shared == len(context_ids)))
    return tuple(result)


def _shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def check_prompt(
    prompt: Prompt,
    *,
    columns: Collection[str] | None = None,
    classes: Sequence[str] | None = None,
    label_column: str | None = None,
    example: Mapping[str, Any] | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> list[Finding]:
    """Look for what silently ruins scores.

    Args:
        columns: The dataset's columns; None where they are not known.
        classes: The dataset's class names; None where they are not known.
        label_column: The column that holds the answer.
        example: A document of the dataset; None for a made-up one.
        encode: Text -> token ids, without a token that ends the text; None to leave tokens unchecked.
    """
    findings = list(_check_variables(prompt, columns, label_column))
    findings += _check_classes(prompt, classes)
    findings += _check_words(prompt)
    try:
        doc = example_document(prompt) if example is None else example
        text, span = prompt.render(doc)
        bare = prompt.render_without_document(doc)
    except PromptError as err:
        made_up = " (a made-up document)" if example is None else ""
        return [*findings, Finding("error" if example is not None else "warning", f"{err}{made_up}")]
    findings += _check_text(prompt, doc, text, span, bare)
    if encode is not None:
        findings += _check_tokens(tokenize_words(prompt, encode, context=text))
    return findings


def _check_variables(prompt: Prompt, columns: Collection[str] | None, label_column: str | None) -> Iterator[Finding]:
    if not prompt.variables:
        yield Finding("error", "no variable: every document gets the same prompt. Write {{ text }} or the like")
    known = sorted(prompt.variables if columns is None else columns)
    for name in sorted(prompt.variables - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        yield Finding("error", f"the dataset has no column {name!r}.{hint} Its columns: {', '.join(known)}")
    for name in sorted(prompt.variables):
        if name == label_column:
            yield Finding("error", f"it shows the model the answer: {name!r} is the label column")
        elif name.startswith("label"):
            yield Finding("warning", f"it may show the model the answer: column {name!r}")


def _check_classes(prompt: Prompt, classes: Sequence[str] | None) -> Iterator[Finding]:
    if not prompt.label_words:
        yield Finding("warning", "no label_words: natural tasks refuse it, probes can use it")
        return
    if classes is None:
        return
    extra = [name for name in prompt.label_words if name not in classes]
    for name in classes:
        if name not in prompt.label_words:
            near = difflib.get_close_matches(name, extra, n=1)
            hint = f" (is {near[0]!r} meant?)" if near else ""
            yield Finding("error", f"no label words for class {name!r}{hint}")
    for name in extra:
        yield Finding("error", f"label words for {name!r}, which is no class. Classes: {', '.join(map(repr, classes))}")


def _check_words(prompt: Prompt) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for label, words in prompt.label_words.items():
        if not words:
            yield Finding("error", f"class {label!r} has an empty list of words")
        for word in words:
            if not word.strip():
                yield Finding("error", f"class {label!r} has an empty word")
            elif word != word.strip():
                yield Finding(
                    "error", f"word {word!r} begins or ends in white space. The blank before it is added anyway"
                )
            if seen.setdefault(word, label) != label:
                yield Finding("error", f"word {word!r} stands for two classes, {seen[word]!r} and {label!r}")
        for word in sorted({word for word in words if words.count(word) > 1}):
            yield Finding("error", f"class {label!r} has word {word!r} twice, so that it would count twice")


def _check_text(prompt: Prompt, doc: Mapping[str, Any], text: str, span: Span | None, bare: str) -> Iterator[Finding]:
    if text != text.rstrip():
        yield Finding(
            "error", "the prompt ends in white space, and the label word brings a blank of its own. Remove it"
        )
    if span is None and prompt.document_variable(doc) is not None:
        yield Finding(
            "warning", "the document is not one stretch of the prompt, so a prompt that is too long cannot be cut"
        )
    if span is not None and text[: span.start] != text[: span.start].lstrip():
        yield Finding("warning", 'the prompt starts with white space. Write {%- set … -%}, with the "-", or {#- … -#}')
    if not bare.strip():
        yield Finding("warning", "nothing is left without the document: acc_pmi has no premise to condition on")


def _check_tokens(words: Sequence[WordTokens]) -> Iterator[Finding]:
    for label, word, ids, clean in words:
        if not ids:
            yield Finding("error", f"word {word!r} of {label!r} gives no token of its own after this prompt")
        elif not clean:
            yield Finding("warning", f"word {word!r} of {label!r} changes how the end of the prompt is tokenised")
        elif len(ids) > 1:
            yield Finding("info", f"word {word!r} of {label!r} is {len(ids)} tokens; the score is that of all of them")
    for first, second in itertools.combinations([word for word in words if word.ids], 2):
        pair = f"{first.word!r} ({first.label}) and {second.word!r} ({second.label})"
        if first.word == second.word:
            continue
        if first.ids == second.ids:
            yield Finding("error", f"{pair} are the same tokens: the model cannot tell them apart")
        elif _shared_prefix(first.ids, second.ids) == min(len(first.ids), len(second.ids)):
            yield Finding("warning", f"{pair}: one begins with all of the other, so its probability counts in both")
    by_first_token: dict[int, list[WordTokens]] = {}
    for entry in words:
        if entry.ids:
            by_first_token.setdefault(entry.ids[0], []).append(entry)
    for token, alike in by_first_token.items():
        if len({entry.label for entry in alike}) > 1:
            named = ", ".join(f"{entry.word!r} ({entry.label})" for entry in alike)
            yield Finding(
                "warning",
                f"words of different classes begin with the same token, {token}: {named}. Scores use all tokens, so "
                "they are right; those of the first token alone would be wrong",
            )
