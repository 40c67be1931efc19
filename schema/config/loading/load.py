"""From the layers of a configuration to a `Config`, or to a `ConfigError` with everything that is wrong at once.

    files, environment, --set ─layers─▶ data ─pydantic─▶ Config ─rules, availability─▶ Config
                                                │ faults: leave those keys out, go on with the rest
                                                ▼
                                           all problems, each with the place of the layer that wrote it

A rule that speaks of a key already found faulty is not asked, so no problem is the echo of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schema.config.availability import check_available
from schema.config.base import FREE_TABLES
from schema.config.loading.environment import without_effect
from schema.config.loading.explain import Finding, findings_of
from schema.config.loading.layers import Layers, read_layers, without_port
from schema.config.loading.other_systems import other_systems
from schema.config.loading.tomlread import depth_problem, dotted_path, too_deep
from schema.config.problem import MOST_SHOWN, Absent, ConfigError, KeyPath, Problem, format_key
from schema.config.root import Config
from schema.config.rules import check_rules
from schema.config.sections.unsupported import TABLE, refusals

Paths = Path | str | Sequence[Path | str]

_MOST_BITS = 63
"""TOML carries integers of so many bits; engines, optimizers and stores take no more."""
_MOST_BITS_OF_OTHERS = 1023
"""In tables of another system's keys. As large as a floating-point number can be, and messages readable."""


@dataclass(frozen=True)
class LoadedConfig:
    """A sound configuration and who wrote what. warnings: what was written and has no effect."""

    config: Config
    layers: Layers
    warnings: list[Problem]

    def placed(self, problems: Iterable[Problem]) -> list[Problem]:
        """Findings about this configuration with the places of the keys that they name."""
        all_problems = list(problems)
        general = [problem for problem in all_problems if not problem.key]
        return general + self.layers.placed([_finding(p) for p in all_problems if p.key])


def load(
    paths: Paths, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None, *, elsewhere: bool = False
) -> LoadedConfig:
    """Read all layers (`schema.config.loading.layers`), validate and check; keeps the origin of each value.

    paths: one file, or several, later ones over earlier ones. overrides: `dotted.key=VALUE`, VALUE as TOML
    writes it; what is not TOML is taken as a string. env: variables `COSMOS_<SECTION>__<KEY>`; None: the
    environment is left out of it. elsewhere: the job runs on other machines, so files may be missing here; they are
    warnings then.
    Raises ConfigError with all problems.
    """
    files = [paths] if isinstance(paths, str | Path) else paths
    layers = read_layers([Path(file) for file in files], overrides, env)
    config, problems = _check(layers.data)
    missing: list[Finding] = []
    if elsewhere:
        missing = [finding for finding in problems if isinstance(finding[1](), Absent)]
        problems = [finding for finding in problems if not isinstance(finding[1](), Absent)]
    if config is None or problems or layers.problems:
        general, placed = [*_of_another_system(files, layers.data), *layers.problems], layers.placed(problems)
        raise ConfigError(general + placed, len(problems) - len(placed))
    warnings = layers.placed(missing) + layers.warnings + without_effect(env or {})
    return LoadedConfig(config, layers, warnings)


def _of_another_system(files: Sequence[Path | str], data: Mapping[str, Any]) -> Iterator[Problem]:
    """Name the system whose keys a faulty configuration has, if `convert` does not read that system."""
    if (description := other_systems().described(data)) is not None:
        message, hint = description
        yield Problem("", message, hint=hint, file=", ".join(map(str, files)))


def load_config(paths: Paths, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Config:
    """The configuration alone; see `load`."""
    return load(paths, overrides, env).config


def check_config(data: Mapping[str, Any]) -> Config:
    """Validate and check a configuration that is already a mapping; raises ConfigError with all problems."""
    config, problems = _check(without_port(data))
    if config is None or problems:
        raise ConfigError([problem() for _, problem in problems[:MOST_SHOWN]], len(problems[MOST_SHOWN:]))
    return config


def _check(data: Mapping[str, Any]) -> tuple[Config | None, list[Finding]]:
    """The configuration, as far as it is sound, and every problem with its key path."""
    if (deep := too_deep(data)) is not None:
        return None, [(deep, partial(depth_problem, deep))]
    remaining = deepcopy(dict(data))
    unsupported = refusals(remaining)
    remaining.pop(TABLE, None)
    problems: list[Finding] = list(_too_large(remaining))
    for path in {_removable(path) for path, _ in problems}:
        _remove(remaining, path)
    problems = unsupported + problems
    config: Config | None = None
    while config is None:
        try:
            config = Config.model_validate(remaining)
        except ValidationError as error:
            faults = findings_of(error, data)  # whose words are made later: `remaining` shrinks
            problems += faults
            removed = {_removable(path) for path, _ in faults}
            unremoved = [path for path in removed if not _remove(remaining, path)]
            if unremoved:
                return None, problems
    faulty = {part for path, _ in problems for part in _around(format_key(_removable(path)))}
    whole = {format_key(_removable(path)) for path, _ in problems}
    for problem in [*check_available(config), *check_rules(config)]:
        keys = (problem.key, *problem.related)
        if not any(key in faulty or not whole.isdisjoint(_around(key)) for key in keys):
            problems.append(_finding(problem))
    return config, problems


def _too_large(data: Any) -> Iterator[Finding]:
    """Every integer too large to compute with, with its path: a product of them could not even be shown."""
    waiting: list[tuple[KeyPath, Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, key), item) for key, item in value.items() if isinstance(key, str)]
        elif isinstance(value, list):
            waiting += [((*path, index), item) for index, item in enumerate(value)]
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            most = _MOST_BITS if FREE_TABLES.isdisjoint(path) else _MOST_BITS_OF_OTHERS
            if value.bit_length() > most:
                message = f"an integer of {value.bit_length()} bits is too large for any purpose"
                yield (path, partial(Problem, format_key(path), message, None, f"write a number below 2^{most}"))


def _finding(problem: Problem) -> Finding:
    return dotted_path(problem.key) or (), lambda: problem


def _removable(path: KeyPath) -> KeyPath:
    """The path that goes with a faulty key: the list that it is an item of, the section whose tag it is."""
    if path == ("train", "train_policy", "type"):
        return path[:-1]
    end = next((index for index, part in enumerate(path) if isinstance(part, int)), len(path))
    return path[:end]


def _remove(data: Any, path: KeyPath) -> bool:
    """Take a key out; False when there is no such key."""
    for part in path[:-1]:
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return isinstance(data, dict) and bool(path) and data.pop(path[-1], None) is not None


def _around(key: str) -> Iterator[str]:
    """A dotted key and every table and list around it."""
    yield key
    yield from (key[: match.start()] for match in re.finditer(r"[.\[]", key))
