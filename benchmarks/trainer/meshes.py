"""What it costs to cut a policy over ranks: a training step on each mesh, over the step of one rank.

    python -m benchmarks.trainer.meshes [--meshes dp_shard=2 cp=2 tp=2,sequence=1] [--rounds 5] [--answer 96]

GRPO on 8 groups of 8 samples, prompts of 32 tokens and answers of up to `--answer`, packed, in micro-batches of 16
samples, with stages of 8; a model of random weights with 20M parameters, float32, gloo, one thread for each rank. A
mesh is a job of its own, and a figure the median over rounds of the seconds of a step over those of one rank alone:
1 / ranks would be ideal on as many cores. CPU time is that of all ranks over that of one. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.trainer import algorithms
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.model import PolicyModel, prepare_model
from policy_worker.parallel.group import Group
from policy_worker.parallel.mesh import MeshSizes
from policy_worker.process import RankEnvironment
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo

PATIENCE = 600.0  # seconds for one mesh


def train(sizes: dict[str, int], rounds: int) -> None:
    """One rank of a mesh; prints the seconds of its steps and those of its CPU time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = Group(RankEnvironment.of_environ())
    group.arrange(MeshSizes(**sizes) if sizes else MeshSizes())
    shape = Qwen2Config(
        vocab_size=algorithms.VOCABULARY, hidden_size=512, num_hidden_layers=6, intermediate_size=1536,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(shape)
    model = prepare_model(
        PolicyModel(lm), packed=True, recompute=False, pieces=group.sizes.cp, parted=group.sizes.sequence
    )
    stages = {"pp_size": group.sizes.pp, "pp_micro_batch_size": 8}
    config = algorithms.config_of({"train": {"sequence_packing": True}, "policy.parallelism": stages})
    made = algorithms.samples()
    trainer = Trainer(model, config, group, Schedule(rounds + 1))
    source = BatchSource(group, lambda call: algorithms.batch_of(made, call.params["samples"]), 1, 0)
    learner = Grpo(config, trainer, source)
    seconds, cpu = [], []
    for _ in range(rounds + 1):
        group.barrier()
        begun, spent = time.perf_counter(), time.process_time()
        table = learner.poll(0, 0.0)
        assert table is not None
        assert learner.train_on(table) is not None
        group.barrier()
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - spent)
    print(json.dumps([seconds[1:], cpu[1:]]))
    group.close()


def sizes_of(mesh: str) -> dict[str, int]:
    """`dp_shard=2,cp=2` as the sizes of a mesh, with `sequence=1` for its switch; "" is one rank."""
    pairs = (part.split("=") for part in filter(None, mesh.split(",")))
    return {name: int(size) for name, size in pairs}


def seconds_of(mesh: str, options: argparse.Namespace) -> tuple[float, float]:
    """A step on a mesh, whose ranks are processes of this program, and the CPU time of all ranks: medians."""
    ranks = math.prod(sizes_of(mesh).values())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = [
        sys.executable,
        "-m",
        "benchmarks.trainer.meshes",
        "--rank-of",
        mesh,
        "--rounds",
        str(options.rounds),
    ]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    children = [
        subprocess.Popen(
            [*own, "--answer", str(options.answer)],
            env={
                **os.environ,
                **shared,
                "LOCAL_WORLD_SIZE": str(ranks),
                "RANK": str(n),
                "LOCAL_RANK": str(n),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(ranks)
    ]
    try:
        outputs = [child.communicate(timeout=PATIENCE)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    seconds, cpu = zip(*(json.loads(output.splitlines()[-1]) for output in outputs), strict=True)
    return statistics.median(seconds[0]), sum(map(statistics.median, cpu))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--meshes", nargs="+", default=["dp_shard=2", "cp=2", "pp=2"], help="sizes, such as dp_shard=2,cp=2"
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each after one that warms up")
    parser.add_argument("--answer", type=int, default=algorithms.ANSWER, help="the longest answer")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    algorithms.ANSWER = options.answer
    if options.rank_of is not None:
        train(sizes_of(options.rank_of), options.rounds)
        return
    alone, of_alone = seconds_of("", options)
    print(f"{'mesh':<24} seconds, CPU time over one rank's ({alone:.3g} s, {of_alone:.3g} s)")
    found = {"one_rank_s": alone, "one_rank_cpu_s": of_alone}
    for mesh in options.meshes:
        seconds, cpu = seconds_of(mesh, options)
        found |= {mesh: seconds / alone, f"{mesh} cpu": cpu / of_alone}
        print(f"{mesh:<24} {seconds / alone:.2f}, {cpu / of_alone:.2f}")
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
