"""Rules of `[profiler]` and `[logging]`: what switches on what, and which ranks, steps and samples are recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from schema.config.layout import policy_layout
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import InGrpo, Refusal, Rule, refused

_SUB = "profiler.sub_profiler_config"


def absent_ranks(config: Config, ranks: int) -> Iterator[Problem]:
    """Ranks that are to be recorded and that a trainer of so many ranks does not have."""
    listed = config.profiler.sub_profiler_config.rank_filter
    if absent := sorted({rank for rank in listed if rank >= ranks}):
        has = "one rank, 0" if ranks == 1 else f"{ranks} ranks, from 0 to {ranks - 1}"
        hint = f"write {{!}} = {sorted(set(listed).difference(absent)) or [0]}"
        says = f"a policy replica has {has}: there is no {absent[0]}"
        yield refused(config, f"{_SUB}.rank_filter", says, hint, ("policy.parallelism",))


def profiled_ranks_exist(config: Config) -> Iterator[Problem]:
    """Where the number of ranks is known before the machine is."""
    size = policy_layout(config).size
    if size is not None:
        yield from absent_ranks(config, size)


def _steps_before(config: Config) -> int:
    """Steps that pass before a profile from the start begins; 0: none is taken."""
    profiler, settings = config.profiler, config.profiler.sub_profiler_config
    takes = profiler.enable_profiler and settings.do_profile
    return settings.wait_steps + settings.warmup_steps if takes else 0


def _kept(config: Config) -> int:
    """Samples of each step that are kept as text."""
    return min(config.logging.sample_groups, config.groups_per_step) * config.rollout.n_generation


PROFILER_RULES: tuple[Rule, ...] = (
    Refusal(f"{_SUB}.do_profile",
        lambda c: c.profiler.sub_profiler_config.do_profile and not c.profiler.enable_profiler,
        "true asks for a profile, and {profiler.enable_profiler=} takes none",
        "write {profiler.enable_profiler!} = true, or {.do_profile!} = false"),
    profiled_ranks_exist,
    Refusal(f"{_SUB}.wait_steps", lambda c: _steps_before(c) >= (c.train.max_num_steps or math.inf),
        "{} steps and {.warmup_steps=} leave none of {train.max_num_steps=}",
        lambda c: "write {train.max_num_steps!} = "
        f"{_steps_before(c) + c.profiler.sub_profiler_config.active_steps}, or smaller numbers"),
    InGrpo(
        Refusal("logging.log_training_samples", lambda c: c.logging.log_training_samples > _kept(c),
            "{} is more than the samples of a step that are kept: {.sample_groups=}, and {rollout.n_generation=}",
            lambda c: f"write {{!}} = {_kept(c)}, or a larger {{.sample_groups!}}"),
    ),
)  # fmt: skip
PROFILER_WARNINGS: tuple[Rule, ...] = (  # both see kernels by CUPTI, which serves one tool at a time
    Refusal("profiler.enable_nsys", lambda c: c.profiler.enable_nsys and c.profiler.enable_profiler,
        "true lets Nsight Systems see the kernels of a GPU, and traces by {.enable_profiler=} have none then",
        "write {.enable_profiler!} = false, or {.enable_nsys!} = false"),
)  # fmt: skip
