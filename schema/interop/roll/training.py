"""`actor_train.training_args` of ROLL: batches, optimizer and learning-rate schedule."""

from __future__ import annotations

from schema.interop.engine.rows import (
    WARMUP_NOTE,
    BadValue,
    Leaf,
    Reading,
    Result,
    Row,
    always,
    as_flag,
    as_integer,
    as_number,
    computed,
    implicit,
    integer,
    mapped,
    number,
    shown,
    unless,
)
from schema.interop.roll.converters import POLICY, lost
from schema.interop.roll.facts import global_batch, mesh, optimizer_steps, samples_per_step

ROLE = "actor_train"


_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "none",
    "constant_with_warmup": "none",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
    "wsd": "wsd",
}


@computed(
    "train.optm_decay_type",
    "train.optm_decay_ratio",
    words="decays over all that follows the warm-up, as in Hugging Face",
)
def _schedule(reading: Reading, leaf: Leaf) -> Result:
    name = leaf.value
    if not isinstance(name, str) or name.lower() not in _SCHEDULES:
        raise BadValue(f"expected one of {', '.join(_SCHEDULES)}, got {shown(name)}")
    ours = _SCHEDULES[name.lower()]
    if ours == "none":
        return mapped(("train.optm_decay_type", "none"))
    return mapped(("train.optm_decay_type", ours), ("train.optm_decay_ratio", _decay_ratio(reading)))


def _decay_ratio(reading: Reading) -> float:
    """The share of all steps after the warm-up."""
    warmup, total = _warmup(reading), reading.integer("max_steps", 500) or 0
    if isinstance(warmup, float):
        return round(1.0 - warmup, 6)
    if total < 1 or warmup >= total:
        return 1.0
    return round(1.0 - warmup / total, 6)


def _warmup(reading: Reading) -> int | float:
    """Warm-up in our steps (an integer) or as a share (a float), as ROLL chooses between its two keys."""
    steps = reading.integer(f"{ROLE}.training_args.warmup_steps", 0) or 0
    if steps > 0:
        return -(-steps // optimizer_steps(reading))
    ratio = reading.number(f"{ROLE}.training_args.warmup_ratio", 0.0) or 0.0
    return float(ratio) if 0 < ratio <= 1 else 0


@computed(
    "train.optm_warmup_steps", words="optimizer steps there, training steps here: divided by their number"
)
def _warmup_steps(reading: Reading, leaf: Leaf) -> Result:
    steps = as_integer(leaf.value)
    if steps <= 0 and _warmup(reading):
        return implicit("0: warmup_ratio is taken")
    if steps < 0:
        raise BadValue(f"expected at least 0, got {steps}")
    each = optimizer_steps(reading)
    notes = [f"{each} optimizer steps in each training step"] if each > 1 else []
    notes += [WARMUP_NOTE] if steps else []
    return mapped(("train.optm_warmup_steps", _warmup(reading)), note="; ".join(notes))


@computed("train.optm_warmup_steps", words="a share of all steps, where warmup_steps is 0")
def _warmup_ratio(reading: Reading, leaf: Leaf) -> Result:
    ratio = as_number(leaf.value)
    if (reading.integer(f"{ROLE}.training_args.warmup_steps", 0) or 0) > 0:
        return implicit("warmup_steps is taken instead")
    if ratio == 0:
        return implicit("0: no warm-up")
    if not 0 < ratio <= 1:
        raise BadValue(f"expected a share from 0 to 1, got {shown(leaf.value)}")
    return mapped(("train.optm_warmup_steps", float(ratio)), note=WARMUP_NOTE)


@computed("train.optm_betas", words="with adam_beta1 and adam_beta2")
def _betas(reading: Reading, leaf: Leaf) -> Result:
    as_number(leaf.value)
    betas = [
        reading.number(f"{ROLE}.training_args.adam_beta{index}", default)
        for index, default in ((1, 0.9), (2, 0.999))
    ]
    return mapped(("train.optm_betas", betas))


@computed("train.epoch", words="the length of the run, if max_steps is -1")
def _epochs(reading: Reading, leaf: Leaf) -> Result:
    if (reading.integer("max_steps", 500) or 0) > 0:
        return implicit("max_steps ends the run, whatever num_train_epochs says")
    value = as_number(leaf.value)
    return mapped(("train.epoch", max(int(-(-value // 1)), 1)))


@computed("train.param_dtype", words="true asks for this type")
def _precision(reading: Reading, leaf: Leaf) -> Result:
    if not as_flag(leaf.value):
        return implicit("model_args.dtype decides")
    return mapped(("train.param_dtype", "bfloat16" if leaf.key.endswith("bf16") else "float16"))


@computed(
    f"{POLICY}.mini_batch",
    "policy.parallelism.pp_micro_batch_size",
    words="samples of a micro-batch, with a pipeline of a piece of it; part of the global batch",
)
def _per_device(reading: Reading, leaf: Leaf) -> Result:
    samples, shape = as_integer(leaf.value), mesh(reading)
    if shape.pp == 1:
        return mapped((f"{POLICY}.mini_batch", samples))
    steps = reading.integer(f"{ROLE}.training_args.gradient_accumulation_steps", 1) or 1
    pieces = steps if steps % shape.pp == 0 else shape.pp
    return mapped(
        ("policy.parallelism.pp_micro_batch_size", samples),
        (f"{POLICY}.mini_batch", samples * pieces),
        note=f"{pieces} pieces go through the pipeline together",
    )


@computed(f"{POLICY}.batch_size_per_optimize", words="the global batch, where it is not the whole rollout")
def _accumulation(reading: Reading, leaf: Leaf) -> Result:
    batch, formula = global_batch(reading)
    samples = samples_per_step(reading)
    if batch == samples:
        return implicit(f"global batch {formula}, all samples of a rollout: one optimizer step, as here")
    if batch > samples:
        needed = samples * mesh(reading).model_ranks
        per_step = (reading.integer(f"{ROLE}.training_args.per_device_train_batch_size", 8) or 1) * mesh(
            reading
        ).world
        remedy = f"; {needed // per_step} would make it one optimizer step" if needed % per_step == 0 else ""
        reading.warn(
            f"the global batch {formula} is more than the {samples} samples of a rollout: ROLL would never "
            f"fill it; one optimizer step for the whole rollout is written{remedy}"
        )
        return implicit(f"global batch {formula} > {samples} samples: one optimizer step for all of them")
    if samples % batch:
        reading.warn(
            f"the global batch {formula} does not divide the {samples} samples of a rollout: ROLL leaves out "
            f"the last {samples % batch}, here every sample is trained on"
        )
    note = f"global batch {formula}; {samples} samples a rollout: {samples / batch:g} optimizer steps"
    return mapped((f"{POLICY}.batch_size_per_optimize", batch), note=note)


TRAINING_ARGS: tuple[Row, ...] = (
    Row("learning_rate", number("train.optm_lr"), default=5e-5),
    Row("weight_decay", number("train.optm_weight_decay"), default=0.0),
    Row("per_device_train_batch_size", _per_device, default=8),
    Row("gradient_accumulation_steps", _accumulation, default=1),
    Row("warmup_steps", _warmup_steps, default=0),
    Row("warmup_ratio", _warmup_ratio),
    Row("lr_scheduler_type", _schedule, default="linear"),
    Row("lr_scheduler_kwargs.min_lr_rate", number("train.optm_min_lr_factor")),
    Row("adam_beta1", _betas),
    Row("adam_beta2", _betas),
    Row("adam_epsilon", number("train.epsilon"), default=1e-8),
    Row("max_grad_norm", number("train.optm_grad_norm_clip")),
    Row("num_train_epochs", _epochs, default=1),
    Row("max_steps", always("ROLL computes it from the pipeline's max_steps")),
    Row("seed", always("ROLL takes the pipeline's seed for every role")),
    Row("data_seed", always("ROLL takes the pipeline's seed for every role")),
    Row("dataloader_num_workers", integer(f"{POLICY}.dataloader_num_workers")),
    Row("bf16", _precision),
    Row("fp16", _precision),
    Row("tf32", lost(f"{ROLE}.training_args.tf32")),
    Row(
        "optim",
        unless(
            ("adamw_torch", "adamw_torch_fused", "adamw"),
            "AdamW, as here",
            lost(f"{ROLE}.training_args.optim"),
        ),
    ),
)
