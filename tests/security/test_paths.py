"""Names that come over the wire or out of a file, and become paths or keys: none leads out of its place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from pydantic import ValidationError

from controller.server import StartError
from policy_worker.checkpoints.layout import Manifest
from schema.config import Config, ConfigError, check_config
from schema.wire.weights import FileEntry, Publication
from tests.controller.drivers import begin
from tests.security.conftest import read_settings
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.fetched import fetch
from tests.support.served import ServedController, served_controller
from tests.support.valkey import ValkeyServer, running_valkey
from tests.support.waiting import PATIENCE
from weight_sync import DirectoryStore, WeightError

HOSTILE = [
    "..", "../x", "../../../../etc/passwd", "/etc/passwd", "a/../b", "./a", "a//b", "a/b/c", "a\0b", "\0", "a\nb",
    ".hidden", "-rf", "~", "~root/x", "a\\b", "..\\..\\x", "\u2024\u2024/x", "\uff0e\uff0e/x", "\u202e../x",
    "%2e%2e/x",
    "x" * 5000, "file:///etc/passwd", "s3://bucket/x", " ", "a b", "$(id)", "`id`", "*", "con\r\nx: y", "{a}:b", "ä",
]  # fmt: skip


# ---- the weight store -----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "manifest.json").write_text("{}")
    root = tmp_path / "root"
    (root / "v1").mkdir(parents=True)
    (root / "v1" / "manifest.json").write_text("{}")
    os.symlink(tmp_path / "secret", root / "v1" / "link")
    os.symlink(tmp_path / "outside", root / "linked")
    return DirectoryStore(root)


def test_a_store_opens_writes_and_deletes_nothing_outside(store: DirectoryStore, tmp_path: Path) -> None:
    before = sorted(path for path in tmp_path.rglob("*"))
    for name in HOSTILE:
        for key in (name, f"{name}/manifest.json", f"v1/{name}"):
            with pytest.raises(WeightError):
                store.read(key)
        with pytest.raises(WeightError), store.stage(name):
            pass
        with pytest.raises(WeightError):
            store.delete(name)
        with pytest.raises(WeightError), store.stage("v2") as stage, stage.create(name):
            pass
        assert sorted(path for path in tmp_path.rglob("*")) == before, name


@pytest.mark.parametrize("key", ["v1/link", "linked/manifest.json"])
def test_a_store_follows_no_links(store: DirectoryStore, key: str) -> None:
    with pytest.raises(WeightError):
        store.read(key)
    assert "linked" not in store.versions()


def test_names_in_publications_and_manifests(store: DirectoryStore) -> None:
    fields = {"id": 1, "version": 1, "timeline": 0, "manifest_hash": "0", "content_hash": "0", "n_bytes": 1}
    for name in HOSTILE:
        with pytest.raises(ValidationError):
            FileEntry(name=name, n_bytes=1, hash="0")
        with pytest.raises(ValidationError):
            Publication.model_validate({**fields, "uri": name})
        made = Publication.model_construct(**fields, uri=name)  # the store does not rely on it
        with pytest.raises(WeightError):
            fetch(store, made, patience=0.0)


# ---- checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["..", "../x", "/etc/passwd", "a/../b", "./a", "a//b", "a\0b", "", "export/../../x"])
def test_files_of_a_checkpoint_lie_below_it(name: str) -> None:
    facts = {"bytes": 1, "hash": "0" * 32}
    body = {
        "step": 1, "timeline": 0, "lineage": [[0, 0]], "world": 1, "written_at": 0.0, "architecture": "X",
        "contents": [], "exported": False, "schedule": None, "data": None,
    }  # fmt: skip
    assert Manifest.model_validate({**body, "files": {"export/model.safetensors": facts}})
    with pytest.raises(ValidationError):
        Manifest.model_validate({**body, "files": {name: facts}})


# ---- the configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*HOSTILE[:-8], "a/b"])
def test_a_run_stays_below_its_output_directory(name: str) -> None:
    with pytest.raises(ConfigError):
        check_config({"train": {"timestamp": name}})


@pytest.mark.parametrize("name", ["", "a:b", "a*", "a b", "../a", "a\n", "{x}", "x" * 129])
def test_a_prefix_of_keys_is_plain(name: str) -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({"redis": {"key_prefix": name}})


@pytest.mark.parametrize("name", ["a:b", "two words", "ä", "x" * 150, "a*b", "{tag}"])
def test_a_job_id_is_plain_whatever_its_directory_is_called(tmp_path: Path, name: str) -> None:
    found = read_settings(make_run_dir(tmp_path / name, make_config())).job_id
    assert set(found) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert len(found) < 200


@pytest.mark.parametrize("text", ["../x", "a:b", "a b", "a\n", "x" * 500, "*"])
def test_a_job_id_out_of_a_file_is_checked(tmp_path: Path, text: str) -> None:
    run_dir = make_run_dir(tmp_path / "run", make_config())
    (run_dir / "job_id").write_text(text)
    with pytest.raises(StartError, match="not a job id"):
        read_settings(run_dir)


# ---- over the wire --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture(scope="module")
def served(valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    run_dir = make_run_dir(tmp_path_factory.mktemp("paths") / "run", make_config())
    with served_controller(run_dir, valkey.url) as controller:
        with controller.client("policy") as policy, controller.client("rollout") as rollout:
            begin(policy, rollout)
        yield controller


def _tree(directory: Path) -> dict[str, str]:
    """Every file below a directory, with the hash of what it holds."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def _keys(valkey: ValkeyServer) -> set[bytes]:
    with valkey.client() as client:
        return set(client.keys("*"))


def _asked(part: str) -> list[tuple[str, str, str]]:
    """Role, method and path of every request that names something in its path."""
    return [
        ("user", "GET", f"/v1/groups/{part}"), ("user", "GET", f"/v1/samples/{part}/0"),
        ("user", "POST", f"/v1/replicas/by-name/{part}/exited"), ("rollout", "DELETE", f"/v1/leases/{part}"),
        ("rollout", "POST", f"/v1/replicas/{part}/heartbeat"), ("rollout", "POST", f"/v1/groups/{part}/samples/0"),
        ("rollout", "DELETE", f"/v1/replicas/{part}?incarnation=1"), ("user", "POST", f"/v1/replicas/{part}/drain"),
        ("policy", "GET", f"/v1/steps/{part}/batch?policy_epoch=1"),
        ("policy", "GET", f"/v1/checkpoints/{part}/ledger"),
    ]  # fmt: skip


def _without_events(tree: dict[str, str]) -> dict[str, str]:
    """The controller writes its events whenever they happen."""
    return {name: digest for name, digest in tree.items() if name != "run/events.jsonl"}


def test_names_in_requests_touch_neither_files_nor_foreign_keys(
    served: ServedController, valkey: ValkeyServer
) -> None:
    run_dir = served.job.run_dir
    files, keys, job = _tree(run_dir.parent), _keys(valkey), f"cosmos:{served.job.job_id}:".encode()
    bearer = {role: {"authorization": f"Bearer {token}"} for role, token in TOKENS.items()}
    with httpx.Client(base_url=served.url, trust_env=False, timeout=PATIENCE) as http:
        for index, name in enumerate(HOSTILE):  # one to three of the ten requests for each
            for role, method, path in _asked(quote(name, safe=""))[index % 10 :: 4]:
                answer = http.request(method, path, headers=bearer[role])
                assert answer.status_code < 500, (method, path, answer.text)
                assert "root:" not in answer.text
            body = {"request_id": "12345678", "role": "rollout", "name": name}
            assert http.post("/v1/replicas", json=body, headers=bearer["rollout"]).status_code == 422, name
    assert _without_events(_tree(run_dir.parent)) == _without_events(files)
    added = _keys(valkey) - keys
    assert all(key.startswith(job) for key in added)
    assert not any(b"payload" in key for key in added)
