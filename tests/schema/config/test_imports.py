"""`schema.config` stays light: the command line answers at once and runs on a machine without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = {
    "torch", "transformers", "vllm", "datasets", "numpy", "pyarrow", "fastapi", "httpx", "redis", "pydantic_settings",
}  # fmt: skip


def test_importing_and_loading_takes_no_heavy_module(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nepoch = 'x'\n")
    code = (
        "import sys, schema.config as c\n"
        "try: c.load_config(sys.argv[1])\n"
        "except c.ConfigError as e: assert 'train.epoch' in e.render()\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.toml")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    loaded = set(result.stdout.split())
    assert "pydantic" in loaded
    assert not loaded & HEAVY
