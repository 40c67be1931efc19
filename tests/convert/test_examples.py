"""The complete files of all systems: each key is accounted for once, what is written is sound, reasons are listed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from convert import convert
from convert.engine.model import Outcome
from convert.engine.registry import reader
from convert.engine.write import to_json, to_report, to_toml
from schema.config import Config
from schema.config.availability import UNAVAILABLE
from tests.convert.files import COSMOS, ROLL, VERL

SYSTEMS = {"verl": "verl", "roll": "roll", "cosmos": "cosmos-rl"}
KINDS = {
    "cosmos_sft": "sft", "roll_agentic": "agentic", "verl_evaluation": "evaluation", "verl_sft": "sft",
    "verl_translated": "sft",
}  # fmt: skip


@pytest.mark.parametrize("file", [*VERL, *ROLL, *COSMOS], ids=lambda file: file.stem)
def test_an_example_is_detected_and_each_of_its_keys_accounted_for(file: Path) -> None:
    found = convert(file)
    system = SYSTEMS[file.stem.partition("_")[0]]
    usual = {"verl": "rl", "roll": "rlvr", "cosmos-rl": "grpo"}[system]
    assert (found.system, found.kind) == (system, KINDS.get(file.stem, usual))
    assert not found.missing_leaves
    assert not found.repeated_leaves
    assert not found.of(Outcome.UNKNOWN)
    text, report = to_toml(found), to_report(found)
    assert [leaf for leaf in found.leaves if leaf not in text or leaf not in report] == []
    assert sum(to_json(found)["counts"].values()) == len(found.leaves)
    assert tomllib.loads(text) == found.config
    Config.model_validate({key: value for key, value in found.config.items() if key != "unsupported"})
    for entry in found.of(Outcome.FALLBACK):  # so it vanishes when its part is built
        changed = [key for key, value in entry.faithful if (key, value) not in entry.targets]
        assert changed, entry
        assert set(changed) <= UNAVAILABLE.keys(), entry
    if system != "verl":  # whose rows have reasons of their own, too
        assert {entry.note for entry in found.of(Outcome.NONE)} <= {*reader(system).unsupported.reasons.values()}
