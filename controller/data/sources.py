"""Datasets as streams of rows: local parquet, JSONL and JSON files, directories of them, the hub, synthetic.

    open_source(config, role, seed) -> Source: `name`, `columns`, `len()`, `rows()`, `where(i)`

A source knows its length without reading the rows into memory, gives the same rows in the same order every
time, and says in its errors which file or split is at fault, and which row of it, counted from 1.
"""

from __future__ import annotations

import itertools
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from controller.data.errors import DataError
from controller.data.synthetic import SPLITS, AdditionSource, read_options
from schema.config import DatasetConfig

Role = Literal["train", "validation"]
SUFFIXES = (".parquet", ".jsonl", ".json")
# What a validation dataset without a named split means, in this order.
VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "test")
_SAMPLE_ROWS = 1000  # rows of a JSON file that are looked at to learn its columns


class Source(Protocol):
    """Rows that can be streamed any number of times."""

    name: str
    columns: list[str]

    def __len__(self) -> int: ...

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows; one that cannot be read is `Unreadable`."""
        ...

    def where(self, i: int) -> str:
        """How an error names the row at position i (from 0): its file or split, and its number there (from 1)."""
        ...


def open_source(config: DatasetConfig, role: Role, seed: int) -> Source:
    """Open the dataset that `config` names. Raises `DataError`; reads no rows yet (but counts JSON lines)."""
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
        return Chain([FileSource(file) for file in _files_of(path, config.splits, role)])
    if path.suffix in SUFFIXES or config.name.startswith((".", "/", "~")):
        raise DataError(f"dataset file {path} does not exist")
    return open_hub(config, role)


def _open_files(config: DatasetConfig) -> Source:
    if config.name or config.options or config.splits:
        raise DataError("dataset files stand alone: leave `name`, `split` and `options` out")
    for file in config.files:
        if not Path(file).is_file():
            raise DataError(f"dataset file {file} does not exist, or is not a file")
    return Chain([FileSource(Path(file)) for file in config.files])


def _open_synthetic(config: DatasetConfig, role: Role, seed: int) -> Source:
    if config.name != "synthetic:addition":
        raise DataError(f"dataset `{config.name}` is unknown; the built-in one is synthetic:addition")
    if config.subset or config.revision:
        raise DataError("synthetic:addition has neither subset nor revision")
    splits = config.splits or ["train" if role == "train" else "held_out"]
    options = read_options(config.options)
    sources: list[Source] = []
    for split in splits:
        if split == "train":
            sources.append(AdditionSource(options, "train", seed))
        elif split == "held_out":
            sources.append(AdditionSource(options, "held_out", seed))
        else:
            raise DataError(f"synthetic:addition has no split {split!r}; it has {', '.join(SPLITS)}")
    return Chain(sources)


class FileSource:
    """One parquet, JSONL or JSON file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        if path.suffix == ".parquet":
            self.columns, self._length = _parquet_shape(path)
        elif path.suffix in (".jsonl", ".json"):
            self.columns, self._length = _json_shape(path)
        else:
            raise DataError(f"{path}: of the files only {', '.join(SUFFIXES)} can be read")

    def __len__(self) -> int:
        return self._length

    def where(self, i: int) -> str:
        return _row(self.name, i)

    def rows(self) -> Iterator[dict[str, Any]]:
        if self._path.suffix != ".parquet":
            yield from _json_rows(self._path)
            return
        with _parquet(self._path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """An open parquet file. pyarrow is imported here: jobs on JSONL run where it is not installed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from None


def _parquet_shape(path: Path) -> tuple[list[str], int]:
    with _parquet(path) as file:
        return list(file.schema_arrow.names), int(file.metadata.num_rows)


class Unreadable(dict[str, Any]):
    """In place of a row that cannot be read; `column` raises it. fault: why, with its place."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault


def _json_shape(path: Path) -> tuple[list[str], int]:
    """Columns and length. Raises `DataError` where there are rows, and none of the first can be read."""
    columns: dict[str, None] = {}
    count, fault = 0, ""
    for row in _json_rows(path):
        count += 1
        if count <= _SAMPLE_ROWS:
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
                yield from (_object(value, _row(path, i), text) for i, value in values)
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


def _row(name: Path | str, i: int) -> str:
    return f"{name}, row {i + 1}"


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None


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


def _files_of(directory: Path, splits: Sequence[str], role: Role) -> list[Path]:
    """The files of the wanted splits, split by split, each in order of its names.

    A file belongs to a split when a part of its path below the directory, cut at `-`, `_` and `.`, is the
    split's name (`train.jsonl`, `data/test-00000-of-00002.parquet`).
    """
    files = sorted(file for file in directory.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"directory {directory} has no {', '.join(SUFFIXES)} file")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        for part in dict.fromkeys(re.split(r"[-_./\\]", str(file.relative_to(directory)))):
            by_split.setdefault(part, []).append(file)
    if splits:
        for split in splits:
            if split not in by_split:
                raise DataError(
                    f"directory {directory} has no file of split {split!r}; it has {_names(files)}"
                )
        return list(itertools.chain.from_iterable(by_split[split] for split in splits))
    wanted = ("train",) if role == "train" else VALIDATION_SPLITS
    return next((by_split[split] for split in wanted if split in by_split), files)


def _names(files: Sequence[Path], most: int = 8) -> str:
    names = ", ".join(file.name for file in files[:most])
    return names + (f" and {len(files) - most} more" if len(files) > most else "")


class HubSource:
    """One split of a dataset that `datasets` loads."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self.columns: list[str] = list(dataset.column_names)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def where(self, i: int) -> str:
        return _row(self.name, i)

    def rows(self) -> Iterator[dict[str, Any]]:
        yield from self._dataset


def open_hub(config: DatasetConfig, role: Role) -> Source:
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
    splits = config.splits or [_default_split(config.name, list(loaded), role)]
    for split in splits:
        if split not in loaded:
            raise DataError(f"dataset `{config.name}` has no split {split!r}; it has {', '.join(loaded)}")
    return Chain([HubSource(f"{config.name}/{split}", loaded[split]) for split in splits])


def _default_split(name: str, splits: Sequence[str], role: Role) -> str:
    wanted = ("train",) if role == "train" else VALIDATION_SPLITS
    if len(splits) == 1:
        return splits[0]
    for split in wanted:
        if split in splits:
            return split
    raise DataError(f"dataset `{name}` has the splits {', '.join(splits)}: name one with `split`")


class Chain:
    """Several sources, one after the other. Its columns are those that all of them have."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.name = ", ".join(source.name for source in sources)
        first, *others = sources
        self.columns = [name for name in first.columns if all(name in other.columns for other in others)]
        self.sources = list(sources)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def rows(self) -> Iterator[dict[str, Any]]:
        return itertools.chain.from_iterable(source.rows() for source in self.sources)

    def where(self, i: int) -> str:
        for source in self.sources:
            if i < len(source):
                return source.where(i)
            i -= len(source)
        raise IndexError(i)


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
    """As `column`; None where there is none. Raises `DataError` where the row cannot be read."""
    try:
        return column(row, name)
    except KeyError:
        return None


def _struct(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def require_column(source: Source, name: str, key: str) -> None:
    """Refuse a column that the source, or one of several, does not have. `key` is the config key that names it."""
    for part in source.sources if isinstance(source, Chain) else [source]:
        if name in part.columns or ("." in name and name.partition(".")[0] in part.columns):
            continue
        raise DataError(
            f"{key} = {name!r}: {part.name} has no such column; it has {', '.join(part.columns) or 'none'}"
        )
