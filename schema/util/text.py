"""Text of others in front of people: control characters never reach a terminal, a log or a label as they are.

    CONTROL      one of these characters, tabs and newlines among them
    PLAIN        what names, ids and other texts of ours must match
    visible      for texts of several lines (errors, tracebacks): each control character becomes one that is seen
    indented     the same for logs, where one more line would be taken for ours
    one_line     the same in one line

Control characters: C0 but for tab and newline, DEL, C1, line and paragraph separators, and those that change the
direction of what follows. Colours are removed whole, since libraries write them into their error texts. Nothing
gets longer, and what is visible stays as it is.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated

from pydantic import BeforeValidator

_CLASS = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
CONTROL = re.compile(f"[{_CLASS}]")
PLAIN = f"^[^{_CLASS}]*$"
_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_PICTURES = 0x2400
"""Where Unicode has pictures of C0, in their order; ␡ follows."""


def visible(text: str) -> str:
    """The text with pictures of its control characters (␛, ␇, …); lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(_picture, _COLOUR.sub("", text).replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return `visible` of a text in one line: its ends are seen as ␤."""
    return visible(text).replace("\n", "␤").replace("\t", " ")


def indented(text: str) -> str:
    """Return `visible` of a text, with further lines that cannot pass for events of their own."""
    return visible(text).replace("\n", "\n    ")


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    return chr(_PICTURES + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


class LogFormatter(logging.Formatter):
    """Log lines in which whatever a record says cannot pass for another record: further lines are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = indented(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        return visible(super().formatException(ei))  # type: ignore[arg-type]


def configure_logging(
    form: str = "%(asctime)s %(levelname)s %(name)s: %(message)s", level: str = "INFO", *, force: bool = False
) -> None:
    """Log to standard error, in lines that cannot be forged. `force`: replace the handlers that are there."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(form))
    logging.basicConfig(level=level, handlers=[handler], force=force)


Prose = Annotated[str, BeforeValidator(lambda text: visible(text) if isinstance(text, str) else text)]
"""The text says what went wrong, for people, maybe in several lines: control characters become visible where it is
sent, so that none is refused for the colours in an error text, and again where it is received."""
