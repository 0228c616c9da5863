"""Where the prompts and task YAMLs are: inside the package in a wheel install, beside it in a checkout.

Both are read as plain files, so a package that is imported from a zip archive has none.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["prompts_folder", "task_configs_folder"]

_PACKAGE = Path(__file__).resolve().parent


def prompts_folder() -> Path:
    """Return the folder of `<dataset>/<name>.jinja`.

    Raises:
        FileNotFoundError: If neither place has the folder.
    """
    return _folder("prompts")


def task_configs_folder() -> Path:
    """Return the folder of `<dataset>/_dataset.yaml`, the task YAMLs and `_evaluators/`.

    Raises:
        FileNotFoundError: If neither place has the folder.
    """
    return _folder("task_configs")


def _folder(name: str) -> Path:
    inside, beside = _PACKAGE / name, _PACKAGE.parent / name
    for folder in (inside, beside):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"harness_ext's {name}/ is neither at {inside} (a wheel install) nor at {beside} (a checkout). "
        "Install again with `pip install --force-reinstall --no-deps harness-ext`, or from a whole checkout."
    )
