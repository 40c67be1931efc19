"""An exchange by a weight store: each part is a version of its own, written once, proven by its hash when read.

    t0-s5-n0-e2-p1-r0/gradient      numbers of part 1, of rank 0's shards
    t0-s5-n0-e2-p1-r0/manifest.json their type, how many there are, their hash

No member has to reach another one, only the store. What a round has written is removed by its writers after the next
one, which is begun when all have read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from policy_worker.exchange.base import ExchangeEnded, Round, Watch, cut
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.layout import digest
from weight_sync.stores import Store
from weight_sync.stores.base import MANIFEST

GRADIENT = "gradient"


class StoredExchange:
    """Of one rank. store: that all members see, for exchanges alone."""

    def __init__(self, store: Store, rank: int, watch: Watch) -> None:
        self._store, self._rank, self._watch = store, rank, watch
        self._written: list[list[str]] = []
        """Versions of the last rounds, the oldest first."""

    def pieces(self, round_: Round, own: Mapping[int, Tensor]) -> Iterator[tuple[slice, Sequence[Tensor]]]:
        """See `Exchange.pieces`."""
        like = next(iter(own.values()))
        mine = {part: row for part, row in own.items() if part >= 0}
        try:
            for part, row in mine.items():
                self._write(self._name(round_, part), row)
            self._written.append([self._name(round_, part) for part in mine])
            rows = [
                mine[part] if part in mine else self._read(self._name(round_, part), like)
                for part in range(round_.parts)
            ]
        except (WeightError, OSError) as error:
            raise ExchangeEnded(f"the store of the exchange: {error}") from error
        while len(self._written) > 2:
            self._remove(self._written.pop(0))
        for where in cut(like):
            yield where, [row[where] for row in rows]

    def _name(self, round_: Round, part: int) -> str:
        return f"{round_.name}-p{part}-r{self._rank}"

    def _write(self, name: str, row: Tensor) -> None:
        data = memoryview(row.detach().cpu().contiguous().view(torch.uint8).numpy())
        facts = {"dtype": str(row.dtype), "numbers": len(row), "hash": digest(data).hex()}
        with self._store.stage(name) as stage:
            with stage.create(GRADIENT) as file:
                file.write(data)
            with stage.create(MANIFEST) as file:
                file.write(json.dumps(facts).encode())
            stage.commit()

    def _read(self, name: str, like: Tensor) -> Tensor:
        found: list[memoryview] = []

        def there() -> bool:
            with suppress(NotReadableError):
                found.append(self._store.read(f"{name}/{MANIFEST}"))
            return bool(found)

        self._watch.until(there, name)
        facts = json.loads(bytes(found[0]))
        wanted = {"dtype": str(like.dtype), "numbers": len(like)}
        if {key: facts.get(key) for key in wanted} != wanted:
            raise ExchangeEnded(f"{name} is of another model or mesh: {facts}, not {wanted}")
        data = self._store.read(f"{name}/{GRADIENT}")
        if digest(data).hex() != facts["hash"]:
            raise ExchangeEnded(f"{name} is not as it was written")
        return torch.frombuffer(data, dtype=like.dtype).to(like.device)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(WeightError, OSError):
                self._store.delete(name)

    def close(self) -> None:
        """See `Exchange.close`."""
        while self._written:
            self._remove(self._written.pop(0))
