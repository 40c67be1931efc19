"""Parts of a step, waits for the device, and memory of cases that fail; without a GPU."""

from __future__ import annotations

import json
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import steps
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts import WAITS, Parts, in_words, waits
from policy_worker.model import attention


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("cpu", True, tmp_path / "gpu.jsonl", tmp_path, "training")


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]


def test_parts_add_up_to_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    parts = Parts(on_gpu=False)

    def step() -> None:
        with parts.part("forward"), parts.part("attention"):
            pass
        with parts.part("backward"), parts.part("attention"):  # recomputed there
            pass

    step()  # measures nothing
    found = parts.seconds(step)
    assert found == {
        "attention": 1.0, "other forward": 2.0, "log-probs": 0.0, "backward": 1.0, "arrival": 0.0, "optimizer": 0.0,
        "step": 7.0,
    }  # fmt: skip


def test_attention_and_logprobs_are_wrapped_and_restored() -> None:
    before = attention.attend
    parts = Parts(on_gpu=False)
    q = torch.zeros(1, 1, 4, 8)
    with parts.within_models():
        found = parts.seconds(lambda: attention.attend(torch.nn.Identity(), q, q, q, None))
    assert found["attention"] > 0
    assert attention.attend is before


def test_waits_are_counted_by_the_line_that_waits() -> None:
    def step() -> None:
        for _ in range(2):
            warnings.warn(WAITS, stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    sites = waits(step, on_gpu=False)
    assert sites.total() == 2
    assert in_words(sites).startswith("2 at tests/benchmarks/test_gpu_parts.py:")
    assert in_words(waits(int, on_gpu=False)) == "nowhere"


class Trained:
    """A case's trainer, which fails when it is measured. kept: errors that something else holds on to."""

    def __init__(self, kept: list[Exception]) -> None:
        self._kept = kept

    def measured(self) -> Any:
        try:
            raise torch.OutOfMemoryError("out of memory")
        except torch.OutOfMemoryError as error:
            self._kept.append(error)
            raise ValueError("while something else was done") from error


def test_a_case_that_fails_holds_nothing_when_the_next_one_begins(bench: Bench, tmp_path: Path) -> None:
    held: list[weakref.ref[Any]] = []
    kept: list[Exception] = []

    def fails() -> Any:
        made = Trained(kept)
        held.append(weakref.ref(made))
        return made

    def begins() -> Any:
        assert held[0]() is None, "it is collected"
        raise ValueError("the second one")

    steps.each(bench, [("first", fails), ("second", begins)], lambda *_: None)
    assert [(row["section"], row["status"], row["why"]) for row in rows_of(tmp_path)] == [
        ("training", "failed", "ValueError: while something else was done"),
        ("training", "failed", "ValueError: the second one"),
    ]
