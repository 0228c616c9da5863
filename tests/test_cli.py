"""The command line's own part: help, errors, exit statuses, and what `run` and `cache` hand on."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import harness_ext
from harness_ext import cli
from harness_ext.contracts import Feature
from harness_ext.engine.store import FeatureStore


def fake_command(monkeypatch: pytest.MonkeyPatch, func: Callable[[argparse.Namespace], Any]) -> None:
    """Put a subcommand `fake` in the command line."""
    module: Any = ModuleType("harness_ext.cli.fake")

    def add_parser(subparsers: Any) -> None:
        parser = subparsers.add_parser("fake")
        parser.add_argument("--number", type=int)
        parser.set_defaults(func=func)

    module.add_parser = add_parser
    monkeypatch.setitem(sys.modules, "harness_ext.cli.fake", module)
    monkeypatch.setattr(cli, "COMMANDS", ("fake",))


def raises(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def func(args: argparse.Namespace) -> int:
        raise error

    return func


# ----------------------------------------------------------------------------------------------------------- help, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert re.search(rf"\n    {name}\s", text), name  # the longest stands on a line of its own


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "run"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([name, "--help"])
    assert done.value.code == 0
    assert f"harness-ext {name}" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from harness_ext.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('|', *{'torch', 'transformers', 'lm_eval', 'datasets', 'sklearn', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "|"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"harness-ext {harness_ext.__version__}\n"


def test_no_command_prints_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: harness-ext" in capsys.readouterr().err


def test_arguments_of_a_command_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, lambda args: args.number)
    assert cli.main(["fake", "--number", "5"]) == 5
    with pytest.raises(SystemExit) as done:
        cli.main(["fake", "--numbre", "5"])
    assert done.value.code == 2
    assert "--numbre" in capsys.readouterr().err


@pytest.mark.parametrize(("result", "status"), [(None, 0), (0, 0), (7, 7)])
def test_the_status_is_what_the_command_returns(
    monkeypatch: pytest.MonkeyPatch, result: int | None, status: int
) -> None:
    fake_command(monkeypatch, lambda args: result)
    assert cli.main(["fake"]) == status


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("a.yaml: expected 2"), "a.yaml: expected 2"),
        (KeyError("unknown prompt 'x'. Did you mean 'y'?"), "unknown prompt 'x'. Did you mean 'y'?"),
        (FileNotFoundError("a.jinja: no such file"), "a.jinja: no such file"),
        (OSError(28, "No space left on device", "/tmp/x"), "[Errno 28] No space left on device: '/tmp/x'"),
    ],
)
def test_an_error_of_the_user_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    monkeypatch.delenv("HARNESS_EXT_DEBUG", raising=False)
    fake_command(monkeypatch, raises(error))
    assert cli.main(["fake"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {message}\n")


def test_the_debug_variable_adds_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARNESS_EXT_DEBUG", "1")
    fake_command(monkeypatch, raises(ValueError("bad")))
    assert cli.main(["fake"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("error: bad\n")


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, raises(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["fake"])


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_command(monkeypatch, raises(KeyboardInterrupt()))
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """As in `harness-ext prompts list | head -1`."""
    code = (
        "import sys, types; from harness_ext import cli\n"
        "fake = types.ModuleType('fake')\n"
        "fake.add_parser = lambda s: s.add_parser('fake').set_defaults(func=lambda a: print('x' * 10_000_000))\n"
        "sys.modules['harness_ext.cli.fake'] = fake; cli.COMMANDS = ('fake',)\n"
        "sys.exit(cli.main(['fake']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (141, b"")


# ------------------------------------------------------------------------------------------------------------------ run


@pytest.fixture
def lm_eval_main(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for lm_eval's command; `argv` is what it was called with, `result` what it raises."""
    module: Any = ModuleType("lm_eval.__main__")
    module.argv, module.result = None, None

    def cli_evaluate() -> None:
        module.argv = list(sys.argv)
        if module.result is not None:
            raise module.result

    module.cli_evaluate = cli_evaluate
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", module)
    return module


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--model", "hf", "--tasks", "a", "--help"], ["run", "--model", "hf", "--tasks", "a", "--help"]),
        (["-h"], ["run", "-h"]),
        (["--metadata", '{"prompt": "sst/*"}', "--", "-x"], ["run", "--metadata", '{"prompt": "sst/*"}', "--", "-x"]),
        ([], ["run"]),
        (["run", "--tasks", "a"], ["run", "--tasks", "a"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["validate", "--tasks", "a"], ["validate", "--tasks", "a"]),
    ],
)
def test_run_hands_its_arguments_on_as_they_are(lm_eval_main: Any, given: list[str], passed: list[str]) -> None:
    before = list(sys.argv)
    assert cli.main(["run", *given]) == 0
    assert lm_eval_main.argv == ["lm-eval", *passed]
    assert sys.argv == before


@pytest.mark.parametrize(
    ("raised", "status", "printed"),
    [
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
        (SystemExit("no such task"), 1, "no such task\n"),
        (ValueError("Tasks not found: x"), 1, "ValueError: Tasks not found: x\n"),
    ],
)
def test_run_ends_as_lm_eval_does(
    lm_eval_main: Any, capsys: pytest.CaptureFixture[str], raised: BaseException, status: int, printed: str
) -> None:
    lm_eval_main.result = raised
    assert cli.main(["run", "--tasks", "x"]) == status
    errors = capsys.readouterr().err
    assert errors.endswith(printed)
    assert errors.startswith("Traceback") == isinstance(raised, ValueError)


def test_run_adds_our_tasks_before_lm_eval_starts(lm_eval_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("harness_ext.plugin.install", lambda: order.append("install"))
    lm_eval_main.cli_evaluate = lambda: order.append("lm_eval")
    assert cli.main(["run", "--tasks", "natural"]) == 0
    assert order == ["install", "lm_eval"]


def test_run_help_is_the_one_of_lm_eval(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--help"]) == 0
    assert "--num_fewshot" in capsys.readouterr().out


@pytest.mark.slow
def test_run_works_where_no_pth_file_is_read() -> None:
    site_packages = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-m", "harness_ext", "run", "validate", "--tasks", "natural_sst,probe_agnews"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(cli.__file__).parents[2]), *site_packages])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A store with three states of one model and one of another."""
    folder = tmp_path / "store"
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(folder))
    for fingerprint, description, rows in (("ab12", "gpt2 float32", 3), ("ac34", "opt float32", 1)):
        written = FeatureStore(folder, fingerprint, description=description)
        keys = [bytes([row] * 16) for row in range(rows)]
        written.add(Feature(), keys, np.ones((rows, 300), dtype=np.float32))
        written.close()
    return folder


def stored(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_cache_info_lists_models_and_sizes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "info"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    total = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert first == f"{root}: 2 models, {total / 1024:.1f} KiB of at most 20.0 GiB"
    assert [[*line.split()[:3], *line.split()[-2:]] for line in rest] == [
        ["ab12", "3", "rows", "gpt2", "float32"],
        ["ac34", "1", "rows", "opt", "float32"],
    ]


@pytest.mark.parametrize(
    ("given", "left"), [([], []), (["ac34"], ["ab12"]), (["ac"], ["ab12"])], ids=["all", "one", "a beginning"]
)
def test_cache_clear_clears_one_model_or_all(
    root: Path, capsys: pytest.CaptureFixture[str], given: list[str], left: list[str]
) -> None:
    assert cli.main(["cache", "clear", *given]) == 0
    assert stored(root) == left
    assert capsys.readouterr().out.startswith(f"{root}: freed ")


@pytest.mark.parametrize(("given", "found"), [("zz", "no stored model has"), ("a", "2 stored models have")])
def test_cache_clear_deletes_nothing_that_is_not_named_clearly(
    root: Path, capsys: pytest.CaptureFixture[str], given: str, found: str
) -> None:
    assert cli.main(["cache", "clear", given]) == 2
    assert stored(root) == ["ab12", "ac34"]
    assert f"{found} the fingerprint '{given}'. Stored: ab12, ac34." in capsys.readouterr().err


def test_an_empty_cache_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "none"))
    assert cli.main(["cache", "info"]) == 0
    assert cli.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'none'}: 0 models, 0 B of at most 20.0 GiB\n{tmp_path / 'none'}: freed 0 B\n"
    )


@pytest.mark.parametrize(
    ("given", "said"), [("1MiB", "of at most 1.0 MiB"), ("2000", "of at most 2.0 KiB"), ("off", ", without a limit")]
)
def test_cache_info_shows_the_limit(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE_LIMIT", given)
    assert cli.main(["cache", "info"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(said)


@pytest.mark.parametrize("action", ["info", "clear"])
def test_cache_says_that_it_is_off(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    assert cli.main(["cache", action]) == 0
    assert capsys.readouterr().out == "The cache is off (HARNESS_EXT_CACHE=off).\n"
    assert stored(root) == ["ab12", "ac34"]
