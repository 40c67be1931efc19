"""ROLL's `device_mapping` read as data: `list(range(0, 8))`, `[0, 1, 3]`, and sums of such lists.

ROLL hands the text to Python's `eval`. Here Python's parser reads it and nothing is evaluated: of the syntax tree
`list`, `range`, lists of numbers, `*` in a list and `+` between lists are taken, so a configuration can only ever
name devices. A range is measured before it is listed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from convert.engine.values import shown

MAX_TEXT = 10_000  # the longest sensible mapping lists some hundred devices by hand
MAX_DEVICES = 16_384  # more than any cluster that runs one job

_FOREIGN = re.compile(r"[^\w\s()\[\],+*-]|[0-9][A-Za-z_]", re.ASCII)
_FORM = 'write it like "list(range(0,8))", [0, 1, 2] or the sum of such lists'


class DeviceMappingError(ValueError):
    """A device mapping that does not name devices; the message says what is wrong and how to write it."""


def parse_device_mapping(value: Any) -> list[int]:
    """The devices that a mapping names, in its order.

    value: text, or a list as YAML gives it (of numbers, or of texts that are mappings themselves).
    Raises DeviceMappingError for anything else, for negative or repeated devices and for too many of them.
    """
    if isinstance(value, str):
        named = _in_text(value)
    elif isinstance(value, Sequence):
        named = (device for item in value for device in _listed(item))
    else:
        raise DeviceMappingError(f"{shown(value)} is not a list of devices: {_FORM}")
    devices: dict[int, None] = {}
    for device in islice(named, MAX_DEVICES + 1):
        if device < 0:
            raise DeviceMappingError(f"names device {device}: devices are counted from 0")
        if device >= MAX_DEVICES:
            raise DeviceMappingError(f"names device {device}, beyond {MAX_DEVICES - 1}")
        if device in devices:
            raise DeviceMappingError(f"names device {device} twice")
        devices[device] = None
    if not devices:
        raise DeviceMappingError("names no device: leave the key out for a role without GPUs")
    return list(devices)


def _listed(item: Any) -> Iterator[int]:
    if isinstance(item, str):
        return iter([int(item)]) if re.fullmatch(r"\s*[0-9]{1,9}\s*", item) else _in_text(item)
    if isinstance(item, int) and not isinstance(item, bool):
        return iter([item])
    raise DeviceMappingError(f"{shown(item)} is not the number of a device: {_FORM}")


def _in_text(text: str) -> Iterator[int]:
    if len(text) > MAX_TEXT:
        raise DeviceMappingError(f"is {len(text)} characters long, more than {MAX_TEXT}")
    if foreign := _FOREIGN.search(text):
        raise _unexpected(text, foreign[0])
    try:
        yield from _devices(ast.parse(text.strip(), mode="eval").body, text.strip())
    except SyntaxError as error:
        raise DeviceMappingError(f"{shown(text)} is not a list of devices ({error.msg}): {_FORM}") from None
    except (MemoryError, RecursionError):
        raise DeviceMappingError(f"has too many sums or parentheses: {_FORM}") from None


def _devices(node: ast.expr, text: str) -> Iterator[int]:
    match node:
        case ast.BinOp(left, ast.Add(), right):
            yield from _devices(left, text)
            yield from _devices(right, text)
        case ast.Call(ast.Name("list"), [inner], []):
            yield from _devices(inner, text)
        case ast.Call(ast.Name("range"), [_, *_] as bounds, []) if len(bounds) <= 3:
            yield from _range(*(_number(bound, text) for bound in bounds))
        case ast.List(items):
            for item in items:
                inside = _devices(item.value, text) if isinstance(item, ast.Starred) else [_number(item, text)]
                yield from inside
        case _:
            raise _unexpected(text, ast.get_source_segment(text, node))


def _range(*bounds: int) -> range:
    if len(bounds) == 3 and bounds[2] < 1:
        raise DeviceMappingError(f"has a range with step {bounds[2]}: a step is at least 1")
    devices = range(*bounds)
    if devices.start < 0 or devices.stop > MAX_DEVICES:
        limits = f"from {devices.start} to {devices.stop}: devices are 0 to {MAX_DEVICES - 1}"
        raise DeviceMappingError(f"has a range {limits}")
    return devices


def _number(node: ast.expr, text: str) -> int:
    written = ast.get_source_segment(text, node) or ""
    if not re.fullmatch(r"-?[0-9]{1,9}", written):
        raise _unexpected(text, written)
    return int(written)


def _unexpected(text: str, part: str | None) -> DeviceMappingError:
    return DeviceMappingError(f"{shown(text)} is not a list of devices at {shown(part)}: {_FORM}")
