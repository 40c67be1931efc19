"""Describe the fault of a message in one line of bounded length: where, what, and the value that was refused."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

MOST_FAULTS = 5
"""Faults that are reported; thousands of them have one cause."""
_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = 80
_values.maxlevel = 2


def describe(errors: Sequence[Any]) -> str:
    """List what `ValidationError.errors` lists. However large the values are, none is rendered whole."""
    parts = []
    for error in islice(errors, MOST_FAULTS):
        where = ".".join(str(part)[:80] for part in error["loc"]) or "body"
        parts.append(f"{where}: {error['msg'][:200]} (got {_values.repr(error.get('input'))})")
    return "; ".join(parts)
