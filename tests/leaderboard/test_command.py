"""`harness-ext leaderboard`, as it is typed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from result_files import loss_config, result_file, sample, write, write_samples

from harness_ext.cli import leaderboard
from harness_ext.leaderboard.export import EXPORTS
from harness_ext.leaderboard.markdown import BEGIN, END
from harness_ext.leaderboard.plot import PLOT


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    leaderboard.add_parser(parser.add_subparsers())
    args = parser.parse_args(["leaderboard", *map(str, words)])
    return int(args.func(args))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write(folder / "leaderboard" / "results" / "results_1.json", result_file(documents=2))
    write_samples(folder / "leaderboard" / "results" / "samples_reviews_1.jsonl", [sample(0, 1.0), sample(1, 0.0)])
    (folder / "README.md").write_text(f"# Title\n\n{BEGIN}\n{END}\n")
    return folder


def test_build_then_check_then_stale(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build") == 0
    assert "1 result file: 1 model, 1 task, 1 score." in capsys.readouterr().out
    site = here / "leaderboard" / "site"
    assert {path.name for path in site.iterdir()} >= {*EXPORTS, "index.html", "data"}
    assert "org/tiny" in (here / "README.md").read_text()
    assert "(leaderboard/leaderboard.md)" in (here / "README.md").read_text()
    assert {path.name for path in (here / "leaderboard").iterdir()} == {
        "results",
        "site",
        "leaderboard.csv",
        "leaderboard.md",
    }
    assert run("build", "--check") == 0
    write(here / "leaderboard" / "results" / "results_2.json", result_file(model="org/new"))
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert run("build", "--check") == 1
    found = capsys.readouterr()
    assert "org/new" in found.out.replace("\\", "")
    assert "+" in found.out
    assert "stale. Run: harness-ext leaderboard build --no-site\n" in found.err
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
    assert run("build") == 0
    assert run("build", "--check") == 0
    # A model that is gone leaves no page.
    (here / "leaderboard" / "results" / "results_2.json").unlink()
    assert run("build", "--check", "--out", "leaderboard/site") == 1
    assert run("build") == 0
    assert run("build", "--check", "--out", "leaderboard/site") == 0


@pytest.mark.parametrize(
    "name", ["leaderboard.csv", "leaderboard.json", "leaderboard.parquet", "index.html", "data/index.js"]
)
def test_check_sees_every_file_of_a_site(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build") == 0
    path = here / "leaderboard" / "site" / name
    path.write_bytes(path.read_bytes() + b"x")
    assert run("build", "--check") == 0  # the site is not committed
    assert run("build", "--check", "--out", "leaderboard/site") == 1
    path.unlink()
    assert run("build", "--check", "--out", "leaderboard/site") == 1
    assert f"{name}: is missing" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["leaderboard.csv", "leaderboard.md"])
def test_check_sees_every_committed_file(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", "--no-site") == 0
    assert not (here / "leaderboard" / "site").exists()
    path = here / "leaderboard" / name
    path.write_bytes(path.read_bytes() + b"x")
    assert run("build", "--check") == 1
    assert f"+++ leaderboard/{name} (new)" in capsys.readouterr().out
    path.unlink()
    assert run("build", "--check") == 1
    assert f"{name}: is missing" in capsys.readouterr().out


def test_a_plot_that_is_no_longer_made_is_stale(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", "--no-site") == 0
    plot = here / "leaderboard" / PLOT
    plot.write_bytes(b"<svg/>")
    assert run("build", "--check") == 1
    assert f"{PLOT}: is no longer made" in capsys.readouterr().out
    assert run("build", "--no-site") == 0
    assert not plot.exists()


def test_other_results_do_not_touch_the_committed_tables(here: Path) -> None:
    write(here / "mine" / "results_1.json", result_file(model="org/mine"))
    readme = (here / "README.md").read_bytes()
    assert run("build", "mine", "--out", "site") == 0
    assert (here / "README.md").read_bytes() == readme
    assert {path.name for path in (here / "leaderboard").iterdir()} == {"results"}
    assert run("build", "mine", "--no-site", "--tables", "tables", "--readme", "README.md") == 0
    assert "(tables/leaderboard.md)" in (here / "README.md").read_text()
    assert run("build", "mine", "--check", "--tables", "tables", "--readme", "README.md") == 0


def test_check_sees_the_readme(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build") == 0
    text = (here / "README.md").read_text()
    (here / "README.md").write_text(text.replace("50.0", "99.9"))
    assert run("build", "--check") == 1
    assert "99.9" in capsys.readouterr().out


def test_a_readme_without_markers(here: Path) -> None:
    (here / "README.md").write_text("# Title\n")
    assert run("build", "--no-site") == 0
    assert (here / "README.md").read_text() == "# Title\n"
    with pytest.raises(ValueError, match="expected the lines"):
        run("build", "--no-site", "--readme", "README.md")


def test_without_pages(here: Path) -> None:
    assert run("build", "--no-site", "--out", "tables") == 0
    assert {path.name for path in (here / "tables").iterdir()} == set(EXPORTS)
    assert run("build", "--no-site", "--out", "tables", "--check") == 0


def test_the_site_replaces_nothing_but_a_site(here: Path) -> None:
    mine = here / "mine"
    mine.mkdir()
    (mine / "index.html").write_text("mine")
    (here / "file").write_text("mine")
    results = Path("leaderboard/results")
    for out, reason in (
        (mine, "found something else"),
        (here / "file", "found a file"),
        (results, "apart from"),
        (results / "site", "apart from"),
        (results.parent, "apart from"),
    ):
        with pytest.raises((ValueError, OSError), match=f"--out .*{reason}"):
            run("build", results, "--out", out)
    assert (mine / "index.html").read_text() == "mine"
    assert run("build", results, "--out", here / "new") == run("build", results, "--out", here / "new") == 0


def test_unreadable_files_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "leaderboard" / "results" / "bad.json").write_text("{")
    assert run("build", "--no-site") == 0
    assert "bad.json: expected JSON" in capsys.readouterr().err


def test_add_and_dry_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write(here / "out" / "results_2.json", result_file(model="org/new"))
    assert run("add", "--dry-run", new) == 0
    assert not list((here / "leaderboard").rglob("*new*"))
    assert run("add", new) == 0
    out = capsys.readouterr().out
    assert "org/new, 1 task (reviews)" in out
    (added,) = (here / "leaderboard" / "results").glob("org__new-*/results_*.json")
    assert str(added.relative_to(here)) in out


def test_samples_are_chosen_added_and_checked_where_they_lie(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write(here / "out" / "results_2.json", result_file(["films", "reviews"], model="org/new", documents=2))
    raw = [
        write_samples(here / "out" / f"samples_{task}_2.jsonl", [sample(0, 1.0), sample(1, 0.0)])
        for task in ("films", "reviews")
    ]
    assert run("add", "--samples", "films", new) == 0
    assert "with samples of 1 task (0 kB)" in capsys.readouterr().out
    (kept,) = Path("leaderboard/results").glob("org__new-*/samples_*.jsonl")
    assert kept.name.startswith("samples_films_")
    # Samples as lm_eval writes them are checked where they are, and refused in the leaderboard's folder.
    assert run("add", "--dry-run", raw[0]) == run("add", "--dry-run", kept) == 0
    kept.write_bytes(raw[0].read_bytes())
    with pytest.raises(ValueError, match="expected samples as `harness-ext leaderboard add` keeps them"):
        run("add", "--dry-run", kept)
    kept.unlink()
    stray = write_samples(kept.with_name("samples_films_3.jsonl"), [sample(0, 1.0)])
    with pytest.raises(ValueError, match=r"samples_films_3\.jsonl: expected samples_TASK_DATE"):
        run("add", "--dry-run", stray)


def test_one_bad_file_adds_none(here: Path) -> None:
    good = write(here / "out" / "results_2.json", result_file(model="org/new"))
    bad = here / "out" / "results_3.json"
    bad.write_text("{")
    with pytest.raises(ValueError, match=r"results_3\.json"):
        run("add", good, bad)
    assert not list((here / "leaderboard").rglob("*new*"))


def test_compare(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / "leaderboard" / "results"
    # 220 documents, of which 25 only the first model has right and 8 only the second.
    outcomes = {"org/first": [1.0] * 25 + [0.0] * 8, "org/second": [0.0] * 25 + [1.0] * 8, "org/other": [1.0] * 33}
    for place, (model, values) in enumerate(outcomes.items()):
        lines = [sample(number, value) for number, value in enumerate([*values, *[1.0] * 187])]
        if model == "org/other":
            lines[0] = sample(0, 1.0, "an edited document")
        write(folder / f"results_c{place}.json", result_file(["films"], model=model, documents=220))
        write_samples(folder / f"samples_films_c{place}.jsonl", lines)
    write(folder / "results_d.json", result_file(["films"], model="org/first", config={"model_dtype": "torch.float16"}))
    with pytest.raises(KeyError, match="is the name of 2 rows; give the id of one: m"):
        run("compare", "org/first", "org/second")
    (folder / "results_d.json").unlink()
    assert run("compare", "org/first", "org/second") == 0
    out = capsys.readouterr().out
    assert "films, acc: second - first -7.7 [" in out
    assert "on 220 documents; only the first right 25, only the second 8, exact p = 0.00455" in out
    assert run("compare", "org/first", "org/other", "--task", "films") == 0
    assert "films: refused, the documents differ: 220 and 220, of which 219 are the same" in capsys.readouterr().out
    with pytest.raises(KeyError, match="Did you mean 'org/second'"):
        run("compare", "org/first", "org/secnd")
    # Without the organisation, and in any case.
    for near in ("Second", "SECND", "org/seco"):
        with pytest.raises(KeyError, match=f"no model '{near}'. Did you mean 'org/second'"):
            run("compare", "org/first", near)
    with pytest.raises(KeyError, match="There are org/first, org/other, org/second, org/tiny-1M"):
        run("compare", "org/first", "zzz")
    with pytest.raises(
        ValueError, match=r"org/first has samples of films; org/tiny-1M has samples of reviews.*log_samples"
    ):
        run("compare", "org/first", "org/tiny-1M")
    with pytest.raises(ValueError, match=r"--task film: no result of this task\. Did you mean 'films'"):
        run("compare", "org/first", "org/second", "--task", "film")
    for place, name in enumerate(("org/bare", "org/plain")):
        write(folder / f"results_e{place}.json", result_file(["films"], model=name, documents=220))
    with pytest.raises(ValueError, match=r"org/bare has none; org/plain has none\. Run lm_eval with --log_samples"):
        run("compare", "org/bare", "org/plain")


def test_changes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = here / "old"
    old.mkdir()
    assert run("changes", old, here / "leaderboard" / "results") == 0
    assert "1 new" in capsys.readouterr().out
    assert run("changes", old, here / "leaderboard" / "results", "--out", here / "c.md") == 0
    assert "1 new" in (here / "c.md").read_text()


def test_locale_time_zone_and_hash_seed_do_not_change_a_byte(here: Path) -> None:
    """In interpreters of their own, as these are read at their start."""
    for number in range(4):
        made = result_file(["reviews", "films"], model=f"org/größe-{number}İ", acc=0.5 + number / 10)
        made["results"]["loss_text"] = {"loss,none": 3.0, "bits_per_byte,none": 1 + number / 1e3}
        made["configs"]["loss_text"] = loss_config()
        write(here / "leaderboard" / "results" / f"results_x{number}.json", made)
    code = (
        "import argparse; from harness_ext.cli import leaderboard as l; p = argparse.ArgumentParser(); "
        "l.add_parser(p.add_subparsers()); import sys; a = p.parse_args(sys.argv[1:]); sys.exit(a.func(a))"
    )
    variants = (
        {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1", "PYTHONUTF8": "0"},
        {"TZ": "Asia/Kathmandu", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"},
    )
    for place, variant in enumerate(variants):
        command = [
            sys.executable,
            "-c",
            code,
            "leaderboard",
            "build",
            "--out",
            f"site{place}",
            "--tables",
            f"site{place}/tables",
        ]
        subprocess.run(
            command, env=os.environ | variant | {"HARNESS_EXT_CACHE": "off"}, check=True, capture_output=True
        )
    first, second = (
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (here / "site0", here / "site1")
    )
    assert first == second
    assert f"tables/{PLOT}" in first
