"""What the configuration means for one request: every sampling key changes its setting."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from rollout_worker.engines.base import SamplingSettings
from rollout_worker.groups.leasing import training_settings, validation_settings
from schema.config import Config


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def differences(a: SamplingSettings, b: SamplingSettings) -> dict[str, Any]:
    names = (one.name for one in fields(SamplingSettings))
    return {name: getattr(b, name) for name in names if getattr(a, name) != getattr(b, name)}


RESHAPING = {
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
}  # fmt: skip
DEFAULT = training_settings(Config())
DEFAULT_VALIDATION = validation_settings(Config())


@pytest.mark.parametrize(
    ("key", "value", "setting", "expected"),
    [
        ("temperature", 0.7, "temperature", 0.7),
        ("top_p", 0.9, "top_p", 0.9),
        ("top_k", 5, "top_k", 5),
        ("min_p", 0.1, "min_p", 0.1),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("presence_penalty", 0.5, "presence_penalty", 0.5),
        ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
        ("do_sample", False, "do_sample", False),
        ("ignore_eos", True, "ignore_eos", True),
        ("stop", ["\n"], "stop", ("\n",)),
        ("stop_token_ids", [7], "stop_token_ids", (7,)),
        ("min_tokens", 3, "min_tokens", 3),
        ("extra", {"logit_bias": {"1": 2.0}}, "extra", {"logit_bias": {"1": 2.0}}),
    ],
)
def test_each_key_of_sampling_config(key: str, value: Any, setting: str, expected: Any) -> None:
    changed = training_settings(config(rollout={"sampling_config": {key: value}}))
    corrected = {"correction": "exact"} if key in RESHAPING else {}
    assert differences(DEFAULT, changed) == {setting: expected, **corrected}


def test_corrections_are_of_training_that_needs_one() -> None:
    def corrections(**sampling: Any) -> tuple[str, str]:
        found = config(rollout={"sampling_config": sampling})
        return training_settings(found).correction, validation_settings(found).correction

    assert corrections(top_k=5) == ("exact", "unread")
    assert corrections(top_k=5, sampling_correction="raw") == ("raw", "unread")
    assert corrections(sampling_correction="raw") == ("none", "unread")


@pytest.mark.parametrize("routing", ["none", "ids", "weights"])
def test_the_experts_are_of_training_alone(routing: str) -> None:
    found = config(train={"train_policy": {"type": "grpo", "routing_replay": routing}})
    assert (training_settings(found).routing, validation_settings(found).routing) == (routing, "none")


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_ways_to_turn_top_k_off(top_k: int) -> None:
    assert training_settings(config(rollout={"sampling_config": {"top_k": top_k}})).top_k == 0


def test_keys_that_stand_elsewhere() -> None:
    changed = training_settings(
        config(
            rollout={"max_response_length": 17, "include_stop_str_in_output": True},
            train={"train_policy": {"type": "grpo", "temperature": 0.5}},
        )
    )
    expected = {"max_tokens": 17, "include_stop_str_in_output": True, "temperature": 0.5}
    assert differences(DEFAULT, changed) == expected


def test_greedy() -> None:
    assert not DEFAULT.greedy
    assert training_settings(config(rollout={"sampling_config": {"do_sample": False}})).greedy
    assert DEFAULT_VALIDATION.greedy
    assert DEFAULT_VALIDATION.top_k == 0


@pytest.mark.parametrize(
    ("key", "value", "setting", "expected"),
    [
        ("top_p", 0.9, "top_p", 0.9),
        ("top_k", -1, "top_k", 0),
        ("top_k", 4, "top_k", 4),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("max_response_length", 9, "max_tokens", 9),
    ],
)
def test_each_key_of_validation(key: str, value: Any, setting: str, expected: Any) -> None:
    sampled = config(validation={"temperature": 0.8, key: value})
    assert getattr(validation_settings(sampled), setting) == expected
    assert validation_settings(sampled).temperature == 0.8
    assert differences(DEFAULT, training_settings(sampled)) == {}


def test_validation_ends_as_training_does_and_is_drawn_in_its_own_way() -> None:
    changed = validation_settings(
        config(
            rollout={
                "include_stop_str_in_output": True,
                "max_response_length": 33,
                "sampling_config": {"stop": ["x"], "ignore_eos": True, "top_p": 0.5, "min_p": 0.3},
            }
        )
    )
    expected = {"include_stop_str_in_output": True, "max_tokens": 33, "stop": ("x",), "ignore_eos": True}
    assert differences(DEFAULT_VALIDATION, changed) == expected
