"""The recipes: each is sound over its base, all estimators and losses have one, and in `make soak` each runs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from schema.config import check_warnings
from schema.config.algorithms import ESTIMATORS, LOSSES
from schema.config.loading.load import LoadedConfig, load
from tests.e2e.program import ROOT, command

RECIPES = ROOT / "examples" / "recipes"
BASE, SUPERVISED = RECIPES / "base.toml", RECIPES / "sft.toml"
FILES = sorted(RECIPES.glob("*.toml"))
LAID_OVER = [path for path in FILES if path not in (BASE, SUPERVISED)]


def layers(path: Path) -> list[Path]:
    """The files that make a job of a recipe."""
    return [BASE, path] if path in LAID_OVER else [path]


def loaded(path: Path) -> LoadedConfig:
    return load(layers(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_is_sound(path: Path, project: Path) -> None:
    found = loaded(path)
    assert found.warnings + check_warnings(found.config) == []
    if path in LAID_OVER:
        assert found.config != loaded(BASE).config or path.stem == "grpo"
        of_algorithms = {"train", "critic", "teacher", "rollout", "validation"}
        assert tomllib.loads(path.read_text()).keys() <= of_algorithms, "model and machine are the base's"


def test_every_estimator_and_every_loss_has_a_recipe(project: Path) -> None:
    policies = [loaded(path).config.grpo for path in LAID_OVER]
    assert {policy.advantage_estimator for policy in policies} == ESTIMATORS.keys()
    assert {policy.variant for policy in policies} == LOSSES.keys()


def test_the_page_of_algorithms_links_each_and_each_names_its_source() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    for path in LAID_OVER:
        comment = path.read_text().partition("\n\n")[0]
        assert all(line.startswith("#") for line in comment.splitlines())
        assert f"(../examples/recipes/{path.name})" in page, path.name


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the recipes begin with: one that never answers right has no groups to keep."""
    from benchmarks.jobs import warm_model

    return warm_model(tmp_path_factory.mktemp("warm"))


@pytest.mark.soak
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_trains_two_steps(path: Path, warm: Path, tmp_path: Path) -> None:
    settings = {
        "policy.model_name_or_path": str(warm),
        "train.output_dir": str(tmp_path),
        "train.timestamp": "run",
        "train.max_num_steps": 2,
        "train.optm_warmup_steps": 0,
        "validation.dataset.options.n": 32,
    }
    if "teacher" in tomllib.loads(path.read_text()):
        settings["teacher[0].model"] = str(warm)
    files = [part for file in layers(path) for part in ("--config", file)]
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    ended = command(*files, *changes)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [step["step"] for step in summary["steps"]] == [0, 1]
    assert all(step["metrics"]["grad_norm"] > 0 for step in summary["steps"])
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
