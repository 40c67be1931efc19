"""The JSON schema: up to date, valid, and of one mind with the loader about single keys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

from schema.config import Config, SFTDataConfig
from schema.config.loading.explain import section_classes
from schema.config.reference.export import DIALECT, FILE_NAME, json_schema, schema_text
from tests.schema.config_samples import GRPO, SFT

DEFS = json_schema()["$defs"]
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


def test_the_file_is_up_to_date() -> None:
    assert (ROOT / FILE_NAME).read_text(encoding="utf-8") == schema_text(), (
        "run python -m schema.config.reference.export"
    )


def test_the_command_writes_it(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "schema.config.reference.export", str(tmp_path / "x.json")],
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == json_schema()


def test_head() -> None:
    schema = json_schema()
    assert schema["$schema"] == DIALECT
    assert schema["title"] == "cosmos-launch configuration"
    assert schema["$defs"]["RolloutConfig"]["properties"]["backend"]["enum"] == ["vllm", "transformers"]


@pytest.mark.parametrize("data", [{}, GRPO, SFT], ids=["empty", "grpo", "sft"])
def test_sound_configurations_are_valid(validator: jsonschema.Draft202012Validator, data: dict[str, Any]) -> None:
    validator.validate(data)
    validator.validate(Config.model_validate(data).to_dict())


ODD = [
    "x", "", 0, 1, -(10**9), 10**30, 0.25, -0.5, True, False, [], [1], ["x"], [[1]], {}, {"x": 1}, {"x": "y"},
]  # fmt: skip
"""Values of every kind; 3.0 is left out, which JSON schema calls an integer."""


def test_every_key_is_judged_alike(validator: jsonschema.Draft202012Validator) -> None:
    """Schema and tree agree about each key of each section with each odd value."""
    judged = 0
    for model in sections():
        judge = validator.evolve(schema={"$ref": f"#/$defs/{model.__name__}", "$defs": DEFS})
        needed = {"type": "sft"} if model is SFTDataConfig else {}
        assert not judge.is_valid({**needed, "epohc": 1}), f"{model.__name__} takes unknown keys"
        for name in model.model_fields:
            for value in ODD:
                data = {**needed, name: value}
                try:
                    model.model_validate(data)
                    accepted = True
                except ValidationError:
                    accepted = False
                assert judge.is_valid(data) == accepted, f"{model.__name__}.{name} = {value!r}"
                judged += 1
    assert judged > 5000


def sections(model: type[BaseModel] = Config) -> dict[type[BaseModel], None]:
    """The classes of all sections below one, each once."""
    found: dict[type[BaseModel], None] = {}
    for info in model.model_fields.values():
        for section in section_classes(info.annotation):
            found |= {section: None, **sections(section)}
    return found


def test_a_train_policy_is_judged_by_its_type(validator: jsonschema.Draft202012Validator) -> None:
    """A wrong key is named, of the class that `type` chooses; without `type` that is grpo."""
    for written, wrong in (
        ({"type": "grpo", "epsilon": 0.2}, "'epsilon' was unexpected"),
        ({"epsilon": 0.2}, "'epsilon' was unexpected"),
        ({"type": "sft", "variant": "grpo"}, "'variant' was unexpected"),
        ({"type": "sft", "mini_batch": 0}, "0 is less than the minimum of 1"),
        ({"type": "ppo"}, "'ppo' is not one of ['grpo', 'sft']"),
    ):
        errors = list(validator.iter_errors({"train": {"train_policy": written}}))
        assert any(wrong in error.message for error in errors), errors
        assert not any("not valid under" in error.message for error in errors)
