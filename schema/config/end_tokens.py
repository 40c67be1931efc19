"""Tokens that end an answer, from the files of a model: without torch, for data preparation and rollouts alike."""

from __future__ import annotations

from typing import Any

from schema.config.model_facts import BrokenModelError, FindFile, read_config
from schema.config.sections.policy import PolicyConfig


def eos_token_ids(policy: PolicyConfig, own: int | None, find: FindFile) -> frozenset[int]:
    """The end tokens of the generation config (else of the model's config), and the tokenizer's `own`.

    A file that is missing or cannot be read names none.
    """
    for file, override in (("generation_config.json", {}), ("config.json", policy.override_config)):
        if ids := _ids({**_content(policy, file, find), **override}.get("eos_token_id")):
            break
    return frozenset(ids if own is None else {*ids, own})


def _content(policy: PolicyConfig, file: str, find: FindFile) -> dict[str, Any]:
    path = find(policy.model_name_or_path, policy.model_revision, file)
    try:
        return {} if path is None else read_config(path)
    except BrokenModelError:
        return {}


def _ids(value: Any) -> set[int]:
    """The token ids of an entry, which holds one, several or none: −1 stands for none."""
    several = value if isinstance(value, list) else [value]
    return {token for token in several if type(token) is int and token >= 0}
