"""One tiny random model for all jobs: the quickstart's, never warmed up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.program import LONG, ROOT


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    script = ROOT / "examples" / "quickstart" / "make_model.py"
    subprocess.run([sys.executable, str(script), "--out", str(path), "--seed", "1"], check=True, timeout=LONG)
    return path
