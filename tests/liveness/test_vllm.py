"""What the probes of the vLLM engine see reaches the installed vLLM's own classes, field by field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from schema.config import Config
from tests.liveness import generation
from tests.liveness.probe import PROBES, Place, Probe

SAMPLING = (generation.training_sampling, generation.validation_sampling)


@pytest.mark.slow
@pytest.mark.parametrize("probe", [p for p in PROBES if p.observe is generation.vllm_arguments], ids=str)
def test_engine_arguments(probe: Probe, place: Place) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert generation.KNOWN & names
    shown = []
    for number in (0, 1):
        arguments = probe.observe(Config.model_validate(probe.data(number, place)), place)
        assert arguments.keys() <= names
        made = AsyncEngineArgs(**arguments)
        shown.append({name: repr(getattr(made, name)) for name in arguments})
    assert shown[0] != shown[1]


@pytest.mark.slow
@pytest.mark.parametrize("probe", [p for p in PROBES if p.observe in SAMPLING], ids=str)
def test_sampling_parameters(probe: Probe, place: Place) -> None:
    from vllm import SamplingParams

    def made(number: int) -> dict[str, Any]:
        arguments = probe.observe(Config.model_validate(probe.data(number, place)), place)
        found = SamplingParams(**arguments)
        return {name: getattr(found, name) for name in SamplingParams.__struct_fields__}

    assert made(0) != made(1)
