"""The rules of the house: who may import whom, and what stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import counts

ROOT = Path(__file__).parent.parent


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_import_rules_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = run(str(linter), "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "module",
    ["schema.config", "schema.wire.messages", "controller.api.app", "controller.client", "launcher.cli"],
)
def test_light_packages_stay_torch_free(module: str) -> None:
    heavy = "{'torch', 'transformers', 'vllm'} & set(sys.modules)"
    code = f"import sys, {module}; sys.exit(', '.join({heavy}) or 0)"
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr


def test_the_schema_needs_no_server_libraries() -> None:
    code = "import sys, schema.config; sys.exit(', '.join({'fastapi', 'redis', 'httpx'} & set(sys.modules)) or 0)"
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr


def test_package_roots_hold_entry_points_and_little_else() -> None:
    assert len(counts.roots()) <= 45, counts.roots()
    assert counts.crowded() == {}


def test_small_modules_with_one_importer_are_few() -> None:
    assert len(counts.lonely()) <= 28, counts.lonely()


def test_functions_are_not_long() -> None:
    assert counts.long() == {}


def test_phrases_that_an_engineer_would_not_write_are_rare() -> None:
    assert {phrase: n for phrase, n in counts.english().items() if n > 13} == {}
