"""The built-in reward functions: `(completion, row) -> float`, in [0, 1].

`row` is the dataset's row; `row["answer"]` holds the reference (the column `response_column_name`). A reference
that is missing or cannot be used raises: an error is never a reward of 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from rollout_worker.rewards.answers import (
    last_boxed,
    last_gsm8k,
    last_tagged,
    number,
    same_answer,
)

_THOUGHT = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>\s*(?P<rest>.*\S)\s*", re.DOTALL)
_LETTER = re.compile(r"[\s(\[{*\"'.]*([A-Za-z])(?![A-Za-z0-9])")
_SAYS = re.compile(
    r"(?:answer|choice|option)\s*(?:is|:)\s*(?:option\s*)?[\s(\[{*\"']*([A-Za-z])(?![A-Za-z0-9])",
    re.IGNORECASE,
)


def reference(row: Mapping[str, Any]) -> str:
    """The reference answer as text. Raises `ValueError` when the row has none."""
    answer = row.get("answer")
    if answer is None or answer == "":
        raise ValueError(
            "the row has no reference answer: name its column in train.train_policy.response_column_name"
        )
    return str(answer)


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


def boxed_math(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the last `\\boxed{…}` is mathematically equal to the reference (which may be boxed or `####` too)."""
    expected = reference(row)
    expected = last_boxed(expected) or last_gsm8k(expected) or expected
    answer = last_boxed(completion)
    return float(answer is not None and same_answer(answer, expected))


def gsm8k(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the number after the last `####` equals the reference's (a number, or a worked answer with `####`)."""
    text = reference(row)
    expected = number(last_gsm8k(text) or text)
    if expected is None:
        raise ValueError(f"the reference answer {text[:100]!r} is not a number, nor has it one after ####")
    found = last_gsm8k(completion)
    return float(found is not None and number(found) == expected)


def single_choice(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the chosen letter is the reference's: in the last `<answer>`, else boxed, else said, else alone."""
    text = reference(row)
    match = _LETTER.match(text)
    if match is None:
        raise ValueError(f"the reference answer {text[:100]!r} does not begin with the letter of a choice")
    chosen = chosen_letter(completion)
    return float(chosen is not None and chosen == match[1].upper())


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


def by_source(completion: str, row: Mapping[str, Any]) -> float:
    """What the built-in function for the row's `data_source` says (`schema.config.SOURCE_SCORERS`)."""
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


BUILTIN: dict[str, Callable[[str, Mapping[str, Any]], float]] = {
    "boxed_math": boxed_math,
    "by_source": by_source,
    "format": format_,
    "gsm8k": gsm8k,
    "single_choice": single_choice,
}
