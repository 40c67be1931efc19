"""How much memory engines and versions of the weights take: formulas over the model's counts, nothing is measured.

    a rollout replica        N·dtype + KV cache: 2·L·kv·dim·dtype bytes per token
    on a rank's own GPU      N·transfer / ranks of the announced version for deltas, at most a KEPT_SHAREth of the GPU
    a host with rollouts     N·transfer, shared by them
    a host with a trainer    N·transfer being published, and as much again for deltas, over all its ranks

N parameters, L layers, transfer the bytes of a number in `train.transfer_dtype`. Training is in `memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.preflight.memory import BYTES, MemoryPart, learning
from launcher.preflight.models import LocalModel
from schema.config import Config

CPU_CACHE_SHARE, GPU_CACHE_SHARE = 0.25, 0.8
"""Shares of memory that the embedded engine's cache may take (rollout_worker.engines.transformers)."""
KEPT_SHARE = 16
"""The announced version may take one part in so many of a GPU (weight_sync.publishing.device_copy)."""


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache of one rollout replica: bytes per token, what may be taken, and what a full engine needs."""

    per_token: int
    room: int
    sequences: int
    sequence_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.room // self.per_token

    @property
    def bytes(self) -> int:
        """The size that it grows to: it never needs more than all sequences at full length."""
        return min(self.room, self.sequences * self.sequence_tokens * self.per_token)


def rollout_weights(config: Config, model: LocalModel, ranks: int) -> MemoryPart:
    """The weights of a replica on each of its devices: copies share experts alone.

    Quantised weights count 1 B, as do embeddings then, which stay as they are.
    """
    rollout, copies = config.rollout, max(1, config.rollout.parallelism.dp_shard_size)
    size = BYTES[config.engine_dtype]
    of_experts = of_rest = size
    if rollout.quantization != "none":
        of_experts, of_rest = 1, size if rollout.quantization.startswith("int8") else 1
    rest, parts = model.parameters - model.experts, max(1, ranks // copies)
    n_bytes = rest * of_rest // parts + model.experts * of_experts // ranks
    if of_experts == of_rest and (copies == 1 or not model.experts):
        words = f"{model.parameters:,} x {of_rest} B" + (f" / {parts}" if parts > 1 else "")
    else:
        words = f"{rest:,} x {of_rest} B / {parts} + {model.experts:,} of experts x {of_experts} B / {ranks}"
    return MemoryPart("weights", n_bytes, words)


def rollout_cache(config: Config, model: LocalModel, ranks: int, memory: int, *, on_gpu: bool) -> Cache | None:
    """The KV cache on each device of a replica, of its layers and heads; None where the model's shape is not known.

    memory: bytes of the GPU, or bytes free on the host.
    """
    if model.shape is None:
        return None
    rollout, size = config.rollout, BYTES[config.engine_dtype]
    stages, copies = rollout.parallelism.pp_size, max(1, rollout.parallelism.dp_shard_size)
    heads = min(max(1, ranks // (stages * copies)), model.shape.kv_heads)
    per_token = max(1, model.shape.kv_numbers_per_token // (heads * stages) * size)
    share = rollout.gpu_memory_utilization
    if not rollout.engine.reserves_memory:
        share = GPU_CACHE_SHARE if on_gpu else CPU_CACHE_SHARE
    room, sequences = int(share * memory), rollout.max_num_seqs or rollout.max_concurrent_samples
    if on_gpu:
        room -= rollout_weights(config, model, ranks).bytes
    return Cache(per_token, max(0, room), sequences, config.engine_max_len)


def host_copy(config: Config, model: LocalModel) -> MemoryPart:
    """The copy of the newest weights that all rollout replicas of a host share (`weight_sync.host_cache`)."""
    n_bytes, words = _published(config, model)
    return MemoryPart("weights that the rollout replicas share", n_bytes, words)


def snapshots(config: Config, model: LocalModel) -> MemoryPart:
    """Count what the ranks of a policy replica keep in host memory together: the version that is being published
    while training goes on and, for deltas, the one before.
    """
    n_bytes, words = _published(config, model)
    copies = 2 if config.weight_sync.encoding == "delta" else 1
    return MemoryPart(
        "snapshots that the trainer publishes from", copies * n_bytes, f"{copies} x {words}" if copies > 1 else words
    )


def published_on_device(config: Config, model: LocalModel, ranks: int, memory: int) -> tuple[MemoryPart, ...]:
    """Return the copy of the announced version that a rank on a GPU keeps there, if it keeps one.

    ranks: of a policy replica. memory: bytes of the GPU; 0: unknown.
    """
    away = config.placement.share != "none" or config.train.fsdp_offload
    if not config.generates or config.weight_sync.encoding == "full" or away:
        return ()
    n_bytes, words = _published(config, model)
    share, room = n_bytes // ranks, memory // KEPT_SHARE
    words += f" / {ranks}" if ranks > 1 else ""
    if memory and room < share:
        share, words = room, f"{words}, at most 1 / {KEPT_SHARE} of the GPU"
    return (MemoryPart("version that deltas are made against", share, words),)


def _published(config: Config, model: LocalModel) -> tuple[int, str]:
    size = BYTES[config.train.effective_transfer_dtype]
    alone = config.weight_sync.lora == "adapter"
    n = learning(model, config.policy.lora) if alone else model.parameters
    return n * size, f"{n:,} x {size} B"
