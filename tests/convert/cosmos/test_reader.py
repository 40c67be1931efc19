"""cosmos-rl's TOML: every key of its published schema passes through unchanged; others are mapped or explained."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from convert import convert, convert_text
from convert.engine.keys import leaves
from convert.engine.model import Conversion, Outcome
from convert.engine.registry import reader
from convert.engine.write import to_toml
from schema.config import Config, ConfigError, check_config
from schema.config.keys import leaf_keys
from schema.config.rules.batch import batch_is_whole_groups
from tests.convert.files import COSMOS, HERE, nest, value_of
from tests.schema.published import PLACES, PUBLISHED


@pytest.fixture(scope="module")
def examples() -> dict[str, Conversion]:
    return {path.name: convert(path) for path in COSMOS}


def _cosmos(keys: dict[str, Any]) -> Conversion:
    from schema.config.loading.tomlwrite import dumps

    base = {"policy.model_name_or_path": "org/model", "train.train_policy.type": "grpo"}
    return convert_text(dumps(nest({**base, **keys})), "run.toml")


def _published_leaves() -> set[str]:
    """Every leaf of the page by its dotted key; the keys of grpo and sft together."""
    found = set()
    for place, section in PLACES.items():
        sections = section if isinstance(section, list | tuple) else (section,)
        for name in sections:
            for key, known in PUBLISHED[name].items():
                if not known.is_section:
                    found.add(f"{place}.{key}" if place else key)
    return found


def test_every_leaf_of_the_page_stands_in_an_example_and_passes(examples: dict[str, Conversion]) -> None:
    written: dict[str, list[Outcome]] = {}
    for found in examples.values():
        for entry in found.entries:
            written.setdefault(entry.source, []).append(entry.outcome)
    page = _published_leaves()
    assert len(page) > 170
    for key in sorted(page):
        outcomes = written.get(key) or [
            outcome for name, found in written.items() if name.startswith(f"{key}.") for outcome in found
        ]
        assert outcomes, f"{key} stands in no example"
        assert set(outcomes) <= {Outcome.MAPPED, Outcome.FALLBACK, Outcome.IMPLICIT}, key


def test_values_pass_exactly() -> None:
    path = HERE / "cosmos_grpo.toml"
    found = convert(path)
    given = dict(leaves(tomllib.loads(path.read_text())))
    exempt = {("redis",), ("train", "transfer_dtype"), ("train", "train_policy", "batch_size_per_optimize")}
    for path_of_key, value in given.items():
        if path_of_key in exempt:
            continue
        written: Any = found.config
        faithful = {key: item for entry in found.entries for key, item in entry.faithful}
        for part in path_of_key:
            written = written.get(part) if isinstance(written, dict) else None
        assert value in (written, faithful.get(".".join(path_of_key))), path_of_key


@pytest.mark.parametrize("name", ["cosmos_older.toml", "cosmos_newer.toml", "cosmos_sft.toml"])
def test_plain_files_are_valid(examples: dict[str, Conversion], name: str) -> None:
    config = dict(examples[name].config)
    config.pop("unsupported", None)
    check_config(config)


def test_our_own_keys_pass_too() -> None:
    for kind in ("grpo", "sft"):
        spellings = {spelling for rule in reader("cosmos-rl").rules(kind) for spelling in rule.spellings}
        missing = {key for key in leaf_keys() if key not in spellings}
        assert all(key.startswith("train.train_policy.") for key in missing), missing


@pytest.mark.parametrize(
    ("keys", "ours", "value"),
    [
        ({"train.enable_validation": True}, "validation.enable", True),
        ({"train.validation_step": 30}, "validation.freq", 30),
        ({"train.validation_freq": 64}, "validation.freq", 64),
        ({"train.validation_batch_per_replica": 2}, "validation.batch_size", 2),
        ({"validation.val_before_train": True}, "validation.before", True),
        ({"train.train_policy.dataset.train_split": "train"}, "train.train_policy.dataset.split", "train"),
        ({"train.train_policy.dataset.test_split": "test"}, "validation.dataset.split", "test"),
        ({"validation.dataset.test_split": ["a", "b"]}, "validation.dataset.split", ["a", "b"]),
        ({"train.train_policy.no_outdated_rollout": True}, "train.train_policy.outdated_rollout_fetch_batch_size", 0),
        ({"redis": "12800"}, "redis.url", None),
        ({"redis": "10.0.0.5:6379"}, "redis.url", "redis://10.0.0.5:6379"),
        ({"redis": "rediss://host:6380/0"}, "redis.url", "rediss://host:6380/0"),
        ({"rollout.backend": "vllm_async"}, "rollout.backend", "vllm"),
        ({"rollout.backend": "trtllm"}, "rollout.backend", "trtllm"),
        (
            {"rollout.mode": "async", "rollout.n_generation": 4, "rollout.async_config.max_concurrent_requests": 20},
            "rollout.max_concurrent_samples",
            80,
        ),
        ({"rollout.async_config.max_concurrent_requests": 20}, "rollout.max_concurrent_samples", None),
        ({"mode": "colocated_separated"}, "placement.share", "memory"),
        ({"mode": "disaggregated"}, "placement.share", None),
        ({"train.transfer_dtype": "None"}, "train.transfer_dtype", None),
        ({"train.transfer_dtype": "float32"}, "train.transfer_dtype", "float32"),
    ],
)
def test_renamed_and_newer_keys(keys: dict[str, Any], ours: str, value: Any) -> None:
    found = _cosmos(keys)
    assert value_of(found, ours) == value
    assert not found.of(Outcome.UNKNOWN)


def test_a_written_key_beats_its_older_name() -> None:
    found = _cosmos({"train.validation_step": 30, "validation.freq": 10})
    assert value_of(found, "validation.freq") == 10
    assert "say different things" in found.warnings[0]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 16),  # 8 samples are no whole group of 16
        ({"rollout.n_generation": 8}, 8),
        ({"rollout.n_generation": 4}, 8),
        ({"rollout.n_generation": 12}, 12),
    ],
)
def test_the_batch_that_a_silent_file_means(keys: dict[str, Any], expected: int) -> None:
    found = _cosmos(keys)
    assert value_of(found, BATCH) == expected
    assert found.warnings == ()


BATCH, REPLICAS = "train.train_batch_per_replica", "policy.parallelism.n_init_replicas"


@pytest.mark.parametrize(
    ("batch", "others", "expected"),
    [
        (8, {"rollout.n_generation": 12}, 12),  # less than one group
        (20, {}, 16),
        (24, {}, 32),  # both are 8 away
        (25, {}, 32),
        (20, {REPLICAS: 4}, 20),  # 80 samples are 5 groups
        (18, {REPLICAS: 4}, 20),  # 72 samples are not
        (20, {"rollout.n_generation": 10**6}, 10**6),
    ],
)
def test_a_batch_becomes_whole_groups_and_the_report_says_so(
    batch: int, others: dict[str, Any], expected: int
) -> None:
    found = _cosmos({BATCH: batch, **others})
    assert value_of(found, BATCH) == expected
    assert [problem.key for problem in batch_is_whole_groups(Config.model_validate(found.config))] == []
    if batch == expected:
        assert found.warnings == ()
        return
    (warning,) = found.warnings
    assert warning.startswith(f"{BATCH} is {expected} instead of {batch}: ")
    assert found.entry(BATCH).faithful == ((BATCH, batch),)
    assert f"instead of {batch}" in to_toml(found)


def test_a_batch_of_supervised_training_has_no_groups() -> None:
    found = _cosmos({"train.train_policy.type": "sft", BATCH: 20})
    assert (value_of(found, BATCH), found.warnings) == (20, ())


@pytest.mark.parametrize("batch", ["many", 0, True, 20.0])
def test_a_batch_that_is_not_a_number_passes_as_it_is(batch: object) -> None:
    assert value_of(_cosmos({BATCH: batch}), BATCH) == batch


def test_validation_does_not_begin_at_once_unless_told() -> None:
    assert value_of(_cosmos({"validation.enable": True}), "validation.before") is False
    assert value_of(_cosmos({"train.enable_validation": True}), "validation.before") is False
    assert value_of(_cosmos({}), "validation.before") is None


def test_the_type_is_guessed_as_cosmos_rl_does() -> None:
    text = "[train.train_policy]\nconversation_column_name = 'messages'\n[policy]\nmodel_name_or_path = 'm'\n"
    found = convert_text(text, "x.toml")
    assert (found.kind, value_of(found, "train.train_policy.type")) == ("sft", "sft")
    found = convert_text(text + "[train.train_policy.dataset]\nname = 'x'\n[rollout]\nn_generation = 4\n", "x.toml")
    assert found.entry("rollout.n_generation").outcome is Outcome.IMPLICIT
    for key in ("kl_beta = 0.0", "loss_type = 'token-mean'"):
        assert convert_text(f"[train.train_policy]\n{key}\n", "x.toml").kind == "grpo"


def test_unknown_keys_are_kept_and_guessed() -> None:
    found = _cosmos({"train.optm_lrr": 1.0, "vla.num_envs": 2, "train.train_policy.temperatur": 1.0})
    assert "did you mean `train.optm_lr`?" in found.entry("train.optm_lrr").note
    assert found.entry("vla.num_envs").outcome is Outcome.NONE
    assert found.entry("train.train_policy.temperatur").outcome is Outcome.UNSUPPORTED
    assert "train.optm_lrr" in to_toml(found)


@pytest.mark.parametrize("value", ["nan", "inf", "1979-05-27", "07:32:00"])
def test_values_that_no_configuration_holds_are_not_understood(value: str) -> None:
    text = f"[train.train_policy]\ntype = 'grpo'\n[policy]\nmodel_name_or_path = 'm'\n[custom]\nx = {value}\n"
    found = convert_text(text, "x.toml")
    assert found.entry("custom.x").outcome is Outcome.UNKNOWN
    assert tomllib.loads(to_toml(found)) == found.config


def test_wrong_values_pass_and_validate_says_so() -> None:
    found = _cosmos({"train.optm_lr": "fast", "train.epoch": 0})
    assert (value_of(found, "train.optm_lr"), value_of(found, "train.epoch")) == ("fast", 0)
    with pytest.raises(ConfigError, match="optm_lr"):
        check_config(found.config)
