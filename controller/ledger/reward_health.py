"""Whether rewards work at all: when prompts are held back because they do not, and when the run stops.

    working ─ STREAK prompts in a row time out or cannot connect ─▶ outage ─ a prompt is scored ─▶ working
       │                                                            │   ▲
       │ the same exception everywhere         one probe at a time, └───┘ each waits twice as long as the one before
       ▼                                                            ▼
    stopped ◀──────────── nothing was scored for `outage_timeout` seconds

An *attempt* is a lease under which the last sample of its group arrived. It failed if none of the samples made under
it has a score, in the way of most of them; with another exception than an outage's only if no earlier attempt at the
prompt has left a score. The way, `Failure.kind`, is the type of the exception and the reward function: messages
differ from row to row. The ledger accepts each sample of a lease once, so what is repeated is counted once. Prompts
from which nothing can be generated say nothing. Rounds of validation count where they are scored with the functions
of training.

Invariants:

    1. The run stops by an exception only if it failed as many prompts as a step has groups before anything was
       scored, or attempts at more than half of the prompts of the window. One bad prompt that is tried again and
       again is not enough.
    2. A time-out or connection error stops nothing before `outage_timeout` has passed since the first of an unbroken
       row of them.
    3. During an outage at most one probe is out.

Nothing is stored: a controller that starts again learns it anew from the next attempts. An outage is then noticed,
and its time counted, from there; `scored` says whether the ledger knows of a prompt that was scored before.

Pure: time comes in as `now` (seconds).
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from schema.util.text import one_line
from schema.wire.sample import SampleHeader

WINDOW, MOST_FAILED = 64, 32
"""Attempts that are looked at, and how many of them may fail in the same way."""
FEWEST_PROMPTS = 2
"""One prompt alone may be a bad one, also where a step has but one group."""
STREAK = 8
"""Prompts in a row, or the groups of a step if these are fewer: with `on_error = drop` each costs its prompt."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before a probe."""
MAX_HEAD = 200
_FUNCTION = re.compile(r"^in reward function (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """How an attempt failed. `head`: one printable line; `text`: everything, with the traceback.

    generated: False where there was nothing to score, since the prompt is too long or empty.
    """

    kind: str
    head: str
    text: str
    outage: bool
    generated: bool

    @classmethod
    def of(cls, header: SampleHeader) -> Self:
        text = header.error or "no reason was given"
        first = text.split("\n", 1)[0]
        match = _FUNCTION.search(text)
        where = f" in reward function {match[1]}" if match else ""
        head = one_line((first if len(first) <= MAX_HEAD else first[:MAX_HEAD] + "…") + where)
        return cls(first.partition(":")[0] + where, head, text, header.outage, header.finish_reason != "abort")


def failure_of(made: Iterable[SampleHeader], kept_score: bool) -> Failure | None:
    """How an attempt failed, from the samples made under its lease; None if it did not.

    kept_score: whether a sample of an earlier attempt has a score.
    """
    failures = []
    for header in made:
        if header.error is None:
            return None
        failures.append(Failure.of(header))
    kind, _ = Counter(failure.kind for failure in failures).most_common(1)[0]
    failure = next(failure for failure in failures if failure.kind == kind)
    return None if kept_score and not failure.outage else failure


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the run cannot go on, in one line, and the traceback."""

    reason: str
    traceback: str


class RewardHealth:
    """See the module's docstring. `probe`: group and lease that is tried during an outage, while it is held."""

    def __init__(self, groups_per_step: int, outage_timeout: float, *, scored: bool) -> None:
        self._first = max(FEWEST_PROMPTS, groups_per_step)
        self._streak_length = min(self._first, STREAK)
        self._timeout = outage_timeout
        self.reset(scored=scored)

    def reset(self, *, scored: bool) -> None:
        """Begin anew: an operator says that the rewards may work now."""
        self._scored = scored
        self._window: deque[tuple[str, Failure | None]] = deque(maxlen=WINDOW)
        self._end_outage()

    def _end_outage(self) -> None:
        self.outage: Failure | None = None
        self.probe: tuple[str, str] | None = None
        self._streak: set[str] = set()
        self._since = self._next_probe = 0.0
        self._wait = FIRST_WAIT

    @property
    def note(self) -> str:
        """Return what people should know while an outage lasts; else empty."""
        if self.outage is None:
            return ""
        return (
            f"rewards time out or cannot connect ({self.outage.head}): one prompt at a time is tried until one is "
            f"scored; the run stops after reward.outage_timeout = {self._timeout:g} s without a score"
        )

    def may_probe(self, now: float) -> bool:
        """Whether one prompt may be handed out during an outage."""
        return self.outage is not None and self.probe is None and now >= self._next_probe

    def forgive(self, seconds: float) -> None:
        """No request could be served for a while: that says nothing about rewards."""
        self._since += seconds

    def observe(self, name: str, lease_id: str, failure: Failure | None, now: float) -> Stop | None:
        """An attempt at group `name` is complete. failure: None if its prompt was scored."""
        if failure is None or failure.generated:
            self._window.append((name, failure))
        if failure is None:
            self._scored = True
            self._end_outage()
            return None
        probed = self.probe == (name, lease_id)
        if probed:
            self.probe = None
        if not failure.generated:
            return None
        if failure.outage:
            self._add_to_streak(name, failure, now)
        elif (stop := self._same_everywhere(failure)) is not None:
            return stop
        if self.outage is not None and now - self._since >= self._timeout:
            reason = (
                f"no prompt was scored for reward.outage_timeout = {self._timeout:g} s: {failure.head}. What was "
                f"trained is kept: bring back what the rewards call and go on with --resume"
            )
            return Stop(reason, failure.text)
        if probed:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            self._next_probe = min(now + self._wait, self._since + self._timeout)
        return None

    def _add_to_streak(self, name: str, failure: Failure, now: float) -> None:
        if not self._streak:
            self._since = now
        if self.outage is not None:
            self.outage = failure
            return
        self._streak.add(name)
        if len(self._streak) >= self._streak_length:
            self.outage, self._next_probe = failure, now + self._wait

    def _same_everywhere(self, failure: Failure) -> Stop | None:
        failed = [name for name, other in self._window if other is not None and other.kind == failure.kind]
        prompts, attempted = set(failed), {name for name, _ in self._window}
        if not self._scored and len(prompts) >= self._first:
            what = (
                f"not one prompt was scored: {len(prompts)} of the first {len(attempted)} failed with the same "
                f"exception"
            )
        elif len(failed) > MOST_FAILED and 2 * len(prompts) > max(len(attempted), FEWEST_PROMPTS):
            scored = "" if self._scored else "not one prompt was scored: "
            what = (
                f"{scored}{len(failed)} of the last {len(self._window)} attempts to score a prompt failed with the "
                f"same exception"
            )
        else:
            return None
        return Stop(f"{what}, {failure.head}. Mend it and go on with --resume", failure.text)
