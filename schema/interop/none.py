"""The one closed list of what has no counterpart here: system -> key -> reason.

A key that ends in `.*` stands for everything below it, one with `=value` for that value of the key only; a part in
angle brackets stands for any name of its kind.
Whatever is not in this list maps to a key that acts, is always so here, or is reported as unknown.
"""

from __future__ import annotations

from schema.interop.cosmos_none import COSMOS_NONE
from schema.interop.roll_none import ROLL_NONE, general
from schema.interop.verl_none import VERL_NONE

NO_COUNTERPART: dict[str, dict[str, str]] = {
    "verl": VERL_NONE,
    "roll": ROLL_NONE,
    "cosmos-rl": COSMOS_NONE,
}


def reason_for(system: str, key: str) -> str | None:
    """Why a key has no counterpart; None where the list does not have it."""
    names = (key, *general(key)) if system == "roll" else (key,)
    found = (_listed(NO_COUNTERPART.get(system, {}), name) for name in names)
    return next((reason for reason in found if reason is not None), None)


def _listed(table: dict[str, str], key: str) -> str | None:
    if key in table:
        return table[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        wildcard = ".".join(parts[:end]) + ".*"
        if wildcard in table:
            return table[wildcard]
    return None
