"""Optimizer steps of a 1.5B model in bf16 on packed rows: tokens per second, MFU, and memory next to its estimate.

Cases: packed rows of 4,096 and 16,384 tokens, with and without compiled layers, with and without recomputation; and
two ways of attention: transformers' `sdpa` with the mask that it makes for packed rows, and variable-length flash
attention (`torch.nn.attention.varlen`), which needs no mask and skips what the mask would hide.

    MFU = (6 N T + 6 d Σ len²) / seconds / 989 TFLOP/s        recomputation is not counted

with N parameters, T tokens, and Σ len² over the sequences of the row times layers (forward 2 d len², causal; backward
twice that), d = heads · head dimension. Goal: 45 %.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from launcher.preflight import memory
from launcher.preflight.models import find_model
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.micro_batch import Segment, TrainSample
from policy_worker.model.model import PolicyModel
from policy_worker.parallel.group import Group
from policy_worker.process import RankEnvironment
from policy_worker.trained.trainer import Trainer
from policy_worker.training.profiles import Recorder, table_of, write
from schema.config import Config
from schema.config.sections.profiler import SubProfilerConfig

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 (SXM)."""
ROWS = {"4k": [512] * 8, "16k": [1024] * 16}
"""Lengths of the sequences in a packed row."""
TINY_ROWS = {"4k": [24] * 4, "16k": [32] * 8}
VARLEN, TRACE = "varlen", "training.json.gz"
CASES = [
    (VARLEN, True, False),
    *((VARLEN, False, recompute) for recompute in (False, True)),
    *(("sdpa", compiled, False) for compiled in (True, False)),
    (VARLEN, True, True),
]
"""Attention, compiled layers, recomputation. What matters most comes first: a section that is cut short has it; what
torch has had most trouble with comes last."""


def run(bench: Bench) -> None:
    register_varlen()
    torch.set_num_threads(torch.get_num_threads())  # said once, all threads compile for the same number
    group = Group(RankEnvironment())
    first: dict[str, Tensor] = {}
    made: tuple[Trainer, list[torch.nn.Module]] | None = None
    try:
        for attention, compiled, recompute in CASES:
            for name, lengths in (TINY_ROWS if bench.tiny else ROWS).items():
                case = f"{name}, {attention}" + ", compiled" * compiled + ", recomputed" * recompute
                made = made or make_trainer(bench, group)
                try:
                    set_up(*made, attention, compiled=compiled, recompute=recompute, tiny=bench.tiny)
                    logprobs = measure(bench, made[0], lengths, case)
                except Exception as error:  # of compilers and kernels: the other cases are worth having
                    traceback.print_exc()
                    bench.row(case, "failed", why=f"{type(error).__name__}: {error}"[:500])
                    made = None  # FSDP2 may be in the middle of a step
                    bench.free()
                    continue
                if name in first:
                    error = float((logprobs - first[name]).abs().max())
                    bench.check(f"{case}: log-probs as in the first case", error < 0.15, largest_error=error)
                first.setdefault(name, logprobs)
        profile(bench, *(made or make_trainer(bench, group)))
    finally:
        group.close()


def make_trainer(bench: Bench, group: Group) -> tuple[Trainer, list[torch.nn.Module]]:
    """Float32 masters, bf16 products: FSDP2 casts, as in a job. And the decoder layers.

    At a learning rate of 0 AdamW works as ever and changes nothing: all cases see the same weights.
    """
    lm = bench.language_model()
    lm.train()
    model = PolicyModel(lm)
    layers = model.decoder_layers()
    trainer = Trainer(model, config_of(recompute=False), group, Schedule(1000))
    trainer.optimizer.set_peak_lrs((0.0,))
    return trainer, layers


def set_up(
    trainer: Trainer,
    layers: Sequence[torch.nn.Module],
    attention: str,
    *,
    compiled: bool,
    recompute: bool,
    tiny: bool,
) -> None:
    """Change how the same model is computed. Layers are compiled one by one: hooks of FSDP2 stay outside."""
    lm = trainer.model.lm
    lm.set_attn_implementation(attention)
    if recompute:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        lm.gradient_checkpointing_disable()
    for layer in layers:
        layer.__dict__.pop("forward", None)
        if compiled:
            backend = "aot_eager" if tiny else "inductor"
            layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)


def config_of(*, recompute: bool, tokens: int = 0) -> Config:
    batch = {"type": "sft", **({"max_token_len_per_mini_batch": tokens} if tokens else {})}
    return Config.model_validate(
        {
            "policy": {
                "model_name_or_path": "random",
                "model_max_length": tokens or 1024,
                "model_gradient_checkpointing": recompute,
            },
            "train": {
                "param_dtype": "bfloat16",
                "master_dtype": "float32",
                "sequence_packing": True,
                "compile": False,
                "optm_impl": "fused",
                "optm_lr": 1e-6,
                "train_batch_per_replica": 1,
                "train_policy": batch,
            },
        }
    )


def samples(lengths: Sequence[int], vocabulary: int) -> dict[int, TrainSample]:
    """Sequences of which every token is learned, as MFU counts them."""
    rng = np.random.default_rng(0)
    made = {}
    for row, length in enumerate(lengths):
        ids = rng.integers(0, vocabulary, length + 1, dtype=np.int32)
        mask = (np.arange(length + 1) > 0).astype(np.uint8)
        made[row] = TrainSample([Segment(ids, mask, None)])
    return made


def measure(bench: Bench, trainer: Trainer, lengths: Sequence[int], case: str) -> Tensor:
    """Time whole optimizer steps; the log-probs."""
    seen: list[Tensor] = []
    step = stepper(bench, trainer, lengths, seen)
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    began = bench.wall(step)
    seconds = bench.seconds(step)
    peak = bench.peak_gb(step) + allocated_gb(bench)
    tokens = sum(lengths)
    figures = {"tokens_s": tokens / seconds, "step_ms": seconds * 1e3, "first_step_s": began}
    if "compiled" in case:
        figures["graph_breaks"] = float(sum(breaks.values()))
    if bench.on_gpu:
        flops = flops_of(bench, trainer, lengths)
        figures |= {"mfu": flops / seconds / PEAK_FLOPS, "tflop_s": flops / seconds / 1e12, "peak_gb": peak}
    bench.row(case, **figures, estimate_gb=estimate_gb(trainer, tokens))
    return seen[0]


def stepper(bench: Bench, trainer: Trainer, lengths: Sequence[int], seen: list[Tensor]) -> Callable[[], None]:
    """One optimizer step on a row of sequences of these lengths. seen: gets the log-probs of the first."""
    batch_of, rows = samples(lengths, bench.shape["vocab_size"]), list(range(len(lengths)))
    learned = sum(sample.learned_tokens for sample in batch_of.values())
    CUTS.set(lengths, bench.device)

    def step() -> None:
        for batch in trainer.micro_batches(batch_of, [rows]):
            out = trainer.forward(batch)
            if not seen:
                seen.append(out.logprobs.detach().clone())
            trainer.backward(-out.logprobs.sum() / learned)
        trainer.step(0)

    return step


def profile(bench: Bench, trainer: Trainer, layers: list[torch.nn.Module]) -> None:
    """Record one step of the first case as a job does: the trace is kept, the costliest operations are printed."""
    attention, compiled, recompute = CASES[0]
    lengths = (TINY_ROWS if bench.tiny else ROWS)["16k"]
    target = bench.kept / TRACE
    try:
        set_up(trainer, layers, attention, compiled=compiled, recompute=recompute, tiny=bench.tiny)
        step = stepper(bench, trainer, lengths, [])
        recorder = Recorder(SubProfilerConfig(), trainer.model)
        step()
        recorder.start()
        step()
        trace = recorder.stop()
        write(trace, target)
    except Exception as error:
        traceback.print_exc()
        bench.row("a profile", "failed", why=f"{type(error).__name__}: {error}"[:500])
        return
    print(table_of(target).read_text())
    table_of(target).unlink()
    found = trace.key_averages()
    kernels = not bench.on_gpu or any(event.device_time_total > 0 for event in found)
    named = {"forward", "backward", "optimizer"} <= {event.key for event in found}
    bench.check("a profile names ranges and kernels", kernels and named)


def allocated_gb(bench: Bench) -> float:
    return torch.cuda.memory_allocated() / 1e9 if bench.on_gpu else 0.0


def flops_of(bench: Bench, trainer: Trainer, lengths: Sequence[int]) -> float:
    shape = bench.shape
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    width = shape["num_attention_heads"] * shape["head_dim"]
    squares = shape["num_hidden_layers"] * sum(length**2 for length in lengths)
    return float(6 * parameters * sum(lengths) + 6 * width * squares)


def estimate_gb(trainer: Trainer, tokens: int) -> float:
    """What `--dry-run` says of one rank for a row of so many tokens."""
    recompute = trainer.model.lm.is_gradient_checkpointing
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.lm.config.save_pretrained(folder)
        model = find_model(folder, None, {})
    config = config_of(recompute=recompute, tokens=tokens)
    return sum(part.bytes for part in memory.trainer(config, model, 1, 1)) / 1e9


# ---- attention without a mask -------------------------------------------------------------------------------------


class Cuts:
    """Where the sequences of the packed row begin and end: set before each row, read in every layer.

    cumulative: int32 [sequences + 1]. longest: of the sequences.
    """

    cumulative: Tensor
    longest: int

    def set(self, lengths: Sequence[int], device: torch.device) -> None:
        ends = np.concatenate([[0], np.cumsum(lengths)])
        self.cumulative = torch.tensor(ends, dtype=torch.int32, device=device)
        self.longest = max(lengths)


CUTS = Cuts()


def register_varlen() -> None:
    """Make `attn_implementation = "varlen"` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(VARLEN, attend)
    AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """[1, heads, T, d] each; attention within each sequence. On a CPU, which has no such kernel, one by one."""
    from torch.nn.attention.varlen import varlen_attn

    repeats = query.shape[1] // key.shape[1]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
    ends, longest = CUTS.cumulative, CUTS.longest
    if query.is_cuda:
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out[None], None
    cut = [tensor.transpose(0, 1).split(longest, dim=1) for tensor in (q, k, v)]  # rows of equal sequences
    parts = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, scale=scaling)
        for part in zip(*cut, strict=True)
    ]
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None
