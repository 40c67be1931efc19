"""A whole job whose weights travel through a bucket behind a network that breaks one request in four."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.client import Client
from controller.client import calls as api
from schema.wire.messages import PublicationInfo
from tests.e2e import versions
from tests.e2e.held import go_on
from tests.e2e.program import LONG, Program, check_ledger
from tests.e2e.versions import check_equal, newest_of, weights_of
from tests.support.faulty_store import FaultyStore, faulty_store
from tests.support.objects import ObjectStore, running_objects
from tests.weight_sync.stores.store_material import use
from weight_sync import open_store

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * LONG)]

BUCKET, PREFIX = "cosmos-weights", "jobs/shared"
STEPS, HELD, RATE = 14, 10, 1 / 4
KEYS = f"""
store = "s3://{BUCKET}/{PREFIX}"
checksum_interval = 1
anchor_interval = 6
keep = 2
host_cache = "{{cache}}"
"""


def job(folder: Path, model: Path, *, steps: int, held_at: int) -> Path:
    """With a copy of its own."""
    (folder / "cache").mkdir(mode=0o700)
    keys = KEYS.format(cache=folder / "cache")
    return versions.job(folder, model, steps=steps, held_at=held_at, keys=keys)


def others(objects: ObjectStore) -> dict[str, bytes]:
    """Other objects of the bucket: another job's version, and things that are not weights."""
    version = f"{PREFIX}/other-job.t0-v00000003-0123456789abcdef"
    found = {
        f"{version}/manifest.json": b"{}",
        f"{version}/00000.safetensors": b"weights of another job",
        f"{PREFIX}/data/rows.parquet": b"data",
        "outputs/final/model.safetensors": b"a model",
    }
    for key, body in found.items():
        objects.client().put_object(Bucket=BUCKET, Key=key, Body=body)
    return found


def until_served(program: Program, version: int) -> list[PublicationInfo]:
    """Wait until the engine serves a version, with the trainer's checksum."""

    def look(client: Client) -> list[PublicationInfo] | None:
        found = client.send(api.publications())
        served = [info for info in found if info.publication.version == version]
        return found if any(update.checked for info in served for update in info.updates) else None

    return program.until(f"version {version} is served", look)


def test_a_job_over_a_bucket_that_fails_completes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_objects(BUCKET) as objects, faulty_store(objects, seed=5, rate=RATE) as front:
        use(front.environment, monkeypatch)
        foreign = others(objects)
        with Program(job(tmp_path, model, steps=STEPS, held_at=HELD)) as program:
            found = until_served(program, HELD)
            check_deltas(found)
            _away_for_a_while(program, front)
            summary = program.finish()
        check_ledger(summary, 0, trained=STEPS * 4)
        assert sum(front.happened.values()) > 20
        assert len(front.happened) > 5, "faults of all kinds"
        assert not list((program.run_dir / "weights").glob("*")), "nothing went another way"
        front.calm()
        store = open_store(f"s3://{BUCKET}/{PREFIX}")
        newest = newest_of(program, store)
        assert newest.version == STEPS
        check_equal(program, weights_of(tmp_path / "late", store, newest))
        left = [name for name in store.versions() if not name.startswith("other-job.")]
        assert len(left) < STEPS, "old versions were removed"
        for key, body in foreign.items():
            assert objects.read(BUCKET, key) == body


def check_deltas(found: list[PublicationInfo]) -> None:
    """All but the first version travelled as deltas, small ones, and what is served is what was trained."""
    by_version = {info.publication.version: info for info in found}
    assert by_version[0].publication.kind == "full"
    deltas = [info for info in found if info.publication.kind == "delta"]
    assert len(deltas) >= HELD - 2
    densities = [info.density for info in deltas if info.density is not None]
    assert len(densities) == len(deltas)
    assert 0 < max(densities) < 0.2, densities
    assert min(densities[1:]) > 0, densities
    assert all(info.ratio is not None and info.ratio < 0.5 for info in deltas)
    assert all(update.checked is not False for info in found for update in info.updates)
    assert any(update.mode == "in_place" for info in deltas for update in info.updates)


def _away_for_a_while(program: Program, front: FaultyStore) -> None:
    """The store answers nothing while the next version falls due: the job says so, waits, and goes on."""
    front.fail("503", times=10**6)
    go_on(program.config)

    def reported(client: Client) -> bool:
        return "has failed for" in (client.send(api.job()).last_error or "")

    program.until("the job reports it", reported)
    front.calm()
    front.rate = RATE


@pytest.mark.soak
def test_a_bucket_that_is_not_there_ends_the_job_with_the_remedy(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_objects() as objects:
        use(objects.environment, monkeypatch)
        with Program(job(tmp_path, model, steps=2, held_at=2)) as program:
            assert program.wait() != 0
        assert "no such bucket: create it, or correct weight_sync.store" in program.output()
