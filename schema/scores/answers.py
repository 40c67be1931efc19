"""Extracted answers: as they travel with a sample, and as votes are counted. Without imports that take time."""

from __future__ import annotations

import hashlib
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from schema.util.text import one_line

LONGEST_ANSWER = 256
"""Characters of an extracted answer; of a longer one the beginning and a hash of the whole."""
_HASH = 16
_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*|\d+)?(?:\.\d+)?")
_SPACES = re.compile(r"\s+")


def shown(answer: Any) -> str | None:
    """Return an extracted answer as it travels: one line, bounded; None of nothing. What is not text becomes text."""
    if answer is None:
        return None
    text = one_line(_SPACES.sub(" ", str(answer)).strip())
    if len(text) <= LONGEST_ANSWER:
        return text or None
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=_HASH // 2).hexdigest()
    return f"{text[: LONGEST_ANSWER - _HASH - 1]}…{digest}"


def vote(answer: str) -> str:
    """Return what answers that count as one have in common: text without spaces, plain numbers by their value."""
    text = _SPACES.sub("", answer)
    value = number(text)
    if value is None:
        return text
    spelled = format(value, "f")
    spelled = spelled.rstrip("0").rstrip(".") if "." in spelled else spelled
    return "0" if spelled in ("-0", "") else spelled


def number(text: str) -> Decimal | None:
    """A plain decimal number (thousands separated by commas allowed), else None."""
    stripped = text.strip().rstrip(".").lstrip("$").strip()
    if not stripped or not _NUMBER.fullmatch(stripped):
        return None
    try:
        return Decimal(stripped.replace(",", ""))
    except InvalidOperation:
        return None
