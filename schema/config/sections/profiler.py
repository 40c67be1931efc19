"""`[profiler]`: traces of the workers, and the batches that a trainer can be tried on again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schema.config.base import Count, Natural, Section
from schema.config.key import cosmos_key, key

MOST_STEPS = 10**6


# fmt: off
class SubProfilerConfig(Section):
    """`[profiler.sub_profiler_config]`: what the torch profiler records and when."""

    do_profile: bool = cosmos_key(False,
        "Whether a profile begins with the trainer: wait_steps, then warmup_steps, then active_steps.",
        acts="file: A trace in profiles/.")
    active_steps: Count = cosmos_key(1, "Steps that are recorded; all of them are in memory until the last.",
        le=MOST_STEPS, acts="file: Steps in a trace.")
    warmup_steps: Natural = cosmos_key(1,
        "Steps of warm-up before recording: the first ones after a profiler was switched on are slow.", le=MOST_STEPS,
        acts="file: Which steps are in the trace.")
    wait_steps: Natural = cosmos_key(1, "Steps to wait before the warm-up of a profile that begins with the trainer.",
        le=MOST_STEPS, acts="file: Which steps are in the trace.")
    rank_filter: list[Annotated[int, Field(ge=0)]] = cosmos_key([], "Ranks to profile. Empty: all.",
        example=[0], acts="file: Which ranks write a trace.")
    record_shape: bool = cosmos_key(False, "Whether shapes of tensors are recorded.",
        acts="file: `Input Dims` in a trace.")
    profile_memory: bool = cosmos_key(False, "Whether memory is recorded.",
        acts="file: `[memory]` events in a trace.")
    with_stack: bool = cosmos_key(False, "Whether Python stacks are recorded; slows a step down.",
        acts="file: Python functions in a trace.")
    with_modules: bool = cosmos_key(False, "Whether module names are recorded.",
        acts="file: Ranges named by modules in a trace.")


class ProfilerConfig(Section):
    """`[profiler]`: traces of the workers, and the batches that a trainer can be tried on again."""

    enable_profiler: bool = cosmos_key(False,
        "Whether profiles of the trainer can be taken: by `do_profile`, and at any time by `cosmos-launch profile`.",
        acts="request or reply: Whether POST /v1/replicas/{id}/profile is refused.")
    enable_nsys: bool = cosmos_key(False,
        "Whether policy and rollout workers run under Nsight Systems (`nsys profile`).",
        acts="process: The command line of workers.")
    sub_profiler_config: SubProfilerConfig = cosmos_key(SubProfilerConfig, "What is recorded and when.")
    record_batches: Natural = key(0,
        "Batches of so many newest steps are kept below RUN/batches, for `cosmos-launch replay`. 0: none. There are "
        "never more files than this; one has all samples of its step, 9 bytes for each token of prompts and answers, "
        "and more where experts are replayed.", acts="file: `batches` in the run's directory.", example=8)
