"""docs/metrics.md defines what is reported: each name that the code has, and none that it does not have.

What real steps and jobs report is held against the page wherever tests run them (`tests.support.metric_names`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from rollout_worker.engines.base import EngineStats
from rollout_worker.metrics import Metrics
from tests.support.metric_names import GAUGES, NEXT, SCRAPED, STEP, documented

ROOT = Path(__file__).parent.parent
NO_WORK = EngineStats(idle_s=0.0, samples=0, tokens=0, running=0, waiting=0)
SOURCES = {
    STEP: [*sorted((ROOT / "policy_worker").rglob("*.py")), ROOT / "weight_sync/publishing/writer.py"],
    NEXT: [
        ROOT / "launcher/trackers/follow.py",
        ROOT / "controller/state/step_log.py",
        *sorted((ROOT / "schema/wire/messages").glob("*.py")),
    ],
    GAUGES: sorted((ROOT / "rollout_worker").rglob("*.py")),
    SCRAPED: [ROOT / "controller/api/metrics.py"],
}


def pattern(key: ast.expr | None) -> str | None:
    """A string, with * for what an f-string puts in; None: it is another expression."""
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    if isinstance(key, ast.JoinedStr):
        return "".join(pattern(part) or "*" for part in key.values)
    return None


def keys(node: ast.AST) -> Iterator[str]:
    """Keys of the dicts that a part of a program writes down, and those that it sets; not of arguments of calls."""
    if isinstance(node, ast.Call):
        return
    found: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        found = list(node.keys)
    elif isinstance(node, ast.DictComp):
        found = [node.key]
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        found = [node.slice]
    yield from (name for key in found if (name := pattern(key)) is not None)
    for child in ast.iter_child_nodes(node):
        yield from keys(child)


def is_of_metrics(target: ast.expr) -> bool:
    """Whether something is called `metrics`, or is a part of it."""
    if isinstance(target, ast.Subscript):
        return is_of_metrics(target.value)
    if isinstance(target, ast.Attribute):
        return target.attr == "metrics" or is_of_metrics(target.value)
    return isinstance(target, ast.Name) and target.id == "metrics"


def reported_by_trainers() -> set[str]:
    """Keys that functions which return `Metrics`, or which set metrics, write down."""
    found: set[str] = set()
    for path in SOURCES[STEP]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if re.search("metrics|-> Metrics", text) else ():
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                named = "metrics" in node.name and ast.unparse(node.returns) == "dict[str, float]"
                if ast.unparse(node.returns) == "Metrics" or named:
                    found |= set(keys(node))
            targets = getattr(node, "targets", [node.target] if isinstance(node, ast.AugAssign) else [])
            if isinstance(node, (ast.Assign, ast.AugAssign)) and any(map(is_of_metrics, targets)):
                found |= set(keys(node))
    return found


def test_every_metric_of_a_step_in_the_code_has_a_definition() -> None:
    found, known = reported_by_trainers(), documented(STEP)
    assert {"loss", "truncated_fraction", "own_parts", "publish_bytes", "offload_seconds"} <= found
    assert {
        name for name in found if not any(fnmatchcase(one, name) or fnmatchcase(name, one) for one in known)
    } == set()


def reported_by_rollouts() -> set[str]:
    """Keys of the gauges that are read at each heartbeat, and of those that are set where they are measured."""
    found: set[str] = set()
    for path in SOURCES[GAUGES]:
        for node in ast.walk(ast.parse(text)) if "_metrics.extra" in (text := path.read_text()) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".extra.update"):
                found |= {str(keyword.arg) for keyword in node.keywords}
            elif isinstance(node, ast.Assign) and ".extra[" in ast.unparse(node.targets[0]):
                found |= set(keys(node))
    metrics = Metrics()
    metrics.training_began(0.0, NO_WORK)
    return found | metrics.read(1.0, NO_WORK).keys()


def test_every_gauge_of_a_rollout_replica_has_a_definition_and_each_definition_a_gauge() -> None:
    assert reported_by_rollouts() == documented(GAUGES)


@pytest.mark.parametrize("section", [STEP, NEXT, SCRAPED])
def test_every_definition_is_of_something_in_the_code(section: str) -> None:
    """Each part of a name, but for what is put in, is a word of the code, or several that are put together."""
    words = {word for path in SOURCES[section] for word in re.findall(r"\w+", path.read_text())}

    def is_there(part: str) -> bool:
        cuts = [at for at, letter in enumerate(part) if letter == "_"]
        return part in words or any(
            is_there(part[:at]) and is_there(part[at:]) for cut in cuts for at in (cut, cut + 1) if 0 < at < len(part)
        )

    found = {
        part.strip("_").removesuffix("_total") for name in documented(section) for part in re.split(r"[*/]", name)
    }
    assert {
        part for part in found if part and not is_there(part.removeprefix("cosmos_")) and not is_there(part)
    } == set()
