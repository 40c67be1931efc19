"""Facts of a key from the schema, for somebody who asks: `look_up("train.optm_lr")`.

    question ─▶ a key | a section | the keys of a pattern or of a part of a name | ConfigError, "did you mean"

Everything is read from the fields of the sections and from `availability`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schema.config.availability import UNAVAILABLE, refused_by
from schema.config.keys import (
    acting_keys,
    deviation_of,
    example_value,
    fields_of,
    leaf_keys,
    models_at,
    observable,
    section_keys,
)
from schema.config.loading.environment import PREFIX, SEPARATOR, variable_of
from schema.config.loading.explain import closest, describe, is_list_of_tables, section_classes
from schema.config.loading.other_systems import other_systems
from schema.config.loading.tomlread import parse_value
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import ConfigError, Problem

UNSET, MUST = "unset", "must be written"


_TITLE = re.compile(r"^`\[[^`]*`(?:[^:]*)?: ")
"""How the docstring of a section begins: its name, which is known."""


@dataclass(frozen=True)
class KeyInfo:
    """One key. Texts are for people; `default` is the value itself, "unset" where there is none.

    when: the jobs that have the key, where not all do. bounds: `at least 0`, one each. choices: values, where
    only some are allowed. limits, taken: what this build takes, where that is less. acts: whether any value
    acts in this build; effect: what it changes, of which kind. example, override, variable: how it is written in a
    file, after --set, and in the environment.
    """

    key: str
    description: str
    type: str
    default: Any
    bounds: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    when: str = ""
    deviation: str = ""
    limits: str = ""
    taken: tuple[str, ...] = ()
    acts: bool = True
    kind: str = ""
    effect: str = ""
    example: str = ""
    override: str = ""
    variable: str = ""


@dataclass(frozen=True)
class SectionInfo:
    """One section: what it is, and the keys and sections directly in it."""

    key: str
    description: str
    optional: bool
    keys: tuple[KeyInfo, ...]
    sections: tuple[tuple[str, str], ...]
    """(key, description) of each."""


@dataclass(frozen=True)
class FoundKeys:
    """An answer. Of `keys` there are several where grpo and sft differ, or where a pattern matched.

    note: whose name the question is, where it is not ours.
    """

    question: str
    keys: tuple[KeyInfo, ...] = ()
    section: SectionInfo | None = None
    is_list: bool = False
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        return asdict(self)


def look_up(question: str) -> FoundKeys:
    """Answer a question; the empty one is the list of sections. Raises ConfigError for what is not there."""
    name = _normal(question)
    if name == "" or name in section_keys():
        return FoundKeys(question, section=_section(name))
    if name in leaf_keys():
        return FoundKeys(question, tuple(_variants(name)))
    keys = [key for key in leaf_keys() if _matches(key, name)]
    sections = [key for key in section_keys() if key.rpartition(".")[2] == name]
    if not keys and len(sections) == 1:
        return FoundKeys(question, section=_section(sections[0]))
    if not keys:
        return _elsewhere(question, name)
    if len(keys) == 1 and "*" not in name and "?" not in name:
        return FoundKeys(question, tuple(_variants(keys[0])))
    return FoundKeys(question, tuple(info for key in keys for info in _variants(key)), is_list=True)


def _elsewhere(question: str, name: str) -> FoundKeys:
    """Answer for a name of another system. Raises ConfigError where no system has it, or it has no counterpart."""
    others = other_systems()
    external_keys = others.names_here(name)
    if not external_keys and (systems := others.systems_of_table(name)):
        hint = f"cosmos-launch explain knows each of its keys: explain {name}.KEY"
        raise ConfigError([Problem(question, f"no such key; a table of {systems} files", hint=hint)])
    if not external_keys:
        raise ConfigError([_unknown(question, name)])
    if not external_keys[0].ours:
        message = f"no such key; {external_keys[0].system}'s `{external_keys[0].key}` has no counterpart here"
        raise ConfigError([Problem(question, message, hint=external_keys[0].reason)])
    with_counterpart = [external_key for external_key in external_keys if external_key.ours]
    keys = list(
        dict.fromkeys(key for external_key in with_counterpart for key in external_key.ours if key in leaf_keys())
    )
    notes = [
        f"{external_key.system}'s {external_key.key} is {' and '.join(external_key.ours)} here"
        for external_key in with_counterpart
    ]
    infos = tuple(info for key in keys for info in _variants(key))
    return FoundKeys(question, infos, is_list=len(keys) > 1, note="\n".join(notes))


def _normal(question: str) -> str:
    """The question as a dotted key, however it was written: `[train]`, a variable, an item of a list."""
    name = question.strip()
    if name.upper().startswith(PREFIX) and SEPARATOR in name:
        name = name[len(PREFIX) :].replace(SEPARATOR, ".").lower()
    name = name.removeprefix("--set ").partition("=")[0].strip()
    if name.startswith("[") and name.endswith("]") and "*" not in name:
        name = name.strip("[] ")
    names = {*leaf_keys(), *section_keys()}
    if name in names:
        return name
    name = re.sub(r"\[\d+\]", "", name).rstrip(".")
    return name if name in names else name.lower().replace("-", "_")


def _matches(key: str, name: str) -> bool:
    """A pattern of the whole key or of its last parts, the beginning of a key, or its last part."""
    if any(sign in name for sign in "*?["):
        return fnmatchcase(key, name) or fnmatchcase(key, f"*.{name}")
    return key.startswith(name) or f".{key}".endswith(f".{name}")


def _unknown(question: str, name: str) -> Problem:
    """The nearest names: as a whole, else by the last part; free-form tables name themselves."""
    names = [*leaf_keys(), *section_keys()]
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        table = ".".join(parts[:end])
        if table in leaf_keys() and "table" in next(_variants(table)).type:
            hint = f"the keys of {table} are not ours: cosmos-launch explain {table}"
            return Problem(question, "no such key", hint=hint)
    last = {key.rpartition(".")[2]: key for key in reversed(names)}
    near, by_last = closest(name, names), closest(parts[-1], last)
    guess = near or (last[by_last] if by_last else None)
    inside = [key for key in names if parts[-1] and parts[-1] in key.rpartition(".")[2]][:5]
    hint = "cosmos-launch explain lists the sections, and takes patterns: cosmos-launch explain '*_size'"
    if guess:
        hint = f"did you mean `{guess}`?"
    elif inside:
        hint = "keys with that in their name: " + ", ".join(inside)
    elif described := _describing(parts[-1].replace("_", " ")):
        hint = "keys that speak of it: " + ", ".join(described)
    return Problem(question, "no such key", hint=hint)


def _describing(words: str) -> list[str]:
    """The first keys whose description has these words."""
    keys = (key for key in leaf_keys() for _, info in fields_of(key) if words in (info.description or "").lower())
    return list(dict.fromkeys(keys))[:5] if words.strip() else []


def _section(key: str) -> SectionInfo:
    description, optional = "A job.", False
    if key:
        _, info = fields_of(key)[0]
        description = info.description or ""
        optional = type(None) in get_args(info.annotation)
        for model in models_at(key):
            document = _TITLE.sub("", (model.__doc__ or "").split("\n")[0])
            if document and document.casefold() not in description.casefold():
                description += f"\n{document[0].upper()}{document[1:]}"
    names = list(dict.fromkeys(name for model in models_at(key) for name in model.model_fields))
    inner = [f"{key}.{name}" if key else name for name in names]
    keys = [info for name in inner if name in leaf_keys() for info in _variants(name)]
    sections = [(name, fields_of(name)[0][1].description or "") for name in inner if name in section_keys()]
    return SectionInfo(key, description, optional, tuple(keys), tuple(sections))


def _variants(key: str) -> Iterator[KeyInfo]:
    """A key as each kind of job has it; one where they agree."""
    fields = fields_of(key)
    infos = [_info(key, info) for _, info in fields]
    if all(info == infos[0] for info in infos):
        in_one = len(fields) < len(list(models_at(key.rpartition(".")[0])))
        yield KeyInfo(**{**vars(infos[0]), "when": _when(fields[0][0]) if in_one else ""})
        return
    for (model, _), info in zip(fields, infos, strict=True):
        yield KeyInfo(**{**vars(info), "when": _when(model)})


def _when(model: type[BaseModel]) -> str:
    (tag,) = get_args(model.model_fields["type"].annotation)
    return f'type = "{tag}"'


def _info(key: str, info: FieldInfo) -> KeyInfo:
    section, _, name = key.rpartition(".")
    seen = observable(key)
    value = example_value(key, info)
    line = f"{name} = {toml_value(value)}"
    bare = value if isinstance(value, str) and parse_value(value) == value else toml_value(value)
    is_list = is_list_of_tables(tuple(section.split("."))) if section else False
    table = f"[[{section}]]" if is_list else f"[{section}]"
    item = f"{section}[0].{name}" if is_list else key
    place = (section, "0", name) if is_list else tuple(key.split("."))
    if is_list:  # with the keys that each of its tables must have
        needed = [n for model in models_at(section) for n, f in model.model_fields.items() if f.is_required()]
        others = [(n, example_value(f"{section}.{n}", fields_of(f"{section}.{n}")[0][1])) for n in needed]
        line = "\n".join([*(f"{n} = {toml_value(v)}" for n, v in others if n != name), line])
    example = f"{table}\n{line}" if section else f"[{name}]\nmine = 1"
    return KeyInfo(
        key=key,
        description=info.description or "",
        type=describe(info.annotation),
        default=default_of(info),
        bounds=_joined(dict.fromkeys(_bounds(info.annotation, info.metadata))),
        choices=tuple(dict.fromkeys(_choices(info.annotation))),
        deviation=_deviation(key),
        limits=_limits(key),
        taken=_taken(key),
        acts=key in acting_keys(),
        kind=seen.kind,
        effect=seen.sentence,
        example=example,
        override=f"{item}={bare}" if section else "",
        variable=f"{variable_of(place)}={bare}" if section else "",
    )


def default_of(info: FieldInfo) -> Any:
    """A key's default, "unset" for None; a key that must be written has none and says so."""
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return MUST
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return UNSET if value is None else value


def _deviation(key: str) -> str:
    deviation = deviation_of(key)
    if deviation is None:
        return ""
    default = deviation.theirs if isinstance(deviation.theirs, str) else toml_value(deviation.theirs)
    return f"cosmos-rl's default is {default}. {deviation.reason}"


def _taken(key: str) -> tuple[str, ...]:
    """The values that this build takes, as one writes them; empty: all of them."""
    row = refused_by(key)
    if row is None:
        return ()
    if row != key:
        return (UNSET,)
    return tuple(UNSET if value is None else toml_value(value) for value in UNAVAILABLE[row].neutral)


def _limits(key: str) -> str:
    """Return the values that this build accepts, if it does not accept all."""
    row = refused_by(key)
    if row is None:
        return ""
    where = "" if row == key else f"{row}: "
    taken = _taken(key)
    words = "it must stay unset" if taken == (UNSET,) else f"it takes {' or '.join(taken)}"
    return f"{where}cannot do {UNAVAILABLE[row].missing} yet; {words}"


_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _bounds(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    """The bounds of a type in words; those of the items of a list too."""
    for item in metadata:
        yield from _bound(item)
    if get_origin(annotation) is Annotated:
        inner, *further = get_args(annotation)
        for item in further:
            yield from _bounds(None, item.metadata) if isinstance(item, FieldInfo) else _bound(item)
        yield from _bounds(inner, [])
    elif not any(True for _ in section_classes(annotation)):
        for part in get_args(annotation):
            yield from _bounds(part, [])


def _joined(bounds: Iterable[str]) -> tuple[str, ...]:
    """`at least 2 items` and `at most 2 items` are one bound."""
    merged = list(bounds)
    for most in [bound for bound in merged if bound.startswith("at most") and bound.endswith("items")]:
        least = most.replace("at most", "at least")
        if least in merged:
            merged.remove(least)
            merged[merged.index(most)] = most.replace("at most", "exactly")
    return tuple(merged)


def _bound(item: Any) -> Iterator[str]:
    for name, words in _WORDS.items():
        if (limit := getattr(item, name, None)) is not None:
            yield f"{words} {limit}"
    least, most = getattr(item, "min_length", None), getattr(item, "max_length", None)
    if least == 1:
        yield "not empty"
    elif least is not None:
        yield f"at least {least} items"
    if most is not None:
        yield f"at most {most} items"
    if pattern := getattr(item, "pattern", None):
        yield f"of the form {pattern}"
    if getattr(getattr(item, "func", None), "__name__", "") == "_not_zero":
        yield "not 0"


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _choices(part)


def all_infos() -> Iterator[KeyInfo]:
    """Every key of the schema, in its order."""
    for key in leaf_keys():
        yield from _variants(key)
