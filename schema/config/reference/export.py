"""The configuration as a JSON schema (draft 2020-12), for editors and other tools: `config.schema.json`.

`python -m schema.config.reference.export` writes it, here or to a FILE; a test compares it with the tree. What a
schema can say (names, types, choices, bounds, defaults, descriptions) is in it; what sections must agree on: `rules`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from schema.config.loading.layers import REPLACE
from schema.config.root import Config
from schema.config.sections.unsupported import DESCRIPTION, TABLE

FILE_NAME = "config.schema.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "cosmos-launch configuration"
_REPLACE = "Tables that this file replaces as a whole where the files before it have them; others are merged."


def json_schema() -> dict[str, Any]:
    """The schema as a JSON-compatible value."""
    schema = Config.model_json_schema(mode="validation")
    _tidy(schema)
    policy = schema["$defs"]["TrainingConfig"]["properties"]["train_policy"]
    policy |= _by_type(policy.pop("oneOf"))
    schema["properties"][REPLACE] = {"description": _REPLACE, "type": "array", "items": {"type": "string"}}
    schema["properties"][TABLE] = {"description": DESCRIPTION, "not": {}}  # editors mark it and say why
    return {"$schema": DIALECT, **schema, "title": TITLE}


def _by_type(classes: list[dict[str, str]]) -> dict[str, Any]:
    """Judge a train policy by the class that its `type` names: `oneOf` can only say that it is neither of the two."""
    grpo, sft = classes
    return {
        "type": "object",
        "properties": {"type": {"enum": ["grpo", "sft"]}},
        "if": {"properties": {"type": {"const": "sft"}}, "required": ["type"]},
        "then": sft,
        "else": grpo,
    }


def schema_text() -> str:
    """The schema as the text of `config.schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _tidy(node: Any) -> None:
    """Leave out the titles that are made from names: they say nothing that the names do not."""
    if isinstance(node, list):
        for item in node:
            _tidy(item)
    elif isinstance(node, dict):
        for field in node.get("properties", {}).values():
            field.pop("title", None)
        for value in node.values():
            _tidy(value)


def main(arguments: list[str]) -> None:
    """Write the schema to the file that is named; without one, into the current directory."""
    Path(arguments[0] if arguments else FILE_NAME).write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
