"""The policy replicas that train together, as a training step sees them; and a replica that trains alone.

    begin step t ─▶ batch ─▶ columns, learn, learn, … ─▶ trained

A batch is cut into parts. `columns` and `learn` compute those that are this replica's, and hold what is found of all
of them afterwards. All ranks call alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from policy_worker.process import ShutdownRequest
from policy_worker.session import Session
from policy_worker.trained.model import TrainedModel
from policy_worker.trained.trainer import Trainer
from schema.config import Config
from schema.wire import messages as m

Column = Mapping[int, Tensor]
"""By row a number for each of its learned tokens."""
Find = Callable[[int], Mapping[str, Column]]
"""Columns of this rank's share in a part, by name."""
Lengths = Callable[[int], Mapping[int, int]]
"""How many numbers each row of this rank's share in a part has."""
Types = Mapping[str, torch.dtype]
Commit = Callable[[], m.CommitReply]


class Registration(NamedTuple):
    """One registration of a replica, for all that trains, saves and publishes. session: on rank 0 only."""

    config: Config
    reply: m.RegisterReply
    trainer: Trainer
    session: Session | None
    shutdown: ShutdownRequest


class BatchChanged(Exception):
    """Payloads of the batch were lost: it is another one by now. Nothing of the step counts."""


class Notes(Protocol):
    """Notes that replicas exchange on parts, next to gradients: numbers for metrics."""

    def begin(self, part: int) -> None:
        """Prepare for a part, which may have been another replica's before."""

    def take(self, part: int) -> Any:
        """Return the notes on a part that was computed, as JSON."""

    def put(self, notes: list[Any]) -> None:
        """Take over the notes on all parts, in order."""


class Replicas(Protocol):
    """Policy replicas that train together, as one of them sees it."""

    parts: int
    """How many each batch is cut into."""
    metrics: dict[str, float]
    """Metrics of the last step."""
    prefix: str
    """In front of the names of files that each replica writes; "" if there is one alone."""

    @property
    def leads(self) -> bool:
        """Whether this replica commits, publishes and saves."""

    def begin(self, step: int, save: Callable[[], None]) -> bool:
        """Take part in a step; False: this replica was asked to leave. save: writes the checkpoint of the step.

        Raises `LeftBehindError`, `DiffersError`: this replica has to begin anew."""

    def look(self) -> None:
        """While a batch is waited for: find out whether this replica leads by now. A collective."""

    def batch(self, digest: str) -> None:
        """Report which batch the step trains."""

    def columns(self, find: Find, types: Types, lengths: Lengths) -> dict[str, dict[int, Tensor]]:
        """Join what `find` returns for each part. types: those of the columns that are wanted. A collective.

        Raises `BatchChanged`: see there."""

    def learn(self, trained: TrainedModel, compute: Callable[[int], None], notes: Notes) -> None:
        """Leave the gradients of all parts in a model. A collective. Raises as `columns`.

        compute: forward and backward of a part."""

    def trained(self, step: int, commit: Commit) -> m.CommitReply | None:
        """Wait until a trained step counts. None: this replica was asked to leave meanwhile.

        commit: does it, where this replica leads."""

    def close(self) -> None:
        """Leave the others."""


class Alone:
    """A replica without others: each batch has one part."""

    parts, prefix, leads = 1, "", True

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def begin(self, step: int, save: Callable[[], None]) -> bool:
        return True

    def look(self) -> None:
        pass

    def batch(self, digest: str) -> None:
        pass

    def columns(self, find: Find, types: Types, lengths: Lengths) -> dict[str, dict[int, Tensor]]:
        of_part = find(0)
        return {name: dict(of_part[name]) for name in types}

    def learn(self, trained: TrainedModel, compute: Callable[[int], None], notes: Notes) -> None:
        compute(0)
        trained.end_part()

    def trained(self, step: int, commit: Commit) -> m.CommitReply:
        return commit()

    def close(self) -> None:
        pass
