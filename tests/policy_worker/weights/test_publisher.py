"""Before training the trainer proves that weights can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy_worker.errors import SettingsError
from policy_worker.weights.publisher import prove
from tests.support.objects import ObjectStore
from weight_sync import DirectoryStore, open_store

BUCKET = "cosmos-proofs"


@pytest.fixture
def objects(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return object_store


def test_a_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prove(DirectoryStore(tmp_path / "store"), strict=True)
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"weight_sync\.store: .*file.* cannot be written: .*name another"):
        prove(DirectoryStore(tmp_path / "file"), strict=True)
    prove(DirectoryStore(tmp_path / "file"), strict=False)
    assert "weights will not be published as things stand" in caplog.text


def test_a_bucket(objects: ObjectStore) -> None:
    prove(open_store(f"s3://{BUCKET}/some/where"), strict=True)
    assert objects.keys(BUCKET) == []
    with pytest.raises(SettingsError, match=r"weight_sync\.store: s3://nowhere/x cannot be written: .*create it"):
        prove(open_store("s3://nowhere/x"), strict=True)
