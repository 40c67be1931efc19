"""The output of `cosmos-launch show`: every value of the resolved configuration, and its origin.

The lines are TOML again. Passwords are masked; a masked value is never valid where it would be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from launcher.paths import resolved
from schema.config.keys import leaf_keys, section_keys
from schema.config.loading.layers import Origin
from schema.config.loading.load import LoadedConfig
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import KeyPath, format_key
from schema.config.secrets import masked

_STANDS_IN = {
    "train.train_policy.allowed_outdated_steps": "train.train_policy.on_policy",
    "train.train_policy.temperature": "rollout.sampling_config.temperature",
    "rollout.sampling_config.temperature": "train.train_policy.temperature",
}
"""Keys that follow another one when only that is written (`Config.to_dict`)."""
WIDEST_VALUE = 60


@dataclass(frozen=True)
class Value:
    """One key: its value (None: unset) and where it comes from.

    origin: default, file, environment or set, the last where several wrote into a table. where: file:line:column,
    the variable, --set, or empty.
    """

    key: str
    value: Any
    origin: str
    where: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        return asdict(self)

    @property
    def source(self) -> str:
        """The origin for people."""
        return self.where or self.origin


def values(loaded: LoadedConfig, *, changed_only: bool = False) -> list[Value]:
    """Every key that this job has, in the order of the schema; paths are absolute as the processes get them."""
    data = resolved(loaded.config)
    data["redis"]["url"] = loaded.config.redis.url
    listed = []
    for key in leaf_keys():
        path = tuple(key.split("."))
        present, value = _get(data, path)
        if not present:
            continue
        origins = _origins(loaded, path)
        if origins:
            where = ", ".join(dict.fromkeys(filter(None, map(_where, origins))))
            listed.append(Value(key, masked(value, path[-1]), origins[-1].kind, where))
        elif not changed_only:
            listed.append(Value(key, masked(value, path[-1]), "default"))
    return listed


def lines(listed: list[Value]) -> list[str]:
    """TOML, one line per key, with the origin as a comment; unset keys are comments as a whole."""
    return list(_lines(listed)) or ["# nothing is written: every key has its default"]


def _lines(listed: list[Value]) -> Iterator[str]:
    sections: dict[str, list[Value]] = {}
    for value in listed:
        sections.setdefault(value.key.rpartition(".")[0], []).append(value)
    order = {name: number for number, name in enumerate(("", *section_keys()))}  # keys before the first header
    for number, section in enumerate(sorted(sections, key=order.__getitem__)):
        members = sections[section]
        if section:
            yield from [""] if number else []
            yield f"[{section}]"
        texts = [_assignment(value) for value in members]
        size = min(max(map(len, texts)), WIDEST_VALUE)
        for text, value in zip(texts, members, strict=True):
            yield f"{text:<{size}}  # {value.source}"


def _assignment(value: Value) -> str:
    name = value.key.rpartition(".")[2]
    if value.value is None:
        return f"# {name} is unset"
    return f"{format_key((name,))} = {toml_value(value.value)}"


def _get(data: Any, path: KeyPath) -> tuple[bool, Any]:
    for part in path:
        if not isinstance(data, dict) or part not in data:
            return False, None
        data = data[part]
    return True, data


def _origins(loaded: LoadedConfig, path: tuple[str, ...]) -> list[Origin]:
    """The writers of a key and of what is in its table, in the order of the layers; empty: it is a default."""
    if writers := loaded.layers.writers(path):
        return sorted(writers, key=lambda origin: (origin.layer, origin.name))
    replacement_key = _STANDS_IN.get(".".join(path))
    written = loaded.layers.origin(tuple(replacement_key.split("."))) if replacement_key else None
    if written is None:
        return []
    plain = loaded.config.model_dump(mode="json")
    return [written] if _get(plain, path) != _get(loaded.config.to_dict(), path) else []


def _where(origin: Origin) -> str:
    if origin.kind == "set":  # its text may hold a password
        return "--set"
    parts = [str(part) for part in (origin.name, origin.line, origin.column) if part is not None]
    return ":".join(parts)
