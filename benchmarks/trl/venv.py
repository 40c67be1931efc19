"""TRL's own environment: its torch and transformers are not ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# torch first and alone: what follows must be content with its CPU build. math-verify is for our rewards.
PACKAGES = (["torch==2.13.0"], ["trl==1.16.*", "transformers==5.19.*", "math-verify>=0.9,<1"])
INSTALL_TIMEOUT = 1200.0
"""Seconds that one installation may take."""


def trl_python(venv: Path) -> Path:
    """The interpreter of TRL's environment, made if it is not there. Raises `RuntimeError` with pip's output."""
    python, ready = venv / "bin" / "python", venv / ".installed"
    if not ready.exists():
        print(f"making {venv} for TRL (a few minutes, once) …", flush=True)
        _run(sys.executable, "-m", "venv", str(venv))
        for packages in PACKAGES:
            _run(str(python), "-m", "pip", "install", "--quiet", *packages)
        ready.touch()
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
