"""Where a task's documents come from: a local mirror, the folder of a model of the lab, or the Hugging Face Hub.

`HARNESS_EXT_DATA` names a folder with `<org>/<name>/<split>.jsonl` or `.parquet`; a dataset that is there is read from
there, any other from the Hub. Datasets of the organisation `harness_ext` belong to a synthetic language, and the folder of
a model trained on it carries them under `data/`. Either folder may have prompts for its datasets under `prompts/`.

Names of datasets and splits lead nowhere else. The mirror is the user's own and may have links; what comes with a model may not
lead out of its folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

__all__ = ["DATA_VARIABLE", "LazySplits", "TextFile", "data_folders", "open_dataset", "open_text_file"]

DATA_VARIABLE = "HARNESS_EXT_DATA"

OWN_ORGANISATION = "harness_ext"

READERS = {".jsonl": "json", ".parquet": "parquet"}

_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")


class LazySplits(Mapping[str, datasets.Dataset]):
    """The splits of a dataset, each loaded when it is first asked for: zero-shot tasks never touch the training split.

    Attributes:
        source: Where the splits come from, for the results JSON.
    """

    def __init__(
        self,
        path: str,
        name: str | None,
        folder: Path | None,
        options: Mapping[str, Any],
        *,
        within: Path | None = None,
    ) -> None:
        self._path, self._name, self._folder, self._options = path, name, folder, dict(options)
        self._within = within
        self._loaded: dict[str, datasets.Dataset] = {}
        self.source = f"local folder {folder}" if folder is not None else f"Hugging Face Hub {path}"

    def __getitem__(self, split: str) -> datasets.Dataset:
        if split not in self._loaded:
            self._loaded[split] = self._load_local(split) if self._folder is not None else self._load_hub(split)
        return self._loaded[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def _load_local(self, split: str) -> datasets.Dataset:
        assert self._folder is not None
        if not split or any(sign in split for sign in "/\\\0"):
            raise ValueError(f"{self._path}: split {split!r} is no name; expected one such as 'test'.")
        for suffix in READERS:
            path = self._folder / f"{split}{suffix}"
            if path.is_file():
                if self._within is not None:
                    _refuse_links_out(path, self._within)
                return _read_rows(path, split)
        found = ", ".join(sorted(path.name for path in self._folder.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"{self._folder}: expected {split}.jsonl or {split}.parquet, found {found}. Add the file, or take the dataset "
            f"from the Hub by unsetting {DATA_VARIABLE}."
        )

    def _load_hub(self, split: str) -> datasets.Dataset:
        try:
            return datasets.load_dataset(self._path, self._name, split=split, **self._options)
        except Exception as err:  # a library of a dozen formats and two network clients raises whatever they do
            mirror = os.environ.get(DATA_VARIABLE)
            where = (
                f"{Path(mirror).expanduser() / self._path} does not exist and"
                if mirror
                else f"{DATA_VARIABLE} is not set and"
            )
            raise FileNotFoundError(
                f"{self._path}, split {split!r}: {where} the Hub did not give it ({err}). Without internet, put "
                f"{self._path}/{split}.jsonl (or .parquet) into a folder and set {DATA_VARIABLE} to that folder."
            ) from err


def _read_rows(path: Path, split: str) -> datasets.Dataset:
    reader = READERS[path.suffix]
    objects = _count_objects(path) if reader == "json" else 0
    try:
        rows = datasets.load_dataset(reader, data_files={split: str(path)}, split=split)
        rows.data.table.validate(full=True)  # else text that is no UTF-8 raises when its row is read
    # Arrow, decompression and the library's own generators raise many things: a bare StopIteration where there are no rows.
    except Exception as err:
        reason = str(err.__cause__ or err) or (
            "it has no rows" if isinstance(err, StopIteration) else type(err).__name__
        )
        raise ValueError(f"{path}: cannot be read as {reader} ({reason}).") from err
    if len(rows) < objects:
        # Arrow loses a row beside a list of nulls.
        raise ValueError(
            f"{path}: {objects} lines are objects, and {len(rows)} rows were read. Save it as .parquet, or leave out columns "
            "that are not needed."
        )
    return rows


def _count_objects(path: Path) -> int:
    """How many lines of a file begin an object.

    Raises:
        ValueError: If a line is `null`: where that is the first that it sees, Arrow's reader ends the whole process.
    """
    count = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.lstrip(b"\xef\xbb\xbf \t\r")
            if line.startswith(b"null"):
                raise ValueError(f"{path}, line {number}: expected a JSON object, found null. Remove the line.")
            count += line.startswith(b"{")
    return count


def _refuse_links_out(path: Path, folder: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} leads out of {folder}, to {path.resolve()}. Put the file itself there.")


def data_folders(pretrained: str | None) -> tuple[Path, ...]:
    """Return the folders of data that there are, in the order in which a dataset is looked up.

    Args:
        pretrained: The evaluated model, which may be a folder of the lab.

    Raises:
        NotADirectoryError: If `HARNESS_EXT_DATA` names no folder.
    """
    folders = []
    mirror = os.environ.get(DATA_VARIABLE)
    if mirror:
        folders.append(Path(mirror).expanduser())
        if not folders[0].is_dir():
            raise NotADirectoryError(
                f"{DATA_VARIABLE}={mirror}: no such folder. Set it to a folder with <org>/<name>/<split>.jsonl, or unset it."
            )
    if pretrained and (beside_model := Path(pretrained).expanduser() / "data").is_dir():
        folders.append(beside_model)
    return tuple(folders)


def open_dataset(
    path: str, name: str | None, *, pretrained: str | None = None, options: Mapping[str, Any] | None = None
) -> LazySplits:
    """Find a dataset; nothing is loaded yet.

    Args:
        path: Its id on the Hub, such as `SetFit/sst2`.
        name: Its configuration, or None.
        pretrained: The evaluated model, which may be a folder of the lab.
        options: Further arguments of `datasets.load_dataset`, for the Hub only.

    Raises:
        NotADirectoryError: If `HARNESS_EXT_DATA` names no folder.
        FileNotFoundError: If a dataset of a synthetic language is asked for and the model's folder has none.
        ValueError: If a file that comes with a model leads out of its folder.
    """
    is_own = path.startswith(f"{OWN_ORGANISATION}/")
    # A model's folder has nothing to say about datasets of others.
    for folder in data_folders(pretrained if is_own else None):
        # Else it is a path of the user's, which lm_eval leaves to the library.
        if _ID.fullmatch(path) and (folder / path).is_dir():
            beside_model = pretrained and folder == Path(pretrained).expanduser() / "data"
            return LazySplits(path, name, folder / path, {}, within=folder.parent if beside_model else None)
    if is_own:
        expected = Path(pretrained).expanduser() / "data" / path if pretrained else None
        raise FileNotFoundError(
            f"{path} is a dataset of a synthetic language and comes in the folder of a model trained on it: expected "
            f"{expected or '<pretrained>/data/' + path}. Make one with `harness-ext demo` (reviews) or `harness-ext lab "
            "run` (hmm, pcfg) and evaluate it with --model hf --model_args pretrained=FOLDER."
        )
    return LazySplits(path, name, None, options or {})


class TextFile(Mapping[str, datasets.Dataset]):
    """A file of text as a dataset of one split.

    Attributes:
        source: Where the text comes from, for the results JSON.
    """

    def __init__(self, path: Path, split: str, rows: datasets.Dataset) -> None:
        self._split, self._rows = split, rows
        self.source = f"local file {path}"

    def __getitem__(self, split: str) -> datasets.Dataset:
        if split != self._split:
            raise KeyError(split)
        return self._rows

    def __iter__(self) -> Iterator[str]:
        return iter([self._split])

    def __len__(self) -> int:
        return 1


def open_text_file(path: Path, *, split: str, column: str) -> TextFile:
    """Read a file of text: `.jsonl` and `.parquet` by rows, anything else as one text in UTF-8.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read.
    """
    path = path.expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file. Name a text file, a .jsonl or a .parquet file as `corpus`.")
    if path.suffix in READERS:
        return TextFile(path, split, _read_rows(path, split))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ValueError(
            f"{path}: expected text in UTF-8, found other bytes ({err}). Convert it, for example with iconv."
        ) from err
    return TextFile(path, split, datasets.Dataset.from_dict({column: [text]}))
