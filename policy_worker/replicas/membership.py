"""Other policy replicas that train with this one: what it does with them in a step, and between two.

    enter ─▶ ┌ begin step t ─▶ round 0, 1, … ─▶ trained ┐ ─▶ leave
             └──────── the leader commits, saves ───────┘

A batch is cut into parts, and each round of a step is made of what is found of each part: compute those that are this
replica's ─▶ all are ready ─▶ exchange ─▶ all hold everything ─▶ use it (`controller.state.membership` decides). If
somebody goes before that, the round is begun anew: what was found is kept, and only what is missing is computed.

All ranks call alike. Rank 0 asks the controller and the others hear of it; ranks of the same number exchange.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from controller.client import Refused
from controller.client import calls as api
from policy_worker.errors import (
    DiffersError,
    ExchangeFailedError,
    LeftBehindError,
    RendezvousError,
    SettingsError,
    UnlikeError,
)
from policy_worker.parallel.fsdp import local_of
from policy_worker.process import Environment, RankEnvironment, ShutdownRequest
from policy_worker.ranges import span
from policy_worker.replicas.base import BatchChanged, Column, Notes
from policy_worker.replicas.exchange import Exchange, ExchangeEnded, Round, Watch
from policy_worker.replicas.gradients import PartGradients
from policy_worker.replicas.rendezvous import meet
from policy_worker.replicas.transports import CollectiveExchange, NoExchange, StoredExchange, sweep
from policy_worker.session import LeaveRequestedError, Session
from policy_worker.trained.trainer import TrainedModel, Trainer
from schema.config import Config
from schema.wire import messages as m
from schema.wire.messages.members import MemberReply, MemberRequest, Place
from weight_sync import WeightError
from weight_sync.stores import open_store

T = TypeVar("T")
NOBODY = MemberReply(action="wait", epoch=0, parts=[], members=[], counts=[], step=-1, leads=False)
"""The order of a replica that is not a member."""
log = logging.getLogger(__name__)

WAITING = "waiting for the other policy replicas"
POLL_S = 2.0
"""Seconds of one call: so often a request to leave is looked at."""
MOST_FAILED = 5
"""Attempts at one exchange, by replicas that live: then they do not reach each other."""
LOOK_S = 0.1
"""Seconds between two calls that are answered at once."""
LEAVING_SHARE = 0.3
"""Of the grace in which a replica leaves: for the others to come to the end of a step."""
PIECE = 1 << 22
"""Numbers of weights that are summed at once."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Peers:
    """Replicas of which there are several (`Replicas`); see the module's docstring. `session` on rank 0 only."""

    def __init__(
        self,
        config: Config,
        reply: m.RegisterReply,
        trainer: Trainer,
        session: Session | None,
        environment: Environment,
        ranks: RankEnvironment,
        shutdown: ShutdownRequest,
    ) -> None:
        self.parts = config.policy.parallelism.n_init_replicas
        self.prefix = f"{reply.replica_id.rpartition('.')[0]}-"
        self._leads_since = 0
        self.committed: m.CommitReply | None = None
        """How far the job has come."""
        self.metrics: dict[str, float] = {}
        self._config, self._reply, self._trainer, self._session = config, reply, trainer, session
        self._environment, self._ranks, self._shutdown = environment, ranks, shutdown
        self._group = trainer.group
        self._trained: list[TrainedModel] = [trainer] if trainer.critic is None else [trainer, trainer.critic]
        self._gradients = {trained: _gradients(trained) for trained in self._trained}
        self._batch = ""
        self._order = NOBODY
        self._step = self._number = 0
        self._own_kind: dict[str, str] = {}
        self._known = (-1, "")
        """The checksum of the weights before a step."""
        self._exchange: Exchange = NoExchange()
        self._exchange_epoch = 0
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
        self._step, at = step, "join"
        self._own_kind, weights = self._kind(), self._weights()
        while True:
            order = self._ask(at, weights=weights, kind=self._own_kind if at == "join" else {})
            if order.action in ("train", "save") or (order.action == "wait" and order.leads):
                if self._session is not None:
                    self._session.takes_part = True
                return self._step
            at = "join"
            if order.action == "heal" and order.step >= 0:
                self._say(f"loading the weights of step {order.step}")
                heal(order.step)
                self._step, at, weights = order.step, "healed", self._weights()
                if self._session is not None:
                    self._session.history.healed(order.step)
            self._check(order)
            self._leave_if_asked()

    def begin(self, step: int, save: Callable[[], None]) -> bool:
        self._say(WAITING)
        for gradients in self._gradients.values():
            gradients.forget()
        weights, at = self._weights_at(step), "begin"
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
            if order.action == "commit" and self._session is not None:
                self._session.declare_again()
            finished = self.committed is not None and self.committed.finished
            if order.action == "commit" or (order.action == "wait" and finished):
                time.sleep(LOOK_S)

    def trained(self, step: int, commit: Callable[[], m.CommitReply]) -> m.CommitReply | None:
        weights = self._weights_at(step + 1)
        while True:
            wait_s = 0.0 if self.leads else POLL_S
            order = self._ask("begin", step=step + 1, weights=weights, wait_s=wait_s)
            if order.action == "commit":
                return commit()
            if self.committed is not None and self.committed.committed_steps > step:
                if self._session is not None:
                    self._session.history.committed(self.committed)
                return self.committed
            self._check(order)
            if self._group.any(bool(self._shutdown)):
                return None

    def look(self) -> None:
        if not self.leads:
            self._check(self._ask("begin", step=self._step, wait_s=0.0))

    def _say(self, status: str) -> None:
        if self._session is not None:
            self._session.status = status

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

    # ---- within a step --------------------------------------------------------------------------------------

    def batch(self, digest: str) -> None:
        self._batch = digest

    def collect(self, find: Callable[[int], bytes]) -> list[bytes]:
        """A round: what was found of all parts, in order. A collective. Raises as `columns`."""
        found: dict[int, bytes] = {}

        def compute(part: int) -> None:
            found[part] = find(part)

        def exchange(transport: Exchange, round_: Round) -> list[bytes]:
            return transport.notes(round_, {part: found[part] for part in self._order.parts})

        return self._round(compute, exchange)

    def columns(
        self,
        find: Callable[[int], Mapping[str, Column]],
        types: Mapping[str, torch.dtype],
        lengths: Callable[[int], Mapping[int, int]],
    ) -> dict[str, dict[int, Tensor]]:
        found: dict[str, dict[int, Tensor]] = {name: {} for name in types}

        def chosen(part: int) -> bytes:
            columns = find(part)
            return packed({name: columns[name] for name in types})

        for part, data in enumerate(self.collect(chosen)):
            for name, column in unpacked(data, types, lengths(part)).items():
                found[name].update(column)
        return found

    def learn(self, trained: TrainedModel, compute: Callable[[int], None], notes: Notes) -> None:
        """A round; notes of all parts are put. See `Replicas.learn`."""
        gradients = self._gradients[trained]
        said: dict[int, bytes] = {}

        def find(part: int) -> None:
            trained.seed_dropouts([self._config.effective_seed, self._step, self._number, part])
            notes.begin(part)
            compute(part)
            trained.end_part()
            gradients.take(part)
            said[part] = json.dumps(notes.take(part)).encode()

        def exchange(transport: Exchange, round_: Round) -> list[bytes]:
            gradients.add_up(transport, round_)
            came = (self.parts - len(round_.mine)) * gradients.bytes_of_part
            self.metrics["exchange_bytes"] = self.metrics.get("exchange_bytes", 0.0) + came
            return transport.notes(round_, {part: said[part] for part in self._order.parts})

        found = self._round(find, exchange)
        gradients.forget()
        notes.put([json.loads(one) for one in found])

    def _round(self, compute: Callable[[int], None], exchange: Callable[[Exchange, Round], T]) -> T:
        computed: set[int] = set()
        computing, exchanging, failed = 0.0, 0.0, 0
        while True:
            began = time.monotonic()
            for part in self._order.parts:
                if part not in computed:
                    compute(part)
                    computed.add(part)
            computing += time.monotonic() - began
            order = self._agreed("ready", seconds=computing / max(len(computed), 1))
            if order.action == "exchange":
                began = time.monotonic()
                with span("exchange"):
                    found = self._attempt(exchange)
                exchanging += time.monotonic() - began
                failed += found is None
                if failed > MOST_FAILED:
                    raise ExchangeFailedError(
                        f"step {self._step}: {', '.join(self._order.members)} could not exchange gradients "
                        f"{failed} times (policy.exchange = {self._config.policy.exchange!r}): the log says why"
                    )
                order = self._agreed("broken" if found is None else "holds")
            if order.action == "apply" and found is not None:
                self._number += 1
                self._applied = self._order.epoch
                self.metrics["exchange_seconds"] = self.metrics.get("exchange_seconds", 0.0) + exchanging
                return found[0]
            if order.action == "batch":
                raise BatchChanged
            self._check(order)
            if order.action == "again":
                self._order = order
                self.metrics |= _metrics_of(order)
                self.metrics["rounds_again"] = self.metrics.get("rounds_again", 0.0) + 1

    def _attempt(self, exchange: Callable[[Exchange, Round], T]) -> tuple[T] | None:
        """One exchange; None: it has failed on some rank."""
        found = None
        try:
            found = (exchange(self._transport(), self._this_round()),)
        except (ExchangeEnded, RendezvousError) as error:
            log.warning("step %d: the exchange has failed: %s", self._step, error)
        if not self._group.any(found is None):
            return found
        self._exchange.close()
        self._exchange_epoch = 0
        return None

    def _agreed(self, at: Place, **more: Any) -> MemberReply:
        """What comes after a word of this replica: anything but waiting."""
        give_up: float | None = None
        while True:
            order = self._ask(at, **more)
            if order.action != "wait":
                return order
            if self._group.any(bool(self._shutdown)):
                give_up = give_up or time.monotonic() + LEAVING_SHARE * self._shutdown.grace
                if self._group.any(time.monotonic() > give_up):
                    raise LeaveRequestedError(self._shutdown.reason or "asked to leave on another rank")

    # ---- the controller ---------------------------------------------------------------------------------------

    def _ask(self, at: Place, step: int | None = None, wait_s: float = POLL_S, **more: Any) -> MemberReply:
        """Say where this replica stands. A collective. Raises as `Session.call`."""
        step = self._step if step is None else step
        if at in ("ready", "holds", "broken") and self._known[0] == step:
            more["weights"] = self._known[1]

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
                **more,
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
            if self._session is not None:
                self._session.leads_since = self._leads_since
                if order.leads:
                    self._session.led_from(order.publication)
        return order

    def _take(self, order: MemberReply, step: int) -> None:
        self._order, self._step, self._number, self._batch = order, step, 0, ""
        self.metrics = _metrics_of(order)

    def _weights_at(self, step: int) -> str:
        if self._known[0] != step:
            self._known = step, self._weights()
        return self._known[1]

    def _weights(self) -> str:
        parameters = chain(*(trained.optimizer.parameters for trained in self._trained))
        mine = checksum(local_of(parameter) for parameter in parameters)
        return hashlib.blake2b("".join(self._group.gather(mine)).encode(), digest_size=16).hexdigest()

    def _kind(self) -> dict[str, str]:
        """What all that train together have in common."""
        models = [trained.model for trained in self._trained]
        named = [
            (name, tuple(p.shape), str(p.dtype)) for model in models for name, p in model.named_parameters()
        ]
        digests = self._group.gather(hashlib.blake2b(repr(named).encode(), digest_size=8).hexdigest())
        return {
            "code": _code(),
            "ranks": str(self._group.world),
            "mesh": str(self._group.sizes)[:256],
            "model": hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest(),
            "device": self._group.device.type,
        }

    # ---- transports -------------------------------------------------------------------------------------------

    def _this_round(self) -> Round:
        order = self._order
        me = order.members.index(self._name) if self._name in order.members else 0
        return Round(self._reply.timeline, self._step, self._number, order.epoch, tuple(order.counts), me)

    @property
    def _name(self) -> str:
        return self._reply.replica_id

    def _transport(self) -> Exchange:
        """That of this epoch. Raises `ExchangeEnded`, `RendezvousError`: the others do not come."""
        order = self._order
        if self._exchange_epoch == order.epoch:
            return self._exchange
        self._exchange.close()
        self._exchange = NoExchange()
        if len(order.members) > 1:
            self._exchange = self._stored() if self._config.policy.exchange == "store" else self._collective()
        self._exchange_epoch = order.epoch
        return self._exchange

    def _collective(self) -> Exchange:
        order, seconds = self._order, self._patience
        me, members = order.members.index(self._name), len(order.members)
        place = RankEnvironment(
            rank=me,
            world=members,
            meeting=f"{self._reply.policy_epoch}-{order.epoch}-r{self._group.rank}",
            address=self._ranks.address,
        )
        store = meet(place, self._environment, self._shutdown, seconds, self._is_over)
        return CollectiveExchange(
            store, me, members, self._gradients[self._trainer].device, self._watch(), seconds
        )

    def _stored(self) -> Exchange:
        store, name = open_store(self._reply.weight_store, timeout=self._patience), self._reply.job_id
        if self.leads and self._group.leads:
            sweep(store, f"{name}-gradients", self._order.epoch)
        return StoredExchange(store, self._group.rank, self._watch(), f"{name}-gradients")

    def _watch(self) -> Watch:
        return Watch(self._is_over, self._patience)

    def _is_over(self) -> str:
        """Why nothing is to be waited for any more, as far as this rank has heard; "": it is."""
        session = self._session
        newer = session is not None and session.members_epoch > self._order.epoch
        return "another epoch has begun" if newer else ""

    @property
    def _patience(self) -> float:
        """Seconds for which nothing may come: all are ready, so who is silent is dead for the controller too."""
        return self._config.controller.heartbeat_timeout

    def close(self) -> None:
        """See `Replicas.close`. What the dead left in the store goes with the last one."""
        self._exchange.close()
        if self.leads and self._group.leads and self._config.policy.exchange == "store":
            with suppress(WeightError, OSError):
                sweep(open_store(self._reply.weight_store, timeout=1.0), f"{self._reply.job_id}-gradients")


def _metrics_of(order: MemberReply) -> dict[str, float]:
    """How many replicas train together, and how many parts of the batch are this one's."""
    return {"members": float(len(order.members)), "own_parts": float(len(order.parts))}


def _gradients(trained: TrainedModel) -> PartGradients:
    kinds = {str(parameter.dtype) for parameter in trained.optimizer.parameters}
    if len(kinds) > 1:
        raise SettingsError(
            f"policy.parallelism.n_init_replicas > 1 exchanges gradients of one type, and those of this model are "
            f"{' and '.join(sorted(kinds))}: write train.master_dtype"
        )
    return PartGradients(trained.optimizer.parameters)


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> str:
    """Of the bits of these tensors, in their order: of each the sum of its numbers, and that of them by their places,
    modulo 2^64."""
    sums: list[Tensor] = []
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(_WHOLE[tensor.element_size()])
        total = torch.zeros(2, dtype=torch.int64, device=bits.device)
        for start in range(0, len(bits), PIECE):
            piece = bits[start : start + PIECE].to(torch.int64)
            places = torch.arange(start + 1, start + 1 + len(piece), device=bits.device)
            total += torch.stack([piece.sum(), (piece * (2 * places + 1)).sum()])
        sums.append(total)
    found = torch.stack([total.cpu() for total in sums]).tolist() if sums else []
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()


def _code() -> str:
    """A digest of the code that decides what numbers a replica computes."""
    found = hashlib.blake2b(torch.__version__.encode(), digest_size=8)
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


def packed(found: Mapping[str, Mapping[int, Tensor]]) -> bytes:
    """Numbers of tokens by column and row, as bytes; `unpacked` knows which."""
    tensors = [column[row] for column in found.values() for row in sorted(column)]
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


def unpacked(
    data: bytes, names: Mapping[str, torch.dtype], lengths: Mapping[int, int]
) -> dict[str, dict[int, Tensor]]:
    """As `packed` had it. names: type of each column. lengths: numbers of each row."""
    found: dict[str, dict[int, Tensor]] = {name: {} for name in names}
    start = 0
    for name, dtype in names.items():
        for row in sorted(lengths):
            end = start + lengths[row] * dtype.itemsize
            found[name][row] = torch.frombuffer(bytearray(data[start:end]), dtype=dtype)
            start = end
    assert start == len(data)
    return found
