"""Which stage computes which micro-batch when: a pure function, of which every rank knows all.

    GPipe              all forwards, then all backwards: keeps the activations of all micro-batches
    1F1B               a backward as soon as there is one: rank r of p keeps those of p − r
    interleaved 1F1B   the same with several stages on each rank, which fill and empty the pipeline faster

    p = 2, 3 micro-batches, 1F1B:    rank 0   F0 F1 ·  B0 F2 B1 ·  B2
                                     rank 1   ·  F0 B0 F1 B1 F2 B2 ·

A schedule is made by running it: in each tick a rank does the next thing that it may, from what was ready before the
tick. So there is one for any numbers of ranks, stages and micro-batches, and no order of messages can be circular:
what is sent in a tick was made in it, and what is used in a tick came before it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

from schema.config.sections.policy import ParallelismConfig

Name = Literal["1F1B", "GPipe"]


class Action(NamedTuple):
    """A stage of the model computes a micro-batch, forward or backward."""

    backward: bool
    stage: int
    batch: int


Tick = list[Action | None]
"""The action of each rank; None: it waits."""


@dataclass(frozen=True)
class Pipe:
    """ranks: in a row. chunks: stages of each; stage s is on rank s mod ranks. name: of the schedule."""

    ranks: int
    chunks: int = 1
    name: Name = "1F1B"

    @staticmethod
    def of_config(mesh: ParallelismConfig) -> Pipe:
        """Read the pipeline of a mesh."""
        return Pipe(mesh.pp_size, mesh.virtual_pp_size, mesh.pp_schedule)

    @property
    def stages(self) -> int:
        """Stages of the whole model."""
        return self.ranks * self.chunks

    def schedule(self, batches: int, *, learns: bool = True) -> list[Tick]:
        """All that is done of so many micro-batches. learns: else there are no backwards.

        Micro-batches go through the stages of a rank in rounds of as many as there are ranks."""
        forward, backward = (self._order(batches, backward=backward) for backward in (False, True))
        queues = [([*forward[rank]], [*backward[rank]] if learns else []) for rank in range(self.ranks)]
        open_ = [0] * self.ranks  # forwards of each rank whose backward is still to come
        done: set[Action] = set()
        ticks: list[Tick] = []
        while any(forwards or backwards for forwards, backwards in queues):
            tick: Tick = [None] * self.ranks
            for rank, (forwards, backwards) in enumerate(queues):
                may_open = not learns or open_[rank] < self._most_open(rank, batches)
                if forwards and may_open and self._is_ready(forwards[0], done):
                    tick[rank] = forwards.pop(0)
                    open_[rank] += 1
                elif backwards and self._is_ready(backwards[0], done):
                    tick[rank] = backwards.pop(0)
                    open_[rank] -= 1
            assert any(tick), "a schedule that does not end"
            done.update(action for action in tick if action)
            ticks.append(tick)
        return ticks

    def needing(self, action: Action) -> Action | None:
        """Return the action that needs what this one makes; None: nothing on another rank."""
        stage = action.stage + (-1 if action.backward else 1)
        return action._replace(stage=stage) if 0 <= stage < self.stages else None

    def _order(self, batches: int, *, backward: bool) -> list[list[Action]]:
        """Order the forwards, or the backwards, of each rank."""
        rounds = [range(batches)[first : first + self.ranks] for first in range(0, batches, self.ranks)]
        chunks = range(self.chunks)[::-1] if backward else range(self.chunks)
        return [
            [
                Action(backward, chunk * self.ranks + rank, batch)
                for members, chunk in itertools.product(rounds, chunks)
                for batch in members
            ]
            for rank in range(self.ranks)
        ]

    def _is_ready(self, action: Action, done: set[Action]) -> bool:
        _, stage, batch = action
        if not action.backward:
            return stage == 0 or Action(False, stage - 1, batch) in done
        last = stage == self.stages - 1
        return Action(False, stage, batch) in done and (last or Action(True, stage + 1, batch) in done)

    def _most_open(self, rank: int, batches: int) -> int:
        """Forwards whose activations a rank keeps at most: as many as pass until its first backward comes."""
        if self.name == "GPipe":
            return batches * self.chunks
        if self.chunks == 1:
            return self.ranks - rank
        return 2 * (self.ranks - rank - 1) + (self.chunks - 1) * self.ranks + 1
