"""The built-in reward functions: `(completion, row) -> float`, in [0, 1].

`row` is the dataset's row; `row["answer"]` holds the reference (the column `response_column_name`). A reference
that is missing or cannot be used raises: an error is never a reward of 0.

One more built-in function is one more function here with `@builtin("name")`; one of a user's own is
`path/to/file.py:function` (see `registry`).

Extraction of answers is ours: the last `\\boxed{…}` with balanced braces, the number after the last `####`, the
letter in `<answer>`. Comparison is math-verify's (it knows fractions, roots, sets, units), but identical strings and
plain numbers are compared exactly first: that settles most samples in a microsecond instead of milliseconds.
Extraction takes linear time, since policies do write 20,000 spaces: hence the possessive `*+`. The answer that it
finds is reported next to the reward: what was just extracted is remembered for that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from schema.scores.answers import number

Builtin = Callable[[str, Mapping[str, Any]], float]
BUILTIN: dict[str, Builtin] = {}
"""The built-in functions by their names in the configuration."""
PACKAGES: dict[str, str] = {}
"""The package that a built-in function needs besides ours; "": none."""
Extractor = Callable[[str], str | None]
EXTRACTORS: dict[str, Extractor] = {}
"""How built-in functions find the answer in a completion, of those that look for one."""

_GSM8K = re.compile(r"####\s*+\$?\s*+([-+]?[\d,]*\.?\d+)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
_ANSWER_TAG = re.compile(r"<answer>(.*?)(</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_SPACES = re.compile(r"\s+")
_THOUGHT = re.compile(r"\s*+(?:<think>)?+(?P<thought>.*?)</think>\s*+(?P<rest>.*\S)\s*", re.DOTALL)
_LETTER = re.compile(r"[\s(\[{*\"'.]*([A-Za-z])(?![A-Za-z0-9])")
_SAYS = re.compile(
    r"(?:answer|choice|option)\s*+(?:is|:)\s*+(?:option\s*+)?+[\s(\[{*\"']*+([A-Za-z])(?![A-Za-z0-9])", re.IGNORECASE
)


def builtin(name: str, package: str = "", answer: Extractor | None = None) -> Callable[[Builtin], Builtin]:
    """Register a built-in reward function, the package that it imports besides ours, and how it finds an answer."""

    def register(function: Builtin) -> Builtin:
        BUILTIN[name], PACKAGES[name] = function, package
        if answer is not None:
            EXTRACTORS[name] = answer
        return function

    return register


def extracted(name: str, completion: str, row: Mapping[str, Any]) -> str | None:
    """The answer that a built-in function finds in a completion; None: it finds none, or looks for none."""
    if name == "by_source":
        name = source_scorers().get(str(row.get("data_source")), "")
    extractor = EXTRACTORS.get(name)
    return None if extractor is None else extractor(completion)


def reference(row: Mapping[str, Any]) -> str:
    """The reference answer as text. Raises `ValueError` when the row has none."""
    answer = row.get("answer")
    if answer is None or answer == "":
        raise ValueError(
            "the row has no reference answer: name its column in train.train_policy.response_column_name"
        )
    return str(answer)


# ---- answers -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{…}` (or `\\fbox{…}`), None without one."""
    best, opened = (0, 0), []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else 0)
        elif opened:
            best = max(best, (opened.pop(), brace.start()))
    return text[slice(*best)] if best[0] else None


def last_tagged(text: str) -> str | None:
    """Content of the last `<answer>…</answer>`, None without one."""
    answers = [inside for inside, end in _ANSWER_TAG.findall(text) if end]
    return answers[-1] if answers else None


@lru_cache(maxsize=4)
def last_gsm8k(text: str) -> str | None:
    """The number after the last `####`, None without one."""
    answers = _GSM8K.findall(text)
    return answers[-1] if answers else None


@lru_cache(maxsize=4)
def chosen_letter(completion: str) -> str | None:
    """The letter that a completion chooses, upper case; None if it chooses none."""
    for place in (last_tagged(completion), last_boxed(completion)):
        if place is not None:
            text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{", "{", place)
            match = _LETTER.match(text)
            return match[1].upper() if match else None
    answer = completion.rsplit("</think>", 1)[-1]
    said = _SAYS.findall(answer)
    if said:
        return str(said[-1]).upper()
    alone = re.fullmatch(r"[\s(\[*\"']*([A-Za-z])[\s)\].*\"':]*", answer)
    return alone[1].upper() if alone else None


# ---- functions ----------------------------------------------------------------------------------------------------


@builtin("format")
def format_(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion reasons once and then answers: `<think>…</think>` first, then `\\boxed{}` or `<answer>`.

    The opening tag may be missing, since many chat templates write it themselves.
    """
    match = _THOUGHT.fullmatch(completion)
    if match is None or not match["thought"].strip():
        return 0.0
    rest = match["rest"]
    tags = ("<think>", "</think>")
    if any(tag in match["thought"] or tag in rest for tag in tags):
        return 0.0
    return float(last_boxed(rest) is not None or last_tagged(rest) is not None)


@builtin("boxed_math", package="math_verify", answer=last_boxed)
def boxed_math(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the last `\\boxed{…}` is mathematically equal to the reference (which may be boxed or `####` too)."""
    expected = reference(row)
    expected = last_boxed(expected) or last_gsm8k(expected) or expected
    answer = last_boxed(completion)
    return float(answer is not None and same_answer(answer, expected))


@builtin("gsm8k", answer=last_gsm8k)
def gsm8k(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the number after the last `####` equals the reference's (a number, or a worked answer with `####`)."""
    text = reference(row)
    expected = number(last_gsm8k(text) or text)
    if expected is None:
        raise ValueError(f"the reference answer {text[:100]!r} is not a number, nor has it one after ####")
    answer = last_gsm8k(completion)
    return float(answer is not None and number(answer) == expected)


@builtin("single_choice", answer=chosen_letter)
def single_choice(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the chosen letter is the reference's: in the last `<answer>`, else boxed, else said, else alone."""
    text = reference(row)
    match = _LETTER.match(text)
    if match is None:
        raise ValueError(f"the reference answer {text[:100]!r} does not begin with the letter of a choice")
    chosen = chosen_letter(completion)
    return float(chosen is not None and chosen == match[1].upper())


@builtin("by_source", package="math_verify")
def by_source(completion: str, row: Mapping[str, Any]) -> float:
    """Return what the built-in function for the row's `data_source` says (`schema.config.SOURCE_SCORERS`)."""
    source = row.get("data_source")
    name = source_scorers().get(source) if isinstance(source, str) else None
    if name is None:
        raise ValueError(
            f"no built-in reward function is known for the row's data_source {source!r}: name a function of your own "
            "in train.train_policy.reward_function"
        )
    return BUILTIN[name](completion, row)


@cache
def source_scorers() -> dict[str, str]:
    """Data source -> built-in function. Imported on first use: most reward processes never need the schema."""
    from schema.config import SOURCE_SCORERS

    return SOURCE_SCORERS


# ---- comparison ---------------------------------------------------------------------------------------------------


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
