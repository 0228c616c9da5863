"""What the user sees of an error: one line for what can be put right, a traceback for a fault of ours."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny import tiny_tokenizer

from harness_ext import cli, prompts, ranks
from harness_ext.cli import errors
from harness_ext.paths import require_file, require_place
from harness_ext.wording import count

UNKNOWN = "harness-ext: error: unknown prompt 'sst/it_wsa'. Did you mean 'sst/it_was'"


def raised(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.value


def our_fault() -> None:
    """An error that an expression of ours leads to."""
    prompts.find_prompts(3)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- whose errors


def test_an_error_is_ours_if_a_raise_statement_of_ours_made_it() -> None:
    assert errors.is_raised_by_us(raised(lambda: prompts.load_prompt("sst/it_wsa")))
    fault = raised(our_fault)
    assert not errors.is_raised_by_us(fault)
    # The last place counts: here that of a test, and of a library below it.
    assert not errors.is_raised_by_us(raised(lambda: {}["key"]))
    assert not errors.is_raised_by_us(raised(lambda: Path("no such file").read_text()))


@pytest.mark.parametrize("text", ['assert not 1, "a bug"', "raise NotImplementedError"])
def test_a_bug_of_ours_is_none_of_the_users(text: str) -> None:
    fault = raised(lambda: exec(text, {"__name__": "harness_ext.somewhere"}))
    assert not errors.is_raised_by_us(fault)
    assert not errors.is_of_the_user(fault)


def test_a_key_that_is_not_found_is_a_bug_and_one_that_is_refused_is_not() -> None:
    assert not errors.is_of_the_user(raised(lambda: {}["key"]))
    assert errors.is_of_the_user(raised(lambda: exec('raise KeyError("no model x")')))


@pytest.mark.parametrize("text", ["TypeError('no loss')", "MemoryError('too large')", "ImportError('no matplotlib')"])
def test_what_we_explain_is_one_line_whatever_its_kind(text: str) -> None:
    assert errors.is_of_the_user(raised(lambda: exec(f"raise {text}", {"__name__": "harness_ext.somewhere"})))
    assert not errors.is_of_the_user(raised(lambda: exec(f"raise {text}", {"__name__": "elsewhere"})))


# ------------------------------------------------------------------------------------------------- errors of the system


def test_an_error_of_the_system_names_the_path_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for function, message in (
        (tmp_path.read_text, f"{tmp_path}: expected a file, found a folder. Name a file."),
        (file.mkdir, f"{file}: expected a folder, found a file. Name another path."),
        ((file / "x").stat, f"{file / 'x'}: expected a folder, found a file on the way. Name another path."),
        ((tmp_path / "no").stat, f"{tmp_path / 'no'}: no such file or folder. Check the path."),
    ):
        assert errors.message_of(raised(function)) == message
    missing = raised((tmp_path / "no" / "x").read_text)
    assert errors.message_of(missing) == (
        f"{tmp_path / 'no' / 'x'}: there is no folder {tmp_path / 'no'}. Make it, or check the path."
    )
    long = raised((tmp_path / ("x" * 300)).read_text)
    assert "a name longer than this file system takes. Shorten it." in errors.message_of(long)


def test_no_known_error_of_the_system_shows_its_number() -> None:
    for number in errors._REASONS:
        assert "Errno" not in errors.message_of(OSError(number, os.strerror(number), "/x"))
    assert errors.message_of(OSError(errno.EIO, "Input/output error", b"/x")) == "/x: Input/output error."
    assert errors.message_of(OSError(errno.ENOSPC, "No space")).startswith("no space left on this disk")


def test_paths_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    require_place(tmp_path / "a" / "b", is_folder=True)
    require_place(tmp_path, is_folder=True)
    require_place(tmp_path / "a" / "b.json", is_folder=False)
    require_place(file, is_folder=False)
    require_file(file, "a result file")
    with pytest.raises(NotADirectoryError, match=r"--out .*: expected a folder, found a file"):
        require_place(file, is_folder=True)
    with pytest.raises(NotADirectoryError, match=r"expected a folder, .*/file is a file"):
        require_place(file / "x" / "y", is_folder=True)
    with pytest.raises(IsADirectoryError, match=r"--tables .*: expected a file to write, found a folder"):
        require_place(tmp_path, "--tables", is_folder=False)
    with pytest.raises(IsADirectoryError, match="expected a result file, found a folder"):
        require_file(tmp_path, "a result file")
    with pytest.raises(FileNotFoundError, match="expected a result file, found nothing"):
        require_file(tmp_path / "no", "a result file")
    with pytest.raises(FileNotFoundError, match="found nothing"):
        require_file(tmp_path / ("x" * 300), "a result file")
    monkeypatch.setattr(os, "access", lambda *_: False)  # as it is for another user than root
    with pytest.raises(PermissionError, match="cannot be written to"):
        require_place(tmp_path / "a", is_folder=True)
    with pytest.raises(PermissionError, match="no permission to read"):
        require_file(file, "a result file")


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (
            ["leaderboard", "add", "FOLDER"],
            "expected a result file, as lm_eval --output_path writes it, found a folder",
        ),
        (
            ["leaderboard", "add", "no.json"],
            "expected a result file, as lm_eval --output_path writes it, found nothing",
        ),
        (["leaderboard", "add", "FILE", "--results", "FILE"], "--results FILE: expected a folder, found a file"),
        (["leaderboard", "build", "FOLDER", "--tables", "FILE"], "--tables FILE: expected a folder, found a file"),
        (["leaderboard", "build", "FOLDER", "--out", "s", "--readme", "no.md"], "--readme no.md: expected a document"),
        (["leaderboard", "changes", "FOLDER", "FOLDER", "--out", "FOLDER"], "--out FOLDER: expected a file to write"),
        (["lab", "match", "FOLDER", "--out", "FOLDER"], "--out FOLDER: expected a file to write, found a folder"),
        (["lab", "sde-check", "--quick", "--out", "FILE/x"], "--out FILE/x: expected a folder, "),
        (["flatness", "chart", "no.json"], "expected a result file, as lm_eval --output_path writes it, found nothing"),
        (["flatness", "widen", "a", "--like", "b", "--out", "FILE/x"], "--out FILE/x: expected a folder, "),
        (
            ["quad", "train", "--model", "a", "--text", "b", "--out", "FILE"],
            "--out FILE: expected a folder, found a file",
        ),
        (["prompts", "new", "sst/x", "--out", "FILE"], "--out FILE: expected a folder, found a file"),
        (
            ["tasks", "new", "films", "--dataset", "a/b", "--into", "FILE"],
            "--into FILE: expected a folder, found a file",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_path_that_will_not_do_is_one_line_of_its_own(
    command: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    Path("FILE").touch()
    Path("FOLDER").mkdir()
    assert cli.main(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("harness-ext: error: ")
    assert part in line


# ------------------------------------------------------------------------------------------------------------- `run`


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for lm_eval's command, which calls `does`."""
    module: Any = ModuleType("lm_eval.__main__")
    module.cli_evaluate = lambda: module.does()
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", module)
    monkeypatch.delenv(errors.DEBUG_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return module


def test_run_shows_an_error_of_ours_as_one_line(lm_eval: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lm_eval.does = lambda: prompts.load_prompt("sst/it_wsa")
    assert cli.main(["run"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(UNKNOWN)  # without the quotes of a KeyError
    assert sys.excepthook is sys.__excepthook__


def test_run_shows_the_traceback_where_it_is_asked_for(
    lm_eval: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARNESS_EXT_DEBUG", "1")
    lm_eval.does = lambda: prompts.load_prompt("sst/it_wsa")
    assert cli.main(["run"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.splitlines()[-1].startswith(UNKNOWN)


def test_run_keeps_the_traceback_of_a_fault_of_ours(lm_eval: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lm_eval.does = our_fault
    assert cli.main(["run"]) == 1
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize("is_first", [True, False])
def test_of_several_ranks_the_first_shows_its_error_on_one_line(
    is_first: bool, lm_eval: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "_is_first", lambda _: is_first)
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.0)
    monkeypatch.delenv("RANK", raising=False)

    def fails() -> None:
        ranks.show_first_error_only()  # as the engine does when it is attached
        prompts.load_prompt("sst/it_wsa")

    lm_eval.does = fails
    # The second run finds the hook of the first.
    for _ in range(2):
        assert cli.main(["run"]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert [line.startswith(UNKNOWN) for line in lines] == [True] * is_first
        assert getattr(sys.excepthook, "_shows_first_error_only", False)


# -------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "command",
    [
        ["prompts", "show", "sst/it_was", "--model", "NAME"],
        ["prompts", "check", "sst/it_was", "--model", "NAME"],
        ["quad", "train", "--model", "NAME", "--text", "text.txt", "--out", "quad"],
        ["quad", "train", "--architecture", "gpt2", "--tokenizer", "NAME", "--text", "text.txt", "--out", "quad"],
        ["flatness", "widen", "NAME", "--like", "large", "--out", "wide"],
        ["flatness", "widen", "large", "--like", "NAME", "--out", "wide"],
    ],
    ids=" ".join,
)
def test_a_model_that_is_not_there_is_one_line_with_what_to_type(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text\n" * 8)
    (tmp_path / "empty").mkdir()
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text('{"model_type": "gpt2"}')
    for name, part in (
        ("nobody/nothing", "looked for as HF_HUB_OFFLINE is set"),
        ("./nothing", "no such folder. Expected a folder with "),
        ("empty", "found no config.json in it"),
        ("text.txt", "found a file. Name its folder"),
    ):
        assert cli.main([name if word == "NAME" else word for word in command]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[transformers]")]
        assert len(lines) == 1, lines
        assert lines[0].startswith("harness-ext: error: ")
        assert f"{name}: " in lines[0]
        assert part in lines[0]


def test_words_of_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness_ext.cli.models import loading

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)

    def fails(error: Exception) -> None:
        with loading("nobody/nothing", "--model"):
            raise error

    with pytest.raises(
        ValueError, match=r"--model nobody/nothing: no folder here, and the Hub .* gpt2 \(not reached\)"
    ):
        fails(OSError("not reached\nand more"))
    with pytest.raises(RuntimeError, match="a bug"):
        fails(RuntimeError("a bug"))


def test_an_error_of_ours_while_a_model_is_loaded_stays_as_it_is() -> None:
    from harness_ext.cli.models import loading

    with pytest.raises(KeyError, match="unknown prompt"), loading("gpt2"):
        prompts.load_prompt("sst/it_wsa")


@pytest.mark.parametrize(
    ("option", "value"), [("--batch-size", "none"), ("--batch-size", "0"), ("--dtype", "float33"), ("--dtype", "nn")]
)
def test_words_names_the_option_that_is_wrong(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARNESS_EXT_DATA", str(tmp_path))
    split = tmp_path / "SetFit" / "sst2"
    split.mkdir(parents=True)
    rows = [f'{{"text": "a film {number}", "label": {number % 2}}}\n' for number in range(8)]
    (split / "train.jsonl").write_text("".join(rows))
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    command = ["prompts", "words", "sst", "--model", str(tmp_path / "model"), "--num-documents", "2", option, value]
    assert cli.main(command) == 2
    assert f"{option} {value}: expected auto" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- usage, interrupts and bars


@pytest.mark.parametrize(
    ("command", "usage", "near"),
    [
        (["leaderboard", "compare", "a", "b", "--resluts", "x"], "leaderboard compare", "--results"),
        (["lab", "match", "--tolerence", "1"], "lab match", "--tolerance"),
        (["tasks", "list", "extra"], "tasks list", None),
        (["demo", "--zzzzz"], "demo", None),
    ],
)
def test_unknown_arguments_print_the_usage_of_the_subcommand(
    command: list[str], usage: str, near: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(command)
    assert done.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(f"usage: harness-ext {usage} [-h]")
    assert f"harness-ext {usage}: error: unrecognized arguments: " in text
    assert ("did you mean" in text) == (near is not None)
    assert near is None or text.endswith(f"(did you mean {near}?)\n")


def test_help_says_how_to_see_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "HARNESS_EXT_DEBUG=1" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "is_said"), [("demo", True), ("lab run", True), ("lab match", False)])
def test_an_interrupt_says_that_the_command_can_be_resumed_where_it_can(
    command: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness_ext.cli.lab.run.train_and_match", interrupted)
    monkeypatch.setattr("harness_ext.lab.match.from_folders", interrupted)
    place = [str(tmp_path)] if command == "lab match" else ["--out", str(tmp_path)]
    assert cli.main([*command.split(), *place]) == 130
    said = "Stopped. The same command goes on where it was."
    assert capsys.readouterr().err.strip() == (said if is_said else "")


def test_a_bar_that_no_terminal_shows_is_seldom_drawn() -> None:
    code = (
        "import sys, time, types; from harness_ext import cli\n"
        "def work(args):\n"
        "    from tqdm.auto import tqdm\n"
        "    for _ in tqdm(range(20)):\n"
        "        time.sleep(0.05)\n"
        "fake = types.ModuleType('fake')\n"
        "fake.add_parser = lambda s: s.add_parser('fake').set_defaults(func=work)\n"
        "sys.modules['harness_ext.cli.fake'] = fake; cli.COMMANDS = ('fake',)\n"
        "sys.argv = ['harness-ext', 'fake']; sys.exit(cli.main())"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQDM_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.count("it/s]") == 2  # the beginning and the end
    assert "20/20" in done.stderr


def test_nouns() -> None:
    assert [count(number, "file") for number in (0, 1, 2, 2000)] == ["0 files", "1 file", "2 files", "2,000 files"]
