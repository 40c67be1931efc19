"""One job: all its state in memory, and the one way by which a change of it is saved.

    call ─▶ change state (synchronous) ─▶ stage() (synchronous) ─▶ flush (one transaction) ─▶ answer

State only changes between two awaits and is staged before the next one, so each transaction that the store
renders is a consistent whole. The parts decide, each by itself (`ledger`, `registry`, `publications`,
`validation`, `steps`); what ties them together is here: phases, the end of the job, and who has to be woken.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from controller.errors import ApiError
from controller.ledger.group import DropReason, Group, GroupState
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.pass_orders import PassOrder
from controller.ledger.reward_health import RewardHealth
from controller.ledger.step_counter import StepCounter
from controller.ledger.values import LedgerParams
from controller.notify import ChangeSignal
from controller.state.alarms import AlarmChange
from controller.state.event_log import EventLog
from controller.state.job_facts import (
    TRAIN_DATA,
    JobFacts,
    alarms_of,
    counter_of,
    ledger_params,
    membership_of,
    prompts_of,
    registry_of,
    rows_files,
    scaling_of,
    sft_total_steps,
    table_of,
    validation_of,
)
from controller.state.membership import Membership
from controller.state.publications import Publications
from controller.state.replicas import Replica
from controller.state.sample_log import RewardStats, SampleLog
from controller.state.standstill import Standstill
from controller.state.step_log import StepLog
from controller.state.time_share import TimeShare
from controller.state.update_reports import Updates
from controller.store import PayloadKey, Saved, StateStore, StoreUnavailable, Table, pass_files
from controller.store.lock import steady_clock
from controller.store.payload_files import PayloadFiles
from controller.store.payloads import Payload, text_key
from controller.store.redis_state import Render
from schema.config import Config
from schema.wire import event_file, payload_file
from schema.wire.messages import (
    CommitReply,
    ErrorCode,
    EventKind,
    HeldOutLoss,
    LedgerSnapshot,
    Phase,
    Role,
    StepRecord,
    ValidationRecord,
)
from schema.wire.mixture import Source
from schema.wire.prompts import OTHER_ROWS, PromptFileError

log = logging.getLogger(__name__)

REMEDIES: dict[str, str] = {
    DropReason.ZERO_VARIANCE: "In each group all samples have the same rewards of "
    "train.train_policy.filter_reward_metric: use rewards that tell answers apart, other prompts, or no filter",
    DropReason.OVERLONG: "Answers are longer than training takes: raise policy.model_max_length or lower "
    "rollout.max_response_length",
    DropReason.REWARD_ERROR: "Mend the reward function or the rows that it fails on",
    DropReason.POISON: "Replicas crashed with every prompt: the logs of the rollout replicas say why",
}
"""Remedies where not one step was trained, by the reason for which most prompts were dropped."""
MAX_REFILLS = "train.train_policy.max_retry_for_on_policy"


class JobState:
    """See the module's docstring. Made by `JobState.restore`, for a new job from an empty store."""

    def __init__(
        self,
        config: Config,
        *,
        job_id: str,
        run_dir: Path,
        store: StateStore,
        saved: Saved,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.config, self.job_id, self.run_dir = config, job_id, run_dir
        self.store, self.wall = store, wall
        self.clock = store.stamp = steady_clock() if clock is None else clock
        self.prompts = prompts_of(config, run_dir)
        headers = saved[Table.HEADERS]
        self.event_file = event_file.path_of(run_dir)
        self.events = EventLog(wall, saved[Table.EVENTS].values(), event_file.last_id(self.event_file))
        self.restarted = self.events.highest > 0 or any(saved.values())
        """Whether an earlier controller has given out numbers (see `first_number`)."""
        self.progress: GroupTable | StepCounter
        """How far the job has come; of a supervised job that is all there is."""
        self.ledger: Ledger | StepCounter
        """The calls that change it."""
        if config.is_grpo:
            self.progress = table_of(config, self.prompts, saved, run_dir, succeeds=self.restarted)
            self.progress.passes.keep = self._keep_pass
            self.ledger = Ledger(self.progress)
        else:
            self.progress = self.ledger = counter_of(config, self.prompts, headers.get("ledger"))
        payloads = config.controller.payload_store
        self.payload_files = PayloadFiles(payload_file.directory(payloads, job_id)) if payloads else None
        self.validation, self.validation_prompts = validation_of(config, run_dir, saved)
        self.rows_files = rows_files(config, run_dir, self.prompts, self.validation_prompts)
        self.scored_alike = config.is_grpo and config.validation_reward_names == set(config.grpo.reward_weights)
        """Whether validation is scored with the functions of training: what fails there fails here."""
        self.registry = registry_of(config, saved, wall() if self.events.lost else None)
        self.standstill, self.membership = (
            Standstill(),
            membership_of(config, headers.get("members"), wall() if self.restarted else None),
        )
        """The membership of several policy replicas; None: there is one."""
        self.steps = StepLog(saved[Table.STEPS].values())
        self.facts = JobFacts.from_record(headers["job"]) if "job" in headers else JobFacts(wall())
        self.publications = Publications(
            config.weight_sync.keep, saved[Table.PUBLICATIONS].values(), self.facts.highest_publication
        )
        self.updates = Updates()
        self.time_share = TimeShare(self.facts.devices_given)
        self.rewards = RewardHealth(
            config.groups_per_step if config.is_grpo else 1, config.reward.outage_timeout, scored=self._has_scored
        )
        self.samples = SampleLog()
        self.alarms = alarms_of(config, self.steps, self.validation, self.facts.alarms_shown)
        known = headers.get("rewards")
        self.reward_stats = RewardStats() if known is None else RewardStats.from_record(known)
        self.opened_at = self.published_at = self.clock()
        self.scaling = scaling_of(config, headers.get("autoscale"), self.opened_at)
        self.closing = self.checkpoint_asked = self.rows_grew = False
        self.lease_signal, self.batch_signal, self.publication_signal = (
            ChangeSignal(),
            ChangeSignal(),
            ChangeSignal(),
        )
        self.event_signal, self.turn_signal, self.member_signal = (ChangeSignal(), ChangeSignal(), ChangeSignal())
        self._stored: dict[str, dict[str, Any]] = {}
        self._alone_since: float | None = None
        self._said = self._state()
        self._seen = {replica.replica_id: replica.state for replica in self.registry}
        """State of each replica by the last event about it."""
        self._waits = ("", wall())
        """The key of what the job waits for, and since when (Unix time)."""

    # ---- rows that are prepared while the job goes on -------------------------------------------------------

    def look_for_rows(self) -> None:
        """Go on with all rows, where the job began with a part of them and the others are prepared by now."""
        if not self.prompts.counts.unfinished or not self.prompts.replaced:
            return
        try:
            prompts = prompts_of(self.config, self.run_dir)
            if prompts.counts.early_digest != self.prompts.counts.early_digest:
                raise PromptFileError(
                    f"{self.run_dir / TRAIN_DATA} has other rows than those that the job began with"
                )
        except PromptFileError as error:
            self.end(Phase.FAILED, str(error))
            return
        before, self.prompts, self.rows_grew = len(self.prompts), prompts, not prompts.counts.unfinished
        if not self.rows_grew:
            return
        if isinstance(self.progress, GroupTable):
            self.progress.grow(ledger_params(self.config, prompts.counts))
        else:
            total = sft_total_steps(self.config, prompts)
            self.progress.grow(total, len(prompts), prompts.counts.grown)
        self.rows_files = rows_files(self.config, self.run_dir, prompts, self.validation_prompts)
        text = f"all {len(prompts):,} rows are prepared, of which the job began with {before:,}"
        self.events.add(EventKind.JOB, text, phase=str(self.phase), note=self.note, error=None)
        log.info("%s", text)
        self.wake_all()

    # ---- the past changes -----------------------------------------------------------------------------------

    def rewind(self, step: int, timeline: int | None = None) -> None:
        """Go back to the checkpoint after `step` committed steps; a new timeline begins (its number, if known)."""
        self.progress.abandon_step()
        self.ledger.rewind(step, timeline)
        self.publications.rewind(step)
        self.steps.rewind(step)
        self.validation.rewind(step)
        self._say_rewind(step)

    def _say_rewind(self, step: int) -> None:
        self.alarms.rewind(step)
        self.steps.begin_window()
        self.facts.last_score = None  # of a step that is undone
        self.scaling.restart()
        text = f"training goes back to the checkpoint after {step} steps"
        self.events.add(EventKind.REWIND, text, step=step, timeline=self.progress.timeline)

    def begin_from(self, snapshot: LedgerSnapshot, timeline: int | None = None, began: int | None = None) -> None:
        """Go on from a checkpoint of which the store knows nothing. Raises `ApiError`: nothing has changed."""
        before = self.progress.timeline
        self.ledger.begin_from(snapshot, timeline, began)
        if isinstance(self.progress, GroupTable):
            self._compare_data(snapshot, self.progress.params)
        if self.progress.timeline != before:
            self.publications.rewind(-1)
            self.steps.rewind(0)
        self.validation.begin_from(snapshot.committed_steps)
        self._say_rewind(snapshot.committed_steps)

    def _compare_data(self, snapshot: LedgerSnapshot, params: LedgerParams) -> None:
        """Say where a job goes on with other rows than its checkpoint had: it counts by their places."""
        if (
            snapshot.data
            and params.data
            and snapshot.n_positions == params.n_positions
            and snapshot.data != params.data
        ):
            self._say_other_rows()

    def _say_other_rows(self) -> None:
        log.warning("%s", OTHER_ROWS)
        self.events.add(EventKind.ORDER, OTHER_ROWS)

    def forgive_downtime(self, alive_at: float | None) -> None:
        """No replica could beat or renew while no controller was there.

        alive_at: when one was there last, on the clock by which leases expire; None: that is not known.
        """
        now = self.clock()
        self.registry.forgive(now)
        self.ledger.extend_leases(math.inf if alive_at is None else now - alive_at, now)
        if alive_at is not None:
            self.rewards.forgive(max(0.0, now - alive_at))
        self.validation.forgive(now)

    def took_charge(self) -> None:
        """This controller is the one in charge from here on."""
        holder, steps, timeline = self.store.holder, self.progress.committed, self.progress.timeline
        if isinstance(self.progress, GroupTable) and self.progress.other_rows:
            self._say_other_rows()
        self.events.add(
            EventKind.CONTROLLER,
            f"{holder} took charge after {steps} steps",
            host=holder.host,
            pid=holder.pid,
            committed_steps=steps,
            timeline=timeline,
        )

    # ---- saving -------------------------------------------------------------------------------------------

    def stage(self, puts: Mapping[PayloadKey, Payload] | None = None) -> None:
        """Hand everything that changed to the store. No await may lie between a change and this."""
        rows: dict[tuple[Table, str], Render | None] = {}
        changes = self.progress.take_changes()
        for name in changes.removed:
            rows[Table.GROUPS, name] = rows[Table.SAMPLES, name] = None
        for group in changes.groups:
            rows[Table.GROUPS, group.id] = group.to_row
        for group in changes.samples:
            rows[Table.SAMPLES, group.id] = group.samples_row
        rows.update({(Table.HISTORY, name): render for name, render in changes.archive.items()})
        self.facts.highest_publication = self.publications.highest_id
        self.facts.devices_given = self.time_share.given
        self._stage_header(rows, "ledger", changes.header)
        self._stage_header(rows, "job", self.facts.to_record())
        if self.config.autoscale.enable:
            self._stage_header(rows, "autoscale", self.scaling.autoscaler.memory.to_record())
        self._stage_header(rows, "rewards", self.reward_stats.to_record())
        if self.membership is not None:
            self._stage_header(rows, "members", self.membership.to_record())
            self._say_members(self.membership)
        rows.update({(Table.REPLICAS, name): None for name in self.registry.take_forgotten()})
        for replica in self.registry.take_changes():
            rows[Table.REPLICAS, replica.name] = replica.to_record
            self._say_state(replica)
        rows.update({(Table.PUBLICATIONS, str(old)): None for old in self.publications.take_forgotten()})
        for entry in self.publications.take_changes():
            rows[Table.PUBLICATIONS, str(entry.publication.id)] = entry.to_record
        for step, row in self.steps.take_changes().items():
            rows[Table.STEPS, str(step)] = None if row is None else partial(dict, row)
        changed, removed = self.validation.take_changes()
        rows.update({(Table.VALIDATION, name): partial(self.validation.row, name) for name in changed})
        rows.update({(Table.VALIDATION, name): None for name in removed})
        self._add_events(changes.dropped, changed)
        rows.update({(Table.EVENTS, str(id_)): render for id_, render in self.events.take_changes().items()})
        dropped = changes.dropped_payloads + [text_key(*name) for name in self.validation.take_dropped_texts()]
        if rows or puts or dropped:
            self.store.enqueue(rows, puts, dropped)

    def _add_events(self, dropped: list[Group], validations: list[str]) -> None:
        """Events of changes that are seen best where they are staged, whatever made them."""
        self.events.drops(dropped)
        self.samples.dropped(dropped, self.progress.committed, self.progress.timeline)
        for name in validations:
            kind, _, version = name.partition(":")
            if kind == "record":
                record = self.validation.records[int(version)]
                text = f"validation of version {version}: {_validated(record)} over {record.samples} samples"
                text += f", {record.errors} gradings failed" if record.errors else ""
                self.events.add(EventKind.VALIDATION, text, **record.model_dump(mode="json"))
                self._note_alarms(self.alarms.validation(record))
        if (state := self._state()) != self._said:
            (before, _), (phase, note), self._said = self._said, state, state
            error = self.facts.last_error if phase in (Phase.FAILED, Phase.STOPPED) else None
            why = error or note
            text = f"the job is {phase}" if phase != before else why or "prompts are handed out as before"
            text += f": {why}" if why and phase != before else ""
            self.events.add(EventKind.JOB, text, phase=str(phase), note=note, error=error)
        if self.events.changed or self.samples.finished:
            self.event_signal.notify()

    def waits_since(self, key: str) -> float:
        """Since when the job waits for what `key` names (Unix time), as far as this controller has seen it."""
        if key != self._waits[0]:
            self._waits = key, self.wall()
        return self._waits[1]

    def _keep_pass(self, order: PassOrder) -> PassOrder:
        """Write the order of a pass that was decided; answers with the one that counts. Raises `StoreUnavailable`."""
        source = self.require_ledger().table.mixture.sources[order.source]
        try:
            order = pass_files.keep(self.run_dir, order, source)
        except (OSError, PromptFileError) as error:
            raise StoreUnavailable(f"the order of a pass cannot be written: {error}") from None
        name = f" of {source.name}" if source.name else ""
        text = (
            f"pass {order.data_pass}{name}: its order follows the results so far; of {source.rows:,} rows "
            f"{order.solved:,} are left out as solved, {order.failed:,} as failed"
        )
        log.info("%s", text)
        facts = {"source": source.name, "rows": source.rows, "solved": order.solved, "failed": order.failed}
        self.events.add(EventKind.ORDER, text, data_pass=order.data_pass, **facts)
        return order

    def _note_alarms(self, changes: Iterable[AlarmChange]) -> None:
        self.facts.alarms_shown = sorted(self.alarms.shown)
        for change in changes:
            text = change.text if change.on else f"over: {change.text}"
            log.warning("%s", text) if change.on else log.info("%s", text)
            self.events.add(EventKind.ALARM, text, name=change.name, on=change.on, step=self.progress.committed)

    def _state(self) -> tuple[Phase, str]:
        return self.phase, self.note

    def _say_state(self, replica: Replica) -> None:
        if self._seen.get(replica.replica_id) == replica.state:
            return
        self._seen = {known.replica_id: known.state for known in self.registry}
        why = f": {replica.status}" if replica.status and not replica.present else ""
        self.events.add(
            EventKind.REPLICA,
            f"{replica.replica_id} is {replica.state}{why}",
            name=replica.name,
            replica_id=replica.replica_id,
            role=replica.role,
            state=replica.state,
            host=replica.host,
            pid=replica.pid,
            ranks=replica.world_size,
            why=replica.status,
        )

    def _say_members(self, membership: Membership) -> None:
        now = membership.shares()
        if self._stored.get("shares", {}) == now:
            return
        self._stored["shares"] = dict(now)
        self.say_members()

    def say_members(self, why: str = "") -> None:
        """Add an event with the present members and their parts. why: in front of its text."""
        membership = self.membership
        assert membership is not None
        now = membership.shares()
        shares = ", ".join(f"{name} {count}" for name, count in now.items()) or "nobody"
        text = (
            f"{why}membership epoch {membership.epoch} before step {membership.step}: parts of {membership.parts}: "
            f"{shares}"
        )
        self.events.add(
            EventKind.MEMBERS, text, epoch=membership.epoch, step=membership.step, parts=membership.parts, members=now
        )

    def _stage_header(self, rows: dict[tuple[Table, str], Render | None], name: str, value: dict[str, Any]) -> None:
        if self._stored.get(name) != value:
            self._stored[name] = value
            rows[Table.HEADERS, name] = partial(dict, value)

    def require_room(self) -> None:
        """Raise `StoreUnavailable` while Redis is so slow that no more payloads may wait for it."""
        limit = self.config.controller.max_buffered_bytes
        if self.store.backlog_bytes > limit:
            raise StoreUnavailable(
                f"samples of more than controller.max_buffered_bytes = {limit} bytes wait for Redis"
            )

    async def save(self, puts: Mapping[PayloadKey, Payload] | None = None) -> None:
        """Write what changed; returns when it, and all that others wait for, is in Redis."""
        self.stage(puts)
        await self.store.flush()

    async def save_durably(self) -> None:
        """Save as `save` does, down to the append-only file."""
        self.stage()
        await self.store.flush_durably()

    # ---- phase and end ------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self.facts.ended is not None:
            return self.facts.ended
        if self.facts.paused:
            return Phase.PAUSED
        if self.config.validation.only:
            return Phase.VALIDATING if self._under_way() else Phase.STARTING
        if self.progress.finished:
            return Phase.FINISHING
        if not self.progress.committed and not self._under_way():
            return Phase.STARTING
        if self.validation.pending and not len(self.steps):
            return Phase.VALIDATING
        return Phase.TRAINING

    def _under_way(self) -> bool:
        if not self.config.is_grpo:
            return bool(self.registry.present("policy"))
        return self.publications.newest is not None and bool(self.registry.present("rollout"))

    @property
    def ended(self) -> bool:
        return self.facts.ended is not None

    @cached_property
    def _no_groups(self) -> Ledger:
        """The ledger that rollout replicas find in a supervised job, which they only validate: it has no groups."""
        return Ledger(GroupTable(LedgerParams(1, 1, staleness_bound=0, n_positions=1, max_steps=0)))

    def require_ledger(self) -> Ledger:
        """The ledger of groups. Raises `ApiError` in a supervised job."""
        if isinstance(self.ledger, Ledger):
            return self.ledger
        if self.config.generates:
            return self._no_groups
        raise ApiError(ErrorCode.CONFLICT, "this is a supervised job: it has no groups and no batches")

    def require_group(self, name: str) -> Group:
        """One group. Raises `ApiError` if there is none of this id."""
        group = self.require_ledger().table.find(name)
        if group is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"group {name} does not exist")
        return group

    def acting(self, replica_id: str, incarnation: int, role: Role) -> Replica:
        """The replica that makes this call, which is a sign of its life. Raises `ApiError`, `StoreUnavailable`."""
        self.store.require()
        replica = self.registry.check(replica_id, incarnation, role)
        self.registry.seen(replica, self.clock())
        return replica

    def leads(self, replica_id: str) -> bool:
        """Whether a policy replica is the one that commits, publishes and saves."""
        return self.membership is None or self.membership.leader == replica_id

    @property
    def trainer_has_devices(self) -> bool:
        """Whether the trainer has, or wants, devices that rollout replicas have too."""
        present = bool(self.registry.present("policy"))
        return self.config.shares_time and self.time_share.of_policy(self.facts.policy_epoch, present)

    def is_published(self, version: int) -> bool:
        """Whether a trainer is to publish the weights of so many steps."""
        config = self.config
        interval = config.train.sync_weight_interval if config.is_grpo else config.validation.freq
        due = version % interval == 0
        return due or self.progress.finished or self.ended

    def commit_reply(self, *, publish: bool) -> CommitReply:
        return CommitReply(
            committed_steps=self.progress.committed,
            total_steps=self.progress.total_steps,
            publish=publish,
            finished=self.progress.finished or self.ended,
            epochs=self.progress.passes_done,
        )

    def end(self, phase: Phase, error: str | None = None, traceback: str = "") -> None:
        """Enter a terminal phase; the first one counts. traceback: of a user's code that is the reason."""
        if self.ended:
            return
        self.facts.ended = phase
        self.facts.last_error = error or self.facts.last_error
        self.facts.traceback = traceback
        log.log(
            logging.ERROR if phase is Phase.FAILED else logging.INFO, "the job is %s: %s", phase, error or self.note
        )
        self.wake_all()

    def reopen(self) -> None:
        """Leave the phase `stopped` or `failed`: everything else is as it was."""
        log.info("the job was %s and goes on", self.facts.ended)
        self.facts.ended, self.facts.last_error, self.facts.traceback = None, None, ""
        self.reset_rewards()
        if isinstance(self.progress, GroupTable):
            self.progress.filtered, self.progress.fruitless = 0, [0] * len(self.progress.mixture)
        self.facts.paused = False
        self.steps.begin_window()
        self.opened_at = self.clock()
        self.settle()
        self.wake_all()

    def trained(
        self,
        record: StepRecord,
        samples: int,
        tokens: int,
        score: float | None,
        validations: Iterable[HeldOutLoss] = (),
    ) -> None:
        """A step was committed. score: the mean of its samples, None where nothing was scored."""
        self.steps.add(record, samples, tokens)
        for validation in validations:
            self.validation.record(ValidationRecord(**validation.model_dump()))
        self.events.add(
            EventKind.STEP,
            f"step {record.step} is trained" + ("" if score is None else f", reward {score:.3f}"),
            **record.model_dump(mode="json"),
            samples=samples,
            tokens=tokens,
            timeline=self.progress.timeline,
        )
        self._note_alarms(self.alarms.step(record))
        self.facts.last_score = score if score is not None else self.facts.last_score
        self.settle()
        self.wake_all()

    def settle(self) -> None:
        """Draw the consequences of a change: close the stream, make the last round due, end the job."""
        if self.ended:
            return
        if isinstance(self.ledger, Ledger) and self.ledger.starves:
            self.end(Phase.FAILED, self._starved(self.ledger))
        elif isinstance(self.ledger, Ledger) and (source := self.ledger.barren) is not None:
            self.end(Phase.FAILED, self._fruitless(source))
        if self.ended or not self.progress.finished:
            return
        if self.config.validation.only:
            self._settle_validation()
            return
        if not self.progress.committed:
            self.end(Phase.FAILED, *self._nothing_trained())
            return
        if self.ledger.close():
            self.wake_all()
        waiting = self._awaits_final_validation()
        if self.facts.exported and not waiting:
            self.end(Phase.FINISHED)

    def _settle_validation(self) -> None:
        """End a job that only validates: when it has, or nobody is there to do so."""
        if self.facts.exported and not self._awaits_final_validation():
            failed = 0 not in self.validation.records
            self.end(Phase.FAILED if failed else Phase.FINISHED, self.facts.last_error if failed else None)

    # ---- rewards, and data that runs out ------------------------------------------------------------------

    @property
    def _has_scored(self) -> bool:
        step = self.progress.committed
        return bool(step or self.progress.ready or self.ledger.batch(step))

    def reset_rewards(self) -> None:
        """Judge rewards by new outcomes alone: a cause of failure may be gone."""
        self.rewards.reset(scored=self._has_scored)

    @property
    def note(self) -> str:
        """Return what holds the job up, or why it finished before its planned steps; mostly empty."""
        done, total = self.progress.committed, self.progress.total_steps
        if not self.progress.finished:
            return "" if self.ended else self.rewards.note
        if not done or done >= total or self.facts.ended in (Phase.STOPPED, Phase.FAILED):
            return ""
        return f"finished after {done} of {total} steps: the data ran out{self._drops()}"

    def _drops(self) -> str:
        dropped = self.progress.status().dropped
        counts = sorted(dropped.items(), key=lambda item: -item[1])
        return "; dropped: " + ", ".join(f"{reason} {count}" for reason, count in counts) if counts else ""

    def _nothing_trained(self) -> tuple[str, str]:
        """The error of a job whose data ran out before its first step, and a traceback if there is one."""
        dropped = self.progress.status().dropped
        most = max(dropped, key=lambda reason: dropped[reason], default="")
        errors = [group.error for group in self.progress.in_state(GroupState.DROPPED) if group.error]
        failed = most == DropReason.REWARD_ERROR and bool(errors)
        return (
            f"not one of {self.progress.total_steps} steps was trained: the data ran out{self._drops()}. "
            + REMEDIES.get(most, "See GET /v1/groups?state=dropped")
            + ". Then start a new run: this one has no prompts left",
            errors[-1] if failed else "",
        )

    def _starved(self, ledger: Ledger) -> str:
        """The error of a step that dynamic sampling cannot fill."""
        table, params = ledger.table, ledger.params
        return (
            f"step {table.first_step} is not full: {table.filtered} groups were dropped as "
            f"{DropReason.ZERO_VARIANCE} since the last step was assembled, more than the "
            f"{params.max_refills} refills of {params.groups_per_step} groups that "
            f"{MAX_REFILLS} = {params.max_refills} allows. In each of them all samples have the same rewards of "
            f"train.train_policy.filter_reward_metric: use easier prompts where all answers fail and harder ones "
            f"where all succeed, a larger rollout.n_generation, or {MAX_REFILLS} = 0 for no limit"
        )

    def _fruitless(self, source: Source) -> str:
        """The error of a source that gives nothing to train, and so takes the groups of the others."""
        table = self.require_ledger().table
        dropped = table.fruitless[table.mixture.sources.index(source)]
        return (
            f"the last {dropped:,} groups of the source {source.name} had nothing to train, passes over all of its "
            f"rows{self._drops()}. It cannot have its share: go on (--resume) with a stage of "
            "train.train_policy.curriculum that gives it none from here on, or with a filter that lets more through; "
            "or begin anew with other rows"
        )

    def _awaits_final_validation(self) -> bool:
        newest = self.publications.newest
        if newest is None or newest.version != self.progress.committed:
            return False
        self.validation.published(newest.version, final=True)
        if not self.validation.pending or not self.facts.exported:
            return self.validation.pending
        now = self.clock()
        if self.registry.present("rollout"):
            self._alone_since = None
            return True
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since <= self.config.controller.start_timeout:
            return True
        waited = self.config.controller.start_timeout
        self.facts.last_error = f"no final validation: no rollout replica was there for {waited:g} s"
        log.warning("%s", self.facts.last_error)
        return False

    def wake_all(self) -> None:
        for signal in (
            self.lease_signal,
            self.batch_signal,
            self.publication_signal,
            self.event_signal,
            self.turn_signal,
            self.member_signal,
        ):
            signal.notify()

    def close(self) -> None:
        """End all long-polls: the process is about to end."""
        self.closing = True
        self.wake_all()


def _validated(record: ValidationRecord) -> str:
    if record.loss is not None:
        scores = f", score {_validated(record.model_copy(update={'loss': None}))}" if record.is_completed else ""
        return f"loss {record.loss:.4f}{scores}"
    if record.score_mean is None or record.scores is None:
        return "every reward failed" if record.score_mean is None else f"{record.score_mean:.3f}"
    of_n = {k: passed for k, passed in record.scores.passed.items() if k > 1}
    text = "".join(f", pass@{k} {passed.value:.3f}" for k, passed in list(of_n.items())[-1:])
    return f"{record.score_mean:.3f}{text}"
