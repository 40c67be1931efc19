"""`${…}`: references, relative ones, the environment, defaults, cycles; never an evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from convert.engine.interpolation import resolve
from schema.config import ConfigError
from schema.config.loading.yamlread import read_yaml
from tests.schema.config_samples import refused


def resolved(text: str, env: dict[str, str] | None = None, defaults: dict[str, Any] | None = None) -> Any:
    """The data of a YAML text with its references resolved."""
    data, lines, _ = read_yaml(text, "f.yaml")
    return resolve(data, lines, "f.yaml", env or {}, defaults or {})


def problems(text: str, env: dict[str, str] | None = None) -> list[tuple[int | None, str]]:
    """Line and message of each problem."""
    return [(problem.line, problem.message) for problem in refused(resolved, text, env)]


def test_a_reference_alone_keeps_its_type() -> None:
    data = resolved("a: {b: 8, c: [1, 2]}\nx: ${a.b}\ny: ${a.c}\nz: ${a}\ni: ${a.c[1]}")
    assert data["x"] == 8
    assert data["y"] == [1, 2]
    assert data["z"] == {"b": 8, "c": [1, 2]}
    assert data["i"] == 2


def test_references_inside_text_and_chains() -> None:
    data = resolved("a: run\nb: ${a}-${c}\nc: 7\nd: x/${b}/${a}\ne: [p, '${d}']\nf: ${n}\nn: true")
    assert data["b"] == "run-7"
    assert data["d"] == "x/run-7/run"
    assert data["e"] == ["p", "x/run-7/run"]
    assert data["f"] is True


def test_relative_references() -> None:
    data = resolved("top: 0\na:\n  x: 1\n  b:\n    y: ${.z}\n    z: 2\n    w: ${..x}\n    t: ${...top}")
    assert data["a"]["b"] == {"y": 2, "z": 2, "w": 1, "t": 0}


def test_the_environment() -> None:
    text = "a: ${oc.env:HOUSE}\nb: ${oc.env:NONE,fall}\nc: ${oc.env:NONE,'q'}/x\nd: ${oc.env:NONE,null}"
    assert resolved(text, {"HOUSE": "5"}) == {"a": "5", "b": "fall", "c": "q/x", "d": None}
    assert problems(text) == [(1, "the environment has no HOUSE: set it, or write ${oc.env:HOUSE,default}")]


def test_select() -> None:
    text = "a: ${oc.select:b.c,3}\nd: ${oc.select:e}\nf: ${oc.select:g,7}\ng: 1\n"
    text += "h: ${oc.select:z,${oc.select:y,null}}"
    assert resolved(text) == {"a": 3, "d": None, "f": 1, "g": 1, "h": None}
    text = "a: ${oc.select:z,{}}\nb: ${oc.select:z,[]}\nc: ${oc.select:z,${oc.select:y,{}}}\n"
    text += "d: {e: '${oc.select:.f,${g}}'}"
    assert resolved(text + "\ng: {h: 1}") == {"a": {}, "b": [], "c": {}, "d": {"e": {"h": 1}}, "g": {"h": 1}}


RESOLVED: list[tuple[str, Any, str]] = [
    ("${now:%Y%m%d_%H%M%S}", "now", "the time of a start"),
    ("out/${now:%Y-%m-%d}/${now:%H-%M}", "out/now/now", "the time of a start"),
    ("${hydra:runtime.cwd}/data", "./data", "the current directory"),
    ("${hydra:job.name}", "mine", ""),
    ("${oc.decode:${oc.env:CPUS,null}}", None, "has no CPUS: the default in the file"),
    ("${oc.env:HOUSE}", "5", "the value of HOUSE"),
    ("${oc.decode:${oc.env:HOUSE}}", 5, "the value of HOUSE"),
    ("${oc.decode:[1, x]}", [1, "x"], ""),
    ("${oc.create:{p: 1}}", {"p": 1}, ""),
    ("${oc.deprecated:table.b}", 2, ""),
    ("${oc.dict.keys:table}", ["a", "b"], ""),
    ("${oc.dict.values:table}", [1, 2], ""),
]


@pytest.mark.parametrize(("text", "value", "said"), RESOLVED, ids=[text for text, _, _ in RESOLVED])
def test_what_has_a_value_is_resolved_and_what_varies_is_said(text: str, value: Any, said: str) -> None:
    data, lines, _ = read_yaml(f"x: '{text}'\ntable: {{a: 1, b: 2}}\nhydra: {{job: {{name: mine}}}}", "f.yaml")
    warnings: list[str] = []
    assert resolve(data, lines, "f.yaml", {"HOUSE": "5"}, {}, "", warnings.append)["x"] == value
    assert all(said and said in warning and "`x`" in warning for warning in warnings)
    assert bool(warnings) == bool(said)


def test_hydras_own_table_stays_as_it_is() -> None:
    assert resolved("hydra: {run: {dir: '${hydra:job.name}'}}")["hydra"] == {"run": {"dir": "${hydra:job.name}"}}


def test_a_key_that_the_file_leaves_out_has_the_other_systems_default() -> None:
    assert resolved("a: ${x.y}", defaults={"x.y": 4}) == {"a": 4}


def test_what_is_missing_is_named_with_its_line() -> None:
    found = problems("a: 1\nb:\n  c: ${a.x}\n  d: ${nowhere}\n")
    assert [line for line, _ in found] == [3, 4]
    assert "${nowhere} names a key that is not in the file" in found[1][1]


def test_cycles_are_named() -> None:
    found = problems("a: ${b}\nb: ${c}\nc: ${a}\nd: ${d}\n")
    assert any("refers to itself: a -> b -> c -> a" in message for _, message in found)
    assert any("refers to itself: d -> d" in message for _, message in found)


def test_a_table_that_holds_its_own_reference_is_a_cycle() -> None:
    assert any("refers to itself" in message for _, message in problems("a: {b: '${a}'}"))


@pytest.mark.parametrize(
    "text",
    [
        "a: ${eval:1+1}",
        "a: ${python:__import__('os')}",
        "a: ${a b}",
        "a: ${",
        "a: ${}",
        "a: ${.}",
        "a: ${....x}",
        "a: ${b.${c}",
        "a: x${b}\nb: [1]",
        "a: ${hydra:job.name}",
        "a: ${hydra:runtime.output_dir}\nhydra: {job: {name: x}}",
        "a: '${oc.decode:[1, }'",
        "a: ${oc.dict.keys:b}\nb: 1",
        "a: ${oc.deprecated:b}",
    ],
)
def test_nothing_is_evaluated_and_nothing_guessed(text: str) -> None:
    assert problems(text)


def test_nested_names() -> None:
    assert resolved("a: ${m.${k}}\nk: x\nm: {x: 5}") == {"a": 5, "k": "x", "m": {"x": 5}}


def test_long_chains_and_growth_end_cleanly() -> None:
    chain = "\n".join(f"k{i}: ${{k{i + 1}}}" for i in range(500)) + "\nk500: 1"
    with pytest.raises(ConfigError):
        resolved(chain)
    doubling = "k0: {x: 1}\n" + "\n".join(f"k{i}: {{a: '${{k{i - 1}}}', b: '${{k{i - 1}}}'}}" for i in range(1, 24))
    with pytest.raises(ConfigError):
        resolved(doubling)
    words = "k0: '0123456789'\n" + "\n".join(f"k{i}: '${{k{i - 1}}}${{k{i - 1}}}'" for i in range(1, 24))
    with pytest.raises(ConfigError):
        resolved(words)
