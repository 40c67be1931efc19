"""An exchange by a process group of the same rank of each member: broadcasts, piece by piece, part by part.

A group is of one epoch. Each wait looks whether it is to end, so nobody hangs with the dead: gloo tells at once of a
process that is gone, NCCL does not. What is not waited for any more is aborted, or ends by the time-out of the group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from policy_worker.exchange.base import ExchangeEnded, Round, Watch, cut


class CollectiveExchange:
    """Of the members of one epoch. store: where their ranks of this number meet, and no others."""

    def __init__(
        self, store: dist.Store, me: int, members: int, device: torch.device, watch: Watch, seconds: float
    ) -> None:
        """seconds: after which the group itself gives up. Raises `ExchangeEnded`: not all came."""
        self._watch, self._me, self._members = watch, me, members
        limit = timedelta(seconds=seconds)
        try:
            store.set(
                f"here/{me}", b""
            )  # else the group would wait for the others, whatever happens meanwhile
            others = [f"here/{other}" for other in range(members)]
            watch.until(lambda: store.check(others), f"the {members} members")
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group: dist.ProcessGroup = dist.ProcessGroupNCCL(store, me, members, options)
            else:
                self._group = dist.ProcessGroupGloo(store, me, members, limit)
        except RuntimeError as error:
            raise ExchangeEnded(f"the members do not meet: {_short(error)}") from error

    def pieces(self, round_: Round, own: Mapping[int, Tensor]) -> Iterator[tuple[slice, Sequence[Tensor]]]:
        """See `Exchange.pieces`."""
        assert (round_.me, len(round_.counts)) == (self._me, self._members)
        like = next(iter(own.values()))
        for where in cut(like):
            found = []
            for part, owner in enumerate(round_.owners):
                mine = owner == self._me
                piece = own[part][where] if mine else torch.empty_like(like[where])
                self._broadcast(piece, owner, f"part {part} of {round_.name}, of member {owner}")
                found.append(piece)
            yield where, found

    def _broadcast(self, piece: Tensor, owner: int, what: str) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = owner
        try:
            work = self._group.broadcast([piece], options)
            self._watch.until(work.is_completed, what)
            work.wait()
        except RuntimeError as error:
            raise ExchangeEnded(f"{what}: {_short(error)}") from error

    def close(self) -> None:
        """See `Exchange.close`."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()


def _short(error: Exception) -> str:
    return str(error).splitlines()[0].rpartition("] ")[2][:200]
