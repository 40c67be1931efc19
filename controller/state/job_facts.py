"""Parameters and stored facts of a job that the controller keeps next to the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from controller.autoscale.policy import Limits
from controller.ledger.values import LedgerParams
from controller.state.validation import ValidationParams
from schema.config import Config
from schema.wire.messages import Phase

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
    """See `controller.state.turns.Turns`."""
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


def ledger_params(config: Config, n_positions: int) -> LedgerParams:
    """Return the ledger's parameters of a GRPO job; `n_positions` are the prepared rows."""
    policy, controller = config.grpo, config.controller
    return LedgerParams(
        groups_per_step=config.groups_per_step,
        n_samples=config.rollout.n_generation,
        staleness_bound=config.staleness_bound,
        n_positions=n_positions,
        n_epochs=config.train.epoch,
        max_steps=config.train.max_num_steps,
        lease_timeout=controller.lease_timeout,
        max_attempts=controller.max_attempts,
        oversample=controller.oversample,
        on_reward_error=config.reward.on_error,
        on_stale=_on_stale(config),
        straggler_timeout=controller.straggler_timeout,
        filter_metrics=tuple(policy.filter_metrics),
        max_refills=policy.max_retry_for_on_policy,
        keep_payloads=config.train.ckpt.enable_checkpoint,
        order=data_order(config),
        greedy=policy.has_baseline,
    )


def data_order(config: Config) -> str:
    """Identifies the order in which prepared rows are handed out (see `controller.state.prompts`)."""
    return f"shuffled by {config.effective_seed}" if config.grpo.dataloader_shuffle else "as prepared"


def _on_stale(config: Config) -> Literal["wait", "drop"]:
    """Return the treatment of late groups. Raises ValueError for a value that validation refuses."""
    on_stale = config.controller.on_stale
    if on_stale == "mask_tokens":
        raise ValueError("controller.on_stale = mask_tokens: this build cannot mask tokens that are too old")
    return on_stale


def validation_params(config: Config, n_rows: int) -> ValidationParams:
    """Return the parameters of validation; `n_rows` are the prepared held-out rows."""
    section, controller = config.validation, config.controller
    return ValidationParams(
        n_rows=n_rows,
        n_samples=section.n_generation,
        freq=section.freq,
        before=section.before,
        max_replicas=section.max_replicas,
        lease_size=section.batch_size,
        lease_timeout=controller.lease_timeout,
        max_attempts=controller.max_attempts,
        names=config.reward_names,
    )


def scale_limits(config: Config) -> Limits:
    """Return the autoscaler's limits; one that is off keeps the number of the start."""
    scale, first = config.autoscale, config.rollout.parallelism.n_init_replicas if config.is_grpo else 0
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


def sft_total_steps(config: Config, n_rows: int) -> int:
    """Steps of a supervised job: all rows of all epochs in batches, or the limit if that is less."""
    by_data = -(-n_rows * config.train.epoch // config.samples_per_step)
    limit = config.train.max_num_steps
    return by_data if limit is None else min(by_data, limit)


def first_number(known: int, wall: float) -> int:
    """The first number of a kind that a controller gives out on an existing job, above all that can have been.

        known ─┬─ given out, and lost ─┐           first
               └───────── LEAP ────────┴───────────▶ or the date in milliseconds, whichever is higher

    The date separates the numbers of several controllers, also where the lost history contains the start of one of
    them; the leap does where the clock was set back.

    known: the highest one in the store. wall: Unix time at which the controller started.
    """
    return max(known + LEAP, int(wall * 1000))
