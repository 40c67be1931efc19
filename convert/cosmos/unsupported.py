"""The closed list of cosmos-rl's keys without a counterpart, its part of `convert.engine.unsupported`."""

from __future__ import annotations

from pathlib import Path

from convert.engine.keys import words
from convert.engine.table import Table
from convert.engine.unsupported import ClosedList

_TABLES = words("train policy rollout validation distillation critic reference reward reward_model")
"""The tables in which every key may decide what is trained."""

LISTED = Table(Path(__file__).with_name("unsupported.txt"))

COSMOS = ClosedList(LISTED.reasons("reasons"), LISTED.neutral("method"), tables=_TABLES)
