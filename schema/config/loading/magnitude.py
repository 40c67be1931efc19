"""Integers too large to compute with: Python takes them, and fails when a product of them is to be shown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from schema.config.loading.explain import Finding
from schema.config.problem import KeyPath, Problem, format_key

MOST_BITS = 63
"""What TOML promises to carry, and what engines, optimizers and stores can take."""
MOST_BITS_OF_OTHERS = 1023
"""In tables whose keys are somebody else's. As large as a floating-point number can be, and messages readable."""
_OTHERS = frozenset({"custom", "options", "extra", "engine_kwargs", "override_config"})


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
            most = MOST_BITS if _OTHERS.isdisjoint(path) else MOST_BITS_OF_OTHERS
            if value.bit_length() > most:
                message = f"an integer of {value.bit_length()} bits is too large for any purpose"
                yield (
                    path,
                    partial(Problem, format_key(path), message, None, f"write a number below 2^{most}"),
                )
