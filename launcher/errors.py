"""The error that ends the launcher with a clear message instead of a traceback."""

from __future__ import annotations

from launcher.restarts import EXIT_CONFIG
from schema.util.text import indented


class LaunchError(Exception):
    """Something that the user can fix: what is wrong, what to do, and the exit code."""

    def __init__(self, message: str, hint: str = "", exit_code: int = EXIT_CONFIG) -> None:
        super().__init__(message)
        self.message, self.hint, self.exit_code = message, hint, exit_code

    def render(self) -> str:
        return "\n    ".join(indented(text) for text in (self.message, self.hint) if text)


class NotServingError(LaunchError):
    """The controller answers that it cannot serve now, with the reason."""
