"""`cosmos-launch` for tests: in this process, where what it answers is proven, and as a user starts it."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from launcher.cli import main
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Answer:
    returncode: int
    stdout: str
    stderr: str

    def says(self, code: int, *words: str) -> Answer:
        """Check the exit code, and words on standard output."""
        return self._holds(code, self.stdout, words)

    def complains(self, code: int, *words: str) -> Answer:
        """Check the exit code, and words on standard error."""
        return self._holds(code, self.stderr, words)

    def _holds(self, code: int, text: str, words: Iterable[str]) -> Answer:
        assert self.returncode == code, self.stdout + self.stderr
        assert not (missing := [word for word in words if word not in text]), f"{missing} are not in: {text}"
        return self


def cosmos(*arguments: object, cwd: Path | None = None, **env: str) -> Answer:
    """The command line in this process; an error without a message for users is raised."""
    with _captured() as (out, err), _place(cwd, env):
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Answer(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]


def cosmos_process(*arguments: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "cosmos_launch", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=PATIENCE, check=False, cwd=cwd,
        env=_environment(env),
    )  # fmt: skip


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("COSMOS_")}
    return {**kept, "PYTHONPATH": str(ROOT), **env}


@contextlib.contextmanager
def _place(cwd: Path | None, env: Mapping[str, str]) -> Iterator[None]:
    with patch.dict(os.environ, _environment(env), clear=True), contextlib.chdir(cwd or Path.cwd()):
        yield


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
