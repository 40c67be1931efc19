"""A step of policy replicas that train together, as rounds.

    compute the parts that are this replica's ─▶ all are ready ─▶ exchange ─▶ all hold everything ─▶ use it

A batch is cut into parts, and each round of a step is made of what is found of each part. If somebody goes before all
hold everything, the round is begun anew: what was found is kept, and only what is missing is computed. Ranks of the
same number exchange.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from policy_worker.errors import ExchangeFailedError, RendezvousError, SettingsError
from policy_worker.process import Environment, RankEnvironment
from policy_worker.ranges import span
from policy_worker.replicas.base import BatchChanged, Find, Lengths, Notes, Registration, Types
from policy_worker.replicas.exchange import Exchange, ExchangeEnded, ExchangeWatch, Round
from policy_worker.replicas.gradients import PartGradients
from policy_worker.replicas.identity import Identity
from policy_worker.replicas.membership import Membership, metrics_of
from policy_worker.replicas.rendezvous import meet
from policy_worker.replicas.transports import CollectiveExchange, NoExchange, StoredExchange, sweep
from policy_worker.trained.model import TrainedModel
from weight_sync import WeightError
from weight_sync.stores import open_store

T = TypeVar("T")
log = logging.getLogger(__name__)

MOST_FAILED = 5
"""Attempts at one exchange, by replicas that live: then they do not reach each other."""


class Peers(Membership):
    """Replicas of which there are several (`Replicas`)."""

    def __init__(self, registration: Registration, environment: Environment, ranks: RankEnvironment) -> None:
        config, reply, trainer, session, shutdown = registration
        trained: list[TrainedModel] = [trainer] if trainer.critic is None else [trainer, trainer.critic]
        super().__init__(trainer.group, Identity(trainer.group, trained), session, shutdown)
        self._config, self._reply, self._trainer = config, reply, trainer
        self.parts = config.policy.parallelism.n_init_replicas
        self.prefix = f"{reply.replica_id.rpartition('.')[0]}-"
        self._environment, self._ranks = environment, ranks
        self._gradients = {model: _gradients(model) for model in trained}
        self._exchange: Exchange = NoExchange()
        self._exchange_membership_epoch = 0

    def begin(self, step: int, save: Callable[[], None]) -> bool:
        for gradients in self._gradients.values():
            gradients.forget()
        return super().begin(step, save)

    def batch(self, digest: str) -> None:
        self._batch = digest

    def columns(self, find: Find, types: Types, lengths: Lengths) -> dict[str, dict[int, Tensor]]:
        columns: dict[str, dict[int, Tensor]] = {name: {} for name in types}
        computed: dict[int, bytes] = {}

        def compute(part: int) -> None:
            of_part = find(part)
            computed[part] = packed({name: of_part[name] for name in types})

        def exchange(transport: Exchange, round_: Round) -> list[bytes]:
            return transport.notes(round_, {part: computed[part] for part in self._order.parts})

        for part, data in enumerate(self._round(compute, exchange)):
            for name, column in unpacked(data, types, lengths(part)).items():
                columns[name].update(column)
        return columns

    def learn(self, trained: TrainedModel, compute: Callable[[int], None], notes: Notes) -> None:
        """A round; notes of all parts are put. See `Replicas.learn`."""
        gradients = self._gradients[trained]
        notes_of_part: dict[int, bytes] = {}

        def compute_part(part: int) -> None:
            trained.seed_dropouts([self._config.effective_seed, self._step, self._number, part])
            notes.begin(part)
            compute(part)
            trained.end_part()
            gradients.take(part)
            notes_of_part[part] = json.dumps(notes.take(part)).encode()

        def exchange(transport: Exchange, round_: Round) -> list[bytes]:
            gradients.add_up(transport, round_)
            received = (self.parts - len(round_.mine)) * gradients.bytes_of_part
            self.metrics["exchange_bytes"] = self.metrics.get("exchange_bytes", 0.0) + received
            return transport.notes(round_, {part: notes_of_part[part] for part in self._order.parts})

        all_notes = self._round(compute_part, exchange)
        gradients.forget()
        notes.put([json.loads(data) for data in all_notes])

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
                    outcome = self._attempt(exchange)
                exchanging += time.monotonic() - began
                failed += outcome is None
                if failed > MOST_FAILED:
                    raise ExchangeFailedError(
                        f"step {self._step}: {', '.join(self._order.members)} could not exchange gradients "
                        f"{failed} times (policy.exchange = {self._config.policy.exchange!r}): the log says why"
                    )
                order = self._agreed("broken" if outcome is None else "holds")
            if order.action == "apply" and outcome is not None:
                self._number += 1
                self._applied = self._order.epoch
                self.metrics["exchange_seconds"] = self.metrics.get("exchange_seconds", 0.0) + exchanging
                return outcome[0]
            if order.action == "batch":
                raise BatchChanged
            self._check(order)
            if order.action == "again":
                self._order = order
                self.metrics |= metrics_of(order)
                self.metrics["rounds_again"] = self.metrics.get("rounds_again", 0.0) + 1

    def _attempt(self, exchange: Callable[[Exchange, Round], T]) -> tuple[T] | None:
        """One exchange; None: it has failed on some rank."""
        outcome = None
        try:
            outcome = (exchange(self._transport(), self._this_round()),)
        except (ExchangeEnded, RendezvousError) as error:
            log.warning("step %d: the exchange has failed: %s", self._step, error)
        if not self._group.any(outcome is None):
            return outcome
        self._exchange.close()
        self._exchange_membership_epoch = 0
        return None

    # ---- transports -------------------------------------------------------------------------------------------

    def _this_round(self) -> Round:
        order = self._order
        me = order.members.index(self._name) if self._name in order.members else 0
        return Round(self._reply.timeline, self._step, self._number, order.epoch, tuple(order.counts), me)

    @property
    def _name(self) -> str:
        return self._reply.replica_id

    def _transport(self) -> Exchange:
        """Return the exchange of this membership epoch.

        Raises `ExchangeEnded`, `RendezvousError`: the others do not come."""
        order = self._order
        if self._exchange_membership_epoch == order.epoch:
            return self._exchange
        self._exchange.close()
        self._exchange = NoExchange()
        if len(order.members) > 1:
            self._exchange = self._stored() if self._config.policy.exchange == "store" else self._collective()
        self._exchange_membership_epoch = order.epoch
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
        return CollectiveExchange(store, me, members, self._gradients[self._trainer].device, self._watch(), seconds)

    def _stored(self) -> Exchange:
        store, name = open_store(self._reply.weight_store, timeout=self._patience), self._reply.job_id
        if self.leads and self._group.leads:
            sweep(store, f"{name}-gradients", self._order.epoch)
        return StoredExchange(store, self._group.rank, self._watch(), f"{name}-gradients")

    def _watch(self) -> ExchangeWatch:
        return ExchangeWatch(self._is_over, self._patience)

    def _is_over(self) -> str:
        """Why waiting is to end, as far as this rank can see; "" while it is not."""
        session = self._session
        newer = session is not None and session.members_epoch > self._order.epoch
        return "another membership epoch has begun" if newer else ""

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


def _gradients(trained: TrainedModel) -> PartGradients:
    kinds = {str(parameter.dtype) for parameter in trained.optimizer.parameters}
    if len(kinds) > 1:
        raise SettingsError(
            f"policy.parallelism.n_init_replicas > 1 exchanges gradients of one type, and those of this model are "
            f"{' and '.join(sorted(kinds))}: write train.master_dtype"
        )
    return PartGradients(trained.optimizer.parameters)


def packed(columns: Mapping[str, Mapping[int, Tensor]]) -> bytes:
    """Numbers of tokens by column and row, as bytes; `unpacked` knows which."""
    tensors = [column[row] for column in columns.values() for row in sorted(column)]
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


def unpacked(
    data: bytes, names: Mapping[str, torch.dtype], lengths: Mapping[int, int]
) -> dict[str, dict[int, Tensor]]:
    """Undo `packed`. names: type of each column. lengths: numbers of each row."""
    columns: dict[str, dict[int, Tensor]] = {name: {} for name in names}
    start = 0
    for name, dtype in names.items():
        for row in sorted(lengths):
            end = start + lengths[row] * dtype.itemsize
            columns[name][row] = torch.frombuffer(bytearray(data[start:end]), dtype=dtype)
            start = end
    assert start == len(data)
    return columns
