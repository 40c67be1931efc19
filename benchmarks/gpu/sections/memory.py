"""What is traded for memory: tokens per second and the most memory of a step of 1.5B parameters, by key of `[train]`.

Each case trains the same batch, two micro-batches of packed rows, by a trainer of its own at a learning rate of 0:
log-probs and gradient norms must be those of the first case bit for bit, but where the host computes the step. Next
to the peak stands what `--dry-run` says of the device and of the host.
"""

from __future__ import annotations

import tempfile
import traceback
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections.training import allocated_gb, config_of, samples
from launcher.preflight import memory
from launcher.preflight.models import find_model
from policy_worker.model import attention
from policy_worker.model.load import kept_activations
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.model import PolicyModel, spare_memory
from policy_worker.parallel.group import Group
from policy_worker.process import RankEnvironment
from policy_worker.trained.trainer import Trainer
from schema.config import Config

LENGTHS, TINY_LENGTHS = [512] * 16, [24] * 8
"""Of the sequences of a micro-batch."""
ATTENTION = {"recompute_granularity": "selective"}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "everything kept": (False, {}),
    "recomputed: layers": (True, {}),
    "recomputed: attention": (True, ATTENTION),
    "activation_offload": (False, {"activation_offload": True}),
    "optimizer_offload": (False, {"optimizer_offload": True}),
    "fsdp_offload": (False, {"fsdp_offload": True}),
    "fsdp_gradient_offload": (False, {"fsdp_gradient_offload": True}),
    "recomputed: layers, activation_offload": (True, {"activation_offload": True}),
    "reduced late": (False, {"overlap_grad_reduce": False}),
}
"""Whether model_gradient_checkpointing is on, and keys of `[train]`. Others are compared with the first."""


def run(bench: Bench) -> None:
    group, first = Group(RankEnvironment()), (torch.zeros(0), 0.0)
    try:
        for case, (recompute, keys) in CASES.items():
            try:
                found = measure(bench, group, case, config(recompute, keys, bench))
            except Exception as error:  # of memory: the other cases are worth having
                traceback.print_exc()
                bench.row(case, "failed", why=f"{type(error).__name__}: {error}"[:500])
                found = None
            bench.free()
            if found is None or case == next(iter(CASES)):
                first = found or first
                continue
            error = float((found[0] - first[0]).abs().max())
            norms = abs(found[1] / first[1] - 1)
            exact = "fsdp_offload" not in keys  # whose norm the host computes
            right = error == 0.0 and norms <= (0.0 if exact else 1e-5)
            bench.check(f"{case}: the same numbers", right, largest_error=error, of_norm=norms)
    finally:
        group.close()


def config(recompute: bool, keys: dict[str, Any], bench: Bench) -> Config:
    data = config_of(recompute=recompute, tokens=sum(TINY_LENGTHS if bench.tiny else LENGTHS)).to_dict()
    return Config.model_validate({**data, "train": {**data["train"], **keys, "train_batch_per_replica": 2}})


def measure(bench: Bench, group: Group, case: str, made: Config) -> tuple[torch.Tensor, float]:
    """Report a case; its log-probs, and the norm of its gradients."""
    lm = bench.language_model()
    lm.set_attn_implementation(attention.NAME)
    model = PolicyModel(lm.train())
    spare_memory(model, **kept_activations(made.policy, made.train))
    trainer = Trainer(model, made, group, Schedule(1000))
    trainer.optimizer.set_peak_lrs((0.0,))
    lengths = TINY_LENGTHS if bench.tiny else LENGTHS
    batch_of, rows = samples(lengths * 2, bench.shape["vocab_size"]), range(len(lengths))
    learned = sum(sample.learned_tokens for sample in batch_of.values())
    batches = [[*rows], [row + len(lengths) for row in rows]]
    seen: list[torch.Tensor] = []
    norms: list[float] = []

    def step() -> None:
        for batch in trainer.micro_batches(batch_of, batches):
            found = trainer.forward(batch).logprobs
            if len(seen) < len(batches):
                seen.append(found.detach().cpu())
            trainer.backward(-found.sum() / learned)
        norms.append(trainer.step(0))

    seconds = bench.seconds(step)
    figures = {"tokens_s": 2 * sum(lengths) / seconds, "step_ms": seconds * 1e3}
    if bench.on_gpu:
        figures["peak_gb"] = bench.peak_gb(step) + allocated_gb(bench)
    with tempfile.TemporaryDirectory() as folder:
        lm.config.save_pretrained(folder)
        parts = memory.trainer(made, find_model(folder, None, {}), 1, 1)
    host = sum(part.bytes for part in parts if part.device) / 1e9
    device = sum(part.bytes for part in parts) / 1e9 - host
    bench.row(case, **figures, estimate_gb=device, host_estimate_gb=host)
    return torch.cat(seen), norms[-1]
