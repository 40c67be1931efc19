"""YAML as OmegaConf reads it: plain values, lines, duplicates, bounds, and errors that name their line."""

from __future__ import annotations

import math

import pytest

from schema.config import Problem
from schema.config.loading.yamlread import MAX_FILE_BYTES, read_yaml, scalar
from tests.schema.config_samples import refused


def fault(text: str) -> Problem:
    """The one problem of a text."""
    (problem,) = refused(read_yaml, text, "f.yaml")
    assert problem.file == "f.yaml"
    return problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("0.", 0.0),
        (".5", 0.5),
        ("-1", -1),
        ("+3", 3),
        ("10_000", 10000),
        ("0x10", 16),
        ("1.5e+3", 1500.0),
        ("null", None),
        ("~", None),
        ("", None),
        ("True", True),
        ("off", False),
        (".inf", math.inf),
        ("fp32", "fp32"),
        ("1.2.3", "1.2.3"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("e5", "e5"),
        (".", "."),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = scalar(text)
    assert read == value
    assert type(read) is type(value)


def test_quoted_text_stays_text() -> None:
    data, _, _ = read_yaml("a: '1e-6'\nb: \"true\"\nc: |\n  1\n", "f.yaml")
    assert data == {"a": "1e-6", "b": "true", "c": "1\n"}


def test_every_key_has_its_line() -> None:
    data, lines, _ = read_yaml("# head\na:\n  b: 1\n\n  c: [1, {d: 2}]\nn: 3\n", "f.yaml")
    assert data == {"a": {"b": 1, "c": [1, {"d": 2}]}, "n": 3}
    assert lines[("a",)] == 2
    assert lines[("a", "b")] == 3
    assert lines[("a", "c")] == 5
    assert lines[("n",)] == 6


def test_a_key_is_text_whatever_it_looks_like() -> None:
    assert read_yaml("n: 1\non: 2\n3: 4\nnull: 5", "f.yaml")[0] == {"n": 1, "on": 2, "3": 4, "null": 5}


def test_a_key_that_stands_twice_is_refused_with_its_line() -> None:
    problem = fault("a: 1\nb: 2\na: 3\n")
    assert "`a` is repeated here" in problem.message
    assert problem.line == 3


def test_aliases_and_merges() -> None:
    text = "base: &b {x: 1, y: 2}\nuse: {<<: *b, y: 3}\nsame: *b\nmany: {<<: [*b, {z: 4}]}"
    data, lines, shared = read_yaml(text, "f.yaml")
    assert shared == {"base"}
    assert data["use"] == {"y": 3, "x": 1}
    assert data["same"] == {"x": 1, "y": 2}
    assert data["many"] == {"x": 1, "y": 2, "z": 4}
    assert lines[("use", "y")] == 2


def test_a_billion_laughs_are_counted_not_built() -> None:
    rules = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rules += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "after aliases are expanded" in fault("\n".join(rules)).message


def test_an_alias_of_itself_is_refused() -> None:
    assert fault("a: &a {b: *a}").message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [" * 200 + "]" * 200, "nested"),
        ("[" * 100_000, "nested"),
        ("{a: " * 3000, ""),
        ("a: !!python/object:os.system {}", ""),
        ("a: !thing 3", "makes objects"),
        ("- a\n- b", "keys and values"),
        ("just text", "keys and values"),
        ("", "nothing"),
        ("a: 1\n---\nb: 2", "2 documents"),
        ("? [a, b]\n: 1", "plain text"),
        ("a: 1\n\tb: 2", ""),
        ("x" * (MAX_FILE_BYTES + 1), "larger than"),
        ("a: \x00", "not YAML"),
        ("<<: 3", "merge"),
    ],
)
def test_what_is_no_configuration_is_named(text: str, words: str) -> None:
    assert words in fault(text).message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:\n  a: 1\n  • data.a: the a, and\n    more", "documentation page"),
        ("```yaml\ndata: {a: 1}\n```", "markup"),
        ("a:\n\tb: 1", "not with tabs"),
        ("[train]\nx = 1\n", "TOML"),
        ("Guide\n" + "Some text of it.\n" * 9 + "a: b: c\n", "most of its lines are text"),
        ("Guide to it\nRefer to that page: here\na: 1\n", "is text"),
        ("a: 1\n  b: 2\n", "check the indentation"),
        ("a: 1\n---\nb: 2", "`---` begins another"),
        ("a: 1\na: 2", "keep one"),
        ("", "the right file"),
        (".. code:: yaml\n\n   data: 1", "markup"),
    ],
)
def test_a_copied_page_gets_a_hint(text: str, words: str) -> None:
    assert words in fault(text).hint


def test_thousands_of_digits_are_no_number() -> None:
    assert isinstance(read_yaml(f"a: {'9' * 10_000}", "f.yaml")[0]["a"], str)
