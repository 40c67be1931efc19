"""`cosmos-launch scale`, and what `status` says of it, against real controllers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.cli import Answer, cosmos
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.served import ServedController, served_controller
from tests.support.valkey import ValkeyServer


@pytest.fixture
def served(tmp_path: Path, valkey: ValkeyServer) -> Iterator[ServedController]:
    config = make_config(autoscale={"enable": True, "min_replicas": 1, "max_replicas": 4})
    with served_controller(make_run_dir(tmp_path / "run", config), valkey.url) as controller:
        yield controller


def asked(served: ServedController, command: str, *arguments: object) -> Answer:
    return cosmos(command, *arguments, served.url, COSMOS_TOKEN=TOKENS["user"])


def test_a_number_by_hand_counts_until_it_is_given_back(served: ServedController) -> None:
    asked(served, "scale", 3).says(0, "3 rollout replicas by request, until `cosmos-launch scale auto`; 0 are there")
    asked(served, "status").says(0, "  0 of 3 rollout replicas (autoscale: 3 by request, until it is taken back)")
    found = json.loads(asked(served, "scale", 2, "--json").stdout)
    assert (found["job"], found["desired"], found["replicas"], found["manual"]) == (served.url, 2, 0, True)
    assert served.job.scaling.autoscaler.memory.manual == 2
    asked(served, "scale", "auto").says(0, "2 rollout replicas for now: the number follows the need; 0 are there")
    assert served.job.scaling.autoscaler.memory.manual is None
    assert json.loads(asked(served, "status", "--json").stdout)["autoscale"]["manual"] is False


def test_a_number_out_of_range_is_refused_with_the_range(served: ServedController) -> None:
    for number in (0, 5):
        range_ = f"{number} replicas are out of range: autoscale.min_replicas = 1, autoscale.max_replicas = 4"
        asked(served, "scale", number).complains(1, range_)
    assert served.job.scaling.autoscaler.memory.manual is None


@pytest.mark.parametrize("number", ["many", "1.5", "²", "9" * 10, "outputs"])
def test_what_is_not_a_number_is_refused_with_the_order_of_arguments(number: str) -> None:
    cosmos("scale", number).complains(2, f"{number!r} is not a number", "cosmos-launch scale 3 RUN_DIR")


def test_a_job_that_does_not_scale_says_how_it_would(tmp_path: Path, valkey: ValkeyServer) -> None:
    run = make_run_dir(tmp_path / "run", make_config())
    with served_controller(run, valkey.url) as served:
        remedy = f"--resume {run} --set autoscale.enable=true"
        asked(served, "scale", 2).complains(1, "autoscale.enable = false", remedy)
        assert "autoscale:" not in asked(served, "status").says(0).stdout
