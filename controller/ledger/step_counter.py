"""Committed steps and the timeline they lie on: what jobs of both kinds count, and all that a supervised job has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from controller.errors import ApiError
from controller.ledger.group import Group, GroupState
from controller.ledger.reconcile import Lineage
from controller.ledger.values import LedgerChanges, LedgerTotals
from schema.wire.messages import ErrorCode, LedgerSnapshot, LedgerStatus
from schema.wire.mixture import OtherSourcesError

FIRST = ", first "
"""The words of an order in front of the hash of the rows that come before all others in the first pass."""


def why_other(before: str, now: str, keys: str) -> str:
    """Say why two orders differ. keys: the words for what must be as it was."""
    if before.partition(FIRST)[0] != now.partition(FIRST)[0]:
        return f"{keys} must be what they were"
    return (
        "the first pass began with other rows, prepared before all others: put the data/train.safetensors of that "
        "run where it was, or name the checkpoint inside of its run"
    )


def check_order(header: Mapping[str, Any], order: str) -> None:
    """Refuse to go on with rows in another order than a stored header says. Raises `OtherSourcesError`."""
    if order and header.get("order", order) != order:
        keys = "train.seed, dataloader_shuffle and the curriculum of train.train_policy (in supervised training also "
        why = why_other(header["order"], order, keys + "the parts, their shares and the batch size)")
        raise OtherSourcesError(
            f"the run began with its rows in another order: {why}, else some rows would be trained twice and others "
            "never"
        )


class StepProgress:
    """How far a job has come. `header` and `load` are its stored form."""

    def __init__(self) -> None:
        self.committed = 0
        self.durable = 0
        """Steps that a complete checkpoint contains."""
        self.timeline = 0
        self.began = 0
        """Step at which the present timeline began."""
        self.lineage = Lineage()
        self.totals = LedgerTotals()

    def require(self, step: int, what: str) -> None:
        """Raise `ApiError` unless `step` steps are committed."""
        if step > self.committed:
            raise ApiError(ErrorCode.WRONG_STEP, f"{what} of step {step}, committed are {self.committed}")

    def go_back(self, step: int, timeline: int | None) -> None:
        """To the checkpoint after `step` steps; a new timeline begins (its number, if it has one already)."""
        self.committed, self.began, self.durable = step, step, min(self.durable, step)
        self.timeline = self.timeline + 1 if timeline is None else timeline
        self.lineage.begin(self.timeline, step)

    def go_on_from(self, snapshot: LedgerSnapshot, timeline: int | None, began: int | None) -> None:
        """From a checkpoint; a new timeline begins, unless the caller says which one it is and where it began."""
        self.committed = self.durable = snapshot.committed_steps
        self.began = snapshot.committed_steps if began is None else began
        self.timeline = max(self.timeline, snapshot.timeline) + 1 if timeline is None else timeline
        self.lineage.begin_from(snapshot.timeline, self.committed, self.timeline, self.began)

    def header(self) -> dict[str, Any]:
        """The job's own numbers, as plain values."""
        return {
            "committed": self.committed,
            "durable": self.durable,
            "timeline": self.timeline,
            "began": self.began,
            "lineage": self.lineage.to_record(),
        }

    def load(self, header: Mapping[str, Any]) -> None:
        """Take over what `header` gave."""
        self.committed, self.durable = header["committed"], header["durable"]
        self.timeline, self.began = header["timeline"], header["began"]
        self.lineage = Lineage.from_header(header)


class StepCounter(StepProgress):
    """The ledger of a supervised job: steps, without groups. It answers as `GroupTable` and `Ledger` do."""

    passes_done = 0
    """Its trainer knows: rows are counted there."""
    ready = outstanding = 0

    def __init__(
        self, total_steps: int, n_positions: int | None = None, order: str = "", grown: Sequence[int] = ()
    ) -> None:
        """order: identifies the order of the rows. grown: as in `LedgerParams`."""
        super().__init__()
        self.total_steps, self.n_positions, self.order, self._grown = total_steps, n_positions, order, grown

    @classmethod
    def restore(
        cls,
        total_steps: int,
        header: Mapping[str, Any],
        n_positions: int | None = None,
        order: str = "",
        grown: Sequence[int] = (),
    ) -> Self:
        if header["committed"]:
            check_order(header, order)
        counter = cls(total_steps, n_positions, order, grown)
        counter.load(header)
        return counter

    @property
    def finished(self) -> bool:
        return self.committed >= self.total_steps

    def grow(self, total_steps: int, n_positions: int, grown: Sequence[int]) -> None:
        """Go on with all rows, now that those are prepared which were missing."""
        self.total_steps, self.n_positions, self._grown = total_steps, n_positions, grown

    def commit(self, step: int) -> bool:
        """Finish a step; False if it was committed before."""
        if step < self.committed:
            return False
        if step > self.committed or self.finished:
            detail = f"step {step} cannot be committed: {self.committed} of {self.total_steps} steps are done"
            raise ApiError(ErrorCode.WRONG_STEP, detail)
        self.committed += 1
        return True

    def checkpoint(self, step: int) -> int:
        self.require(step, "checkpoint")
        self.durable = max(self.durable, step)
        return self.durable

    def snapshot(self, step: int) -> LedgerSnapshot:
        self.require(step, "snapshot")
        return LedgerSnapshot(
            committed_steps=step,
            timeline=self.timeline,
            frontier=0,
            untrained=[],
            n_positions=self.n_positions,
            order=self.order or None,
        )

    def rewind(self, step: int, timeline: int | None = None) -> None:
        self.require(step, "rewind")
        self.go_back(step, timeline)

    def check_snapshot(self, snapshot: LedgerSnapshot) -> None:
        """Raises `ApiError` for a checkpoint of other data."""
        if snapshot.n_positions not in (None, self.n_positions, *self._grown):  # its trainer looks at how far it is
            raise ApiError(
                ErrorCode.CONFLICT,
                f"the checkpoint was made with {snapshot.n_positions} prepared rows, this job has "
                f"{self.n_positions}: its steps would be other rows. Use the same data, or start from the "
                f"checkpoint's exported weights (policy.model_name_or_path) without resuming",
            )
        if snapshot.order is not None and self.order not in ("", snapshot.order):
            keys = "train.seed, dataloader_shuffle, domain_exhausted, the parts of the dataset, their shares and the "
            why = why_other(snapshot.order, self.order, keys + "curriculum")
            raise ApiError(
                ErrorCode.CONFLICT,
                f"the checkpoint's rows are in another order: {why}, else some rows would be trained twice and "
                "others never",
            )

    def begin_from(self, snapshot: LedgerSnapshot, timeline: int | None = None, began: int | None = None) -> None:
        """Go on from a checkpoint. Raises as `check_snapshot`."""
        self.check_snapshot(snapshot)
        self.go_on_from(snapshot, timeline, began)

    # ---- there are no groups ------------------------------------------------------------------------------

    def in_state(self, state: GroupState) -> Iterable[Group]:
        return ()

    def held_by(self, replica_id: str) -> list[Group]:
        return []

    def batch(self, step: int) -> list[Group] | None:
        return None

    def status(self) -> LedgerStatus:
        return LedgerStatus(created=0, states={}, dropped={}, staleness={}, max_staleness=0, bound=0)

    def take_changes(self) -> LedgerChanges:
        return LedgerChanges([], [], self.header() | {"order": self.order})

    def abandon_step(self) -> int:
        return 0

    def expire(self, now: float) -> int:
        return 0

    def extend_leases(self, seconds: float, now: float) -> None:
        pass

    def close(self) -> bool:
        return False
