"""A run that older code has left goes on: its checkpoint, its run directory and its records in Redis are read.

`stored_run_program` has written it; the commit stands in the archive's name. A change of format that makes these
fail leaves the runs of users behind: see "Formats" in CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from controller.client import calls as api
from policy_worker.checkpoints.find import choose, snapshot_of
from policy_worker.checkpoints.layout import Manifest
from policy_worker.checkpoints.load import load
from policy_worker.checkpoints.state import capture_rng, state_to_save
from policy_worker.errors import CheckpointError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.trainer import Trainer
from policy_worker.worker import make_trainer
from schema.config import Config
from schema.wire.sample import decode_sample
from tests.policy_worker.checkpoint_material import ALL
from tests.policy_worker.checkpoints.stored_run_program import SAVED, STEPS, answers_of, facts_of
from tests.policy_worker.player import Player
from tests.policy_worker.ranks import start_ranks, wait_ranks
from tests.support.controller import TOKENS, running_controller
from tests.support.served import served_controller
from tests.support.valkey import ValkeyServer

ARCHIVE = Path(__file__).with_name("stored_run_fde85c43.zip")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The stored run directory; the model is next to it."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["policy"]["model_name_or_path"] = str(tmp_path / "model")
    path.write_text(json.dumps(config))
    return path.parent


@pytest.fixture
def recorded(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir.parent / "recorded.json").read_text())
    return content


@pytest.fixture
def redis_url(run_dir: Path, valkey: ValkeyServer) -> str:
    """A server with the stored records."""
    records: dict[str, str | dict[str, str]] = json.loads((run_dir.parent / "redis.json").read_text())
    with valkey.client() as client:
        client.flushall()
        for key, content in records.items():
            if isinstance(content, dict):
                client.hset(key, mapping={name: row.encode("latin-1") for name, row in content.items()})
            else:
                client.set(key, content.encode("latin-1"))
    return valkey.url


def recorded_part(answer: Any, recorded: Any) -> Any:
    """`answer` without the fields that the stored run's code did not know."""
    if isinstance(answer, dict) and isinstance(recorded, dict):
        return {name: recorded_part(answer[name], field) for name, field in recorded.items() if name in answer}
    return answer


def resume(run_dir: Path, group: RankGroup) -> tuple[Trainer, Manifest]:
    config = Config.model_validate_json((run_dir / "config.json").read_bytes())
    resumption = choose(group, config, run_dir)
    assert resumption is not None
    assert (resumption.step, resumption.own) == (SAVED, True)
    trainer = make_trainer(config, group, 2 * STEPS, resumption)
    load(resumption, trainer, config, None)
    snapshot = snapshot_of(resumption.found)
    assert snapshot is not None
    assert (snapshot.committed_steps, snapshot.frontier, snapshot.untrained) == (2, 6, [4, 5])
    return trainer, resumption.found.manifest


def test_a_trainer_takes_all_of_its_checkpoint(
    run_dir: Path, recorded: dict[str, Any], group: RankGroup, caplog: pytest.LogCaptureFixture
):
    """Weights, moments, critic, reference, moving average bit for bit; written by two ranks, read by one."""
    trainer, manifest = resume(run_dir, group)
    states = state_to_save(trainer, ALL)
    found = {key: facts_of(tensor) for state in states.values() for key, tensor in state.items()}
    assert found == recorded["tensors"]
    assert set(states) == {"model", "optimizer", "critic", "critic_optimizer", "reference", "ema"}
    assert (manifest.world, manifest.timeline, manifest.lineage, manifest.epochs) == (2, 0, [(0, 0)], 0)
    assert trainer.kl_coefficient == manifest.kl_coefficient != 0.1
    assert (trainer.schedule.total_steps, trainer.optimizer.peak_lr) == (2 * STEPS, 1e-3)
    saved = load_file(run_dir / "checkpoints" / "step-00000002" / "rng-00000.safetensors")
    now = capture_rng(torch.device("cpu"))
    assert all(np.array_equal(now[name], states_of) for name, states_of in saved.items())
    assert "differ" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"], caplog.text


@pytest.mark.parametrize(
    "file", ["manifest.json", "optimizer-00001.safetensors", "ledger.json", "rng-00000.safetensors"]
)
def test_a_changed_byte_is_seen(run_dir: Path, group: RankGroup, file: str):
    path = run_dir / "checkpoints" / "step-00000002" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        resume(run_dir, group)


def test_a_controller_takes_over_its_records(run_dir: Path, recorded: dict[str, Any], redis_url: str):
    """Steps, groups, publications and the payloads of groups that are not trained."""
    with served_controller(run_dir, redis_url) as served:
        with served.client() as client:
            answers = answers_of(client)
        sample = decode_sample(served.run(served.controller.samples.sample("e0-p6", 3)))
    del recorded["tensors"]
    assert recorded_part(answers, recorded) == recorded
    assert answers["ledger"]["sources"] == [], "a job of one source"
    assert (sample.header.index, sample.header.newest_version, sample.header.score) == (3, 2, 0.0)
    assert sample.token_ids.tolist() == [1, 2, 9, 14, 25, 31, 40, 43, 37, 8]


@pytest.mark.slow
def test_the_job_goes_on_to_its_end(run_dir: Path, recorded: dict[str, Any], redis_url: str):
    """From the checkpoint of two steps, with the third trained again."""
    with running_controller(run_dir, redis_url) as controller:
        environment = {"COSMOS_CONTROLLER_URL": controller.url, "COSMOS_TOKEN": TOKENS["policy"]}
        ranks = start_ranks(1, ["policy_worker"], COSMOS_REPLICA_NAME="policy-0", **environment)
        with Player(controller.url, TOKENS["rollout"]) as player, controller.client() as client:
            ((code, output),) = wait_ranks(ranks)
            assert code == 0, f"{output}\n{player.error}"
            player.finish()
            status, ledger = client.send(api.job()), client.send(api.ledger())
            losses = [record.metrics["loss"] for record in client.send(api.steps())]
    assert "resumed from" in output
    assert (status.phase, status.step, status.job_id) == ("finished", 2 * STEPS, recorded["job"]["job_id"])
    assert losses[:SAVED] == recorded["losses"][:SAVED]
    assert losses[SAVED] == pytest.approx(recorded["losses"][SAVED], rel=1e-5), "the same groups and weights"
    assert (ledger.over_bound, ledger.states["trained"] + ledger.states["durable"]) == (0, 4 * STEPS)
