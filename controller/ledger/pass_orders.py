"""Passes that follow results: in which order the rows of a source come in its later passes, and which are left out.

A row is known by its place: the position that it has in the first pass. Each complete group is a result of its row,
and stays one result, however often it is made again. Before the first group of a later pass is handed out, the order
of the pass (of several, where a source has few rows) is decided by what was known when the last step was committed:

    candidates = the places of which fewer groups were solved, and failed, than leave a row out; all, if none is left
    order      = candidates by what the rule says, again from the first where the pass has more positions

So a pass has as many groups as the source has rows, however many are left out, and the number of steps is known from
the beginning.

Invariant: an order that was decided never changes. It is written before the first of its groups is granted, to a
place that outlives the store (`controller.store.pass_files`), and stands in each checkpoint as long as it may be
needed. So a job that is killed, goes back to a checkpoint or loses its store goes on with the rows that were decided.
On-policy, where each step waits for its own groups, the decisions themselves are the same whatever is killed.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from schema.config.sections.curriculum import ResultsOrder
from schema.wire.messages import PassProgress, StoredPass
from schema.wire.mixture import Source
from schema.wire.row_order import Order, ordered

LEAST = 64
"""Groups that are decided at once at least: a source of few rows has many passes."""
BLOCK = 64
"""Positions whose results are stored together."""
RESULTS = "r"
"""The first letter of the names of stored results."""
_NONE = -1


def at_once(rows: int) -> int:
    """How many passes over so many rows are decided together."""
    return -(-LEAST // rows)


@dataclass(frozen=True, slots=True)
class PassRule:
    """The rule that decides later passes: keys of [train.train_policy.curriculum], with the seed of the order.

    shuffle: whether rows that the rule does not tell apart come in another order in each pass.
    """

    order: ResultsOrder
    solved: int
    failed: int
    pass_score: float
    seed: int
    shuffle: bool


@dataclass(frozen=True, slots=True)
class PassOrder:
    """A decision. data_pass: the first of its passes. places: of the rows at each position of all of them.

    solved, failed: rows that are left out for it.
    """

    source: int
    data_pass: int
    places: Order
    solved: int = 0
    failed: int = 0


class PassOrders:
    """See the module's docstring. Of a job that follows no results it knows nothing: rule is None."""

    def __init__(self, rule: PassRule | None, sources: Sequence[Source]) -> None:
        self.rule, self.sources = rule, tuple(sources)
        self.keep: Callable[[PassOrder], PassOrder] = lambda order: order
        """Puts a decision where no store can lose it; answers with the one that is there. What it raises, `begin` and
        `load` raise, and nothing has changed."""
        self._share = [array("f") for _ in sources]
        """By source and position of its stream: the share of answers of the group that passed."""
        self._seen = [array("q") for _ in sources]
        """How many steps were committed when that was known; -1: it is not."""
        self.orders: dict[tuple[int, int], PassOrder] = {}
        """By source and first pass."""
        self._dirty: set[str] = set()

    def observe(self, place: tuple[int, int, int], passed: Sequence[bool], committed: int) -> None:
        """Take in which answers of a complete group passed. place: its pass, position and source."""
        if self.rule is None or not passed:
            return
        data_pass, position, source = place
        at = data_pass * self.sources[source].rows + position
        self._note(source, at, sum(passed) / len(passed), committed)

    def row(self, data_pass: int, position: int, source: int) -> tuple[int, int, int]:
        """Where the row of a group is in the data: pass, position and source."""
        if self.rule is None or not data_pass:
            return data_pass, position, source
        first, rows = self._first(data_pass, source), self.sources[source].rows
        places = self.orders[source, first].places
        return 0, int(places[(data_pass - first) * rows + position]), source

    def _first(self, data_pass: int, source: int) -> int:
        """The first of the passes that are decided with this one."""
        return data_pass - (data_pass - 1) % at_once(self.sources[source].rows)

    def knows(self, data_pass: int, source: int) -> bool:
        """Whether it is known which rows a pass has."""
        return self.rule is None or not data_pass or (source, self._first(data_pass, source)) in self.orders

    def begin(self, data_pass: int, source: int, committed: int) -> None:
        """Decide the order of a pass by the results before the last commit, unless it is known."""
        if self.rule is not None and not self.knows(data_pass, source):
            order = self._decided(self.rule, self._first(data_pass, source), source, committed)
            self.know([self.keep(order)])

    def _decided(self, rule: PassRule, data_pass: int, source: int, committed: int) -> PassOrder:
        rows = self.sources[source].rows
        groups, solved, failed, passed = self._results(source, committed)
        leaves_out = [
            counts >= most if most else np.zeros(rows, bool)
            for counts, most in ((solved, rule.solved), (failed, rule.failed))
        ]
        if (leaves_out[0] | leaves_out[1]).all():
            leaves_out = [np.zeros(rows, bool), np.zeros(rows, bool)]
        candidates = np.flatnonzero(~(leaves_out[0] | leaves_out[1]))
        rates = np.where(groups > 0, passed / np.maximum(groups, 1), 0.5)[candidates]
        by: dict[str, npt.NDArray[np.float64]] = {
            "none": np.zeros(len(rates)),
            "easiest_first": -rates,
            "hardest_first": rates,
            "uncertain_first": np.abs(rates - 0.5),
        }
        places = []
        for number in range(data_pass, data_pass + at_once(rows)):
            key = f"{rule.seed}/{number}/{rows}/{self.sources[source].name}" if rule.shuffle else ""
            places.append(np.resize(candidates[ordered(by[rule.order], key)], rows))
        alone = leaves_out[1] & ~leaves_out[0]
        order: Order = np.concatenate(places).astype(np.int32)
        return PassOrder(source, data_pass, order, int(leaves_out[0].sum()), int(alone.sum()))

    def _results(self, source: int, committed: int) -> tuple[npt.NDArray[Any], ...]:
        """Count for each row its groups, those that were solved and that failed; and sum the shares that passed."""
        rows, share = self.sources[source].rows, np.array(self._share[source], np.float64)
        seen = np.array(self._seen[source], np.int64)
        positions = np.flatnonzero((seen != _NONE) & (seen < committed))
        places, known = positions % rows, positions < rows  # of which rows others were, an order says
        for (of_source, first), order in self.orders.items():
            within = (positions >= first * rows) & (positions < first * rows + len(order.places))
            if of_source == source:
                places[within] = order.places[positions[within] - first * rows]
                known |= within
        places, share = places[known], share[positions[known]]
        weights: tuple[npt.NDArray[Any], ...] = (np.ones(len(share)), share == 1.0, share == 0.0, share)
        return tuple(np.bincount(places, weight, minlength=rows) for weight in weights)

    def _has_results(self, source: int, first: int) -> bool:
        """Whether something is known of groups of the passes that are decided with this one."""
        rows = self.sources[source].rows
        return any(at != _NONE for at in self._seen[source][first * rows : (first + at_once(rows)) * rows])

    # ---- storing ------------------------------------------------------------------------------------------------

    def know(self, orders: Iterable[PassOrder]) -> None:
        """Go on with orders that were decided, and kept, before."""
        self.orders |= {(order.source, order.data_pass): order for order in orders}

    def take_changes(self) -> Mapping[str, Callable[[], Any]]:
        """The stored results that changed since the last call: by name, how each is rendered."""
        changed, self._dirty = {name: partial(self._block, name) for name in self._dirty}, set()
        return changed

    def _block(self, name: str) -> list[list[Any]]:
        source, block = map(int, name.removeprefix(RESULTS).split("."))
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        return [self._share[source][part].tolist(), self._seen[source][part].tolist()]

    def restore(self, blocks: Mapping[str, Any]) -> None:
        """Take stored results in."""
        for name in sorted(blocks, key=lambda name: [*map(int, name.removeprefix(RESULTS).split("."))]):
            source, block = map(int, name.removeprefix(RESULTS).split("."))
            if self.rule is None or source >= len(self.sources):
                continue
            self._reach(source, block * BLOCK)
            shares, seen = blocks[name]
            self._share[source].extend(shares)
            self._seen[source].extend(seen)

    def to_snapshot(self, step: int, needed: Iterable[tuple[int, int]]) -> PassProgress | None:
        """Return what a checkpoint after `step` steps stores: results until then, and the orders that say of which
        rows they are, or that may be needed.

        needed: sources and passes of groups that may be handed out.
        """
        if self.rule is None:
            return None
        keys = {(source, self._first(data_pass, source)) for source, data_pass in needed if data_pass}
        orders = [self.orders[key] for key in sorted(self.orders) if key in keys or self._has_results(*key)]
        seen = [np.array(part, np.int64) for part in self._seen]
        return PassProgress(
            orders=[
                StoredPass(source=order.source, data_pass=order.data_pass, places=_text(order.places))
                for order in orders
            ],
            shares=[_text(np.array(part, np.float32)) for part in self._share],
            seen=[_text(np.where(part < step, part, _NONE)) for part in seen],
        )

    def load(self, snapshot: PassProgress) -> None:
        """Go on from a checkpoint: with its orders, and its results where none is known of a group.

        Raises ValueError: it cannot be of this job.
        """
        orders = [
            PassOrder(order.source, order.data_pass, _array(order.places, np.dtype(np.int32)))
            for order in snapshot.orders
        ]
        shares = [_array(text, np.dtype(np.float32)) for text in snapshot.shares]
        seen = [_array(text, np.dtype(np.int64)) for text in snapshot.seen]
        sizes = [source.rows for source in self.sources]
        if [len(part) for part in shares] != [len(part) for part in seen] or len(seen) != len(sizes):
            raise ValueError(f"its results are not of {len(sizes)} sources")
        for order in orders:
            rows = sizes[order.source] if order.source < len(sizes) else 0
            length = rows * at_once(rows) if rows else -1
            if len(order.places) != length or not 0 <= order.places.min() <= order.places.max() < rows:
                raise ValueError(f"pass {order.data_pass} of source {order.source} is not one of {rows} rows")
        for order in orders:
            if (order.source, order.data_pass) not in self.orders:
                self.know([self.keep(order)])
        for source, (part, steps) in enumerate(zip(shares, seen, strict=True)):
            for at in np.flatnonzero(steps != _NONE).tolist():
                if at >= len(self._seen[source]) or self._seen[source][at] == _NONE:
                    self._note(source, at, float(part[at]), int(steps[at]))

    def _note(self, source: int, at: int, share: float, seen: int) -> None:
        self._reach(source, at + 1)
        self._share[source][at], self._seen[source][at] = share, seen
        self._dirty.add(f"{RESULTS}{source}.{at // BLOCK}")

    def _reach(self, source: int, length: int) -> None:
        """Have so many positions at least."""
        if (missing := length - len(self._seen[source])) > 0:
            self._share[source].extend([0.0] * missing)
            self._seen[source].extend([_NONE] * missing)


def _text(numbers: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers).astype(numbers.dtype.newbyteorder("<")).tobytes()).decode()


def _array(text: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype.newbyteorder("<")).astype(dtype)
