"""One tiny random model for all jobs: the quickstart's, never warmed up."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from examples.quickstart.make_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Made once, by whichever process of the test run is the first to need it."""
    base = tmp_path_factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / "model"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            make_model(unfinished, seed=1)
            unfinished.rename(path)
    return path
