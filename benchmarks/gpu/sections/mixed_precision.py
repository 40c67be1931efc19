"""FSDP2 on one rank: bf16 products over float32 masters; and collectives in a world of one.

A few steps are compared with the same in float32 without FSDP2: the loss must fall alike. In a world of one FSDP2
casts and copies without a collective, so those that training and publishing use are called by themselves.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.roofline import Work
from benchmarks.gpu.steps import Steps, config_of
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment

STEPS = 8
SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip


def run(bench: Bench) -> None:
    group = RankGroup(RankEnvironment())
    try:
        collectives(bench)
        losses = {name: train(bench, group, name) for name in ("float32", "bfloat16")}
        worst = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        plain, mixed = losses.values()
        bench.check(
            "bf16 over float32 masters learns as float32 does",
            worst < 0.05 * plain[0] and mixed[-1] < mixed[0],
            largest_difference=worst,
            first_loss=mixed[0],
            last_loss=mixed[-1],
        )
    finally:
        group.close()


def train(bench: Bench, group: RankGroup, param_dtype: str) -> list[float]:
    """The loss of each step, accumulated over two micro-batches."""
    config = config_of({"param_dtype": param_dtype, "optm_lr": 1e-3}, {"model_gradient_checkpointing": True})
    steps = Steps(bench, group, config, [64, 48], micro_batches=2, **({} if bench.tiny else SMALL))
    seconds = [bench.wall(steps) for _ in range(STEPS)]
    wrapped = ", FSDP2" * isinstance(steps.trainer.model, FSDPModule)
    bench.row(f"a step, {param_dtype}{wrapped}", step_ms=statistics.median(seconds) * 1e3)
    return [float(loss) for loss in steps.losses]


def collectives(bench: Bench) -> None:
    """In a world of one they only copy: it is that they run which is proven."""
    elements = 2**12 if bench.tiny else 2**27
    data = torch.randn(elements, device=bench.device)
    out = torch.empty_like(data)
    calls = {
        "all_reduce": lambda: dist.all_reduce(data),
        "all_gather": lambda: dist.all_gather_into_tensor(out, data),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, data),
        "all_to_all": lambda: dist.all_to_all_single(out, data, [elements], [elements]),
        "broadcast": lambda: dist.broadcast(data, 0),
    }
    for name, call in calls.items():
        seconds, case, gb = bench.seconds(call), f"{name} over {dist.get_backend()}", data.nbytes / 1e9
        if name in ("all_reduce", "broadcast"):  # on one rank nothing is exchanged
            bench.row(case, ms=seconds * 1e3, gb=gb)
        else:
            bench.timed(case, seconds, Work(moved=2.0 * data.nbytes), gb=gb)
