"""Uploads to the Hugging Face hub: its own client, in a process of its own, against a server that answers like it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from policy_worker.checkpoints.uploads.hub import HubTarget
from policy_worker.errors import SettingsError
from tests.support.hub import TOKEN, Hub, running_hub
from tests.support.waiting import PATIENCE

PROGRAM = """
import logging, sys, threading
from pathlib import Path
from policy_worker.errors import SettingsError
from policy_worker.errors import UploadFailedError
from policy_worker.checkpoints.uploads.hub import HubTarget
from weight_sync.stores.patience import Delays
from policy_worker.checkpoints.uploads.uploader import Uploader

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
repository, run_dir, give_up, *offers = sys.argv[1:]
stop = threading.Event()
one = Uploader([HubTarget(repository, "run", stop, Delays(float(give_up), 0.05, 0.1))], Path(run_dir), stop)
try:
    one.probe(strict=True)
    for offer in offers:
        one.offer(Path(offer), 20, final=Path(offer).name == "final")
    one.finish(300)
except (SettingsError, UploadFailedError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def upload(
    hub: Hub, repository: str, run_dir: Path, *offers: Path, give_up: float = PATIENCE, **env: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    home = {"HF_HOME": str(run_dir / "hf-home")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, repository, str(run_dir), str(give_up), *map(str, offers)],
        env={**kept, **hub.environment, **home, **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A checkpoint with an export in it."""
    folder = tmp_path / "checkpoints" / "step-00000020" / "export"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder.parent / "state-00000.safetensors").write_bytes(b"optimizer")
    return folder.parent


@pytest.mark.slow
def test_exports_become_commits(tmp_path: Path, export: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    (final / "model.safetensors").write_bytes(b"weights" * 1000)
    with running_hub() as hub:
        hub.fail_next = [503]
        done = upload(hub, "me/model", tmp_path, export, final)
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stderr
        assert hub.repositories == {"me/model": True}
        assert [commit["summary"] for commit in hub.commits] == ["Step 20", "Final model, step 20"]
        files = {file["key"]: file["content"] for file in hub.commits[0]["files"]}
        assert files == {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": b"weights" * 1000}
        assert hub.sent == 1, "a blob that is there is not sent again"
        again = upload(hub, "me/model", tmp_path, export, final)
        assert again.returncode == 0, again.stderr
        assert len(hub.commits) == 2, "what the records call done is not offered again"


def test_a_probe_names_key_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    with running_hub() as hub:
        for repository, token, url, said in (
            ("me/model", "wrong", hub.url, 'hf_repo_name = "me/model": the token is missing or not known'),
            ("others/model", TOKEN, hub.url, "HF_TOKEN may not write there"),
            ("me/model", TOKEN, "http://127.0.0.1:9", "http://127.0.0.1:9 does not answer"),
        ):
            monkeypatch.setenv("HF_TOKEN", token)
            target = HubTarget(repository, "run", stop)
            target._api.endpoint = url  # the client reads HF_ENDPOINT when it is imported
            with pytest.raises(SettingsError) as refused:
                target.probe()
            assert said in str(refused.value)
        assert hub.commits == []


@pytest.mark.slow
def test_a_hub_that_stays_away_fails_the_final_model(tmp_path: Path, export: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    with running_hub() as hub:
        hub.fail_next = [500] * 200
        done = upload(hub, "me/model", tmp_path, final, give_up=1.0)
        assert done.returncode == 1
        assert "UploadFailedError: upload of final to hub failed" in done.stderr
