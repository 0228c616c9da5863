"""`harness-ext leaderboard build|add|compare|changes`: result files of lm_eval as a table of models and a static site."""

from __future__ import annotations

import argparse
import difflib
import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness_ext.leaderboard.contracts import Board

__all__ = ["add", "add_parser", "build", "changes", "compare"]

RESULTS = Path("leaderboard/results")
SITE = Path("leaderboard/site")
README = Path("README.md")

_SHOWN_LINES = 40
"""Of the difference of one file, and files that are named."""


def add_parser(subparsers: Any) -> None:
    """Add `leaderboard` with its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "leaderboard",
        help="make the leaderboard from result files, add one to it",
        description="Result files of lm_eval, of our tasks and of its own, become one table of models: as a static site, as "
        "CSV, Parquet, JSON and Markdown. Models of equal pretraining loss are compared within groups.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    making = actions.add_parser(
        "build",
        help="make the site and the tables",
        description="Reads every .json below RESULTS_DIR, with the samples_*.jsonl and lab.json beside them. The same files "
        "give the same bytes. A file that cannot be used is listed with its reason, and does not stop the build.",
    )
    making.add_argument(
        "results", nargs="?", type=Path, default=RESULTS, metavar="RESULTS_DIR", help=f"default: {RESULTS}"
    )
    making.add_argument("--out", type=Path, default=SITE, metavar="FOLDER", help=f"default: {SITE}")
    making.add_argument("--no-site", action="store_true", help="write the tables without the pages")
    making.add_argument(
        "--readme",
        type=Path,
        metavar="FILE",
        help="put the Markdown tables between the markers <!-- leaderboard:begin --> and <!-- leaderboard:end --> of this file "
        f"(default: {README}, if it is here and has them)",
    )
    making.add_argument(
        "--check",
        action="store_true",
        help="write nothing; show what would change, and exit with 1 if anything would",
    )
    making.set_defaults(func=build)
    adding = actions.add_parser(
        "add",
        help="check result files and copy them into the leaderboard's folder",
        description="Checks each file as CI does, and copies it with its samples and its model's lab.json. The name follows "
        "from the content, so adding a file twice changes nothing.",
    )
    adding.add_argument("files", nargs="+", type=Path, metavar="RESULT.json", help="as lm_eval --output_path writes it")
    adding.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help=f"default: {RESULTS}")
    adding.add_argument("--dry-run", action="store_true", help="check only")
    adding.set_defaults(func=add)
    pairing = actions.add_parser(
        "compare",
        help="compare two models on the documents that both have",
        description="Exact McNemar test and paired bootstrap, for each task of which both models have samples (lm_eval "
        "--log_samples). Refused where the documents differ.",
    )
    pairing.add_argument("first", metavar="MODEL", help="name of a model, or id as in the tables")
    pairing.add_argument("second", metavar="MODEL", help="likewise")
    pairing.add_argument("--task", help="this task only")
    pairing.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help=f"default: {RESULTS}")
    pairing.set_defaults(func=compare)
    comparing = actions.add_parser(
        "changes",
        help="show what differs between two folders of result files",
        description="Prints Markdown for a comment on a pull request: scores that are new, changed or gone.",
    )
    comparing.add_argument("old", type=Path, metavar="OLD", help="folder of result files before")
    comparing.add_argument("new", type=Path, metavar="NEW", help="folder of result files after")
    comparing.add_argument("--out", type=Path, metavar="FILE", help="write there instead")
    comparing.set_defaults(func=changes)


def build(args: argparse.Namespace) -> int:
    """Make the board and write it, or compare it with what is there.

    Raises:
        FileNotFoundError: If there is no folder of result files.
        ValueError: If --readme has no markers.
    """
    from harness_ext.leaderboard.export import markdown, spliced

    board = _board(args.results)
    readme = args.readme or README
    spliced_text = None
    if args.readme is not None or (readme.is_file() and "<!-- leaderboard:begin -->" in readme.read_text("utf-8")):
        spliced_text = spliced(readme.read_text("utf-8"), markdown(board), name=str(readme))
    if args.check:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder)
            _write(board, made, with_site=not args.no_site)
            differences = list(_differences(args.out, made, all_files=not args.no_site))
        if spliced_text is not None and spliced_text != readme.read_text("utf-8"):
            differences.append(_text_difference(readme, readme.read_text("utf-8"), spliced_text))
        if differences:
            print("\n".join(differences[:_SHOWN_LINES]))
            if len(differences) > _SHOWN_LINES:
                print(f"… and {len(differences) - _SHOWN_LINES:,} more files")
            print("The leaderboard is stale. Run: harness-ext leaderboard build", file=sys.stderr)
            return 1
        print(f"{args.out} is up to date.")
        return 0
    _write(board, args.out, with_site=not args.no_site)
    if spliced_text is not None and spliced_text != readme.read_text("utf-8"):
        readme.write_bytes(spliced_text.encode("utf-8"))
    _report(board, args.out)
    return 0


def _board(results: Path) -> Board:
    from harness_ext.leaderboard.build import build_board, open_cache

    # A board is millions of small objects and no cycles; looking for cycles in them would take a third of the time.
    gc.disable()
    cache = open_cache(results)
    try:
        return build_board(results, cache)
    finally:
        cache.close()


def _write(board: Board, folder: Path, *, with_site: bool) -> None:
    from harness_ext.leaderboard.export import EXPORTS, write_exports

    if with_site:
        from harness_ext.leaderboard.site import write_site

        write_site(board, folder, downloads=EXPORTS)
    write_exports(board, folder)


def _report(board: Board, folder: Path) -> None:
    limited = f", {len(board.limited):,} more of limited runs" if board.limited else ""
    print(
        f"{board.num_files:,} result files: {len(board.models):,} models, {len(board.columns):,} tasks, "
        f"{len(board.scores):,} scores{limited}. Written to {folder}."
    )
    for entry in board.unreadable[:_SHOWN_LINES]:
        print(f"  {entry.source}: {entry.reason}", file=sys.stderr)
    if len(board.unreadable) > _SHOWN_LINES:
        print(f"  … and {len(board.unreadable) - _SHOWN_LINES:,} more, see the pages", file=sys.stderr)
    if not board.num_files:
        print("`harness-ext leaderboard add RESULT.json` adds a result file.")


def _differences(old: Path, new: Path, *, all_files: bool) -> Iterator[str]:
    """One text for each file that differs; without `all_files`, of those that were made only."""
    before, after = _files(old), _files(new)
    for name in sorted(after if not all_files else before | after):
        if name not in before:
            yield f"{old / name}: is missing"
        elif name not in after:
            yield f"{old / name}: is no longer made"
        elif not _same(old / name, new / name):
            if name.endswith((".md", ".csv", ".json", ".html")):
                yield _text_difference(
                    old / name, (old / name).read_text("utf-8", "replace"), (new / name).read_text("utf-8", "replace")
                )
            else:
                yield f"{old / name}: differs"


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _same(first: Path, second: Path) -> bool:
    if first.read_bytes() == second.read_bytes():
        return True
    if first.suffix != ".parquet":
        return False
    # Parquet names the version of the library that wrote it; the table counts.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return bool(pq.read_table(first).equals(pq.read_table(second)))
    except pa.ArrowException:
        return False


def _text_difference(path: Path, old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), f"{path} (new)", lineterm="", n=1)
    shown = [
        line if len(line) <= 200 else f"{line[:199]}…" for _, line in zip(range(_SHOWN_LINES), lines, strict=False)
    ]
    return "\n".join(shown) or f"{path}: differs in its line ends"


def add(args: argparse.Namespace) -> int:
    """Check all files, then copy them.

    Raises:
        ValueError: If a file cannot go on the leaderboard; then none is copied.
        OSError: If a file cannot be read or written.
    """
    from harness_ext.leaderboard import submission

    checked = [submission.validate(path, look_in_model_folder=not args.dry_run) for path in args.files]
    for found in checked:
        record = found.record
        tasks = ", ".join(task.column.task for task in record.tasks[:8]) + (", …" if len(record.tasks) > 8 else "")
        print(f"{found.path}: {record.model.name}, {len(record.tasks)} tasks ({tasks})")
        for warning in found.warnings:
            print(f"  note: {warning}")
        if not args.dry_run:
            print(f"  added as {submission.add(found, args.results)}")
    if not args.dry_run:
        print("Now run: harness-ext leaderboard build")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print one line for each task that both models have samples of.

    Raises:
        KeyError: If there is no such model, or several rows have the name.
        ValueError: If they have no task in common.
    """
    import numpy as np

    from harness_ext.leaderboard.compare import compare_vectors

    board = _board(args.results)
    first, second = _model_id(board, args.first), _model_id(board, args.second)
    shared = 0
    for column in board.columns:
        vectors = {vector.model: vector for vector in board.vectors.get(column.id, ())}
        if args.task not in (None, column.task) or first not in vectors or second not in vectors:
            continue
        shared += 1
        try:
            found = compare_vectors(
                vectors[first], vectors[second], board.document_sets[column.id], rng=np.random.default_rng(0)
            )
        except ValueError as err:
            print(f"{column.label}: refused, {err}")
            continue
        difference = found.difference
        ends = "" if difference.low is None else f" [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"  # type: ignore[operator]
        tested = (
            "no McNemar test, as documents count in part"
            if found.p_value is None
            else f"only the first right {found.first_only}, only the second {found.second_only}, exact p = {found.p_value:.3g}"
        )
        part = " (a part of the documents)" if found.is_partial else ""
        print(
            f"{column.label}, {column.metric}: second - first {100 * difference.value:+.1f}{ends} points on "
            f"{found.num_documents:,} documents{part}; {tested}"
        )
    if not shared:
        raise ValueError(
            f"{args.first} and {args.second}: expected a task of which both have samples, found none. Run lm_eval with "
            "--log_samples, and `harness-ext leaderboard add` the result."
        )
    return 0


def _model_id(board: Board, name: str) -> str:
    found = [model for model in board.models if name in (model.id, model.name)]
    if len(found) == 1:
        return found[0].id
    if not found:
        close = difflib.get_close_matches(name, [model.name for model in board.models], n=3)
        raise KeyError(f"no model {name!r}." + (f" Did you mean {', '.join(map(repr, close))}?" if close else ""))
    rows = ", ".join(f"{model.id} ({model.revision}, {model.dtype})" for model in found)
    raise KeyError(f"{name!r} is the name of {len(found)} rows; give the id of one: {rows}.")


def changes(args: argparse.Namespace) -> int:
    """Print what differs between two folders.

    Raises:
        FileNotFoundError: If a folder is not there.
    """
    from harness_ext.leaderboard.changes import changes as differences

    text = differences(_board(args.old), _board(args.new))
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_bytes(text.encode("utf-8"))
    return 0
