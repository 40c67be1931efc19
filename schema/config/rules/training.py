"""Rules of how a model is trained: the learning-rate schedule, number formats and memory."""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Each, Refusal, Row, Rule, refused
from schema.config.sections.critic import CriticConfig
from schema.config.sections.optimizer import OptimizerKeys
from schema.config.sections.reference import ReferenceConfig
from schema.config.sections.train import TrainingConfig

Trained = Row[TrainingConfig | CriticConfig]


def _trained(config: Config) -> Iterator[tuple[str, TrainingConfig | CriticConfig]]:
    yield "train", config.train
    if config.has_critic:
        yield "critic", config.critic


def _decays(keys: OptimizerKeys) -> bool:
    return keys.optm_decay_type not in (None, "none")


def warmup_is_a_share_or_steps(config: Config) -> Iterator[Problem]:
    """A float is a share of all steps, and shares add up to at most all of them."""
    for section, keys in _trained(config):
        warmup, decay = keys.optm_warmup_steps, keys.optm_decay_ratio or 0.0
        if not isinstance(warmup, float):
            continue
        if warmup > 1.0:
            says, whole = "a float is a share of all steps, at most 1.0, got {}", warmup.is_integer()
            hint = f"write {{!}} = {int(warmup)} for steps" if whole else "for steps write an integer"
            yield refused(config, f"{section}.optm_warmup_steps", says, hint)
        elif warmup + decay > 1.0:
            says = "decay ({}) and {.optm_warmup_steps=} together are more than all steps"
            hint = f"write {{!}} = {int((1.0 - warmup) * 100) / 100}, or less of both"
            yield refused(config, f"{section}.optm_decay_ratio", says, hint)


def decay_is_complete(config: Config) -> Iterator[Problem]:
    """A decay has a shape and a length; without both, keys of the decay would do nothing."""
    related = (".optm_decay_type", ".optm_decay_ratio")
    for section, keys in _trained(config):
        lengths = [name for name in ("optm_decay_ratio", "optm_decay_steps") if getattr(keys, name)]
        if len(lengths) == 2:
            says = "{} contradicts {.optm_decay_ratio=}: both are the length of the decay"
            hint = "leave it out, or write {.optm_decay_ratio!} = 0.0"
            yield refused(config, f"{section}.optm_decay_steps", says, hint)
        if keys.optm_decay_type == "inverse_sqrt":
            says = "has no effect with {.optm_decay_type=}, which decays from the end of warm-up on"
            yield from (refused(config, f"{section}.{name}", says) for name in lengths)
        elif _decays(keys) and not lengths:
            says = "a {~} decay needs the share of steps over which it happens ({.optm_decay_ratio!})"
            hint = "write {.optm_decay_ratio!} = 0.2, or another share in (0.0, 1.0]"
            yield refused(config, f"{section}.optm_decay_type", says, hint, related)
        if not _decays(keys):
            says = "has no effect without a decay ({.optm_decay_type!})"
            hint = 'write {.optm_decay_type!} = "linear", "cosine", "sqrt" or "wsd", or leave it out'
            yield from (refused(config, f"{section}.{name}", says, hint, related) for name in lengths)
            if keys.optm_min_lr_factor:
                hint = "leave it out, or write a decay too"
                yield refused(config, f"{section}.optm_min_lr_factor", says, hint, related)


def decay_fits_the_run(config: Config) -> Iterator[Problem]:
    """Where the length of the run is stated, the steps of warm-up and decay are not more."""
    total = config.train.max_num_steps
    for section, keys in _trained(config):
        warmup, steps = keys.optm_warmup_steps, keys.optm_decay_steps
        if total is None or steps is None or isinstance(warmup, float) or warmup + steps <= total:
            continue
        says = "{} and {.optm_warmup_steps=} together are more than {train.max_num_steps=}"
        hint = f"write {{train.max_num_steps!}} = {warmup + steps}, or fewer steps of warm-up and decay"
        if warmup < total:
            hint = f"write {{!}} = {total - warmup}, or {{train.max_num_steps!}} = {warmup + steps}"
        yield refused(config, f"{section}.optm_decay_steps", says, hint)


def options_belong_to_their_shape(config: Config) -> Iterator[Problem]:
    """Options of one schedule that another does not have."""
    for section, keys in _trained(config):
        shape, end = keys.optm_decay_type or "none", keys.optm_wsd_decay_type
        hint = 'leave it out, or write {.optm_decay_type!} = "%s"'
        if not (keys.optm_decay_ratio or keys.optm_decay_steps):
            hint += " and {.optm_decay_ratio!} = 0.2"
        related = (".optm_decay_type",)
        if end != "cosine" and shape != "wsd":
            says = f'{{}} is the last part of a wsd schedule, but {{.optm_decay_type!}} = "{shape}"'
            yield refused(config, f"{section}.optm_wsd_decay_type", says, hint % "wsd", related)
        if keys.optm_num_cycles != 0.5 and shape != "cosine" and not (shape == "wsd" and end == "cosine"):
            says = f'{{}} counts the waves of a cosine, but {{.optm_decay_type!}} = "{shape}"'
            yield refused(config, f"{section}.optm_num_cycles", says, hint % "cosine", related)


def lists_are_for_the_optimizers(config: Config) -> Iterator[Problem]:
    """Lists have a value for each optimizer: Muon and the AdamW next to it, or one."""
    for section, keys in _trained(config):
        has_two, impl = keys.optm_name == "Muon", keys.optm_impl
        for name, value in (("optm_lr", keys.optm_lr), ("optm_impl", impl)):
            if isinstance(value, list) and len(value) not in ({1, 2} if has_two else {1}):
                says = f"a list of {len(value)} is for {len(value)} optimizers, and there "
                says += "are two, Muon and AdamW" if has_two else "is one"
                hint = "write one value, or two" if has_two else "write one value"
                yield refused(config, f"{section}.{name}", says, hint, (".optm_name",))
        if has_two and isinstance(impl, list) and len(impl) == 2 and impl[0] != "for-loop":
            says, hint = f'Muon has no implementation "{impl[0]}"', f'write ["for-loop", "{impl[1]}"]'
            yield refused(config, f"{section}.optm_impl", says, hint, (".optm_name",))


def warmup_ends_in_time(config: Config) -> Iterator[Problem]:
    """Warning: a run that is shorter than its warm-up never reaches the learning rate that is written."""
    total = config.train.max_num_steps
    for section, keys in _trained(config):
        warmup = keys.optm_warmup_steps
        if total is not None and not isinstance(warmup, float) and warmup >= total:
            says = "{} steps of warm-up do not end within {train.max_num_steps=}: the peak is never reached"
            hint = f"write {{!}} = {total // 10}, or a share of all steps as a float"
            yield refused(config, f"{section}.optm_warmup_steps", says, hint)


def kernels_take_their_types(config: Config) -> Iterator[Problem]:
    """FlashAttention computes in 16 bits."""
    for section, keys in _trained(config) if config.train.fa_version is not None else ():
        if keys.param_dtype == "float32":
            dtype = f"{section}.param_dtype"
            says = f"{{}} computes in bfloat16 or float16, and {{{dtype}=}}"
            yield refused(config, "train.fa_version", says, f'write {dtype} = "bfloat16", or leave it out')


def _sharded(config: Config) -> Iterator[tuple[str, TrainingConfig | CriticConfig | ReferenceConfig]]:
    yield from _trained(config)
    yield "reference", config.reference


TRAINING_RULES: tuple[Rule, ...] = (
    warmup_is_a_share_or_steps,
    decay_is_complete,
    decay_fits_the_run,
    options_belong_to_their_shape,
    Each(
        _trained,
        Trained("optm_weight_decay_start",
            lambda keys: keys.optm_weight_decay_ramp == "constant" and keys.optm_weight_decay_start is not None,
            "{} is where a ramp starts, but {.optm_weight_decay_ramp=}",
            'write {.optm_weight_decay_ramp!} = "linear" or "cosine", or leave it out'),
        Trained("optm_weight_decay_ramp", 
            lambda keys: keys.optm_weight_decay_ramp != "constant"
            and (keys.optm_weight_decay_start or 0.0) == keys.optm_weight_decay,
            lambda keys: f"{{}} goes from {{.optm_weight_decay_start!}} = {keys.optm_weight_decay_start or 0.0} to "
            "{.optm_weight_decay=}, which is not a ramp",
            'write {.optm_weight_decay_ramp!} = "constant", or another start',
            (".optm_weight_decay_start", ".optm_weight_decay")),
    ),
    lists_are_for_the_optimizers,
    Refusal("train.ema_decay", lambda c: c.train.ema_decay is not None and not c.launcher.export_final,
        "has no effect: {launcher.export_final=} exports no average", "write {launcher.export_final!} = true"),
    Refusal(("train.fp8.fp8_recipe", "train.fp8.quant_recipe"), lambda c: not c.train.fp8.enable_fp8,
        "{} has no effect: {.enable_fp8=}", "write {.enable_fp8!} = true, or leave it out"),
    Refusal("train.fp8.fp8_recipe",
        lambda c: c.train.fp8.enable_fp8 and c.train.fp8.fp8_recipe == "delayed_scaling",
        "{} takes scales of earlier steps, which torchao has given up for dynamic ones",
        'write {.fp8_recipe!} = "dynamic_scaling"'),
    Refusal("train.fp8.enable_fp8", lambda c: c.train.fp8.enable_fp8 and c.train.param_dtype != "bfloat16",
        "true computes next to bfloat16, and {train.param_dtype=}",
        'write {train.param_dtype!} = "bfloat16", or {.enable_fp8!} = false'),
    Refusal("train.fp8.enable_fp8", lambda c: c.train.fp8.enable_fp8 and c.policy.parallelism.tp_size > 1,
        "true scales whole rows or weights, of which {policy.parallelism.tp_size=} leaves each rank a part",
        "write {policy.parallelism.tp_size!} = 1, or {.enable_fp8!} = false"),
    Refusal(tuple(f"train.fp4.{name}" for name in ("enable_fp4", "fp4_recipe", "quant_recipe")), lambda _: True,
        "{} asks for training in fp4, of which torchao has a prototype: it takes multiples of 128 tokens, and keeps "
        "random numbers in the model's state, which exports would carry",
        "leave [train.fp4] out; train.fp8 computes in 8 bits"),
    Refusal("train.async_tp_enabled", lambda c: c.train.async_tp_enabled,
        "true lets a compiler interleave products with the collectives of DTensor around them, and tensor "
        "parallelism here has exchanges of its own, which its pass does not know",
        "write {.async_tp_enabled!} = false; sequence_parallel = true halves what they keep"),
    kernels_take_their_types,
    Refusal("policy.enable_liger_kernel",
        lambda c: c.policy.enable_liger_kernel and c.policy.parallelism.tp_size != 1,
        "true replaces what whole layers compute, and {policy.parallelism.tp_size=} leaves each rank a part of a "
        "layer",
        "write {.enable_liger_kernel!} = false, or {policy.parallelism.tp_size!} = 1"),
    Refusal("policy.enable_liger_kernel",
        lambda c: c.policy.enable_liger_kernel and c.policy.parallelism.pp_size != 1,
        "true replaces what whole layers compute, and {policy.parallelism.pp_size=} leaves each rank some of the "
        "layers",
        "write {.enable_liger_kernel!} = false, or {policy.parallelism.pp_size!} = 1"),
    Each(
        _trained,
        Trained("master_dtype", lambda keys: keys.master_dtype == "float16",
            "{} has no numbers below 6e-8: squares of gradients below 2e-4, by which Adam divides, are 0, and "
            'updates below 1/2048 of a weight are lost; {.param_dtype!} = "float16" computes in it',
            'write {.master_dtype!} = "float32"', (".param_dtype",)),
    ),
    Refusal(("train.recompute_granularity", "train.recompute_moe_layers"),
        lambda c: not c.policy.model_gradient_checkpointing,
        "{} has no effect: {policy.model_gradient_checkpointing=} recomputes nothing",
        "write {policy.model_gradient_checkpointing!} = true, or leave it out"),
    Refusal(("critic.recompute_granularity", "critic.recompute_moe_layers"),
        lambda c: c.has_critic and not c.critic.model_gradient_checkpointing,
        "{} has no effect: {.model_gradient_checkpointing=} recomputes nothing",
        "write {.model_gradient_checkpointing!} = true, or leave it out"),
    Each(
        _sharded,
        Row[TrainingConfig | CriticConfig | ReferenceConfig]("fsdp_wrap_min_params",
            lambda keys: bool(keys.fsdp_wrap_layers and keys.fsdp_wrap_min_params),
            "{} chooses modules by size, and {.fsdp_wrap_layers!} = {.fsdp_wrap_layers~} by class",
            "write {.fsdp_wrap_min_params!} = 0, or {.fsdp_wrap_layers!} = []", (".fsdp_wrap_layers",)),
    ),
)  # fmt: skip
TRAINING_WARNINGS: tuple[Rule, ...] = (
    warmup_ends_in_time,
    Each(
        _trained,
        Trained(("optm_betas", "epsilon"), lambda keys: keys.optm_name == "SGD", "has no effect with {.optm_name=}",
            "leave it out, or choose another optimizer"),
        Trained(("optm_momentum",), lambda keys: keys.optm_name not in ("SGD", "Muon"),
            "has no effect with {.optm_name=}", "leave it out, or choose another optimizer"),
    ),
    Each(
        _trained,
        Trained(("optimizer_offload",), lambda keys: keys.optm_name == "SGD" and not keys.optm_momentum,
            "has no effect: {.optm_name=} has no state without {.optm_momentum!}",
            "write {.optimizer_offload!} = false"),
    ),
    Refusal("train.fp8.enable_fp8", lambda c: c.train.fp8.enable_fp8 and not c.train.compile,
        "true casts in steps of their own while {train.compile=}: slower than bfloat16 as a rule",
        "write {train.compile!} = true"),
)  # fmt: skip
