"""Faults of parts and shares, each with its place."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schema.config import ConfigError, check_config, check_rules
from tests.schema.config_samples import GRPO, SFT, nested
from tests.schema.remedies import config_of

P, D = "train.train_policy", "train.train_policy.dataset"
C = f"{P}.curriculum"
ADDITION = {"name": "synthetic:addition"}
SHARED = [{**ADDITION, "share": 0.75}, {**ADDITION, "source": "b", "share": 0.25}]


def problems(values: dict[str, Any]) -> dict[str, str]:
    data = nested(f"{D}.name", "")
    with pytest.raises(ConfigError) as refusal:
        check_config(merged(GRPO, data, *(nested(key, value) for key, value in values.items())))
    return {problem.key: problem.message for problem in refusal.value.problems}


def merged(*tables: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            both = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = merged(result[name], value) if both else value
    return result


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({f"{D}.name": "a.jsonl", f"{D}.part": [ADDITION]}, f"{D}.name", "has no effect: [[train.train_policy"),
        ({f"{D}.part": [{"share": 1.0}]}, f"{D}.part[0].name", "this part names no dataset"),
        ({f"{D}.part": [ADDITION, ADDITION]}, f"{D}.part[1].source", "2 parts are called 'synthetic:addition'"),
        ({f"{D}.part": [{**ADDITION, "share": 0.5}]}, f"{D}.part[0].share", "{synthetic:addition = 0.5} add up to"),
        (
            {f"{D}.part": [{**ADDITION, "share": 1.0}, {**ADDITION, "source": "b"}]},
            *(f"{D}.part[1].share", "this part has no share and others have one"),
        ),
        (
            {f"{D}.name": ADDITION["name"], "validation": {"enable": True, "dataset": {"part": [{"share": 1.0}]}}},
            *("validation.dataset.part[0].share", "has no effect: all of its rows are validated"),
        ),
        (
            {
                f"{D}.part": [{**ADDITION, "share": 1.0}],
                f"{P}.domain_shares": {"a": 1.0}, f"{P}.domain_column_name": "prompt",
            },
            *(f"{P}.domain_shares", "parts of the dataset have shares as well"),
        ),
        (
            {f"{D}.name": "synthetic:addition", f"{P}.domain_exhausted": "stop"},
            *(f"{P}.domain_exhausted", "has no effect: no part and no domain has a share"),
        ),
        (
            {f"{D}.part": [{"custom_class": "nowhere.py:Rows"}]},
            *(f"{D}.part[0].custom_class", "dataset file nowhere.py cannot be read"),
        ),
        (
            {f"{D}.name": "synthetic:addition", f"{C}.stage": [{"from_step": 9}]},
            *(f"{C}.stage[0]", "has no effect: no part and no domain has a share"),
        ),
        (
            {f"{D}.part": SHARED, f"{C}.stage": [{"from_step": 5, "shares": {"b": 1}}, {"from_step": 5}]},
            *(f"{C}.stage[1].from_step", "begins at step 5, and the stage in front of it at step 5"),
        ),
        (
            {f"{D}.part": SHARED, f"{C}.stage": [{"shares": {"c": 1.0}}]},
            *(f"{C}.stage[0].shares", "'c' is not a part or domain with a share; these are synthetic:addition, b"),
        ),
        (
            {f"{D}.part": SHARED, f"{C}.stage": [{"shares": {"b": 2.0, "synthetic:addition": -1.0}}]},
            *(f"{C}.stage[0].shares", "synthetic:addition has a negative share"),
        ),
        (
            {f"{D}.part": SHARED, f"{C}.stage": [{"shares": {"b": 0.0}}]},
            *(f"{C}.stage[0].shares", "no part or domain has a share in it"),
        ),
        (
            {f"{D}.part": SHARED, f"{C}.stage": [{"from_step": 7, "shares": {"b": 1}}], "train.max_num_steps": 7},
            *(f"{C}.stage[0].from_step", "never begins: train.max_num_steps = 7"),
        ),
        ({f"{C}.descending": True}, f"{C}.descending", "has no effect: train.train_policy.curriculum.column_name"),
        ({f"{C}.pass_score": 0.5}, f"{C}.pass_score", "has no effect: no key makes later passes follow results"),
        ({f"{C}.leave_out_solved": 2}, f"{C}.leave_out_solved", "has no effect: it acts from the second pass"),
        (
            {f"{C}.leave_out_solved": 2, f"{P}.reward_function": {"format": 0.0}, "train.epoch": 2},
            *(f"{C}.leave_out_solved", "has no effect: all weights of train.train_policy.reward_function are 0"),
        ),
        (
            {f"{D}.part": [{**ADDITION, "source": "all"}, ADDITION]},
            *(f"{D}.part[0].source", "stands for all of them in reports"),
        ),
        (
            {f"{D}.part": [{**ADDITION, "source": f"{'x' * 128}{end}"} for end in "ab"]},
            *(f"{D}.part[0].source", "2 parts are called"),
        ),
        ({f"{D}.part": [{"name": "synthetic:adding"}]}, f"{D}.part[0].name", 'unknown generator "synthetic'),
        ({f"{D}.part": [{"name": "no/such.jsonl"}]}, f"{D}.part[0].name", "no/such.jsonl does not exist"),
        ({f"{D}.part": [{**ADDITION, "test_size": 2.0}]}, f"{D}.part[0].test_size", "a float is a share of"),
    ],
)  # fmt: skip
def test_a_fault_has_its_place(values: dict[str, Any], key: str, message: str) -> None:
    assert problems(values).get(key, "").startswith(message)


def test_shares_in_the_hint_add_up_to_one() -> None:
    parts = [{**ADDITION, "source": name, "share": 0.2} for name in "abc"]
    check_config(merged(GRPO, nested(f"{D}.name", ""), nested(f"{D}.part", [{**p, "share": 0.333} for p in parts])))
    with pytest.raises(ConfigError) as refusal:
        check_config(merged(GRPO, nested(f"{D}.name", ""), nested(f"{D}.part", parts)))
    hint = refusal.value.problems[0].hint
    shares = [float(text) for text in re.findall(r"= (0\.\d+)", hint)]
    assert (len(shares), round(sum(shares), 9)) == (3, 1.0), hint


def test_what_stops_a_job_is_left_alone_where_none_is_trained() -> None:
    only = {"enable": True, "only": True, "before": True, "dataset": ADDITION}
    values = {f"{D}.part": SHARED, f"{P}.domain_exhausted": "stop", "validation": only}
    check_config(merged(GRPO, nested(f"{D}.name", ""), *(nested(key, value) for key, value in values.items())))


def test_a_sound_mixture_passes() -> None:
    stages = [
        {"from_step": 2, "shares": {"b": 1.0}},
        {"from_step": 9, "shares": {"b": 0.5, "synthetic:addition": 0.5}},
    ]
    values = {f"{D}.name": "", f"{D}.part": SHARED, f"{C}.stage": stages, f"{C}.leave_out_failed": 1}
    config = check_config(merged(GRPO, *(nested(key, value) for key, value in values.items())))
    assert config.shares == {"synthetic:addition": 0.75, "b": 0.25}
    assert [stage.from_step for stage in config.curriculum.stage] == [2, 9]


def test_supervised_training_follows_no_results() -> None:
    with pytest.raises(ConfigError, match="leave_out_failed: has no effect: supervised training scores no answers"):
        check_config(merged(SFT, nested(f"{C}.leave_out_failed", 1)))


@pytest.mark.parametrize(
    ("keys", "blamed", "words"),
    [
        ({"reward_function": "nope"}, "reward_function", "unknown reward function `nope`"),
        ({"reward_function": {"boxed_math": 0.0}}, "reward_function", "all weights are 0"),
        (
            {"max_prompt_length": 4000, "max_response_length": 1000},
            "max_prompt_length",
            "validation.dataset.part[0].max_response_length = 1000",
        ),
    ],
)
def test_what_a_validation_set_says_itself_is_checked_there(keys: dict[str, Any], blamed: str, words: str) -> None:
    part = {"name": "synthetic:addition", "source": "a", **keys}
    problems = check_rules(config_of(GRPO, {"validation.dataset.part": [part], "validation.enable": True}))
    (problem,) = [problem for problem in problems if problem.key.startswith("validation")]
    assert problem.key == f"validation.dataset.part[0].{blamed}"
    assert words in problem.message
