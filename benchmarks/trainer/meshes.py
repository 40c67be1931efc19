"""What it costs to cut a policy over ranks: a training step on each mesh, over the step of one rank.

    python -m benchmarks.trainer.meshes [--meshes dp_shard=2,cp=2,tp=2/sequence=1] [--rounds 5] [--answer 96]

GRPO on 8 groups of 8 samples, prompts of 32 tokens and answers of up to `--answer`, packed, in micro-batches of 16
samples, with stages of 8; a model of random weights with 20M parameters, float32, gloo, one thread for each rank. A
mesh is a job of its own, and a figure the median over rounds of the seconds of a step over those of one rank alone:
1 / ranks would be ideal on as many cores. CPU time is that of all ranks over that of one.
"""

from __future__ import annotations

import json
import math
import statistics
import time

from benchmarks.harness import in_turns, on_ranks, options, report, timed
from benchmarks.trainer.material import ANSWER, PROMPT, config_of, language_model, samples, step_of
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import prepare_model
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment

ALONE = "one"


def sizes_of(mesh: str) -> dict[str, int]:
    """`tp=2/sequence=1` as sizes of a mesh and its switches; `one` has none."""
    pairs = (part.split("=") for part in mesh.split("/") if part != ALONE)
    return {name: int(size) for name, size in pairs}


def train(sizes: dict[str, int], rounds: int, answer: int) -> None:
    """One rank of a mesh; the first prints the median seconds of a step, and the CPU time of all ranks."""
    group = RankGroup(RankEnvironment.of_environ())
    group.arrange(ParallelDims(**sizes) if sizes else ParallelDims())
    pieces, parted = group.sizes.cp, group.sizes.sequence
    model = prepare_model(
        PolicyModel(language_model("20M")), packed=True, recompute=False, pieces=pieces, parted=parted
    )
    stages = {"pp_size": group.sizes.pp, "pp_micro_batch_size": 8}
    config = config_of({"train": {"sequence_packing": True}, "policy.parallelism": stages})
    step = step_of(group, config, model, samples(PROMPT, answer))

    def measured() -> tuple[float, float]:
        group.barrier()
        spent = time.process_time()
        seconds = timed(lambda: (step(), group.barrier()))
        return seconds, time.process_time() - spent

    seconds, cpu = zip(*in_turns({"step": measured}, rounds)["step"], strict=True)
    all_cpu = group.gather(statistics.median(cpu))
    if group.leads:
        print(json.dumps([statistics.median(seconds), sum(all_cpu)]))
    group.close()


def main() -> None:
    given = options(
        __doc__, rounds=5, meshes=(["dp_shard=2", "cp=2", "pp=2"], "sizes, such as dp_shard=2/cp=2"),
        answer=(ANSWER, "tokens of the longest answer"), rank_of=(str, "(of a rank)"),
    )  # fmt: skip
    if given.rank_of is not None:
        train(sizes_of(given.rank_of), given.rounds, given.answer)
        return
    taken = {}
    for mesh in (ALONE, *given.meshes):
        arguments = "--rank-of", mesh, "--rounds", str(given.rounds), "--answer", str(given.answer)
        taken[mesh] = on_ranks(math.prod(sizes_of(mesh).values()), "benchmarks.trainer.meshes", *arguments)
    alone, cpu_alone = taken[ALONE]
    rows = {
        mesh: {"seconds": seconds, "over one rank's": seconds / alone, "CPU time over one rank's": cpu / cpu_alone}
        for mesh, (seconds, cpu) in taken.items()
    }
    report(given, {"one_rank_s": alone, "one_rank_cpu_s": cpu_alone, "meshes": rows}, rows)


if __name__ == "__main__":
    main()
