"""Checks of the hardware of this machine: GPUs that can be opened; numerics and kernels that a job needs of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from launcher.plan.credentials import without_secrets
from launcher.plan.machine import Capability, Machine, has_module
from schema.config import Config, Problem
from schema.config.model_facts import BrokenModelError, read_facts
from schema.util.gpus import reason

PROBE_TIMEOUT = 180.0
"""Seconds. A cold import of PyTorch from a network disk takes a minute, and a driver that starts ten seconds."""

PROBE = """\
import json, torch
try:
    torch.cuda.init()
    error, count = "", torch.cuda.device_count()
except Exception as problem:
    error, count = str(problem) or type(problem).__name__, 0
print(json.dumps({"error": error, "count": count, "cuda": torch.version.cuda, "torch": torch.__version__}))
"""

# fp8 and FlashAttention exist from some generation of GPUs on. A GPU whose generation is unknown is taken to be
# able: a wrong refusal would be worse than the worker's own error.

ANY_LATER: Capability = (99, 0)
SWITCHES: dict[str, tuple[str, Capability]] = {
    "train.fp8.enable_fp8": ("fp8 training", (8, 9)),  # Ada and Hopper are the first that multiply fp8
    "policy.enable_liger_kernel": ("a Liger kernel", (7, 0)),  # Volta is the first that Triton compiles for
    "rollout.vllm_use_flashinfer": ("flashinfer", (7, 5)),  # Turing
    "rollout.sampling_config.use_flashinfer": ("flashinfer", (7, 5)),
}
"""Key that is true or false -> what it switches on, and the first generation of GPUs that can do it."""
FLASH_ATTENTION: dict[int, tuple[Capability, Capability]] = {
    2: ((8, 0), ANY_LATER),
    3: ((9, 0), (9, 9)),
    4: ((9, 0), ANY_LATER),
}
"""Version -> first and last generation: 2 from Ampere on, 3 Hopper alone, 4 from Hopper on."""


def check_gpus_open(machine: Machine) -> tuple[list[Problem], list[Problem]]:
    """Return problems and warnings of GPUs that PyTorch cannot open; takes seconds where there are GPUs.

    A problem is that it opens none. What may be a matter of time, or of GPUs that the job does not use, is a warning:
    each worker looks at its own.
    """
    if not (gpus := machine.gpus) or not machine.is_here or not has_module("torch"):  # it is named elsewhere
        return [], []
    hint = (
        "install that driver, or a PyTorch for the one that is there; in a container look at its devices "
        '(docker run --gpus all); or start with CUDA_VISIBLE_DEVICES="" to compute on the CPU'
    )
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT,
            check=True,
            env=without_secrets(os.environ) | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)},
        )
        answer = json.loads(probe.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        message = f"PyTorch does not answer within {PROBE_TIMEOUT:.0f} s about the GPUs of this machine"
        return [], [Problem("", message, hint="look at nvidia-smi, and at the disk that PyTorch is installed on")]
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        words = (getattr(error, "stderr", "") or str(error)).strip().splitlines() or [type(error).__name__]
        return [Problem("", f"PyTorch cannot be asked about the GPUs of this machine: {words[-1]}", hint=hint)], []
    if not (message := unusable(gpus, answer)):
        return [], []
    if answer["count"]:
        return [], [Problem("", message, hint="name those that work in CUDA_VISIBLE_DEVICES; look at nvidia-smi")]
    return [Problem("", message, hint=hint)], []


def unusable(gpus: Sequence[str], answer: Mapping[str, Any]) -> str:
    """Return what is wrong with GPUs by the probe's answer; "" if nothing is.

    Of several MIG devices a process sees one, whichever are listed: each process of a job has its own.
    """
    there, named = f"this machine has GPU{'s' * (len(gpus) > 1)} {', '.join(gpus)}", f"PyTorch {answer['torch']}"
    if answer["error"]:
        return f"{there}, and {named} cannot open them: {reason(answer['error'], answer['cuda'])}"
    whole = [name for name in gpus if not name.startswith("MIG-")]
    if answer["count"] < max(1, len(whole)):
        return f"{there}, and {named} can open {answer['count']} of them"
    return ""


def slow_on_gpus(config: Config, machine: Machine) -> list[Problem]:
    """Return defaults that are not written in the configuration and cost GPUs much of their speed, one warning each.

    They are those of the schema as published, for any machine. A key that is written, whatever its value, is meant.
    """
    train, policy, rollout = config.train, config.policy, config.rollout
    problems: list[Problem] = []
    if not machine.gpus or config.is_evaluation:
        return problems

    def unwritten(section: BaseModel, key: str) -> bool:
        return key not in section.model_fields_set

    eager = rollout.backend == "vllm" and rollout.enforce_eager
    if config.generates and eager and unwritten(rollout, "enforce_eager"):
        message = "true, by default, keeps vLLM from CUDA graphs: each token waits for hundreds of kernels"
        hint = "write false: half a minute more at the start of a replica"
        problems.append(Problem("rollout.enforce_eager", message, True, hint))
    if not train.sequence_packing and unwritten(train, "sequence_packing"):
        message = "false, by default: what pads samples to the longest of their micro-batch is computed, too"
        problems.append(Problem("train.sequence_packing", message, False, "write true: the same numbers"))
    batches = train.train_policy
    if batches.max_token_len_per_mini_batch is None and unwritten(batches, "mini_batch"):
        message = f"micro-batches of {batches.mini_batch} samples, by default, leave most of a GPU idle"
        hint = "write train.train_policy.max_token_len_per_mini_batch = 16384, or what --dry-run finds room for"
        problems.append(Problem("train.train_policy.mini_batch", message, batches.mini_batch, hint))
    if (
        policy.model_gradient_checkpointing
        and train.recompute_granularity == "full"
        and unwritten(policy, "model_gradient_checkpointing")
    ):
        message = "true, by default, computes the forward of each layer twice: a third more arithmetic"
        hint = 'write false where --dry-run finds room, or train.recompute_granularity = "selective"'
        problems.append(Problem("policy.model_gradient_checkpointing", message, True, hint))
    return problems


def check_hardware(config: Config, machine: Machine) -> list[Problem]:
    """Numerics that this machine's GPUs cannot do, one problem each; without GPUs none of them."""
    problems = []
    for key, (feature, first) in SWITCHES.items():
        if attrgetter(key)(config) and (config.generates or not key.startswith("rollout.")):
            problems.append(_unable(machine, key, True, feature, first, ANY_LATER, f"write {key} = false"))
    if (version := config.train.fa_version) is not None:
        feature, (first, last) = f"FlashAttention {version}", FLASH_ATTENTION[version]
        problems.append(_unable(machine, "train.fa_version", version, feature, first, last, "leave it out"))
    return [problem for problem in problems if problem is not None]


def _unable(
    machine: Machine, key: str, value: bool | int, feature: str, first: Capability, last: Capability, remedy: str
) -> Problem | None:
    """The problem of a value that needs GPUs from `first` to `last`; None where the machine has them."""
    if not machine.gpus:
        message = f"{feature} needs a GPU, and this machine has none that the installed torch can use"
        return Problem(key, message, value, remedy)
    unable = [
        capability
        for capability in machine.capabilities
        if capability is not None and not first <= capability <= last
    ]
    if not unable:
        return None
    needed = _text(first) + (" or later" if last == ANY_LATER else f" to {_text(last)}")
    message = f"{feature} needs GPUs of compute capability {needed}, and this machine has one of {_text(min(unable))}"
    return Problem(key, message, value, remedy)


def check_engine_hardware(config: Config, machine: Machine) -> list[Problem]:
    """Settings of an engine that need a GPU; none where there are GPUs."""
    rollout, engine = config.rollout, config.rollout.engine
    if machine.gpus or not config.generates:
        return []
    problems, mesh = [], rollout.parallelism
    none = "and this machine has none that the installed torch can use"
    if mesh.ep_size > 1 and not engine.one_device:
        key = "rollout.parallelism.ep_size"
        message = f"{engine.title} shares experts among GPUs (its kernel for a CPU takes all of them), {none}"
        hint = f"write {key} = 1: tp_size = {mesh.tp_size} cuts each expert"
        problems.append(Problem(key, message, mesh.ep_size, hint))
    elif mesh.dp_shard_size > 1 and not engine.one_device and _has_experts(config):
        key = "rollout.parallelism.dp_shard_size"
        message = f"copies of {engine.title} exchange the tokens of a mixture of experts among GPUs, {none}"
        hint = f"write {key} = 1, and a larger rollout.parallelism.n_init_replicas"
        problems.append(Problem(key, message, mesh.dp_shard_size, hint))
    if rollout.quantization in engine.quantisations:
        key, able = "rollout.quantization", sorted(engine.cpu_quantisations)
        hint = f'write {key} = "none"'
        if rollout.quantization not in able:
            message = f"{engine.title} quantises so on a GPU, {none}"
            problems.append(
                Problem(key, message, rollout.quantization, f"{hint}, or one of {', '.join(able)} on a CPU")
            )
        elif not _has_amx():
            message = f"{engine.title} computes with it on a GPU or a CPU with AMX tiles, and this CPU has none"
            problems.append(Problem(key, message, rollout.quantization, hint))
    return problems


def _has_experts(config: Config) -> bool:
    policy = config.policy
    try:
        facts = read_facts(policy.model_name_or_path, policy.model_revision, policy.override_config)
    except BrokenModelError:
        return False
    return facts is not None and bool(facts.experts)


def _has_amx() -> bool:
    """Whether this machine's CPU multiplies tiles; one of which nothing is known is taken to be able."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


def _text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
