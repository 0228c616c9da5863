"""Show that `pip install` alone makes lm_eval find our tasks, however the two are installed.

    python benchmarks/four_installs.py [--work DIR] [--lm-eval-version 0.4.13]

Four virtual environments: ours from its wheel and editable, lm_eval from its wheel and editable (from its source
archive). In each, our tasks must be found by every way of starting lm_eval, a user's task of the same name must win,
in an editable install an edit must count on the next run, and uninstalling ours must leave lm_eval's files and tasks
as they were. Torch and the like are installed once, into a folder that all four read and that has neither lm_eval nor
ours.

Needs a package index and about 2 GB in --work; takes about fifteen minutes on two cores. Exits with status 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TASKS = "natural_sst,probe_agnews"
NAMES = "from lm_eval.tasks import TaskManager; print('\\n'.join(TaskManager().all_tasks))"


@dataclass
class Checks:
    """Counts checks and prints each as it is made."""

    failed: list[str] = field(default_factory=list)

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        print(f"  {'ok  ' if ok else 'FAIL'} {name}", flush=True)
        if not ok:
            print(f"       {detail.strip()[-2000:]}")
            self.failed.append(name)


class Venv:
    """A virtual environment. Its commands run outside the checkout and without variables that would help them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.python = folder / "bin" / "python"
        self.site_packages = next(folder.glob("lib/python3*/site-packages"))

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HARNESS_EXT"))}
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env={**env, "HF_HUB_OFFLINE": "1", **environment},
            capture_output=True,
            text=True,
        )

    def python_run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.python, *arguments, **environment)

    def pip(self, *arguments: str | Path) -> None:
        done = self.python_run("-m", "pip", "-q", *arguments)
        if done.returncode != 0:
            raise RuntimeError(f"pip {' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}")

    def known_tasks(self) -> list[str]:
        done = self.python_run("-c", NAMES)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return done.stdout.split()


def digest(folder: Path) -> dict[str, str]:
    """Hash of every file but byte code."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def copy_checkout(target: Path) -> Path:
    """A copy that may be edited."""
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "dist", "build", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, target, ignore=ignored)
    return target


def install_dependencies(work: Path, wheel: Path) -> Path:
    """Install ours from its wheel with all dependencies, take lm_eval and ours out again, return the site-packages."""
    heavy = Venv(work / "heavy")
    start = time.perf_counter()
    heavy.pip("install", "-c", ROOT / "constraints.txt", wheel)
    print(f"installed ours and its dependencies in {time.perf_counter() - start:.0f} s", flush=True)
    heavy.pip("uninstall", "-y", "harness-ext", "lm_eval")
    return heavy.site_packages


def check_every_start(checks: Checks, venv: Venv, *, editable: bool) -> None:
    """Each way of starting lm_eval finds our tasks, and a user's task wins."""
    validate = ("validate", "--tasks", TASKS)
    for name, command in {
        f"lm_eval validate --tasks {TASKS}": (venv.folder / "bin" / "lm_eval", *validate),
        "python -m lm_eval validate": (venv.python, "-m", "lm_eval", *validate),
        "accelerate launch -m lm_eval validate": (
            venv.python, "-m", "accelerate.commands.launch", "--cpu", "-m", "lm_eval", *validate,
        ),
        "harness-ext run validate": (venv.folder / "bin" / "harness-ext", "run", *validate),
        # -S: the .pth files of this environment are not read, as in `pip install --target` and with PYTHONPATH.
        "harness-ext run validate where no .pth is read": (venv.python, "-S", "-m", "harness_ext", "run", *validate),
    }.items():  # fmt: skip
        path = {}
        if "-S" in command:
            code = (
                "import sys, importlib.util as u; lm_eval = u.find_spec('lm_eval').submodule_search_locations[0]; "
                "print(*[p for p in sys.path if p], lm_eval.removesuffix('/lm_eval'), sep=':')"
            )
            path = {"PYTHONPATH": venv.python_run("-c", code).stdout.strip()}
        done = venv.run(*command, **path)
        checks.check(name, done.returncode == 0, done.stdout + done.stderr)

    listed = venv.run(venv.folder / "bin" / "lm_eval", "ls", "tasks")
    checks.check("lm_eval ls tasks", all(f"|{name}" in listed.stdout for name in TASKS.split(",")), listed.stderr)
    tags = venv.run(venv.folder / "bin" / "lm_eval", "ls", "tags")
    checks.check("lm_eval ls tags", all(f"|{tag} " in tags.stdout for tag in ("natural", "probe")), tags.stderr)

    mine = venv.folder / "mine"
    mine.mkdir()
    (mine / "task.yaml").write_text("task: natural_sst\ndataset_path: json\noutput_type: multiple_choice\n")
    code = (
        "from lm_eval.tasks import TaskManager; import sys; m = TaskManager(include_path=sys.argv[1]); "
        "print(m.task_index['natural_sst'].yaml_path, m.task_index['probe_sst'].yaml_path, m.include_path)"
    )
    done = venv.python_run("-c", code, mine)
    found = done.stdout.split()
    checks.check(
        "a user's --include_path task of the same name wins, and include_path is as given",
        len(found) == 3 and found[0] == str(mine / "task.yaml") and found[2] == str(mine),
        done.stdout + done.stderr,
    )
    inside = len(found) == 3 and Path(found[1]).is_relative_to(venv.site_packages)
    checks.check(
        f"our YAMLs are read from {'the checkout' if editable else 'site-packages'}", inside != editable, done.stdout
    )


def check_edits(checks: Checks, venv: Venv, checkout: Path) -> None:
    """What is edited in the checkout of an editable install counts on the next run."""
    (checkout / "task_configs" / "sst" / "probe_sst.yaml").rename(checkout / "task_configs" / "sst" / "renamed.yaml")
    renamed = checkout / "task_configs" / "sst" / "renamed.yaml"
    renamed.write_text(renamed.read_text().replace("task: probe_sst\n", "task: probe_sst_edited\n"))
    names = venv.known_tasks()
    checks.check("an edited YAML counts on the next run", "probe_sst_edited" in names and "probe_sst" not in names)

    prompt = checkout / "prompts" / "sst" / "this_movie_is.jinja"
    prompt.write_text(prompt.read_text().replace("This movie is", "This edited movie is"))
    mirror = venv.folder / "mirror" / "SetFit" / "sst2"
    mirror.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        (mirror / f"{split}.jsonl").write_text('{"text": "fine", "label": 1}\n{"text": "dull", "label": 0}\n')
    evaluate = ("run", "--model", "dummy", "--tasks", "natural_sst", "--limit", "2", "--write_out")
    done = venv.run(venv.folder / "bin" / "lm_eval", *evaluate, HARNESS_EXT_DATA=str(mirror.parents[1]))
    checks.check(
        "an edited template counts on the next run of lm_eval",
        done.returncode == 0 and "fine This edited movie is" in done.stderr and "|natural_sst|" in done.stdout,
        done.stdout + done.stderr,
    )


def check_install(checks: Checks, work: Path, heavy: Path, sources: dict[str, Path], ours: str, theirs: str) -> None:
    """Make one of the four environments and check it."""
    print(f"\nours {ours}, lm_eval {theirs}", flush=True)
    venv = Venv(work / f"ours_{ours}_lm_eval_{theirs}")
    (venv.site_packages / "zz_heavy.pth").write_text(f"{heavy}\n")
    if theirs == "wheel":
        venv.pip("install", "--no-deps", sources["lm_eval wheel"])
        lm_eval = venv.site_packages / "lm_eval"
    else:
        venv.pip("install", "--no-deps", "-e", sources["lm_eval source"])
        lm_eval = sources["lm_eval source"] / "lm_eval"
    before, entries_before, tasks_before = digest(lm_eval), set(os.listdir(venv.site_packages)), venv.known_tasks()

    checkout = copy_checkout(venv.folder / "checkout")
    if ours == "wheel":
        venv.pip("install", "--no-deps", sources["our wheel"])
    else:
        venv.pip("install", "--no-deps", "-e", checkout)
    tasks_after = set(venv.known_tasks())
    print(f"       lm_eval knows {len(tasks_before)} names, and {len(tasks_after - set(tasks_before))} more with ours")
    checks.check("all of lm_eval's tasks are still there", set(tasks_before) <= tasks_after)
    check_every_start(checks, venv, editable=ours == "editable")
    if ours == "editable":
        check_edits(checks, venv, checkout)

    venv.pip("uninstall", "-y", "harness-ext")
    checks.check("uninstalled: lm_eval knows what it knew", venv.known_tasks() == tasks_before)
    checks.check("uninstalled: lm_eval's files are as they were", digest(lm_eval) == before)
    left = set(os.listdir(venv.site_packages)) ^ entries_before
    checks.check("uninstalled: site-packages is as it was", not left, str(left))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for the environments, kept; default: a temporary one")
    parser.add_argument("--lm-eval-version", default="0.4.13")
    parser.add_argument(
        "--dependencies", type=Path, help="a site-packages with our dependencies but neither lm_eval nor ours"
    )
    args = parser.parse_args()

    temporary = None if args.work else tempfile.TemporaryDirectory()
    work = (args.work or Path(temporary.name)).resolve()
    work.mkdir(parents=True, exist_ok=True)
    downloads = work / "downloads"
    pip = [sys.executable, "-m", "pip", "-q"]
    lm_eval = f"lm_eval=={args.lm_eval_version}"
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(downloads), str(ROOT)], check=True)
    subprocess.run([*pip, "download", "--no-deps", "-d", str(downloads), lm_eval], check=True)
    subprocess.run([*pip, "download", "--no-deps", "--no-binary", "lm_eval", "-d", str(downloads), lm_eval], check=True)
    with tarfile.open(next(downloads.glob("lm_eval-*.tar.gz"))) as archive:
        archive.extractall(work / "source", filter="data")
    sources = {
        "our wheel": next(downloads.glob("harness_ext-*.whl")),
        "lm_eval wheel": next(downloads.glob("lm_eval-*.whl")),
        "lm_eval source": next((work / "source").glob("lm_eval-*")),
    }
    heavy = args.dependencies or install_dependencies(work, sources["our wheel"])

    checks = Checks()
    for ours in ("wheel", "editable"):
        for theirs in ("wheel", "editable"):
            check_install(checks, work, heavy, sources, ours, theirs)
    if temporary is not None:
        temporary.cleanup()
    print(f"\n{'all checks passed' if not checks.failed else f'{len(checks.failed)} checks failed'}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
