"""Every path of a configuration made absolute, so that it means the same in each process and after a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from schema.config import BUILTIN_REWARDS, Config, local_path


def absolute(path: str) -> str:
    """`~` and the current directory resolved; symbolic links stay as written."""
    return os.path.abspath(os.path.expanduser(path))


def resolved(config: Config) -> dict[str, Any]:
    """The resolved configuration as JSON-compatible values, with absolute paths and without the Redis password.

    Names on the hub, built-in generators and built-in rewards are no paths and stay as they are.
    """
    data = config.to_dict()
    train, policy = data["train"], data["train"]["train_policy"]
    model = data["policy"]
    model["model_name_or_path"] = _source(model["model_name_or_path"])
    model["tokenizer_name_or_path"] = _source(model["tokenizer_name_or_path"])
    for dataset in (policy["dataset"], data["validation"]["dataset"], data["evaluation"]["dataset"]):
        if not dataset["name"].startswith("synthetic:"):
            dataset["name"] = _source(dataset["name"])
        dataset["files"] = [absolute(file) for file in dataset["files"]]
    train["output_dir"] = absolute(train["output_dir"])
    if isinstance(train["resume"], str):
        train["resume"] = absolute(train["resume"])
    if data["weight_sync"]["store"]:
        data["weight_sync"]["store"] = absolute(data["weight_sync"]["store"])
    template = data["rollout"]["multi_turn_config"]["custom_chat_template_path"]
    if template:
        data["rollout"]["multi_turn_config"]["custom_chat_template_path"] = absolute(template)
    for section in (policy, data["validation"], data["evaluation"]):
        for key in ("reward_function", "filter_reward_metric"):
            if key in section:
                section[key] = _rewards(section[key])
    data["redis"]["url"] = without_password(data["redis"]["url"])
    return data


def without_password(url: str) -> str:
    """A Redis address that may be written to a file: user and password left out."""
    if not url:
        return url
    parts = urlsplit(url)
    query = [(key, value) for key, value in parse_qsl(parts.query) if key not in ("username", "password")]
    host = parts.netloc.rpartition("@")[2]
    shown = f"{parts.scheme}://{host}{parts.path}"
    return f"{shown}?{urlencode(query)}" if query else shown


def _source(name: str | None) -> str | None:
    path = local_path(name) if name else None
    return name if path is None else absolute(str(path))


def _reward(name: str) -> str:
    file, colon, function = name.rpartition(":")
    return name if name in BUILTIN_REWARDS or not colon else f"{absolute(file)}:{function}"


def _rewards(spec: Any) -> Any:
    """One of the three ways to write rewards, with absolute files."""
    change: Callable[[str], str] = _reward
    if isinstance(spec, str):
        return change(spec) if spec else spec
    if isinstance(spec, list):
        return [change(name) for name in spec]
    return {change(name): weight for name, weight in spec.items()}
