"""The Dockerfiles: what a linter finds, and what the house asks of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.images.builder import kept

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "images"
FILES = sorted(FOLDER.glob("*.Dockerfile"))


def test_hadolint_finds_nothing() -> None:
    tool = Path(sys.executable).with_name("hadolint")
    answer = subprocess.run(
        [tool, "--config", FOLDER / "hadolint.yaml", *FILES], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_there_is_one_for_each_role() -> None:
    assert [path.name.removesuffix(".Dockerfile") for path in FILES] == ["controller", "policy", "rollout"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_containers_are_not_root_and_hold_no_secret(path: Path) -> None:
    steps = [(one["instruction"], one["value"]) for one in DockerfileParser(fileobj=path.open("rb")).structure]
    names = [name for name, _ in steps]
    assert "ADD" not in names
    last = steps[len(names) - names[::-1].index("FROM") :]
    assert [value for name, value in last if name == "USER"] == ["1000:1000"]
    assert [name for name, _ in last if name == "COPY"] == ["COPY"], "only what was built comes along"
    for name, value in steps:
        if name == "FROM":
            assert ":" in value
            assert not value.startswith("debian:latest")
        if name in ("ARG", "ENV"):
            assert not {"TOKEN", "PASSWORD", "SECRET", "KEY"} & set(value.upper().replace("=", "_").split("_"))
        if "apt-get install" in value:
            assert "--no-install-recommends" in value
            assert value.endswith("rm -rf /var/lib/apt/lists/*")
        if "pip install" in value:
            assert "--no-cache-dir" in value


def test_the_context_is_what_a_wheel_is_made_of() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "examples"}
    names = set(kept(ROOT / ".dockerignore"))
    assert packages <= names
    assert all((ROOT / name).exists() for name in names)
