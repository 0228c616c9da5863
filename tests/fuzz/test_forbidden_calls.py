"""What the package reads is data: no source of ours runs code that comes from a file, a name or a string."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "harness_ext"
FILES = sorted(PACKAGE.rglob("*.py"))

BUILTINS = {"eval", "exec", "compile", "__import__", "execfile"}
MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "cloudpickle",
    "jsonpickle",
    "ctypes",
    "code",
    "runpy",
}
CALLS = {
    "os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.spawnv", "os.spawnl", "os.posix_spawn",
    "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp", "shutil.unpack_archive",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "torch.hub.load", "torch.jit.load", "pandas.read_pickle",
    "pd.read_pickle", "jinja2.Environment", "jinja2.Template", "importlib.util.spec_from_file_location",
}  # fmt: skip
METHODS = {"extractall", "load_state_dict_from_url"}
IMPORTS_BY_NAME = {"cli/__init__.py"}  # of its own subcommands
TRUSTS = {"lab/run.py"}  # a folder that it has just written


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression of names, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def problems(source: str, name: str) -> Iterator[str]:
    """What a source may not do, one line each."""
    tree = ast.parse(source)
    safe_loaders = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(dotted(base).endswith("SafeLoader") for base in node.bases)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for found in names:
                if found.split(".")[0] in MODULES:
                    yield f"line {node.lineno}: imports {found}"
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}

        def says(key: str, value: object, keywords: dict[str | None, ast.expr] = keywords) -> bool:
            return isinstance(keywords.get(key), ast.Constant) and keywords[key].value == value  # type: ignore[attr-defined]

        last = node.func.attr if isinstance(node.func, ast.Attribute) else called
        if called in BUILTINS or called in CALLS or last in METHODS:
            yield f"line {node.lineno}: calls {called or last}"
        if called.endswith("import_module") and name not in IMPORTS_BY_NAME:
            yield f"line {node.lineno}: imports a module by a name that it computes"
        if called == "torch.load" and not says("weights_only", True):
            yield f"line {node.lineno}: torch.load without weights_only=True"
        if last == "load" and "allow_pickle" in keywords and not says("allow_pickle", False):
            yield f"line {node.lineno}: numpy loads pickles"
        if called == "yaml.load" and dotted(keywords.get("Loader", ast.Name(""))) not in safe_loaders:
            yield f"line {node.lineno}: yaml.load without a SafeLoader"
        if "shell" in keywords and not says("shell", False):
            yield f"line {node.lineno}: runs a shell"
        if called.startswith("subprocess.") and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
            yield f"line {node.lineno}: runs a command line that is one string"
        if "trust_remote_code" in keywords and name not in TRUSTS:
            yield f"line {node.lineno}: decides about trust_remote_code, which is the user's"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_source_runs_what_it_reads(path: Path) -> None:
    assert list(problems(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix())) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "exec(text)",
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "class Mine(yaml.Loader): pass\nyaml.load(text, Loader=Mine)",
        "subprocess.run('ls', shell=True)",
        "subprocess.run(f'ls {x}')",
        "os.system(x)",
        "importlib.import_module(name)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "load_dataset(name, trust_remote_code=flag)",
        "archive.extractall(folder)",
        "jinja2.Environment().from_string(text)",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert list(problems(source, "somewhere.py"))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile(x)",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "class Mine(yaml.SafeLoader): pass\nyaml.load(text, Loader=Mine)",
        "yaml.safe_load(text)",
        "subprocess.run([sys.executable, name])",
        "json.load(file)",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert list(problems(source, "somewhere.py")) == []
