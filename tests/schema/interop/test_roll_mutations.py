"""Mutated files of ROLL and cosmos-rl: always a conversion that accounts for every key, or a clean error."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schema.config import ConfigError, Problem, check_config
from schema.config.loading.tomlwrite import dumps
from schema.interop import convert_text
from schema.interop.engine.keys import leaves
from schema.interop.engine.write import to_json, to_report, to_toml
from schema.interop.engine.yamlfile import read_yaml
from tests.schema.interop.roll_files import COSMOS, ROLL, yaml_text

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "null",
            "grpo",
            "gae",
            "list(range(0,8))",
            "[0]",
            "__import__('os')",
            "${seed}",
            "0.5",
            "-1",
            "\x00",
        ]
    ),
    st.lists(st.integers(-3, 99), max_size=4),
    st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=4), max_size=3),
)
_SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _trees(paths: list[Any], read: Any) -> list[dict[str, Any]]:
    return [read(path.read_text(encoding="utf-8")) for path in paths]


_ROLL = _trees(ROLL, lambda text: read_yaml(text, "x.yaml")[0])
_COSMOS = _trees(COSMOS, tomllib.loads)


def _mutate(draw: st.DrawFn, tree: dict[str, Any], values: st.SearchStrategy[Any]) -> dict[str, Any]:
    tree = deepcopy(tree)
    for _ in range(draw(st.integers(1, 6))):
        paths = [path for path, _ in leaves(tree)]
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        depth = draw(st.integers(1, len(path)))
        table = tree
        for part in path[: depth - 1]:
            table = table[part]
        name = path[depth - 1]
        action = draw(st.sampled_from(["drop", "retype", "rename", "nest", "add"]))
        if action == "drop":
            del table[name]
        elif action == "retype":
            table[name] = draw(values)
        elif action == "rename":
            table[draw(st.text(min_size=1, max_size=8))] = table.pop(name)
        elif action == "nest":
            table[name] = {name: table[name]}
        else:
            table[draw(st.text(min_size=1, max_size=8))] = draw(values)
    return tree


def _holds(text: str, name: str) -> None:
    """A conversion with every leaf in its report and its TOML equal to its configuration, or a clean error."""
    found, problems = _attempt(convert_text, text, name)
    if found is None:
        assert problems
        assert all(problem.render() for problem in problems)
        return
    assert not found.missing_leaves
    assert not found.repeated_leaves
    assert tomllib.loads(to_toml(found)) == found.config
    assert len(to_report(found).splitlines()) >= len(found.leaves)
    assert len(to_json(found)["entries"]) == len(found.leaves)
    config, problems = _attempt(check_config, found.config)
    assert (config is None) == bool(problems)


def _attempt(function: Any, *arguments: Any) -> tuple[Any, Sequence[Problem]]:
    try:
        return function(*arguments), ()
    except ConfigError as error:
        return None, error.problems


@_SETTINGS
@given(data=st.data())
def test_mutated_roll_files(data: st.DataObject) -> None:
    tree = data.draw(st.sampled_from(_ROLL))
    _holds(yaml_text(data.draw(st.composite(lambda draw: _mutate(draw, tree, _VALUES))())), "x.yaml")


def _in_toml(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_in_toml(item) for item in value.values())
    if isinstance(value, list):
        return all(_in_toml(item) for item in value)
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


@_SETTINGS
@given(data=st.data())
def test_mutated_cosmos_files(data: st.DataObject) -> None:
    tree = data.draw(st.sampled_from(_COSMOS))
    values = _VALUES.filter(_in_toml)
    _holds(dumps(data.draw(st.composite(lambda draw: _mutate(draw, tree, values))())), "x.toml")
