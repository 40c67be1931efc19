"""The meshes: each file cuts one policy replica and changes nothing else, and the page lists it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from schema.config import check_warnings
from schema.config.layout import policy_layout
from schema.config.loading.load import load
from tests.e2e.program import ROOT

MESHES = ROOT / "examples" / "parallel"
BASE = ROOT / "examples" / "recipes" / "base.toml"
ADAPTERS = MESHES / "lora.toml"
FILES = sorted(set(MESHES.glob("*.toml")) - {ADAPTERS})


def model_for(path: Path) -> list[str]:
    """The base's has no experts."""
    return ['policy.model_name_or_path="owner/mixture"'] if path.stem == "ep" else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_mesh_is_sound_and_takes_two_ranks(path: Path, project: Path) -> None:
    found = load([BASE, path], model_for(path))
    assert found.warnings + check_warnings(found.config) == []
    assert policy_layout(found.config).size == 2
    assert tomllib.loads(path.read_text()).keys() == {"policy"}
    assert f"[{path.name}]({path.name})" in (MESHES / "README.md").read_text()


@pytest.mark.parametrize("path", [ADAPTERS, *FILES], ids=lambda path: path.stem)
def test_adapters_go_with_every_mesh(path: Path, project: Path) -> None:
    found = load([BASE, path, ADAPTERS], model_for(path))
    assert found.warnings + check_warnings(found.config) == []
    assert found.config.policy.lora is not None
    assert f"[{ADAPTERS.name}]({ADAPTERS.name})" in (MESHES / "README.md").read_text()
