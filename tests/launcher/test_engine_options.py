"""Pass-through options are compared with the vLLM that is installed, before anything starts."""

from __future__ import annotations

from pathlib import Path

from launcher.preflight.checks import fields, unknown_names

SOURCE = """
from dataclasses import dataclass

@dataclass
class EngineArgs:
    model: str = "m"
    swap_space: float = 4
    _private: int = 0
    not_a_field = 3

    def method(self) -> None: ...

@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False

class Other:
    other: int
"""


def test_the_fields_of_the_named_classes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "arg_utils.py"
    path.write_text(SOURCE)
    found = fields(path, ("EngineArgs", "AsyncEngineArgs"))
    assert found == {"model", "swap_space", "enable_log_requests"}


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert fields(tmp_path / "missing.py", ("EngineArgs",)) == frozenset()
    (tmp_path / "broken.py").write_text("def (")
    assert fields(tmp_path / "broken.py", ("EngineArgs",)) == frozenset()
    assert unknown_names("rollout.engine_kwargs", {"anything": 1}, ()) == []


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    options = {"swap_spaec": 1, "model": "m", "zzz": None}
    problems = unknown_names("rollout.engine_kwargs", options, {"model", "swap_space"})
    assert [problem.key for problem in problems] == [
        "rollout.engine_kwargs.swap_spaec",
        "rollout.engine_kwargs.zzz",
    ]
    assert "swap_space" in problems[0].render()
