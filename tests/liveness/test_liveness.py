"""Every key of the schema acts, or is refused by name; a new key without a probe fails here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from schema.config import UNAVAILABLE, Config, ConfigError, check_config
from schema.config.availability import refused_by
from schema.config.keys import acting_keys, leaf_keys
from tests.liveness import (
    batches,
    checkpoints,
    controller,
    data,
    generation,
    launcher,
    loss,
    memory,
    meshes,
    mixtures,
    models,
    optimizer,
    profiles,
    teachers,
    uploads,
    weights,
)
from tests.liveness.probe import PROBES, Place, Probe, same

_READ_BACK: set[str] = set()
"""Configurations that have been checked: probes share their first values."""
MODULES = (
    batches, checkpoints, controller, data, generation, launcher, loss, memory, meshes, mixtures, models, optimizer,
    profiles, teachers, uploads, weights,
)  # fmt: skip


def check_reads_back(data: dict[str, Any]) -> None:
    """The checks accept the configuration, and what the launcher writes of it: every key, resolved."""
    if (text := repr(data)) not in _READ_BACK:
        written = check_config(data).to_dict()
        assert check_config(written).to_dict() == written
        _READ_BACK.add(text)


@pytest.mark.scaled
@pytest.mark.parametrize("probe", PROBES, ids=str)
def test_flipping_the_key_is_seen(probe: Probe, place: Place) -> None:
    first, second = (probe.data(number, place) for number in (0, 1))
    check_reads_back(first)
    if probe.refused:
        with pytest.raises(ConfigError) as refusal:
            check_config(second)
        named = {key for problem in refusal.value.problems for key in (problem.key, *problem.related)}
        assert probe.key in {re.sub(r"\[\d+\]", "", key) for key in named}
    else:
        check_reads_back(second)
    configs = [Config.model_validate(data) for data in (first, second)]
    before, again = place.first(probe.observe, configs[0])
    after = probe.observe(configs[1], place)
    assert same(before, again), "one configuration has two observations"
    assert not same(before, after), f"{probe.key} changes nothing: {before}"


@pytest.mark.parametrize("probe", [probe for probe in PROBES if probe.observe is data.prepared], ids=str)
def test_kept_rows_are_of_one_value(probe: Probe, place: Place) -> None:
    """Keys that change prepared rows change the key of `enable_dataset_cache`."""
    assert len({data.key_of_rows(Config.model_validate(probe.data(number, place)), place) for number in (0, 1)}) == 2


def test_every_key_has_a_probe_or_is_refused() -> None:
    probed = {probe.key for probe in PROBES}
    assert probed <= set(leaf_keys())
    dead = [key for key in leaf_keys() if key not in probed and refused_by(key) is None]
    assert dead == [], "register a probe for these keys in tests/liveness"


def test_every_observable_is_probed() -> None:
    """What the documentation says can be seen is seen here."""
    assert {probe.key for probe in PROBES} == acting_keys()


def test_modules_of_probes_are_all_there() -> None:
    found = {path.stem for path in Path(__file__).parent.glob("*.py")}
    helpers = {"__init__", "conftest", "probe", "trained", "test_liveness", "test_refusals", "test_vllm"}
    assert found - helpers == {module.__name__.rpartition(".")[2] for module in MODULES}
    assert UNAVAILABLE
