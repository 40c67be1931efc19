"""Integers too large to compute with: Python takes them, and fails when a product of them is to be shown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from schema.config.problem import KeyPath, Problem, format_key
from schema.config.reading.explain import Finding

MOST_BITS = 1023
"""As large as a floating-point number can be: comparisons and shares stay possible, and messages readable."""


def too_large(data: Any) -> Iterator[Finding]:
    """Every integer of a configuration that is larger, with its path; the value itself is not shown."""
    waiting: list[tuple[KeyPath, Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, key), item) for key, item in value.items() if isinstance(key, str)]
        elif isinstance(value, list):
            waiting += [((*path, index), item) for index, item in enumerate(value)]
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            message = f"an integer of {value.bit_length()} bits is too large for any purpose"
            yield (
                path,
                partial(Problem, format_key(path), message, None, f"write a number below 2^{MOST_BITS}"),
            )
