"""`harness-ext leaderboard build|add|compare|changes`: result files of lm_eval as a table of models and a static site."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_ext.paths import require_file, require_place
from harness_ext.wording import count

if TYPE_CHECKING:
    from harness_ext.leaderboard.contracts import Board
    from harness_ext.leaderboard.made import Made

__all__ = ["add", "add_parser", "build", "changes", "compare"]

RESULTS = Path("leaderboard/results")
TABLES = Path("leaderboard")
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
    making.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"of the site and its downloads; nothing else is written then (default: {SITE})",
    )
    making.add_argument("--no-site", action="store_true", help="no pages; downloads only where --out is given")
    making.add_argument(
        "--tables",
        type=Path,
        metavar="FOLDER",
        help="write CSV, Markdown and the plot there, to be committed with the results (default without --out, for the results "
        f"in {RESULTS}: {TABLES})",
    )
    making.add_argument(
        "--readme",
        type=Path,
        metavar="FILE",
        help="put tables and plot between the markers <!-- leaderboard:begin --> and <!-- leaderboard:end --> of this file "
        f"(default without --out, for the results in {RESULTS}: {README}, if it has them)",
    )
    making.add_argument(
        "--check",
        action="store_true",
        help="write nothing; show what would change in --tables and --readme, and in --out if it is given, and exit with 1 if "
        "anything would",
    )
    making.set_defaults(func=build)
    adding = actions.add_parser(
        "add",
        help="check result files and copy them into the leaderboard's folder",
        description="Checks each file as CI does, and copies it with its model's lab.json and with the samples_TASK_DATE.jsonl "
        "beside it, of which it keeps what the leaderboard reads: per document its hash, scores, target and the beginning of "
        "its text. The name follows from the content, so adding a file twice changes nothing. With --dry-run a file of "
        "samples or a lab.json stands for the result files of its folder and below, and samples of files that are in the "
        "leaderboard's folder already must be as they are kept there.",
    )
    adding.add_argument("files", nargs="+", type=Path, metavar="RESULT.json", help="as lm_eval --output_path writes it")
    adding.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help=f"default: {RESULTS}")
    adding.add_argument(
        "--samples",
        default="all",
        metavar="TASK,…|all|none",
        help="tasks whose samples are kept, with commas between them; patterns such as 'natural_*' too (default: all that lie "
        "beside the file, as their run asked for them; about 135 bytes and the text of each document)",
    )
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
        ImportError: If --tables are made without matplotlib.
    """
    if not args.check:
        for path, option, is_folder in (
            (args.out, "--out", True),
            (args.tables, "--tables", True),
            (args.readme, "--readme", False),
        ):
            if path is not None:
                require_place(path, option, is_folder=is_folder)
    if args.readme is not None:
        require_file(args.readme, "a document with the markers", "--readme")
    with _board(args.results) as board:
        return _build(board, args)


def _build(board: Board, args: argparse.Namespace) -> int:
    # Somewhere else means nowhere here.
    is_default = args.results == RESULTS and args.out is None
    tables: Path | None = args.tables or (TABLES if is_default else None)
    readme: Path | None = args.readme
    if readme is None and is_default and README.is_file() and "<!-- leaderboard:begin -->" in README.read_text("utf-8"):
        readme = README
    if args.check:
        return _check(board, args, tables, readme)
    site = args.out or (None if args.no_site else SITE)
    if site is not None:
        _refuse_other_folder(site, args.results)
    plot = None
    if site is not None:
        from harness_ext.leaderboard.made import Made

        made = Made.of(site, board.stamps)
        _write(board, site, made, with_site=not args.no_site)
        made.save()
    if tables is not None:
        from harness_ext.leaderboard.export import write_tables

        plot = write_tables(board, tables)
    if readme is not None:
        old, new = _readme(board, readme, tables, plot)
        if old != new:
            readme.write_bytes(new.encode("utf-8"))
    _report(board, [path for path in (site, tables, readme) if path is not None])
    return 0


def _refuse_other_folder(site: Path, results: Path) -> None:
    """The site replaces and removes files, so its folder is new, empty or that of a site, and apart from the results."""
    inside, outside = results.resolve(), site.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise ValueError(f"--out {site}: expected a folder apart from the result files in {results}. Name another.")
    if site.exists() and not site.is_dir():
        raise NotADirectoryError(f"--out {site}: expected a folder, found a file. Name another.")
    if site.is_dir() and any(site.iterdir()) and not (site / "leaderboard.json").is_file():
        raise FileExistsError(
            f"--out {site}: expected a new folder or one of an earlier build, found something else. Name another."
        )


def _check(board: Board, args: argparse.Namespace, tables: Path | None, readme: Path | None) -> int:
    differences: list[str] = []
    compared: list[Path] = []
    plot = None
    with tempfile.TemporaryDirectory() as folder:
        if tables is not None:
            from harness_ext.leaderboard.export import TABLES as TABLE_FILES
            from harness_ext.leaderboard.export import write_tables

            made = Path(folder) / "tables"
            plot = write_tables(board, made)
            differences += _differences(tables, made, {name for name in TABLE_FILES if (tables / name).is_file()})
            compared.append(tables)
        if args.out is not None or not (tables or readme):
            site, made = args.out or SITE, Path(folder) / "site"
            _write(board, made, with_site=not args.no_site)
            differences += _differences(site, made, set() if args.no_site else _files(site))
            compared.append(site)
    if readme is not None:
        old, new = _readme(board, readme, tables, plot)
        if old != new:
            differences.append(_text_difference(readme, old, new))
        compared.append(readme)
    if not differences:
        print(f"{' and '.join(map(str, compared))}: up to date.")
        return 0
    print("\n".join(differences[:_SHOWN_LINES]))
    if len(differences) > _SHOWN_LINES:
        print(f"… and {count(len(differences) - _SHOWN_LINES, 'more file')}")
    # So that it can be typed.
    options = [str(args.results)] if args.results != RESULTS else []
    for name in ("tables", "readme", "out"):
        if getattr(args, name) is not None:
            options += [f"--{name}", str(getattr(args, name))]
    options += ["--no-site"] if args.no_site or (args.out is None and compared != [SITE]) else []
    print(
        f"The leaderboard is stale. Run: {shlex.join(['harness-ext', 'leaderboard', 'build', *options])}",
        file=sys.stderr,
    )
    return 1


def _readme(board: Board, readme: Path, tables: Path | None, plot: str | None) -> tuple[str, str]:
    """The document as it is, and with the tables of the board; `plot` is the name of the one in `tables`."""
    from harness_ext.leaderboard.markdown import readme as short
    from harness_ext.leaderboard.markdown import spliced

    more = None
    if tables is not None:
        beside = Path(os.path.relpath(tables, readme.parent)).as_posix()
        more = f"{beside}/leaderboard.md"
        plot = f"{beside}/{plot}" if plot is not None else None
    old = readme.read_text("utf-8")
    return old, spliced(old, short(board, plot=plot, more=more), name=str(readme))


@contextlib.contextmanager
def _board(results: Path) -> Iterator[Board]:
    """The board, with its cache open: scores have their details read when they are first asked for."""
    from harness_ext.leaderboard.build import build_board, open_cache

    # A board is millions of small objects and no cycles; looking for cycles in them would take a third of the time.
    gc.disable()
    cache = open_cache(results)
    try:
        yield build_board(results, cache)
    finally:
        cache.close()


def _write(board: Board, folder: Path, made: Made | None = None, *, with_site: bool) -> None:
    from harness_ext.leaderboard.export import EXPORTS, write_exports

    if with_site:
        from harness_ext.leaderboard.site import write_site

        write_site(board, folder, downloads=EXPORTS, made=made)
    write_exports(board, folder, made)


def _report(board: Board, written: Sequence[Path]) -> None:
    limited = f", {len(board.limited):,} more of limited runs" if board.limited else ""
    print(
        f"{count(board.num_files, 'result file')}: {count(len(board.models), 'model')}, {count(len(board.columns), 'task')}, "
        f"{count(len(board.scores), 'score')}{limited}. Written: {', '.join(map(str, written))}."
    )
    for entry in board.unreadable[:_SHOWN_LINES]:
        print(f"  {entry.source}: {entry.reason}", file=sys.stderr)
    if len(board.unreadable) > _SHOWN_LINES:
        print(f"  … and {len(board.unreadable) - _SHOWN_LINES:,} more, see the pages", file=sys.stderr)
    if not board.num_files:
        print("`harness-ext leaderboard add RESULT.json` adds a result file.")


def _differences(old: Path, new: Path, before: Set[str]) -> Iterator[str]:
    """One text for each file that differs, of those that were made and those that were there `before`."""
    after = _files(new)
    for name in sorted(before | after):
        if not (old / name).is_file():
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
    if first.suffix == ".svg":
        from harness_ext.leaderboard.plot import same_plot

        return same_plot(first.read_bytes(), second.read_bytes())
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

    files = args.files
    if args.dry_run:
        files = dict.fromkeys(path for file in args.files for path in submission.results_of(file))
    else:
        require_place(args.results, "--results", is_folder=True)
    for path in files:  # a file that another stands for may be gone
        require_file(path, "a result file, as lm_eval --output_path writes it")
    checked = [submission.validate(path, samples=args.samples, look_in_model_folder=not args.dry_run) for path in files]
    if args.dry_run:
        kept = args.results.resolve()
        submission.check_kept(
            [found for found in checked if kept in found.path.resolve().parents],
            # Where they lie, not where a link leads.
            [
                path
                for path in args.files
                if path.suffix == ".jsonl" and kept in (path.parent.resolve() / path.name).parents
            ],
        )
    added = [] if args.dry_run else submission.add(checked, args.results)
    for place, found in enumerate(checked):
        record = found.record
        tasks = ", ".join(task.column.task for task in record.tasks[:8]) + (", …" if len(record.tasks) > 8 else "")
        print(f"{found.path}: {record.model.name}, {count(len(record.tasks), 'task')} ({tasks})")
        for warning in found.warnings:
            print(f"  note: {warning}")
        if added:
            sizes = added[place].samples
            with_samples = (
                f", with samples of {count(len(sizes), 'task')} ({sum(sizes.values()) / 1e3:,.0f} kB)" if sizes else ""
            )
            print(f"  added as {added[place].path}{with_samples}")
    if not args.dry_run:
        where = "" if args.results == RESULTS else f" {shlex.quote(str(args.results))} --out FOLDER"
        print(f"Now run: harness-ext leaderboard build{where}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print one line for each task that both models have samples of.

    Raises:
        KeyError: If there is no such model, or several rows have the name.
        ValueError: If they have no task in common.
    """
    with _board(args.results) as board:
        return _compare(board, args)


def _compare(board: Board, args: argparse.Namespace) -> int:
    import numpy as np

    from harness_ext.leaderboard.compare import compare_vectors

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
        raise ValueError(_why_nothing_is_shared(board, args, {args.first: first, args.second: second}))
    return 0


def _why_nothing_is_shared(board: Board, args: argparse.Namespace, models: Mapping[str, str]) -> str:
    """Of two models, ids by their names as given, that have no task with samples in common."""
    tasks = {column.id: column.task for column in board.columns}
    if args.task is not None and args.task not in tasks.values():
        return f"--task {args.task}: no result of this task. {_near(args.task, set(tasks.values()))}"
    with_samples = {
        name: sorted(
            {tasks[column] for column, of_column in board.vectors.items() for v in of_column if v.model == model}
        )
        for name, model in models.items()
    }
    of_task = "" if args.task is None else f" of {args.task}"
    lines = [
        f"{name} has samples of {', '.join(found[:8])}{', …' if len(found) > 8 else ''}"
        if found
        else f"{name} has none"
        for name, found in with_samples.items()
    ]
    return (
        f"models are compared document by document, and there are no samples{of_task} that both have: {'; '.join(lines)}. Run "
        "lm_eval with --log_samples on the same tasks, prompts and shots, and `harness-ext leaderboard add` the result."
    )


def _near(name: str, known: Set[str]) -> str:
    """Names like one that is not known, or what there is."""
    by_form: dict[str, str] = {}
    for one in sorted(known):
        # The name without its organisation, too, in any case.
        for form in (one.lower(), one.lower().rpartition("/")[2]):
            by_form.setdefault(form, one)
    given = name.lower().rpartition("/")[2]
    close = [by_form[form] for form in difflib.get_close_matches(name.lower(), by_form, n=3)]
    close += [by_form[form] for form in difflib.get_close_matches(given, by_form, n=3)]
    close += [one for form, one in by_form.items() if len(given) > 2 and given in form]
    close = list(dict.fromkeys(close))[:3]
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    shown = ", ".join(sorted(known)[:8]) + (", …" if len(known) > 8 else "")
    return f"There are {shown}." if known else "There are none."


def _model_id(board: Board, name: str) -> str:
    found = [model for model in board.models if name in (model.id, model.name)]
    if len(found) == 1:
        return found[0].id
    if not found:
        raise KeyError(f"no model {name!r}. {_near(name, {model.name for model in board.models})}")
    rows = ", ".join(f"{model.id} ({model.revision}, {model.dtype})" for model in found)
    raise KeyError(f"{name!r} is the name of {len(found)} rows; give the id of one: {rows}.")


def changes(args: argparse.Namespace) -> int:
    """Print what differs between two folders.

    Raises:
        FileNotFoundError: If a folder is not there.
    """
    from harness_ext.leaderboard.changes import changes as differences

    if args.out is not None:
        require_place(args.out, is_folder=False)

    with _board(args.old) as old, _board(args.new) as new:
        text = differences(old, new)
    if args.out is None:
        print(text, end="")
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(text.encode("utf-8"))
    return 0
