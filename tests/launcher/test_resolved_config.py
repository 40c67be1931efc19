"""`show`: TOML that reads back the same, with the writer of each value, and without secrets."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from launcher.paths import resolved
from launcher.resolved_config import Value, lines, values
from schema.config import check_config
from schema.config.loading.load import LoadedConfig, load
from tests.launcher.samples import write_job


def shown(loaded: LoadedConfig, **options: Any) -> dict[str, Value]:
    return {value.key: value for value in values(loaded, **options)}


def parsed(loaded: LoadedConfig, **options: Any) -> dict[str, Any]:
    return tomllib.loads("\n".join(lines(values(loaded, **options))))


def test_the_output_is_the_resolved_configuration(tmp_path: Path) -> None:
    loaded = load(write_job(tmp_path, '[custom]\n"odd key" = { a = [1, "x"] }\n'), ["train.seed=3"])
    assert resolved(check_config(parsed(loaded))) == resolved(loaded.config)
    again = parsed(loaded, changed_only=True)
    assert resolved(check_config(again)) == resolved(loaded.config)
    assert "weight_sync" not in again
    assert set(again["train"]) == {"output_dir", "compile", "train_batch_per_replica", "train_policy", "seed"}


def test_every_value_names_its_writer(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    over = tmp_path / "over.toml"
    over.write_text("[train]\nepoch = 2\n")
    loaded = load([path, over], ["rollout.n_generation=4"], {"COSMOS_TRAIN__OPTM_LR": "1e-5"})
    found = shown(loaded)
    assert (found["train.epoch"].origin, found["train.epoch"].where) == ("file", f"{over}:2:1")
    assert found["train.compile"].where == f"{path}:4:1"
    assert (found["train.optm_lr"].origin, found["train.optm_lr"].where) == ("environment", "COSMOS_TRAIN__OPTM_LR")
    assert (found["rollout.n_generation"].origin, found["rollout.n_generation"].where) == ("set", "--set")
    assert (found["train.epsilon"].origin, found["train.epsilon"].source) == ("default", "default")
    text = lines(values(loaded))
    assert any(line.startswith("optm_lr = 1e-05 ") and line.endswith("# COSMOS_TRAIN__OPTM_LR") for line in text)
    assert any(line.startswith("# seed is unset ") for line in text)


def test_all_writers_of_a_table_are_named(tmp_path: Path) -> None:
    path = write_job(tmp_path, "[custom]\na = 1\nlist = [1, 2]\n")
    over = tmp_path / "over.toml"
    over.write_text("custom.b = 2\n")
    loaded = load([path, over], ["custom.d=4"], {"COSMOS_CUSTOM__C": "3"})
    value = shown(loaded)["custom"]
    assert value.value == {"a": 1, "list": [1, 2], "b": 2, "c": 3, "d": 4}
    assert value.where.endswith(f"{over}:1:1, COSMOS_CUSTOM__C, --set")
    assert value.origin == "set"


def test_a_key_that_follows_another_names_that_writer(tmp_path: Path) -> None:
    loaded = load(write_job(tmp_path), ["train.train_policy.on_policy=true"])
    bound = shown(loaded)["train.train_policy.allowed_outdated_steps"]
    assert (bound.value, bound.origin) == (0, "set")
    loaded = load(write_job(tmp_path), ["train.train_policy.temperature=0.5"])
    assert shown(loaded)["rollout.sampling_config.temperature"].value == 0.5
    assert shown(loaded)["rollout.sampling_config.temperature"].origin == "set"


def test_no_secret_is_printed(tmp_path: Path) -> None:
    loaded = load(
        write_job(tmp_path), ["redis.url=redis://u:hunter2@127.0.0.1:1/0"], {"COSMOS_CUSTOM__HF_TOKEN": "hunter2"}
    )
    found = values(loaded)
    assert "hunter2" not in "\n".join(lines(found))
    assert "hunter2" not in repr([value.as_dict() for value in found])


def test_nothing_written_says_so() -> None:
    assert lines([]) == ["# nothing is written: every key has its default"]
