"""Keys of the configuration in the environment: `COSMOS_TRAIN__OPTM_LR=1e-5` writes `train.optm_lr`.

The double underscore parts section and key, and marks the variable as one of the configuration: variables of the
processes (`COSMOS_TOKEN`, `COSMOS_REDIS_PASSWORD`, …) have none. Names are compared without regard to case; below
a table whose keys are the user's own (`custom`, `rollout.engine_kwargs`) they become lower case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_origin

from schema.config.loading.explain import all_fields, annotation_of, section_classes, suggest_key
from schema.config.problem import MOST_SHOWN, KeyPath, Problem, format_key
from schema.config.root import Config

PREFIX, SEPARATOR = "COSMOS_", "__"


class Variable(NamedTuple):
    """One variable: its name, the key that it writes, its text."""

    name: str
    path: KeyPath
    text: str


class FoundVariables(NamedTuple):
    """The variables, wider tables first, and what is wrong with the others."""

    variables: list[Variable]
    problems: list[Problem]


def variable_of(path: KeyPath) -> str:
    """The variable that writes a key."""
    return PREFIX + SEPARATOR.join(str(part).upper() for part in path)


def written_in(env: Mapping[str, str]) -> FoundVariables:
    """Read all environment variables that set keys of the configuration."""
    environment = FoundVariables([], [])
    for name in sorted(env):
        if not name.upper().startswith(PREFIX) or SEPARATOR not in name[len(PREFIX) :]:
            continue
        parts = name[len(PREFIX) :].split(SEPARATOR)
        path = _schema_path(parts)
        if not all(parts):
            hint = f"write {PREFIX}<SECTION>{SEPARATOR}<KEY>, such as COSMOS_TRAIN__OPTM_LR"
            problem = Problem("", "an empty part between underscores", env[name], hint)
            environment.problems.append(problem.at(f"environment variable {name}"))
        elif path[0] not in Config.model_fields:
            suggests = len(environment.problems) < MOST_SHOWN
            environment.problems.append(_no_section(name, path, env[name], suggests))
        else:
            environment.variables.append(Variable(name, path, env[name]))
    environment.variables.sort(key=lambda variable: len(variable.path))
    return environment


def without_effect(env: Mapping[str, str]) -> list[Problem]:
    """Warnings: variables that spell a key but with a single underscore, so that they write nothing."""
    keys = {"".join(path).replace("_", ""): path for path in all_fields() if len(path) > 1}
    warnings = []
    for name in sorted(env):
        if name.startswith(PREFIX) and SEPARATOR not in name[len(PREFIX) :]:
            path = keys.get(name[len(PREFIX) :].lower().replace("_", ""))
            if path is not None:
                message = f"does not write {format_key(path)}: section and key are parted by two underscores"
                hint = f"write {variable_of(path)}"
                warnings.append(Problem("", message, None, hint, file=f"environment variable {name}"))
    return warnings


def _schema_path(parts: list[str]) -> KeyPath:
    """The parts in the schema's spelling where it has such names, else in lower case; items of lists by number."""
    path: KeyPath = ()
    annotation: Any = Config
    for part in parts:
        if get_origin(annotation) is list and part.isascii() and part.isdigit():
            path = (*path, int(part[:6]))  # an item: the annotation of its keys is the list's
            continue
        names = {name.lower(): name for section in section_classes(annotation) for name in section.model_fields}
        path = (*path, names.get(part.lower(), part.lower()))
        annotation = annotation_of(path)
    return path


def _no_section(name: str, path: KeyPath, text: str, suggests: bool) -> Problem:
    hint = suggest_key(path[:1], {}) if suggests else ""
    if not hint.startswith("did you mean"):
        hint = f"the sections are {', '.join(Config.model_fields)}; unset the variable if it is not meant for us"
    return Problem(format_key(path), "unknown section", text, hint, file=f"environment variable {name}")
