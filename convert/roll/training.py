"""`actor_train.training_args` of ROLL: batches, optimizer and learning-rate schedule."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import WARMUP_NOTE, ConversionContext, Converter, KeyPath, Rule, computed
from convert.engine.values import BadValue, shown
from convert.roll.converters import POLICY, lost
from convert.roll.facts import global_batch, mesh, optimizer_steps, samples_per_step

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


class Rates:
    """Warm-up and decay of a role. ours: its section."""

    def __init__(self, role: str, ours: str) -> None:
        self.role, self.ours = role, ours

    def table(self) -> dict[str, Converter]:
        """A converter for each key of `training_args` that says how the rate rises and falls."""
        rising, falling = f"{self.ours}.optm_warmup_steps", f"{self.ours}.optm_decay"
        return {
            "warmup_steps": Converter(
                self._warmup_steps,
                (rising,),
                "optimizer steps there, training steps here: divided by their number",
            ),
            "warmup_ratio": computed(
                rising, words="a share of all steps, where warmup_steps is 0", null="null: no warm-up"
            )(self._warmup_ratio),
            "lr_scheduler_type": Converter(
                self._schedule,
                (f"{falling}_type", f"{falling}_ratio"),
                "decays over all that follows the warm-up, as in Hugging Face",
            ),
        }

    def warmup(self, context: ConversionContext) -> int | float:
        """Warm-up in our steps (an integer) or as a share (a float), as ROLL chooses between its two keys."""
        steps = context.integer(f"{self.role}.training_args.warmup_steps", 0) or 0
        if steps > 0:
            return -(-steps // optimizer_steps(context, self.role))
        ratio = context.number(f"{self.role}.training_args.warmup_ratio", 0.0) or 0.0
        return float(ratio) if 0 < ratio <= 1 else 0

    def _schedule(self, context: ConversionContext, leaf: KeyPath) -> Result:
        name, key = leaf.value, f"{self.ours}.optm_decay_type"
        if not isinstance(name, str) or name.lower() not in _SCHEDULES:
            raise BadValue(f"expected one of {', '.join(_SCHEDULES)}, got {shown(name)}")
        ours = _SCHEDULES[name.lower()]
        if ours in ("none", "inverse_sqrt"):  # they have no end
            return mapped((key, ours))
        return mapped((key, ours), (f"{self.ours}.optm_decay_ratio", self._decay_ratio(context)))

    def _decay_ratio(self, context: ConversionContext) -> float:
        """The share of all steps after the warm-up."""
        warmup, total = self.warmup(context), context.integer("max_steps", 500) or 0
        if isinstance(warmup, float):
            return round(1.0 - warmup, 6)
        if total < 1 or warmup >= total:
            return 1.0
        return round(1.0 - warmup / total, 6)

    def _warmup_steps(self, context: ConversionContext, leaf: KeyPath) -> Result:
        steps = values.integer(leaf.value)
        if steps <= 0 and self.warmup(context):
            return implicit("0: warmup_ratio is taken")
        if steps < 0:
            raise BadValue(f"expected at least 0, got {steps}")
        each = optimizer_steps(context, self.role)
        notes = [f"{each} optimizer steps in each training step"] if each > 1 else []
        notes += [WARMUP_NOTE] if steps else []
        return mapped((f"{self.ours}.optm_warmup_steps", self.warmup(context)), note="; ".join(notes))

    def _warmup_ratio(self, context: ConversionContext, leaf: KeyPath) -> Result:
        ratio = values.number(leaf.value)
        if (context.integer(f"{self.role}.training_args.warmup_steps", 0) or 0) > 0:
            return implicit("warmup_steps is taken instead")
        if ratio == 0:
            return implicit("0: no warm-up")
        if not 0 < ratio <= 1:
            raise BadValue(f"expected a share from 0 to 1, got {shown(leaf.value)}")
        return mapped((f"{self.ours}.optm_warmup_steps", float(ratio)), note=WARMUP_NOTE)


@computed("train.optm_betas", words="with adam_beta1 and adam_beta2")
def _betas(context: ConversionContext, leaf: KeyPath) -> Result:
    values.number(leaf.value)
    betas = [
        context.number(f"{ROLE}.training_args.adam_beta{index}", default)
        for index, default in ((1, 0.9), (2, 0.999))
    ]
    return mapped(("train.optm_betas", betas))


@computed("train.epoch", words="the length of the run, if max_steps is -1")
def _epochs(context: ConversionContext, leaf: KeyPath) -> Result:
    if (context.integer("max_steps", 500) or 0) > 0:
        return implicit("max_steps ends the run, whatever num_train_epochs says")
    value = values.number(leaf.value)
    return mapped(("train.epoch", max(int(-(-value // 1)), 1)))


@computed("train.param_dtype", words="true asks for this type")
def _precision(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("model_args.dtype decides")
    return mapped(("train.param_dtype", "bfloat16" if leaf.key.endswith("bf16") else "float16"))


@computed(
    f"{POLICY}.mini_batch",
    "policy.parallelism.pp_micro_batch_size",
    words="samples of a micro-batch, with a pipeline of a piece of it; part of the global batch",
)
def _per_device(context: ConversionContext, leaf: KeyPath) -> Result:
    samples, shape = values.integer(leaf.value), mesh(context)
    if shape.pp == 1:
        return mapped((f"{POLICY}.mini_batch", samples))
    steps = context.integer(f"{ROLE}.training_args.gradient_accumulation_steps", 1) or 1
    pieces = steps if steps % shape.pp == 0 else shape.pp
    return mapped(
        ("policy.parallelism.pp_micro_batch_size", samples),
        (f"{POLICY}.mini_batch", samples * pieces),
        note=f"{pieces} pieces go through the pipeline together",
    )


@computed(f"{POLICY}.batch_size_per_optimize", words="the global batch, where it is not the whole rollout")
def _accumulation(context: ConversionContext, leaf: KeyPath) -> Result:
    batch, formula = global_batch(context)
    samples = samples_per_step(context)
    if batch == samples:
        return implicit(f"global batch {formula}, all samples of a rollout: one optimizer step, as here")
    if batch > samples:
        needed = samples * mesh(context).model_ranks
        per_step = (context.integer(f"{ROLE}.training_args.per_device_train_batch_size", 8) or 1) * mesh(
            context
        ).world
        remedy = f"; {needed // per_step} would make it one optimizer step" if needed % per_step == 0 else ""
        context.warn(
            f"the global batch {formula} is more than the {samples} samples of a rollout: ROLL would never "
            f"fill it; one optimizer step for the whole rollout is written{remedy}"
        )
        return implicit(f"global batch {formula} > {samples} samples: one optimizer step for all of them")
    if samples % batch:
        context.warn(
            f"the global batch {formula} does not divide the {samples} samples of a rollout: ROLL leaves out "
            f"the last {samples % batch}, here every sample is trained on"
        )
    note = f"global batch {formula}; {samples} samples a rollout: {samples / batch:g} optimizer steps"
    return mapped((f"{POLICY}.batch_size_per_optimize", batch), note=note)


CLIPPED = "ROLL clips the gradients of every role at the pipeline's max_grad_norm"
_OPTIMIZERS = {
    "adamw": "AdamW",
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "adamw_torch_8bit": "AdamW8bit",
    "adamw_8bit": "AdamW8bit",
    "adamw_bnb_8bit": "AdamW8bit",
    "sgd": "SGD",
    "muon": "Muon",
}
"""Names of Hugging Face's trainer."""

_RATES = Rates(ROLE, "train").table()
TRAINING_ARGS: tuple[Rule, ...] = (
    Rule("learning_rate", to.number("train.optm_lr"), default=5e-5),
    Rule("weight_decay", to.number("train.optm_weight_decay"), default=0.0),
    Rule("per_device_train_batch_size", _per_device, default=8),
    Rule("gradient_accumulation_steps", _accumulation, default=1),
    Rule("warmup_steps", _RATES["warmup_steps"], default=0),
    Rule("warmup_ratio", _RATES["warmup_ratio"]),
    Rule("lr_scheduler_type", _RATES["lr_scheduler_type"], default="linear"),
    Rule("lr_scheduler_kwargs.min_lr_rate", to.number("train.optm_min_lr_factor")),
    Rule("adam_beta1", _betas),
    Rule("adam_beta2", _betas),
    Rule("adam_epsilon", to.number("train.epsilon"), default=1e-8),
    Rule("optim", to.choice("train.optm_name", _OPTIMIZERS)),
    Rule("max_grad_norm", to.always(CLIPPED)),
    Rule("num_train_epochs", _epochs, default=1),
    Rule("max_steps", to.always("ROLL computes it from the pipeline's max_steps")),
    Rule("seed", to.always("ROLL takes the pipeline's seed for every role")),
    Rule("data_seed", to.always("ROLL takes the pipeline's seed for every role")),
    Rule("dataloader_num_workers", to.integer(f"{POLICY}.dataloader_num_workers")),
    Rule("bf16", _precision),
    Rule("fp16", _precision),
    Rule("tf32", lost(f"{ROLE}.training_args.tf32")),
)
