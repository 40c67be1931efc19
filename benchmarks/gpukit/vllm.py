"""Rollouts by vLLM: a few steps of GRPO with weights from the store; handed out by the trainer; and in two halves.

    weights from the store     one GPU is enough, or none
    weights from the trainer   by NCCL between two GPUs; else over TCP, which is said
    tensor parallel            two ranks of one engine, so two GPUs and the trainer's

Each counts as right when the job ends as finished with every update applied.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.gpukit.bench import Bench
from benchmarks.gpukit.jobs import make_model, reinforce, speed_of

SMALL = ("rollout.max_response_length=12", "train.train_batch_per_replica=16", "rollout.max_num_seqs=16")
COLLECTIVE = "collective"
APART = ('placement.share="none"',)


def run(bench: Bench) -> None:
    gpus = torch.cuda.device_count() if bench.on_gpu else 0
    own = () if gpus < 2 else APART
    sizes = SMALL if bench.tiny else ()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = make_model(place)

        def job(name: str, *settings: str) -> None:
            summary = reinforce(bench, place, name, "grpo_vllm.toml", model, *sizes, *settings)
            logs = "\n".join(
                path.read_text(errors="replace") for path in (place / name / "logs").glob("*.log")
            )
            # One who could not be reached by NCCL, or not by the trainer at all, says so. A rehearsal on busy cores
            # may be late for a version.
            worse = logs.count("version from the store") > bench.tiny or ("file by file" in logs and gpus > 1)
            right = summary["outcome"] == "finished" and not (name == COLLECTIVE and worse)
            bench.check(name, right, nccl="by NCCL, or TCP" in logs, **speed_of(summary))

        collective = 'weight_sync.transport="collective"'
        if bench.tiny:  # one start of vLLM proves both
            job(COLLECTIVE, *own, collective)
            bench.skip("tensor parallel", "two GPUs are needed")
            return
        job("store", *own)
        job(COLLECTIVE, *own, collective)
        if gpus >= 3:
            job("tensor parallel", *own, "rollout.parallelism.tp_size=2")
        else:
            bench.skip("tensor parallel", f"two GPUs and the trainer's are needed, here are {gpus}")
