"""Every path of a configuration made absolute, so that it means the same in each process and after a restart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from schema.config import BUILTIN_REWARDS, Config, local_path
from schema.config.secrets import cut
from schema.storage.address import is_remote
from schema.wire.store_url import is_url

TLS_FILES = tuple(
    (section, name) for section in ("controller", "redis") for name in ("tls_ca", "tls_cert", "tls_key")
)


def absolute(path: str, base: str = "") -> str:
    """`~` and the current directory, or `base`, resolved; symbolic links stay as written."""
    return os.path.abspath(os.path.join(base, os.path.expanduser(path)))


def resolved(config: Config, base: str = "") -> dict[str, Any]:
    """The resolved configuration as JSON-compatible values, with absolute paths and without credentials.

    Names on the hub, buckets, built-in generators and built-in rewards are not paths and stay as they are.
    base: the directory that relative paths are below; empty: the current one.
    """
    data = config.to_dict()
    train, policy = data["train"], data["train"]["train_policy"]
    for section in (data["policy"], data["reference"], data["critic"], *data["teacher"]):
        for key in {"model_name_or_path", "tokenizer_name_or_path", "model"} & section.keys():
            section[key] = _source(section[key], base)
    for key in {"variant", "advantage_estimator"} & policy.keys():
        policy[key] = _reward(policy[key], base)
    for dataset in (policy["dataset"], data["validation"]["dataset"], data["evaluation"]["dataset"]):
        for part in (dataset, *dataset["part"]):
            _resolve_rows(part, base)
    train["output_dir"] = absolute(train["output_dir"], base)
    if isinstance(train["resume"], str):
        train["resume"] = absolute(train["resume"], base)
    if data["weight_sync"]["store"] and not is_url(data["weight_sync"]["store"]):
        data["weight_sync"]["store"] = absolute(data["weight_sync"]["store"], base)
    conversations = data["rollout"]["multi_turn_config"]
    policy_paths = [(policy, "dataset_cache_dir"), (conversations, "custom_chat_template_path")]
    directories = (("controller", "payload_store"), ("logging", "samples_dir"))
    named = [(data[section], name) for section, name in (*TLS_FILES, *directories)]
    for table, name in (*named, *policy_paths):
        if table[name]:
            table[name] = absolute(table[name], base)
    for section in (policy, data["validation"], *data["validation"]["dataset"]["part"], data["evaluation"]):
        for key in ("reward_function", "filter_reward_metric"):
            if key in section:
                section[key] = _rewards(section[key], base)
    return cast("dict[str, Any]", cut(data))


def leaves(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The values of nested tables by their dotted key, in order; an empty table is a value."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        is_table = isinstance(value, dict) and value
        values |= leaves(value, f"{above}{name}.") if is_table else {f"{above}{name}": value}
    return values


def _source(name: str | None, base: str) -> str | None:
    path = local_path(name) if name else None
    return name if path is None else absolute(str(path), base)


def _resolve_rows(dataset: dict[str, Any], base: str) -> None:
    """Make the paths of a dataset absolute."""
    name = dataset["name"]
    if not name.startswith("synthetic:") and not is_remote(name):
        dataset["name"] = _source(name, base)
    dataset["files"] = [file if is_remote(file) else absolute(file, base) for file in dataset["files"]]
    dataset["custom_class"] = _reward(dataset["custom_class"], base)


def _reward(name: str, base: str) -> str:
    file, colon, function = name.rpartition(":")
    return name if name in BUILTIN_REWARDS or not colon else f"{absolute(file, base)}:{function}"


def _rewards(spec: Any, base: str) -> Any:
    """One of the three ways to write rewards, with absolute files."""
    if isinstance(spec, str):
        return _reward(spec, base)
    if isinstance(spec, list):
        return [_reward(name, base) for name in spec]
    return {_reward(name, base): weight for name, weight in spec.items()}
