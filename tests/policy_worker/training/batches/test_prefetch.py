"""What is fetched of a guess, and taken of it; the guess is the test's own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from policy_worker.model.micro_batch import TrainSample
from policy_worker.training.batches.prefetch import TRIES, Frames, Prefetcher, Rows
from schema.wire.batch import StepTable
from tests.policy_worker.material import make_table, random_samples

SAMPLES = random_samples(8)
TABLE = make_table(SAMPLES, step=1)


def every(table: StepTable) -> Sequence[int]:
    return range(table.n_samples)


def decode(table: StepTable, row: int, frame: bytes | memoryview) -> TrainSample:
    return TrainSample.of_wire(SAMPLES[int(bytes(frame))])


def frames(rows: Rows) -> Frames:
    return [] if rows == "none" else [str(row).encode() for row in rows]


def renamed(table: StepTable, group: int) -> StepTable:
    names = [f"e{group}-p9{g}" if g == group else name for g, name in enumerate(table.group_ids)]
    return table.model_copy(update={"group_ids": names})


def test_only_rows_of_the_rank_are_fetched_and_only_equal_lines_are_taken() -> None:
    asked: list[Rows] = []

    def ask(step: int, rows: Rows) -> tuple[StepTable, Frames]:
        asked.append(rows)
        return TABLE, frames(rows)

    prefetcher = Prefetcher(ask, decode, lambda table: [1, 2, 5])
    assert prefetcher.take(TABLE) == {}
    prefetcher.begin(1)
    assert prefetcher.guessed(10.0)
    assert sorted(prefetcher.take(TABLE)) == [1, 2, 5]
    assert asked == ["none", [1, 2, 5]]
    assert prefetcher.take(TABLE) == {}, "nothing is given twice"
    prefetcher.begin(1)
    assert prefetcher.guessed(10.0)
    scores = [2.0 if row == 2 else score for row, score in enumerate(TABLE.score)]
    other = renamed(TABLE, TABLE.group[5]).model_copy(update={"score": scores})
    assert sorted(prefetcher.take(other)) == [1]


def test_a_guess_that_changes_is_made_again_some_times() -> None:
    for changes in range(1, TRIES + 1):
        tables = [renamed(TABLE, g) for g in range(changes)] + [TABLE] * TRIES

        def ask(step: int, rows: Rows, tables: list[StepTable] = tables) -> tuple[StepTable, Frames]:
            return tables.pop(0), frames(rows)

        prefetcher = Prefetcher(ask, decode, every)
        prefetcher.begin(1)
        assert prefetcher.guessed(10.0)
        assert len(prefetcher.take(TABLE)) == (TABLE.n_samples if changes < TRIES - 1 else 0)


def test_a_step_that_comes_before_any_guess_waits_for_nothing() -> None:
    gone, asked = threading.Event(), []

    def ask(step: int, rows: Rows) -> None:
        asked.append(step)
        assert gone.wait(30.0)

    prefetcher = Prefetcher(ask, decode, every)
    prefetcher.begin(1)
    assert not prefetcher.guessed()
    assert prefetcher.take(TABLE) == {}
    prefetcher.begin(2)  # the thread of step 1 has not heard that it is late
    gone.set()
    assert asked == [1]


def test_what_fails_ahead_is_only_not_there() -> None:
    def broken(table: StepTable, row: int, frame: bytes | memoryview) -> TrainSample:
        raise ValueError("not a sample")

    prefetcher = Prefetcher(lambda step, rows: (TABLE, frames(rows)), broken, every)
    prefetcher.begin(1)
    assert prefetcher.guessed(10.0)
    assert prefetcher.take(TABLE) == {}
