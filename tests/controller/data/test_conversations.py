"""What prompt and conversation columns may hold."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from controller.data.conversations import read_messages, read_prompt, with_query
from controller.data.errors import DataError

TALK = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    "value",
    [
        TALK,
        json.dumps(TALK),
        [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"}],
        [{"role": "user", "content": [{"type": "text", "text": "Two?"}]}, TALK[1]],
        [{**turn, "tool_calls": None} for turn in TALK],
        [{"from": "human", "value": "Two?", "role": None}, {**TALK[1], "from": None}],
    ],
    ids=["messages", "JSON text", "from and value", "text parts", "nulls of parquet", "two conventions"],
)
def test_every_convention_reads_as_messages(value: Any):
    assert read_messages(value, "here") == TALK


def test_other_keys_of_a_turn_reach_the_template():
    turn = {"role": "tool", "content": "4", "name": "calculator"}
    assert read_messages([turn], "here") == [turn]


@pytest.mark.parametrize(
    "text",
    ["Two?", "[x] or [y]?", "[1, 2] has how many?", "[1, 2]", "", "[" + "9" * 6000, "[" * 10_000],
    ids=lambda text: text[:9],
)
def test_a_prompt_of_text_stays_text(text: str):
    assert read_prompt(text, "here") == text


def test_a_prompt_may_be_messages():
    assert read_prompt(TALK[:1], "here") == TALK[:1]
    assert read_prompt(json.dumps(TALK[:1]), "here") == TALK[:1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "here: expected a list of messages or its JSON text, not int"),
        ("text", "not NoneType"),
        (["text"], "here, turn 0: expected a message with role and content, not str"),
        ([{"role": "wizard", "content": ""}], "here, turn 0: role 'wizard' is unknown"),
        ([{"text": "x"}], "role None is unknown (keys text)"),
        ([{"role": "user", "content": 3}], "content must be text, not int"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of type image is not supported"),
        ([{"role": "user", "value": "x"}], "here, turn 0: the turn has no `content`; it has role, value"),
        ([{"role": "assistant", "content": None}], "here, turn 0: the turn has no `content`"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "a part of the content has no text"),
        ([{"role": "user", "content": math.nan}], "the turn has no `content`"),
        ([{"role": "user", "content": b"Two?"}], "here: a turn holds bytes, not text"),
        ([{"role": "user", "content": [{"type": "text", "text": b"Two?"}]}], "here: a turn holds bytes, not text"),
    ],
)
def test_anything_else_is_named(value: Any, message: str):
    with pytest.raises(DataError, match=re.escape(message)):
        read_messages(value, "here")


def test_the_json_text_of_a_prompt_keeps_its_nulls():
    turns = [{"role": "user", "content": "go"}, {"role": "tool", "content": "", "arguments": {"x": None, "y": 1}}]
    assert read_prompt(json.dumps(turns), "here") == turns
    assert read_prompt(turns, "here")[1]["arguments"] == {"y": 1}


def test_a_second_text_follows_a_text_alone():
    assert with_query("2 + 2?", "Be brief.", "here") == "2 + 2?\nBe brief."
    assert with_query("[1, 2]?", "", "here") == "[1, 2]?"
    with pytest.raises(DataError, match="here it is the JSON of messages"):
        with_query(json.dumps(TALK[:1]), "Be brief.", "here")


def test_a_prompt_cannot_end_with_the_answer():
    with pytest.raises(DataError, match="ends with an assistant turn"):
        read_prompt(TALK, "here")
