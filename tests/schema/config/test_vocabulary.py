"""Two tokenizers that number tokens alike, or not, by their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schema.config.vocabulary import difference, vocabulary_of


def written(directory: Path, vocabulary: Any, added: list[tuple[str, int]]) -> str:
    directory.mkdir()
    tokens = [{"content": token, "id": number} for token, number in added]
    text = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens})
    (directory / "tokenizer.json").write_text(text)
    return str(directory)


def test_tables_and_lists_are_read(tmp_path: Path) -> None:
    table = written(tmp_path / "bpe", {"a": 0, "b": 1}, [("<end>", 2)])
    scores = written(tmp_path / "unigram", [["a", -1.0], ["b", -2.0]], [("<end>", 2)])
    expected = {"a": 0, "b": 1, "<end>": 2}
    assert vocabulary_of(table, None) == vocabulary_of(scores, None) == expected
    assert difference(expected, dict(expected)) == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": [3]}}'])
def test_what_cannot_be_read_is_left_to_who_loads_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert vocabulary_of(str(tmp_path), None) is None
    assert vocabulary_of(str(tmp_path / "absent"), None) is None
    assert vocabulary_of("owner/name-that-nobody-has", None) is None


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"a": 0, "c": 1}, "token 1 is 'b' here and 'c' there"),
        ({"a": 0}, "token 1 is 'b' here and no token there"),
        ({"a": 0, "b": 1, "c": 2}, "there are 2 tokens here and 3 there"),
    ],
)
def test_the_first_difference_is_named(theirs: dict[str, int], expected: str) -> None:
    assert difference({"a": 0, "b": 1}, theirs) == expected
    assert difference({"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2}, padded=True) == ""
