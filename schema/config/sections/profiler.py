"""`[profiler]`: traces of the trainer, and the batches that it can be tried on again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schema.config.base import Count, Natural, Section
from schema.config.key import cosmos_key, key


class SubProfilerConfig(Section):
    """`[profiler.sub_profiler_config]`: what the torch profiler records and when."""

    do_profile: bool = cosmos_key(False, "Whether to profile; switched on at run time.")
    active_steps: Count = cosmos_key(1, "Steps that are recorded.")
    warmup_steps: Natural = cosmos_key(1, "Steps of warm-up before recording.")
    wait_steps: Natural = cosmos_key(1, "Steps to wait before the warm-up.")
    rank_filter: list[Annotated[int, Field(ge=0)]] = cosmos_key(
        [], "Ranks to profile. Empty: all.", example=[0]
    )
    record_shape: bool = cosmos_key(False, "Whether shapes of tensors are recorded.")
    profile_memory: bool = cosmos_key(False, "Whether memory is recorded.")
    with_stack: bool = cosmos_key(False, "Whether Python stacks are recorded.")
    with_modules: bool = cosmos_key(False, "Whether module names are recorded.")


class ProfilerConfig(Section):
    """`[profiler]`: traces of the trainer, and the batches that it can be tried on again."""

    enable_profiler: bool = cosmos_key(False, "Whether the torch profiler is available.", unbuilt="profiling")
    enable_nsys: bool = cosmos_key(False, "Whether workers run under Nsight Systems.", unbuilt="profiling")
    sub_profiler_config: SubProfilerConfig = cosmos_key(
        SubProfilerConfig, "What is recorded and when.", unbuilt="profiling"
    )
    record_batches: Natural = key(
        0,
        "Batches of so many newest steps are kept below RUN/batches, for `cosmos-launch replay`. 0: none. There are "
        "never more files than this; one has all samples of its step, 9 bytes for each token of prompts and answers.",
        acts="file: `batches` in the run's directory.",
        example=8,
    )
