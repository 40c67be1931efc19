"""Optimizer steps of a 1.5B model as jobs take them: bf16 on packed rows, compiled layers, attention within blocks.

Speed, MFU and memory next to its estimate; then where the time goes (attention, log-probs, the rest of forward,
backward, the optimizer, each next to what the card could do), and how often the host waits for the device.

    own prompts       16 sequences of 1,024 tokens, of which all are learned: what MFU is quoted for
    shared prompts    the same lengths, in two groups of 8 with a prompt of 512 tokens, which is computed once;
                      and the same samples with a prompt for each

    MFU = 3 (2 (N - H) T + 2 H K + 4 d L P) / seconds / peak       recomputation is not counted

with N parameters, H of the output head, T positions, K learned tokens, d = heads · head dimension, L layers, and P
pairs of a query and a key that it sees (backward is twice forward). Where all is learned that is the usual
6 N T + 6 d L Σ len². Goal: 45 %.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts import Parts, in_words, waits
from benchmarks.gpu.roofline import Work
from benchmarks.gpu.steps import Steps, config_of, each, report_failure
from benchmarks.harness import Figures
from policy_worker.parallel import kernels
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.training.profiles import Recorder, table_of, write
from schema.config.sections.profiler import SubProfilerConfig

TRACE = "training.json.gz"


class Way(NamedTuple):
    """One case. grouped: samples of a group have one prompt. shares: which is computed once."""

    compiled: bool = True
    recompute: bool = False
    grouped: bool = False
    shares: bool = False


OWN = {
    "own prompts, compiled": Way(),
    "own prompts": Way(compiled=False),
    "own prompts, compiled, recomputed": Way(recompute=True),
}
GROUPED = {
    "shared prompts, compiled": Way(grouped=True, shares=True),
    "the same without sharing, compiled": Way(grouped=True),
}
"""What matters most comes first: a section that is cut short has it. The numbers of a set are those of its first."""


def run(bench: Bench) -> None:
    if bench.tiny:
        kernels.BACKEND = "aot_eager"
    torch.set_num_threads(torch.get_num_threads())  # said once, all threads compile for the same number
    group, parts = RankGroup(RankEnvironment()), Parts(bench.on_gpu)
    try:
        with parts.within_models():
            for cases in (OWN, GROUPED):
                makers = ((case, partial(steps_of, bench, group, parts, way)) for case, way in cases.items())
                each(bench, makers, same, figures_of, after)
            profile(bench, partial(steps_of, bench, group, parts, OWN["own prompts, compiled"]))
    finally:
        group.close()


def steps_of(bench: Bench, group: RankGroup, parts: Parts, way: Way) -> Steps:
    """Float32 masters, bf16 products: FSDP2 casts, as in a job.

    At a learning rate of 0 AdamW works as ever and changes nothing: all steps see the same weights.
    """
    lengths = [32] * 8 if bench.tiny else [1024] * 16
    tokens, half = sum(lengths), len(lengths) // 2
    policy = {"model_max_length": tokens, "model_gradient_checkpointing": way.recompute}
    batch = {"type": "sft", "max_token_len_per_mini_batch": tokens}
    train = {"master_dtype": "float32", "compile": way.compiled, "train_batch_per_replica": 1, "train_policy": batch}
    prompts = {"prompt": lengths[0] // 2, "alike": half} if way.grouped else {}
    made = Steps(bench, group, config_of(train, policy), lengths, **prompts)
    made.parts = parts
    made.trainer.optimizer.set_peak_lrs((0.0,))
    if not way.shares:
        mesh = made.trainer.mesh
        made.trainer.mesh = mesh._replace(layout=replace(mesh.layout, least_spared=None))
    torch._dynamo.utils.counters["graph_break"].clear()
    return made


def same(case: str, first: Steps, steps: Steps) -> None:
    error = float((steps.logprobs[0] - first.logprobs[0]).abs().max())
    steps.bench.check(f"{case}: log-probs as in the first case", error < 0.15, largest_error=error)


def figures_of(steps: Steps) -> Figures:
    figures = steps.estimated()
    figures.pop("host_estimate_gb")
    figures["graph_breaks"] = float(sum(torch._dynamo.utils.counters["graph_break"].values()))
    flops = 3 * steps.shape.forward / steps.seconds
    return figures | {"mfu": flops / steps.bench.card.flops, "tflop_s": flops / 1e12}


def after(case: str, steps: Steps) -> None:
    """Report the parts of a step, and its waits."""
    bench, found = steps.bench, steps.parts.seconds(steps)
    whole = found.pop("step")
    for name, work in steps.shape.parts().items():
        bench.timed(f"{case}: {name}", found[name], work, of_step=found[name] / whole)
    arrival = bench.roof(Work(bus=steps.tokens * ARRIVING), found["arrival"])
    bench.row(f"{case}: arrival", ms=found["arrival"] * 1e3, **arrival, of_step=found["arrival"] / whole)
    bench.row(
        f"{case}: all parts", parts_ms=sum(found.values()) * 1e3, measured_ms=whole * 1e3,
        step_ms=steps.seconds * 1e3,
    )  # fmt: skip
    sites = waits(steps, bench.on_gpu)
    bench.row(
        f"{case}: waits of the host for the device in a step", waits=float(sites.total()), where=in_words(sites)
    )


ARRIVING = 44
"""Bytes that come to the device for a token: five numbers of 8 bytes and one of 4."""


def profile(bench: Bench, make: partial[Steps]) -> None:
    """Record one step of the first case as a job does: the trace is kept, the costliest operations are printed."""
    target = bench.kept / TRACE
    try:
        steps = make()
        recorder = Recorder(SubProfilerConfig(), steps.trainer.model)
        steps()
        recorder.start()
        steps()
        trace = recorder.stop()
        write(trace, target)
    except Exception as error:
        report_failure(bench, "a profile", error)
        return
    print(table_of(target).read_text())
    table_of(target).unlink()
    averages = trace.key_averages()
    has_kernels = not bench.on_gpu or any(event.device_time_total > 0 for event in averages)
    named = {"forward", "backward", "optimizer"} <= {event.key for event in averages}
    bench.check("a profile names ranges and kernels", has_kernels and named)
