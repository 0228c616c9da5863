"""The command line's own part: help, errors, exit statuses, and what `run` hands on."""

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

import pytest

import harness_ext
from harness_ext import cli


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
        (
            OSError(28, "No space left on device", "/tmp/x"),
            "/tmp/x: no space left on this disk. Free some, or name a path on another disk.",
        ),
    ],
)
def test_an_error_of_the_user_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    monkeypatch.delenv("HARNESS_EXT_DEBUG", raising=False)
    fake_command(monkeypatch, raises(error))
    assert cli.main(["fake"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"harness-ext: error: {message}\n")


def test_the_debug_variable_adds_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARNESS_EXT_DEBUG", "1")
    fake_command(monkeypatch, raises(ValueError("bad")))
    assert cli.main(["fake"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("harness-ext: error: bad\n")


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
