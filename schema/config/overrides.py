"""Entries of a model's config.json that `override_config` replaces, the same way in every process that loads it.

Each entry is set on the loaded configuration, as vLLM sets its `hf_overrides`. What other keys decide, and what
training switches off anyway, is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from schema.config.problem import Problem

DECIDED: dict[str, str] = {
    "model_type": "name another model",
    "architectures": "name another model",
    "auto_map": "name another model",
    "quantization_config": "name a model that is not quantised",
    "dtype": "write train.master_dtype or train.param_dtype",
    "torch_dtype": "write train.master_dtype or train.param_dtype",
    "attn_implementation": "the trainer and the engine choose their own",
    "use_cache": "the trainer and the engine choose their own",
}
"""Entries that are something else's to decide, and what to do."""


class OverrideError(ValueError):
    """An entry cannot be replaced; the text has the key, the reason and the remedy."""


def is_dropout(name: str) -> bool:
    """Whether an entry of a config.json is a dropout probability."""
    return "dropout" in name or name.endswith("_pdrop")


def refusals(key: str, override: Mapping[str, Any]) -> Iterator[Problem]:
    """Entries that must not be replaced. key: `policy.override_config`, or the critic's."""
    for name, value in override.items():
        if name in DECIDED:
            message = f"{name} is not for override_config to replace"
            yield Problem(f"{key}.{name}", message, value, DECIDED[name])
        elif is_dropout(name) and isinstance(value, int | float) and value > 0:
            message = f"{value} would not act: dropout is off in training, else log-probs would be of another model"
            yield Problem(f"{key}.{name}", message, value, "write 0.0, or leave it out")


def unknown(key: str, override: Mapping[str, Any], known: Collection[str]) -> Iterator[Problem]:
    """Entries that the model's configuration does not have."""
    for name, value in override.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "look into the model's config.json"
            yield Problem(f"{key}.{name}", f"the model's configuration has no entry {name!r}", value, hint)


def apply(model_config: Any, key: str, override: Mapping[str, Any]) -> None:
    """Set the entries on a transformers configuration.

    Raises:
        OverrideError: it has no such entry, or does not take the value.
    """
    if not override:
        return
    entries = model_config.to_dict()
    names = {*entries, *type(model_config).attribute_map}
    problems = [*refusals(key, override), *unknown(key, override, names)]
    for name, value in override.items():
        if hasattr(getattr(model_config, name, None), "to_dict"):
            hint = "only entries at the top of config.json can be replaced"
            problems.append(Problem(f"{key}.{name}", f"{name} is a configuration of its own", value, hint))
    if problems:
        raise OverrideError("\n".join(problem.render() for problem in problems))
    for name, value in override.items():
        try:
            setattr(model_config, name, value)
        except Exception as error:  # transformers' classes check in ways of their own
            raise OverrideError(f"{key}.{name} = {value!r} is not taken by the model: {error}") from error
