"""Whoever is killed, the same bits come out; for longer: `python -m tests.chaos.exactness --seeds N`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.exactness import CSV, Kill, check_same, exact_mixture, run
from tests.support.objects import running_objects

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


SOURCES = ("file", "class", "other")


def folder(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir()
    return path


def test_reinforcement_ends_with_the_same_bits(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout replica dies at work (after a step: earlier it may not have registered), the trainer between two
    checkpoints; then all processes at once, as in a power cut: the launcher that resumes the run says that all have
    ended, so no replica waits for its name. The algorithm is PPO, and the trainer also dies in its first steps after
    the critic has made its optimizer step and before the policy has made its own. The data are three sources with
    shares: a file, a class, and one of a bucket, which is away in the second run."""
    with running_objects("rows") as objects:
        objects.client().put_object(Bucket="rows", Key="other.csv", Body=CSV.encode())
        for name, value in objects.environment.items():
            monkeypatch.setenv(name, value)
        calm = run(exact_mixture(folder(tmp_path, "calm"), model, steps=6, other="s3://rows/other.csv"))
    assert calm.ledger["dropped"].get("zero_variance", 0) > 0, "groups without signal are replaced"
    assert set(calm.ledger["staleness"]) == {"0"}, "on-policy"
    assert {part["name"]: part["trained"] > 0 for part in calm.ledger["sources"]} == dict.fromkeys(SOURCES, True)
    kills = [Kill("rollout_worker", 1, 0.0), Kill("policy_worker", 1, 0.2), Kill("everything", 3, 0.3)]
    config = exact_mixture(folder(tmp_path, "disturbed"), model, steps=6, other="s3://rows/other.csv", dies=True)
    disturbed = run(config, kills)
    assert len(disturbed.kills) == len(kills), "the run was over before"
    assert not (tmp_path / "disturbed" / "die").exists(), "the trainer has not died in its loss"
    assert all(name in calm.steps[-1]["metrics"] for name in ("critic/loss", "critic/grad_norm"))
    check_same(calm, disturbed)
    assert disturbed.ledger["sources"] == calm.ledger["sources"]
    orders = [sorted((tmp_path / name / "run" / "data" / "passes").iterdir()) for name in ("calm", "disturbed")]
    assert [path.read_bytes() for path in orders[0]] == [path.read_bytes() for path in orders[1]] != []
    log = (tmp_path / "disturbed" / "run" / "logs" / "rollout-0.log").read_text()
    assert "registered as rollout-0.3" in log
    assert "waiting for the name" not in log
