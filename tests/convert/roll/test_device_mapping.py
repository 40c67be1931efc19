"""Device mappings: what ROLL writes is read as data, and everything else is a clear error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.roll.device_mapping import DeviceMappingError, parse_device_mapping
from tests.support.effort import examples


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,16))", list(range(16))),
        ("list(range(0, 8))", list(range(8))),
        (" list ( range ( 2 , 4 ) ) ", [2, 3]),
        ("list(range(4))", [0, 1, 2, 3]),
        ("list(range(0,8,2))", [0, 2, 4, 6]),
        ("range(3, 5)", [3, 4]),
        ("[4]", [4]),
        ("[0, 1, 2, 3,]", [0, 1, 2, 3]),
        ("[7, 3]", [7, 3]),
        ("list(range(0,2))+list(range(6,8))", [0, 1, 6, 7]),
        ("[0] + [1] + list(range(2,4))", [0, 1, 2, 3]),
        ("([0] + [1])", [0, 1]),
        ("list([0, 1])", [0, 1]),
        ("[*range(0,2), 5]", [0, 1, 5]),
    ],
)
def test_texts(text: str, devices: list[int]) -> None:
    assert parse_device_mapping(text) == devices


def test_yaml_lists() -> None:
    assert parse_device_mapping([0, 1, 4]) == [0, 1, 4]
    assert parse_device_mapping(["0", "1"]) == [0, 1]
    assert parse_device_mapping(["list(range(0,2))", 5]) == [0, 1, 5]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("__import__('os').system('true')", "__import__"),
        ("list(range(0,8)).__class__", "'.'"),
        ("[i for i in range(8)]", "at '.i for"),
        ("list(range(0,10**9))", "'*'"),
        ("list(range(0,100000000))", "beyond|devices are 0 to"),
        ("list(range(0,99999999999999999999))", "99999999999999999999"),
        ("list(range(8,0,-1))", "step -1"),
        ("list(range(0,8,0))", "step 0"),
        ("list(range(-2,2))", "from -2"),
        ("list(range(8,4))", "no device"),
        ("[-1]", "device -1"),
        ("[0, 0]", "device 0 twice"),
        ("list(range(0,4)) + [3]", "device 3 twice"),
        ("[]", "no device"),
        ("", "invalid syntax"),
        ("list(range(0,8)", "never closed"),
        ("list(range(0,8)))", "unmatched"),
        ("list(range(0,8)) list(range(8,9))", "invalid syntax"),
        ("range()", r"at 'range\(\)'"),
        ("range(1,2,3,4)", r"at 'range\(1,2,3,4\)'"),
        ("[1 2]", "comma"),
        ("0x10", "at '0x'"),
        ("[1_0]", "at '1_'"),
        ("[1.5]", "'.'"),
        ("lambda: 0", "lambda"),
        ("(" * 500 + "[0]" + ")" * 500, "too many nested parentheses"),
        ("list(" * 500 + "[0]" + ")" * 500, "too many nested parentheses"),
        ("[0]" + " + [0]" * 1600, "too many sums"),
        ("[0]" + " + [0]" * 5000, "characters long"),
        (None, "None"),
        (8, "8"),
        (True, "True"),
        ([True], "True"),
        ([1.0], "1.0"),
        ([[0]], r"\[0\]"),
        ([20000], "beyond"),
        ({"a": 1}, "a table"),
    ],
)
def test_everything_else_is_a_clear_error(value: object, words: str) -> None:
    with pytest.raises(DeviceMappingError, match=words):
        parse_device_mapping(value)


def test_nothing_is_evaluated(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for text in (
        f"__import__('pathlib').Path('{trace}').touch()",
        f"open('{trace}', 'w')",
        f"list(open('{trace}', 'w').write('x') for _ in [0])",
        f"[*exec(\"open('{trace}','w')\")]",
    ):
        with pytest.raises(DeviceMappingError):
            parse_device_mapping(text)
    assert os.listdir(tmp_path) == []


@pytest.mark.scaled
@settings(max_examples=examples(15))
@given(st.text(alphabet="listrange()[],+*0123456789- _.", max_size=40) | st.text(max_size=40))
def test_any_text_is_devices_or_an_error(text: str) -> None:
    try:
        devices = parse_device_mapping(text)
    except DeviceMappingError:
        return
    assert devices
    assert len(set(devices)) == len(devices)


@pytest.mark.scaled
@settings(max_examples=examples(15))
@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 5))
def test_ranges_mean_what_python_means(start: int, length: int, step: int) -> None:
    expected = list(range(start, start + length, step))
    assert parse_device_mapping(f"list(range({start}, {start + length}, {step}))") == expected
