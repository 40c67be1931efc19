"""The one closed list of what has no counterpart here: system -> key -> reason.

A key that ends in `.*` stands for everything below it, one with `=value` for that value of the key only; a part in
angle brackets stands for any name of its kind.
Of these, METHOD names what decides *what is trained*: algorithm, loss, estimator, rewards, filters, masks, which
parameters and which data. A file that asks for one of them gets it in `[unsupported]`; the rest is plumbing.
Whatever is not in this list maps to a key that acts, is always so here, or is reported as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from schema.interop.cosmos.unsupported import COSMOS_METHOD, COSMOS_NONE
from schema.interop.roll.unsupported import ROLL_METHOD, ROLL_NONE, general
from schema.interop.verl.unsupported import VERL_METHOD, VERL_NONE

_T = TypeVar("_T")

NO_COUNTERPART: dict[str, dict[str, str]] = {
    "verl": VERL_NONE,
    "roll": ROLL_NONE,
    "cosmos-rl": COSMOS_NONE,
}


METHOD: dict[str, dict[str, tuple[Any, ...]]] = {
    "verl": VERL_METHOD,
    "roll": ROLL_METHOD,
    "cosmos-rl": COSMOS_METHOD,
}
"""System -> key of the list that decides what is trained -> its values that ask for nothing, as well as OFF."""

OFF: tuple[Any, ...] = (None, False, 0, "", "null", "none", {}, [])

_POLICY = "train.train_policy"
METHOD_KEYS: frozenset[str] = frozenset(
    {
        f"{_POLICY}.{key}"
        for key in (
            "variant",
            "advantage_estimator",
            "unbiased_advantage",
            "gamma",
            "gae_lambda",
            "loss_type",
            "unbiased_loss_max_tokens",
            "epsilon_low",
            "epsilon_high",
            "lower_bound_ratio",
            "positive_nll_coef",
            "entropy_coeff",
            "kl_beta",
            "kl_type",
            "kl_in_reward.beta",
            "kl_in_reward.type",
            "kl_in_reward.controller",
            "kl_in_reward.target",
            "kl_in_reward.horizon",
            "rollout_correction.weights",
            "rollout_correction.cap",
            "rollout_correction.reject",
            "rollout_correction.reject_below",
            "rollout_correction.reject_above",
            "overlong_reward",
            "reference_reset_interval",
            "mu_iterations",
        )
    }
    | {"train.optm_name", "critic.optm_name", "critic.loss_type", "critic.value_clip"}
)
"""Keys of ours that decide what is trained: a value for one of them that is not understood is unsupported."""


def decides_method(system: str, key: str, value: Any) -> bool:
    """Whether a key of the closed list decides what is trained, and its value asks for something."""
    found = (_listed(METHOD.get(system, {}), name) for name in _names(system, key))
    neutral = next((values for values in found if values is not None), None)
    return neutral is not None and not any(_same(value, other) for other in (*OFF, *neutral))


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def reason_for(system: str, key: str) -> str | None:
    """Why a key has no counterpart; None where the list does not have it."""
    found = (_listed(NO_COUNTERPART.get(system, {}), name) for name in _names(system, key))
    return next((reason for reason in found if reason is not None), None)


def _names(system: str, key: str) -> tuple[str, ...]:
    return (key, *general(key)) if system == "roll" else (key,)


def _listed(table: Mapping[str, _T], key: str) -> _T | None:
    if key in table:
        return table[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        wildcard = ".".join(parts[:end]) + ".*"
        if wildcard in table:
            return table[wildcard]
    return None
