"""Paths that the user names, looked at before the work is done and not after it."""

from __future__ import annotations

import os
from pathlib import Path

# os.path answers where pathlib raises: of names that are too long, and below folders that are closed to us.

__all__ = ["require_file", "require_place"]


def require_place(path: Path, option: str = "--out", *, is_folder: bool) -> None:
    """Complain of a path that nothing could be written to.

    Args:
        path: Of a file or folder to make or to write into; folders above it may be missing.
        option: That gave it.
        is_folder: Which of them.

    Raises:
        NotADirectoryError: If it, or what is above it, is a file where a folder is needed.
        IsADirectoryError: If it is a folder where a file is needed.
        PermissionError: If this user may not write there.
    """
    if not is_folder and os.path.isdir(path):
        raise IsADirectoryError(f"{option} {path}: expected a file to write, found a folder. Name a file in it.")
    there = path
    if not (is_folder and os.path.exists(path)):
        there = next(above for above in path.absolute().parents if os.path.exists(above))
    if not os.path.isdir(there):
        found = "found a file" if there == path else f"{there} is a file"
        raise NotADirectoryError(f"{option} {path}: expected a folder, {found}. Name another path.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{option} {path}: {there} cannot be written to. Name another path, or change the permissions of that one."
        )


def require_file(path: Path, what: str, option: str = "") -> None:
    """Complain of a path that is not a file to read.

    Args:
        path: Of the file; a pipe will do.
        what: The file is to be, such as "a result file of lm_eval".
        option: That gave it, where one did.

    Raises:
        FileNotFoundError: If there is nothing.
        IsADirectoryError: If it is a folder.
        PermissionError: If this user may not read it.
    """
    name = f"{option} {path}".strip()
    if os.path.isdir(path):
        raise IsADirectoryError(f"{name}: expected {what}, found a folder. Name a file in it.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{name}: expected {what}, found nothing. Check the path.")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"{name}: no permission to read it. Change its permissions, or copy it.")
