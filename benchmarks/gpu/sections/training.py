"""Optimizer steps of a 1.5B model in bf16 on packed rows: tokens per second, MFU, and memory next to its estimate.

Cases: packed rows of 4,096 and 16,384 tokens, with and without compiled layers, with and without recomputation; and
two ways of attention: within the blocks of a row, as a job computes it, and transformers' `sdpa` with the mask that
it makes for packed rows.

    MFU = (6 N T + 6 d Σ len²) / seconds / 989 TFLOP/s        recomputation is not counted

with N parameters, T tokens, and Σ len² over the sequences of the row times layers (forward 2 d len², causal; backward
twice that), d = heads · head dimension. Goal: 45 %.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.steps import Steps, config_of, each
from benchmarks.harness import Figures
from policy_worker.model import attention
from policy_worker.parallel import kernels
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.training.profiles import Recorder, table_of, write
from schema.config.sections.profiler import SubProfilerConfig

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 (SXM)."""
ROWS = {"16k": [1024] * 16, "4k": [512] * 8}
"""Lengths of the sequences in a packed row."""
TINY_ROWS = {"16k": [32] * 8, "4k": [24] * 4}
BLOCKS, TRACE = attention.NAME, "training.json.gz"
CASES = [
    (BLOCKS, True, False),
    *((BLOCKS, False, recompute) for recompute in (False, True)),
    *(("sdpa", compiled, False) for compiled in (True, False)),
    (BLOCKS, True, True),
]
"""Attention, compiled layers, recomputation. What matters most comes first: a section that is cut short has it; what
torch has had most trouble with comes last."""


def run(bench: Bench) -> None:
    if bench.tiny:
        kernels.BACKEND = "aot_eager"
    torch.set_num_threads(torch.get_num_threads())  # said once, all threads compile for the same number
    group = RankGroup(RankEnvironment())
    try:
        for name, lengths in (TINY_ROWS if bench.tiny else ROWS).items():
            cases = {
                f"{name}, {way}" + ", compiled" * compiled + ", recomputed" * recompute: (way, compiled, recompute)
                for way, compiled, recompute in CASES
            }
            makers = ((case, partial(steps_of, bench, group, lengths, *keys)) for case, keys in cases.items())
            each(bench, makers, same, figures_of)
        profile(bench, steps_of(bench, group, (TINY_ROWS if bench.tiny else ROWS)["16k"], *CASES[0]))
    finally:
        group.close()


def steps_of(
    bench: Bench, group: RankGroup, lengths: Sequence[int], way: str, compiled: bool, recompute: bool
) -> Steps:
    """Float32 masters, bf16 products: FSDP2 casts, as in a job.

    At a learning rate of 0 AdamW works as ever and changes nothing: all steps see the same weights.
    """
    tokens = sum(lengths)
    policy = {"model_max_length": tokens, "model_gradient_checkpointing": recompute}
    batch = {"type": "sft", "max_token_len_per_mini_batch": tokens}
    train = {"master_dtype": "float32", "compile": compiled, "train_batch_per_replica": 1, "train_policy": batch}
    made = Steps(bench, group, config_of(train, policy), lengths)
    made.trainer.optimizer.set_peak_lrs((0.0,))
    made.trainer.model.lm.set_attn_implementation(way)
    torch._dynamo.utils.counters["graph_break"].clear()
    return made


def same(case: str, first: Steps, steps: Steps) -> None:
    error = float((steps.logprobs[0] - first.logprobs[0]).abs().max())
    steps.bench.check(f"{case}: log-probs as in the first case", error < 0.15, largest_error=error)


def figures_of(steps: Steps) -> Figures:
    figures = steps.estimated()
    figures.pop("host_estimate_gb")
    if steps.config.train.compile:
        figures["graph_breaks"] = float(sum(torch._dynamo.utils.counters["graph_break"].values()))
    if steps.bench.on_gpu:
        flops = flops_of(steps) / steps.bench.seconds(steps)
        figures |= {"mfu": flops / PEAK_FLOPS, "tflop_s": flops / 1e12}
    return figures


def flops_of(steps: Steps) -> float:
    """Count the floating-point operations of one step."""
    shape = steps.bench.shape
    parameters = sum(parameter.numel() for parameter in steps.trainer.model.parameters())
    width = shape["num_attention_heads"] * shape["head_dim"]
    squares = shape["num_hidden_layers"] * sum(length**2 for length in steps.lengths)
    return float(6 * parameters * steps.tokens + 6 * width * squares)


def profile(bench: Bench, steps: Steps) -> None:
    """Record one step of the first case as a job does: the trace is kept, the costliest operations are printed."""
    target = bench.kept / TRACE
    try:
        recorder = Recorder(SubProfilerConfig(), steps.trainer.model)
        steps()
        recorder.start()
        steps()
        trace = recorder.stop()
        write(trace, target)
    except Exception as error:
        traceback.print_exc()
        bench.row("a profile", "failed", why=f"{type(error).__name__}: {error}"[:500])
        return
    print(table_of(target).read_text())
    table_of(target).unlink()
    averages = trace.key_averages()
    has_kernels = not bench.on_gpu or any(event.device_time_total > 0 for event in averages)
    named = {"forward", "backward", "optimizer"} <= {event.key for event in averages}
    bench.check("a profile names ranges and kernels", has_kernels and named)
