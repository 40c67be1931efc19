"""`[profiler]`: traces of the trainer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schema.config.base import Section


class SubProfilerConfig(Section):
    """`[profiler.sub_profiler_config]`: what the torch profiler records and when."""

    do_profile: bool = Field(default=False, description="Whether to profile; switched on at run time.")
    active_steps: int = Field(default=1, ge=1, description="Steps that are recorded.")
    warmup_steps: int = Field(default=1, ge=0, description="Steps of warm-up before recording.")
    wait_steps: int = Field(default=1, ge=0, description="Steps to wait before the warm-up.")
    rank_filter: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="Ranks to profile. Empty: all."
    )
    record_shape: bool = Field(default=False, description="Whether shapes of tensors are recorded.")
    profile_memory: bool = Field(default=False, description="Whether memory is recorded.")
    with_stack: bool = Field(default=False, description="Whether Python stacks are recorded.")
    with_modules: bool = Field(default=False, description="Whether module names are recorded.")


class ProfilerConfig(Section):
    """`[profiler]`: traces of the trainer."""

    enable_profiler: bool = Field(default=False, description="Whether the torch profiler is available.")
    enable_nsys: bool = Field(default=False, description="Whether workers run under Nsight Systems.")
    sub_profiler_config: SubProfilerConfig = Field(
        default_factory=SubProfilerConfig, description="What is recorded and when."
    )
