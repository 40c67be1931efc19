"""The questions of a policy replica to the controller: before and after a step, and in each round of it.

    enter ─▶ ┌ begin step t ─▶ round 0, 1, … ─▶ trained ┐ ─▶ leave
             └──────── the leader commits, saves ───────┘

`controller.state.membership` decides. All ranks call alike: rank 0 asks, and the others receive its answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from controller.client import Refused
from controller.client import calls as api
from policy_worker.errors import DiffersError, LeftBehindError, UnlikeError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.replicas.identity import Identity
from policy_worker.session import LeaveRequestedError, Session
from schema.wire import messages as m
from schema.wire.messages.members import MemberPoint, MemberReply, MemberRequest

NOBODY = MemberReply(action="wait", epoch=0, parts=[], members=[], counts=[], step=-1, leads=False)
"""The order of a replica that is not a member."""
log = logging.getLogger(__name__)

WAITING = "waiting for the other policy replicas"
POLL_S = 2.0
"""Seconds of one call: so often a request to leave is looked at."""
LOOK_S = 0.1
"""Seconds between two calls that are answered at once."""
LEAVING_SHARE = 0.3
"""Part of the grace in which a replica leaves: for the others to come to the end of a step."""


class Membership:
    """Where this replica stands among the others, as the controller orders. `session` on rank 0 only."""

    def __init__(
        self, group: RankGroup, identity: Identity, session: Session | None, shutdown: ShutdownRequest
    ) -> None:
        self._leads_since = 0
        self.committed: m.CommitReply | None = None
        """How far the job has come."""
        self.metrics: dict[str, float] = {}
        self._group, self._identity, self._session, self._shutdown = group, identity, session, shutdown
        self._batch = ""
        self._order = NOBODY
        self._step = self._number = 0
        self._own_kind: dict[str, str] = {}
        self._applied = 0
        """Membership epoch of the exchange whose results were used last."""

    @property
    def leads(self) -> bool:
        return self._leads_since > 0

    # ---- before and after a step ----------------------------------------------------------------------------

    def enter(self, step: int, heal: Callable[[int], None]) -> int:
        """Wait until this replica takes part. Returns the committed steps that its weights stand for then.

        heal: loads the checkpoint of so many steps.

        Raises:
            LeaveRequestedError: a request to leave came meanwhile.
            LeftBehindError: those who were there when it registered have died: it has to register anew.
            UnlikeError: it is of another kind than the others.
        """
        self._say(WAITING)
        at: MemberPoint = "join"
        self._step = step
        self._own_kind, weights = self._identity.kind(), self._identity.weights()
        while True:
            order = self._ask(at, weights=weights, kind=self._own_kind if at == "join" else {})
            if order.action in ("train", "save") or (order.action == "wait" and order.leads):
                self._note(Session.take_part)
                return self._step
            at = "join"
            if order.action == "heal" and order.step >= 0:
                self._say(f"loading the weights of step {order.step}")
                heal(order.step)
                self._step, at, weights = order.step, "healed", self._identity.weights()
                self._note(lambda session, step: session.history.healed(step), order.step)
            self._check(order)
            self._leave_if_asked()

    def begin(self, step: int, save: Callable[[], None]) -> bool:
        self._say(WAITING)
        weights = self._identity.weights_before(step)
        at: MemberPoint = "begin"
        while True:
            order = self._ask(at, step=step, weights=weights, kind=self._own_kind)
            at = "begin"
            if order.action == "train":
                self._take(order, step)
                return True
            if order.action == "save":
                save()
                at = "saved"
            self._check(order)
            if self._group.any(bool(self._shutdown)):
                return False
            # Two answers do not wait: one comes while the others reach the end of the data, the other one where the
            # store has lost the commit before, which the next heartbeat shows.
            if order.action == "commit":
                self._note(Session.declare_again)
            finished = self.committed is not None and self.committed.finished
            if order.action == "commit" or (order.action == "wait" and finished):
                time.sleep(LOOK_S)

    def trained(self, step: int, commit: Callable[[], m.CommitReply]) -> m.CommitReply | None:
        weights = self._identity.weights_before(step + 1)
        while True:
            wait_s = 0.0 if self.leads else POLL_S
            order = self._ask("begin", step=step + 1, weights=weights, wait_s=wait_s)
            if order.action == "commit":
                return commit()
            if self.committed is not None and self.committed.committed_steps > step:
                self._note(lambda session, reply: session.history.committed(reply), self.committed)
                return self.committed
            self._check(order)
            if self._group.any(bool(self._shutdown)):
                return None

    def look(self) -> None:
        if not self.leads:
            self._check(self._ask("begin", step=self._step, wait_s=0.0))

    def _say(self, status: str) -> None:
        self._note(Session.say, status)

    def _note(self, note: Callable[..., object], *facts: object) -> None:
        """Let the session of rank 0 take note of something; the other ranks have none."""
        if self._session is not None:
            note(self._session, *facts)

    def _leave_if_asked(self) -> None:
        if self._group.any(bool(self._shutdown)):
            raise LeaveRequestedError(self._shutdown.reason or "asked to leave on another rank")

    def _check(self, order: MemberReply) -> None:
        """Raises what ends this replica."""
        if order.action == "heal" and order.step < 0:
            raise LeftBehindError(
                "the other policy replicas do not count on this one any more, or are gone: it has to begin anew"
            )
        if order.action == "differs":
            raise DiffersError(
                f"this replica's weights are not those of the others before step {self._step}: it computes other "
                f"numbers than they do, or memory is damaged; it has to load theirs"
            )

    def _agreed(self, at: MemberPoint, **fields: Any) -> MemberReply:
        """Report where this replica stands, and return the first order that is not to wait."""
        give_up: float | None = None
        while True:
            order = self._ask(at, **fields)
            if order.action != "wait":
                return order
            if self._group.any(bool(self._shutdown)):
                give_up = give_up or time.monotonic() + LEAVING_SHARE * self._shutdown.grace
                if self._group.any(time.monotonic() > give_up):
                    self._leave_if_asked()

    # ---- the controller ---------------------------------------------------------------------------------------

    def _ask(self, at: MemberPoint, step: int | None = None, wait_s: float = POLL_S, **fields: Any) -> MemberReply:
        """Report where this replica stands. A collective. Raises as `Session.call`."""
        step = self._step if step is None else step
        if at in ("ready", "holds", "broken") and self._identity.known[0] == step:
            fields["weights"] = self._identity.known[1]

        def ask() -> Any:
            session = self._session
            assert session is not None
            request = MemberRequest(
                incarnation=session.reply.incarnation,
                policy_epoch=session.reply.policy_epoch,
                at=at,
                epoch=self._order.epoch,
                step=step,
                number=self._number,
                applied=self._applied,
                leads=self._leads_since,
                batch=self._batch,
                wait_s=wait_s,
                **fields,
            )
            try:
                return session.call(api.member(session.reply.replica_id, request)).model_dump(mode="json")
            except LeftBehindError as error:  # all ranks find that out from the order
                log.warning("%s", error)
                return NOBODY.model_copy(update={"action": "heal"}).model_dump(mode="json")
            except Refused as error:
                if error.code == m.ErrorCode.CONFLICT:
                    raise UnlikeError(error.detail) from error
                if error.code == m.ErrorCode.JOB_FAILED:
                    raise LeaveRequestedError(error.detail) from error
                raise

        order = MemberReply.model_validate(self._group.lead(ask))
        self.committed = order.committed or self.committed
        if order.leads != self.leads:
            self._leads_since = order.epoch if order.leads else 0
            if order.leads:
                log.info("this replica leads: it commits, publishes and saves from now on")
            self._note(Session.lead_since, self._leads_since, order.publication)
        return order

    def _take(self, order: MemberReply, step: int) -> None:
        self._order, self._step, self._number, self._batch = order, step, 0, ""
        self.metrics = metrics_of(order)


def metrics_of(order: MemberReply) -> dict[str, float]:
    """How many replicas train together, and how many parts of the batch are this one's."""
    return {"members": float(len(order.members)), "own_parts": float(len(order.parts))}
