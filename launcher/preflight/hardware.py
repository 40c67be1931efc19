"""What the chosen numerics and kernels ask of the GPUs: fp8, fp4, FlashAttention exist from some generation on.

A GPU whose generation is unknown is taken to be able: a wrong refusal would be worse than the worker's own error.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.machine import Capability, Machine
from schema.config import Config, Problem

_FP8: Capability = (8, 9)
"""Ada and Hopper are the first whose matrix units multiply fp8."""
_FP4: Capability = (10, 0)
"""Blackwell is the first whose matrix units multiply fp4."""
_KERNELS: Capability = (7, 0)
"""Volta is the first that Triton compiles for, and with it Liger's kernels."""
_FLASHINFER: Capability = (7, 5)
"""Turing is the first of flashinfer's."""
_FLASH: dict[int, tuple[Capability, Capability | None]] = {
    2: ((8, 0), None),
    3: ((9, 0), (9, 9)),
    4: ((9, 0), None),
}
"""FlashAttention version -> first and last generation: 2 from Ampere on, 3 Hopper alone, 4 from Hopper on."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A key whose value needs a GPU of some generations, and what to write where there is none."""

    key: str
    value: bool | int | str
    what: str
    first: Capability
    last: Capability | None
    remedy: str


def check_hardware(config: Config, machine: Machine) -> list[Problem]:
    """Numerics that this machine's GPUs cannot do, one problem each; without GPUs none of them."""
    problems = []
    for wish in _wishes(config):
        if not machine.gpus:
            message = f"{wish.what} needs a GPU, and this machine has none that the installed torch can use"
            problems.append(Problem(wish.key, message, wish.value, wish.remedy))
            continue
        unable = [found for found in machine.capabilities if found is not None and not _able(found, wish)]
        if unable:
            needed = f"{_text(wish.first)}" + (
                " or later" if wish.last is None else f" to {_text(wish.last)}"
            )
            message = (
                f"{wish.what} needs GPUs of compute capability {needed}, and this machine has one of "
                f"{_text(min(unable))}"
            )
            problems.append(Problem(wish.key, message, wish.value, wish.remedy))
    return problems


def _wishes(config: Config) -> list[Wish]:
    train, wishes = config.train, []
    if train.fp8.enable_fp8:
        key = "train.fp8.enable_fp8"
        wishes.append(Wish(key, True, "fp8 training", _FP8, None, f"write {key} = false"))
    if train.fp4.enable_fp4:
        key = "train.fp4.enable_fp4"
        wishes.append(Wish(key, True, "fp4 training", _FP4, None, f"write {key} = false"))
    if train.fa_version is not None:
        key, version = "train.fa_version", train.fa_version
        first, last = _FLASH[version]
        wishes.append(Wish(key, version, f"FlashAttention {version}", first, last, "leave it out"))
    if config.policy.enable_liger_kernel:
        key = "policy.enable_liger_kernel"
        wishes.append(Wish(key, True, "a Liger kernel", _KERNELS, None, f"write {key} = false"))
    return wishes + (_engine_wishes(config) if config.is_grpo else [])


def _engine_wishes(config: Config) -> list[Wish]:
    rollout, wishes = config.rollout, []
    flashinfer = {
        "rollout.vllm_use_flashinfer": rollout.vllm_use_flashinfer,
        "rollout.sampling_config.use_flashinfer": rollout.sampling_config.use_flashinfer,
    }
    for key in (key for key, wanted in flashinfer.items() if wanted):
        wishes.append(Wish(key, True, "flashinfer", _FLASHINFER, None, f"write {key} = false"))
    return wishes


def _able(found: Capability, wish: Wish) -> bool:
    return wish.first <= found and (wish.last is None or found <= wish.last)


def _text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
