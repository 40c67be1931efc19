"""FSDP2 on one rank: bf16 products over float32 masters; and collectives in a world of one.

A few steps are compared with the same in float32 without FSDP2: the loss must fall alike. In a world of one FSDP2
casts and copies without a collective, so those that training and publishing use are called by themselves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections.training import samples
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.model import PolicyModel, prepare_model
from policy_worker.parallel.group import Group
from policy_worker.process import RankEnvironment
from policy_worker.trained.trainer import Trainer
from schema.config import Config

STEPS = 8
SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip


def run(bench: Bench) -> None:
    group = Group(RankEnvironment())
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


def train(bench: Bench, group: Group, param_dtype: str) -> list[float]:
    """The loss of each step."""
    lm = bench.language_model(**(SMALL if not bench.tiny else {})).cpu()
    train = {
        "param_dtype": param_dtype,
        "optm_lr": 1e-3,
        "optm_impl": "fused",
        "sequence_packing": True,
        "compile": False,
    }
    config = Config.model_validate({"train": {**train, "train_policy": {"type": "sft"}}})
    model = prepare_model(PolicyModel(lm), packed=True, recompute=True)
    trainer = Trainer(model, config, group, Schedule(1000))
    batch_of = samples([64, 48, 80], bench.shape["vocab_size"] if bench.tiny else SMALL["vocab_size"])
    learned = sum(sample.learned_tokens for sample in batch_of.values())
    losses: list[float] = []

    def step() -> None:
        total = torch.zeros((), device=bench.device)
        for batch in trainer.micro_batches(batch_of, [[0, 1], [2]]):  # accumulated over two micro-batches
            loss = -trainer.forward(batch).logprobs.sum() / learned
            trainer.backward(loss)
            total += loss.detach()
        trainer.step(0)
        losses.append(float(total))

    seconds = [bench.wall(step) for _ in range(STEPS)]
    bench.row(
        f"a step, {param_dtype}" + ", FSDP2" * isinstance(trainer.model, FSDPModule),
        step_ms=sorted(seconds)[STEPS // 2] * 1e3,
    )
    return losses


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
        bench.row(f"{name} over {dist.get_backend()}", ms=bench.seconds(call) * 1e3, gb=data.nbytes / 1e9)
