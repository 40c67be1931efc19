"""Which settings the numbers of a training step depend on: those of a trainer that has its batch and its weights.

Not among them: keys that only say what is written where (`acts="file: …"`), such as the run's directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from schema.config.keys import leaf_keys, observable
from schema.config.root import Config

_SAMPLING = (
    "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "sampling_correction",
)  # fmt: skip
"""Keys that trainers apply to their logits; kept sets are in the batch."""
_SECTIONS = ("train.", "policy.", "reference.", "critic.", "teacher")
READ = (*_SECTIONS, *(f"rollout.sampling_config.{name}" for name in _SAMPLING))


def changes_numbers(key: str) -> bool:
    """Whether a dotted key is one of them."""
    return key.startswith(READ) and not (key in leaf_keys() and observable(key).kind == "file")


def settings_digest(config: Config) -> str:
    """The same for two configurations where these settings are."""
    data = config.to_dict()
    values = {key: _value_at(data, key) for key in leaf_keys() if changes_numbers(key)}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=12).hexdigest()


def _value_at(data: Any, key: str) -> Any:
    """None where one of its tables does not have it; of a list of tables one for each."""
    if isinstance(data, list):
        return [_value_at(item, key) for item in data]
    part, _, rest = key.partition(".")
    data = data.get(part) if isinstance(data, Mapping) else None
    return _value_at(data, rest) if rest else data
