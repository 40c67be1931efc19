"""The sentence that says what a job waits for, and advice on what would make it faster.

sentence(job)     since when and on whom: the first of a fixed order of reasons that holds
advice(…)         from the idle shares of both pools and the times of the newest steps
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from controller.ledger.group import Group
from controller.ledger.group_table import GroupTable
from controller.state.job import JobState
from controller.state.job_facts import sft_steps_prepared
from controller.state.membership import Membership
from controller.state.replicas import Replica
from controller.state.standstill import NOTICED_S
from schema.wire.messages import Phase

STARVING = 0.15
"""Share of idle time below which a pool is busy enough."""
WORTH = 1.05
"""Gain of speed below which nothing is advised."""
RECENT = 8
"""Newest steps, whose mean counts; before there are so many nothing is known."""


def sentence(job: JobState) -> tuple[str, float]:
    """Return what the job waits for, and since when (Unix time), as far as this controller has seen it."""
    key, text = _reason(job)
    return text, job.waits_since(key)


def _reason(job: JobState) -> tuple[str, str]:
    """A key that stays the same while the job waits for the same thing, and the sentence."""
    if job.ended:
        return "ended", _ended(job)
    if job.store.outage is not None:
        return "store", job.store.outage
    if job.facts.paused:
        return "paused", "the job is paused: nothing is handed out until it is resumed"
    if job.rewards.outage is not None:
        return "outage", job.rewards.note
    if job.progress.finished:
        return _finishing(job)
    trainers = job.registry.present("policy")
    if not trainers:
        return "trainer", f"waits for a trainer: {_absent(job, 'policy')}"
    trainer = _leading(job, trainers)
    if job.membership is not None and (text := _standstill(job, job.membership)):
        return f"standstill {job.progress.committed}", text
    return _training(job, trainers, trainer)


def _training(job: JobState, trainers: Sequence[Replica], trainer: Replica) -> tuple[str, str]:
    """Trainers are present, and are not at a standstill."""
    table = job.progress
    if not isinstance(table, GroupTable):
        step = table.committed
        if job.prompts.counts.unfinished and step >= sft_steps_prepared(job.config, job.prompts):
            return f"rows {step}", _rows(job, step)
        return "training", f"{trainer.name}: {trainer.status or 'getting ready'}"
    if job.publications.newest is None:
        return ("first weights", f"waits for the first weights of {trainer.name}: {trainer.status or 'loading'}")
    step = table.committed
    if job.membership is not None and any(job.membership.waiting.values()):
        loading = [other for other in trainers if job.membership.waiting.get(other.replica_id)]
        return f"loads {step}", f"step {step} waits for {', '.join(map(_named, loading))}"
    if job.ledger.batch(step):
        rollouts = [replica.replica_id for replica in job.registry.present("rollout")]
        if job.trainer_has_devices and (awake := job.time_share.awake(rollouts)):
            return f"turn {step}", f"step {step} is complete and waits for {', '.join(awake[:3])} to sleep"
        others = [other for other in trainers if job.membership is not None and other is not trainer]
        named = ", ".join([trainer.name + _detail(trainer), *(other.name for other in others)])
        return f"trains {step}", f"step {step} is being trained by {named}"
    missing = table.params.groups_per_step - table.ready
    if missing <= 0:
        return f"ready {step}", f"step {step} is complete and waits for {_named(trainer)}"
    return _groups(job, table, missing)


def _standstill(job: JobState, membership: Membership) -> str:
    """Say that all policy replicas wait for each other until a membership epoch begins; empty: they do not."""
    now, names = job.clock(), membership.expected
    since = job.standstill.since(names, now)
    if since is None or now - since < NOTICED_S:
        return ""
    left, step = max(0.0, job.standstill.limit - (now - since)), membership.step
    return f"step {step}: {', '.join(names)} all wait for each other; a membership epoch begins in {left:.0f} s"


def _ended(job: JobState) -> str:
    steps = f"{job.progress.committed} of {job.progress.total_steps} steps"
    if job.facts.ended is Phase.FAILED:
        return f"the job failed after {steps}: {job.facts.last_error or 'no reason is known'}"
    return job.note or f"the job is {job.facts.ended} after {steps}"


def _finishing(job: JobState) -> tuple[str, str]:
    """All steps are trained; what is left is the last validation, and the trainer's export."""
    if job.validation.pinned is not None:
        return _validation(job)
    if job.facts.exported:
        return "last validation", f"waits for the last validation: {_absent(job, 'rollout')}"
    trainers = job.registry.present("policy")
    if not trainers:
        return "trainer", f"waits for a trainer: {_absent(job, 'policy')}"
    trainer = _leading(job, trainers)
    return "finishing", f"waits for the end of {trainer.name}: {trainer.status or 'leaving'}"


def _leading(job: JobState, trainers: Sequence[Replica]) -> Replica:
    """The one that commits; any, where none does so yet."""
    return next((trainer for trainer in trainers if job.leads(trainer.replica_id)), trainers[0])


def _validation(job: JobState) -> tuple[str, str]:
    version, groups = job.validation.pinned, job.validation.groups
    done = sum(group.state == "done" for group in groups)
    text = f"validates version {version}: {done} of {len(groups)} prompts are done"
    return f"validation {version}", text


def _groups(job: JobState, table: GroupTable, missing: int) -> tuple[str, str]:
    """The next step is not complete: who makes its groups, and what keeps them."""
    step, rollouts = table.committed, job.registry.present("rollout")
    if not rollouts:
        return f"rollouts {step}", f"step {step} waits for a rollout replica: {_absent(job, 'rollout')}"
    leased = sorted(table.held, key=lambda group: group.leased_at)
    if not leased:
        if job.validation.pinned is not None:
            return _validation(job)
        if table.awaits_rows:
            return f"rows {step}", _rows(job, step)
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
        text = f"step {step} waits for rewards: {scoring:.0f} samples in the pool, the oldest for {oldest:.0f} s"
        return f"rewards {step}", text
    return f"groups {step}", f"step {step} waits for {_count(missing)} {_holders(job, leased)}"


def _rows(job: JobState, step: int) -> str:
    began = f"the job began with {len(job.prompts):,}"
    return f"step {step} waits for rows that are being prepared (logs/data.log); {began}"


def _holders(job: JobState, leased: list[Group]) -> str:
    age = max(0.0, job.clock() - max(leased[0].leased_at, job.opened_at))
    names = {replica.replica_id: replica.name for replica in job.registry}
    holder = names.get(leased[0].replica_id or "", leased[0].replica_id)
    longest = max(
        (replica.gauges.get("longest_tokens", 0.0) for replica in job.registry.present("rollout")), default=0.0
    )
    unfinished = f", the longest unfinished one has {longest:,.0f} tokens so far" if longest else ""
    done = sum(len(group.samples) for group in leased)
    total = len(leased) * job.progress.params.group_size if isinstance(job.progress, GroupTable) else 0
    return (
        f"({len(leased)} are leased, the oldest by {holder} {age:.0f} s ago; "
        f"{done} of their {total} samples are there{unfinished})"
    )


def _count(missing: int) -> str:
    return f"{missing} more group" + ("" if missing == 1 else "s")


def _absent(job: JobState, role: str) -> str:
    known = [replica for replica in job.registry if replica.role == role]
    if not known:
        return "none has registered yet"
    newest = max(known, key=lambda replica: replica.last_seen)
    return f"{newest.name} is {newest.state}" + (f" ({newest.status})" if newest.status else "")


def _named(replica: Replica) -> str:
    return replica.name + (f" ({replica.status})" if replica.status else "")


def _detail(replica: Replica) -> str:
    return f" ({replica.status})" if replica.status and not replica.status.startswith("training") else ""


def advice(
    idle: Mapping[str, float],
    steps: Sequence[Mapping[str, float]],
    reward_wait: float | None,
    *,
    rollouts: int,
    bound: int,
    overlaps: bool = True,
) -> list[str]:
    """Return advice on what would make a job faster; nothing while too little is known.

    idle: share of the time by pool. steps: metrics of the newest ones. reward_wait: share of the time that engines
    wait for rewards. rollouts: replicas. bound: S. overlaps: whether both pools work at once; in turns each waits
    for the other, whatever there is of it.

    A step of T seconds has the trainer at work for t of them, and each of n replicas for T·(1 − i), where i is its
    idle share. By k replicas it would take max(t, T·(1 − i)·n/k); without waiting for each other max(t, T·(1 − i)).
    """
    if len(steps) < RECENT or rollouts < 1:
        return []
    if reward_wait is not None and reward_wait > STARVING:
        text = f"the engines wait for rewards {reward_wait:.0%} of the time: "
        return [text + "raise reward.num_workers, or make rewards faster"]  # nothing else would help
    known = [metrics for metrics in steps if "wait_seconds" in metrics and "step_seconds" in metrics]
    if not known or not overlaps or "rollout" not in idle:
        return []
    whole = fmean(metrics["step_seconds"] for metrics in known)
    train = whole - fmean(metrics["wait_seconds"] for metrics in known)
    generate = whole * (1 - idle["rollout"])
    trainer_waits, replicas_wait = whole - train > STARVING * whole, idle["rollout"] > STARVING
    shares = f"trainer {1 - train / max(whole, 1e-9):.0%} idle, rollouts {idle['rollout']:.0%}"
    generate_with_one_more, suggestions = generate * rollouts / (rollouts + 1), []
    if trainer_waits and not replicas_wait and (gain := whole / max(train, generate_with_one_more)) >= WORTH:
        suggestions.append(
            f"the trainer starves ({shares}): one more rollout replica ({rollouts} → {rollouts + 1}) would make "
            f"a step {gain:.2f} times as fast"
        )
    elif trainer_waits and replicas_wait and (gain := whole / max(train, generate)) >= WORTH:
        suggestions.append(
            f"both pools wait for each other ({shares}): allowed_outdated_steps = {bound + 1} instead of {bound} "
            f"lets them overlap more; a step becomes at most {gain:.2f} times as fast"
        )
    elif replicas_wait and not trainer_waits:
        enough = max(1, math.ceil(rollouts * (1 - idle["rollout"])))
        remedy = f"{enough} of {rollouts} replicas would do" if enough < rollouts else "a faster trainer would help"
        suggestions.append(f"the rollout replicas starve ({shares}): {remedy}")
    return suggestions
