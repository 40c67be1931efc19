"""What a card could do at most, by numbers made by hand."""

from __future__ import annotations

import pytest

from benchmarks.gpu.roofline import Card, StepShape, Work, causal_pairs, known, roof

CARD = Card(flops=1e12, bytes_s=1e11, bus_s=1e10)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Work(flops=4e9, moved=1e8, bus=1e6), (4.0, 0.5, "arithmetic")),
        (Work(flops=1e9, moved=2e8, bus=1e6), (2.0, 0.25, "memory")),
        (Work(moved=1e8, bus=6e7), (6.0, 0.75, "bus")),
    ],
)
def test_the_roof_is_the_slowest_part(work: Work, expected: tuple[float, float, str]) -> None:
    found = roof(CARD, work, seconds=8e-3)
    assert tuple(found.values()) == (pytest.approx(expected[0]), pytest.approx(expected[1]), expected[2])


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H200", (989e12, 4.8e12)),
        ("NVIDIA H100 80GB HBM3", (989e12, 3.35e12)),
        ("NVIDIA H100 PCIe", (756e12, 2.0e12)),
        ("NVIDIA A100-SXM4-80GB", (312e12, 2.04e12)),
        ("NVIDIA A100-SXM4-40GB", (312e12, 1.55e12)),
        ("NVIDIA L40S", (362e12, 0.864e12)),
        ("NVIDIA H20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_cards_are_known_by_their_names(name: str, peaks: tuple[float, float] | None) -> None:
    assert known(name) == peaks


def test_the_arithmetic_of_a_step() -> None:
    """Two samples of 30 own positions behind 10 shared ones; 60 tokens learned of 70 positions."""
    pairs = causal_pairs(10, (30, 30))
    assert pairs == 50 + 2 * (300 + 450)
    shape = StepShape(parameters=1000, head=200, positions=70, learned=60, width=8, layers=2, pairs=pairs)
    assert (shape.attention, shape.logits, shape.others) == (4 * 8 * 2 * 1550, 24_000, 112_000)
    parts = shape.parts()
    assert parts["backward"].flops == 2 * (99_200 + 24_000 + 112_000)
    assert parts["optimizer"] == Work(moved=28_000)
    whole = StepShape(1000, 200, 64, 64, 8, 2, causal_pairs(0, (32, 32)))
    assert 3 * whole.forward == 6 * 1000 * 64 + 6 * 8 * 2 * 2 * 32**2, "the formula of MFU"
