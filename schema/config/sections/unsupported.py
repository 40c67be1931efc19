"""`[unsupported]`: what the source of a converted file asks for and nothing here does. Always refused.

    [unsupported]
    "algorithm.adv_estimator" = "optimal_token_baseline"

`cosmos-launch convert` writes there each key that decides what is trained and has no counterpart, and each one that
is not understood in a table where any key may decide that. The table is not part of the config tree: a configuration
that holds it trains by another method than its source, so nobody may run it without having removed each line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import KeyPath, Problem, format_key

TABLE = "unsupported"
DESCRIPTION = (
    "Written by `cosmos-launch convert`: keys of the source that decide what is trained, or may do so and are not "
    "understood, and have no counterpart. A configuration with this table is refused; remove a line to train without "
    "what it asks for."
)


def refusals(data: Mapping[str, Any]) -> list[tuple[KeyPath, Callable[[], Problem]]]:
    """One problem for each entry of the table, with its path; an empty table is one, too."""
    if TABLE not in data:
        return []
    return [(path, partial(_refusal, path, value)) for path, value in _entries(data[TABLE], (TABLE,))]


def _entries(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _entries(inner, (*path, key))
    else:
        yield path, value


def _refusal(path: KeyPath, value: Any) -> Problem:
    if len(path) == 1:
        message = "a converted file is refused while this table is there"
        return Problem(TABLE, message, value, f"remove [{TABLE}], or convert the source again")
    source = ".".join(str(part) for part in path[1:])
    message = (
        f"`{source}` = {_shown(value)} of the source decides what is trained, or may do so and is not understood, "
        "and has no counterpart here: without it this job trains by another method"
    )
    hint = "remove the line to train without it, knowingly; the comment there says why, and what may replace it"
    return Problem(format_key(path), message, value, hint)


def _shown(value: Any) -> str:
    try:
        text = toml_value(value)
    except TypeError:  # a date
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
