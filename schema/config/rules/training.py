"""Rules of how a model is trained: the learning-rate schedule, number formats and memory."""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written
from schema.config.sections.model_keys import CheckpointingKeys
from schema.config.sections.optimizer import OptimizerKeys, PrecisionKeys

_STEPS = "train.max_num_steps"


def _optimizers(config: Config) -> Iterator[tuple[str, OptimizerKeys]]:
    yield "train", config.train
    if config.critic.enable and config.is_grpo:
        yield "critic", config.critic


def _decays(keys: OptimizerKeys) -> bool:
    return keys.optm_decay_type not in (None, "none")


def warmup_is_a_share_or_steps(config: Config) -> Iterator[Problem]:
    """A float is a share of all steps, and shares add up to at most all of them."""
    for section, keys in _optimizers(config):
        key, warmup = f"{section}.optm_warmup_steps", keys.optm_warmup_steps
        ratio, decay = f"{section}.optm_decay_ratio", keys.optm_decay_ratio or 0.0
        if not isinstance(warmup, float):
            continue
        if warmup > 1.0:
            message = f"a float is a share of all steps, at most 1.0, got {warmup}"
            whole = warmup.is_integer()
            hint = f"write {key} = {int(warmup)} for steps" if whole else "for steps write an integer"
            yield Problem(key, message, warmup, hint)
        elif warmup + decay > 1.0:
            message = f"decay ({decay}) and {key} = {warmup} together are more than all steps"
            hint = f"write {ratio} = {int((1.0 - warmup) * 100) / 100}, or less of both"
            yield Problem(ratio, message, decay, hint, related=(key,))


def decay_is_complete(config: Config) -> Iterator[Problem]:
    """A decay has a shape and a length; without both, keys of the decay would do nothing."""
    for section, keys in _optimizers(config):
        shape = keys.optm_decay_type
        ratio_key, steps_key = f"{section}.optm_decay_ratio", f"{section}.optm_decay_steps"
        type_key, factor_key = f"{section}.optm_decay_type", f"{section}.optm_min_lr_factor"
        ratio, steps, related = keys.optm_decay_ratio or 0.0, keys.optm_decay_steps, (type_key, ratio_key)
        lengths = [(key, value) for key, value in ((ratio_key, ratio), (steps_key, steps)) if value]
        if len(lengths) == 2:
            message = f"{steps} contradicts {ratio_key} = {ratio}: both are the length of the decay"
            hint = f"leave it out, or write {ratio_key} = 0.0"
            yield Problem(steps_key, message, steps, hint, related=(ratio_key,))
        if shape == "inverse_sqrt":
            for key, value in lengths:
                message = (
                    f'has no effect with {type_key} = "inverse_sqrt", which decays from the end of warm-up on'
                )
                yield Problem(key, message, value, "leave it out", related=(type_key,))
        elif _decays(keys) and not lengths:
            message = f"a {shape} decay needs the share of steps over which it happens ({ratio_key})"
            hint = f"write {ratio_key} = 0.2, or another share in (0.0, 1.0]"
            yield Problem(type_key, message, shape, hint, related=related)
        if not _decays(keys):
            message = f"has no effect without a decay ({type_key})"
            for key, value in lengths:
                hint = f'write {type_key} = "linear", "cosine", "sqrt" or "wsd", or leave it out'
                yield Problem(key, message, value, hint, related=related)
            if keys.optm_min_lr_factor:
                hint = "leave it out, or write a decay too"
                yield Problem(factor_key, message, keys.optm_min_lr_factor, hint, related=related)


def decay_fits_the_run(config: Config) -> Iterator[Problem]:
    """Where the length of the run is stated, the steps of warm-up and decay are not more."""
    total = config.train.max_num_steps
    for section, keys in _optimizers(config):
        warmup, steps = keys.optm_warmup_steps, keys.optm_decay_steps
        if total is None or steps is None or isinstance(warmup, float) or warmup + steps <= total:
            continue
        key, warmup_key = f"{section}.optm_decay_steps", f"{section}.optm_warmup_steps"
        message = f"{steps} and {warmup_key} = {warmup} together are more than {_STEPS} = {total}"
        hint = f"write {_STEPS} = {warmup + steps}, or fewer steps of warm-up and decay"
        if warmup < total:
            hint = f"write {key} = {total - warmup}, or {_STEPS} = {warmup + steps}"
        yield Problem(key, message, steps, hint, related=(warmup_key, _STEPS))


def options_belong_to_their_shape(config: Config) -> Iterator[Problem]:
    """Options of one schedule that another does not have."""
    for section, keys in _optimizers(config):
        type_key = f"{section}.optm_decay_type"
        shape = "none" if keys.optm_decay_type is None else keys.optm_decay_type
        length = (
            "" if keys.optm_decay_ratio or keys.optm_decay_steps else f" and {section}.optm_decay_ratio = 0.2"
        )
        end = keys.optm_wsd_decay_type
        if end != "cosine" and shape != "wsd":
            key, hint = f"{section}.optm_wsd_decay_type", f'leave it out, or write {type_key} = "wsd"{length}'
            message = f'"{end}" is the last part of a wsd schedule, but {type_key} = "{shape}"'
            yield Problem(key, message, end, hint, related=(type_key,))
        waves = keys.optm_num_cycles
        if waves != 0.5 and shape != "cosine" and not (shape == "wsd" and end == "cosine"):
            key, hint = f"{section}.optm_num_cycles", f'leave it out, or write {type_key} = "cosine"{length}'
            message = f'{waves} counts the waves of a cosine, but {type_key} = "{shape}"'
            yield Problem(key, message, waves, hint, related=(type_key,))


def weight_decay_ramp_agrees(config: Config) -> Iterator[Problem]:
    """A ramp has two ends; a start without a ramp, or a ramp from a value to itself, would do nothing."""
    for section, keys in _optimizers(config):
        key, ramp_key = f"{section}.optm_weight_decay_start", f"{section}.optm_weight_decay_ramp"
        end_key, start = f"{section}.optm_weight_decay", keys.optm_weight_decay_start
        ramp, end = keys.optm_weight_decay_ramp, keys.optm_weight_decay
        if ramp == "constant" and start is not None:
            message = f'{start} is where a ramp starts, but {ramp_key} = "constant"'
            hint = f'write {ramp_key} = "linear" or "cosine", or leave it out'
            yield Problem(key, message, start, hint, related=(ramp_key,))
        elif ramp != "constant" and (start or 0.0) == end:
            message = f'"{ramp}" goes from {key} = {start or 0.0} to {end_key} = {end}, which is not a ramp'
            hint = f'write {ramp_key} = "constant", or another start'
            yield Problem(ramp_key, message, ramp, hint, related=(key, end_key))


def lists_are_for_the_optimizers(config: Config) -> Iterator[Problem]:
    """Lists have a value for each optimizer: Muon and the AdamW next to it, or one."""
    for section, keys in _optimizers(config):
        both, name_key = keys.optm_name == "Muon", f"{section}.optm_name"
        for name, value in (("optm_lr", keys.optm_lr), ("optm_impl", keys.optm_impl)):
            if isinstance(value, list) and len(value) not in ({1, 2} if both else {1}):
                there = "there are two, Muon and AdamW" if both else "there is one"
                message = f"a list of {len(value)} is for {len(value)} optimizers, and {there}"
                hint = "write one value, or two" if both else "write one value"
                yield Problem(f"{section}.{name}", message, value, hint, related=(name_key,))
        impl = keys.optm_impl
        if both and isinstance(impl, list) and len(impl) == 2 and impl[0] != "for-loop":
            message, hint = f'Muon has no implementation "{impl[0]}"', f'write ["for-loop", "{impl[1]}"]'
            yield Problem(f"{section}.optm_impl", message, impl, hint, related=(name_key,))


def options_are_the_optimizers(config: Config) -> Iterator[Problem]:
    """Warning: options that the chosen optimizer does not have."""
    for section, keys in _optimizers(config):
        name = keys.optm_name
        idle = ["optm_betas", "epsilon"] if name == "SGD" else []
        idle += [] if name in ("SGD", "Muon") else ["optm_momentum"]
        for option, value in written(keys, *idle):
            message = f'has no effect with {section}.optm_name = "{name}"'
            hint = "leave it out, or choose another optimizer"
            yield Problem(f"{section}.{option}", message, value, hint, related=(f"{section}.optm_name",))


def average_goes_somewhere(config: Config) -> Iterator[Problem]:
    """A moving average is exported at the end."""
    decay, key, other = config.train.ema_decay, "train.ema_decay", "launcher.export_final"
    if decay is not None and not config.launcher.export_final:
        message, hint = f"has no effect: {other} = false exports no average", f"write {other} = true"
        yield Problem(key, message, decay, hint, related=(other,))


def warmup_ends_in_time(config: Config) -> Iterator[Problem]:
    """Warning: a run that is shorter than its warm-up never reaches the learning rate that is written."""
    total = config.train.max_num_steps
    for section, keys in _optimizers(config):
        key, warmup = f"{section}.optm_warmup_steps", keys.optm_warmup_steps
        if total is not None and not isinstance(warmup, float) and warmup >= total:
            message = (
                f"{warmup} steps of warm-up do not end within {_STEPS} = {total}: the peak is never reached"
            )
            hint = f"write {key} = {total // 10}, or a share of all steps as a float"
            yield Problem(key, message, warmup, hint, related=(_STEPS,))


def scales_are_found_at_each_product(config: Config) -> Iterator[Problem]:
    """Fp8 training is torchao's: dynamic scales of linear layers that are whole, next to bfloat16."""
    keys, key = config.train.fp8, "train.fp8.enable_fp8"
    for name, value in written(keys, "fp8_recipe", "quant_recipe") if not keys.enable_fp8 else ():
        message, hint = f'"{value}" has no effect: {key} = false', f"write {key} = true, or leave it out"
        yield Problem(f"train.fp8.{name}", message, value, hint, related=(key,))
    if not keys.enable_fp8:
        return
    if keys.fp8_recipe == "delayed_scaling":
        recipe = "train.fp8.fp8_recipe"
        message = (
            '"delayed_scaling" takes scales of earlier steps, which torchao has given up for dynamic ones'
        )
        yield Problem(recipe, message, keys.fp8_recipe, f'write {recipe} = "dynamic_scaling"')
    if config.train.param_dtype != "bfloat16":
        dtype = "train.param_dtype"
        message = f'true computes next to bfloat16, and {dtype} = "{config.train.param_dtype}"'
        yield Problem(key, message, True, f'write {dtype} = "bfloat16", or {key} = false', related=(dtype,))
    if (size := config.policy.parallelism.tp_size) > 1:
        ranks = "policy.parallelism.tp_size"
        message = f"true scales whole rows or weights, of which {ranks} = {size} leaves each rank a part"
        yield Problem(key, message, True, f"write {ranks} = 1, or {key} = false", related=(ranks,))


def fp4_is_not_trained(config: Config) -> Iterator[Problem]:
    """There is a prototype alone, for shapes that batches here do not have."""
    for name, value in written(config.train.fp4, "enable_fp4", "fp4_recipe", "quant_recipe"):
        key = f"train.fp4.{name}"
        message = (
            f"{toml_value(value)} asks for training in fp4, of which torchao has a prototype: it takes multiples of "
            "128 tokens, and keeps random numbers in the model's state, which exports would carry"
        )
        yield Problem(key, message, value, "leave [train.fp4] out; train.fp8 computes in 8 bits")


def overlap_is_of_compiled_exchanges(config: Config) -> Iterator[Problem]:
    """Inductor overlaps products with collectives that it finds in a graph (`_micro_pipeline_tp`)."""
    if config.train.async_tp_enabled:
        key = "train.async_tp_enabled"
        message = (
            "true lets a compiler interleave products with the collectives of DTensor around them, and tensor "
            "parallelism here has exchanges of its own, which its pass does not know"
        )
        yield Problem(
            key, message, True, f"write {key} = false; sequence_parallel = true halves what they keep"
        )


def kernels_take_their_types(config: Config) -> Iterator[Problem]:
    """FlashAttention computes in 16 bits."""
    key, version = "train.fa_version", config.train.fa_version
    for section, keys, _, _ in _trained(config) if version is not None else ():
        if keys.param_dtype == "float32":
            dtype = f"{section}.param_dtype"
            message = f'{version} computes in bfloat16 or float16, and {dtype} = "float32"'
            yield Problem(
                key, message, version, f'write {dtype} = "bfloat16", or leave it out', related=(dtype,)
            )


def kernels_take_whole_layers(config: Config) -> Iterator[Problem]:
    """Liger's kernels replace what modules compute, and so do other keys."""
    key = "policy.enable_liger_kernel"
    if not config.policy.enable_liger_kernel:
        return
    sizes = config.policy.parallelism
    others = [
        ("tp_size", sizes.tp_size, "a part of a layer"),
        ("pp_size", sizes.pp_size, "some of the layers"),
    ]
    for name, value, share in others:
        if value != 1:
            other = f"policy.parallelism.{name}"
            message = (
                f"true replaces what whole layers compute, and {other} = {value} leaves each rank {share}"
            )
            yield Problem(key, message, True, f"write {key} = false, or {other} = 1", related=(other,))


def _trained(config: Config) -> Iterator[tuple[str, PrecisionKeys, str, CheckpointingKeys]]:
    """Each trained model: the section of its precision, that of its model."""
    yield "train", config.train, "policy", config.policy
    if config.is_grpo and config.critic.enable:
        yield "critic", config.critic, "critic", config.critic


def masters_hold_small_steps(config: Config) -> Iterator[Problem]:
    """Float16 is a type to compute in: what the optimizer keeps needs more range."""
    for section, keys, _, _ in _trained(config):
        if keys.master_dtype == "float16":
            key, other = f"{section}.master_dtype", f"{section}.param_dtype"
            message = (
                '"float16" has no numbers below 6e-8: squares of gradients below 2e-4, by which Adam divides, are '
                f'0, and updates below 1/2048 of a weight are lost; {other} = "float16" computes in it'
            )
            hint = f'write {key} = "float32"'
            yield Problem(key, message, "float16", hint, related=(other,))


def recomputation_is_on(config: Config) -> Iterator[Problem]:
    """What is recomputed in backward matters when something is."""
    for section, keys, owner, model in _trained(config):
        switch = f"{owner}.model_gradient_checkpointing"
        if model.model_gradient_checkpointing:
            continue
        for name, value in written(keys, "recompute_granularity", "recompute_moe_layers"):
            message = f"{toml_value(value)} has no effect: {switch} = false recomputes nothing"
            hint = f"write {switch} = true, or leave it out"
            yield Problem(f"{section}.{name}", message, value, hint, related=(switch,))


def wrapping_is_one_way(config: Config) -> Iterator[Problem]:
    """FSDP shards modules by class or by size."""
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
            yield Problem(key, message, size, hint, related=(other,))


def optimizers_have_state(config: Config) -> Iterator[Problem]:
    """Warning: SGD without momentum keeps nothing of which host memory could relieve the device."""
    for section, keys in _optimizers(config):
        key, name = f"{section}.optimizer_offload", f"{section}.optm_name"
        if keys.optm_name == "SGD" and not keys.optm_momentum and any(written(keys, "optimizer_offload")):
            message = f'has no effect: {name} = "SGD" has no state without {section}.optm_momentum'
            yield Problem(key, message, True, f"write {key} = false", related=(name,))


def casts_are_fused(config: Config) -> Iterator[Problem]:
    """Warning: scaling and casting cost more than a narrow product saves, unless the compiler fuses them."""
    if config.train.fp8.enable_fp8 and not config.train.compile:
        key, other = "train.fp8.enable_fp8", "train.compile"
        message = f"true casts in steps of their own while {other} = false: slower than bfloat16 as a rule"
        yield Problem(key, message, True, f"write {other} = true", related=(other,))


TRAINING_RULES = (
    warmup_is_a_share_or_steps,
    decay_is_complete,
    decay_fits_the_run,
    options_belong_to_their_shape,
    weight_decay_ramp_agrees,
    lists_are_for_the_optimizers,
    average_goes_somewhere,
    scales_are_found_at_each_product,
    fp4_is_not_trained,
    overlap_is_of_compiled_exchanges,
    kernels_take_their_types,
    kernels_take_whole_layers,
    masters_hold_small_steps,
    recomputation_is_on,
    wrapping_is_one_way,
)
TRAINING_WARNINGS = (warmup_ends_in_time, options_are_the_optimizers, optimizers_have_state, casts_are_fused)
