"""The live panel on a real (pseudo-)terminal, with a real job behind it."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def on_terminal(command: list[str], press_ctrl_c_at: str) -> tuple[int, str]:
    """Run a command on a terminal of its own, press Ctrl-C once it shows a text; exit code and all it wrote."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "40"},
    )  # fmt: skip
    os.close(end)
    written, pressed, give_up = "", False, time.monotonic() + PATIENCE
    try:
        while time.monotonic() < give_up:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    written += os.read(terminal, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
            if not pressed and press_ctrl_c_at in written:
                process.send_signal(signal.SIGINT)
                pressed = True
        return process.wait(PATIENCE), written
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_the_panel_is_live_and_the_terminal_is_left_as_it_was(tmp_path: Path):
    job = ("tests.launcher.drive_job", str(tmp_path / "run"), '{"pause": 0.05}', "3000")
    code, written = on_terminal([sys.executable, "-m", *job], press_ctrl_c_at="training")
    assert code == 130, written
    for part in ("╭", "phase", "╌", "/3000", "policy-0 up", "stopping (by SIGINT)", "outcome"):
        assert part in written, part
    assert written.count(HIDE_CURSOR) == written.count(SHOW_CURSOR) > 0
    assert written.rindex(SHOW_CURSOR) > written.rindex("╰"), "the panel is closed before the table"
