"""ROLL's `device_mapping` read as data: `list(range(0, 8))`, `[0, 1, 3]`, and sums of such lists.

ROLL hands the text to Python's `eval`. Here a grammar of four rules reads it, so a configuration can only
ever name devices:

    sum    = term { "+" term }
    term   = "list" "(" sum ")" | "range" "(" int [ "," int [ "," int ] ] ")" | "[" items "]" | "(" sum ")"
    items  = [ item { "," item } [ "," ] ]
    item   = int | "*" term

Nothing is computed before it is known to be small: a range is measured, not listed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MAX_TEXT = 10_000  # the longest sensible mapping lists some hundred devices by hand
MAX_DEVICES = 16_384  # more than any cluster that runs one job
MAX_DEPTH = 20

_TOKEN = re.compile(r"\s*(?:(-?\d+)|([A-Za-z_]\w*)|(.))", re.DOTALL | re.ASCII)
_FORM = 'write it like "list(range(0,8))", [0, 1, 2] or the sum of such lists'


class DeviceMappingError(ValueError):
    """A device mapping that does not name devices; the message says what is wrong and how to write it."""


def parse_device_mapping(value: Any) -> list[int]:
    """The devices that a mapping names, in its order.

    value: text, or a list as YAML gives it (of numbers, or of texts that are mappings themselves).
    Raises DeviceMappingError for anything else, for negative or repeated devices and for too many of them.
    """
    if isinstance(value, str):
        devices = _Parser(value).parse()
    elif isinstance(value, Sequence):
        devices = [device for item in value for device in _listed(item)]
    else:
        raise DeviceMappingError(f"{_shown(value)} is not a list of devices: {_FORM}")
    return _checked(devices)


def _listed(item: Any) -> list[int]:
    if isinstance(item, int) and not isinstance(item, bool):
        return [item]
    if isinstance(item, str):
        text = item.strip()
        return [int(text)] if re.fullmatch(r"[0-9]{1,9}", text) else _Parser(item).parse()
    raise DeviceMappingError(f"{_shown(item)} is not the number of a device: {_FORM}")


def _checked(devices: list[int]) -> list[int]:
    if not devices:
        raise DeviceMappingError("names no device: leave the key out for a role without GPUs")
    if len(devices) > MAX_DEVICES:
        raise DeviceMappingError(f"names {len(devices)} devices, more than {MAX_DEVICES}")
    seen: set[int] = set()
    for device in devices:
        if device < 0:
            raise DeviceMappingError(f"names device {device}: devices are counted from 0")
        if device >= MAX_DEVICES:
            raise DeviceMappingError(f"names device {device}, beyond {MAX_DEVICES - 1}")
        if device in seen:
            raise DeviceMappingError(f"names device {device} twice")
        seen.add(device)
    return devices


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise DeviceMappingError(f"is {len(text)} characters long, more than {MAX_TEXT}")
        self._text = text
        self._tokens = [match.group(match.lastindex or 0) for match in _TOKEN.finditer(text.strip())]
        self._at = 0
        self._depth = 0

    def parse(self) -> list[int]:
        devices = self._sum()
        if self._at < len(self._tokens):
            raise self._unexpected()
        return devices

    def _sum(self) -> list[int]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise DeviceMappingError(f"is nested deeper than {MAX_DEPTH}: {_FORM}")
        devices = self._term()
        while self._takes("+"):
            devices = self._joined(devices, self._term())
        self._depth -= 1
        return devices

    def _term(self) -> list[int]:
        if self._takes("list"):
            self._expect("(")
            devices = self._sum()
            self._expect(")")
            return devices
        if self._takes("range"):
            return self._range()
        if self._takes("["):
            return self._items()
        if self._takes("("):
            devices = self._sum()
            self._expect(")")
            return devices
        raise self._unexpected()

    def _range(self) -> list[int]:
        self._expect("(")
        numbers = [self._int()]
        while len(numbers) < 3 and self._takes(","):
            numbers.append(self._int())
        self._expect(")")
        if len(numbers) == 3 and numbers[2] < 1:
            raise DeviceMappingError(f"has a range with step {numbers[2]}: a step is at least 1")
        devices = range(*numbers)
        start, stop = devices.start, devices.stop
        if start < 0 or stop > MAX_DEVICES:
            raise DeviceMappingError(
                f"has a range from {start} to {stop}: devices are 0 to {MAX_DEVICES - 1}"
            )
        return list(devices)

    def _items(self) -> list[int]:
        devices: list[int] = []
        while not self._takes("]"):
            devices = self._joined(devices, self._term() if self._takes("*") else [self._int()])
            if not self._takes(","):
                self._expect("]")
                break
        return devices

    def _joined(self, devices: list[int], more: list[int]) -> list[int]:
        if len(devices) + len(more) > MAX_DEVICES:
            raise DeviceMappingError(f"names more than {MAX_DEVICES} devices")
        return devices + more

    def _int(self) -> int:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not re.fullmatch(r"-?[0-9]{1,9}", token):
            raise self._unexpected()
        self._at += 1
        return int(token)

    def _takes(self, token: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at] == token:
            self._at += 1
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._takes(token):
            raise self._unexpected()

    def _unexpected(self) -> DeviceMappingError:
        found = repr(self._tokens[self._at]) if self._at < len(self._tokens) else "its end"
        return DeviceMappingError(f"{_shown(self._text)} is not a list of devices at {found[:40]}: {_FORM}")
