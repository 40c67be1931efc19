"""The process that a dataset class of the user's runs in: `controller.data.reading.own_class` starts it.

    configuration on standard input ─▶ the class, made with what it has parameters for ─▶ rows, appended to a file

Exit code 2: the class is at fault; the last line of stderr says how.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from controller.data.errors import DataError
from controller.data.reading.own_class import BLOCK, FAULT, done_file, own_config
from controller.data.values import is_missing, jsonable
from schema.config import Config
from schema.config.modules import ExternalModuleError, import_external
from schema.config.sections.dataset import DatasetKeys
from schema.util.atomic_file import write_text
from schema.util.own_code import OwnCodeError, load_function
from schema.util.text import configure_logging
from schema.util.threads import end_with_parent

MOST_ROWS = 20_000_000
"""An iterable of more is taken for endless."""
_PROMPTS = ("raw_prompt", "messages", "prompt")


class _Fault(Exception):
    """The class is at fault; the text says how."""


def main(argv: list[str] | None = None) -> int:
    """Append the rows that are missing, of the configuration on standard input. Answers the exit code."""
    section, target, most = argv or sys.argv[1:]
    end_with_parent()
    os.dup2(2, 1)  # prints of the class go to the log
    configure_logging()
    try:
        config = Config.model_validate_json(sys.stdin.read())
        _append(config, _dataset(config, section), Path(target), int(most) if most else None)
    except _Fault as error:
        sys.stderr.write(f"\n{FAULT}{' '.join(str(error).split())}\n")  # behind a bar of progress, too
        return 2
    return 0


def _dataset(config: Config, section: str) -> DatasetKeys:
    sections = {
        "train.train_policy.dataset": config.train.train_policy.dataset,
        "validation.dataset": config.validation.dataset,
        "evaluation.dataset": config.evaluation.dataset,
    }
    whole, bracket, _ = section.partition(".part[")
    place = section.removeprefix(whole) if bracket else ""
    return dict(sections[whole].parts)[place]


def _append(config: Config, dataset: DatasetKeys, target: Path, most: int | None) -> None:
    """Write the rows of a class behind those that the file has. Raises `_Fault`. most: rows of an iterable."""
    instance = _made(config, dataset)
    with target.open("r+b" if target.exists() else "w+b") as file, target.open("rb") as earlier:
        present = _whole_lines(file)
        count = 0

        def passed_over(number: int, item: Any) -> None:
            if earlier.readline() != _line(item, number, config) + b"\n":
                raise _Fault(f"row {number} is another than it was before: an iterable must give the same rows again")
            _touch(target)

        for count, item in _numbered(instance, present, most, passed_over):
            file.write(_line(item, count, config) + b"\n")
            file.flush()
        os.fsync(file.fileno())
    total = max(count, present)
    if not total:
        raise _Fault("it has no rows")
    ended = _is_map_style(instance) or most is None or total < most
    write_text(done_file(target), json.dumps({"rows": total, "ended": ended}))


def _whole_lines(file: Any) -> int:
    """Leave out a line that was cut off; returns how many others there are, the file at their end."""
    lines, end, at = 0, 0, 0
    while block := file.read(BLOCK):
        lines += block.count(b"\n")
        if (last := block.rfind(b"\n")) >= 0:
            end = at + last + 1
        at += len(block)
    file.truncate(end)
    file.seek(end)
    return lines


def _made(config: Config, dataset: DatasetKeys) -> Any:
    """The user's object. Raises `_Fault`."""
    try:
        import_external(config.policy.external_modules)
        make = load_function(dataset.custom_class)
    except ExternalModuleError as error:
        raise _Fault(str(error)) from None
    except OwnCodeError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError):
            raise _Fault(
                f"its file needs the module {cause.name!r}, which is not installed here: install it"
            ) from None
        raise _Fault(f"{error}{f': {_traced(cause)}' if cause else ''}") from None
    arguments = _arguments(config, dataset, make)
    try:
        return make(**arguments)
    except Exception as error:
        raise _Fault(f"it cannot be made: {_traced(error)}") from None


def _arguments(config: Config, dataset: DatasetKeys, make: Callable[..., Any]) -> Mapping[str, Any]:
    """Choose what a class is called with: the arguments of the module's docstring that it has parameters for."""
    known: dict[str, Callable[[], Any]] = {
        "data_files": lambda: list(dataset.files) or [dataset.name],
        "tokenizer": lambda: _tokenizer(config),
        "config": lambda: own_config(config, dataset),
        "processor": lambda: None,
        "split": lambda: dataset.split,
        "seed": lambda: config.effective_seed,
        "max_samples": lambda: dataset.max_samples or -1,
        "parquet_files": lambda: list(dataset.files) or [dataset.name],
        **{name: lambda value=value: value for name, value in config.custom.items()},  # type: ignore[misc]
    }
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}
    kinds = inspect.Parameter
    names = [name for name in parameters if name in known]
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        names += [name for name in _OF_VERL if name not in names]
    missing = [
        p.name
        for p in parameters.values()
        if p.default is kinds.empty
        and p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        and p.name not in known
    ]
    if missing:
        raise _Fault(
            f"it has the parameter {missing[0]!r}, of which nothing is known; it can have {', '.join(known)}, and "
            "further ones by the keys of [custom]"
        )
    return {name: known[name]() for name in names}


_OF_VERL = ("data_files", "tokenizer", "config", "processor", "max_samples")
"""The arguments of verl's own class, to which a class of the user's passes its `**kwargs` on."""


def _tokenizer(config: Config) -> Any:
    from tokenization.loading import load

    policy = config.policy
    return load(*policy.tokenizer, trust_remote_code=policy.trust_remote_code, key=policy.tokenizer_key)


def _touch(target: Path) -> None:
    """Show that rows come which are passed over."""
    if time.time() - target.stat().st_mtime > 1.0:
        os.utime(target)


def _is_map_style(instance: Any) -> bool:
    """Whether rows are asked for by number. torch's iterable datasets have the methods, too, and refuse to."""
    iterable = any(kind.__name__ == "IterableDataset" for kind in type(instance).__mro__)
    return hasattr(instance, "__len__") and hasattr(instance, "__getitem__") and not iterable


def _numbered(
    instance: Any, skip: int, most: int | None, skipped: Callable[[int, Any], object]
) -> Iterator[tuple[int, Any]]:
    """Items with their numbers from 1, without the first ones, with each of which an iterable calls `skipped`.

    Raises `_Fault`.
    """
    if _is_map_style(instance):
        length = _called(lambda: len(instance), "its length")
        for i in range(skip, length):
            yield i + 1, _called(partial(instance.__getitem__, i), f"row {i + 1} of {length}")
        if (now := _called(lambda: len(instance), "its length")) != length:
            raise _Fault(f"its length was {length} and is {now} after all rows: a map-style dataset must not change")
        return
    if not hasattr(instance, "__iter__"):
        raise _Fault("it must have __len__ and __getitem__, or __iter__")
    items = _called(lambda: iter(instance), "its iterator")
    for number in range(1, (MOST_ROWS if most is None else most) + 1):
        item = _called(lambda: next(items, _END), f"row {number}")
        if item is _END:
            if number <= skip:
                raise _Fault(f"it ended after {number - 1} rows, and had {skip} before: it must give the same rows")
            return
        if number <= skip:
            skipped(number, item)
            continue
        yield number, item
    if most is None:
        raise _Fault(f"it has more than {MOST_ROWS:,} rows; for an endless one write train.max_num_steps")


_END = object()


def _called(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise _Fault(f"{what}: {_traced(error)}") from None


def _traced(error: BaseException) -> str:
    """An error with the place in the user's file where it was raised."""
    frames = [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in traceback.extract_tb(error.__traceback__)]
    outer = [frame for frame in frames if not frame.startswith("own_")]
    at = f" ({' > '.join(outer[-3:])})" if outer else ""
    return f"{type(error).__name__}: {error}{at}"


def _line(item: Any, number: int, config: Config) -> bytes:
    """An item as a line of JSON. Raises `_Fault`."""
    if not isinstance(item, Mapping):
        raise _Fault(f"row {number} is {type(item).__name__}, not a dict of columns")
    row = {str(name): _plain(value) for name, value in item.items()}
    if wrong := next((name for name in _read_columns(config) if _has_bytes(row.get(name))), ""):
        raise _Fault(f"row {number}, `{wrong}`: bytes, not text; decode them")
    column, names = _named(config)
    if column and column not in row and "." not in column:
        row |= next(({column: row[name]} for name in names if name in row), {})
    try:
        return json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False).encode()
    except (DataError, ValueError) as error:
        raise _Fault(f"row {number}: {error}") from None


def _named(config: Config) -> tuple[str, tuple[str, ...]]:
    """The column that a row has to have, and other names of it in rows of verl's; empty: there is none such."""
    if config.is_grpo:
        return config.grpo.prompt_column, _PROMPTS
    return config.sft.conversation_column_name, ("messages",)


def _read_columns(config: Config) -> set[str]:
    """The columns whose text a model or a reward gets."""
    policy = config.train.train_policy
    named = {getattr(policy, name) for name in type(policy).model_fields if name.endswith("_column_name")}
    return {name for name in {*named, *_named(config)[1], _named(config)[0]} if name}


def _has_bytes(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_bytes, value.values()))
    return any(map(_has_bytes, value)) if isinstance(value, list) else isinstance(value, bytes | bytearray)


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists, wherever they are in a value, and null for what pandas has no value for."""
    if is_missing(value):
        return None
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else value


if __name__ == "__main__":
    ended_with = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended_with)  # a thread that the class has started does not hold it up
