"""Parameters and stored facts of a job, and its parts as they are made of its configuration and what is stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from controller.autoscale.autoscaler import Limits, PastDecisions
from controller.autoscale.scaling import ReplicaScaling
from controller.ledger.checkpoint import go_on_changed
from controller.ledger.group_table import GroupTable
from controller.ledger.pass_orders import PassRule
from controller.ledger.step_counter import FIRST, StepCounter
from controller.ledger.values import LedgerParams
from controller.state.alarms import BEGINNING, COLLAPSES, LOOKED_BACK, Alarms
from controller.state.membership import Membership
from controller.state.prompts import Prompts, RowCounts
from controller.state.replicas import Registry
from controller.state.step_log import StepLog
from controller.state.validation.group import ValidationParams
from controller.state.validation.rounds import Validation
from controller.store import Saved, Table, pass_files
from schema.config import Config
from schema.wire.messages import GroupKind, Phase, RowsFile
from schema.wire.mixture import Mixture, Source
from schema.wire.prompts import PromptFileError

TRAIN_DATA, VALIDATION_DATA = Path("data", "train.safetensors"), Path("data", "validation.safetensors")
LEAP = 1 << 20
"""More numbers of one kind than the history that is lost at once can hold."""


@dataclass(slots=True)
class JobFacts:
    """The few facts of a job that no other part owns. Stored whole whenever one changes."""

    started_at: float
    policy_epoch: int = 0
    highest_publication: int = 0
    """The highest publication id that anybody is known to have heard of."""
    paused: bool = False
    ended: Phase | None = None
    """Terminal phase, once there is one."""
    assembled: bool = False
    """All first replicas have registered."""
    exported: bool = False
    """The trainer left because it was finished: the final weights are published and exported."""
    last_error: str | None = None
    traceback: str = ""
    """The traceback of the failure, if code of the user's failed the job."""
    anchor_wanted: int = 0
    """A replica could not read a chain: one is wanted that begins after this publication; 0: none is wanted."""
    anchor_told: int = 0
    """The publication in whose answer the trainer was last asked for it."""
    devices_given: int = 0
    """See `controller.state.time_share.TimeShare`."""
    last_score: float | None = None
    """Mean score of the last trained batch."""
    alarms_shown: list[str] = field(default_factory=list)
    """Alarms that are shown once in a run, and were: see `controller.state.alarms.ONCE`."""

    def to_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        fields = dict(record)
        fields["ended"] = None if fields["ended"] is None else Phase(fields["ended"])
        return cls(**fields)


def ledger_params(config: Config, rows: RowCounts) -> LedgerParams:
    """Return the ledger's parameters of a GRPO job with these prepared rows."""
    policy, controller = config.grpo, config.controller
    return LedgerParams(
        groups_per_step=config.groups_per_step,
        n_samples=config.rollout.n_generation,
        staleness_bound=config.staleness_bound,
        n_positions=rows.n,
        data_passes=config.train.epoch,
        max_steps=0 if config.validation.only else config.train.max_num_steps,
        lease_timeout=controller.lease_timeout,
        max_attempts=controller.max_attempts,
        oversample=controller.oversample,
        on_reward_error=config.reward.on_error,
        on_stale=_on_stale(config),
        straggler_timeout=controller.straggler_timeout,
        filter_metrics=tuple(policy.filter_metrics),
        max_refills=policy.max_retry_for_on_policy,
        keep_payloads=config.train.ckpt.enable_checkpoint,
        order=data_order(config, rows.early_places),
        data=rows.digest,
        sources=rows.sources,
        stages=stages_of(config, config.groups_per_step),
        by_results=_pass_rule(config),
        exhausted=config.train.train_policy.domain_exhausted,
        grown=rows.grown,
        unfinished=rows.unfinished,
        greedy=policy.has_baseline,
    )


def stages_of(config: Config, per_step: int) -> tuple[int, ...]:
    """How many groups are kept when each stage of the curriculum begins; per_step: of one step."""
    return tuple(stage.from_step * per_step for stage in config.curriculum.stage)


def _pass_rule(config: Config) -> PassRule | None:
    curriculum, policy = config.curriculum, config.grpo
    if not curriculum.follows_results or config.validation.only:
        return None
    return PassRule(
        curriculum.order_by_results,
        curriculum.leave_out_solved,
        curriculum.leave_out_failed,
        curriculum.pass_score,
        config.effective_seed,
        policy.dataloader_shuffle and not curriculum.column_name,  # whose order stays among equals
    )


def data_order(config: Config, early: str) -> str:
    """Identifies the order in which prepared rows are handed out (see `controller.state.prompts`).

    early: the hash of where those rows stand that come before all others in the first pass; empty: none do.
    """
    policy, curriculum = config.train.train_policy, config.curriculum
    order = f"shuffled by {config.effective_seed}" if policy.dataloader_shuffle else "as prepared"
    if curriculum.column_name:
        column = hashlib.blake2b(curriculum.column_name.encode(), digest_size=8).hexdigest()
        order += f", column {column} {'down' if curriculum.descending else 'up'}"
    order += ", then results" if curriculum.follows_results else ""
    return order + (f"{FIRST}{early}" if early else "")


def _on_stale(config: Config) -> Literal["wait", "drop"]:
    """Return the treatment of late groups. Raises ValueError for a value that validation refuses."""
    on_stale = config.controller.on_stale
    if on_stale == "mask_tokens":
        raise ValueError("controller.on_stale = mask_tokens: this build cannot mask tokens that are too old")
    return on_stale


def validation_params(config: Config, n_rows: int, labels: Sequence[str] = ()) -> ValidationParams:
    """Return the parameters of validation. n_rows: the prepared held-out rows. labels: of each, its set."""
    section, controller = config.validation, config.controller
    sets = section.sets
    return ValidationParams(
        n_rows=n_rows,
        n_samples=section.n_generation,
        labels=labels,
        samples={label: keys.n_generation for label, keys in sets.items()},
        freq=section.freq,
        before=section.before,
        max_replicas=section.max_replicas,
        lease_size=section.batch_size,
        lease_timeout=controller.lease_timeout,
        max_attempts=controller.max_attempts,
        names=config.reward_names,
        pass_score=section.pass_score,
        pass_scores={label: keys.pass_score for label, keys in sets.items()},
        keeps_texts=bool(config.logging.samples_dir),
    )


def scale_limits(config: Config) -> Limits:
    """Return the autoscaler's limits; one that is off keeps the number of the start."""
    scale, first = config.autoscale, config.rollout.parallelism.n_init_replicas if config.generates else 0
    bound = config.staleness_bound if config.is_grpo else 0
    groups = int(config.groups_per_step * config.controller.oversample) if config.is_grpo else 1
    return Limits(
        minimum=scale.min_replicas if scale.enable else first,
        maximum=scale.max_replicas if scale.enable else first,
        target_wait=scale.target_wait,
        scale_down_delay=scale.scale_down_delay,
        groups=(bound + 1) * groups,
        bound=bound,
    )


def sft_total_steps(config: Config, prompts: Prompts) -> int:
    """Steps of a supervised job: all rows of all epochs in batches, or the limit if that is less."""
    if prompts.counts.unfinished:  # there will be enough
        return config.train.max_num_steps or 0
    sources = prompts.sources or (Source("", len(prompts)),)
    limit, batch = config.train.max_num_steps, config.samples_per_step
    exhausted = config.train.train_policy.domain_exhausted
    mixture = Mixture(sources, config.train.epoch, exhausted, stages_of(config, batch))
    stops = config.train.train_policy.domain_exhausted == "stop"
    rows = len(mixture.order(None if limit is None else limit * batch)) if stops else mixture.limit
    by_data = -(-rows // batch)
    return by_data if limit is None else min(by_data, limit)


def sft_steps_prepared(config: Config, prompts: Prompts) -> int:
    """How many steps have all of their rows, while further ones are being prepared."""
    sources = prompts.sources or (Source("", len(prompts)),)
    batch = config.samples_per_step
    return Mixture.unfinished(sources, stages_of(config, batch) if prompts.sources else ()).total // batch


def sft_order(config: Config, prompts: Prompts) -> str:
    """Identifies the order in which supervised training takes prepared rows."""
    policy = config.train.train_policy
    sources = [(source.name, source.early or source.rows, source.share) for source in prompts.sources]
    facts: list[Any] = [config.effective_seed, policy.dataloader_shuffle, policy.domain_exhausted, sources]
    if config.curriculum.stage:
        stages = [(stage.from_step, sorted(stage.shares.items())) for stage in config.curriculum.stage]
        facts.append([config.samples_per_step, stages])
    if config.curriculum.column_name:
        facts.append([config.curriculum.column_name, config.curriculum.descending])
    order = f"supervised {hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()}"
    return order + (f"{FIRST}{prompts.counts.early_places}" if prompts.counts.early else "")


def first_number(known: int, wall: float) -> int:
    """The first number of a kind that a controller gives out on an existing job, above all that can have been.

        known ─┬─ given out, and lost ─┐           first
               └───────── LEAP ────────┴───────────▶ or the date in milliseconds, whichever is higher

    The date separates the numbers of several controllers, also where the lost history contains the start of one of
    them; the leap does where the clock was set back.

    known: the highest one in the store. wall: Unix time at which the controller started.
    """
    return max(known + LEAP, int(wall * 1000))


def rows_files(
    config: Config, run_dir: Path, prompts: Prompts, validation_prompts: Prompts | None
) -> dict[GroupKind, RowsFile]:
    """Name the prepared rows that a rollout replica may read itself (`train.local_dataset`)."""
    files: dict[GroupKind, tuple[Path, Prompts | None]]
    files = {"train": (TRAIN_DATA, prompts), "validation": (VALIDATION_DATA, validation_prompts)}
    return {
        kind: RowsFile(path=str(run_dir / path), digest=rows.digest)
        for kind, (path, rows) in files.items()
        if rows is not None and rows.digest and config.is_grpo and config.train.local_dataset is not False
    }


def prompts_of(config: Config, run_dir: Path) -> Prompts:
    """Read the prepared training data. Raises `PromptFileError`."""
    return Prompts(
        run_dir / TRAIN_DATA,
        seed=config.effective_seed,
        shuffle=config.train.train_policy.dataloader_shuffle,
        shares=config.shares,
        stages=[stage.shares for stage in config.curriculum.stage],
        descending=config.curriculum.descending if config.curriculum.column_name else None,
    )


# ---- the parts of a job -----------------------------------------------------------------------------------------


def table_of(config: Config, prompts: Prompts, saved: Saved, run_dir: Path, *, succeeds: bool) -> GroupTable:
    """Restore the groups of a GRPO job. succeeds: whether an earlier controller has given out numbers.

    Raises `PromptFileError`: the order of a pass is missing or damaged.
    """
    params = ledger_params(config, prompts.counts)
    header = saved[Table.HEADERS].get("ledger")
    if header is None:
        table = GroupTable(params)
        table.succeeds = succeeds
    else:
        table = GroupTable.restore(params, header, saved[Table.GROUPS], saved[Table.SAMPLES], saved[Table.HISTORY])
        table.remake_misfits()
        go_on_changed(table, header)
    if params.by_results is not None:
        table.passes.know(pass_files.read(run_dir, table.mixture.sources))
        if (group := table.first_without_order()) is not None:
            raise PromptFileError(
                f"group {group.id} is of a pass whose order is not in {run_dir / pass_files.DIRECTORY}: put the "
                "files back that were there, or begin a new run"
            )
    return table


def counter_of(config: Config, prompts: Prompts, header: Mapping[str, Any] | None) -> StepCounter:
    """Restore the progress of a supervised job."""
    total, rows, order = sft_total_steps(config, prompts), prompts.counts, sft_order(config, prompts)
    if header is None:
        return StepCounter(total, rows.n, order, rows.grown)
    return StepCounter.restore(total, header, rows.n, order, rows.grown)


def alarms_of(config: Config, steps: StepLog, validation: Validation, shown: list[str]) -> Alarms:
    """Restore the alarms from the newest steps and validations."""
    # A teacher teaches where scores are alike.
    compares = config.is_grpo and config.group_size > 1 and not config.teacher
    alarms = Alarms(_short_weights(config), compares=compares)
    alarms.restore(steps.ends(LOOKED_BACK, BEGINNING, COLLAPSES), validation.records.values(), shown)
    return alarms


def _short_weights(config: Config) -> dict[str, float]:
    """Weights of the rewards by the names that metrics have."""
    if not config.is_grpo:
        return {}
    weights = config.grpo.reward_weights
    short = config.reward_names
    return {short[name]: weight for name, weight in weights.items()}


def registry_of(config: Config, saved: Saved, lost_at: float | None) -> Registry:
    """Restore the replicas. lost_at: Unix time, if history was lost."""
    records = list(saved[Table.REPLICAS].values())
    known = max((record["incarnation"] for record in records), default=0)
    first = 0 if lost_at is None else first_number(known, lost_at)
    trainers = config.policy.parallelism.n_init_replicas
    return Registry(config.controller.heartbeat_timeout, records, trainers=trainers, first=first)


def membership_of(config: Config, known: Mapping[str, Any] | None, restarted_at: float | None) -> Membership | None:
    """Restore who trains together; None: there is one policy replica. restarted_at: Unix time, if it was."""
    trainers = config.policy.parallelism.n_init_replicas
    if trainers == 1:
        return None
    first = 0 if restarted_at is None else first_number(0 if known is None else known["epoch"], restarted_at)
    if known is None:
        return Membership(trainers, first_membership_epoch=first)
    return Membership.from_record(trainers, known, first)


def scaling_of(config: Config, known: Mapping[str, Any] | None, now: float) -> ReplicaScaling:
    """Restore what decides the number of rollout replicas."""
    first = config.rollout.parallelism.n_init_replicas
    memory = PastDecisions(first) if known is None else PastDecisions.from_record(known)
    return ReplicaScaling(scale_limits(config), config.autoscale.interval, memory, now)


def validation_of(config: Config, run_dir: Path, saved: Saved) -> tuple[Validation, Prompts | None]:
    """Restore the rounds of validation, and read their prompts; None: there are none."""
    if not config.validation.enable or not config.generates:
        return Validation.restore(ValidationParams(n_rows=0), saved[Table.VALIDATION]), None
    prompts = Prompts(run_dir / VALIDATION_DATA, seed=0, shuffle=False, to_start_of_answer=not config.is_grpo)
    params = validation_params(config, len(prompts), prompts.labels())
    return Validation.restore(params, saved[Table.VALIDATION]), prompts
