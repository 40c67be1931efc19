"""Ways of an exchange: none, for one that is alone; a process group; a weight store.

*A process group* is one of the same rank of each member, of one epoch: broadcasts, piece by piece, part by part. Each
wait looks whether it is to end, so nobody hangs with the dead: gloo reports at once that a process is gone, NCCL does
not. What is not waited for any more is aborted, or ends by the time-out of the group.

*A store* needs no member to reach another one. Each part is a version of its own, written once, proven by its hash
when read. What a round has written is removed by its writers after the next round: that began when all had read it.

    job.t0-s5-n0-e2-p1-r0/gradient      numbers of part 1, of rank 0's shards
    job.t0-s5-n0-e2-p1-r0/manifest.json their type, how many there are, their hash
    job.t0-s5-n0-e2-p1-r0-notes/…       what is said of the part besides
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from policy_worker.replicas.exchange import ExchangeEnded, ExchangeWatch, Round, cut
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.layout import digest
from weight_sync.stores import Store
from weight_sync.stores.base import MANIFEST

GRADIENT = "gradient"


class NoExchange:
    """The exchange of a member that is alone, and has all parts."""

    def pieces(self, round_: Round, own: Mapping[int, Tensor]) -> Iterator[tuple[slice, Sequence[Tensor]]]:
        """See `Exchange.pieces`."""
        for where in cut(own[0]):
            yield where, [own[part][where] for part in range(round_.parts)]

    def notes(self, round_: Round, own: Mapping[int, bytes]) -> list[bytes]:
        """See `Exchange.notes`."""
        return [own[part] for part in range(round_.parts)]

    def close(self) -> None:
        """There is nothing."""


class CollectiveExchange:
    """An exchange between the members of one epoch. store: where their ranks of this number meet, and no others."""

    def __init__(
        self, store: dist.Store, me: int, members: int, device: torch.device, watch: ExchangeWatch, seconds: float
    ) -> None:
        """seconds: after which the group itself gives up. Raises `ExchangeEnded`: not all came."""
        self._watch, self._me, self._members, self._device = watch, me, members, device
        self._store = store  # the group needs it for as long as it lives
        limit = timedelta(seconds=seconds)
        try:
            # Else the group would wait for the others, whatever happens meanwhile.
            store.set(f"here/{me}", b"")
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
            of_parts = []
            for part, owner in enumerate(round_.owners):
                is_here = owner == self._me
                piece = own[part][where] if is_here else torch.empty_like(like[where])
                self._broadcast(piece, owner, f"part {part} of {round_.name}, of member {owner}")
                of_parts.append(piece)
            yield where, of_parts

    def notes(self, round_: Round, own: Mapping[int, bytes]) -> list[bytes]:
        """See `Exchange.notes`."""
        of_parts = []
        for part, owner in enumerate(round_.owners):
            what = f"the notes on part {part} of {round_.name}, of member {owner}"
            data = own.get(part, b"")
            size = torch.tensor([len(data)], device=self._device)
            self._broadcast(size, owner, what)
            vector = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            if owner == self._me and data:
                vector.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if len(vector):
                self._broadcast(vector, owner, what)
            of_parts.append(vector.cpu().numpy().tobytes())
        return of_parts

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
        with suppress(RuntimeError):
            self._group.abort()


def _short(error: Exception) -> str:
    return str(error).splitlines()[0].rpartition("] ")[2][:200]


class StoredExchange:
    """An exchange of one rank. store: that all members see, for exchanges alone."""

    def __init__(self, store: Store, rank: int, watch: ExchangeWatch, name: str = "gradients") -> None:
        """name: of the job, in front of all that it writes."""
        self._store, self._rank, self._watch, self._prefix = store, rank, watch, name
        self._written: dict[str, list[str]] = {}
        """Versions of the last rounds, the oldest first."""

    def pieces(self, round_: Round, own: Mapping[int, Tensor]) -> Iterator[tuple[slice, Sequence[Tensor]]]:
        """See `Exchange.pieces`."""
        like = next(iter(own.values()))
        vectors = self._all(round_, "", {part: vector for part, vector in own.items() if part >= 0}, like)
        for where in cut(like):
            yield where, [vector[where] for vector in vectors]

    def notes(self, round_: Round, own: Mapping[int, bytes]) -> list[bytes]:
        """See `Exchange.notes`."""
        vectors_here = {
            part: torch.frombuffer(bytearray(data), dtype=torch.uint8) for part, data in own.items() if data
        }
        vectors_here |= {part: torch.empty(0, dtype=torch.uint8) for part, data in own.items() if not data}
        vectors = self._all(round_, "-notes", vectors_here, torch.empty(0, dtype=torch.uint8), any_size=True)
        return [vector.numpy().tobytes() for vector in vectors]

    def _all(
        self, round_: Round, kind: str, own: Mapping[int, Tensor], like: Tensor, *, any_size: bool = False
    ) -> list[Tensor]:
        """Return the vectors of all parts, in order. Raises `ExchangeEnded`."""
        names = [f"{self._prefix}.{round_.name}-p{part}-r{self._rank}{kind}" for part in range(round_.parts)]
        try:
            for part, vector in own.items():
                self._write(names[part], vector)
            self._note(round_, [names[part] for part in own])
            return [own[part] if part in own else self._read(name, like, any_size) for part, name in enumerate(names)]
        except (WeightError, OSError) as error:
            raise ExchangeEnded(f"the store of the exchange: {error}") from error

    def _note(self, round_: Round, names: list[str]) -> None:
        """Remember what was written, and remove what was before the last round: all have read it."""
        self._written.setdefault(round_.name, []).extend(names)
        while len(self._written) > 2:
            self._remove(self._written.pop(next(iter(self._written))))

    def _write(self, name: str, vector: Tensor) -> None:
        data = memoryview(vector.detach().cpu().contiguous().view(torch.uint8).numpy())
        facts = {"dtype": str(vector.dtype), "numbers": len(vector), "hash": digest(data).hex()}
        with self._store.stage(name) as stage:
            with stage.create(GRADIENT) as file:
                file.write(data)
            with stage.create(MANIFEST) as file:
                file.write(json.dumps(facts).encode())
            stage.commit()

    def _read(self, name: str, like: Tensor, any_size: bool) -> Tensor:
        manifests: list[memoryview] = []

        def is_written() -> bool:
            with suppress(NotReadableError):
                manifests.append(self._store.read(f"{name}/{MANIFEST}"))
            return bool(manifests)

        self._watch.until(is_written, name)
        facts = json.loads(bytes(manifests[0]))
        wanted = {"dtype": str(like.dtype)} | ({} if any_size else {"numbers": len(like)})
        if {key: facts.get(key) for key in wanted} != wanted:
            raise ExchangeEnded(f"{name} is of another model or mesh: {facts}, not {wanted}")
        data = self._store.read(f"{name}/{GRADIENT}")
        if digest(data).hex() != facts["hash"]:
            raise ExchangeEnded(f"{name} is not as it was written")
        return torch.frombuffer(data, dtype=like.dtype).to(like.device) if len(data) else like[:0]

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(WeightError, OSError):
                self._store.delete(name)

    def close(self) -> None:
        """See `Exchange.close`."""
        for names in self._written.values():
            self._remove(names)
        self._written.clear()


def sweep(store: Store, name: str, epoch: int | None = None) -> None:
    """Remove what members that are gone have left: of epochs before this one; None: all. Raises as `delete`."""
    for version in store.versions():
        match = re.fullmatch(rf"{re.escape(name)}\.t\d+-s\d+-n\d+-e(\d+)-.*", version)
        if match and (epoch is None or int(match[1]) < epoch):
            store.delete(version)
