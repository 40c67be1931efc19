"""Rules of texts: names and paths can be printed, are not blank, and end nothing by accident."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schema.config.base import Section
from schema.config.problem import KeyPath, Problem, format_key
from schema.config.root import Config
from schema.util.text import CONTROL

_STOP = ("rollout", "sampling_config", "stop")
_WRITTEN_OUT = frozenset({_STOP, ("train", "train_policy", "system_prompt")})
"""Texts for the model, where line breaks and tabs have a meaning."""
_OTHERS = frozenset({"custom", "options", "extra", "engine_kwargs", "override_config"})
"""Tables whose keys are somebody else's."""


def texts_are_printable(config: Config) -> list[Problem]:
    """A control character in a name or path forges lines of logs and displays, and is never meant."""
    problems = []
    for path, text in _texts(config):
        found = CONTROL.search(text)
        if found is None or path[:3] in _WRITTEN_OUT:
            continue
        message = f"holds the control character U+{ord(found.group()):04X} at position {found.start() + 1}"
        hint = "take it out; between single quotes a backslash stays a backslash"
        problems.append(Problem(format_key(path), message, text, hint))
    return problems


def texts_are_not_blank(config: Config) -> list[Problem]:
    """An empty text means "none" where a key takes one text; blanks, and an empty item of a list, mean nothing."""
    problems = []
    for path, text in _texts(config):
        key = format_key(path)
        if path[:3] == _STOP:
            if not text:
                message = "an empty text ends every answer before its first token"
                problems.append(Problem(key, message, text, "leave it out"))
        elif not text.strip() and path[:3] not in _WRITTEN_OUT and (text or not _is_scalar(config, path)):
            problems.append(Problem(key, f"{text!r} is blank: it names nothing", text, "leave it out"))
    return problems


def _is_scalar(config: Config, path: KeyPath) -> bool:
    """Whether the text is a key's own value and not an item of a list or table."""
    value: Any = config
    for part in path[:-1]:
        value = getattr(value, str(part), None)
    return isinstance(value, Section)


def _texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text of the schema's own keys; of a table its names too."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            if name not in _OTHERS:
                yield from _texts(getattr(value, name), (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(name, (*path, name))
            yield from _texts(item, (*path, name))


TEXT_RULES = (texts_are_printable, texts_are_not_blank)
