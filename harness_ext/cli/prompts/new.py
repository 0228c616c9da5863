"""`harness-ext prompts new`: a template that passes `prompts check`."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness_ext.scaffold import DatasetConfig

__all__ = ["add_actions", "new"]

DEFAULT_TEXT = "\nIn one word:"
"""What follows the document without --template; adjectives and nouns go on from it."""


def add_actions(actions: Any) -> None:
    """Add the action `new`."""
    parser = actions.add_parser(
        "new",
        help="write a template that passes `check`",
        description="Write a template for a dataset: into the folder that HARNESS_EXT_PROMPTS names, else into the prompts/ "
        "of the checkout. A prompt that `check` would refuse is not written, and no file is overwritten.",
    )
    parser.add_argument("id", metavar="DATASET/NAME", help="such as sst/of_my_own")
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="what the model reads, with {{ text }} or the like for the document; text without braces is put after the "
        "document (default: 'In one word:' on a line of its own)",
    )
    parser.add_argument(
        "--word",
        action="append",
        default=[],
        metavar="CLASS=WORD",
        help="a label word; may be repeated, also for one class (default: the class's name if every class's is a word, "
        "else its words in the dataset's default prompt)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write FOLDER/DATASET/NAME.jinja")
    parser.add_argument("--dataset", metavar="D", help="a folder with _dataset.yaml, for a dataset of your own")
    parser.set_defaults(func=new)


def new(args: argparse.Namespace) -> int:
    """Write a template, and print where it is and how lm_eval uses it.

    Raises:
        KeyError: If there is no such dataset.
        ValueError: If the id is malformed, a word names no class, no folder can be written to, or the prompt would be
            refused; nothing is written then.
        FileExistsError: If the file exists.
    """
    from harness_ext.cli.prompts.dataset import data_folders, read_facts, require_config
    from harness_ext.paths import require_place
    from harness_ext.prompts import PROMPTS_VARIABLE, check_prompt, compose_source, is_prompt_id, parse_prompt

    if not is_prompt_id(args.id):
        raise ValueError(f"{args.id!r} is no prompt id; expected DATASET/NAME, such as 'sst/of_my_own'.")
    dataset, _, name = args.id.partition("/")
    folders = data_folders(None)
    config = require_config(args.dataset or dataset, folders)
    if not config.classes:
        raise ValueError(
            f"{config.name}: its data name its classes, and they are not here. Set HARNESS_EXT_DATA to the folder data/ of "
            "`harness-ext lab run`."
        )
    folder = _folder(args.out)
    if args.out is not None:
        require_place(folder, is_folder=True)
    path = folder / dataset / f"{name}.jinja"
    if path.exists():
        raise FileExistsError(f"{path} exists, and nothing is overwritten. Choose another name or remove it.")

    words = _label_words(args.word, config)
    source = compose_source(DEFAULT_TEXT if args.template is None else args.template, words, column=config.text_column)
    prompt = parse_prompt(args.id, path, source.removesuffix("\n"))
    facts = read_facts(prompt, args.dataset or dataset, folders=folders)
    findings = check_prompt(
        prompt,
        columns=facts.columns,
        classes=config.classes,
        label_column=config.label_column,
        example=facts.examples[0] if facts.examples else None,
    )
    errors = [finding.message for finding in findings if finding.severity == "error"]
    if errors:
        raise ValueError(f"nothing is written, since `prompts check` would refuse it: {'; '.join(errors)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(source)

    print(f"wrote {path}")
    for finding in findings:
        print(f"  {finding}")
    # An id is looked up in the folder of HARNESS_EXT_PROMPTS and in the package's own.
    variable = "" if _is_looked_up(folder) else f"{PROMPTS_VARIABLE}={shlex.quote(str(folder))} "
    own = "" if args.dataset is None else f" --dataset {shlex.quote(args.dataset)}"
    include = "" if args.dataset is None else f" --include_path {shlex.quote(str(Path(args.dataset).parent))}"
    option = shlex.quote(f'{{"prompt": "{args.id}"}}')
    print(
        "\nSee how it tokenises, and use it:\n"
        f"  {variable}harness-ext prompts check {args.id} --model gpt2{own}\n"
        f"  {variable}lm_eval --tasks natural_{config.name} --metadata {option} --model hf --model_args pretrained=gpt2"
        f"{include}"
    )
    return 0


def _folder(out: Path | None) -> Path:
    """Return the folder of prompts that is written to."""
    import harness_ext
    from harness_ext import resources
    from harness_ext.prompts import PROMPTS_VARIABLE, prompt_folders

    if out is not None:
        return out.expanduser()
    if os.environ.get(PROMPTS_VARIABLE):
        return prompt_folders()[0]  # which raises where it names no folder
    own = resources.prompts_folder()
    give = f"Give --out FOLDER, or set {PROMPTS_VARIABLE} to a folder of your own prompts."
    if own.parent == Path(harness_ext.__file__).resolve().parent:
        raise ValueError(f"harness_ext is installed as a copy, and the next install would overwrite {own}. {give}")
    if not os.access(own, os.W_OK):
        raise ValueError(f"{own} is not writable. {give}")
    return own


def _is_looked_up(folder: Path) -> bool:
    from harness_ext.prompts import prompt_folders

    return any(folder.resolve() == known.resolve() for known in prompt_folders())


def _label_words(given: Sequence[str], config: DatasetConfig) -> dict[str, list[str]]:
    """Sort words given as CLASS=WORD by class, and take the usual ones for classes that have none."""
    words: dict[str, list[str]] = {name: [] for name in config.classes}
    for entry in given:
        # A class's name may have the sign in it, and the name of another class may begin it.
        fitting = [name for name in config.classes if entry.startswith(f"{name}=")]
        if not fitting:
            example = f"{config.classes[0]}=WORD"
            raise ValueError(
                f"--word {entry!r}: expected CLASS=WORD with a class of {config.name}, such as {example!r}. Classes: "
                f"{', '.join(map(repr, config.classes))}."
            )
        name = max(fitting, key=len)
        words[name].append(entry.removeprefix(f"{name}="))
    missing = [name for name, of_class in words.items() if not of_class]
    if missing:
        usual = _usual_words(config, missing)
        words |= {name: usual[name] for name in missing}
    return words


def _usual_words(config: DatasetConfig, missing: Sequence[str]) -> dict[str, list[str]]:
    from harness_ext.prompts import load_prompt

    # `Sci/Tech`, `very negative` or `HUM` are no words that a text goes on with.
    if all(name.isalpha() and not name.isupper() for name in config.classes):
        return {name: [name] for name in config.classes}
    default = {} if config.prompt is None else load_prompt(config.prompt).label_words
    without = [name for name in missing if not default.get(name)]
    if without:
        options = " ".join(f"--word {shlex.quote(f'{name}=WORD')}" for name in without)
        raise ValueError(
            f"the class names of {config.name} are no words, and its default prompt has none for "
            f"{', '.join(map(repr, without))}. Give {options}."
        )
    return {name: list(default[name]) for name in missing}
