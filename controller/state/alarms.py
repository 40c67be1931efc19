"""Alarms: hints that a training goes wrong, in plain words. Pure, fed with each step and each validation.

None of them ends a run. Each looks at a window of the newest steps, begins when its condition holds and is over when
it does not hold any more; both are events. A controller that starts again learns them anew from the stored steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from schema.wire.messages import StepRecord, ValidationRecord

WINDOW = 8
"""Steps that a condition must hold for, or is averaged over."""
BEGINNING = 8
"""First steps, which later ones are compared with."""
COLLAPSED = 0.2
"""Share of its first value at which entropy or length count as collapsed."""
CUT_OFF = 0.5
DOMINATES = 0.95
FALL, RISE = 0.05, 0.02
"""By how much a validation is below its best, and the reward above what it was then."""


@dataclass(frozen=True, slots=True)
class Change:
    """An alarm that begins (`on`) or is over."""

    name: str
    text: str
    on: bool


class Alarms:
    """See the module's docstring. `active`: what holds now, by name. weights: of the rewards by short name."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._first: list[Mapping[str, float]] = []
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self._best: tuple[float, float] | None = None
        """Best validation so far, and the mean reward around it."""
        self._last: float | None = None
        self.active: dict[str, str] = {}

    def rewind(self) -> None:
        """Steps are undone: look at what comes."""
        self._recent.clear()

    def step(self, record: StepRecord) -> list[Change]:
        """A step was committed."""
        if len(self._first) < BEGINNING:
            self._first.append(record.metrics)
        self._recent.append(record)
        found = {name: text for name, look in self._rules().items() if (text := look())}
        return self._change(found)

    def validation(self, record: ValidationRecord) -> list[Change]:
        """A round of validation is over."""
        self._last = record.score_mean
        if record.score_mean is not None and (self._best is None or record.score_mean >= self._best[0]):
            self._best = record.score_mean, self._mean("reward_mean") or 0.0
        found = {name: text for name, text in self.active.items() if name != "overfitting"}
        if text := self._overfitting():
            found["overfitting"] = text
        return self._change(found)

    def _rules(self) -> dict[str, Callable[[], str]]:
        return {
            "entropy": lambda: self._collapsed("entropy", "the entropy of the answers"),
            "length": lambda: self._collapsed("response_tokens_mean", "the length of the answers"),
            "no_variance": self._no_variance,
            "cut_off": self._cut_off,
            "dominance": self._dominance,
            "overfitting": self._overfitting,
        }

    def _change(self, found: dict[str, str]) -> list[Change]:
        before, self.active = self.active, found
        begun = [Change(name, text, True) for name, text in found.items() if name not in before]
        return begun + [Change(name, text, False) for name, text in before.items() if name not in found]

    def _values(self, name: str) -> list[float]:
        return [record.metrics[name] for record in self._recent if name in record.metrics]

    def _mean(self, name: str) -> float | None:
        values = self._values(name)
        return fmean(values) if values else None

    def _collapsed(self, name: str, what: str) -> str:
        first = [metrics[name] for metrics in self._first if name in metrics]
        now = self._values(name)
        if len(first) < BEGINNING or len(now) < WINDOW or median(first) <= 0:
            return ""
        if max(now) >= COLLAPSED * median(first):
            return ""
        return (
            f"{what} has collapsed: {fmean(now):.3g} now, {median(first):.3g} in the first {BEGINNING} steps"
        )

    def _no_variance(self) -> str:
        newest = self._recent[-1].metrics.get("zero_variance_fraction")
        if newest is None or newest < 1.0:
            return ""
        return "no group of the last step has answers of different worth: nothing is learned from it"

    def _cut_off(self) -> str:
        share = self._mean("truncated_fraction")
        if share is None or len(self._recent) < WINDOW or share <= CUT_OFF:
            return ""
        return (
            f"{share:.0%} of the answers are cut off at their longest: raise rollout.max_response_length, "
            f"or reward brevity"
        )

    def _dominance(self) -> str:
        if len(self._weights) < 2 or len(self._recent) < WINDOW:
            return ""
        parts = {
            name: abs(weight * (self._mean(f"reward/{name}") or 0.0))
            for name, weight in self._weights.items()
        }
        total = sum(parts.values())
        name = max(parts, key=lambda part: parts[part])
        if total <= 0 or parts[name] <= DOMINATES * total:
            return ""
        return f"{parts[name] / total:.0%} of the score come from the reward {name}: the others hardly count"

    def _overfitting(self) -> str:
        reward = self._mean("reward_mean")
        if self._best is None or self._last is None or reward is None:
            return ""
        best, then = self._best
        if self._last > best - FALL or reward < then + RISE:
            return ""
        return (
            f"validation falls ({best:.3f} at its best, {self._last:.3f} now) while the reward rises "
            f"({then:.3f} → {reward:.3f}): the model may exploit the reward, or overfit"
        )
