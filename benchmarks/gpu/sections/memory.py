"""What is traded for memory: tokens per second and the most memory of a step of 1.5B parameters, by key of `[train]`.

Each case trains the same batch, two micro-batches of packed rows, by a trainer of its own at a learning rate of 0:
log-probs and gradient norms must be those of the first case bit for bit, but where the host computes the step. Next
to the peak stands what `--dry-run` says of the device and of the host.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.steps import Steps, config_of, each
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment

LENGTHS, TINY_LENGTHS = [512] * 16, [24] * 8
"""Lengths of the sequences of a micro-batch, in tokens."""
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "everything kept": (False, {}),
    "recomputed: layers": (True, {}),
    "recomputed: attention": (True, {"recompute_granularity": "selective"}),
    "activation_offload": (False, {"activation_offload": True}),
    "optimizer_offload": (False, {"optimizer_offload": True}),
    "fsdp_offload": (False, {"fsdp_offload": True}),
    "fsdp_gradient_offload": (False, {"fsdp_gradient_offload": True}),
    "recomputed: layers, activation_offload": (True, {"activation_offload": True}),
    "reduced late": (False, {"overlap_grad_reduce": False}),
}
"""Whether model_gradient_checkpointing is on, and keys of `[train]`. Others are compared with the first."""


def run(bench: Bench) -> None:
    group = RankGroup(RankEnvironment())
    try:
        makers = ((case, partial(steps_of, bench, group, *keys)) for case, keys in CASES.items())
        each(bench, makers, same, Steps.estimated)
    finally:
        group.close()


def steps_of(bench: Bench, group: RankGroup, recompute: bool, keys: dict[str, Any]) -> Steps:
    lengths = TINY_LENGTHS if bench.tiny else LENGTHS
    tokens = sum(lengths)
    batch = {"type": "sft", "max_token_len_per_mini_batch": tokens}
    train = {"master_dtype": "float32", "train_batch_per_replica": 2, "train_policy": batch, **keys}
    policy = {"model_max_length": tokens, "model_gradient_checkpointing": recompute}
    made = Steps(bench, group, config_of(train, policy), lengths, micro_batches=2)
    made.trainer.optimizer.set_peak_lrs((0.0,))
    return made


def same(case: str, first: Steps, steps: Steps) -> None:
    error = float((torch.cat(steps.logprobs) - torch.cat(first.logprobs)).abs().max())
    norms = abs(steps.norms[-1] / first.norms[-1] - 1)
    exact = not steps.config.train.fsdp_offload  # whose norm the host computes
    right = error == 0.0 and norms <= (0.0 if exact else 1e-5)
    steps.bench.check(f"{case}: the same numbers", right, largest_error=error, of_norm=norms)
