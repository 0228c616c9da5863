"""`harness-ext tasks list|new`: the datasets that have tasks, and a folder for one more."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

from harness_ext.paths import require_place

__all__ = ["add_parser", "list_tasks", "new"]


def add_parser(subparsers: Any) -> None:
    """Add `tasks` with its actions `list` and `new`."""
    parser: argparse.ArgumentParser = subparsers.add_parser("tasks", help="list the tasks, or add a dataset")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    show = actions.add_parser("list", help="list datasets with their tasks, classes and prompts")
    show.set_defaults(func=list_tasks)

    write = actions.add_parser(
        "new",
        help="write the task YAMLs and a first prompt for a dataset",
        description="Write the folder of a new dataset: its YAMLs, one task for each evaluator, and a first prompt. "
        "What is not given is read off the local mirror (HARNESS_EXT_DATA), where that has the dataset.",
    )
    write.add_argument("name", metavar="NAME", help="short name: the tasks are natural_NAME, probe_NAME, …")
    write.add_argument("--dataset", required=True, metavar="ORG/NAME", help="id on the Hugging Face Hub")
    write.add_argument("--config", metavar="NAME", help="configuration of the dataset, where the Hub has several")
    write.add_argument("--text-column", metavar="COLUMN", help="column of the document (default: text)")
    write.add_argument("--label-column", metavar="COLUMN", help="column of the label (default: label)")
    write.add_argument("--classes", metavar="A,B,…", help="class names, in the order of the labels 0, 1, …")
    write.add_argument("--train-split", metavar="SPLIT", help="default: train")
    write.add_argument("--test-split", metavar="SPLIT", help="default: test")
    write.add_argument(
        "--into",
        metavar="DIR",
        type=Path,
        help="write DIR/task_configs and DIR/prompts, not the checkout of harness_ext",
    )
    write.set_defaults(func=new)


def list_tasks(args: argparse.Namespace) -> int:
    """Print the evaluators, then one block for each dataset, whose tasks are named only where it lacks some."""
    from harness_ext import resources, scaffold

    configs, prompts = resources.task_configs_folder(), resources.prompts_folder()
    columns = shutil.get_terminal_size(fallback=(100, 24)).columns
    evaluators = scaffold.evaluator_descriptions(configs)
    datasets = scaffold.read_datasets(configs)
    width = max(map(len, evaluators), default=0)
    print("evaluators")
    for name, description in evaluators.items():
        print(_hanging(f"  {name:<{width}}  ", description, columns))
    print("\ndatasets")
    for name, config in datasets.items():
        print(f"  {name}  ({config.dataset_path})")
        if set(config.tasks) != {f"{evaluator}_{name}" for evaluator in evaluators}:
            print(_hanging("    tasks    ", ", ".join(config.tasks) or "none", columns))
        print(_hanging("    classes  ", ", ".join(config.classes) or "as the data name them", columns))
        count = len(list(prompts.glob(f"{name}/*.jinja")))
        print(f"    prompts  {count}, default {config.prompt}")
    example = next((task for config in datasets.values() for task in config.tasks), None)
    if example is not None:
        print(f"\nA task is an evaluator and a dataset: `lm_eval --tasks {example}`.")
    return 0


def _hanging(head: str, text: str, columns: int) -> str:
    """Wrap a text to the width of the terminal, its lines below one another beside the head."""
    return textwrap.fill(
        text, width=columns, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def new(args: argparse.Namespace) -> int:
    """Write the folder of a new dataset, and print what to do next.

    Raises:
        ValueError: If something is malformed, or neither given nor found.
        FileExistsError: If the dataset exists.
    """
    from harness_ext import prompts, resources, scaffold

    own_configs, own_prompts = resources.task_configs_folder(), resources.prompts_folder()
    if args.into is not None:
        into = args.into.expanduser()
        require_place(into, "--into", is_folder=True)
        if args.name in scaffold.read_datasets(own_configs):
            raise FileExistsError(f"{args.name!r} is a dataset of harness_ext itself. Choose another name.")
        configs, templates = into / "task_configs", into / "prompts"
    elif _is_installed_copy(own_configs):
        raise ValueError(
            f"harness_ext is installed as a copy in {own_configs.parent}, which the next install would overwrite. "
            "Give --into DIR, or work in a checkout (`pip install -e .`)."
        )
    else:
        configs, templates = own_configs, own_prompts

    data = os.environ.get(scaffold.DATA_VARIABLE)
    plan = scaffold.plan_dataset(
        args.name,
        args.dataset,
        configs=configs,
        prompts=templates,
        evaluators=own_configs,
        mirror=Path(data).expanduser() if data else None,
        config_name=args.config,
        text_column=args.text_column,
        label_column=args.label_column,
        classes=None if args.classes is None else args.classes.split(","),
        train_split=args.train_split,
        test_split=args.test_split,
    )
    scaffold.write_dataset(plan)

    for path in plan.files:
        print(f"wrote {path}")
    model = "--model hf --model_args pretrained=gpt2"
    check = f"harness-ext prompts check {plan.prompt} --model gpt2"
    evaluate = f"lm_eval --tasks {','.join(plan.tasks)} {model} --limit 100"
    if args.into is not None:
        check += f" --dataset {shlex.quote(str(configs / args.name))}"
        evaluate += f" --include_path {shlex.quote(str(configs))}"
        variable = f"{prompts.PROMPTS_VARIABLE}={shlex.quote(str(templates))} "
        check, evaluate = variable + check, variable + evaluate
    print(
        f"\nMake the wording of {plan.prompt} and the `subset_words:` of {configs / args.name / '_dataset.yaml'} your own, "
        f"then:\n  {check}\n  {evaluate}"
    )
    return 0


def _is_installed_copy(configs: Path) -> bool:
    """Say whether the task configs lie inside the package, where a wheel puts them, and not beside it in a checkout."""
    import harness_ext

    return configs.parent == Path(harness_ext.__file__).resolve().parent
