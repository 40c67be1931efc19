"""The built-in dataset `synthetic:addition`: column addition with an optional chain of thought.

    prompt   What is 347 + 286?
    answer   633
    worked   <think>7+6=13, 4+8+1=13, 3+2+1=6</think>\\boxed{633}

A task that a model of 0.3M parameters learns in a minute of reinforcement: reasoning column by column is
right where blurting is not, and carrying is what has to be found. The demonstrations (`demonstrations =
true`, for supervised warm starts) are sloppy on purpose, so that there is something left to learn.

Invariant: whether a pair of operands is held out is a hash of the unordered pair alone, not of the seed, so
no pair of the `held_out` split is ever in a `train` split, whichever two runs they come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controller.data.errors import DataError
from controller.data.reading.tables import PASSED, Wanted, every

PHRASINGS = ("What is {a} + {b}?", "Compute {a} + {b}.", "Add {a} and {b}.", "{a} + {b} = ?")
SPLITS = ("train", "held_out")
NAME = "synthetic:addition"
COLUMNS = ("prompt", "answer", "a", "b", "data_source")

# The sloppy demonstrator. With these it leaves a warm-started model at about a third of the sums right:
# enough right answers for groups to differ, and every habit that reinforcement has to unlearn.
BLURTS = 0.30
BLURT_IS_RIGHT = 0.10
COLUMN_SLIPS = 0.06
FORGETS_CARRY = 0.55
LEAVES_OUT_BOX = 0.10


class AdditionOptions(BaseModel):
    """`[train.train_policy.dataset.options]` of `synthetic:addition`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    n: int = Field(default=20_000, ge=1, le=5_000_000, description="Rows.")
    digits: int = Field(default=3, ge=1, le=12, description="Digits of each operand.")
    phrasings: int = Field(default=1, ge=1, le=len(PHRASINGS), description="Ways to put the question.")
    held_out: float = Field(default=0.1, ge=0.0, lt=1.0, description="Share of operand pairs held out.")
    seed: int | None = Field(default=None, ge=0, description="Seed of the rows. Unset: the seed of the job.")
    demonstrations: bool = Field(default=False, description="Adds a `conversations` column of worked answers.")


def read_options(options: dict[str, Any]) -> AdditionOptions:
    """Options as the config writes them. Raises `DataError` naming the option and what is allowed."""
    try:
        return AdditionOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(AdditionOptions.model_fields)
            raise DataError(f"dataset option `{name}` is unknown; synthetic:addition knows {known}") from None
        raise DataError(f"dataset option `{name}` = {first['input']!r}: {first['msg']}") from None


def is_held_out(a: int, b: int, share: float) -> bool:
    """Whether the unordered pair belongs to the held-out share, by its hash."""
    low, high = sorted((a, b))
    digest = hashlib.blake2b(f"{low}+{high}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class AdditionSource:
    """Rows of one split, made on the fly: the same options and seed always give the same rows."""

    def __init__(self, options: AdditionOptions, split: Literal["train", "held_out"], job_seed: int) -> None:
        if split == "held_out" and not options.held_out:
            raise DataError(
                "synthetic:addition has no held-out pairs: dataset option `held_out` is 0; set it to e.g. 0.1"
            )
        self.name = f"{NAME}/{split}"
        self.columns = [*COLUMNS, *(["conversations"] if options.demonstrations else [])]
        self._options = options
        self._split = split
        self._seed = job_seed if options.seed is None else options.seed

    def __len__(self) -> int:
        return self._options.n

    def where(self, i: int) -> str:
        """How an error names row i."""
        return f"{self.name}, row {i + 1}"

    def identity(self) -> list[Any]:
        """Identify the rows by what they are made of."""
        return [self.name, repr(self._options), self._seed]

    def rows(self, wanted: Wanted = every) -> Iterator[dict[str, Any]]:
        """All rows in order."""
        options = self._options
        rng = Random(f"addition/{self._split}/{self._seed}")
        for i in range(options.n):
            a, b = self._pair(rng)
            prompt = PHRASINGS[rng.randrange(options.phrasings)].format(a=a, b=b)
            row: dict[str, Any] = {
                "prompt": prompt, "answer": str(a + b), "a": a, "b": b, "data_source": NAME,
            }  # fmt: skip
            if options.demonstrations:
                row["conversations"] = [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": demonstrate(a, b, rng)},
                ]
            yield row if wanted(i) else PASSED

    def _pair(self, rng: Random) -> tuple[int, int]:
        """The next operands of this split; a split in which 100,000 draws find none is refused."""
        options = self._options
        low, high = (0 if options.digits == 1 else 10 ** (options.digits - 1)), 10**options.digits
        for _ in range(100_000):
            a, b = rng.randrange(low, high), rng.randrange(low, high)
            if is_held_out(a, b, options.held_out) == (self._split == "held_out"):
                return a, b
        raise DataError(
            f"synthetic:addition: no pair of {options.digits}-digit operands is in the {self._split} split "
            f"with held_out = {options.held_out}; choose another share or more digits"
        )


def demonstrate(a: int, b: int, rng: Random) -> str:
    """One sloppy worked answer to a + b, in the format that the `format` and `boxed_math` rewards ask for."""
    if rng.random() < BLURTS:
        answer = str(a + b)
        if rng.random() >= BLURT_IS_RIGHT:
            answer = _another_number(a + b, rng)
        return f"\\boxed{{{answer}}}"
    thought, answer = _columns(a, b, rng)
    boxed = answer if rng.random() < LEAVES_OUT_BOX else f"\\boxed{{{answer}}}"
    return f"<think>{thought}</think>{boxed}"


def _columns(a: int, b: int, rng: Random) -> tuple[str, str]:
    """Add column by column, units first, with slips: the columns written out, and the answer they lead to."""
    steps: list[str] = []
    answer = ""
    carry = 0
    width = max(len(str(a)), len(str(b)))
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        if carry and rng.random() < FORGETS_CARRY:
            carry = 0
        total = int(x) + int(y) + carry
        if rng.random() < COLUMN_SLIPS:
            total = max(0, total + rng.choice((-2, -1, 1, 2)))
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry, digit = divmod(total, 10)
        answer = str(digit) + answer
        carry = min(carry, 1)
    return ", ".join(steps), (str(carry) if carry else "") + answer


def _another_number(right: int, rng: Random) -> str:
    """A number of as many digits that is not the right one."""
    digits = len(str(right))
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    wrong = rng.randrange(low, high - 1)
    return str(wrong + (wrong >= right))
