"""What a job waits for, in one sentence that is always true, and what would make it faster. Pure.

sentence(job)     since when and on whom: the first of a fixed order of reasons that holds
advice(status)    from the idle shares of both pools and the time of a step
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.ledger.group_table import GroupTable
from schema.wire.messages import JobStatus, Phase

if TYPE_CHECKING:
    from controller.ledger.group import Group
    from controller.state.job import Job
    from controller.state.replicas import Replica

STARVING = 0.15
"""Share of idle time below which a pool is busy enough."""
WORTH = 1.05
"""Gain of speed below which nothing is advised."""


def sentence(job: Job) -> tuple[str, str]:
    """What the job waits for: a key that stays the same while it waits for the same thing, and the sentence."""
    if job.ended:
        return "ended", _ended(job)
    if job.facts.paused:
        return "paused", "the job is paused: nothing is handed out until it is resumed"
    if job.rewards.outage is not None:
        return "outage", job.rewards.note
    trainers = job.registry.present("policy")
    if not trainers:
        return "trainer", f"waits for a trainer: {_absent(job, 'policy')}"
    trainer = trainers[0]
    table = job.progress
    if not isinstance(table, GroupTable):
        return "training", f"{trainer.name}: {trainer.status or 'getting ready'}"
    if job.publications.newest is None:
        return (
            "first weights",
            f"waits for the first weights of {trainer.name}: {trainer.status or 'loading'}",
        )
    if table.finished:
        return "finishing", _finishing(job, trainer)
    if job.ledger.batch(table.committed):
        key = f"trains {table.committed}"
        return key, f"step {table.committed} is being trained by {trainer.name}{_detail(trainer)}"
    return _groups(job, table)


def _ended(job: Job) -> str:
    steps = f"{job.progress.committed} of {job.progress.total_steps} steps"
    if job.facts.ended is Phase.FAILED:
        return f"the job failed after {steps}: {job.facts.last_error or 'no reason is known'}"
    return job.note or f"the job is {job.facts.ended} after {steps}"


def _finishing(job: Job, trainer: Replica) -> str:
    if job.validation.pinned is not None:
        return _validation(job)
    return f"waits for the end of {trainer.name}: {trainer.status or 'leaving'}"


def _validation(job: Job) -> str:
    done = sum(group.state == "done" for group in job.validation.groups)
    return (
        f"validates version {job.validation.pinned}: {done} of {len(job.validation.groups)} prompts are done"
    )


def _groups(job: Job, table: GroupTable) -> tuple[str, str]:
    """The next step is not complete: who makes its groups, and what keeps them."""
    step, rollouts = table.committed, job.registry.present("rollout")
    missing = max(0, table.params.groups_per_step - table.ready)
    if not rollouts:
        return f"rollouts {step}", f"step {step} waits for a rollout replica: {_absent(job, 'rollout')}"
    leased = sorted(table.held, key=lambda group: group.leased_at)
    if not leased:
        if job.validation.pinned is not None:
            return f"validation {job.validation.pinned}", _validation(job)
        newest = job.publications.newest
        behind = [r for r in rollouts if newest is not None and r.version < newest.version]
        if behind and newest is not None:
            named = ", ".join(map(_named, behind[:3]))
            return f"update {newest.version}", f"step {step} waits for version {newest.version} in {named}"
        named = ", ".join(map(_named, rollouts[:3]))
        return f"lease {step}", f"step {step} waits for {_count(missing)}: none is leased yet by {named}"
    scoring = sum(replica.gauges.get("scoring", 0.0) for replica in rollouts)
    running = sum(replica.gauges.get(name, 0.0) for replica in rollouts for name in ("running", "waiting"))
    if scoring and not running:
        oldest = max(replica.gauges.get("scoring_oldest_s", 0.0) for replica in rollouts)
        text = (
            f"step {step} waits for rewards: {scoring:.0f} samples in the pool, the oldest for {oldest:.0f} s"
        )
        return f"rewards {step}", text
    return f"groups {step}", f"step {step} waits for {_count(missing)} {_holders(job, leased)}"


def _holders(job: Job, leased: list[Group]) -> str:
    age = max(0.0, job.clock() - max(leased[0].leased_at, job.opened_at))
    names = {replica.replica_id: replica.name for replica in job.registry}
    holder = names.get(leased[0].replica_id or "", leased[0].replica_id)
    longest = max(
        (replica.gauges.get("longest_tokens", 0.0) for replica in job.registry.present("rollout")),
        default=0.0,
    )
    unfinished = f", the longest unfinished one has {longest:,.0f} tokens so far" if longest else ""
    done = sum(len(group.samples) for group in leased)
    total = len(leased) * job.progress.params.n_samples if isinstance(job.progress, GroupTable) else 0
    return (
        f"({len(leased)} are leased, the oldest by {holder} {age:.0f} s ago; "
        f"{done} of their {total} samples are there{unfinished})"
    )


def _count(missing: int) -> str:
    return f"{missing} more group" + ("" if missing == 1 else "s")


def _absent(job: Job, role: str) -> str:
    known = [replica for replica in job.registry if replica.role == role]
    if not known:
        return "none has registered yet"
    newest = max(known, key=lambda replica: replica.last_seen)
    return f"{newest.name} is {newest.state}" + (f" ({newest.status})" if newest.status else "")


def _named(replica: Replica) -> str:
    return replica.name + (f" ({replica.status})" if replica.status else "")


def _detail(replica: Replica) -> str:
    return f" ({replica.status})" if replica.status and not replica.status.startswith("training") else ""


def advice(status: JobStatus, rollouts: int, staleness_bound: int) -> list[str]:
    """What would make a job faster, in words; nothing while too little is known.

    A step takes as long as the slower of training it (t) and generating it (g/n by n replicas, of which each is idle
    for a share i of the time: g/n = T·(1 − i)). One replica more makes that g/(n + 1); a step of T seconds then takes
    max(t, g/(n + 1)).
    """
    train, step = status.metrics.get("train_seconds"), status.metrics.get("step_seconds")
    idle_policy, idle_rollout = status.idle.get("policy"), status.idle.get("rollout")
    if None in (train, step, idle_policy, idle_rollout) or rollouts < 1:
        return []
    assert train is not None
    assert step is not None
    assert idle_policy is not None
    assert idle_rollout is not None
    whole = step + status.metrics.get("wait_seconds", 0.0)
    rewards = None if status.rewards is None else status.rewards.wait_fraction
    found = []
    if rewards is not None and rewards > STARVING:
        found.append(
            f"the engines wait for rewards {rewards:.0%} of the time: "
            f"raise reward.num_workers, or make rewards faster"
        )
    if idle_policy > STARVING and idle_rollout <= STARVING and whole > 0:
        after = max(train, whole * (1 - idle_rollout) * rollouts / (rollouts + 1))
        if whole / after >= WORTH:
            found.append(
                f"the trainer starves ({idle_policy:.0%} idle): "
                f"one more rollout replica ({rollouts} → {rollouts + 1}) would make "
                f"a step {whole / after:.2f} times as fast"
            )
    elif idle_policy > STARVING and idle_rollout > STARVING:
        found.append(
            f"both pools wait for each other (trainer {idle_policy:.0%} idle, rollouts {idle_rollout:.0%}): "
            f"allowed_outdated_steps = {staleness_bound + 1} instead of {staleness_bound} would let them overlap more"
        )
    elif idle_rollout > STARVING:
        found.append(
            f"the rollout replicas starve ({idle_rollout:.0%} idle): the trainer is the slower one; "
            + (
                f"{rollouts - 1} of {rollouts} replicas may do"
                if rollouts > 1
                else "a faster trainer would help"
            )
        )
    return found
