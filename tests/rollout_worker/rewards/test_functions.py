"""Built-in reward functions, by hand-made cases; the registry; the score."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.rewards import functions
from rollout_worker.rewards.registry import RewardConfigError, resolve
from rollout_worker.rewards.scoring import OVERLONG, overlong_penalty, parts_of, total
from schema.config import BUILTIN_REWARDS, SOURCE_SCORERS, OverlongRewardConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{633}", "633"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{", None),
        ("633", None),
        ("", None),
        (r"\boxed{}", ""),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert functions.last_boxed(text) == expected


@given(st.text(alphabet="abc{}\\ ", max_size=30))
def test_a_balanced_box_is_found_whole(inside: str) -> None:
    stripped = inside.replace("\\", "")
    depth = 0
    for character in stripped:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return
    if depth == 0:
        assert functions.last_boxed("x \\boxed{" + stripped + "} y") == stripped


PLAIN = {
    "_GSM8K": r"####\s*\$?\s*([-+]?[\d,]*\.?\d+)",
    "_THOUGHT": r"\s*(?:<think>)?(?P<thought>.*?)</think>\s*(?P<rest>.*\S)\s*",
    "_SAYS": r"(?:answer|choice|option)\s*(?:is|:)\s*(?:option\s*)?[\s(\[{*\"']*([A-Za-z])(?![A-Za-z0-9])",
}
"""The patterns without care for cost."""
WORDS = [
    "#", "####", "$", "-", "1", ",", ".", " ", "\n", "\\", "{", "}", r"\boxed", r"\fbox{", "<answer>", "</ANSWER>",
    "<think>", "</think>", "answer", "Option", "is", ":", "(", "a", "B",
]  # fmt: skip


def plain_boxed(text: str) -> str | None:
    """Each box to its end, one after the other."""
    best = None
    for box in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        depth = 1
        for brace in re.finditer(r"(?<!\\)[{}]", text[box.end() - 1 :]):
            depth += 0 if brace.start() == 0 else 1 if brace[0] == "{" else -1
            if depth == 0:
                best = text[box.end() :][: brace.start() - 1]
                break
    return best


@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_extraction_is_as_by_the_plain_definitions(text: str) -> None:
    for name, pattern in PLAIN.items():
        used = getattr(functions, name)
        plain = re.compile(pattern, used.flags)
        assert used.findall(text) == plain.findall(text)
        fully = [pattern.fullmatch(text) for pattern in (used, plain)]
        assert len({match and match.groups() for match in fully}) == 1
    assert functions.last_boxed(text) == plain_boxed(text)
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL | re.IGNORECASE)
    assert functions.last_tagged(text) == (tagged[-1] if tagged else None)


@pytest.mark.parametrize("text", ["####{}", r"\boxed{{{}", "a</think>{}", "<answer>{}", "answer is{}", "{}"])
@pytest.mark.parametrize("filler", ["\n" * 400_000, r"\boxed{" * 50_000, "<answer>" * 100_000], ids=len)
def test_no_text_takes_quadratic_time(text: str, filler: str) -> None:
    """In quadratic time these take longer than a test may."""
    text = text.format(filler)
    row = {"answer": "7", "data_source": "gsm8k"}
    for name in set(functions.BUILTIN) - {"single_choice"}:
        assert isinstance(functions.BUILTIN[name](text, row), float), "whatever it says of such a text"
    assert functions.chosen_letter(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", Decimal(42)),
        ("-1,234.50", Decimal("-1234.5")),
        ("$7", Decimal(7)),
        ("7.", Decimal(7)),
        (".5", Decimal("0.5")),
        ("1,23", None),
        ("4 2", None),
        ("x", None),
        ("", None),
        ("-", None),
        ("1e3", None),
    ],
)
def test_number(text: str, expected: Decimal | None) -> None:
    assert functions.number(text) == expected


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("633", "633", True),
        ("0633", "633", True),
        ("633.0", "633", True),
        ("634", "633", False),
        ("1,000", "1000", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac12", r"\dfrac{2}{4}", True),
        (r"\frac{1}{3}", "0.5", False),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        ("x^2 + 1", "(x+1)^2", False),
        (r"3\sqrt{2}", r"\sqrt{18}", True),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        (r"\text{yes", "633", False),
        ("{{{", "633", False),
        ("", "633", False),
        (r"\pi", "3", False),
    ],
)
def test_same_answer(answer: str, reference: str, same: bool) -> None:
    assert functions.same_answer(answer, reference) is same


def test_boxed_math() -> None:
    row = {"answer": "633"}
    assert functions.boxed_math(r"<think>…</think>\boxed{633}", row) == 1.0
    assert functions.boxed_math(r"\boxed{633} no, \boxed{634}", row) == 0.0
    assert functions.boxed_math("633", row) == 0.0
    assert functions.boxed_math(r"\boxed{0.5}", {"answer": r"the answer is \boxed{\frac{1}{2}}"}) == 1.0
    assert functions.boxed_math(r"\boxed{72}", {"answer": "48/2 = 24\n48+24 = 72\n#### 72"}) == 1.0
    assert functions.boxed_math(r"\boxed{5}", {"answer": 5}) == 1.0


def test_the_built_in_functions_are_those_that_the_configuration_knows() -> None:
    assert functions.PACKAGES == BUILTIN_REWARDS
    assert set(SOURCE_SCORERS.values()) <= set(functions.BUILTIN) - {"by_source"}


@pytest.mark.parametrize("source", SOURCE_SCORERS)
def test_rows_are_scored_by_their_source(source: str) -> None:
    right = {"gsm8k": "#### 7", "boxed_math": r"\boxed{7}", "single_choice": "<answer>B</answer>"}
    scorer = SOURCE_SCORERS[source]
    assert scorer in right
    row = {"data_source": source, "answer": "B" if scorer == "single_choice" else "7"}
    for form, completion in right.items():
        assert functions.by_source(completion, row) == float(form == scorer)


@pytest.mark.parametrize("row", [{}, {"data_source": "mine"}, {"data_source": ["gsm8k"]}])
def test_an_unknown_source_is_an_error(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"data_source .*train\.train_policy\.reward_function"):
        functions.by_source("#### 7", {**row, "answer": "7"})


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": ""}])
@pytest.mark.parametrize("name", ["boxed_math", "gsm8k", "single_choice"])
def test_a_missing_reference_is_an_error(name: str, row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="response_column_name"):
        functions.BUILTIN[name](r"\boxed{1}", row)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"<think>7+6=13</think>\boxed{633}", 1.0),
        (" <think>a\nb</think>\n\nThus <answer>B</answer>\n", 1.0),
        (r"the template wrote the tag</think>\boxed{1}", 1.0),
        (r"\boxed{633}", 0.0),
        (r"<think></think>\boxed{633}", 0.0),
        (r"<think>x</think>633", 0.0),
        (r"<think>\boxed{633}</think>", 0.0),
        (r"<think>x</think>\boxed{633", 0.0),
        (r"<think>a</think><think>b</think>\boxed{1}", 0.0),
        (r"<think>a<think>b</think>\boxed{1}", 0.0),
        (r"<think>x \boxed{633}", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion: str, expected: float) -> None:
    assert functions.format_(completion, {}) == expected


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("so\n#### 72", "48+24=72\n#### 72", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("#### $18.00 dollars", "18", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 1\n#### 2", "2", 1.0),
        ("#### 1", "2", 0.0),
        ("72", "72", 0.0),
        ("#### many", "72", 0.0),
    ],
)
def test_gsm8k(completion: str, reference: str, expected: float) -> None:
    assert functions.gsm8k(completion, {"answer": reference}) == expected


def test_gsm8k_refuses_a_reference_without_a_number() -> None:
    with pytest.raises(ValueError, match="not a number"):
        functions.gsm8k("#### 1", {"answer": "many"})


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("<answer>B</answer>", "B"),
        ("<answer>A</answer> no <answer> (c) because</answer>", "C"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{D}", "D"),
        ("The answer is (B).", "B"),
        ("First choice: A. But the answer is **C**", "C"),
        ("<think>the answer is A</think>B", "B"),
        ("(E)", "E"),
        ("b", "B"),
        ("<answer>42</answer>", None),
        ("I do not know", None),
        ("Apples", None),
        ("", None),
    ],
)
def test_chosen_letter(completion: str, letter: str | None) -> None:
    assert functions.chosen_letter(completion) == letter


def test_single_choice() -> None:
    assert functions.single_choice("<answer>B</answer>", {"answer": "B"}) == 1.0
    assert functions.single_choice("<answer>B</answer>", {"answer": "(b) The second"}) == 1.0
    assert functions.single_choice("<answer>A</answer>", {"answer": "B"}) == 0.0
    with pytest.raises(ValueError, match="letter"):
        functions.single_choice("<answer>A</answer>", {"answer": "Berlin"})


# ---- registry -----------------------------------------------------------------------------------------------


def user_file(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_a_users_function_gets_the_custom_keys_it_takes(tmp_path: Path) -> None:
    path = user_file(
        tmp_path,
        "def plain(completion, row): return len(completion)\n"
        "def some(completion, row, bonus=0.0): return bonus\n"
        "def every(completion, row, **custom): return len(custom)\n",
    )
    custom = {"bonus": 2.5, "other": "x"}
    assert resolve(f"{path}:plain", custom)("abc", {}) == 3
    assert resolve(f"{path}:some", custom)("abc", {}) == 2.5
    assert resolve(f"{path}:every", custom)("abc", {}) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bosed_math", "is unknown"),
        ("{path}:missing", "has no function 'missing'"),
        ("{path}:one", "mine.py:one' takes `c` alone"),
        ("{path}:Plain", "is a class"),
        ("{path}:later", "is asynchronous"),
        ("{path}x:plain", "no file"),
        ("{broken}:plain", "ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_had_is_named(tmp_path: Path, name: str, reason: str) -> None:
    path = user_file(
        tmp_path,
        """
class Plain: ...
class Later:
    async def __call__(self, c, r): ...

def plain(c, r): return 0
def one(c): return 0
later = Later()
""",
    )
    broken = tmp_path / "broken.py"
    broken.write_text("1/0")
    with pytest.raises(RewardConfigError, match=reason):
        resolve(name.format(path=path, broken=broken), {})


# ---- score --------------------------------------------------------------------------------------------------


def test_total_weighs_the_functions_and_adds_the_penalty() -> None:
    weights = {"boxed_math": 1.0, "format": 0.2}
    assert total({"boxed_math": 1.0, "format": 0.5}, weights) == pytest.approx(1.1)
    assert total({"boxed_math": 1.0, "format": 0.5, OVERLONG: -0.25}, weights) == pytest.approx(0.85)


def test_parts_of_functions_add_up_where_they_meet() -> None:
    found = parts_of({"a": [(0, 1.0), (7, 2.0)], "b": [(7, 1.0)]}, {"a": 0.5, "b": -2.0})
    assert found == {0: 0.5, 7: -1.0}


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0)])
def test_overlong_penalty(tokens: int, penalty: float) -> None:
    """Buffer of the last 20 tokens of 100, factor 2: at 80 nothing, at 100 the whole factor."""
    config = OverlongRewardConfig(enable_overlong_penalty=True, buffer_length=20, penalty_factor=2.0)
    assert overlong_penalty(tokens, 100, config) == pytest.approx(penalty)
