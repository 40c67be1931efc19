"""A prompt or conversation column is read into one form: a list of {"role", "content"} messages.

Accepted are a string (one user message), a list of messages in the `role`/`content` or the `from`/`value`
convention, or the JSON text of such a list. Everything else is an error that says which row it is in.

Fields that are null are left out at every depth, since Parquet cannot tell them from fields that a row does not have:
so the same rows are the same prompts in every format. A JSON text says what it says: below the first level of a turn
its nulls stay.
"""

from __future__ import annotations

import json
from typing import Any

from controller.data.errors import DataError
from controller.data.values import is_missing, json_list, jsonable, without_nulls

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


LOSS_FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "train_detail")
"""Keys of a turn by which published data says whether the turn is learnt: 0 and false say that it is not.

`train_detail` says it of parts of a turn, which is refused.
"""


def read_prompt(value: Any, where: str) -> str | list[Message]:
    """A prompt: text, or messages that end before the assistant's turn."""
    if isinstance(value, str) and json_list(value, dict) is None:
        return value
    messages = read_messages(value, where)
    if messages and messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the prompt ends with an assistant turn; it must end where the model begins")
    return messages


def read_messages(value: Any, where: str) -> list[Message]:
    """A conversation. Raises `DataError` naming `where` and the turn at fault."""
    if isinstance(value, str):
        value = json_list(value, dict)
    elif isinstance(value, (list, tuple)):
        value = without_nulls(jsonable(_as_text(value, where)))
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{where}: expected a list of messages or its JSON text, not {type(value).__name__}")
    return [_message(turn, f"{where}, turn {i}") for i, turn in enumerate(value)]


def without_flags(messages: list[Message], where: str) -> tuple[list[Message], frozenset[int]]:
    """A conversation without its `LOSS_FLAGS`, and the assistant's turns that one of them says not to learn.

    Raises `DataError` where the assistant has one that is neither false, 0, true nor 1.
    """
    unlearnt: set[int] = set()
    for i, turn in enumerate(messages):
        for name in turn.keys() & LOSS_FLAGS if turn["role"] == "assistant" else ():
            if not isinstance(turn[name], (bool, int, float)) or turn[name] not in (0, 1):
                raise DataError(
                    f"{where}, turn {i}: `{name}` = {turn[name]!r:.50} says how far the turn is learnt, and can only "
                    "be false, 0, true or 1; write one of these, or rename the key if it means something else"
                )
            if not turn[name]:
                unlearnt.add(i)
    plain = [{name: inner for name, inner in turn.items() if name not in LOSS_FLAGS} for turn in messages]
    return plain, frozenset(unlearnt)


def with_query(question: Any, query: Any, where: str) -> Any:
    """The question with a second text on a line of its own, where that is not empty. Raises `DataError`."""
    if is_missing(query) or query == "":
        return question
    if not isinstance(question, str) or not isinstance(query, str):
        raise DataError(
            f"{where}: a second text can follow a question that is a text; here the question is "
            f"{type(question).__name__} and the other {type(query).__name__}"
        )
    if json_list(question, dict) is not None:
        raise DataError(
            f"{where}: a second text can follow a question that is a text; here it is the JSON of messages"
        )
    return f"{question}\n{query}"


def pair_of(question: str | list[Message], response: Any, where: str) -> list[Message]:
    """A prompt and the answer to learn as one conversation. Raises `DataError`."""
    if not isinstance(response, str):
        raise DataError(f"{where}: the response must be text, not {type(response).__name__}")
    return [*as_messages(question), {"role": "assistant", "content": response}]


def has_system(messages: list[Message]) -> bool:
    """Whether a conversation has a system message, by either of its names."""
    return any(turn["role"] in ("system", "developer") for turn in messages)


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """A prompt as messages: a text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def read_tools(value: Any, where: str, column: str) -> list[Any] | None:
    """The tools that a column defines: a list of objects, each or all as JSON text; None: there are none.

    Raises `DataError` naming `where` and column.
    """
    if is_missing(value) or (isinstance(value, str) and not value.strip()):
        return None
    tools = _tool(value, where) if isinstance(value, str) else without_nulls(value)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(f"{where}: `{column}` must be a list of definitions, not {type(tools).__name__}; {_RENAME}")
    tools = [_tool(tool, where) if isinstance(tool, str) else jsonable(tool) for tool in tools]
    if wrong := [tool for tool in tools if not isinstance(tool, dict)]:
        raise DataError(f"{where}: `{column}` holds {wrong[0]!r:.50}, which is not a definition; {_RENAME}")
    return tools


_RENAME = "the chat template gets this column: rename it if it means something else"


def _tool(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: `tools` is not valid JSON: {error}; {_RENAME}") from None


def _as_text(value: Any, where: str) -> Any:
    """The value with null for NaN, which pandas writes where nothing is. Raises `DataError` for bytes: no text."""
    if isinstance(value, dict):
        return {name: _as_text(inner, where) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_text(item, where) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise DataError(f"{where}: a turn holds bytes, not text; decode them, or leave the field out")
    return None if is_missing(value) else value


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: expected a message with role and content, not {type(turn).__name__}")
    turn = {name: inner for name, inner in turn.items() if inner is not None}
    role_key, text_key = ("role", "content") if "role" in turn else ("from", "value")
    role = ROLES.get(str(turn.get(role_key)))
    if role is None:
        raise DataError(
            f"{where}: role {turn.get(role_key)!r} is unknown (keys {', '.join(map(str, turn))}); "
            f"known are {', '.join(ROLES)}"
        )
    extras = {name: inner for name, inner in turn.items() if name not in (role_key, text_key, "content")}
    if text_key not in turn and (role in ("system", "user") or not extras):
        raise DataError(f"{where}: the turn has no `{text_key}`; it has {', '.join(turn)}")
    return {"role": role, "content": _text(turn.get(text_key), where), **extras}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type") for part in content}
        if kinds <= {"text"}:
            return "".join(_part(part, where) for part in content)
        others = ", ".join(sorted(map(str, kinds - {"text"})))
        raise DataError(f"{where}: content of type {others} is not supported, only text; leave such rows out")
    raise DataError(f"{where}: content must be text, not {type(content).__name__}")


def _part(part: dict[str, Any], where: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise DataError(f"{where}: a part of the content has no text but {text!r:.50}")
    return text
