"""Finding the final answer in a text, and comparing it with the reference.

Extraction is ours: the last `\\boxed{…}` with balanced braces, the number after the last `####`, the letter in
`<answer>`. Comparison is math-verify's (it knows fractions, roots, sets, units), but identical strings and plain
numbers are compared exactly first: that settles most samples in a microsecond instead of milliseconds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*|\d+)?(?:\.\d+)?")
_GSM8K = re.compile(r"####\s*\$?\s*([-+]?[\d,]*\.?\d+)")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_SPACES = re.compile(r"\s+")


def _nothing() -> None:
    return None


before_slow: Callable[[], None] = _nothing
"""Called before math-verify is: the reward process says first what it has done so far."""


def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{…}` (or `\\fbox{…}`), None without one."""
    best = None
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        depth, start = 1, match.end()
        for position in range(start, len(text)):
            character = text[position]
            if text[position - 1] == "\\" and character in "{}":
                continue
            depth += (character == "{") - (character == "}")
            if depth == 0:
                best = text[start:position]
                break
    return best


def last_tagged(text: str) -> str | None:
    """Content of the last `<answer>…</answer>`, None without one."""
    found = _ANSWER_TAG.findall(text)
    return found[-1] if found else None


def last_gsm8k(text: str) -> str | None:
    """The number after the last `####`, None without one."""
    found = _GSM8K.findall(text)
    return found[-1] if found else None


def number(text: str) -> Decimal | None:
    """A plain decimal number (thousands separated by commas allowed), else None."""
    stripped = text.strip().rstrip(".").lstrip("$").strip()
    if not stripped or not _NUMBER.fullmatch(stripped):
        return None
    try:
        return Decimal(stripped.replace(",", ""))
    except InvalidOperation:
        return None


@lru_cache(maxsize=8192)
def same_answer(answer: str, reference: str) -> bool:
    """Whether two answers in LaTeX or plain text are mathematically equal.

    An answer that cannot be read as mathematics is wrong. Raises `ValueError` when the reference cannot be read:
    then no answer could ever be right.
    """
    left, right = _SPACES.sub("", answer), _SPACES.sub("", reference)
    if left == right:
        return True
    numbers = number(left), number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    before_slow()
    gold = _parse(reference)
    if not gold:
        raise ValueError(f"the reference answer {reference[:100]!r} cannot be read as mathematics")
    import math_verify

    return bool(math_verify.verify(gold, _parse(answer), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    """math-verify's reading of an answer; empty when it has none. Time is limited by the pool, not here."""
    import math_verify

    _quiet()
    parsed: list[Any] = math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return parsed


@lru_cache(maxsize=1)
def _quiet() -> None:
    """math-verify warns once per kind that we look after its time-outs ourselves, which we do."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
