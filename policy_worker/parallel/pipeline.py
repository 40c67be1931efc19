"""Pipeline parallelism: each rank has some stages of a model, and micro-batches go through all of them.

    tick of the schedule     one forward or backward of each rank, then the messages of that tick:
                             states to the stage behind, gradients of states to the stage before

Not torch.distributed.pipelining: there a stage takes one shape for all micro-batches, and schedules take certain
numbers of them; here every micro-batch has lengths of its own, and an optimizer step any number of them. Since every
rank of a pipeline lays out each micro-batch itself, it knows the shape of what it will receive, and that costs
nothing. What is sent is received in the same tick on the other side, in the same order, so no message waits in a
circle; the time-out of the process group ends a wait for a rank that is gone.

A stage has its own parameters alone, and its own part of their norm. Tied embeddings are in the first and in the last
stage: each finds a part of their gradient, both add the parts up and make the same update; the first one counts them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from policy_worker.memory.offload import local_of
from policy_worker.model.micro_batch import MicroBatch
from policy_worker.model.model import Backbone
from policy_worker.model.stages import Stages
from policy_worker.parallel.fsdp import reduce_gradients, set_last_micro_batch
from policy_worker.parallel.mesh import PP
from policy_worker.parallel.pipeline_schedule import Action, Pipe, Tick
from policy_worker.parallel.pipeline_stages import cut
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from weight_sync.hf_names import Gather

Message = tuple[Callable[..., Any], Tensor, int]
"""`dist.isend` or `dist.irecv`, of a tensor, to or from a rank of the pipeline."""
TICKS_IN_FLIGHT = 2
"""Ticks for which what was sent may be on its way: bounds what waits for a rank that is slower."""
Compute = Callable[..., Any]
"""(micro-batch, entry=a stage) → states for the next stage; of the last one its outputs."""


class Pipeline:
    """The ranks that have the stages of one replica's models, for as many of these as there are. All call alike."""

    def __init__(self, group: RankGroup, pipe: Pipe) -> None:
        """A collective."""
        self.pipe, self._device, self._parts = pipe, group.device, group.sizes.cp * group.sizes.parts
        self._ranks, self._lead = group.mesh()[PP].get_group(), group.lead
        self.rank = dist.get_rank(self._ranks)
        self._add_up(torch.zeros(1))  # NCCL: before the first messages between some of the ranks, one of all

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.rank == self.pipe.ranks - 1

    def cut(self, model: Backbone) -> None:
        """Leave this rank's stages of a model. A collective. Raises `SettingsError`, see `stages.cut`."""
        cut(model, self.rank, self.pipe.ranks, self.pipe.chunks, self._lead)

    def learn(
        self,
        model: Backbone,
        batches: Iterable[MicroBatch],
        compute: Compute,
        loss_of: Callable[[MicroBatch, Any], Tensor],
    ) -> None:
        """Add up the gradients of an optimizer step. loss_of: of what the last stage computes of a micro-batch."""
        run = _Run(self, _stages_of(model.stages), list(batches), compute, loss_of, model.recall)
        schedule = self.pipe.schedule(run.n_batches)
        left = sum(action is not None and action.backward for action in (tick[self.rank] for tick in schedule))
        for number, tick in enumerate(schedule):
            action = tick[self.rank]
            goes_back = action is not None and action.backward
            if goes_back:
                left -= 1
                set_last_micro_batch(model, left == 0)
            run.go(tick, number)
            if goes_back and left:
                reduce_gradients(model, last=False)
        run.end()

    @torch.no_grad()
    def score(
        self,
        stages: Stages | None,
        batches: Iterable[MicroBatch],
        compute: Compute,
        keep: Callable[[MicroBatch, Any], None],
    ) -> None:
        """Forwards alone; the last stage hands what it computes to `keep`."""
        run = _Run(self, _stages_of(stages), list(batches), compute, keep)
        for number, tick in enumerate(self.pipe.schedule(run.n_batches, learns=False)):
            run.go(tick, number)
        run.end()

    def share_gradients(self, model: Backbone) -> None:
        """Once per optimizer step: of parameters that two stages have, the gradient of both on both."""
        stages, other = _stages_of(model.stages), self.pipe.ranks - 1 - self.rank
        if not stages.tied or self.rank not in (0, self.pipe.ranks - 1):
            return
        parameter = model.get_parameter(stages.tied)
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = local_of(parameter.grad)
        sent = gradient.to(self._device)  # from host memory, where it is there
        theirs = torch.empty_like(sent)
        for work in self.post([(dist.isend, sent, other), (dist.irecv, theirs, other)]):
            work.wait()
        gradient.add_(theirs.to(gradient.device))

    def total_norm(self, norm: float) -> float:
        """The norm of all gradients, from that of those that this rank answers for. The same on all ranks."""
        return math.sqrt(float(self._add_up(torch.tensor([norm * norm], dtype=torch.float64))))

    def to_first(self, model: Backbone, gather: Gather) -> Gather:
        """By name of a tensor of the whole transformers model, that tensor on the first rank of the pipeline; on the
        others without its numbers. A collective. gather: of the tensors of this rank."""
        stages, held = _stages_of(model.stages), model.lm.state_dict(keep_vars=True)

        def gather_stages(name: str, empty: Tensor) -> Tensor:
            holder = stages.holders[f"lm.{name}"]
            if holder == self.rank:
                whole = gather(name, held[name].detach())
                if holder:
                    dist.send(whole.to(self._device).contiguous(), group=self._ranks, group_dst=0)
                    return empty
                return whole
            if self.rank:
                return empty
            received = torch.empty_like(empty, device=self._device)
            dist.recv(received, group=self._ranks, group_src=holder)
            return received

        return gather_stages

    def post(self, messages: Sequence[Message], tag: int = 0) -> list[dist.Work]:
        """Send and receive at once; what to wait for, of each message."""
        if not messages:
            return []
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(operation, tensor, group=self._ranks, group_peer=peer, tag=tag)
                for operation, tensor, peer in messages
            ]
        )
        return works if len(works) == len(messages) else works * len(messages)  # NCCL has one of all

    def buffer(self, stages: Stages, batch: MicroBatch) -> Tensor:
        """Room for states of a micro-batch that come from another rank, [R, L, D] or of a part of its rows."""
        rows, length = batch.input_ids.shape
        return torch.empty(rows, length // self._parts, stages.width, dtype=stages.dtype, device=self._device)

    def _add_up(self, number: Tensor) -> Tensor:
        total = number.to(self._device)
        dist.all_reduce(total, group=self._ranks)
        return total


def _stages_of(stages: Stages | None) -> Stages:
    assert stages is not None, "the model is not cut"
    return stages


def copies_in(model: Backbone) -> list[nn.Parameter]:
    """Parameters of this rank that another one answers for."""
    return [model.get_parameter(name) for name in _stages_of(model.stages).copies]


class _Run:
    """Some micro-batches on their way through the stages of this rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        stages: Stages,
        batches: Sequence[MicroBatch],
        compute: Compute,
        finish: Callable[[MicroBatch, Any], Any],
        recall: Callable[..., None] | None = None,
    ) -> None:
        """recall: see `Backbone.recall`; None: there are forwards alone."""
        self._pipeline, self._stages, self._batches = pipeline, stages, batches
        self._compute, self._finish, self._recall = compute, finish, recall
        self._open: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        """By stage and micro-batch, what entered and left forwards whose backward is still to come."""
        self._arriving: dict[Action, tuple[Tensor, dist.Work]] = {}
        """By the action that needs it."""
        self._leaving: deque[list[tuple[Tensor, dist.Work]]] = deque()

    @property
    def n_batches(self) -> int:
        return len(self._batches)

    def go(self, tick: Tick, number: int) -> None:
        """Do this rank's part of a tick, then send and receive what was made in it."""
        made, action = None, tick[self._pipeline.rank]
        if action is not None:
            made = self._backward(action) if action.backward else self._forward(action)
        messages: list[Message] = []
        needing: list[Action | None] = []
        for rank, other in enumerate(tick):
            needs = None if other is None else self._pipeline.pipe.needing(other)
            if needs is None:
                continue
            to = needs.stage % self._pipeline.pipe.ranks
            if rank == self._pipeline.rank:
                assert made is not None
                messages.append((dist.isend, made.contiguous(), to))
                needing.append(None)
            elif to == self._pipeline.rank:
                buffer = self._pipeline.buffer(self._stages, self._batches[needs.batch])
                messages.append((dist.irecv, buffer, rank))
                needing.append(needs)
        leaving = []
        for (_, tensor, _), needs, work in zip(messages, needing, self._pipeline.post(messages, number), strict=True):
            if needs is None:
                leaving.append((tensor, work))
            else:
                self._arriving[needs] = tensor, work
        self._leaving.append(leaving)
        while len(self._leaving) > TICKS_IN_FLIGHT:
            self._wait_for_oldest()

    def end(self) -> None:
        """Until all has been received."""
        while self._leaving:
            self._wait_for_oldest()

    def _forward(self, action: Action) -> Tensor | None:
        """The states to pass on; None: it was the last stage."""
        batch = self._batches[action.batch]
        entry = self._stages.entry(action.stage, self._received(action) if action.stage else None)
        if entry.received is not None and self._recall is not None:
            entry.received.requires_grad_()
        states = self._compute(batch, entry=entry)
        if entry.is_last:
            states = self._finish(batch, states)
        if self._recall is not None:
            self._open[action.stage, action.batch] = entry.received, states
        return None if entry.is_last else states.detach()

    def _backward(self, action: Action) -> Tensor | None:
        """The gradient of what entered; None: it was the first stage."""
        entered, left = self._open.pop((action.stage, action.batch))
        gradient = self._received(action) if action.stage < self._pipeline.pipe.stages - 1 else None
        assert self._recall is not None
        self._recall(self._batches[action.batch], again=True)
        with span("backward"):
            if left.requires_grad:  # else nothing before or in this stage trains
                torch.autograd.backward(left, gradient)
        if entered is None:
            return None
        return torch.zeros_like(entered) if entered.grad is None else entered.grad

    def _received(self, action: Action) -> Tensor:
        tensor, work = self._arriving.pop(action)
        with span("receive"):
            work.wait()
        return tensor

    def _wait_for_oldest(self) -> None:
        for _, work in self._leaving.popleft():
            work.wait()
