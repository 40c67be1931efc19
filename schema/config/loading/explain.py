"""pydantic's errors in the words of somebody who wrote a TOML file.

    pydantic error ─locate─▶ key path in the file ─group─▶ one group per key ─phrase (of what is shown)─▶ Problem

A field of several types (`optm_lr`: a number or a list of numbers) makes pydantic report every branch; the
group becomes one sentence.
"""

from __future__ import annotations

import datetime
import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from schema.config.backends import BACKENDS, NOT_BUILT
from schema.config.loading.other_systems import other_systems
from schema.config.problem import KeyPath, Problem, format_key
from schema.config.root import Config
from schema.config.sections.train_policy import GrpoConfig, SFTDataConfig

_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_PLURALS = {bool: "booleans", int: "integers", float: "numbers", str: "strings"}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_TYPE_ERRORS = {f"{kind}_type" for kind in ("bool", "int", "float", "string", "list", "dict", "model")} | {
    "literal_error",
    "model_attributes_type",
    "none_required",
}


MOST_ITEMS = 10
"""Faulty items of one list or table that are named each; the others are counted."""

Finding = tuple[KeyPath, Callable[[], Problem]]
"""A fault by its key, and its words when they are needed: did-you-mean takes a millisecond."""


def findings_of(error: ValidationError, data: Mapping[str, Any]) -> list[Finding]:
    """Every fault that pydantic found in `data`, one per key."""
    groups: dict[KeyPath, list[tuple[KeyPath, ErrorDetails]]] = {}
    for detail in error.errors(include_url=False, include_context=True):
        path = _key_path(detail, data)
        field = path if detail["type"] == "extra_forbidden" else field_path(path)
        groups.setdefault(field, []).append((path, detail))
    return [finding for field, group in groups.items() for finding in _findings(field, group, data)]


def _key_path(detail: ErrorDetails, data: Any) -> KeyPath:
    """pydantic's location without the names of union branches, which are not keys of the data."""
    path: KeyPath = ()
    for part in detail["loc"]:
        is_key = isinstance(data, Mapping) and part in data
        is_item = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_key or is_item:
            path, data = (*path, part), data[part]
    if detail["type"] == "union_tag_invalid":
        path = (*path, "type")
    if detail["type"] == "missing":
        path = (*path, detail["loc"][-1])
    return path


def field_path(path: KeyPath) -> KeyPath:
    """The part of a path that names a field of the schema: `train.optm_betas[1]` -> `train.optm_betas`."""
    field: KeyPath = ()
    for length in range(1, len(path) + 1):
        field = path[:length]
        if not _is_section(field):
            break
    return field


@lru_cache(maxsize=1024)  # of a hundred thousand wrong items of a list all but the item is the same
def _is_section(field: KeyPath) -> bool:
    annotation = annotation_of(field)
    return annotation is not None and any(True for _ in section_classes(annotation))


def annotation_of(path: KeyPath) -> Any:
    """The declared type of a field by its path; None where the schema has no such field."""
    annotation: Any = Config
    for part in path:
        if isinstance(part, int):
            continue  # an item of a list of tables: the list's type has their class
        fields = [
            model.model_fields[str(part)] for model in section_classes(annotation) if part in model.model_fields
        ]
        if not fields:
            return None
        annotation = fields[0].annotation
    return annotation


def section_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes that a type can be, or that a list of tables holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, list) or _is_union(annotation):
        for part in get_args(annotation):
            yield from section_classes(part)


def is_list_of_tables(path: tuple[str, ...]) -> bool:
    """Whether a path names tables that stand as often as one likes: `[[teacher]]`."""
    annotation = annotation_of(path)
    return get_origin(annotation) is list and any(True for _ in section_classes(annotation))


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def describe(annotation: Any) -> str:
    """A type in words: `a number or a list of numbers`."""
    words = list(dict.fromkeys(_words(annotation)))
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _words(annotation: Any) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _words(arguments[0])
    elif _is_union(annotation):
        members = [part for part in arguments if part is not type(None)]
        if float in map(_bare, members):  # an integer is a number
            members = [part for part in members if _bare(part) is not int]
        for part in members:
            yield from _words(part)
    elif origin is Literal:
        yield from (f'"{choice}"' for choice in arguments)
    elif origin is list:
        yield f"a list of {_plural(arguments[0])}"
    elif origin is dict:
        yield f"a table of {_plural(arguments[1])}"
    else:
        yield _NOUNS.get(annotation, "a table")


def _bare(annotation: Any) -> Any:
    """A type without its bounds."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _plural(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "names, each " + describe(annotation)
    return "tables" if any(True for _ in section_classes(annotation)) else _PLURALS.get(annotation, "values")


def found(value: Any) -> str:
    """A value in words: `the string 'abc'`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string '{value}'" if len(value) <= 80 else f"the string '{value[:77]}...'"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, datetime.date | datetime.time):
        return f"the date or time {value}"
    return f"{'the integer' if isinstance(value, int) else 'the number'} {_short(value)}"


def _short(value: Any) -> str:
    """A number for a message; an integer may be too long to print."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"of {value.bit_length()} bits"
    return str(value)


def _findings(
    field: KeyPath, group: list[tuple[KeyPath, ErrorDetails]], data: Mapping[str, Any]
) -> Iterator[Finding]:
    """Report pydantic's errors of one field: a problem for each faulty item of it, else one for the whole."""
    items: dict[KeyPath, ErrorDetails] = {}
    for path, detail in group:
        if len(path) > len(field):
            items.setdefault(path, detail)
    if not items:
        whole = [detail for _, detail in group if detail["type"] not in _TYPE_ERRORS] or [group[0][1]]
        yield field, partial(_problem, field, field, whole[0], data)
    for path, detail in islice(items.items(), MOST_ITEMS):
        yield path, partial(_problem, path, field, detail, data)
    if len(items) > MOST_ITEMS:
        key, message = format_key(field), f"{len(items) - MOST_ITEMS:,} more of its items are wrong"
        yield next(islice(items, MOST_ITEMS, None)), partial(Problem, key, message)


def _problem(path: KeyPath, field: KeyPath, detail: ErrorDetails, data: Mapping[str, Any]) -> Problem:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        message, hint = "unknown key", suggest_key(path, data)
    elif kind == "union_tag_invalid":
        message, hint = _wrong_choice(path, detail["input"].get("type"), ("grpo", "sft"))
        value = detail["input"].get("type")
    elif kind in _BOUNDS:
        words, limit = _BOUNDS[kind]
        message = f"must be {words} {detail['ctx'][limit]}, got {_short(value)}"
        hint = _meaning(field)
    elif kind in _TYPE_ERRORS:
        message, hint = _wrong_type(path, field, kind, value)
    else:
        message, hint = _other_fault(detail), _meaning(field)
    return Problem(format_key(path), message, value, hint)


def _other_fault(detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "finite_number":
        return f"must be a finite number, got {value}"
    if kind == "missing":
        return "must be written"
    if kind == "string_too_short":
        return "must not be empty"
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"must have {bound} items, got {context.get('actual_length', len(value))}"
    if kind == "string_pattern_mismatch":
        return f"{found(value)} does not have the form {context['pattern']}"
    return f"{detail['msg'][0].lower()}{detail['msg'][1:]}, got {found(value)}"


def _wrong_type(path: KeyPath, field: KeyPath, kind: str, value: Any) -> tuple[str, str]:
    annotation = annotation_of(field) if path == field else _item(annotation_of(field))
    choices = tuple(_choices(annotation))
    if choices and isinstance(value, str):
        return _wrong_choice(path, value, choices, describe(annotation))
    names = {"bool_type": bool, "int_type": int, "float_type": float, "string_type": str}
    expected = _NOUNS[names[kind]] if path != field and kind in names else describe(annotation)
    return f"expected {expected}, got {found(value)}", _type_hint(path, value, expected)


def _item(annotation: Any) -> Any:
    """Return the type of the items of a list or table."""
    for part in [annotation, *get_args(annotation)]:
        if get_origin(part) in (list, dict):
            return get_args(part)[-1]
    return annotation


def _type_hint(path: KeyPath, value: Any, expected: str) -> str:
    name = format_key(path[-1:]) if isinstance(path[-1], str) else format_key(path)
    if isinstance(value, str) and ("integer" in expected or "number" in expected) and _is_number(value):
        return f"write it without quotes: {name} = {value}"
    if isinstance(value, str) and value.lower() in ("true", "false") and "true or false" in expected:
        return f"write it without quotes: {name} = {value.lower()}"
    if isinstance(value, float) and "integer" in expected and value.is_integer():
        return f"write {name} = {int(value)}"
    if expected == "a string" and isinstance(value, int | float) and not isinstance(value, bool):
        return f'write it in quotes: {name} = "{_short(value)}"'
    if expected == "a table":
        return f"write a table: [{format_key(path)}]"
    if expected == "a list of tables":
        return f"write each as a table: [[{format_key(path)}]]"
    return _meaning(field_path(path))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (choice for choice in get_args(annotation) if isinstance(choice, str))
    elif get_origin(annotation) is Annotated or _is_union(annotation):
        for part in get_args(annotation):
            yield from _choices(part)


def _wrong_choice(path: KeyPath, value: Any, choices: tuple[str, ...], expected: str = "") -> tuple[str, str]:
    expected = expected or " or ".join(f'"{choice}"' for choice in choices)
    message = f"expected {expected}, got {found(value)}"
    key = format_key(path)
    if key == "rollout.backend" and value in NOT_BUILT:
        first, *others = (f'"{name}"' for name in BACKENDS)
        return (f'"{value}" is not available', f"this build runs rollouts with {first} (or {' or '.join(others)})")
    close = closest(value, choices) if isinstance(value, str) else None
    return message, f'did you mean "{close}"?' if close else _meaning(path)


def _meaning(path: KeyPath) -> str:
    """The first sentence of a field's description, as a reminder of what the key is for."""
    model: Any = annotation_of(path[:-1]) if path[:-1] else Config
    for section in section_classes(model):
        info = section.model_fields.get(str(path[-1]))
        if info is not None and info.description:
            return f"{format_key(path)}: {info.description}"
    return ""


LONGEST_NAME = 200
"""Characters of a mistyped name: a longer one is like none of ours."""


def closest(word: str, words: Iterable[str]) -> str | None:
    """The word most like a mistyped one, if any is like it."""
    if len(word) > LONGEST_NAME:
        return None
    normal = {candidate.lower().replace("-", "_"): candidate for candidate in words}
    match = difflib.get_close_matches(word.lower().replace("-", "_"), normal, n=1, cutoff=0.7)
    return normal[match[0]] if match else None


def all_fields(model: type[BaseModel] = Config, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key of the schema, sections included; those of grpo before those of sft."""
    for name, info in model.model_fields.items():
        yield (*path, name)
        for section in section_classes(info.annotation):
            yield from all_fields(section, (*path, name))


def suggest_key(path: KeyPath, data: Mapping[str, Any]) -> str:
    """Suggest what the writer of an unknown key may have meant."""
    section, name = path[:-1], str(path[-1])
    models = list(section_classes(annotation_of(section) if section else Config))
    if section == ("train", "train_policy"):
        models = [_train_policy_model(data)]
        other = SFTDataConfig if models == [GrpoConfig] else GrpoConfig
        if name in other.model_fields:
            return f'`{name}` belongs to type = "{"sft" if other is SFTDataConfig else "grpo"}"'
    siblings = [field for model in models for field in model.model_fields]
    everywhere = _everywhere()
    if name in everywhere:
        places = " or ".join(
            f"[{format_key(field[:-1])}]" for field in sorted(everywhere[name], key=len) if field[:-1]
        )
        return f"`{name}` belongs to {places}" if places else f"`{name}` is a section of its own: [{name}]"
    near, elsewhere = closest(name, siblings), _name_elsewhere(path, data)
    if elsewhere and not (near and f"`{format_key((*section, near))}`" in elsewhere):
        return elsewhere  # a name of another system's, unless it is also like the key of ours that it becomes
    far = closest(name, everywhere)
    if near and (far is None or _likeness(name, near) >= _likeness(name, far) - 0.1):
        return f"did you mean `{near}`?"  # a clearly better name elsewhere wins over a sibling
    return f"did you mean `{format_key(everywhere[far][0])}`?" if far else _known(siblings)


def _name_elsewhere(path: KeyPath, data: Mapping[str, Any]) -> str:
    """Return the hint for a name of verl's, ROLL's or cosmos-rl's; "" for any other name."""
    others = other_systems()
    if len(path) == 1 and isinstance(data.get(str(path[0])), Mapping):
        systems = others.systems_of_table(str(path[0]))
        inside = islice(_leaves(data[str(path[0])], format_key(path)), 20) if systems else ()
        pairs = ((key, others.names_here(key)) for key in inside)
        notes = [
            f"; {key} is {' and '.join(matches[0].ours)} here"
            for key, matches in pairs
            if matches and matches[0].ours
        ]
        return f"a table of {systems} files, which cosmos-launch convert reads{''.join(notes[:3])}" if systems else ""
    external_keys = others.names_here(format_key(path)) or others.names_here(str(path[-1]))
    own_keys = list(dict.fromkeys(key for external_key in external_keys for key in external_key.ours))
    own_keys.sort(key=lambda key: not key.startswith(f"{path[0]}."))  # those of the same section come first
    if own_keys:
        names = " or ".join(f"`{key}`" for key in own_keys[:3])
        return f"did you mean {names}? {external_keys[0].system} calls it `{external_keys[0].key}`"
    if external_keys and external_keys[0].key == format_key(path):
        return f"a key of {external_keys[0].system}'s without counterpart: {external_keys[0].reason}"
    return ""


def _leaves(table: Mapping[str, Any], name: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.{key}")
        else:
            yield f"{name}.{key}"


@cache
def _everywhere() -> dict[str, list[tuple[str, ...]]]:
    """Name -> the paths of all keys of that name."""
    places: dict[str, list[tuple[str, ...]]] = {}
    for field in dict.fromkeys(all_fields()):
        places.setdefault(field[-1], []).append(field)
    return places


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


def _train_policy_model(data: Mapping[str, Any]) -> type[BaseModel]:
    policy = data.get("train", {}).get("train_policy", {})
    return SFTDataConfig if policy.get("type") == "sft" else GrpoConfig


def _known(names: list[str]) -> str:
    return f"known here: {', '.join(names)}" if names else ""
