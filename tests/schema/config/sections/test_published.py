"""Names and defaults are those of the published cosmos-rl schema; every deviation is declared."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from schema.config import Config
from schema.config.base import Section
from schema.config.keys import deviation_of, published_keys
from schema.config.loading.explain import all_fields, annotation_of, section_classes
from tests.schema.published import PLACES, PUBLISHED
from tests.support.each import check_each

SECTIONS: dict[str, type[Section]] = {
    model.__name__: model
    for model in (Config, *(part for path in all_fields() for part in section_classes(annotation_of(path))))
    if model.__name__ in PUBLISHED
}
PROPERTIES = [(section, name) for section, properties in PUBLISHED.items() for name in properties]


def test_the_fields_say_which_names_are_published() -> None:
    places = {(place, section) for place, sections in PLACES.items() for section in sections}
    leaves = {
        f"{place}.{name}".removeprefix(".")
        for place, section in places
        for name, published in PUBLISHED[section].items()
        if not published.is_section
    }
    assert published_keys() == leaves


def place_of(section: str) -> str:
    return next(place for place, sections in PLACES.items() if section in sections)


def test_the_page_is_covered_whole() -> None:
    """20 sections (the root among them), 205 properties, 20 of them tables."""
    assert PUBLISHED.keys() == SECTIONS.keys()
    assert len(PROPERTIES) == 205
    tables = [name for section, name in PROPERTIES if PUBLISHED[section][name].is_section]
    assert len(tables) == 20
    assert {name for sections in PLACES.values() for name in sections} == PUBLISHED.keys()


def test_published_names_and_defaults_are_ours() -> None:
    check_each(PROPERTIES, _check_default)


def _check_default(case: tuple[str, str]) -> None:
    section, name = case
    published, ours = PUBLISHED[section][name], SECTIONS[section]
    if published.is_section:
        classes = {SECTIONS[part] for part in published.type.split(" | ") if part != "null"}
        field = ours.model_fields[name].annotation
        found = list(section_classes(field))
        assert all(any(issubclass(ours, theirs) for ours in found) for theirs in classes)
        return
    made = ours.model_validate({"type": "sft"}) if section == "SFTDataConfig" else ours()
    expected = published.default
    key = f"{place_of(section)}.{name}"
    if deviation := deviation_of(key):
        assert deviation.theirs == expected
        assert deviation.reason.endswith(".")
        expected = {
            "train.train_batch_per_replica": 16,
            "train.transfer_dtype": None,
            "policy.parallelism.pp_dynamic_shape": True,
        }[key]
    value = getattr(made, name)
    assert (type(value), value) == (type(expected), expected), name


def test_published_types_are_accepted() -> None:
    """Whatever JSON type the page allows for a property, ours allows too (with its choices and bounds)."""
    check_each(PROPERTIES, _check_type)


@cache
def _schema_of(section: str) -> dict[str, Any]:
    return SECTIONS[section].model_json_schema()


def _check_type(case: tuple[str, str]) -> None:
    section, name = case
    published = PUBLISHED[section][name]
    if published.is_section:
        return
    schema = _schema_of(section)
    ours = _json_types(schema["properties"][name], schema.get("$defs", {}))
    theirs = set(published.type.split(" | "))
    if "array" not in " ".join(ours):
        assert not any(kind.startswith("array") for kind in theirs)
    assert theirs <= ours | ({"integer"} if "number" in ours else set()), (theirs, ours)


def _json_types(node: dict[str, Any], defs: dict[str, Any]) -> set[str]:
    """The JSON types of a schema node: `string`, `array of number`, `object of boolean` …"""
    if "$ref" in node:
        return _json_types(defs[node["$ref"].rpartition("/")[2]], defs)
    for union in ("anyOf", "oneOf"):
        if union in node:
            return {kind for part in node[union] for kind in _json_types(part, defs)}
    kind = node.get("type") or {str: "string", bool: "boolean"}[type(node.get("const", node.get("enum", [""])[0]))]
    inner = node.get("items") if kind == "array" else node.get("additionalProperties")
    if isinstance(inner, dict):
        return {f"{kind} of {item}" for item in _json_types(inner, defs)}
    return {kind}


def test_sections_stand_where_they_were_published() -> None:
    config = Config.model_validate({"policy": {"lora": {}}})
    for place, sections in PLACES.items():
        value: Any = config
        for part in place.split(".") if place else []:
            value = getattr(value, part)
        assert isinstance(value, SECTIONS[sections[0]]), place
    assert Config().policy.lora is None
    assert config.custom == {}


def test_every_key_says_what_it_is_for() -> None:
    for path in all_fields():
        section = annotation_of(path[:-1]) if path[:-1] else Config
        models = [section] if isinstance(section, type) else section.__args__
        for model in models:
            fields = getattr(getattr(model, "__origin__", model), "model_fields", {})
            if path[-1] in fields:
                assert (fields[path[-1]].description or "").strip().endswith("."), path


def test_defaults_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().train.epoch = 3  # type: ignore[misc]
    Config().custom["x"] = 1
    assert Config().custom == {}
