"""The quickstart's own modules: they are in one folder, not in a package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's untrained model."""
    from make_model import make_model

    out = tmp_path_factory.mktemp("quickstart") / "model"
    make_model(out, seed=1)
    return out
