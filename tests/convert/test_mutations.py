"""Mutated files never give a traceback, and every leaf of the input stays in the report."""

from __future__ import annotations

import math
import tomllib
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert import convert_text
from convert.engine.keys import Path as KeyParts
from convert.engine.keys import leaves, lookup
from convert.engine.model import Conversion
from convert.engine.write import to_json, to_report, to_toml
from schema.config import ConfigError, check_config
from schema.config.loading.tomlwrite import dumps
from tests.support.effort import examples

HERE = Path(__file__).parent / "examples"
EXAMPLES = {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in sorted(HERE.glob("*.yaml"))}
EXAMPLES |= {file.stem: tomllib.loads(file.read_text("utf-8")) for file in sorted(HERE.glob("*.toml"))}
SYSTEMS = ("verl", "roll", "cosmos")

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 10**9, 0.0, -0.5, 1e-6, 1e308, float("nan"), float("inf")]),
    st.text(max_size=12),
    st.sampled_from(
        [
            *("${a.b}", "${.x}", "${oc.env:X,1}", "~/x", "~nobody/x", "auto", "1e-6", "null", "a:b", "???"),
            *("grpo", "gae", "list(range(0,8))", "[0]", "__import__('os')", "\x00", ""),
        ]
    ),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def _put(data: dict[str, Any], path: KeyParts, value: Any) -> None:
    table = lookup(data, path[:-1], {}) if path[:-1] else data
    if isinstance(table, dict):
        table[path[-1]] = value


def _drop(data: dict[str, Any], path: KeyParts) -> None:
    table = lookup(data, path[:-1], {}) if path[:-1] else data
    if isinstance(table, dict):
        table.pop(path[-1], None)


@st.composite
def files(draw: st.DrawFn, system: str) -> dict[str, Any]:
    """An example of a system with keys dropped, values replaced, keys renamed and tables put where values stood."""
    data = deepcopy(EXAMPLES[draw(st.sampled_from([name for name in EXAMPLES if name.startswith(system)]))])
    paths = [path for path, _ in leaves(data)]
    if draw(st.booleans()):
        for path in draw(st.lists(st.sampled_from(paths), max_size=len(paths), unique=True)):
            _drop(data, path)
    for _ in range(draw(st.integers(0, 5))):
        path = draw(st.sampled_from(paths))
        path = path[: draw(st.integers(1, len(path)))]
        kind = draw(st.sampled_from(["value", "drop", "rename", "nest"]))
        if kind == "drop":
            _drop(data, path)
        elif kind == "rename":
            _put(data, (*path[:-1], draw(st.text(min_size=1, max_size=10))), draw(_SCALARS))
        else:
            value = draw(_VALUES)
            _put(data, path, {draw(st.text(max_size=5)): value} if kind == "nest" else value)
    return data


def verdict(text: str, name: str) -> Conversion | ConfigError:
    """What becomes of a text: a conversion, or an error for people. Anything else is a defect."""
    try:
        return convert_text(text, name, env={})
    except ConfigError as error:
        return error


def check(text: str, name: str) -> None:
    """Everything that holds for any input."""
    found = verdict(text, name)
    if isinstance(found, ConfigError):
        assert all(problem.message and problem.render() for problem in found.problems)
        return
    assert not found.missing_leaves
    assert not found.repeated_leaves
    assert tomllib.loads(to_toml(found)) == found.config
    assert to_report(found)
    assert {entry["key"] for entry in to_json(found)["entries"]} == set(found.leaves)
    with suppress(ConfigError):
        check_config(found.config)


def _in_toml(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_in_toml, value.values()))
    if isinstance(value, list):
        return all(map(_in_toml, value))
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


@pytest.mark.scaled
@pytest.mark.parametrize("system", SYSTEMS)
@settings(
    max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(data=st.data())
def test_mutated_files_end_in_a_clean_verdict(system: str, data: st.DataObject) -> None:
    tree = data.draw(files(system))
    if system == "cosmos" and _in_toml(tree):
        check(dumps(tree), "mutated.toml")
    else:
        check(yaml.safe_dump(tree, allow_unicode=True), "mutated.yaml")


@pytest.mark.scaled
@given(text=st.text(max_size=200))
@settings(max_examples=examples(15), deadline=None)
def test_any_text_ends_in_a_clean_verdict(text: str) -> None:
    check(text, "any")
