"""Names to functions: the built-in ones, and `path/to/file.py:function` of the user."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout_worker.rewards.functions import BUILTIN
from schema.config.reward_signature import of_function

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
    path, _, attribute = name.rpartition(":")
    if not path or not attribute:
        raise RewardConfigError(
            f"reward function {name!r} is unknown: built in are {', '.join(sorted(BUILTIN))}; "
            'your own is written "path/to/file.py:function"'
        )
    function = getattr(_load(Path(path), name), attribute, None)
    if not callable(function):
        raise RewardConfigError(f"reward function {name!r}: {path} has no function {attribute!r}")
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


def _load(path: Path, name: str) -> ModuleType:
    """The module of a user's file, loaded once; its folder is importable, as if it were run as a script."""
    module_name = f"cosmos_reward_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not path.is_file():
        raise RewardConfigError(f"reward function {name!r}: no file {path} exists")
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise RewardConfigError(f"reward function {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise RewardConfigError(
            f"reward function {name!r}: {path} cannot be loaded: {described(error)}"
        ) from error
    return module


def _keywords(function: Callable[..., Any], custom: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    kinds = inspect.Parameter
    positional = [
        p for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        return dict(custom)
    named = {p.name for p in positional[2:]}
    named |= {p.name for p in parameters.values() if p.kind is kinds.KEYWORD_ONLY}
    return {key: value for key, value in custom.items() if key in named}
