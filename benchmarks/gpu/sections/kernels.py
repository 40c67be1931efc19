"""Optimizer steps of a few layers in each type and with each set of kernels that the configuration offers.

Every case is a trainer as a job makes it, of the same weights, on packed rows; its loss must be that of the first
case up to rounding. A case whose package is not on the machine, or whose GPU cannot do it, is skipped and says so.
docs/precision.md has the table of keys that this fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.steps import Steps, config_of, each
from launcher.plan.machine import Capability, Machine, has_module
from launcher.preflight.hardware import check_hardware
from launcher.preflight.packages import missing_kernels
from policy_worker.model import flash
from policy_worker.parallel import kernels
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from schema.config import Config

LAYERS, LENGTHS, TINY_LENGTHS = 6, [1024] * 8, [24] * 3
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ({}, {}),
    "float32": ({"param_dtype": "float32"}, {}),
    "float16": ({"param_dtype": "float16"}, {}),
    "bfloat16, compiled": ({"compile": True}, {}),
    **{f"FlashAttention {version}": ({"fa_version": version}, {}) for version in (2, 3, 4)},
    **{
        f"fp8, {recipe}, compiled": ({"compile": True, "fp8": {"enable_fp8": True, "quant_recipe": recipe}}, {})
        for recipe in ("rowwise", "tensorwise")
    },
    "Liger's kernels": ({}, {"enable_liger_kernel": True}),
}
"""Keys of `[train]` and of `[policy]`. Liger's come last, since they replace functions of transformers for the
rest of the process."""
CLOSE, CLOSE_IN_FP8 = 0.02, 0.15
"""Largest difference of a loss of about log(vocabulary)."""


def run(bench: Bench) -> None:
    if bench.tiny:
        kernels.BACKEND = "aot_eager"
    group = RankGroup(RankEnvironment())
    try:
        each(bench, possible(bench, group), same)
    finally:
        group.close()


def possible(bench: Bench, group: RankGroup) -> Iterator[tuple[str, Callable[[], Steps]]]:
    """The cases against which preflight has nothing on this machine; others are skipped."""
    machine = Machine(1)
    if bench.on_gpu:
        capability: Capability = torch.cuda.get_device_capability()
        machine = Machine(1, ("0",), capabilities=(capability,))
    for case, (train, policy) in CASES.items():
        config = config_of({"optm_impl": "foreach", **train}, policy)
        problems = [*missing_kernels(config, has_module), *check_hardware(config, machine)]
        if not problems:
            yield case, partial(steps_of, bench, group, config)
        elif bench.on_gpu:
            bench.skip(case, "; ".join(problem.message for problem in problems))


def steps_of(bench: Bench, group: RankGroup, config: Config) -> Steps:
    flash.use_flash(config.train.fa_version)
    layers = {} if bench.tiny else {"num_hidden_layers": LAYERS}
    return Steps(bench, group, config, TINY_LENGTHS if bench.tiny else LENGTHS, **layers)


def same(case: str, first: Steps, steps: Steps) -> None:
    loss, expected = float(steps.losses[0]), float(first.losses[0])
    bound = CLOSE_IN_FP8 if steps.config.train.fp8.enable_fp8 else CLOSE
    error = abs(loss - expected)
    steps.bench.check(f"{case}: the loss of the first case", error < bound, loss=loss, difference=error)
