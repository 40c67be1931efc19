"""The long proofs by area: `make soak` lists them, `make soak AREA=security` runs one, `AREA=all` each in turn.

    python -m tests.soak            the areas, and what each proves
    python -m tests.soak chaos e2e  two of them; exit code 1 if one has failed

An area is a folder of tests with proofs marked `soak` or `scaled`, which SOAK=1 makes long, programs that draw their
cases from a seed, or both. Each area takes less than twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MARKED = re.compile(r"\bmark\.(soak|scaled)\b|effort import .*\bcombinations\b")
LEARNING = ("tests/e2e/test_learning.py", "tests/e2e/test_staleness.py")
"""Learning curves: minutes each, and about another question than the rest of `tests/e2e`."""
MESHES = "tests/policy_worker/parallel"


@dataclass(frozen=True, slots=True)
class Area:
    """programs: name of a module below `tests` and its arguments. pytest: arguments that follow the marks."""

    proves: str
    pytest: tuple[str, ...] = ()
    programs: tuple[tuple[str, ...], ...] = field(default=())


AREAS = {
    "chaos": Area(
        "real jobs, random kills and stops of all their processes, Redis and object store: nothing is lost",
        programs=(("chaos", "--kills", "100", "--minutes", "14"),),
    ),
    "signals": Area(
        "every signal to every process of a job, by the table of docs/operations.md", programs=(("chaos.signals",),)
    ),
    "exactness": Area(
        "the same bits whoever is killed, and of equal seeds: reinforcement and supervised training",
        programs=(
            ("chaos.exactness", "--seeds", "5"),
            ("chaos.exactness", "--seeds", "3", "--kind", "ppo"),
            ("chaos.exactness", "--seeds", "3", "--kind", "sft", "--steps", "40"),
            ("policy_worker.step_record",),
        ),
    ),
    "controller": Area(
        "the service under lost, doubled and late messages and crashes: hundreds of seeds, long simulations",
        ("tests/controller",),
        (("test_stress", "8", "250"),),
    ),
    "drill": Area(
        "manifests run as pods of namespaces, through load, pre-emption and a lost node: nothing is lost",
        programs=(("drill",),),
    ),
    "e2e": Area(
        "whole jobs in the combinations of engine and staleness bound that every run leaves out, and rare ends",
        ("tests/e2e", *(f"--ignore={path}" for path in LEARNING)),
    ),
    "learning": Area(
        "curves rise on both engines, at a lag, and collapse where staleness is ignored",
        (*LEARNING, "--dist=loadgroup"),
    ),
    "images": Area(
        "each command of the Dockerfiles in a clean Debian, and what pods run of it", programs=(("images",),)
    ),
    "launcher": Area("each recipe for machines of every size, with either engine", ("tests/launcher",)),
    "liveness": Area("every configuration key, flipped, changes what it says", ("tests/liveness",)),
    "meshes": Area("any cut over four ranks: the numbers of one process, products of models", (MESHES,)),
    "policy_worker": Area(
        "losses, batches, checkpoints and publishing over many drawn cases",
        ("tests/policy_worker", f"--ignore={MESHES}"),
    ),
    "recipes": Area("each recipe of examples/recipes, two steps of a real job", ("tests/examples",)),
    "rollout_worker": Area("engines, weights and rewards over many drawn cases", ("tests/rollout_worker",)),
    "schema": Area(
        "spoiled configurations: a clean verdict each, never a traceback; converters over drawn files",
        ("tests/schema", "tests/convert"),
        (("fuzz_config", "--examples", "20000"),),
    ),
    "security": Area(
        "spoiled frames and drawn requests as each role: refused by name, no 5xx, no memory for what is not there",
        ("tests/security",),
        (("fuzz_frames", "--examples", "100000"), ("fuzz_api", "--examples", "150")),
    ),
    "weight_sync": Area(
        "the delta codec, chains and the copy of a host over many drawn histories", ("tests/weight_sync",)
    ),
}


def module_of(name: str) -> str:
    """The module of a program, wherever it is below `tests`. A dotted name is an exact one."""
    if "." in name or (TESTS / name / "__main__.py").exists():
        return f"tests.{name}"
    (path,) = TESTS.rglob(f"{name}.py")
    return ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)


def marked_folders() -> set[str]:
    """The folders of tests that have a proof marked `soak` or `scaled`."""
    found = (path for path in TESTS.rglob("test_*.py") if MARKED.search(path.read_text()))
    return {path.relative_to(TESTS).parts[0] for path in found}


def commands(area: Area) -> list[list[str]]:
    """What an area runs, one after the other."""
    found = []
    if area.pytest:
        marks = ["-m", "soak or scaled", "-n", "3", "--dist", "loadscope", "--timeout", "1200"]
        found.append([sys.executable, "-m", "pytest", *marks, *area.pytest])
    for name, *arguments in area.programs:
        found.append([sys.executable, "-m", module_of(name), *arguments])
    return found


def run(name: str) -> bool:
    """Whether all of an area's commands came to a good end; the rest of them run in any case."""
    good = True
    for command in commands(AREAS[name]):
        _say(f"== {name}: {' '.join(command[1:])}")
        begun = time.monotonic()
        code = subprocess.run(command, cwd=TESTS.parent, env={**os.environ, "SOAK": "1"}, check=False).returncode
        _say(f"== {name}: {'passed' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - begun:.0f} s")
        good = good and code == 0
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Run the long proofs of an area.")
    parser.add_argument("areas", nargs="*", choices=[*AREAS, "all", []], metavar="AREA")
    chosen: list[str] = parser.parse_args(arguments).areas
    if not chosen:
        _say("The long proofs, each less than twenty minutes: make soak AREA=<one of these, or all>", "")
        _say(*(f"  {name:<15} {area.proves}" for name, area in AREAS.items()))
        return 0
    failed = [name for name in (AREAS if "all" in chosen else chosen) if not run(name)]
    if failed:
        _say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
