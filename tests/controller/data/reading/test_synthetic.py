"""The built-in dataset: deterministic, honest about held-out pairs, and sloppy to the stated degree."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from controller.data.errors import DataError
from controller.data.reading.synthetic import (
    PHRASINGS,
    AdditionOptions,
    AdditionSource,
    demonstrate,
    is_held_out,
    read_options,
)


def rows(split: str, job_seed: int = 1, **options: object) -> list[dict]:
    return list(AdditionSource(read_options({"n": 2000, **options}), split, job_seed).rows())


def test_rows_ask_for_sums_and_carry_the_reference():
    for row in rows("train"):
        assert row["prompt"] == f"What is {row['a']} + {row['b']}?"
        assert row["answer"] == str(row["a"] + row["b"])
        assert min(row["a"], row["b"]) >= 100
        assert max(row["a"], row["b"]) <= 999


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    assert rows("train", 7) == rows("train", 7)
    assert rows("train", 7) != rows("train", 8)
    assert rows("train", 7, seed=8) == rows("train", 8), "the dataset's own seed wins over the job's"


def test_no_held_out_pair_is_in_any_training_split_in_either_order():
    trained = {frozenset((r["a"], r["b"])) for seed in (1, 2) for r in rows("train", seed, digits=2)}
    held = {frozenset((r["a"], r["b"])) for seed in (1, 3) for r in rows("held_out", seed, digits=2)}
    assert not trained & held
    assert len(held) > 200


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_the_held_out_share_is_the_share_of_pairs(share: float):
    pairs = [(a, b) for a in range(100, 300) for b in range(a, 300)]
    assert sum(is_held_out(a, b, share) for a, b in pairs) / len(pairs) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("phrasings", [1, 2, 3, 4])
def test_phrasings_are_used_evenly(phrasings: int):
    counts = Counter(re.sub(r"\d+", "#", row["prompt"]) for row in rows("train", phrasings=phrasings))
    assert set(counts) == {re.sub(r"\{.\}", "#", p) for p in PHRASINGS[:phrasings]}
    assert min(counts.values()) > 0.8 * 2000 / phrasings


def test_demonstrations_are_conversations_that_end_with_the_worked_answer():
    source = AdditionSource(AdditionOptions(n=5, demonstrations=True), "train", 1)
    assert "conversations" in source.columns
    for row in source.rows():
        user, assistant = row["conversations"]
        assert user == {"role": "user", "content": row["prompt"]}
        assert assistant["role"] == "assistant"


def test_the_demonstrator_is_as_sloppy_as_stated():
    rng = Random(0)
    outcomes: Counter[str] = Counter()
    for _ in range(6000):
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        text = demonstrate(a, b, rng)
        right = text.endswith(f"\\boxed{{{a + b}}}")
        carries = (a % 10 + b % 10 > 9) or (a % 100 // 10 + b % 100 // 10 > 9)
        kind = "blurt" if text.startswith("\\boxed") else ("carry" if carries else "plain")
        outcomes[kind] += 1
        outcomes[f"{kind} right"] += right
        outcomes[f"{kind} boxed"] += "\\boxed" in text
    assert outcomes["blurt"] / 6000 == pytest.approx(0.30, abs=0.02)
    assert outcomes["blurt right"] / outcomes["blurt"] == pytest.approx(0.10, abs=0.02)
    # No carry: right unless one of three columns slips (6 % each) or the box is missing (10 %).
    assert outcomes["plain right"] / outcomes["plain"] == pytest.approx(0.94**3 * 0.9, abs=0.04)
    assert outcomes["carry right"] / outcomes["carry"] < 0.45
    assert outcomes["plain boxed"] / outcomes["plain"] == pytest.approx(0.9, abs=0.03)


def test_a_careful_demonstration_reads_as_documented():
    class Careful(Random):
        def random(self) -> float:
            return 0.999

    assert demonstrate(347, 286, Careful()) == "<think>7+6=13, 4+8+1=13, 3+2+1=6</think>\\boxed{633}"
    assert demonstrate(999, 1, Careful()) == "<think>9+1=10, 9+0+1=10, 9+0+1=10</think>\\boxed{1000}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digit": 3}, "`digit` is unknown; synthetic:addition knows n, digits"),
        ({"phrasings": 5}, "`phrasings` = 5"),
        ({"n": "many"}, "`n` = 'many'"),
        ({"held_out": 1.0}, "`held_out` = 1.0"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str):
    with pytest.raises(DataError, match=re.escape(message)):
        read_options(options)


def test_a_held_out_split_without_pairs_is_refused():
    with pytest.raises(DataError, match="`held_out` is 0"):
        AdditionSource(AdditionOptions(held_out=0.0), "held_out", 1)
