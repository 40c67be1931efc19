"""How much memory a rank of a trainer takes, next to what `--dry-run` says; and after a resumption.

    python -m benchmarks.trainer.memory [--only "tp 2"] [--no-resume]

Models of more than 100M parameters in float32 with random weights, loaded as a worker loads them, take two optimizer
steps of two micro-batches each; the second step has everything that a run ever has. Then the state is saved, and new
processes resume it and take two steps more. Samples are as long as they may be, which is what the estimate is of.

What is measured: the largest resident memory of a rank (`VmHWM`, which the kernel keeps exactly) from the time when
its trainer is made, less its resident memory before the model is loaded, after a tiny model has trained in the same
process: libraries, threads, process groups and their buffers are there by then. Blocks of 64 KiB and more are given
back when they are freed, so nothing that an allocator keeps counts. It is the memory of tensors on the CPU, whoever
allocates them.

For each mesh: the estimate and the most of a rank in MiB, and their ratio; the peak after the resumption over that
before, and that of the loading itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.harness import on_ranks, options, report, reset_peak, resident_mib
from benchmarks.trainer.drafts import draft
from launcher.preflight import memory
from launcher.preflight.models import find_model
from policy_worker.checkpoints.find import Resumption
from policy_worker.checkpoints.layout import look
from policy_worker.checkpoints.load import load
from policy_worker.checkpoints.write import write
from policy_worker.model.micro_batch import Segment, TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.trained.trainer import Trainer
from policy_worker.worker import make_trainer
from schema.config import Config

VOCABULARY, TOKENS = 32_000, 256
"""Tokens of a sample, two of which are a micro-batch."""
LIBC = ctypes.CDLL("libc.so.6")
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
COMMON = {"vocab_size": VOCABULARY, "num_key_value_heads": 6, "head_dim": 64, "tie_word_embeddings": True}
SIZES = {
    "dense": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "experts": {
        "hidden_size": 768, "moe_intermediate_size": 512, "intermediate_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 12, "num_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """mesh: keys of `[policy.parallelism]`, sizes and switches. train, policy: further keys of these sections."""

    mesh: Mapping[str, int]
    model: str = "dense"
    train: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(np.prod([size for key, size in self.mesh.items() if key != "ep_size"]))

    def config(self, model: Path) -> Config:
        data_ranks = self.mesh.get("dp_shard_size", 1) * self.mesh.get("dp_replicate_size", 1)
        parallelism = {"tp_size": 1, "dp_shard_size": 1, **self.mesh}
        sft = {"type": "sft", "mini_batch": 2}
        train = {
            "compile": False,
            "param_dtype": "float32", "sequence_packing": True, "train_batch_per_replica": 4 * data_ranks,
            "train_policy": sft, **self.train,
        }  # fmt: skip
        policy = {"model_name_or_path": str(model), "model_max_length": TOKENS, **self.policy}
        return Config.model_validate({"train": train, "policy": {**policy, "parallelism": parallelism}})


KEPT = {"model_gradient_checkpointing": False}
CASES = {
    "one rank": Case({}),
    "one rank, activations kept": Case({}, policy=KEPT),
    "dp_shard 2": Case({"dp_shard_size": 2}),
    "dp_shard 2, bfloat16": Case({"dp_shard_size": 2}, train={"param_dtype": "bfloat16"}),
    "dp_replicate 2": Case({"dp_replicate_size": 2}),
    "tp 2": Case({"tp_size": 2}),
    "tp 2, activations kept": Case({"tp_size": 2}, policy=KEPT),
    "tp 2, split sequences": Case({"tp_size": 2, "sequence_parallel": True}),
    "tp 2, split sequences, activations kept": Case({"tp_size": 2, "sequence_parallel": True}, policy=KEPT),
    "cp 2": Case({"cp_size": 2}),
    "cp 2, activations kept": Case({"cp_size": 2}, policy=KEPT),
    "tp 2, adapters": Case({"tp_size": 2}, policy={"lora": {"r": 16, "lora_alpha": 32}}),
    "adapters": Case({}, policy={"lora": {"r": 16, "lora_alpha": 32}}),
    "one rank, attention recomputed": Case({}, train={"recompute_granularity": "selective"}),
    "one rank, activations offloaded": Case({}, train={"activation_offload": True}, policy=KEPT),
    "one rank, optimizer offloaded": Case({}, train={"optimizer_offload": True}),
    "one rank, gradients offloaded": Case({}, train={"fsdp_gradient_offload": True}),
    "dp_shard 2, all offloaded": Case({"dp_shard_size": 2}, train={"fsdp_offload": True}),
    "dp_shard 2, reduced late": Case({"dp_shard_size": 2}, train={"overlap_grad_reduce": False}),
    "ep 2, experts recomputed": Case(
        {"dp_shard_size": 2, "ep_size": 2}, "experts", train={"recompute_moe_layers": True}
    ),
    "ep 2": Case({"dp_shard_size": 2, "ep_size": 2}, "experts"),
}


def estimate(case: Case, model: Path) -> tuple[memory.MemoryPart, ...]:
    """What `--dry-run` says of each rank."""
    replicas = case.mesh.get("dp_replicate_size", 1)
    data_ranks = replicas * case.mesh.get("dp_shard_size", 1)
    found = find_model(str(model), None, {})
    return memory.trainer(case.config(model), found, case.ranks // replicas, data_ranks)


def make_models(place: Path, layers: int) -> None:
    torch.manual_seed(0)
    kinds: dict[str, type[PretrainedConfig]] = {"dense": Qwen3Config, "experts": Qwen3MoeConfig}
    for name, kind in kinds.items():
        large = SIZES[name] | ({"num_hidden_layers": layers} if layers else {})
        for path, sizes in ((name, large), (f"tiny {name}", SIZES[name] | TINY)):
            lm = AutoModelForCausalLM.from_config(kind(**{**COMMON, **sizes}))
            lm.save_pretrained(place / path)


# ---- one rank ---------------------------------------------------------------------------------------------


def _train(trainer: Trainer, first: int, vocabulary: int) -> None:
    """Two optimizer steps of two micro-batches on this data rank."""
    rng = np.random.default_rng(trainer.group.data_rank)
    mask = np.ones(TOKENS, np.uint8)
    mask[0] = 0
    for step in (first, first + 1):
        samples = {
            row: TrainSample([Segment(rng.integers(0, vocabulary, TOKENS).astype(np.int32), mask, None)])
            for row in range(4)
        }
        n_tokens = 4 * (TOKENS - 1) * trainer.group.data_ranks
        trainer.learn(samples, [[0, 1], [2, 3]], lambda _, found, n=n_tokens: -found.logprobs.sum() / n)
        trainer.step(step)


def _begin_peak() -> None:
    gc.collect()
    LIBC.malloc_trim(0)
    reset_peak()


def work(case: Case, place: Path, resume: bool) -> None:
    """Measure one rank; rank 0 prints the largest peak of all, and that while they load what they resume: MiB."""
    torch.set_num_threads(1)
    group = RankGroup(RankEnvironment.of_environ())
    tiny = case.config(place / f"tiny {case.model}")
    _train(make_trainer(tiny, group.sibling(600.0), 10, None), 0, TINY["vocab_size"])
    LIBC.malloc_trim(0)
    idle = resident_mib()
    config, root = case.config(place / case.model), place / "checkpoints"
    trainer = make_trainer(config, group, 10, None)
    _begin_peak()
    loading = 0.0
    if resume:
        checkpoint = look(next(iter(root.glob("step-*"))))
        load(Resumption(checkpoint, checkpoint.step, own=True), trainer, config, None)
        loading = resident_mib("VmHWM") - idle
        _begin_peak()
    _train(trainer, 2 * resume, VOCABULARY)
    peaks = group.gather([resident_mib("VmHWM") - idle, loading])
    if not resume:
        write(draft(trainer, root, 2), group)
    if group.leads:
        print(json.dumps([max(of_ranks) for of_ranks in zip(*peaks, strict=True)]))
    group.close()


def main() -> None:
    given = options(
        __doc__,
        layers=(0, "of the models; 0: 12 and 8, which make more than 100M parameters"),
        only=("", "meshes whose name contains this"), no_resume=False,
        parts=(False, "print the lines of each estimate"), rank_of=(str, "(of a rank)"), place=(Path, "(of a rank)"),
        resume=(False, "(of a rank)"),
    )  # fmt: skip
    if given.rank_of:
        work(CASES[given.rank_of], given.place, given.resume)
        return
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_models(place, given.layers)
        for name, case in CASES.items():
            if given.only not in name:
                continue

            def peaks(*more: str, name: str = name, case: Case = case) -> list[float]:
                arguments = "--rank-of", name, "--place", str(place), *more
                return list(on_ranks(case.ranks, "benchmarks.trainer.memory", *arguments, **GIVE_BACK))

            parts = estimate(case, place / case.model)
            for part in parts if given.parts else ():
                print(f"    {part.name:<27}{part.bytes / 2**20:8.0f}  {part.formula}")
            estimated, (measured, _) = sum(part.bytes for part in parts) / 2**20, peaks()
            rows[name] = {"estimate": estimated, "measured": measured, "ratio": estimated / measured}
            if not given.no_resume:
                after, loading = peaks("--resume")
                rows[name] |= {"resumed": after / measured, "loading": loading / measured}
            shutil.rmtree(place / "checkpoints")
    report(given, rows, rows)


if __name__ == "__main__":
    main()
