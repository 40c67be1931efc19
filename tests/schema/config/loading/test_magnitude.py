"""Numbers that no computer word holds are refused before anything is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schema.config import ConfigError, check_config, load_config
from tests.schema.config_samples import GRPO, changed

HUGE = 10**4000 + 7


def refused(data: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check_config(data)
    assert caught.value.render()
    return {problem.key: problem.message for problem in caught.value.problems}


def test_huge_integers_are_refused_by_key() -> None:
    found = refused(changed(GRPO, train__train_batch_per_replica=HUGE, policy__parallelism__n_init_replicas=-HUGE))
    assert found.keys() == {"train.train_batch_per_replica", "policy.parallelism.n_init_replicas"}
    assert "an integer of 13288 bits" in found["train.train_batch_per_replica"]


@pytest.mark.parametrize("value", [[1, 2**1023], {"deep": [{"er": -(2**1023)}]}])
def test_wherever_they_stand(value: Any) -> None:
    (key,) = refused(changed(GRPO, custom={"mine": value}))
    assert key in ("custom.mine[1]", "custom.mine.deep[0].er")


def test_large_integers_are_taken() -> None:
    assert check_config(changed(GRPO, custom={"mine": [2**1023 - 1, -(2**70)]})).custom


def test_the_place_in_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"[train]\nepoch = 0x{'F' * 5000}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.toml")
    (problem,) = [problem for problem in caught.value.problems if problem.key == "train.epoch"]
    assert (problem.line, problem.column) == (2, 1)
