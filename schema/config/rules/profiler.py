"""Rules of `[profiler]`: what switches on what, and which ranks and steps there are to record."""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.layout import policy_layout
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Refusal, Rule

_SUB = "profiler.sub_profiler_config"


def absent_ranks(config: Config, ranks: int) -> Iterator[Problem]:
    """Ranks that are to be recorded and that a trainer of so many ranks does not have."""
    key, wanted = f"{_SUB}.rank_filter", config.profiler.sub_profiler_config.rank_filter
    if absent := sorted({rank for rank in wanted if rank >= ranks}):
        message = f"a policy replica has {ranks} ranks, from 0 to {ranks - 1}: there is no {absent[0]}"
        if ranks == 1:
            message = f"a policy replica has one rank, 0: there is no {absent[0]}"
        there = sorted(set(wanted).difference(absent)) or [0]
        yield Problem(key, message, wanted, f"write {key} = {there}", related=("policy.parallelism",))


def profiled_ranks_exist(config: Config) -> Iterator[Problem]:
    """Where the number of ranks is known before the machine is."""
    size = policy_layout(config).size
    if size is not None:
        yield from absent_ranks(config, size)


def profiles_begin_in_time(config: Config) -> Iterator[Problem]:
    """A profile that begins after the last step records nothing."""
    profiler, settings = config.profiler, config.profiler.sub_profiler_config
    before, steps = settings.wait_steps + settings.warmup_steps, config.train.max_num_steps
    if profiler.enable_profiler and settings.do_profile and steps is not None and before >= steps:
        key, warmup, last = f"{_SUB}.wait_steps", f"{_SUB}.warmup_steps", "train.max_num_steps"
        message = f"{settings.wait_steps} steps and {warmup} = {settings.warmup_steps} leave none of {last} = {steps}"
        hint = f"write {last} = {before + settings.active_steps}, or smaller numbers"
        yield Problem(key, message, settings.wait_steps, hint, related=(warmup, last))


PROFILER_RULES: tuple[Rule, ...] = (
    Refusal(f"{_SUB}.do_profile",
        lambda c: c.profiler.sub_profiler_config.do_profile and not c.profiler.enable_profiler,
        "true asks for a profile, and {profiler.enable_profiler=} takes none",
        "write {profiler.enable_profiler!} = true, or {.do_profile!} = false"),
    profiled_ranks_exist,
    profiles_begin_in_time,
)  # fmt: skip
PROFILER_WARNINGS: tuple[Rule, ...] = (  # both see kernels by CUPTI, which serves one tool at a time
    Refusal("profiler.enable_nsys", lambda c: c.profiler.enable_nsys and c.profiler.enable_profiler,
        "true lets Nsight Systems see the kernels of a GPU, and traces by {.enable_profiler=} have none then",
        "write {.enable_profiler!} = false, or {.enable_nsys!} = false"),
)  # fmt: skip
