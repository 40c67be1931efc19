"""What a job that was struck must look like at its end: a pure function from evidence to violations.

The ledger says what was trained; the witness is the trainer, which writes into its log what each step trains before
it does so. Steps that were trained again after a rewind replace those trained before: what remains is the history
that the final weights contain. Both must tell the same story:

    every position of every epoch   exactly once in the history, or dropped with a reason
    every step                      once, in order, a full batch but for the last
    every sample                    no older than the bound when it was trained
    every answer of a step          in the step's file, once, and no other
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

LINE = re.compile(
    r"step (\d+) of timeline (\d+) trains (\d+) samples of versions (-?\d+) to (-?\d+): "
    r"((?:e\d+-p\d+(?:\.\.\d+)? ?)+)$"
)
RESUMED = re.compile(r"resumed from .* \((\d+) committed steps\)$")
SPAN = re.compile(r"e(\d+)-p(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Batch:
    """One line of the witness."""

    step: int
    timeline: int
    samples: int
    oldest: int
    newest: int
    groups: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """Another line of it: a trainer that was started again holds the weights of this many steps."""

    step: int


Event = Batch | Resumed


@dataclass(frozen=True, slots=True)
class Shape:
    """What the job was told to do."""

    positions: int
    epochs: int
    groups_per_step: int
    samples_per_group: int
    bound: int


@dataclass(slots=True)
class Evidence:
    """What is left of a job. `left_behind` names what should not be there any more.

    lives: the events of each of several trainers, where `events` are those of all of them in the order of time.
    """

    exit_code: int | None
    summary: Mapping[str, Any] | None
    events: Sequence[Event]
    left_behind: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """What went wrong while the job ran."""
    lives: Sequence[Sequence[Event]] = ()
    answers: Mapping[int, Sequence[str]] | None = None
    """Group and index of each line in each step's file of answers; None: they were not kept."""


def parse(log: Iterable[str]) -> list[Event]:
    """The witness's lines of a trainer's log; a line cut off by a kill is none."""
    found: list[Event] = []
    for line in log:
        if (resumed := RESUMED.search(line)) is not None:
            found.append(Resumed(int(resumed.group(1))))
        match = LINE.search(line)
        if match is None:
            continue
        step, timeline, samples, oldest, newest = (int(part) for part in match.groups()[:5])
        groups = []
        for epoch, first, last in SPAN.findall(match.group(6)):
            groups += [(int(epoch), position) for position in range(int(first), int(last or first) + 1)]
        found.append(Batch(step, timeline, samples, oldest, newest, tuple(groups)))
    return found


def together(logs: Iterable[Iterable[str]]) -> list[Event]:
    """The batches of several trainers in the order of time. Each is there once, when the first of them got it: one
    that was stopped meanwhile, and is left behind, tells of it when the others are further."""
    found = parse(sorted(chain(*logs)))
    return list(dict.fromkeys(event for event in found if isinstance(event, Batch)))


def history(events: Iterable[Event]) -> list[Batch]:
    """What the final weights contain: whoever goes back to a step forgets it and all that followed."""
    kept: list[Batch] = []
    for event in events:
        kept = [earlier for earlier in kept if earlier.step < event.step]
        if isinstance(event, Batch):
            kept.append(event)
    return kept


def judge(evidence: Evidence, shape: Shape) -> list[str]:
    """All violations, in words; empty if nothing was lost."""
    found = list(evidence.errors)
    if evidence.exit_code != 0:
        found.append(f"the job ended with exit code {evidence.exit_code}")
    if evidence.summary is None:
        return [*found, "there is no summary.json", *evidence.left_behind]
    final = history(evidence.events)
    found += _judge_history(final, shape, Counter(_dropped(evidence.summary)).total())
    if evidence.answers is not None:
        found += _judge_answers(final, evidence.answers, shape)
    for life in evidence.lives or [evidence.events]:
        found += _judge_lives(life)
    found += _judge_summary(evidence.summary, final, shape)
    return found + evidence.left_behind


def _dropped(summary: Mapping[str, Any]) -> dict[str, int]:
    return dict((summary.get("ledger") or {}).get("dropped") or {})


def _judge_history(final: Sequence[Batch], shape: Shape, dropped: int) -> list[str]:
    found = []
    steps = [batch.step for batch in final]
    if steps != list(range(len(steps))):
        found.append(f"the trained steps are not 0, 1, 2, …: {steps}")
    counts = Counter(group for batch in final for group in batch.groups)
    wanted = {(epoch, position) for epoch in range(shape.epochs) for position in range(shape.positions)}
    twice = sorted(group for group, count in counts.items() if count > 1)
    if twice:
        found.append(f"trained more than once: {_names(twice)}")
    if strange := sorted(counts.keys() - wanted):
        found.append(f"trained, but not of this job: {_names(strange)}")
    missing = sorted(wanted - counts.keys())
    if len(missing) != dropped:
        found.append(f"{len(missing)} positions were never trained, {dropped} were dropped: {_names(missing)}")
    for batch in final:
        if batch.samples and batch.step - batch.oldest > shape.bound:
            age = batch.step - batch.oldest
            found.append(f"step {batch.step} trained a sample {age} steps old; the bound is {shape.bound}")
        if batch.samples and batch.newest > batch.step:
            found.append(f"step {batch.step} trained a sample of version {batch.newest}, from the future")
        if len(batch.groups) < shape.groups_per_step and batch is not final[-1] and not dropped:
            found.append(f"step {batch.step} trained only {len(batch.groups)} groups")
    return found


def _judge_answers(final: Sequence[Batch], answers: Mapping[int, Sequence[str]], shape: Shape) -> list[str]:
    found = []
    for batch in final:
        groups, indices = batch.groups, range(shape.samples_per_group)
        wanted = Counter(f"e{epoch}-p{position}/{i}" for epoch, position in groups for i in indices)
        if (kept := Counter(answers.get(batch.step, ()))) != wanted:
            wrong = sorted((wanted - kept) + (kept - wanted))
            found.append(f"answers of step {batch.step} that are missing, twice or of others: {wrong[:8]}")
    if beyond := sorted(answers.keys() - {batch.step for batch in final}):
        found.append(f"there are answers of steps that were not trained: {beyond}")
    return found


def _judge_lives(events: Sequence[Event]) -> list[str]:
    """A trainer goes on from what its weights contain: the next step, no other. (A fresh one contains nothing.)"""
    found: list[str] = []
    contains = 0
    for event in events:
        if isinstance(event, Resumed):
            contains = event.step
            continue
        if event.step not in (contains, 0):
            found.append(f"step {event.step} was trained on weights that contain {contains} steps")
        contains = event.step + 1
    return found


def _judge_summary(summary: Mapping[str, Any], final: Sequence[Batch], shape: Shape) -> list[str]:
    status, ledger = summary.get("status"), summary.get("ledger")
    if status is None or ledger is None:
        return ["the summary holds no status or no ledger"]
    states, trained = ledger["states"], sum(len(batch.groups) for batch in final)
    claims = {
        "outcome": (summary["outcome"], "finished"),
        "phase": (status["phase"], "finished"),
        "steps": (status["step"], len(final)),
        "recorded steps": ([record["step"] for record in summary["steps"]], list(range(len(final)))),
        "groups created": (ledger["created"], shape.positions * shape.epochs),
        "groups in all states": (sum(states.values()), ledger["created"]),
        "trained groups": (states["trained"] + states["durable"], trained),
        "dropped groups": (states["dropped"], sum(ledger["dropped"].values())),
        "groups under way": (sum(states[name] for name in ("waiting", "leased", "ready", "batched")), 0),
        "trained samples": (sum(ledger["staleness"].values()), sum(batch.samples for batch in final)),
        "samples over the bound": (ledger["over_bound"], 0),
        "bound": (ledger["bound"], shape.bound),
    }
    found = [
        f"{name}: the summary says {said!r}, it must be {true!r}"
        for name, (said, true) in claims.items()
        if said != true
    ]
    if ledger["max_staleness"] > shape.bound:
        found.append(f"the ledger admits a staleness of {ledger['max_staleness']}, the bound is {shape.bound}")
    return found


def _names(groups: Sequence[tuple[int, int]], most: int = 12) -> str:
    shown = ", ".join(f"e{epoch}-p{position}" for epoch, position in groups[:most])
    return shown + (f" and {len(groups) - most} more" if len(groups) > most else "")
