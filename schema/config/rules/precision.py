"""Rules of number formats and of what is traded for memory and speed."""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.sections.model_keys import CheckpointingKeys
from schema.config.sections.optimizer import PrecisionKeys


def one_narrow_format(config: Config) -> list[Problem]:
    """Linear layers compute in fp8 or in fp4."""
    if not (config.train.fp8.enable_fp8 and config.train.fp4.enable_fp4):
        return []
    key, other = "train.fp4.enable_fp4", "train.fp8.enable_fp8"
    message = f"true contradicts {other} = true: a linear layer computes in one of the two"
    return [Problem(key, message, True, f"write {key} = false, or {other} = false", related=(other,))]


def overlap_is_possible(config: Config) -> list[Problem]:
    """Asynchronous tensor parallelism overlaps the communication of a mesh, by rewriting the compiled graph."""
    if not config.train.async_tp_enabled:
        return []
    key, compiled, size_key = "train.async_tp_enabled", "train.compile", "policy.parallelism.tp_size"
    size, problems = config.policy.parallelism.tp_size, []
    if size == 1:
        message = f"true overlaps the communication of tensor parallelism, and {size_key} = 1 has none"
        hint = f"write {size_key} = 2, or {key} = false"
        problems.append(Problem(key, message, True, hint, related=(size_key,)))
    elif not config.train.compile:
        message = f"true rewrites the compiled graph, and {compiled} = false compiles none"
        hint = f"write {compiled} = true, or {key} = false"
        problems.append(Problem(key, message, True, hint, related=(compiled,)))
    return problems


def _trained(config: Config) -> Iterator[tuple[str, PrecisionKeys, str, CheckpointingKeys]]:
    """Each trained model: the section of its precision, that of its model."""
    yield "train", config.train, "policy", config.policy
    if config.is_grpo and config.critic.enable:
        yield "critic", config.critic, "critic", config.critic


def recomputation_is_on(config: Config) -> list[Problem]:
    """What is recomputed in backward matters when something is."""
    problems = []
    for section, keys, owner, model in _trained(config):
        switch = f"{owner}.model_gradient_checkpointing"
        if model.model_gradient_checkpointing:
            continue
        for name, neutral in (("recompute_granularity", "full"), ("recompute_moe_layers", False)):
            value = getattr(keys, name)
            if value != neutral:
                shown = "true" if value is True else f'"{value}"'
                message = f"{shown} has no effect: {switch} = false recomputes nothing"
                hint = f"write {switch} = true, or leave it out"
                problems.append(Problem(f"{section}.{name}", message, value, hint, related=(switch,)))
    return problems


def wrapping_is_one_way(config: Config) -> list[Problem]:
    """FSDP shards modules by class or by size."""
    problems = []
    choices = [
        (section, keys.fsdp_wrap_layers, keys.fsdp_wrap_min_params)
        for section, keys, _, _ in _trained(config)
    ]
    reference = config.reference
    choices.append(("reference", reference.fsdp_wrap_layers, reference.fsdp_wrap_min_params))
    for section, layers, size in choices:
        if layers and size:
            key, other = f"{section}.fsdp_wrap_min_params", f"{section}.fsdp_wrap_layers"
            message = f"{size} chooses modules by size, and {other} = {layers} by class"
            hint = f"write {key} = 0, or {other} = []"
            problems.append(Problem(key, message, size, hint, related=(other,)))
    return problems


def casts_are_fused(config: Config) -> list[Problem]:
    """Warning: scaling and casting cost more than a narrow product saves, unless the compiler fuses them."""
    if config.train.compile:
        return []
    enabled = {"fp8": config.train.fp8.enable_fp8, "fp4": config.train.fp4.enable_fp4}
    warnings = []
    for name in (name for name, on in enabled.items() if on):
        key, other = f"train.{name}.enable_{name}", "train.compile"
        message = f"true casts in steps of their own while {other} = false: slower than bfloat16 as a rule"
        warnings.append(Problem(key, message, True, f"write {other} = true", related=(other,)))
    return warnings


PRECISION_RULES = (one_narrow_format, overlap_is_possible, recomputation_is_on, wrapping_is_one_way)
PRECISION_WARNINGS = (casts_are_fused,)
