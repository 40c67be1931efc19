"""The one closed list of what has no counterpart here, a part of it in the folder of each system: key -> reason.

A key that ends in `.*` stands for everything below it, one with `=value` for that value of the key only; a part in
angle brackets stands for any name of its kind.
Of these, `method` names what decides *what is trained*: algorithm, loss, estimator, rewards, filters, masks, which
parameters and which data. A file that asks for one of them gets it in `[unsupported]`; the rest is plumbing.
Whatever is not in this list maps to a key that acts, is always so here, or is not understood. A key that is not
understood may be a part of the method that this converter does not know: in the `tables` of a system that decide what
is trained it goes into `[unsupported]`, elsewhere it is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from convert.engine.keys import split_key, words

_T = TypeVar("_T")

_MISSPELT = 0.85  # of `difflib`: one letter of seven

OFF: tuple[Any, ...] = (None, False, 0, "", "null", "none", {}, [])

EITHER_WAY = object()
"""Among the values that ask for nothing: false and 0 are none of them, as they ask for something of their own."""

_POLICY = "train.train_policy"
METHOD_KEYS: frozenset[str] = frozenset(
    {
        f"{_POLICY}.{key}"
        for key in words(
            "variant advantage_estimator whiten_advantages advantage_clip unbiased_advantage gamma gae_lambda "
            "loss_type unbiased_loss_max_tokens epsilon_low epsilon_high lower_bound_ratio positive_nll_coef "
            "entropy_coeff kl_beta kl_type kl_in_reward.beta kl_in_reward.type kl_in_reward.controller "
            "kl_in_reward.target kl_in_reward.horizon rollout_correction.weights rollout_correction.cap "
            "rollout_correction.reject rollout_correction.reject_below rollout_correction.reject_above "
            "rollout_correction.off_policy_mask sample_masks.truncated sample_masks.mean_score_above "
            "sample_masks.mean_score_below sample_masks.failed_from_tokens "
            "overlong_reward reference_reset_interval mu_iterations routing_replay"
        )
    }
    | {"train.optm_name", "critic.optm_name", "critic.loss_type", "critic.value_clip"}
)
"""Keys of ours that decide what is trained: a value for one of them that is not understood is unsupported."""


@dataclass(frozen=True)
class ClosedList:
    """The keys of one system that have no counterpart.

    reasons: key -> why. method: key of the list that decides what is trained -> its values that ask for nothing, as
    well as OFF. general: the further names under which a key stands in the list. tables: dotted names of the tables
    in which every key may decide what is trained. flat: whether values at the top of a file may do so, too.
    plumbing: a pattern of the names of tables at the top, and of `table.key` of those in `mixed`, of which nobody
    needs to know what they say; in any other one a key that no rule knows may decide what is trained. None: it is
    `tables` alone that counts.
    """

    reasons: Mapping[str, str]
    method: Mapping[str, tuple[Any, ...]]
    general: Callable[[str], tuple[str, ...]] = lambda key: ()
    tables: tuple[str, ...] = ()
    flat: bool = False
    plumbing: re.Pattern[str] | None = None
    mixed: tuple[str, ...] = ()

    def reason(self, key: str) -> str | None:
        """Why a key has no counterpart; None where the list does not have it."""
        return self._find(self.reasons, key)

    def known_reason(self, key: str) -> str:
        """The reason of a key that a converter names. Raises LookupError where the list does not have it."""
        reason = self.reason(key)
        if reason is None:
            raise LookupError(f"{key} is not in the closed list")
        return reason

    def decides_method(self, key: str, value: Any) -> bool:
        """Whether a key of the list decides what is trained, and its value asks for something."""
        neutral = self._find(self.method, key)
        if neutral is None:
            return False
        off = [other for other in OFF if other not in (False, 0)] if EITHER_WAY in neutral else OFF
        return not any(same(value, other) for other in (*off, *neutral))

    def may_decide_method(self, key: str, value: Any, helpers: Collection[str]) -> bool:
        """Whether a key that is not understood may be a part of the method: by its place, if it holds anything.

        A table whose name differs from one of `tables` by a letter counts as that table. helpers: keys at the top of
        the file that others refer to.
        """
        if value is None or value in ({}, [], ""):
            return False
        plain = key.lstrip('"+~')  # one dotted key, as on a command line of Hydra
        if any(plain.startswith(f"{table}.") or key == table for table in self.tables):
            return True
        top, *inside = split_key(key)
        if top in helpers:
            return False
        return bool(get_close_matches(top, self.tables, 1, _MISSPELT)) if inside else self.flat

    def is_stray(self, key: str, value: Any, helpers: Collection[str]) -> bool:
        """Whether a key that no rule knows stands where a fork puts parts of a method, by `plumbing`."""
        top, *inside = key.replace('"', "").lstrip("+~").split(".")
        if self.plumbing is None or not inside or value is None or value in ({}, [], "") or top in helpers:
            return False
        return self.plumbing.fullmatch(f"{top}.{inside[0]}" if top in self.mixed else top) is None

    def _find(self, table: Mapping[str, _T], key: str) -> _T | None:
        entries = (_listed(table, name) for name in (key, *self.general(key)))
        return next((value for value in entries if value is not None), None)


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal, where true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _listed(table: Mapping[str, _T], key: str) -> _T | None:
    if key in table:
        return table[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        wildcard = ".".join(parts[:end]) + ".*"
        if wildcard in table:
            return table[wildcard]
    return None
