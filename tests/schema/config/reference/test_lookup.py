"""What `explain` knows: every key answers, examples are of the key's type, and questions find their key."""

from __future__ import annotations

import contextlib
import tomllib
from typing import Any

import pytest

from schema.config import Config, ConfigError
from schema.config.availability import UNAVAILABLE
from schema.config.keys import deviation_of, leaf_keys, section_keys
from schema.config.loading.tomlread import dotted_path, parse_value
from schema.config.reference.lookup import MUST, UNSET, KeyInfo, all_infos, look_up
from tests.schema.config_samples import refused, write
from tests.support.each import check_each

INFOS = list(all_infos())


def only(question: str) -> KeyInfo:
    (info,) = look_up(question).keys
    return info


def test_every_key_and_section_answers() -> None:
    assert {info.key for info in INFOS} == set(leaf_keys())
    assert all(info.description and info.type and info.kind and info.effect for info in INFOS)
    for key in section_keys():
        section = look_up(key).section
        assert section is not None
        assert section.description
        assert section.keys or section.sections, key


def test_examples_are_sound() -> None:
    """Each example is TOML, of the key's type and within its bounds; all three ways to write it say the same."""
    check_each(INFOS, _check_example)


def _check_example(info: KeyInfo) -> None:
    data: dict[str, Any] = tomllib.loads(info.example)
    if "sft" in info.when or info.key == "train.train_policy.conversation_column_name":
        write(data, ("train", "train_policy", "type"), "sft")
    if info.key == "critic.parallelism.tp_size":
        assert data["critic"]["parallelism"]
    Config.model_validate(data)
    if info.override:
        name, _, text = info.override.partition("=")
        assert tuple(part for part in dotted_path(name) or () if isinstance(part, str)) == tuple(info.key.split("."))
        assert info.variable.endswith(f"={text}")
        value: Any = tomllib.loads(info.example)
        for part in info.key.split("."):
            value = value[0][part] if isinstance(value, list) else value[part]
        assert parse_value(text) == value


def test_a_key_tells_all_that_the_schema_knows() -> None:
    info = only("train.optm_betas")
    assert (info.type, info.default) == ("a list of numbers", [0.9, 0.999])
    assert info.bounds == ("exactly 2 items", "at least 0.0", "less than 1.0")
    assert info.acts
    assert info.limits == ""
    assert info.variable == "COSMOS_TRAIN__OPTM_BETAS=[0.9, 0.999]"
    assert only("train.param_dtype").choices == ("float32", "bfloat16", "float16")
    assert only("train.seed").default == UNSET
    assert only("train.ckpt.max_keep").bounds == ("at least -1", "not 0")
    assert only("redis.key_prefix").bounds == ("of the form ^[A-Za-z0-9._-]{1,128}$",)


def test_deviations_and_limits_are_told() -> None:
    deviating = [key for key in leaf_keys() if deviation_of(key) is not None]
    assert len({key.rpartition(".")[2] for key in deviating}) == 3
    for key in deviating:
        assert all(info.deviation.startswith("cosmos-rl's default is ") for info in look_up(key).keys)
    for key, row in UNAVAILABLE.items():
        for info in look_up(key).keys:
            assert row.missing in info.limits
    assert all(info.limits for info in INFOS if not info.acts)
    assert only("train.optm_name").taken == ()
    assert only("rollout.multi_turn_config.enable").taken == ("false",)
    assert only("train.optm_lr").taken == ()


def test_grpo_and_sft_are_told_apart() -> None:
    both = look_up("train.train_policy.balance_dp_token").keys
    assert [(info.when, info.default) for info in both] == [('type = "grpo"', False), ('type = "sft"', True)]
    assert only("train.train_policy.mini_batch").when == ""
    assert only("train.train_policy.variant").when == 'type = "grpo"'
    tags = look_up("train.train_policy.type").keys
    assert [info.default for info in tags] == ["grpo", MUST]


@pytest.mark.parametrize(
    "question",
    [
        "train.optm_lr", " train.optm_lr ", "train.optm_lr=3", "--set train.optm_lr=3", "TRAIN.OPTM_LR",
        "train.optm-lr", "COSMOS_TRAIN__OPTM_LR", "COSMOS_TRAIN__OPTM_LR=1e-5", "train.optm_lr[0]",
    ],
)  # fmt: skip
def test_a_key_is_found_however_it_is_written(question: str) -> None:
    assert only(question).key == "train.optm_lr"


def test_parts_and_patterns_find_keys() -> None:
    assert only("n_generation_to_batch").key == "rollout.n_generation_to_batch"
    names = {info.key for info in look_up("tp_size").keys}
    assert {"policy.parallelism.tp_size", "rollout.parallelism.tp_size"} <= names
    assert look_up("tp_size").is_list
    assert {info.key for info in look_up("train.ckpt.*").keys} == {
        key for key in leaf_keys() if key.startswith("train.ckpt.")
    }
    assert all("_lr" in info.key for info in look_up("*_lr").keys)
    assert all(info.key.startswith("train.optm_") for info in look_up("train.optm_").keys)
    assert all(info.key[6] in "ab" for info in look_up("train.[ab]*").keys)
    for question in ("ckpt", "[train.ckpt]", "train.ckpt.", "COSMOS_TRAIN__CKPT"):
        section = look_up(question).section
        assert section is not None, question
        assert section.key == "train.ckpt"
    root = look_up("").section
    assert root is not None
    assert [name for name, _ in root.sections] == [key for key in section_keys() if "." not in key]


@pytest.mark.parametrize(
    ("question", "hint"),
    [
        ("train.optm_lrr", "did you mean `train.optm_lr`?"),
        ("rolout.batch_size", "did you mean `rollout.batch_size`?"),
        ("epochs", "did you mean `train.epoch`?"),
        ("optimizer_step", "keys that speak of it: train.train_policy."),
        ("rollout.engine_kwargs.swap_space", "the keys of rollout.engine_kwargs are not ours"),
        ("zzzz", "cosmos-launch explain lists the sections"),
        ("zz*", "cosmos-launch explain lists the sections"),
    ],
)
def test_what_is_not_there_gets_a_suggestion(question: str, hint: str) -> None:
    (problem,) = refused(look_up, question)
    assert problem.message == "no such key"
    assert problem.hint.startswith(hint)


@pytest.mark.parametrize("question", ["[", "*[", "=", "--set ", "\n", "a..b", "[]", "COSMOS_", "é", "." * 50])
def test_odd_questions_get_a_clean_answer(question: str) -> None:
    with contextlib.suppress(ConfigError):
        assert look_up(question).question == question
