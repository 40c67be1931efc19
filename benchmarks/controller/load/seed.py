"""Fill a ledger: `python -m benchmarks.controller.load.seed` runs the controller's own code, without HTTP.

Reads {"run_dir", "redis_url", "groups", "train"} from stdin. Groups are leased and pushed through the ledger; with
`train` they are trained too, so that the ledger holds their history, else all of them wait in the queue. What
changes is staged and flushed as the service does it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import uvloop

from benchmarks.controller.load.bodies import make_sample
from controller.ledger.assembly import Assembled
from controller.server import ServerSettings
from controller.state.job import JobState
from controller.store import StateStore
from schema.wire.sample import SampleHeader

CHUNK = 200
REPLICA = "seeder"


async def fill(run_dir: Path, redis_url: str, groups: int, train: bool) -> None:
    """Lease and push `groups` groups, and train them if asked to."""
    environ = {f"COSMOS_TOKEN_{role}": f"{role}-token-of-the-load".lower() for role in ("USER", "ROLLOUT", "POLICY")}
    settings = ServerSettings.read(run_dir, None, 0, {**environ, "COSMOS_REDIS_URL": redis_url})
    _write_job_id(settings)
    store, saved = await StateStore.open(redis_url, prefix=settings.config.redis.key_prefix, job_id=settings.job_id)
    job = JobState(settings.config, job_id=settings.job_id, run_dir=run_dir, store=store, saved=saved)
    done = 0
    while done < groups:
        version = job.progress.committed
        done += _push_some(job, version, min(CHUNK, groups - done))
        while train and _train_one(job):
            pass
        await job.save()
    await store.close()


def _push_some(job: JobState, version: int, count: int) -> int:
    ledger, now = job.require_ledger(), job.clock()
    decision = ledger.lease(REPLICA, f"request-{ledger.table.frontier}", version, version, count, now)
    assert decision.groups, decision.refusal
    headers = _headers(job, version)
    for group in decision.groups:
        assert group.lease_id is not None
        lease_id = group.lease_id
        for header in headers:
            outcome = ledger.push(group.id, lease_id, header.index, header, 42)
            assert outcome.accepted, outcome
    return len(decision.groups)


def _headers(job: JobState, version: int) -> list[SampleHeader]:
    n_samples = job.config.rollout.n_generation
    return [make_sample(index, version, 512).header for index in range(n_samples)]


def _train_one(job: JobState) -> bool:
    ledger = job.require_ledger()
    if ledger.table.ready < job.config.groups_per_step or not isinstance(ledger.assemble(job.clock()), Assembled):
        return False
    ledger.commit(ledger.table.committed)
    return True


def _write_job_id(settings: ServerSettings) -> None:
    content = {"url": "", "pid": os.getpid(), "job_id": settings.job_id}
    (settings.run_dir / "controller.json").write_text(json.dumps(content))


if __name__ == "__main__":
    request = json.load(sys.stdin)
    uvloop.run(fill(Path(request["run_dir"]), request["redis_url"], request["groups"], request["train"]))
