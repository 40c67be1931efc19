from __future__ import annotations

from pathlib import Path

import pytest

from policy_worker.weights.publication_record import RECORD, PublicationRecord, read_record
from policy_worker.weights.release import encoding_threads
from weight_sync import DirectoryStore
from weight_sync.stores import version_name


def test_what_an_earlier_process_published_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / RECORD
    assert read_record(path) == {}
    lines = [(1, "a"), (2, "b"), (2, "c")]  # a delta, and its anchor
    text = "".join(f'{{"id": {number}, "uri": "{name}/manifest.json"}}\n' for number, name in lines)
    path.write_text(text + '{"id": 3, "u')
    assert read_record(path) == {1: ["a/manifest.json"], 2: ["b/manifest.json", "c/manifest.json"]}
    assert "damaged line" in caplog.text


def test_files_that_could_not_be_removed_in_time_go_with_the_next_trainer(tmp_path: Path) -> None:
    """Nobody tells them a second time: neither a trainer that is killed, nor one whose store fails, forgets."""
    store, uris = DirectoryStore(tmp_path / "store"), []
    for version in range(4):
        name = version_name(0, version, "job")
        with store.stage(name) as stage:
            with stage.create("manifest.json"):
                pass
            stage.commit()
        uris.append(f"{name}/manifest.json")
    record = PublicationRecord(tmp_path / RECORD, store, "job")
    for number, uri in enumerate(uris[:3]):
        record.remember(number, uri)
    record.attach(1, uris[3])
    record.release([0, 7])
    store.root.rename(tmp_path / "away")
    store.root.touch()
    record.remove()
    store.root.unlink()
    (tmp_path / "away").rename(store.root)
    assert len(store.versions()) == 4
    record.remove()
    assert len(store.versions()) == 3
    record.release([1, 2])  # and killed

    successor = PublicationRecord(tmp_path / RECORD, store, "job")
    assert successor.newest == 2
    successor.tidy(None)
    assert store.versions() == []
    assert read_record(tmp_path / RECORD) == {0: [], 1: [], 2: []}


@pytest.mark.parametrize(
    ("cores", "ranks_here", "threads"), [(96, 8, 8), (96, 1, 8), (16, 8, 2), (4, 8, 1), (2, 1, 2)]
)
def test_ranks_of_one_machine_share_its_cores_to_encode(cores: int, ranks_here: int, threads: int):
    """And not with the ranks of other machines, which have cores of their own."""
    assert encoding_threads(cores, ranks_here) == threads
