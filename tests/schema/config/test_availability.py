"""The table of what this build cannot do: every row refuses by name, and nothing neutral is refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from schema.config import UNAVAILABLE, Config, check_available
from schema.config.loading.explain import all_fields
from tests.schema.config_samples import GRPO, SFT, other_value, write
from tests.support.each import check_each


def example(key: str) -> Any:
    """A value that is not neutral."""
    return other_value(key, UNAVAILABLE[key].neutral)


def config_with(key: str, value: Any) -> Config:
    """A job in which the key means something, with the value written."""
    data = deepcopy(SFT if key == "validation.enable" else GRPO)
    if value is not None:
        write(data, key.split("."), value)
    return Config.model_validate(data)


def test_rows_name_keys_of_the_schema() -> None:
    keys = {".".join(path) for path in all_fields()}
    assert UNAVAILABLE.keys() <= keys


def test_what_is_not_built_is_refused_by_name() -> None:
    check_each(UNAVAILABLE, _check_refusal)


def _check_refusal(key: str) -> None:
    (problem,) = check_available(config_with(key, example(key)))
    assert problem.key == key
    assert UNAVAILABLE[key].missing in problem.message
    assert "this build cannot do" in problem.message
    assert problem.hint == "leave it out" or problem.hint.startswith(f"write {key} = ")


def test_neutral_values_are_accepted() -> None:
    for key, row in UNAVAILABLE.items():
        for neutral in row.neutral:
            config = config_with(key, neutral)
            assert check_available(config) == [], key


def test_no_default_is_refused() -> None:
    assert check_available(Config()) == []
    for key, row in UNAVAILABLE.items():
        value: Any = Config()
        for part in key.split("."):
            value = getattr(value, part, None)  # of a section that is unset
        assert value in (*row.neutral, None), key


def test_keys_without_meaning_in_this_job_are_not_looked_at() -> None:
    data = deepcopy(SFT)
    write(data, ("rollout", "parallelism", "cp_size"), 4)
    assert check_available(Config.model_validate(data)) == []


def test_a_number_is_not_a_boolean() -> None:
    data = deepcopy(GRPO)
    write(data, ("train", "train_policy", "kl_beta"), 0.0)
    assert check_available(Config.model_validate(data)) == []
    write(data, ("rollout", "multi_turn_config", "max_assistant_turns"), 1)
    assert len(check_available(Config.model_validate(data))) == 1


def test_an_absent_role_is_refused_once() -> None:
    """Not once for each of its keys."""
    scorer = {"enable": True, "model_name_or_path": "owner/name", "offload": True, "mini_batch": 3}
    data = deepcopy(GRPO)
    write(data, ("reward_model",), scorer)
    write(data, ("rollout", "multi_turn_config"), {"enable": True, "enable_thinking": True})
    turns, role = check_available(Config.model_validate(data))
    assert (role.key, turns.key) == ("reward_model", "rollout.multi_turn_config.enable")
    assert role.message == (
        "this build cannot do a reward model yet, which enable, model_name_or_path, mini_batch and 1 more ask for"
    )
    assert role.hint == "leave [reward_model] out"
    assert set(role.related) == {f"reward_model.{name}" for name in scorer}
    del data["reward_model"], data["rollout"]["multi_turn_config"]
    assert check_available(Config.model_validate(data)) == []
