"""What a program in a sandbox can reach, and what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from schema.sandbox.bubblewrap import Outcome, Sandbox, SandboxLimits, programs, why_not

BASH = Path("/bin/bash")
pytestmark = pytest.mark.skipif("does not work here" in why_not(), reason=why_not())


def run(script: str, tmp_path: Path, **limits: float) -> Outcome:
    assert why_not() == "", "`make setup-sandbox` installs it"
    (tmp_path / "mine").write_text("mine")
    sandbox = Sandbox(
        [*programs([BASH]), (tmp_path, Path("/given"))],
        [Path("/tmp"), Path("/home")],
        {"NAME": "value"},
        limits=SandboxLimits(**{"seconds": 3.0, **limits}),  # type: ignore[arg-type]
    )
    return sandbox.run([str(BASH), "-c", script], "CHANNEL")


def test_it_reads_what_is_given_and_writes_what_is_forgotten(tmp_path: Path) -> None:
    outcome = run('read x < /given/mine; echo "$x $NAME $HOME $PWD"; echo y > /tmp/y; echo z >&$CHANNEL', tmp_path)
    assert (outcome.code, outcome.ended_by) == (0, "")
    assert (outcome.stdout, outcome.stderr, outcome.channel) == (b"mine value  /\n", b"", b"z\n")
    assert not Path("/tmp/y").exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo x > /given/mine", b"Read-only file system"),
        ("echo x > /etc_x", b"Read-only file system"),
        ("read x < /etc/passwd", b"No such file"),
        ("echo x > /dev/tcp/127.0.0.1/22", b"Connection refused"),
        ("ls", b"command not found"),
        ("kill -9 -1; kill -9 1; echo x >&2", b"x"),
    ],
)
def test_what_it_cannot_reach(tmp_path: Path, script: str, words: bytes) -> None:
    assert words in run(script, tmp_path).stderr
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("script", "limits", "ended_by"),
    [
        ("while :; do :; done", {"seconds": 0.5}, "time"),
        ("for i in {1..60}; do (while :; do :; done) & done; wait", {"processes": 20}, "processes"),
        ("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxx; done", {"output": 100_000}, "output"),
        ("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxx >&$CHANNEL; done", {"output": 100_000}, "output"),
        ('x=1234567890; while :; do x="$x$x"; done', {"memory": 1 << 25}, ""),
    ],
)
def test_what_ends_it(tmp_path: Path, script: str, limits: dict[str, float], ended_by: str) -> None:
    outcome = run(script, tmp_path, **limits)
    assert outcome.ended_by == ended_by
    assert outcome.code != 0
