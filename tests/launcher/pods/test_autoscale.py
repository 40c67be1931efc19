"""`cosmos-launch autoscale`: one Deployment follows the controller, and keeps its number where it may not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.client import calls as api
from launcher.pods.autoscale import wanted
from launcher.pods.costs import ANNOTATION, changes
from schema.wire.messages.autoscale import AutoscaleStatus
from tests.controller.drivers import begin
from tests.launcher.cli import ROOT, cosmos
from tests.launcher.pods.scale_api import LABELS, scale_api
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.served import served_controller
from tests.support.valkey import running_valkey
from tests.support.waiting import PATIENCE, until


@contextmanager
def scaler(
    folder: Path, url: str, env: dict[str, str], option: str = "--deployment"
) -> Iterator[subprocess.Popen[str]]:
    """The command as the rendered pod runs it; it must end by SIGTERM."""
    costs = ",".join(f"{key}={value}" for key, value in LABELS.items())
    argv = ["autoscale", option, "run-rollout", "--namespace", "training", "--controller", url]
    argv += ["--costs", costs]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", *argv, "--interval", "0.05", "--account", str(folder)],
            env={**os.environ, **env, "COSMOS_TOKEN": TOKENS["rollout"], "PYTHONUNBUFFERED": "1"},
            cwd=ROOT,
            stdout=log,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_the_number_follows_the_controller_and_stays_while_it_is_away(tmp_path: Path) -> None:
    config = make_config(autoscale={"enable": True, "max_replicas": 4})
    run, log = make_run_dir(tmp_path / "run", config), tmp_path / "log"
    with (
        running_valkey() as redis,
        served_controller(run, redis.url) as served,
        scale_api(tmp_path, 3) as (scale, env),
    ):
        with scaler(tmp_path, served.url, env, "--leader-worker-set"):
            until(lambda: scale.replicas == 1, "the number of the start, of engines")
        scale.replicas = 3
        scale.calls.clear()
        with scaler(tmp_path, served.url, env) as process:
            until(lambda: scale.replicas == 1, "the number of the start")
            with served.client() as client, served.client("policy") as policy, served.client("rollout") as ours:
                scale.pods = {"rollout-0": {}, "rollout-1": {"mine": "kept"}, "rollout-9": {ANNOTATION: "70"}}
                _, replica = begin(policy, ours)
                replica.lease(2)
                served.job.opened_at -= 30.0
                for group in served.job.require_ledger().table.held:
                    group.leased_at -= 30.0
                scale.replicas = 5
                until(lambda: scale.replicas == 1, "the number of the start again")
                until(
                    lambda: ANNOTATION in scale.pods["rollout-0"] and scale.pods["rollout-9"][ANNOTATION] == "0",
                    "the costs, which follow the number",
                )
                costs = {name: notes.get(ANNOTATION) for name, notes in scale.pods.items()}
                assert (costs["rollout-1"], costs["rollout-9"]) == (None, "0")
                assert int(costs["rollout-0"] or 0) >= 60, "two groups, for half a minute each"
                assert scale.pods["rollout-1"] == {"mine": "kept"}
                client.send(api.scale(4))
            until(lambda: scale.replicas == 4, "the number by hand")
            scale.replicas = 2
            until(lambda: scale.replicas == 4, "somebody else's number to be taken back")
            scale.token = "a new token"
            until(lambda: "HTTP 401: Unauthorized" in log.read_text(), "a refusal of the cluster")
            (tmp_path / "token").write_text("a new token")
            served.stop()
            until(lambda: "the number stays: " in log.read_text().splitlines()[-1], "an absent controller")
            assert process.poll() is None
        said = log.read_text()
    assert scale.replicas == 4
    assert [number for method, number in scale.calls if method == "PATCH"] == [1, 1, 4, 4]
    assert "3 → 1 replicas: " in said
    assert "1 → 4 replicas: " in said


def test_costs_change_when_they_are_wrong_by_half() -> None:
    present = {"idle": 0, "right": 10, "more": 10, "less": 10, "unknown": 4, "new": 0}
    work = {"idle": 0.4, "right": 19.9, "more": 20.6, "less": 4.9, "new": 3.2}
    assert changes(present, work) == {"more": 21, "less": 5, "unknown": 0, "new": 3}
    many = changes(dict.fromkeys(map(str, range(300)), 0), {str(n): float(n) for n in range(300)})
    assert sorted(many.values()) == list(range(200, 300)), "the most wrong ones first"


def status(desired: int, **values: object) -> AutoscaleStatus:
    fields = {"enabled": True, "replicas": 1, "working": 1, "minimum": 1, "maximum": 4, "reason": "so", "since": 0.0}
    return AutoscaleStatus.model_validate(fields | {"desired": desired} | values)


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        (status(1), 1),
        (status(4), 4),
        (status(0), None),
        (status(5), None),
        (status(0, final=True), 0),
        (status(2, final=True), 2),
        (status(0, minimum=0), 0),
    ],
)
def test_only_numbers_within_the_limits_are_obeyed(asked: AutoscaleStatus, number: int | None) -> None:
    found, reason = wanted(asked)
    assert found == number
    assert reason


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    argv = ["autoscale", "--namespace", "b", "--controller", "http://127.0.0.1:1"]
    cosmos(*argv, COSMOS_TOKEN=TOKENS["rollout"]).complains(
        2, "none of --deployment, --leader-worker-set and --costs"
    )
    argv += ["--deployment", "a"]
    cosmos(*argv, COSMOS_TOKEN="").complains(2, "COSMOS_TOKEN is not set")
    token = {"COSMOS_TOKEN": TOKENS["rollout"]}
    cosmos(*argv, **token, KUBERNETES_SERVICE_HOST="").complains(2, "KUBERNETES_SERVICE_HOST")
    address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    cosmos(*argv, "--account", tmp_path, **token, **address).complains(2, f"{tmp_path} has no token")
