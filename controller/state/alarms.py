"""Alarms: hints that a training goes wrong, in plain words. Pure, fed with each step and each validation.

None of them ends a run. Each looks at a window of the newest steps, begins when its condition holds and is over when
it does not hold any more; both are events. A controller that starts again learns them anew from what is stored.

An alarm in `ONCE` begins once in a run, however often its condition holds: the job stores which ones have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median, stdev

from schema.wire.messages import StepRecord, ValidationRecord

WINDOW = 8
"""Steps that a condition must hold for, or is averaged over."""
BEGINNING = 8
"""First values of a metric, which later ones are compared with."""
COLLAPSES = ("entropy", "response_tokens_mean")
"""Metrics that are compared with their first values; not each step has them."""
PENALTY = "overlong"
"""Part of a score next to the rewards, where `overlong_reward` is on."""
LOOKED_BACK = 1024
"""Newest stored steps from which a controller that starts again learns."""
COLLAPSED = 0.1
"""Share of its first value at which entropy or length count as collapsed."""
CUT_OFF = 0.5
DOMINATES = 0.95
CERTAIN = 3.0
"""Standard errors by which a validation is below its best, and the reward above what it was then."""
ROUNDS = 2
"""Validations in a row that are so far below."""
ONCE = frozenset({"cut_unpunished"})
"""Alarms about the configuration, which does not change during a run."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its standard error; not a number: it is not known."""

    value: float
    error: float = math.nan

    def is_above(self, other: Mean) -> bool:
        """Whether it is so beyond what chance explains."""
        return self.value - other.value > CERTAIN * math.hypot(self.error, other.error)


@dataclass(frozen=True, slots=True)
class AlarmChange:
    """An alarm that begins (`on`) or is over."""

    name: str
    text: str
    on: bool


class Alarms:
    """See the module's docstring. `active`: what holds now, by name.

    weights: of the rewards by short name. compares: whether a prompt has several samples, from whose differences
    training learns.
    """

    def __init__(self, weights: Mapping[str, float], *, compares: bool = True) -> None:
        self._weights, self._compares = dict(weights), compares
        self._first: dict[str, dict[int, float]] = {name: {} for name in COLLAPSES}
        """By metric its first values, each with its step."""
        self._last: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in COLLAPSES}
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self._rounds: list[tuple[int, Mean, Mean]] = []
        """Version and score of each validation, and the reward around it."""
        self.active: dict[str, str] = {}
        self.shown: frozenset[str] = frozenset()
        """Alarms of `ONCE` that have begun in this run."""

    def restore(
        self, steps: Iterable[StepRecord], validations: Iterable[ValidationRecord], shown: Iterable[str] = ()
    ) -> None:
        """Look at what is stored of a job; nothing of it is news. shown: see `Alarms.shown`."""
        rounds = sorted(validations, key=lambda record: record.version)
        for record in steps:
            while rounds and rounds[0].version <= record.step:
                self.validation(rounds.pop(0))
            self.step(record)
        for left in rounds:
            self.validation(left)
        self.shown = ONCE.intersection(shown)  # what was found just now is news unless the job says otherwise
        self.active = {name: text for name, text in self.active.items() if name not in ONCE - self.shown}

    def rewind(self, step: int) -> None:
        """Steps from `step` on are undone: look at what comes."""
        self._recent.clear()
        for name, values in self._first.items():
            self._first[name] = {at: value for at, value in values.items() if at < step}
            self._last[name].clear()
        self._rounds = [known for known in self._rounds if known[0] <= step]

    def step(self, record: StepRecord) -> list[AlarmChange]:
        """A step was committed."""
        for name, values in self._first.items():
            if name in record.metrics:
                self._last[name].append(record.metrics[name])
                if len(values) < BEGINNING:
                    values[record.step] = record.metrics[name]
        self._recent.append(record)
        alarms = {name: text for name, look in self._rules().items() if (text := look())}
        return self._change(alarms)

    def validation(self, record: ValidationRecord) -> list[AlarmChange]:
        """A round of validation is over."""
        reward = self._reward()
        if record.score_mean is not None and record.score_error is not None and reward is not None:
            self._rounds.append((record.version, Mean(record.score_mean, record.score_error), reward))
        alarms = {name: text for name, text in self.active.items() if name != "overfitting"}
        if text := self._overfitting():
            alarms["overfitting"] = text
        return self._change(alarms)

    def _rules(self) -> dict[str, Callable[[], str]]:
        return {
            "entropy": lambda: self._collapsed("entropy", "entropy", "the entropy of the answers"),
            "length": lambda: self._collapsed("length", "response_tokens_mean", "the length of the answers"),
            "no_variance": self._no_variance,
            "cut_off": self._cut_off,
            "cut_unpunished": self._cut_unpunished,
            "dominance": self._dominance,
            "overfitting": self._overfitting,
        }

    def _change(self, alarms: dict[str, str]) -> list[AlarmChange]:
        before = self.active
        alarms = {name: text for name, text in alarms.items() if name in before or name not in self.shown}
        self.active, self.shown = alarms, self.shown | ONCE.intersection(alarms)
        begun = [AlarmChange(name, text, True) for name, text in alarms.items() if name not in before]
        return begun + [AlarmChange(name, text, False) for name, text in before.items() if name not in alarms]

    def _values(self, name: str) -> list[float]:
        return [record.metrics[name] for record in self._recent if name in record.metrics]

    def _mean(self, name: str) -> float | None:
        values = self._values(name)
        return fmean(values) if values else None

    def _collapsed(self, alarm: str, name: str, what: str) -> str:
        first, now = list(self._first[name].values()), list(self._last[name])
        if len(first) < BEGINNING or len(now) < WINDOW or median(first) <= 0:
            return ""
        edge = min if alarm in self.active else max  # it begins when all are below, and ends when all are above
        if edge(now) >= COLLAPSED * median(first):
            return ""
        then = f"{median(first):.3g} in the first {BEGINNING} steps that have it"
        return f"{what} has collapsed: {fmean(now):.3g} now, {then}"

    def _no_variance(self) -> str:
        shares = self._values("zero_variance_fraction")
        if not self._compares or len(shares) < WINDOW or min(shares) < 1.0:
            return ""
        return f"no group of the last {WINDOW} steps has answers of different worth: nothing is learned from them"

    def _cut_off(self) -> str:
        share = self._mean("truncated_fraction")
        if share is None or len(self._recent) < WINDOW or share <= CUT_OFF:
            return ""
        return (
            f"{share:.0%} of the answers are cut off at their longest: raise rollout.max_response_length, "
            f"or reward brevity"
        )

    def _cut_unpunished(self) -> str:
        """Answers that were cut and have no score: no mean of a group and no loss says anything against them."""
        name = "truncated_unscored_fraction"
        record = next((record for record in self._recent if record.metrics.get(name)), None)
        if record is None:
            return ""
        return (
            f"{record.metrics[name]:.1%} of the answers of step {record.step} were cut and have no score: they are "
            f"left out of the mean of their group and of the loss, so nothing is learned against answers that are "
            f"too long. Answers that end with the longest sequence are overlong: write a "
            f"rollout.max_response_length below policy.model_max_length (and rollout.max_model_len), so that each "
            f"prompt leaves room for it and a cut answer gets a score, which "
            f"train.train_policy.overlong_reward lowers before. Where a reward function fails on cut answers, let "
            f'it return a number, or write reward.on_error = "drop"'
        )

    def _dominance(self) -> str:
        if len(self._weights) < 2 or len(self._recent) < WINDOW:
            return ""
        parts = {
            name: abs(weight * (self._mean(f"reward/{name}") or 0.0))
            for name, weight in (*self._weights.items(), (PENALTY, 1.0))
        }
        total = sum(parts.values())
        name = max(parts, key=lambda part: parts[part])
        if total <= 0 or parts[name] <= DOMINATES * total:
            return ""
        return f"{parts[name] / total:.0%} of the score come from the reward {name}: the others hardly count"

    def _overfitting(self) -> str:
        reward = self._reward()
        if reward is None or len(self._rounds) <= ROUNDS:
            return ""
        *_, (_, last, _) = self._rounds
        _, best, then = max(self._rounds[:-ROUNDS], key=lambda known: known[1].value)
        fell = all(best.is_above(score) for _, score, _ in self._rounds[-ROUNDS:])
        if not fell or not reward.is_above(then):
            return ""
        return (
            f"validation falls ({best.value:.3f} at its best, {last.value:.3f} now) while the reward rises "
            f"({then.value:.3f} → {reward.value:.3f}): the model may exploit the reward, or overfit"
        )

    def _reward(self) -> Mean | None:
        values = self._values("reward_mean")
        return Mean(fmean(values), stdev(values) / len(values) ** 0.5) if len(values) > 1 else None
