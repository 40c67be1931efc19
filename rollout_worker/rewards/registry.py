"""Names to functions: the built-in ones, and `path/to/file.py:function` of the user."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollout_worker.rewards.functions import BUILTIN
from schema.config.reward_signature import of_function
from schema.util.own_code import OwnCodeError, is_own, load_function

MAX_MESSAGE = 1000
"""Characters of an error's own message."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{2,}")
RewardFunction = Callable[[str, dict[str, Any]], Any]


class RewardConfigError(Exception):
    """A reward function cannot be had: names it, the reason and the remedy."""


def resolve(name: str, custom: Mapping[str, Any]) -> RewardFunction:
    """The function of a name, to be called with completion and row.

    A user's function gets the keys of `[custom]` that it has parameters for, or all with `**custom`.
    Raises `RewardConfigError`.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    if not is_own(name):
        raise RewardConfigError(
            f"reward function {name!r} is unknown: built in are {', '.join(sorted(BUILTIN))}; "
            'your own is written "path/to/file.py:function"'
        )
    try:
        function = load_function(name)
    except OwnCodeError as error:
        cause = error.__cause__
        file = name.rpartition(":")[0]
        what = f"{file} cannot be loaded: {described(cause)}" if isinstance(cause, Exception) else error
        raise RewardConfigError(f"reward function {name!r}: {what}") from error
    if (fault := of_function(function, custom)) is not None:
        raise RewardConfigError(f"reward function {name!r} {fault.message}; {fault.hint}")
    keywords = _keywords(function, custom)
    return lambda completion, row: function(completion, row, **keywords)


def described(error: Exception) -> str:
    """Type and message of an error in a user's code; of a missing variable also how to pass it."""
    try:
        message = str(error)[:MAX_MESSAGE]
    except Exception as second:
        message = f"(its message cannot be had: {type(second).__name__})"
    text = f"{type(error).__name__}: {message}"
    if isinstance(error, KeyError) and error.args and VARIABLE.fullmatch(str(error.args[0])):
        name = error.args[0]
        text += f' (if this is a variable of the environment: write reward.environment = ["{name}"])'
    return text


def _keywords(function: Callable[..., Any], custom: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    kinds = inspect.Parameter
    positional = [p for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        return dict(custom)
    named = {p.name for p in positional[2:]}
    named |= {p.name for p in parameters.values() if p.kind is kinds.KEYWORD_ONLY}
    return {key: value for key, value in custom.items() if key in named}
