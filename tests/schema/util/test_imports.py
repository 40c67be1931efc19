"""What large libraries read of the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schema.util import imports


@pytest.mark.parametrize(
    ("before", "gpu", "after"),
    [(None, False, "PASSIVE"), (None, True, None), ("ACTIVE", False, "ACTIVE"), ("ACTIVE", True, "ACTIVE")],
)
def test_threads_sleep_where_there_is_no_gpu_and_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None, gpu: bool, after: str | None
) -> None:
    monkeypatch.setattr(imports, "DRIVER", tmp_path if gpu else tmp_path / "absent")
    monkeypatch.setenv("OMP_WAIT_POLICY", before or "")
    if before is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    imports.wait_asleep()
    assert os.environ.get("OMP_WAIT_POLICY") == after
