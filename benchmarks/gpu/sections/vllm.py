"""Rollouts by vLLM: a few steps of GRPO with weights from the store; handed out by the trainer; and in two halves.

    model runner               what is assumed of it, by its source and by an engine, each difference by its name
    weights from the store     one GPU is enough, or none
    weights from the trainer   by NCCL between two GPUs; else over TCP, which is said
    experts, quantised         a mixture of experts; and fp8, with every update compared
    chosen experts             as vLLM returns them, and as a plain forward chooses them
    on two GPUs                tensor parallel, stages, shared experts: and the trainer's GPU

Each counts as right when the job ends as finished with every update applied.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench, reinforce
from benchmarks.gpu.sections import routing, tests
from benchmarks.jobs import make_model, speed_of

ENGINE_TESTS = "tests/rollout_worker/engines/vllm"
SOURCES, CONTRACT = f"{ENGINE_TESTS}/test_runner.py", f"{ENGINE_TESTS}/test_contract.py::TestVllm"
CONTRACT_SECONDS = 40
"""After which one of its tests counts as hanging."""
SMALL = ("rollout.max_response_length=12", "train.train_batch_per_replica=16", "rollout.max_num_seqs=16")
COLLECTIVE = "collective"
APART = ('placement.share="none"',)
CHECKED = "weight_sync.checksum_interval=1"
TP = "rollout.parallelism.tp_size=2"
TWO_GPUS = {
    "tensor parallel": ((TP,), False),
    "stages": (("rollout.parallelism.pp_size=2",), False),
    "shared experts": ((TP, "rollout.parallelism.ep_size=2"), True),
}
"""Settings of jobs with an engine on two GPUs, and whether their model has experts."""


def run(bench: Bench) -> None:
    gpus = torch.cuda.device_count() if bench.on_gpu else 0
    own = () if gpus < 2 else APART
    sizes = SMALL if bench.tiny else ()
    if bench.tiny:
        tests.passes(bench, "model runner", SOURCES, "-m", "not slow and not soak")
    else:
        tests.passes(bench, "model runner", SOURCES, CONTRACT, "-m", "not soak", "--timeout", str(CONTRACT_SECONDS))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = make_model(place)

        def job(name: str, *settings: str) -> None:
            summary = reinforce(bench, place, name, "grpo_vllm.toml", model, *sizes, *settings)
            logs = "\n".join(path.read_text(errors="replace") for path in (place / name / "logs").glob("*.log"))
            # One who could not be reached by NCCL, or not by the trainer at all, says so. A rehearsal on busy cores
            # may be late for a version.
            worse = logs.count("version from the store") > bench.tiny or ("file by file" in logs and gpus > 1)
            right = summary["outcome"] == "finished" and not (name == COLLECTIVE and worse)
            bench.check(name, right, nccl="by NCCL, or TCP" in logs, **speed_of(summary))

        collective = 'weight_sync.transport="collective"'
        if bench.tiny:  # one start of vLLM proves both
            job(COLLECTIVE, *own, collective)
            bench.skip(routing.CASE, "vLLM returns them on GPUs alone")
            for name in TWO_GPUS:
                bench.skip(name, "two GPUs are needed")
            return
        of_experts = f"policy.model_name_or_path={json.dumps(str(experts := make_model(place, experts=4)))}"
        job("store", *own)
        job(COLLECTIVE, *own, collective)
        job("experts", *own, CHECKED, of_experts)
        job("quantised", *own, CHECKED, 'rollout.quantization="fp8"', 'rollout.dtype="bfloat16"')
        routing.compare(bench, experts)
        for name, (settings, is_mixture) in TWO_GPUS.items():
            if gpus >= 3:
                job(name, *own, CHECKED, *settings, *([of_experts] if is_mixture else []))
            else:
                bench.skip(name, f"two GPUs and the trainer's are needed, here are {gpus}")
