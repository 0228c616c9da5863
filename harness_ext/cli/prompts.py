"""`harness-ext prompts list|show|check`: the templates, and what would ruin their scores."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from harness_ext.prompts import Prompt
    from harness_ext.scaffold import DatasetConfig

__all__ = ["add_parser", "check", "list_prompts", "show"]


def add_parser(subparsers: Any) -> None:
    """Add `prompts` with its actions `list`, `show` and `check`."""
    parser: argparse.ArgumentParser = subparsers.add_parser("prompts", help="list, show or check prompt templates")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="list prompts with their label words")
    listing.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="such as 'sst/*' (default: all)")
    listing.set_defaults(func=list_prompts)

    showing = actions.add_parser("show", help="print one prompt, and an example of what the model reads")
    showing.add_argument("prompt", metavar="ID", help="such as sst/it_was, or a path that ends in .jinja")
    showing.add_argument("--dataset", metavar="D", help="its dataset: a name, or a folder with _dataset.yaml")
    showing.set_defaults(func=show)

    checking = actions.add_parser(
        "check",
        help="look for what silently ruins scores; status 1 if there is any",
        description="Look for what silently ruins scores. With --model, show the tokens of every label word.",
    )
    checking.add_argument("prompts", nargs="+", metavar="FILE_OR_ID", help="paths, ids, or patterns such as 'sst/*'")
    checking.add_argument("--model", metavar="M", help="tokenise label words as this model does: a Hub id or a folder")
    checking.add_argument(
        "--dataset",
        metavar="D",
        help="check columns and classes against this dataset: a name, or a folder with _dataset.yaml "
        "(default: the one that the prompt's own folder is named after)",
    )
    checking.set_defaults(func=check)


def list_prompts(args: argparse.Namespace) -> int:
    """Print one line for each prompt.

    Raises:
        KeyError: If none matches the pattern.
    """
    from harness_ext.prompts import find_prompts, load_prompt

    ids = find_prompts(args.pattern)
    width = max(map(len, ids))
    for prompt_id in ids:
        print(f"{prompt_id:<{width}}  {_words(load_prompt(prompt_id).label_words)}")
    return 0


def show(args: argparse.Namespace) -> int:
    """Print a prompt's file, label words, and a rendering.

    Raises:
        KeyError: If there is no such prompt.
    """
    from harness_ext.prompts import example_document, load_prompt

    prompt = load_prompt(args.prompt)
    facts = _facts(prompt, args.dataset)
    doc = facts.example or example_document(prompt)
    text, span = prompt.render(doc)
    print(f"id           {prompt.id}\nfile         {prompt.path}\ndigest       {prompt.digest}")
    print(f"columns      {', '.join(sorted(prompt.variables))}")
    print(f"label words  {_words(prompt.label_words) or 'none: for probes only'}")
    print(f"\n{prompt.source}\n")
    print(f"--- what the model reads: {'a document of ' + facts.source if facts.example else 'a made-up document'}")
    print(text if span is None else f"{text[: span.start]}[{text[slice(*span)]}]{text[span.end :]}")
    print("--- without the document, for acc_pmi")
    print(prompt.render_without_document(doc))
    return 0


def check(args: argparse.Namespace) -> int:
    """Check prompts, print the findings and return 1 if one of them is an error.

    Raises:
        KeyError: If there is no such prompt or dataset.
    """
    from harness_ext.prompts import (
        PromptError,
        check_prompt,
        example_document,
        find_prompts,
        load_prompt,
        tokenize_words,
    )

    names = [hit for name in args.prompts for hit in (find_prompts(name) if _is_pattern(name) else [name])]
    tokenizer = None if args.model is None else _load_tokenizer(args.model)
    encode = None if tokenizer is None else _encoder(tokenizer)
    num_errors = 0
    for name in names:
        try:
            prompt = load_prompt(name)
        except PromptError as err:
            print(f"{name}\n  error: {err}")
            num_errors += 1
            continue
        facts = _facts(prompt, args.dataset)
        config = facts.config
        print(f"{prompt.id}  ({facts.source or 'dataset not known: columns and classes are not checked'})")
        findings = check_prompt(
            prompt,
            columns=facts.columns,
            classes=None if config is None else config.classes,
            label_column=None if config is None else config.label_column,
            example=facts.example,
            encode=encode,
        )
        for finding in findings:
            print(f"  {finding}")
        errors = sum(finding.severity == "error" for finding in findings)
        num_errors += errors
        if not findings:
            print("  nothing to report")
        if tokenizer is not None and encode is not None and prompt.label_words and not errors:
            context = prompt.render(facts.example or example_document(prompt)).text
            rows = [
                (label, word, " ".join(map(str, ids)), " ".join(map(repr, tokenizer.convert_ids_to_tokens(list(ids)))))
                for label, word, ids, _ in tokenize_words(prompt, encode, context=context)
            ]
            _print_table(("class", "word", "token ids", "tokens"), rows)
    print(f"\n{_count(len(names), 'prompt')}, {_count(num_errors, 'error')}")
    return 1 if num_errors else 0


class _Facts(NamedTuple):
    """What is known of a prompt's dataset."""

    config: DatasetConfig | None = None
    columns: tuple[str, ...] | None = None
    example: Mapping[str, Any] | None = None
    source: str = ""


def _facts(prompt: Prompt, dataset: str | None) -> _Facts:
    """Read the dataset's YAML and, in the local mirror, its first document.

    Without a mirror the columns are not known, beyond those that the YAML names: a prompt that uses others passes.
    """
    from harness_ext import resources, scaffold

    configs = resources.task_configs_folder()
    name = prompt.path.resolve().parent.name if dataset is None else dataset
    for folder in (configs / name, *([] if dataset is None else [Path(dataset)])):
        if (folder / "_dataset.yaml").is_file():
            config = scaffold.read_dataset(folder)
            break
    else:
        if dataset is None:
            return _Facts()
        known = ", ".join(sorted(path.parent.name for path in configs.glob("*/_dataset.yaml")))
        raise KeyError(f"unknown dataset {dataset!r}: neither one of {known} nor a folder with _dataset.yaml.")
    data = os.environ.get(scaffold.DATA_VARIABLE)
    mirror = scaffold.read_mirror(Path(data).expanduser() if data else None, config.dataset_path)
    for split in config.splits:
        if split in mirror:
            row = next(islice(mirror[split].rows(), 1), None)
            if row:
                return _Facts(config, tuple(row), row, f"{config.dataset_path}, {split} split of the local mirror")
    named = {config.text_column, config.label_column}
    columns = tuple(sorted(named)) if prompt.variables <= named else None
    return _Facts(config, columns, None, config.dataset_path)


def _load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    return tokenizer


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], Sequence[int]]:
    # Special tokens are the engine's business; one at the end would hide the word.
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[") and not Path(name).is_file()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _words(label_words: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{label}: {', '.join(words)}" for label, words in label_words.items())


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
