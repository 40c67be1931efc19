"""The quickstart's own modules: they are in one folder, not in a package."""

from __future__ import annotations

import shutil
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


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory in which the models lie where the files expect them."""
    for name in ("model", "sft/final", "sft_plain/final", "grpo_plain/final"):
        shutil.copytree(tiny_model, tmp_path / "outputs" / "quickstart" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
