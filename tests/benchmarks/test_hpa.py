"""The formula of a HorizontalPodAutoscaler against numbers worked out by hand from its documentation."""

from __future__ import annotations

import pytest

from benchmarks.fleet.hpa import Hpa


@pytest.mark.parametrize(
    ("present", "metric", "wanted"),
    [
        (4, 4.0, 4),
        (10, 10.9, 10),  # within the tolerance
        (10, 11.1, 12),
        (100, 91.0, 100),
        (100, 89.0, 89),
        (1, 20.0, 5),  # 4 more in a period
        (8, 40.0, 16),  # twice as many
        (8, 90.0, 16),
        (150, 290.0, 200),  # the maximum
        (30, 0.0, 2),  # the minimum
        (30, None, 30),
        (0, 3.0, 2),
        (0, 0.0, 0),
    ],
)
def test_replicas(present: int, metric: float | None, wanted: int) -> None:
    assert Hpa(minimum=2, maximum=200).replicas(present, metric) == wanted


def test_without_tolerance_every_number_is_obeyed() -> None:
    assert Hpa(1, 1000, tolerance=0.0).replicas(100, 101.0) == 101
