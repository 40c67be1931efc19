"""Datasets as streams of rows: local parquet, Arrow, JSONL and JSON files, directories of them, the hub, synthetic.

    open_source(config, role, seed) -> Source: `name`, `columns`, `len()`, `rows()`, `where(i)`

A source knows its length without reading the rows into memory, gives the same rows in the same order every
time, and says in its errors which file or split is at fault, and which row of it, counted from 1. `coverage_of`
it says which files and splits are read, which others are not, and why.
"""

from __future__ import annotations

import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from controller.data.errors import DataError
from controller.data.synthetic import SPLITS, AdditionSource, read_options
from controller.data.tables import BATCH, Unreadable, read_table, row_name, rows_of, table_shape
from schema.config import DatasetConfig
from schema.config.columns import TABLES, folder_columns
from schema.config.data_files import FileId, UnreadableDataError, file_id
from schema.config.dataset_files import Role, choose, default_split
from schema.config.paths import DATA_SUFFIXES


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

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows, each with all columns of its file; one that cannot be read is `Unreadable`."""
        ...

    def where(self, i: int) -> str:
        """Name the row at position i (from 0) for an error: its file or split, and its number there (from 1)."""
        ...


def open_source(config: DatasetConfig, role: Role, seed: int, apart: Collection[FileId] = frozenset()) -> RowSource:
    """Open the dataset that `config` names. Raises `DataError`; reads no rows yet (but counts JSON lines).

    apart: files of the other role, which are left out of a directory.
    """
    if config.files:
        return _open_files(config)
    if config.is_synthetic:
        return _open_synthetic(config, role, seed)
    if config.options:
        raise DataError(f"dataset `{config.name}` takes no options: they belong to synthetic:addition")
    path = Path(config.name)
    if path.is_file():
        if config.splits not in ([], ["train"]):
            raise DataError(f"{path} is one file: it has no split {config.split!r}; leave `split` out")
        return FileSource(path)
    if path.is_dir():
        return _open_directory(path, config.splits, role, apart)
    if path.suffix.lower() in DATA_SUFFIXES or config.name.startswith((".", "/", "~")):
        raise DataError(f"dataset file {path} does not exist")
    return open_hub(config, role)


def _open_directory(path: Path, splits: Sequence[str], role: Role, apart: Collection[FileId]) -> RowSource:
    try:
        choice = choose(path, splits, role, apart)
    except UnreadableDataError as error:
        raise _as_data_error(error) from None
    except OSError as error:
        raise DataError(f"directory {path} cannot be read: {error}") from None
    unread = {reason: list(map(_shown, files)) for reason, files in choice.unread.items()}
    sources = [FileSource(file, folder_columns(path, file)) for file in choice.read]
    names = dict.fromkeys(name for source in sources for name in source.of_folders)
    remarks = [f"column `{name}`: text from names of folders, as {name}=…" for name in names]
    return _chain(sources, Coverage(list(map(_shown, choice.read)), unread, choice.how, remarks))


def _chain(sources: Sequence[FileSource], coverage: Coverage) -> ChainedSources:
    """The files one after the other, with remarks of those that hold no row, and of those that are missing."""
    empty = [source.name for source in sources if not len(source)]
    remarks = [f"{name} holds no row" for name in empty[:_NAMED]]
    if len(empty) > _NAMED:
        remarks.append(f"{len(empty) - _NAMED:,} more files hold no row")
    coverage.remarks.extend([*remarks, *_missing([Path(source.name) for source in sources])])
    return ChainedSources(sources, coverage)


_MOST_SHARDS = 100_000
_SHARD = re.compile(r"(.*-)([0-9]+)(-of-([0-9]+)(?![0-9]).*)")


def _missing(paths: Sequence[Path]) -> Iterator[str]:
    """A remark for each set of files of which some are missing by their names (`train-00001-of-00002.parquet`)."""
    sets: dict[tuple[str, str, int], list[str]] = {}
    for path in paths:
        if (match := _SHARD.fullmatch(path.name)) is not None:
            key = str(path.parent / match[1]), match[3], int(match[4])
            sets.setdefault(key, []).append(match[2])
    for (start, end, total), numbers in sets.items():
        numbered = {int(number) for number in numbers}
        expected = range(1, total + 1) if total in numbered else range(total)
        if absent := sorted({*expected[:_MOST_SHARDS]} - numbered):
            first = f"{start}{absent[0]:0{len(numbers[0])}}{end}"
            yield f"{len(numbered):,} of {total:,} files of a set are read: {first} is none of them"


def _shown(path: Path) -> str:
    """A path as text, also where its bytes are not UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def _as_data_error(error: UnreadableDataError) -> DataError:
    return DataError(f"{error}; {error.hint}" if error.hint else str(error))


def _open_files(config: DatasetConfig) -> RowSource:
    if config.name or config.options or config.splits:
        raise DataError("dataset files stand alone: leave `name`, `split` and `options` out")
    for file in config.files:
        if not Path(file).is_file():
            raise DataError(f"dataset file {file} does not exist, or is not a file")
    names: dict[FileId, list[str]] = {}
    for file in config.files:
        names.setdefault(file_id(Path(file)), []).append(file)
    remarks = [
        f"{first} is read {len(others) + 1} times, as {', '.join([first, *others])}"
        for first, *others in names.values()
        if others
    ]
    sources = [FileSource(Path(file)) for file in config.files]
    return _chain(sources, Coverage(list(config.files), remarks=remarks))


def _open_synthetic(config: DatasetConfig, role: Role, seed: int) -> RowSource:
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
    """One parquet, Arrow, JSONL or JSON file.

    of_folders: columns that all of its rows have by its path, unless the file has a column of that name.
    """

    def __init__(self, path: Path, of_folders: Mapping[str, str | None] | None = None) -> None:
        self.name = _shown(path)
        self._path = path
        self._is_table = path.suffix.lower() in TABLES
        if self._is_table:
            self.columns, self._length = table_shape(path)
        elif path.suffix.lower() in DATA_SUFFIXES:
            self.columns, self._length = _json_shape(path)
        else:
            raise DataError(f"{path}: of the files only {', '.join(DATA_SUFFIXES)} can be read")
        given = (of_folders or {}).items()
        self.of_folders = {name: value for name, value in given if name not in self.columns}
        self.columns += self.of_folders

    def __len__(self) -> int:
        return self._length

    def where(self, i: int) -> str:
        return row_name(self.name, i)

    def rows(self) -> Iterator[dict[str, Any]]:
        rows = read_table(self._path) if self._is_table else _json_rows(self._path)
        absent = dict.fromkeys(self.columns) | self.of_folders
        for row in rows:
            yield row if isinstance(row, Unreadable) else absent | row


def _json_shape(path: Path) -> tuple[list[str], int]:
    """Columns and length. Raises `DataError` where there are rows, and none of the first can be read."""
    columns: dict[str, None] = {}
    count, fault = 0, ""
    for row in _json_rows(path):
        count += 1
        columns.update(dict.fromkeys(row))
        fault = fault or (row.fault if isinstance(row, Unreadable) else "")
    if fault and not columns:
        raise DataError(fault)
    return list(columns), count


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON array or, whatever the suffix, of one object per line."""
    try:
        with path.open("rb") as file:
            start = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
            file.seek(start)
            first = next((line for line in file if line.strip()), b"")
            file.seek(start)
            if first.lstrip().startswith(b"["):
                text = file.read()
                values = enumerate(_parse(text, str(path)))
                yield from (_object(value, row_name(path, i), text) for i, value in values)
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    try:
                        value = _parse(line, where)
                    except DataError as error:
                        yield Unreadable(str(error))
                    else:
                        yield _object(value, where, line)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object each of whose keys is there once: of two, a reader would take either. Raises ValueError."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated = next(name for name in fields if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"an object has the key {repeated!r} more than once: keep one of them")
    return fields


def _object(value: Any, where: str, text: bytes) -> dict[str, Any]:
    """A row. text: the JSON that it is from; escapes in it may be half of a pair, not a character."""
    if not isinstance(value, dict):
        return Unreadable(f"{where} is not an object of columns but {type(value).__name__}")
    if b"\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            return Unreadable(f"{where} is not valid text: {error}")
    return value


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

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as Arrow holds them, so that images and the like are as in a parquet file: their bytes."""
        yield from rows_of(self._dataset.with_format("arrow").iter(batch_size=BATCH), self.name)


def open_hub(config: DatasetConfig, role: Role) -> RowSource:
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

    def rows(self) -> Iterator[dict[str, Any]]:
        every = dict.fromkeys(name for source in self.sources for name in source.columns)
        for source in self.sources:
            absent = {name: None for name in every if name not in source.columns}
            for row in source.rows():
                yield row if not absent or isinstance(row, Unreadable) else row | absent

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
