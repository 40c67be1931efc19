"""The data files below a directory, each with the words of its path that name a split. No data file is opened.

`data_files` walks, `distinct` takes each file once; what looks like data too goes to `unread`, by reason.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schema.config.paths import COMPRESSIONS, DATA_FORMATS, DATA_SUFFIXES, data_suffix

FileId = tuple[int, int]
"""Device and inode: the same for every name of a file."""
MOST_ENTRIES = 100_000
"""A directory with more is hardly a dataset."""

KINDS = {
    "train": "train", "training": "train", "trainval": "train",
    "validation": "validation", "valid": "validation", "validate": "validation", "val": "validation",
    "dev": "validation", "development": "validation", "heldout": "validation", "holdout": "validation",
    "test": "test", "testing": "test", "devtest": "test", "testdev": "test", "testmini": "test", "tst": "test",
    "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Kind of split of each word that names one; those of validation and test as they are preferred."""
_WORD = re.compile(
    r"(?<![a-z])(?:mini)?(train(?:ing|val)?|validation|validate|valid|val|dev(?:elopment|test)?"
    r"|(?:held|hold)[-_ ]?out|test(?:ing|dev|mini)?|tst|eval(?:uation)?)(?:[-_ ]?(?:sets?|data|splits?)|s)?(?![a-z])"
)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_COMPRESSED = (*COMPRESSIONS, ".lz4", ".zip", ".tar", ".tgz", ".7z", ".br")
_OTHER_FORMATS = (
    ".txt", ".jsonlines", ".jl", ".feather", ".orc", ".avro", ".xlsx", ".xls", ".pkl", ".pickle", ".npy", ".npz",
    ".h5", ".hdf5", ".msgpack", ".tfrecord", ".mds", ".lance", ".pq", ".xml", ".db", ".sqlite",
)  # fmt: skip
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_STATE = "state.json"
UNPACK, DEAD_LINK = "compressed: unpack it", "a link to nothing"
OTHER_FORMAT = f"only {DATA_FORMATS} can be read"


class UnreadableDataError(ValueError):
    """The data cannot be used; the text says why, `hint` what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class DataFile:
    """A file below a directory that can be read as data."""

    path: Path
    name: str
    """Its path below the directory."""
    id: FileId
    words: tuple[str, ...]
    """The words for splits in its name, or in the nearest folder that has some; of each name that the file has."""

    @property
    def kinds(self) -> set[str]:
        """The kinds of split that its words name."""
        return {KINDS[word] for word in self.words}

    @property
    def word(self) -> str:
        """The word that names its split; "": none does, or words of two kinds do."""
        return self.words[-1] if len(self.kinds) == 1 else ""


def file_id(path: Path) -> FileId:
    """Return the identity of a file. Raises OSError."""
    status = path.stat()
    return status.st_dev, status.st_ino


def split_words(name: str) -> tuple[str, ...]:
    """The words of a name that name a split, as `KINDS` spells them."""
    text = _CAMEL.sub("-", name).lower()
    return tuple(re.sub(r"[-_ ]", "", match[1]) for match in _WORD.finditer(text))


def words_of(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the words of the last part of a path that names a split.

    Folders that name two kinds (train_test_split) tell nothing of a file in them.
    """
    *folders, name = parts
    if words := split_words(name):
        return words
    for folder in reversed(folders):
        words = split_words(folder)
        if len({KINDS[word] for word in words}) == 1:
            return words
    return ()


def data_files(directory: Path, unread: dict[str, list[Path]]) -> Iterator[DataFile]:
    """Yield all data files; what else looks like data goes to `unread`. Raises `UnreadableDataError`, OSError."""
    entries = 0
    for folder, folders, names in os.walk(directory, followlinks=True, onerror=_fail):
        folder_path = Path(folder)
        parts = folder_path.relative_to(directory).parts
        above = [directory.joinpath(*parts[:n]) for n in range(len(parts))]
        if folder_path.is_symlink() and file_id(folder_path) in map(file_id, above):
            folders.clear()  # a link to a folder above: its files are read there
            continue
        entries += len(folders) + len(names)
        if entries > MOST_ENTRIES:
            raise UnreadableDataError(
                f"{directory} holds more than {MOST_ENTRIES:,} files and folders", "name its files in `files`"
            )
        state = _saved_state(folder_path) if _STATE in names else None
        listed = None if state is None else _listed(folder_path, state)
        for name in sorted(names):
            path = folder_path / name
            relative = str(path.relative_to(directory))
            reason = _no_data(relative, name, listed)
            if reason is None and not path.is_file():
                reason = DEAD_LINK if path.is_symlink() and not path.exists() else "not a regular file"
            if reason is None:
                words = words_of(Path(without_suffix(relative)).parts)
                saved = str(state.get("_split") or "") if state is not None and not words else ""
                yield DataFile(path, relative, file_id(path), words or split_words(saved))
            elif reason:
                unread.setdefault(reason, []).append(path)


def _no_data(relative: str, name: str, listed: Collection[str] | None) -> str | None:
    """Why a file is not read; None: it is data, "": it does not look like it. listed: of a saved dataset."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    last = suffixes[-1] if suffixes else ""
    if name in _DESCRIPTIONS or (name == _STATE and listed is not None):
        return "it describes a dataset"
    if listed is not None and name in listed:
        return None
    bare = not last and (name.lower().startswith("part-") or split_words(name))
    looked_at = {suffix.rstrip("~#") for suffix in suffixes}  # copies that editors keep
    if not (bare or looked_at & {*DATA_SUFFIXES, *_OTHER_FORMATS, *_COMPRESSED}):
        return ""
    if any(part.startswith((".", "_")) for part in relative.split(os.sep)):
        return "hidden: a part of its path begins with . or _"
    if listed is not None:
        return "state.json of its folder does not list it"
    if data_suffix(name):
        return "a cache of `datasets`" if last == ".arrow" and name.startswith("cache-") else None
    if last in _COMPRESSED:
        return UNPACK
    return OTHER_FORMAT


def _saved_state(folder: Path) -> dict[str, Any] | None:
    """`state.json` of a dataset that was saved with `save_to_disk`; None: it is another file of that name."""
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) and isinstance(state.get("_data_files"), list) else None


def _listed(folder: Path, state: dict[str, Any]) -> list[str]:
    """The files of a saved dataset. Raises `UnreadableDataError`."""
    if state.get("_indices_data_files"):
        raise UnreadableDataError(
            f"{folder / _STATE}: the rows are chosen by indices, which only old versions of `datasets` wrote",
            "load the dataset with `datasets` and save it again",
        )
    names = [str(entry.get("filename")) for entry in state["_data_files"] if isinstance(entry, dict)]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UnreadableDataError(f"{folder / _STATE} lists {listing(missing)}, which is not there")
    return names


def _fail(error: OSError) -> None:
    raise error


def distinct(files: Sequence[DataFile], unread: dict[str, list[Path]]) -> Iterator[DataFile]:
    """Each file once; under several names it belongs to the splits of all of them."""
    by_id: dict[FileId, list[DataFile]] = {}
    stems = {without_suffix(str(file.path)): file for file in sorted(files, key=_preference, reverse=True)}
    for file in files:
        by_id.setdefault(file.id, []).append(file)
    for first, *others in by_id.values():
        words = dict.fromkeys(word for file in (first, *others) for word in file.words)
        for other in others:
            unread.setdefault(f"the same file as {first.name}", []).append(other.path)
        preferred = stems[without_suffix(str(first.path))]
        if data_suffix(preferred.path.name) != data_suffix(first.path.name):
            unread.setdefault(f"taken for {preferred.name} in another format", []).append(first.path)
        else:
            yield DataFile(first.path, first.name, first.id, tuple(words))


def _preference(file: DataFile) -> tuple[int, str]:
    """Rank of the format; of one format, files that are not compressed come first."""
    suffix = data_suffix(file.path.name)
    kind = next((kind for kind in DATA_SUFFIXES if suffix == kind or suffix.startswith(f"{kind}.")), "")
    return DATA_SUFFIXES.index(kind) if kind else len(DATA_SUFFIXES), suffix


def without_suffix(name: str) -> str:
    """The name of a file without the ending of its format; what has none loses its last ending."""
    suffix = data_suffix(name) or Path(name).suffix
    return name[: len(name) - len(suffix)]


def listing(names: Sequence[str], most: int = 8) -> str:
    """The names in one line, of many the first, and how many more there are."""
    suffix = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + suffix
