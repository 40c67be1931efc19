"""Warnings of secrets that stand in the configuration, which is written to files and sent to every worker."""

from __future__ import annotations

from typing import Any

from schema.config.problem import KeyPath, Problem, format_key
from schema.config.root import Config
from schema.config.secrets import SECRET_KEY, found_in

_OF_ITS_OWN = frozenset({("redis", "url")})
"""Handed to the controller by its environment, and cut everywhere else."""


def secrets_stay_out(config: Config) -> list[Problem]:
    """Credentials in addresses are left out for the processes; keys of `custom` that sound secret are not."""
    problems = []
    for path, text in _texts(config.model_dump(mode="json"), ()):
        key = format_key(path)
        if path not in _OF_ITS_OWN and "://" in text and found_in(text):
            message = "holds credentials in its address: they are left out of what the processes get"
            hint = "write the address without them, and keep them in a file that you alone may read"
            problems.append(Problem(key, message, None, hint))
        elif path[0] == "custom" and any(SECRET_KEY.search(str(part)) for part in path):
            message = "sounds like a secret, and is written to the run's directory and sent to every worker"
            hint = "write the path of a file that holds it and that you alone may read; the function opens it"
            problems.append(Problem(key, message, None, hint))
    return problems


def _texts(value: Any, path: KeyPath) -> list[tuple[KeyPath, str]]:
    if isinstance(value, str):
        return [(path, value)] if value else []
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _texts(item, (*path, key))]
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in _texts(item, (*path, i))]
    return []


SECRET_WARNINGS = (secrets_stay_out,)
