"""Reading the end of a log."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launcher.processes.logs import TAIL_BYTES, tail


def test_the_last_lines_since_the_start_of_this_process(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("old\nolder\n")
    since = path.stat().st_size
    with path.open("a") as file:
        file.write("\n".join(f"line {i}" for i in range(50)) + "\n\n")
    assert tail(path, 20, since) == [f"line {i}" for i in range(30, 50)]
    assert tail(path, 3) == ["line 47", "line 48", "line 49"]
    assert tail(path, 100, since)[0] == "line 0"


def test_control_codes_and_rewritten_lines_are_left_out(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"\x1b[31mred\x1b[0m text\r\n10%\r55%\rdone\ntail\x07")
    assert tail(path) == ["red text", "done", "tail"]


def test_a_missing_log_is_empty(tmp_path: Path):
    assert tail(tmp_path / "none") == []


def test_a_long_log_is_not_read_through(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 * TAIL_BYTES) + b"\nend")
    lines = tail(path)
    assert lines[-1] == "end"
    assert sum(map(len, lines)) <= TAIL_BYTES


@given(content=st.binary(max_size=400), since=st.integers(0, 500), lines=st.integers(1, 5))
def test_any_bytes_give_printable_lines(tmp_path_factory, content: bytes, since: int, lines: int):
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(content)
    found = tail(path, lines, since)
    assert len(found) <= lines
    assert not any(character in line for line in found for character in "\n\r\x1b\x00")
