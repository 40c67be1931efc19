"""`train.deterministic` says what it cannot reach, and nothing where it can."""

from __future__ import annotations

from typing import Any

import pytest

from schema.config import Config
from schema.config.rules.timing import TIMING_WARNINGS
from tests.schema.config_samples import GRPO, SFT, changed

EXACT = {
    "train.deterministic": True,
    "rollout.backend": "transformers",
    "train.train_policy.allowed_outdated_steps": 0,
    "policy.parallelism.n_init_replicas": 1,
}


def related(base: dict[str, Any], values: dict[str, Any]) -> set[str]:
    config = Config.model_validate(changed(base, **{key.replace(".", "__"): value for key, value in values.items()}))
    found = [problem for rule in TIMING_WARNINGS for problem in rule(config)]
    assert all(problem.key == "train.deterministic" and problem.hint for problem in found)
    return {key for problem in found for key in problem.related}


def test_an_exact_run_is_not_warned_of() -> None:
    assert related(GRPO, EXACT) == set()
    assert related(SFT, {"train.deterministic": True}) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.backend", "vllm"),
        ("train.train_policy.allowed_outdated_steps", 2),
        ("controller.oversample", 1.5),
        ("controller.on_stale", "drop"),
        ("train.compile", True),
    ],
)
def test_what_lets_chance_in_is_named(key: str, value: Any) -> None:
    assert related(GRPO, {**EXACT, key: value}) == {key}
    assert related(GRPO, {**EXACT, key: value, "train.deterministic": False}) == set()
