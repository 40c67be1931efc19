"""Later passes follow the results of earlier ones, and what was decided stays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.ledger.pass_orders import PassOrder, PassOrders, PassRule, at_once
from controller.state.job_facts import ledger_params
from controller.state.prompts import RowCounts
from controller.store import pass_files
from schema.config.sections.curriculum import ResultsOrder
from schema.wire.messages import PassProgress
from schema.wire.mixture import Source
from schema.wire.prompts import PromptFileError
from tests.support.controller import make_config

SOURCES = [Source("math", 6), Source("code", 300)]
LATER = 1 + at_once(6)
"""The first pass that is decided after those that are with pass 1."""
RULE = PassRule("none", solved=0, failed=0, pass_score=0.5, seed=1, shuffle=False)
SCORES = [[1.0, 0.7], [0.0, 0.5], [0.0, 0.1], [1.0, 1.0], [0.2, 0.3]]
"""Scores of the first five rows: solved, half, failed, solved, failed; the last one has no result."""


def observe(orders: PassOrders, data_pass: int, position: int, scores: list[float], seen: int = 0) -> None:
    orders.observe((data_pass, position, 0), [score >= 0.5 for score in scores], seen)


def measured(rule: PassRule) -> PassOrders:
    orders = PassOrders(rule, SOURCES)
    for row, scores in enumerate(SCORES):
        observe(orders, 0, row, scores)
    return orders


def places(orders: PassOrders, data_pass: int = 1, committed: int = 1) -> list[int]:
    orders.begin(data_pass, 0, committed)
    return [orders.row(data_pass, position, 0)[1] for position in range(6)]


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        ("easiest_first", [0, 3, 1, 5, 2, 4]),
        ("hardest_first", [2, 4, 1, 5, 0, 3]),
        ("uncertain_first", [1, 5, 0, 2, 3, 4]),
        ("none", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_rows_come_by_their_pass_rates(order: ResultsOrder, rows: list[int]) -> None:
    assert places(measured(replace(RULE, order=order))) == rows
    shuffled = [places(measured(replace(RULE, order=order, shuffle=True, seed=seed))) for seed in range(9)]
    assert len({tuple(row) for row in shuffled}) > 1
    assert all(sorted(row) == list(range(6)) for row in shuffled)


def test_rows_that_a_column_orders_stay_in_its_order() -> None:
    curriculum = {"column_name": "n", "leave_out_solved": 1}
    config = make_config(train={"epoch": 3, "train_policy": {"curriculum": curriculum}})
    rule = ledger_params(config, RowCounts(6)).by_results
    assert rule is not None
    assert places(measured(rule)) == [1, 2, 4, 5, 1, 2]


def test_rows_are_left_out_once_they_were_solved_or_failed_so_often() -> None:
    orders = measured(replace(RULE, solved=1, failed=2))
    assert places(orders) == [1, 2, 4, 5, 1, 2], "the others take the places of rows 0 and 3"
    assert (orders.orders[0, 1].solved, orders.orders[0, 1].failed) == (2, 0)
    observe(orders, 0, 2, [0.0, 0.0])
    observe(orders, 1, 0, [1.0, 1.0])  # row 1
    assert places(measured(replace(RULE, solved=1, failed=2)), 2) == places(orders), "made again it is one result"
    observe(orders, 1, 1, [0.0, 0.0])  # row 2, for the second time
    assert places(orders, LATER) == [4, 5, 4, 5, 4, 5]
    assert places(orders) == [1, 2, 4, 5, 1, 2], "a decision stays"
    for position in (2, 3):
        observe(orders, 1, position, [1.0], seen=7)
    after = LATER + at_once(6)
    assert places(orders, after, committed=7) == [4, 5, 4, 5, 4, 5], "of a step that is not committed"
    assert Counter(places(orders, after + at_once(6), committed=8)) == Counter(range(6)), "none is left: all come"


def test_results_and_orders_survive_a_restart_and_go_with_a_checkpoint() -> None:
    rule = replace(RULE, order="hardest_first", solved=2)
    orders = measured(rule)
    orders.observe((0, 299, 1), [True, False, False], 2)
    rows = {name: render() for name, render in orders.take_changes().items()}
    assert set(rows) == {"r0.0", "r1.4"}
    assert not orders.take_changes()
    restored = PassOrders(rule, SOURCES)
    restored.restore(rows)
    assert places(restored) == places(orders)
    observe(orders, 0, 5, [1.0])
    snapshot = PassProgress.model_validate_json(orders.to_snapshot(1, [(0, 1), (1, 0)]).model_dump_json())  # type: ignore[union-attr]
    fresh, kept = PassOrders(rule, SOURCES), list[PassOrder]()
    fresh.keep = lambda order: kept.append(order) or order  # type: ignore[func-returns-value]
    fresh.load(snapshot)
    assert (places(fresh), places(fresh, LATER)) == (places(orders), places(orders, LATER))
    assert [(order.source, order.data_pass) for order in kept] == [(0, 1), (0, LATER)], "what it brought is kept, too"
    assert len(fresh._seen[1]) == 0, "a result of a step that the checkpoint does not contain"
    with pytest.raises(ValueError, match="not of 1 sources"):
        PassOrders(rule, SOURCES[:1]).load(snapshot)
    short = snapshot.model_copy(update={"orders": [snapshot.orders[0].model_copy(update={"places": "AAAAAA=="})]})
    with pytest.raises(ValueError, match="pass 1 of source 0 is not one of 6 rows"):
        PassOrders(rule, SOURCES).load(short)


def test_results_of_passes_that_are_over_stay_those_of_their_rows() -> None:
    orders = measured(replace(RULE, order="hardest_first", solved=3))
    first = places(orders)
    second = places(orders, LATER)
    for position in range(3):  # of both passes: the rows that come first there
        observe(orders, 1, position, [1.0])
        observe(orders, LATER, position, [1.0])
    snapshot = orders.to_snapshot(1, [(0, LATER + at_once(6))])
    assert snapshot is not None
    fresh = PassOrders(orders.rule, SOURCES)
    fresh.load(snapshot)
    assert places(fresh, LATER + at_once(6)) == places(orders, LATER + at_once(6))
    assert first[:3] != [0, 1, 2] != second[:3], "their places are not their positions"
    snapshot.orders.clear()  # as earlier versions wrote them
    fresh = PassOrders(orders.rule, SOURCES)
    fresh.load(snapshot)
    assert places(fresh) == places(measured(orders.rule)), "of rows that are not known nothing is counted"


def test_an_order_that_cannot_be_kept_is_not_decided() -> None:
    orders = measured(RULE)

    def fail(order: PassOrder) -> PassOrder:
        raise OSError("no room")

    orders.keep = fail
    with pytest.raises(OSError, match="no room"):
        orders.begin(1, 0, 1)
    assert not orders.knows(1, 0)


def test_orders_are_files_that_are_checked(tmp_path: Path) -> None:
    order = PassOrder(1, 2, np.arange(300, dtype=np.int32)[::-1].copy(), 3, 4)
    assert pass_files.keep(tmp_path, order, SOURCES[1]).failed == 4
    assert pass_files.keep(tmp_path, replace(order, failed=9), SOURCES[1]).failed == 4, "the first one counts"
    (read,) = pass_files.read(tmp_path, SOURCES)
    assert (read.places.tolist(), read.solved, read.failed) == (order.places.tolist(), 3, 4)
    for others in ([SOURCES[0], Source("code", 299)], [SOURCES[1], SOURCES[0]], SOURCES[:1]):
        with pytest.raises(PromptFileError, match="is not one of this job's rows"):
            list(pass_files.read(tmp_path, others))
    (path,) = (tmp_path / pass_files.DIRECTORY).iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(PromptFileError, match="cannot be read"):
        list(pass_files.read(tmp_path, SOURCES))
