"""The tables of ROLL and cosmos-rl: each part and text of them is used, and each function that converts a key."""

from __future__ import annotations

import inspect

from convert.cosmos import rules
from convert.cosmos import unsupported as cosmos_list
from convert.engine.registry import readers
from convert.roll import actor_infer, algorithm, converters, pipeline, reader, rewards, training, unsupported

HELPERS = {"named_devices"}
"""Functions of a key that other functions call."""


def test_nothing_of_a_table_is_idle() -> None:
    for system in readers():
        for kind in system.kinds:
            assert system.rules(kind)
    modules = (actor_infer, algorithm, converters, pipeline, reader, rewards, training)
    for keys, closed, owners in (
        (converters.KEYS, unsupported.LISTED, modules),
        (rules.KEYS, cosmos_list.LISTED, (rules,)),
    ):
        assert keys.parts.keys() - {"prose"} <= keys.used
        assert closed.parts.keys() | closed.constants.keys() <= closed.used
        for owner in owners:
            for name, function in inspect.getmembers(owner, inspect.isfunction):
                if list(inspect.signature(function).parameters) == ["context", "leaf"]:
                    assert {name, name.lstrip("_")} & (keys.used | HELPERS), f"{owner.__name__}.{name}"
