"""The rules of the house: who may import whom, and what stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import controller
from controller.api.auth import OPEN
from tests import counts
from tests.controller.api.test_auth import RULES

ROOT = Path(__file__).parent.parent


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_import_rules_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = run(str(linter), "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "module", ["schema.config", "schema.wire.messages", "controller.api.app", "controller.client", "launcher.cli"]
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


WHOLE_DEVICE = re.compile(r"\b(?:cuda|accelerator)\.synchronize\(")
WAITS_FOR_ALL = {
    "rollout_worker.engines.vllm.transfer": "the engine has paused, and its next step is to read the weights",
    "rollout_worker.engines.vllm.nccl": "vLLM's engine receives on streams of its own",
}
"""Modules that wait for everything on a device, and why."""


def test_a_trainer_waits_for_its_own_stream() -> None:
    """A broadcast of weights on another stream takes up to half a minute."""
    packages = ("policy_worker", "rollout_worker", "weight_sync")
    paths = {name: path for name, path in counts.modules().items() if name.partition(".")[0] in packages}
    assert {name for name, path in paths.items() if WHOLE_DEVICE.search(path.read_text())} == set(WAITS_FOR_ALL)


def test_package_roots_hold_entry_points_and_little_else() -> None:
    assert len(counts.roots()) <= 43, counts.roots()
    assert counts.crowded() == {}


def test_small_modules_with_one_importer_are_few() -> None:
    assert len(counts.lonely()) <= 21, counts.lonely()


LARGE = {
    "controller.ledger.group_table": "every index of the ledger's groups, which one transition changes together",
    "controller.ledger.ledger": "every transition of a group: one state machine",
    "controller.services.replicas": "the calls of a replica's life, in the order of that life",
    "controller.state.job": "the record of a job: what is saved, and restored, together",
    "controller.state.membership": "one state machine: who trains, which parts, when a step is applied",
    "controller.state.replicas": "one state machine: who is alive, and who had a name before",
    "rollout_worker.engines.transformers.engine": "one engine's life: requests, weights, sleep",
    "rollout_worker.engines.vllm.adapter": "all that this project knows of vLLM's own classes",
    "rollout_worker.engines.vllm.engine": "one engine's life: requests, weights, sleep",
}
"""Modules of more lines than LINES, and why each is one thing."""
LINES = 450


def test_modules_are_not_long() -> None:
    long = {name for name, path in counts.modules().items() if counts.lines(path) > LINES}
    assert long == set(LARGE), "split what grew, or strike what shrank"


def test_functions_are_not_long() -> None:
    assert counts.long() == {}


CIRCLES: dict[str, int] = {}
"""How many circles of files are left, by the package that holds them."""


def test_files_do_not_import_each_other_in_a_circle() -> None:
    circles = counts.circles()
    left = [circle for circle in circles if not any(_within(circle, package) for package in CIRCLES)]
    assert left == []
    for package, most in CIRCLES.items():
        assert sum(_within(circle, package) for circle in circles) <= most, circles


def _within(circle: set[str], package: str) -> bool:
    return all(f"{name}.".startswith(f"{package}.") for name in circle)


def test_docstrings_begin_as_sentences() -> None:
    assert counts.openings() == []


def test_phrases_that_an_engineer_would_not_write_are_rare() -> None:
    assert {phrase: n for phrase, n in counts.english().items() if n > 13} == {}


def calls_of_the_table() -> dict[tuple[str, str], str]:
    """(method, path as a pattern) -> service, of the table in `controller/__init__.py`."""
    rows = re.findall(r"^\| (?:(GET|POST|DELETE) )?(/[^|]+?) +\|[^|]*\| (\S+) ", controller.__doc__, re.MULTILINE)
    return {
        (method, re.escape(path).replace("…", "[^?]+")): service
        for method, paths, service in rows
        for path in paths.split(", ")
    }


def test_the_table_of_the_controller_has_every_call_and_no_other() -> None:
    calls, missing, used = calls_of_the_table(), [], set()
    for method, url, _ in RULES:
        path = url.removeprefix("/v1").partition("?")[0]
        found = {call for call in calls if call[0] in (method, "") and re.fullmatch(call[1], path)}
        used |= found
        if not found:
            missing.append((method, path))
    assert missing == []
    assert {pattern for _, pattern in calls.keys() - used} == {path.removeprefix("/v1") for path in OPEN}
    services = {f"controller.services.{name}" for name in calls.values() if name != "(routes)"}
    assert services <= counts.modules().keys()


@cache
def defined(path: Path) -> set[str]:
    """Every name that a file binds somewhere."""
    found: set[str] = set()
    for node in ast.walk(counts.tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_what_is_imported_of_ours_is_there() -> None:
    """Where mypy does not look: benchmarks and long proofs are rarely started."""
    ours, missing = counts.files(), []
    folders = ("benchmarks", "examples", "policy_worker", "rollout_worker", "tests/chaos", "tests/e2e")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in counts.tree(path).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "") in ours:
                names = defined(ours[str(node.module)])
                there = {alias.name for alias in node.names if f"{node.module}.{alias.name}" in ours} | names
                missing += [(path.name, node.module, a.name) for a in node.names if a.name not in there]
    assert missing == []
