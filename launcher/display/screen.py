"""Where the launcher writes: a live panel on a terminal, plain lines otherwise. Events appear above the panel."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from launcher.display.view import LinePacer, View, line, panel
from schema.util.text import indented, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console
    from rich.live import Live


class Screen:
    """Plain lines on standard output, for logs, pipes and CI; the base of the terminal's screen."""

    def __init__(self) -> None:
        self._pacer = LinePacer()

    def event(self, text: str) -> None:
        """Something happened: one line with the time."""
        self.write(f"{time.strftime('%H:%M:%S')} {indented(text)}")

    def write(self, text: str) -> None:
        """Write lines. A reader that goes away (a closed pipe or terminal) does not end a training."""
        try:
            sys.stdout.write(visible(text) + "\n")
            sys.stdout.flush()
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process

    def show(self, view: View) -> None:
        """Show the newest view, if it is time."""
        if self._pacer.due(view, time.monotonic()):
            self.event(line(view))

    def table(self, summary: Mapping[str, Any]) -> None:
        """Print the final table."""
        from launcher.display.summary import rows

        lines = rows(summary)
        width = max(len(name) for name, _ in lines)
        self.write("\n".join(f"  {name:<{width}}  {value}" for name, value in lines))

    def close(self) -> None:
        """Leave the terminal as it was."""


class TerminalScreen(Screen):
    """A panel that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def write(self, text: str) -> None:
        from rich.text import Text

        with self._while_somebody_reads():
            self._console.print(Text(visible(text)))

    def show(self, view: View) -> None:
        from rich.live import Live

        with self._while_somebody_reads():
            if self._live is None:
                self._live = Live(panel(view), console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(panel(view), refresh=True)

    @contextmanager
    def _while_somebody_reads(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._console.file = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process

    def table(self, summary: Mapping[str, Any]) -> None:
        from launcher.display.summary import table

        self.close()
        self._console.print(table(summary))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def open_screen() -> Screen:
    """The screen that fits standard output."""
    if not sys.stdout.isatty():
        return Screen()
    from rich.console import Console

    console = Console()
    return TerminalScreen(console) if console.is_terminal and not console.is_dumb_terminal else Screen()
