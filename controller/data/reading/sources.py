"""Datasets as streams of rows: local files and directories of them, the hub, synthetic rows.

    open_source(config, role, seed) -> Source: `name`, `columns`, `len()`, `rows()`, `where(i)`

A source knows its length without reading the rows into memory, gives the same rows in the same order every
time, and says in its errors which file or split is at fault, and which row of it, counted from 1. `coverage_of`
it says which files and splits are read, which others are not, and why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from controller.data.errors import DataError
from controller.data.reading.remote import Located, located
from controller.data.reading.synthetic import SPLITS, AdditionSource, read_options
from controller.data.reading.tables import (
    BATCH,
    PASSED,
    Unreadable,
    Wanted,
    every,
    read_table,
    row_name,
    rows_of,
    table_shape,
)
from controller.data.reading.texts import read_text, text_shape
from schema.config import dataset_files
from schema.config.columns import TABLES, folder_columns
from schema.config.data_files import FileId, UnreadableDataError, file_id
from schema.config.dataset_files import Role, default_split
from schema.config.paths import DATA_FORMATS, data_suffix
from schema.config.sections.dataset import DatasetConfig, DatasetKeys
from schema.storage.address import is_remote


@dataclass(frozen=True)
class Coverage:
    """The files or splits that are read of a dataset; those that are not, by reason; how that was chosen, if by us.

    remarks: what else the user should know of the files.
    """

    read: list[str] = field(default_factory=list)
    unread: dict[str, list[str]] = field(default_factory=dict)
    how: str = ""
    remarks: list[str] = field(default_factory=list)


class RowSource(Protocol):
    """Rows that can be streamed any number of times."""

    name: str
    columns: list[str]

    def __len__(self) -> int: ...

    def rows(self, wanted: Wanted = every) -> Iterator[dict[str, Any]]:
        """All rows, each with all columns of its file; one that cannot be read is `Unreadable`.

        wanted: whether the row at a position (from 0) is read; `PASSED` stands in place of the others.
        """
        ...

    def where(self, i: int) -> str:
        """Name the row at position i (from 0) for an error: its file or split, and its number there (from 1)."""
        ...

    def identity(self) -> list[Any]:
        """Identify the rows, as JSON: another list for other rows. It may take as long as to read the files."""
        ...


def open_source(config: DatasetKeys, role: Role, seed: int, apart: Collection[FileId] = frozenset()) -> RowSource:
    """Open the dataset that `config` names. Raises `DataError`; reads no rows yet (but counts JSON lines).

    apart: files of the other role, which are left out of a directory.
    """
    if config.files:
        return _open_files(config)
    if config.is_synthetic:
        return _open_synthetic(config, role, seed)
    if config.options:
        raise DataError(f"dataset `{config.name}` takes no options: they belong to synthetic:addition")
    place = located(config.name, config.cache)
    path = place.path
    if path.is_file():
        if config.splits not in ([], ["train"]):
            raise DataError(f"{config.name} is one file: it has no split {config.split!r}; leave `split` out")
        return _file(place)
    if path.is_dir():
        return _open_directory(place, config.splits, role, apart)
    if data_suffix(path.name) or config.name.startswith((".", "/", "~")):
        raise DataError(f"dataset file {path} does not exist")
    return open_hub(config, role)


def files_of(dataset: DatasetConfig, role: Role) -> frozenset[FileId]:
    """Answer what `dataset_files.files_of` does, for files at addresses too."""
    files: set[FileId] = set()
    for _, part in dataset.parts:
        try:
            names = [str(located(file, part.cache).path) for file in part.files]
            name = str(located(part.name, part.cache).path) if is_remote(part.name) else part.name
        except DataError:
            continue  # opening that dataset reports it
        files |= dataset_files.files_of(DatasetConfig(name=name, files=names, split=part.split), role)
    return frozenset(files)


def _file(place: Located) -> FileSource:
    place.fetch([place.path])
    return FileSource(place.path, place.shown(place.path))


def _open_directory(place: Located, splits: Sequence[str], role: Role, apart: Collection[FileId]) -> RowSource:
    path = place.path
    try:
        choice = dataset_files.choose(path, splits, role, apart)
    except UnreadableDataError as error:
        raise DataError(place.text(str(_as_data_error(error)))) from None
    except OSError as error:
        raise DataError(place.text(f"directory {path} cannot be read: {error}")) from None
    place.fetch(choice.read)
    unread = {reason: list(map(place.shown, files)) for reason, files in choice.unread.items()}
    sources = [FileSource(file, place.shown(file), folder_columns(path, file)) for file in choice.read]
    names = dict.fromkeys(name for source in sources for name in source.of_folders)
    remarks = [f"column `{name}`: text from names of folders, as {name}=…" for name in names]
    return _chain(sources, Coverage(list(map(place.shown, choice.read)), unread, choice.how, remarks))


def _chain(sources: Sequence[FileSource], coverage: Coverage) -> ChainedSources:
    """The files one after the other, with remarks of those that hold no row, and of those that are missing."""
    empty = [source.name for source in sources if not len(source)]
    remarks = [f"{name} holds no row" for name in empty[:_NAMED]]
    if len(empty) > _NAMED:
        remarks.append(f"{len(empty) - _NAMED:,} more files hold no row")
    coverage.remarks.extend([*remarks, *_missing([source.name for source in sources])])
    return ChainedSources(sources, coverage)


_MOST_SHARDS = 100_000
_SHARD = re.compile(r"(.*-)([0-9]+)(-of-([0-9]+)(?![0-9]).*)")


def _missing(names: Sequence[str]) -> Iterator[str]:
    """A remark for each set of files of which some are missing by their names (`train-00001-of-00002.parquet`)."""
    sets: dict[tuple[str, str, int], list[str]] = {}
    for name in names:
        folder, slash, last = name.rpartition("/")
        if (match := _SHARD.fullmatch(last)) is not None:
            key = f"{folder}{slash}{match[1]}", match[3], int(match[4])
            sets.setdefault(key, []).append(match[2])
    for (start, end, total), numbers in sets.items():
        numbered = {int(number) for number in numbers}
        expected = range(1, total + 1) if total in numbered else range(total)
        if absent := sorted({*expected[:_MOST_SHARDS]} - numbered):
            first = f"{start}{absent[0]:0{len(numbers[0])}}{end}"
            yield f"{len(numbered):,} of {total:,} files of a set are read: {first} is none of them"


def _as_data_error(error: UnreadableDataError) -> DataError:
    return DataError(f"{error}; {error.hint}" if error.hint else str(error))


def _open_files(config: DatasetKeys) -> RowSource:
    if config.name or config.options or config.splits:
        raise DataError("dataset files stand alone: leave `name`, `split` and `options` out")
    places = [located(file, config.cache) for file in config.files]
    names: dict[FileId, list[str]] = {}
    for file, place in zip(config.files, places, strict=True):
        if not place.path.is_file():
            hint = ": name a directory alone, in `name`" if place.path.is_dir() else ""
            raise DataError(f"dataset file {file} does not exist, or is not a file{hint}")
        names.setdefault(file_id(place.path), []).append(file)
    remarks = [
        f"{first} is read {len(others) + 1} times, as {', '.join([first, *others])}"
        for first, *others in names.values()
        if others
    ]
    sources = [_file(place) for place in places]
    return _chain(sources, Coverage(list(config.files), remarks=remarks))


def _open_synthetic(config: DatasetKeys, role: Role, seed: int) -> RowSource:
    if config.name != "synthetic:addition":
        raise DataError(f"dataset `{config.name}` is unknown; the built-in one is synthetic:addition")
    if config.subset or config.revision:
        raise DataError("synthetic:addition has neither subset nor revision")
    splits = config.splits or ["train" if role == "train" else "held_out"]
    options = read_options(config.options)
    sources: list[RowSource] = []
    for split in splits:
        if split == "train":
            sources.append(AdditionSource(options, "train", seed))
        elif split == "held_out":
            sources.append(AdditionSource(options, "held_out", seed))
        else:
            raise DataError(f"synthetic:addition has no split {split!r}; it has {', '.join(SPLITS)}")
    return ChainedSources(sources, Coverage([source.name for source in sources]))


class FileSource:
    """One file of a format in `DATA_FORMATS`.

    name: what people call it. of_folders: columns that all of its rows have by its path, unless the file has a
    column of that name.
    """

    def __init__(self, path: Path, name: str, of_folders: Mapping[str, str | None] | None = None) -> None:
        self.name = name
        self._path = path
        self._is_table = path.suffix.lower() in TABLES
        if self._is_table:
            self.columns, self._length = table_shape(path, self.name)
        elif data_suffix(path.name):
            self.columns, self._length = text_shape(path, self.name)
        else:
            raise DataError(f"{self.name}: of the files only {DATA_FORMATS} can be read")
        given = (of_folders or {}).items()
        self.of_folders = {name: value for name, value in given if name not in self.columns}
        self.columns += self.of_folders

    def __len__(self) -> int:
        return self._length

    def where(self, i: int) -> str:
        return row_name(self.name, i)

    def identity(self) -> list[Any]:
        with self._path.open("rb") as file:
            return [self.name, self.of_folders, hashlib.file_digest(file, "sha256").hexdigest()]

    def rows(self, wanted: Wanted = every) -> Iterator[dict[str, Any]]:
        rows = (read_table if self._is_table else read_text)(self._path, self.name, wanted)
        absent = dict.fromkeys(self.columns) | self.of_folders
        for row in rows:
            yield row if row is PASSED or isinstance(row, Unreadable) else absent | row


class HubSource:
    """One split of a dataset that `datasets` loads."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self.columns: list[str] = list(dataset.column_names)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def where(self, i: int) -> str:
        return row_name(self.name, i)

    def identity(self) -> list[Any]:
        return [self.name, str(self._dataset._fingerprint)]  # of the library: files, split and revision

    def rows(self, wanted: Wanted = every) -> Iterator[dict[str, Any]]:
        """Yield the rows as Arrow holds them, so that images and the like are as in a parquet file: their bytes."""
        yield from rows_of(self._dataset.with_format("arrow").iter(batch_size=BATCH), self.name, wanted)


def open_hub(config: DatasetKeys, role: Role) -> RowSource:
    """A dataset by its name on the hub (or anything else that `datasets.load_dataset` takes)."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"dataset `{config.name}` is not a local file, and the package `datasets` that loads it from the "
            "hub is not installed: pip install '.[rollout]' in the checkout"
        ) from None
    try:
        loaded = datasets.load_dataset(config.name, config.subset or None, revision=config.revision or None)
    except Exception as error:  # it raises whatever its file systems and builders raise
        raise DataError(
            f"dataset `{config.name}` is not a local file and cannot be loaded from the hub: {error}"
        ) from error
    try:
        splits = config.splits or [default_split(config.name, list(loaded), role)]
    except UnreadableDataError as error:
        raise _as_data_error(error) from None
    for split in splits:
        if split not in loaded:
            raise DataError(f"dataset `{config.name}` has no split {split!r}; it has {', '.join(loaded)}")
    sources = [HubSource(f"{config.name}/{split}", loaded[split]) for split in splits]
    others = [f"{config.name}/{split}" for split in loaded if split not in splits]
    how = "" if config.splits else f"no split is named: {splits[0]} of {', '.join(loaded)}"
    unread = {"another split": others} if others else {}
    return ChainedSources(sources, Coverage([source.name for source in sources], unread, how))


_NAMED = 8  # sources of which the name of several consists


class ChainedSources:
    """Sources, one after the other. Its columns are those that all of them have, its rows have those of any.

    A source without rows has no say in that, unless none has any: an empty file of JSON lines has no columns.
    """

    def __init__(self, sources: Sequence[RowSource], coverage: Coverage) -> None:
        suffix = f" and {len(sources) - _NAMED:,} more" if len(sources) > _NAMED else ""
        self.name = ", ".join(source.name for source in sources[:_NAMED]) + suffix
        self.coverage = coverage
        self.filled = [source for source in sources if len(source)] or list(sources)
        first, *others = self.filled
        self.columns = [name for name in first.columns if all(name in other.columns for other in others)]
        self.sources = list(sources)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def identity(self) -> list[Any]:
        return [source.identity() for source in self.sources]

    def rows(self, wanted: Wanted = every) -> Iterator[dict[str, Any]]:
        names = dict.fromkeys(name for source in self.sources for name in source.columns)
        start = 0
        for source in self.sources:
            absent = {name: None for name in names if name not in source.columns}
            for row in source.rows(lambda i, start=start: wanted(start + i)):  # type: ignore[misc]
                yield row if not absent or row is PASSED or isinstance(row, Unreadable) else row | absent
            start += len(source)

    def where(self, i: int) -> str:
        for source in self.sources:
            if i < len(source):
                return source.where(i)
            i -= len(source)
        raise IndexError(i)


def coverage_of(source: RowSource) -> Coverage:
    """List the files and splits that a source reads, and those that it does not."""
    return source.coverage if isinstance(source, ChainedSources) else Coverage([source.name])


def column(row: dict[str, Any], name: str) -> Any:
    """The value of a column; dots reach into structs (`reward_model.ground_truth`), a JSON text included.

    Raises KeyError when there is none, `DataError` where the row cannot be read.
    """
    if isinstance(row, Unreadable):
        raise DataError(row.fault)
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str):
            value = _struct(value)
        if not isinstance(value, dict) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def optional_column(row: dict[str, Any], name: str) -> Any:
    """Answer what `column` does; None where there is none. Raises `DataError` where the row cannot be read."""
    try:
        return column(row, name)
    except KeyError:
        return None


def _struct(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def require_column(source: RowSource, name: str, key: str) -> None:
    """Refuse a column that the source, or one of several, does not have. `key` is the config key that names it."""
    for part in source.filled if isinstance(source, ChainedSources) else [source]:
        if name in part.columns or ("." in name and name.partition(".")[0] in part.columns):
            continue
        raise DataError(
            f"{key} = {name!r}: {part.name} has no such column; it has {', '.join(part.columns) or 'none'}"
        )
