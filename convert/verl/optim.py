"""verl's optimizer blocks, of FSDP and of Megatron, for the actor and the critic alike.

FSDP:      warm-up (steps, or a share), then constant or cosine down to min_lr_ratio over all that is left
Megatron:  the same keys with lr_decay_style, lr_decay_steps, min_lr (absolute), ramps of weight decay, wsd
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from convert.engine import to, values
from convert.engine.keys import renamed
from convert.engine.model import Result, implicit, mapped, unknown
from convert.engine.rules import WARMUP_NOTE, ConversionContext, KeyPath, Rule, When
from convert.engine.values import BadValue, shown
from convert.verl.facts import KEYS, is_megatron

_STYLES = {"constant": None} | renamed(
    "linear cosine inverse_square_root=inverse_sqrt inverse-square-root=inverse_sqrt WSD=wsd wsd"
)
_OPTIMIZERS = renamed("adam=AdamW adamw=AdamW Adam AdamW AdamW8bit Adam8bit sgd=SGD SGD muon=Muon Muon")


def optim(*arguments: Any) -> tuple[Rule, ...]:
    """The rules of one `optim` table; the arguments are those of `Optim`."""
    table = Optim(*arguments)
    rules = KEYS.rules("optim of a role" if table.prefix else "optim", table, globals())
    # the older FSDP trainer of SFT reads lr_scheduler alone, whatever optim/fsdp.yaml adds to its file; every
    # other trainer copies a warmup_style that is not null over lr_scheduler_type
    wins = ("warmup_style",) if table.prefix else ("lr_scheduler", "warmup_style")
    first = tuple(map(table.key, wins))
    scheduler = table.key("lr_scheduler_type")
    return tuple(replace(rule, wins=first) if rule.key == scheduler else rule for rule in rules)


class Optim:
    """Names that the rows of one `optim` table use.

    prefix: `actor_rollout_ref.actor`, `critic`, or "" for SFT, whose table is at the top. ours: `train` or
    `critic`. lr, betas, scheduler, warmup_ratio: verl's defaults where the file is silent.
    """

    def __init__(
        self,
        prefix: str,
        ours: str,
        lr: float,
        when: When | None = None,
        betas: list[float] = [0.9, 0.999],  # noqa: B006
        scheduler: str = "constant",
        warmup_ratio: float = 0.0,
    ) -> None:
        self.prefix, self.ours, self.lr, self.when = prefix, ours, lr, when
        self.role = prefix or "engine"
        self.optim = f"{prefix}.optim" if prefix else "optim"
        self.betas, self.scheduler, self.warmup_ratio = betas, scheduler, warmup_ratio

    # --- facts ------------------------------------------------------------------------------------------

    def key(self, name: str) -> str:
        """The full key of a name in this table."""
        return f"{self.optim}.{name}"

    def is_muon(self, context: ConversionContext) -> bool:
        """Whether the file asks for Muon."""
        return "muon" in context.text(self.key("optimizer")).lower()

    def is_cosine(self, context: ConversionContext) -> bool:
        """Whether the rate decays by a cosine."""
        return self.style(context) == "cosine"

    def is_wsd(self, context: ConversionContext) -> bool:
        """Whether the rate is constant for a time, and decays then."""
        return self.style(context) == "wsd"

    def warmup(self, context: ConversionContext) -> int | float:
        """Steps, or a share of all steps as a float; 0 for none."""
        steps = self.written_warmup(context)
        if steps is not None:
            return steps
        ratio = float(context.number(self.key("lr_warmup_steps_ratio")) or 0.0)
        decay = context.integer(self.key("lr_decay_steps"), None) if is_megatron(context, self.role) else None
        if ratio > 0 and decay is not None:  # which Megatron takes the share of
            return max(int(ratio * decay), 0)
        return ratio if ratio > 0 else 0

    def written_warmup(self, context: ConversionContext) -> int | None:
        """lr_warmup_steps where they count before the ratio: from 0 on, with Megatron from 1."""
        steps = context.integer(self.key("lr_warmup_steps"), -1)
        least = 1 if is_megatron(context, self.role) else 0
        return steps if steps is not None and steps >= least else None

    def style(self, context: ConversionContext) -> str | None:
        """Our name of the decay; None for a constant rate."""
        megatron = is_megatron(context, self.role)
        names = ["lr_decay_style", "lr_scheduler_type"] if megatron else ["lr_scheduler_type", "lr_decay_style"]
        for name in names:
            if context.has(self.key(name)):
                written = context.text(self.key(name), "constant")
                return _STYLES.get(written)
        return _STYLES[self.scheduler]

    def total(self, context: ConversionContext) -> int | None:
        """The number of training steps, where the file says it."""
        steps = context.integer("trainer.total_training_steps", None)
        return steps if steps is not None and steps > 0 else None

    def decay(self, context: ConversionContext) -> tuple[tuple[str, Any], ...]:
        """Our keys of the decay and its length."""
        style = self.style(context)
        kind, ratio = f"{self.ours}.optm_decay_type", f"{self.ours}.optm_decay_ratio"
        if style is None:
            return ((kind, None),)
        if style == "inverse_sqrt":  # decays from the end of warm-up on, without an end
            return ((kind, style),)
        length = self.decay_steps(context)
        if length is not None:
            return ((kind, style), (f"{self.ours}.optm_decay_steps", length))
        return ((kind, style), (ratio, self.decay_share(context, 0.1 if style == "wsd" else 1.0)))

    def decay_steps(self, context: ConversionContext) -> int | None:
        """The length of the decay in steps, where the file says it."""
        name = "lr_wsd_decay_steps" if self.style(context) == "wsd" else "lr_decay_steps"
        steps = context.integer(self.key(name), None)
        warmup = self.warmup(context)
        if steps is None or steps <= 0:
            return None
        if name == "lr_wsd_decay_steps" or isinstance(warmup, float):
            return steps
        return max(steps - warmup, 1)

    def decay_share(self, context: ConversionContext, part: float) -> float:
        """`part` of what warm-up leaves, as a share of all steps."""
        warmup, total = self.warmup(context), self.total(context)
        if isinstance(warmup, float):
            share = round(part * (1.0 - min(warmup, 1.0)), 12)
            while warmup + share > 1.0:
                share = math.nextafter(share, 0.0)
            return share
        if total is None or warmup == 0:
            return part
        return round(part * max(total - warmup, 1) / total, 12)

    # --- hows -------------------------------------------------------------------------------------------

    def _two_betas(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if not isinstance(leaf.value, list) or len(leaf.value) != 2:
            raise BadValue(f"expected two numbers, got {shown(leaf.value)}")
        return leaf.to([values.number(item) for item in leaf.value])

    def _optimizer(self, context: ConversionContext, leaf: KeyPath) -> Result:
        name = _OPTIMIZERS.get(leaf.value) if isinstance(leaf.value, str) else None
        if name is None:
            raise BadValue(f"expected AdamW, Adam, SGD, Muon or AdamW8bit, got {shown(leaf.value)}")
        if leaf.value == "sgd":
            return leaf.to(name, 0.9, note="with Megatron's momentum")
        note = "its weight decay is decoupled" if (leaf.value, name) == ("adam", "AdamW") else ""
        return leaf.to(name, note=note)

    def _impl(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, "torch.optim"):
            return implicit("optimizers are torch's own")
        if leaf.value in ("torchao.optim", "bitsandbytes.optim"):
            return implicit("optimizers in 8 bits are torchao's, the others torch's own")
        return unknown(f"optimizers of {shown(leaf.value)} are not available here")

    def _clip(self, context: ConversionContext, leaf: KeyPath) -> Result:
        """FSDP clips at grad_clip, Megatron at optim.clip_grad; the other key counts where that one is absent."""
        own, other = f"{self.prefix}.grad_clip", self.key("clip_grad")
        if not self.prefix:
            return to.number(leaf.ours[0]).run(context, leaf)
        first, second = (other, own) if is_megatron(context, self.role) else (own, other)
        if leaf.key == second and context.has(first):
            return implicit(f"`{first}` counts for this strategy")
        return to.number(leaf.ours[0]).run(context, leaf)

    def _warmup_steps(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or (values.integer(leaf.value) < 1 and self.written_warmup(context) is None):
            return implicit("not above 0: lr_warmup_steps_ratio counts")
        return leaf.to(values.integer(leaf.value), note=f"steps; {WARMUP_NOTE}")

    def _share_of_steps(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if self.written_warmup(context) is not None:
            return implicit("lr_warmup_steps is set and comes first")
        ratio = float(values.number(0.0 if leaf.value is None else leaf.value))
        if ratio > 1.0:
            raise BadValue(f"expected a share of all steps, at most 1.0, got {shown(leaf.value)}")
        value = self.warmup(context)
        share = "of all steps" if isinstance(value, float) else "of lr_decay_steps"
        note = "no warm-up" if value == 0 else f"a share {share}; {WARMUP_NOTE}"
        return leaf.to(value, note=note)

    def _style_key(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: constant")
        if _STYLES[values.one_of(leaf.value, _STYLES)] != self.style(context):
            return implicit("another key names the decay for this strategy")
        targets = self.decay(context)
        note = "over all steps after warm-up" if len(targets) == 2 else ""
        if self.style(context) is None:
            note = "no decay after warm-up"
        return mapped(*targets, note=note)

    def _decay_steps_key(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: the decay takes all steps after warm-up")
        style = self.style(context)
        values.integer(leaf.value)
        if style in (None, "wsd", "inverse_sqrt"):
            return implicit("no effect with this lr_decay_style")
        warmup = self.warmup(context)
        note = f"{leaf.value} less a warm-up of {warmup}; here the decay is at the end of the run"
        return mapped(*self.decay(context), note=note)

    def _min_ratio(self, context: ConversionContext, leaf: KeyPath) -> Result:
        ratio = values.number(0.0 if leaf.value is None else leaf.value)
        if self.style(context) is None:
            return implicit("no effect without a decay")
        if is_megatron(context, self.role) and context.has(self.key("min_lr")):
            return implicit("Megatron reads min_lr")
        if ratio and self.warmup(context) and self.style(context) == "cosine":
            return leaf.to(ratio, ratio, note="verl's cosine also starts its warm-up there")
        return leaf.to(ratio, note="null is 0" if leaf.value is None else "")

    def _decay_end(self, context: ConversionContext, leaf: KeyPath) -> Result:
        """The share of the run at whose end VeOmni's rate is the smallest; here that is always the end."""
        if leaf.value is None or values.number(leaf.value) == 1 or self.style(context) is None:
            return implicit("the decay ends with the run, or there is none")
        raise BadValue("a decay that ends before the run does is not available: it ends with the run")

    def _share_of_lr(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: 0")
        rate, peak = values.number(leaf.value), context.number(self.key("lr"), self.lr) or 0.0
        if peak <= 0.0:
            return implicit("no effect with a learning rate of 0")
        note = f"{leaf.name} / lr = {rate} / {peak}" if rate else ""
        return leaf.to(round(rate / peak, 12), note=note)

    def _wsd_steps(self, context: ConversionContext, leaf: KeyPath) -> Result:
        values.integer(leaf.value)
        return mapped(*self.decay(context))
