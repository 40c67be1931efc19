"""What the bound and the correction are for: learning curves at a fixed lag, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.jobs import warm_model
from benchmarks.learning.staleness import Case, accuracies, end

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("one warm start for all")]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_model(tmp_path_factory.mktemp("warm"))


def test_four_steps_of_lag_cost_little_at_a_modest_rate(warm: Path) -> None:
    fresh, stale = end(accuracies(Case(0, 3e-4), warm)), end(accuracies(Case(4, 3e-4), warm))
    assert fresh > 0.75, "0.90 to 0.95 were seen: each kind of processor rounds in its own way"
    assert stale > fresh - 0.15, "0.03 to 0.04 less were seen"


def test_a_trainer_that_ignores_staleness_collapses_where_ours_learns(warm: Path) -> None:
    ignored = end(accuracies(Case(6, 1e-3, corrected=False), warm))
    corrected = end(accuracies(Case(6, 1e-3), warm))
    assert ignored < 0.3, "0.00 to 0.04 were seen"
    assert corrected > 0.5, "0.82 to 0.89 were seen"
