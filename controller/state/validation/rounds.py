"""Validation rounds: when one is due, which replica works on it, and what came out.

     due ─first lease: pinned to that replica's version─▶ running ─all samples─▶ record
      │                                                      │ nobody holds its version any more
      └── overtaken by a later due version: never starts     └──▶ due again, its samples discarded

A round covers every row of the validation data, at one weight version. It is due for version v if v = 0 and
`before`, or v is a multiple of `freq`, or v is final; the first replica at v or later that asks for work pins it
to its own version. Replicas at another version cannot take part, at most `max_replicas` do so at once, and
nobody waits: this lies outside of admission and training goes on meanwhile.

In supervised training the trainer's commits bring losses (`record`); rounds are for `validation.generate`.

A participant keeps its version while it holds validation groups. If it moves on between two leases the round
starts again; after `MAX_RESTARTS` a lease grants all that is left, so that every round ends.

A reward that fails is counted as an error and left out of the means, never taken as 0; during an outage of rewards
(`controller.ledger.reward_health`) it is tried again, as often as a prompt at which replicas fail, which ends as
errors too.

Pure: time comes in, as `now` (of the clock by which leases expire) and as `at` (Unix time, of the record if this ends
the round), and `take_changes` hands out the rows that must be written.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import stdev
from typing import Any, Self

from controller.ledger.ledger import MISSED_BEATS
from controller.ledger.reward_health import Failure, failure_of
from controller.ledger.values import PushOutcome
from controller.state.step_log import mean_score
from controller.state.validation.group import PREFIX, EndedRound, ValidationGroup, ValidationParams
from schema.scores.summary import ScoredPrompt, of_headers, summarise
from schema.util.text import one_line
from schema.wire.messages import ErrorCode, HeldLease, ValidationRecord
from schema.wire.sample import LONGEST_SOURCE, SampleHeader

MAX_RESTARTS = 2
"""Restarts of a round before it is handed out whole."""


class Validation:
    """See the module's docstring. One round at a time; a later due version replaces one that has not begun."""

    def __init__(self, params: ValidationParams, new_lease_id: Callable[[], str] | None = None) -> None:
        self.params = params
        self.records: dict[int, ValidationRecord] = {}
        self.round_id = 0
        self.due: int | None = None
        self.pinned: int | None = None
        self.pinned_publication: int | None = None
        self.restarts = 0
        self.groups: list[ValidationGroup] = []
        self.unfiled: list[EndedRound] = []
        """Rounds that have ended and are to be filed, the oldest first."""
        self._checked = -1
        self._dropped_texts: list[tuple[str, int]] = []
        self._new_lease_id = new_lease_id or (lambda: PREFIX + secrets.token_urlsafe(12))
        self._dirty: set[str] = set()
        self._removed: set[str] = set()

    # ---- what is due --------------------------------------------------------------------------------------

    def published(self, version: int, *, final: bool) -> None:
        """A version can be had now: every version up to it that is due and was not looked at yet is due."""
        if not self.params.n_rows:
            return
        versions = [v for v in range(self._checked + 1, version + 1) if self._is_due(v)]
        known = self.records.get(version)
        scored = known is not None and known.scores is not None  # a loss alone, of a trainer, is not that
        if final and not scored and version not in (self.pinned, self.due):
            versions.append(version)
        if versions and (self.pinned is None or versions[-1] > self.pinned):
            self.due = versions[-1]
        if versions or version > self._checked:
            self._checked = max(self._checked, version)
            self._dirty.add("header")

    def _is_due(self, version: int) -> bool:
        return self.params.before if version == 0 else version % self.params.freq == 0

    def rewind(self, step: int) -> None:
        """The run goes back to `step` committed steps: what was measured on later versions is not part of it."""
        if self.pinned is not None and self.pinned > step:
            self._cancel()
        if self.due is not None and self.due > step:
            self.due = None
        for version in [version for version in self.records if version > step]:
            del self.records[version]
            self._removed.add(f"record:{version}")
        for ended in [ended for ended in self.unfiled if ended.version > step]:
            self.filed(ended)
        self._checked = min(self._checked, step)
        self.restarts = 0
        self._dirty.add("header")

    def begin_from(self, step: int) -> None:
        """The run goes on from a checkpoint of `step` steps: what was due before it is not looked at again."""
        self._checked = max(self._checked, step - 1)
        self._dirty.add("header")

    @property
    def running(self) -> bool:
        return self.pinned is not None

    @property
    def pending(self) -> bool:
        """Whether a round is running or due."""
        return self.running or self.due is not None

    def wants(self, version: int) -> bool:
        """Whether a due round is waiting for replicas that hold a later version than `version`."""
        return not self.running and self.due is not None and version < self.due

    # ---- leasing ------------------------------------------------------------------------------------------

    def lease(
        self, replica_id: str, request_id: str, version: int, publication_id: int, max_groups: int, now: float
    ) -> list[ValidationGroup]:
        """Up to `max_groups` groups of the round for a replica whose engine holds `version`."""
        repeated = [g for g in self._held() if g.request_id == request_id and g.replica_id == replica_id]
        if repeated:
            return repeated
        if not self._may_take_part(replica_id, version, publication_id):
            return []
        size = min(max_groups, self.params.lease_size or max_groups)
        if self.restarts >= MAX_RESTARTS:
            size = len(self.groups)
        waiting = [group for group in self.groups if group.state == "waiting"]
        chosen = sorted(waiting, key=lambda group: group.attempt)[:size]  # a bad one holds up no other
        for group in chosen:
            group.state = "leased"
            group.attempt += 1
            group.lease_id = self._new_lease_id()
            group.replica_id, group.request_id = replica_id, request_id
            group.expires = now + self.params.lease_timeout
            self._touch(group)
        return chosen

    def repeats(self, replica_id: str, request_id: str) -> bool:
        """Whether groups are held that were granted to this very request."""
        return any(g.request_id == request_id and g.replica_id == replica_id for g in self._held())

    def _may_take_part(self, replica_id: str, version: int, publication_id: int) -> bool:
        holders = {group.replica_id for group in self._held()}
        if self.running and version != self.pinned and not holders:
            self._restart()
        if not self.running:
            if self.due is None or version < self.due:
                return False
            self._begin(version, publication_id)
        if version != self.pinned:
            return False
        return replica_id in holders or len(holders) < self.params.max_replicas

    def _begin(self, version: int, publication_id: int) -> None:
        self.round_id += 1
        self.pinned, self.pinned_publication = version, publication_id
        self.due = None
        self._clear_groups()
        self.groups = [ValidationGroup(position) for position in range(self.params.n_rows)]
        for group in self.groups:
            self._touch(group)
        self._dirty.add("header")

    def _restart(self) -> None:
        """No replica holds the version any more: the round is due again at whatever version comes."""
        assert self.pinned is not None
        self.due = self.pinned if self.due is None else self.due
        self.restarts += 1
        self._cancel()

    def _cancel(self) -> None:
        self._drop_texts(self.round_id)
        self.pinned = self.pinned_publication = None
        self._clear_groups()
        self._dirty.add("header")

    def filed(self, ended: EndedRound) -> None:
        """The texts of a round are filed, or of no use: the store need not have them any more."""
        self.unfiled.remove(ended)
        self._drop_texts(ended.round_id)
        self._dirty.add("header")

    def samples_of(self, round_id: int) -> list[tuple[str, int]]:
        """All samples of a round by group id and index, as far as they came."""
        params, prefix = self.params, f"{PREFIX}{round_id}-p"
        rows = range(params.n_rows)
        return [(f"{prefix}{row}", index) for row in rows for index in range(params.samples_of(row))]

    @property
    def n_samples(self) -> int:
        """All samples of the running round."""
        return sum(self.params.samples_of(group.position) for group in self.groups)

    def _drop_texts(self, round_id: int) -> None:
        if self.params.keeps_texts:
            self._dropped_texts += self.samples_of(round_id)

    def take_dropped_texts(self) -> list[tuple[str, int]]:
        """Samples whose texts the store need not have any more, once."""
        dropped, self._dropped_texts = self._dropped_texts, []
        return dropped

    def _clear_groups(self) -> None:
        self._removed.update(f"group:{group.position}" for group in self.groups)
        self.groups = []

    # ---- leases end ---------------------------------------------------------------------------------------

    def _held(self) -> list[ValidationGroup]:
        return [group for group in self.groups if group.state == "leased"]

    def leases_of(self, replica_id: str) -> int:
        return sum(group.replica_id == replica_id for group in self._held())

    def renew(self, replica_id: str, lease_ids: Iterable[str], now: float) -> list[str]:
        """Extend listed leases, release those forgotten twice, return lost ones; see `Ledger.renew`."""
        listed = set(lease_ids)
        held = {group.lease_id or "": group for group in self._held() if group.replica_id == replica_id}
        for lease_id, group in held.items():
            if lease_id in listed:
                group.expires = now + self.params.lease_timeout
                group.missed = 0
            else:
                group.missed += 1
                if group.missed >= MISSED_BEATS:
                    self._requeue(group)
        return sorted(listed - held.keys())

    def adopt(self, replica_id: str, held: Sequence[HeldLease], now: float) -> list[str]:
        """Leases that a replica says it holds: known ones are its own. Returns the ids of the others."""
        lost = []
        for lease in held:
            group = self.find(lease.group_id)
            if group is not None and group.state == "leased" and group.lease_id == lease.lease_id:
                group.replica_id, group.expires = replica_id, now + self.params.lease_timeout
                self._touch(group)
            else:
                lost.append(lease.lease_id)
        return lost

    def holder(self, lease_id: str) -> str | None:
        """Id of the replica that holds a lease, if anybody does."""
        return next((group.replica_id for group in self._held() if group.lease_id == lease_id), None)

    def release(self, lease_id: str) -> bool:
        for group in self._held():
            if group.lease_id == lease_id:
                self._requeue(group)
                return True
        return False

    def replica_gone(self, replica_id: str, at: float, *, failed: bool = True) -> int:
        held = [group for group in self._held() if group.replica_id == replica_id]
        for group in held:
            self._fail(group, at) if failed else self._requeue(group)
        return len(held)

    def expire(self, now: float, at: float) -> int:
        late = [group for group in self._held() if group.expires < now]
        for group in late:
            self._fail(group, at)
        return len(late)

    def forgive(self, now: float) -> None:
        """After a downtime of the controller: no lease could be renewed, so none is late."""
        for group in self._held():
            group.expires = now + self.params.lease_timeout

    def _requeue(self, group: ValidationGroup) -> None:
        group.missed = 0
        group.state, group.lease_id, group.replica_id, group.request_id = "waiting", None, None, None
        self._touch(group)

    def _fail(self, group: ValidationGroup, at: float) -> None:
        self._requeue(group)
        group.failures += 1
        if group.failures >= self.params.max_attempts:
            self._finish_group(group, at)

    # ---- samples and results ------------------------------------------------------------------------------

    def group_name(self, group: ValidationGroup) -> str:
        return f"{PREFIX}{self.round_id}-p{group.position}"

    def find(self, name: str) -> ValidationGroup | None:
        """The group with this id if it belongs to the running round, or the last one if none has begun since."""
        prefix, _, position = name.rpartition("-p")
        if prefix != f"{PREFIX}{self.round_id}" or not position.isdecimal():
            return None
        index = int(position)
        return self.groups[index] if index < len(self.groups) else None

    def push(
        self, name: str, lease_id: str, index: int, header: SampleHeader, at: float, *, outage: bool = False
    ) -> PushOutcome:
        """Add one sample under a lease; all its tokens must be of the pinned version. outage: as in `Ledger.push`."""
        group = self.find(name)
        size = self.params.n_samples if group is None else self.params.samples_of(group.position)
        if header.index != index or (not 0 <= index < size and group is not None):
            detail = f"sample {index} (header says {header.index}) of a group of {size}"
            return PushOutcome(False, code=ErrorCode.BAD_REQUEST, detail=detail)
        if group is not None and group.leases.get(index) == lease_id:
            return PushOutcome(True, duplicate=True)
        if group is None or group.state != "leased" or group.lease_id != lease_id:
            detail = f"lease {lease_id} of validation group {name} has ended"
            return PushOutcome(False, code=ErrorCode.LEASE_LOST, detail=detail)
        if header.response_tokens and (header.oldest_version, header.newest_version) != (self.pinned, self.pinned):
            detail = (
                f"tokens of versions {header.oldest_version} to {header.newest_version} in a validation round "
                f"of version {self.pinned}"
            )
            return PushOutcome(False, code=ErrorCode.CONFLICT, detail=detail)
        if index in group.samples:
            return PushOutcome(True, duplicate=True)
        group.samples[index], group.leases[index] = header, lease_id
        self._touch(group)
        if len(group.samples) == size:
            return PushOutcome(True, complete=True, failure=self._complete(group, at, outage))
        return PushOutcome(True)

    def _complete(self, group: ValidationGroup, at: float, outage: bool) -> Failure | None:
        """All samples are there. What failed, if none of them has a score."""
        failed = {index: header for index, header in group.samples.items() if header.error is not None}
        made = [header for index, header in group.samples.items() if group.leases[index] == group.lease_id]
        failure = failure_of(made, len(failed) < len(group.samples))
        if outage and failed and all(header.outage for header in failed.values()):
            for index in failed:
                del group.samples[index]
            self._fail(group, at)
        else:
            self._finish_group(group, at)
        return failure

    def _finish_group(self, group: ValidationGroup, at: float) -> None:
        self._requeue(group)
        group.state = "done"
        if all(other.state == "done" for other in self.groups):
            assert self.pinned is not None
            self.record(self._result(self.pinned, at))
            if self.params.keeps_texts:
                self.unfiled.append(EndedRound(self.round_id, self.pinned))
            if self.due is not None and self.due <= self.pinned:
                self.due = None
            self.restarts = 0
            self.pinned = self.pinned_publication = None
            self._dirty.add("header")

    def record(self, record: ValidationRecord) -> None:
        """A version is validated; versions come in order. What is known of one stays; a loss and scores are one."""
        known = self.records.get(record.version)
        if known is not None:
            complete = known.loss is not None and known.scores is not None
            if complete or (known.loss is None) == (record.loss is None):
                return
            loss, scored = (known, record) if record.loss is None else (record, known)
            record = scored.model_copy(update={"loss": loss.loss, "accuracy": loss.accuracy})
        self.records[record.version] = record
        self._dirty.add(f"record:{record.version}")

    def _result(self, version: int, at: float) -> ValidationRecord:
        headers = [header for group in self.groups for header in group.samples.values()]
        scored = [header for header in headers if header.score is not None]
        scores = [header.score for header in scored if header.score is not None]
        names = sorted({name for header in scored for name in header.rewards})
        summary = summarise(map(self._scored, self.groups), self.params.pass_score)
        return ValidationRecord(
            version=version,
            at=at,
            samples=len(scored),
            score_mean=mean_score(scores),
            score_error=stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None,
            rewards_mean={
                self.params.names.get(name, name): mean_score(h.rewards.get(name) for h in scored) or 0.0
                for name in names
            },
            response_tokens_mean=mean_score(header.response_tokens for header in headers) or 0.0,
            errors=summary.whole.errors,
            scores=summary.whole,
            sources=summary.sources,
        )

    def _scored(self, group: ValidationGroup) -> ScoredPrompt:
        params, label = self.params, self.params.label_of(group.position)
        pass_score = params.pass_scores.get(label)
        part = one_line(label)[:LONGEST_SOURCE]
        return of_headers(group.samples.values(), params.samples_of(group.position), part, pass_score)

    # ---- storing ------------------------------------------------------------------------------------------

    def _touch(self, group: ValidationGroup) -> None:
        self._dirty.add(f"group:{group.position}")

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Names of the rows that changed and of those that are gone; `row` renders one."""
        changed = [name for name in self._dirty if self._exists(name)]
        removed = [name for name in self._removed if not self._exists(name)]
        self._dirty, self._removed = set(), set()
        return changed, removed

    def _exists(self, name: str) -> bool:
        kind, _, number = name.partition(":")
        if kind == "group":
            return int(number) < len(self.groups)
        return self.params.n_rows > 0 if kind == "header" else int(number) in self.records

    def row(self, name: str) -> dict[str, Any]:
        """One row as plain values."""
        kind, _, number = name.partition(":")
        if kind == "group":
            return self.groups[int(number)].to_record()
        if kind == "record":
            return self.records[int(number)].model_dump()
        return {
            "round_id": self.round_id,
            "due": self.due,
            "pinned": self.pinned,
            "pinned_publication": self.pinned_publication,
            "restarts": self.restarts,
            "checked": self._checked,
            "unfiled": [[ended.round_id, ended.version] for ended in self.unfiled],
        }

    @classmethod
    def restore(
        cls, params: ValidationParams, rows: Mapping[str, Any], new_lease_id: Callable[[], str] | None = None
    ) -> Self:
        """Rebuild from the rows that were written."""
        validation = cls(params, new_lease_id)
        if header := rows.get("header"):
            validation.round_id, validation.restarts = header["round_id"], header["restarts"]
            validation.due, validation.pinned = header["due"], header["pinned"]
            validation.pinned_publication, validation._checked = (header["pinned_publication"], header["checked"])
            validation.unfiled = [EndedRound(*ended) for ended in header.get("unfiled", [])]
        groups = [value for name, value in rows.items() if name.startswith("group:")]
        validation.groups = [
            ValidationGroup.from_record(group) for group in sorted(groups, key=lambda group: group["position"])
        ]
        records = [value for name, value in rows.items() if name.startswith("record:")]
        validation.records = {
            record["version"]: ValidationRecord.model_validate(record)
            for record in sorted(records, key=lambda record: record["version"])
        }
        return validation
