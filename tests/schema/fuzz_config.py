"""A hundred thousand spoiled configurations: always a clean verdict, never a traceback.

    python -m tests.schema.fuzz_config                        100,000 configurations, progress on stderr
    python -m tests.schema.fuzz_config --examples 2000 --seed 7

Each one is checked as data and, in turn, as a file, whole and damaged; the verdict is a `Config` that survives
writing and reading and has a plan of few processes on a small machine, or a `ConfigError` whose problems name a key
or a file and fit on a few screens. Every tenth is shown to a stock JSON-schema validator too: what pydantic refuses
in structure the schema must refuse, what the tree accepts the schema must accept. A failure is shrunk by hypothesis
and printed with the data; exit code 1. The unit tests run the same with fewer examples.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from convert import convert
from launcher.plan.machine import Machine
from launcher.plan.needs import MOST_ON_CPU, PlacementError
from launcher.plan.placement import place
from schema.config import Config, ConfigError, check_config, check_warnings, load_config
from schema.config.loading.tomlwrite import dumps
from schema.config.problem import MOST_SHOWN, MOST_TEXT
from schema.config.reference.export import json_schema
from tests.schema.mutations import ARGUMENTS, FILES, bases, changes, mutate

VALIDATOR = jsonschema.Draft202012Validator(json_schema())
MOST_RENDERED = MOST_SHOWN * 3 * MOST_TEXT
REPORT_EVERY_S = 10.0


def verdict(check: Any) -> Config | None:
    """The configuration, or None for a refusal, which must be one that a user can act on."""
    try:
        return check()  # type: ignore[no-any-return]
    except ConfigError as error:
        refusal = error
    assert len(refusal.render()) < MOST_RENDERED
    assert len(refusal.problems) <= MOST_SHOWN
    json.dumps([str(problem.value) for problem in refusal.problems])
    assert all(problem.message and (problem.key or problem.file) for problem in refusal.problems)
    return None


def check_data(data: dict[str, Any]) -> bool:
    """Check as data; an accepted configuration must come back unchanged from its own TOML. Whether accepted."""
    config = verdict(lambda: check_config(data))
    if config is not None:
        json.dumps(config.to_dict(), allow_nan=False)
        Path("again.toml").write_text(config.to_toml(), encoding="utf-8")
        assert load_config("again.toml").to_dict() == config.to_dict()
        check_plan(config)
    return config is not None


def check_plan(config: Config) -> None:
    """Warnings and processes of an accepted configuration on a machine without GPUs: few, or a refusal."""
    check_warnings(config)
    if config.is_evaluation:
        return
    with suppress(PlacementError):
        replicas = place(config, Machine(2))
        assert sum(len(replica.processes) for replica in replicas) <= MOST_ON_CPU


def check_damaged(data: dict[str, Any], how: str, at: int) -> None:
    """A file of ours or of another system that is no such file."""
    path = Path("odd.toml" if at % 2 else "odd.yaml")
    FILES[how](path, dumps(data).encode("utf-8", "surrogatepass"), at)
    for name in (str(path), ARGUMENTS[at % len(ARGUMENTS)]):
        verdict(lambda name=name: load_config(name))
        verdict(lambda name=name: convert(name) and None)
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def check_file(data: dict[str, Any]) -> None:
    """Check as a file, and that its problems stand inside it."""
    text = dumps(data)
    Path("run.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    lines = text.split("\n")
    try:
        load_config("run.toml")
    except ConfigError as error:
        for problem in error.problems:
            assert problem.line is None or 1 <= problem.line <= len(lines)


def check_schema(data: dict[str, Any]) -> None:
    """Tree and JSON schema agree about structure, but for faults that JSON cannot say (see below)."""
    faults: list[Any] = []
    try:
        Config.model_validate(data)
    except ValidationError as error:
        faults = list(error.errors(include_url=False))
    if VALIDATOR.is_valid(data):
        assert all(_beyond_json(fault["input"]) for fault in faults), faults
    else:
        assert faults, "the tree accepts it, the schema does not"


def _beyond_json(value: Any) -> bool:
    """Whether JSON schema cannot see that a value is wrong.

    3.0 is an integer there, NaN and infinity are no JSON, and integers that no float can hold are numbers.
    """
    if isinstance(value, dict):
        return any(map(_beyond_json, value.values()))
    if isinstance(value, list):
        return any(map(_beyond_json, value))
    if isinstance(value, int):
        return value.bit_length() > 1023
    return isinstance(value, float) and (value != value or abs(value) == float("inf") or value.is_integer())


def fuzz(examples: int, first: int | None = None, report: bool = False) -> Counter[str]:
    """Run in the current directory; raises AssertionError with the shrunken data. Counts of the verdicts."""
    counts: Counter[str] = Counter()
    started = reported = time.monotonic()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(base=st.sampled_from(bases()), steps=changes, how=st.sampled_from(sorted(FILES)), at=st.integers(0, 10**6))
    def one(base: dict[str, Any], steps: Any, how: str, at: int) -> None:
        nonlocal reported
        data = mutate(base, steps)
        counts["all"] += 1
        counts["accepted" if check_data(data) else "refused"] += 1
        if counts["all"] % 2 == 0:
            check_file(data)
        if counts["all"] % 5 == 0:
            check_damaged(data, how, at)
        if counts["all"] % 10 == 0:
            check_schema(data)
        if report and time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            rate = counts["all"] / (reported - started)
            print(f"{counts['all']} of {examples}, {rate:.0f} a second, {dict(counts)}", file=sys.stderr)

    (seed(first)(one) if first is not None else one)()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000, help="configurations to try (100,000)")
    parser.add_argument("--seed", type=int, default=None, help="repeat a certain run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        counts = fuzz(arguments.examples, arguments.seed, report=True)
        os.chdir("/")
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
