"""Who is killed, and when: drawn from a seed, so that a run can be repeated.

A job takes several strikes, one after the other. Each waits for its moment, and then `delay` seconds more:

    start        the launcher was started: processes boot, data is prepared
    after        the strike before this one: a double fault while the first is being mended
    progress     a step was committed since the strike before
    checkpoint   a checkpoint is being written
    validation   a validation round is under way
    finish       no step is left to train: the last weights, the export, the last validation, the summary
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "controller", "redis", "rollout", "policy", "launcher", "reward", "store", "data", "trackers", "engine"
]
Moment = Literal["start", "after", "progress", "checkpoint", "validation", "finish"]

ROLES: tuple[Role, ...] = (
    "controller", "redis", "rollout", "policy", "launcher", "reward", "store", "data", "trackers",
)  # fmt: skip
KEPT: frozenset[Role] = frozenset({"controller", "redis", "rollout", "policy", "data", "trackers"})
"""Roles whose processes have a keeper (`launcher.processes.keeper`) above them, which may be struck in their place.
One that stays stopped is continued by it, or found and restarted by the launcher: half of the stops are for good."""
KEEPER_SHARE = 0.2
STOP_SHARE, LONGEST_STOP = 0.3, 15.0
"""Strikes that are a SIGSTOP instead of a kill -9, and the most seconds until SIGCONT."""
SIGNAL_SHARE = 0.25
"""Of the others, those that are another signal of the table in docs/operations.md."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FOR_GOOD = float("inf")
BOOT_SECONDS = 12.0
"""From the start of a job to its first step, about: a strike during the start falls into this time."""
MOMENTS: tuple[tuple[Moment, int], ...] = (("after", 4), ("progress", 5), ("checkpoint", 1), ("validation", 1))
DELAYS: dict[Moment, float] = {
    "start": BOOT_SECONDS,
    "progress": 3.0,
    "checkpoint": 0.3,
    "validation": 0.5,
    "finish": 3.0,
}
"""Longest delay after a moment in seconds; the delay is anything from 0 to it."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One signal, or a SIGSTOP for `stop` seconds where that is not 0 (`FOR_GOOD`: this script does not wake it).

    `choice` in [0, 1) picks one of the role's processes; `pause` is how long one that this script itself must start
    again (launcher, named Redis, object store) stays away, in seconds.
    """

    role: Role
    moment: Moment
    delay: float
    choice: float
    pause: float
    keeper: bool = False
    stop: float = 0.0
    number: signal.Signals = signal.SIGKILL


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job: its own seed, its ranks, the strikes that it takes in order, and its policy replicas."""

    seed: int
    ranks: int
    strikes: tuple[Strike, ...]
    policies: int = 1


def plan(seed: int, kills: int, roles: Sequence[Role], per_job: int) -> Iterator[JobPlan]:
    """Jobs without end, each with `per_job` strikes; roles come in shuffled decks, so each is hit about as often.

    The caller takes jobs until enough strikes have hit. `kills` bounds the strikes of the first and only job if
    it is smaller than `per_job`.
    """
    deck = _deck(random.Random(f"{seed}/roles"), roles)
    number = 0
    while True:
        rng = random.Random(f"{seed}/{number}")
        chosen = [next(deck) for _ in range(min(per_job, kills))]
        ranks, policies = ((1, 1), (1, 2), (2, 1))[number % 3]
        yield JobPlan(seed * 1000 + number, ranks, tuple(_strikes(rng, chosen)), policies)
        number += 1


def _deck(rng: random.Random, roles: Sequence[Role]) -> Iterator[Role]:
    while True:
        cards = list(roles)
        rng.shuffle(cards)
        yield from cards


def _strikes(rng: random.Random, roles: Sequence[Role]) -> Iterator[Strike]:
    """The preparation of the data lives for a second, at the start: whoever hits it comes first."""
    ordered = sorted(roles, key=lambda role: role != "data")
    for number, role in enumerate(ordered):
        moment = _moment(rng, role, first=number == 0, last=number == len(ordered) - 1)
        if moment == "after":
            delay = rng.uniform(0.0, 1.0) if rng.random() < 0.4 else rng.uniform(1.0, 8.0)
        else:
            delay = 0.0 if role == "data" else rng.uniform(0.0, DELAYS[moment])
        keeper = role in KEPT and rng.random() < KEEPER_SHARE
        stop = 0.0 if rng.random() >= STOP_SHARE else rng.uniform(0.5, LONGEST_STOP)
        if stop and role in KEPT and rng.random() < 0.5:
            stop = FOR_GOOD
        kind = rng.choice(SIGNALS) if not stop and rng.random() < SIGNAL_SHARE else signal.SIGKILL
        yield Strike(role, moment, delay, rng.random(), rng.uniform(0.0, 3.0), keeper, stop, kind)


def _moment(rng: random.Random, role: Role, *, first: bool, last: bool) -> Moment:
    if role == "data":
        return "start"
    if first and rng.random() < 0.35:
        return "start"
    if first:
        return "progress"
    if last and rng.random() < 0.4:
        return "finish"
    moments: list[Moment] = [moment for moment, weight in MOMENTS for _ in range(weight)]
    return rng.choice(moments)
