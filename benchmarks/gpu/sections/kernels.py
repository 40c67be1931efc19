"""Optimizer steps of a few layers in each type and with each set of kernels that the configuration offers.

Every case is a trainer as a job makes it, of the same weights, on packed rows; its loss must be that of the first
case up to rounding. A case whose package is not on the machine, or whose GPU cannot do it, is skipped and says so.
docs/precision.md has the table of keys that this fills.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections.training import samples
from launcher.plan.machine import Capability, Machine, has_module
from launcher.preflight.hardware import check_hardware
from launcher.preflight.packages import missing_kernels
from policy_worker.errors import SettingsError
from policy_worker.model import attention
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.model import PolicyModel, prepare_model
from policy_worker.parallel import kernels
from policy_worker.parallel.group import Group
from policy_worker.process import RankEnvironment
from policy_worker.trained.trainer import Trainer
from schema.config import Config

LAYERS, LENGTHS, TINY_LENGTHS = 6, [1024] * 8, [24] * 3
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"train": {"param_dtype": "float32"}},
    "float16": {"train": {"param_dtype": "float16"}},
    "bfloat16, compiled": {"train": {"compile": True}},
    **{f"FlashAttention {version}": {"train": {"fa_version": version}} for version in (2, 3, 4)},
    **{
        f"fp8, {recipe}, compiled": {
            "train": {"compile": True, "fp8": {"enable_fp8": True, "quant_recipe": recipe}}
        }
        for recipe in ("rowwise", "tensorwise")
    },
    "Liger's kernels": {"policy": {"enable_liger_kernel": True}},
}
"""Liger's come last, since they replace functions of transformers for the rest of the process."""
CLOSE, CLOSE_IN_FP8 = 0.02, 0.15
"""Largest difference of a loss of about log(vocabulary)."""


def run(bench: Bench) -> None:
    if bench.tiny:
        kernels.BACKEND = "aot_eager"
    group = Group(RankEnvironment())
    first = None
    try:
        for case, sections in CASES.items():
            config = config_of(sections)
            if why := lacking(bench, config):
                if bench.on_gpu:
                    bench.skip(case, why)
                continue
            try:
                loss = measure(bench, group, config, case)
            except (SettingsError, RuntimeError) as error:
                traceback.print_exc()
                bench.row(case, "failed", why=f"{type(error).__name__}: {error}"[:500])
                continue
            first = loss if first is None else first
            bound = CLOSE_IN_FP8 if config.train.fp8.enable_fp8 else CLOSE
            error = abs(loss - first)
            bench.check(f"{case}: the loss of the first case", error < bound, loss=loss, difference=error)
    finally:
        group.close()


def config_of(sections: dict[str, Any]) -> Config:
    train = {
        "compile": False, "param_dtype": "bfloat16", "sequence_packing": True, "optm_impl": "foreach",
        "optm_warmup_steps": 0, "optm_lr": 1e-6, "train_policy": {"type": "sft"},
    }  # fmt: skip
    policy = {"parallelism": {"tp_size": 1}, "model_gradient_checkpointing": False}
    return Config.model_validate(
        {"train": train | sections.get("train", {}), "policy": policy | sections.get("policy", {})}
    )


def lacking(bench: Bench, config: Config) -> str:
    """What preflight has against this case here; "": nothing."""
    machine = Machine(1)
    if bench.on_gpu:
        capability: Capability = torch.cuda.get_device_capability()
        machine = Machine(1, ("0",), capabilities=(capability,))
    found = [*missing_kernels(config, has_module), *check_hardware(config, machine)]
    return "; ".join(problem.message for problem in found)


def measure(bench: Bench, group: Group, config: Config, case: str) -> float:
    """Time whole optimizer steps; the loss of the first one."""
    bench.free()
    layers = {} if bench.tiny else {"num_hidden_layers": LAYERS}
    lm = bench.language_model(**layers).cpu()
    attention.use_flash(config.train.fa_version)
    model = prepare_model(PolicyModel(lm), packed=True, recompute=False)
    trainer = Trainer(model, config, group, Schedule(1000))
    lengths = TINY_LENGTHS if bench.tiny else LENGTHS
    batch_of, rows = samples(lengths, bench.shape["vocab_size"]), list(range(len(lengths)))
    learned = sum(sample.learned_tokens for sample in batch_of.values())
    losses: list[float] = []

    def step() -> None:
        for batch in trainer.micro_batches(batch_of, [rows]):
            loss = -trainer.forward(batch).logprobs.sum() / learned
            if not losses:
                losses.append(float(loss.detach()))
            trainer.backward(loss)
        trainer.step(0)

    began = bench.wall(step)
    seconds = bench.seconds(step)
    peak = {"peak_gb": bench.peak_gb(step)} if bench.on_gpu else {}
    bench.row(case, first_step_s=began, step_ms=seconds * 1e3, tokens_s=sum(lengths) / seconds, **peak)
    return losses[0]
