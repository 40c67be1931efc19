"""verl's optimizer blocks, of FSDP and of Megatron, for the actor and the critic alike.

FSDP:      warm-up (steps, or a share), then constant or cosine down to min_lr_ratio over all that is left
Megatron:  the same keys with lr_decay_style, lr_decay_steps, min_lr (absolute), ramps of weight decay, wsd
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped, unknown
from convert.engine.rules import (
    WARMUP_NOTE,
    ConversionContext,
    Converter,
    KeyPath,
    Rule,
    Run,
    When,
    rules_below,
)
from convert.engine.values import BadValue, shown
from convert.verl.facts import is_megatron, lacking
from convert.verl.unsupported import MUON_OPTIONS, OFFLOAD_OPTIONS

_STYLES = {
    "constant": None,
    "linear": "linear",
    "cosine": "cosine",
    "inverse_square_root": "inverse_sqrt",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
    "wsd": "wsd",
}
_OPTIMIZERS = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "Adam": "Adam",
    "AdamW": "AdamW",
    "AdamW8bit": "AdamW8bit",
    "Adam8bit": "Adam8bit",
    "sgd": "SGD",
    "SGD": "SGD",
    "muon": "Muon",
    "Muon": "Muon",
}


class Optim:
    """The rules of one `optim` table.

    prefix: `actor_rollout_ref.actor`, `critic`, or "" for SFT, whose table is at the top. ours: `train` or
    `critic`. lr, betas, scheduler, warmup: verl's defaults where the file is silent.
    """

    def __init__(
        self,
        prefix: str,
        ours: str,
        lr: float,
        when: When | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        scheduler: str = "constant",
        warmup: float = 0.0,
    ) -> None:
        self.prefix, self.ours, self.lr, self.when = prefix, ours, lr, when
        self.role = prefix or "engine"
        self.optim = f"{prefix}.optim" if prefix else "optim"
        self.defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": 0.01,
            "betas": list(betas),
            "lr_scheduler_type": scheduler,
            "lr_warmup_steps_ratio": warmup,
        }

    def rules(self) -> tuple[Rule, ...]:
        """One rule per key of the table."""
        spellings = {
            "lr_warmup_steps_ratio": ("warmup_steps_ratio",),
            "lr_scheduler_type": ("warmup_style", "lr_scheduler"),
            "optimizer": ("name",),
            "clip_grad": ("grad_clip",),
        }
        table = self._rates() | self._decay() | self._optimizers()
        rules = rules_below(self.optim, table, self.when, self.defaults, spellings)
        # the older FSDP trainer of SFT reads lr_scheduler alone, whatever optim/fsdp.yaml adds to its file; every
        # other trainer copies a warmup_style that is not null over lr_scheduler_type
        wins = ("warmup_style",) if self.prefix else ("lr_scheduler", "warmup_style")
        scheduler = f"{self.optim}.lr_scheduler_type"
        first = tuple(f"{self.optim}.{name}" for name in wins)
        rules = tuple(replace(rule, wins=first) if rule.key == scheduler else rule for rule in rules)
        if not self.prefix:
            return rules
        clip = self._to(self._clip, "as it is", "grad_norm_clip")
        return (*rules, Rule(f"{self.prefix}.grad_clip", clip, 1.0, when=self.when))

    def _to(self, run: Run, words: str, *names: str) -> Converter:
        return Converter(run, tuple(f"{self.ours}.optm_{name}" for name in names), words)

    def _rates(self) -> dict[str, Converter]:
        own = self._to
        return {
            "lr": to.number(f"{self.ours}.optm_lr"),
            "weight_decay": to.number(f"{self.ours}.optm_weight_decay"),
            "betas": own(self._betas, "as it is", "betas"),
            "optimizer": own(
                self._optimizer,
                "`adam` → `AdamW` (its decay is decoupled), `sgd` with its momentum",
                "name",
                "momentum",
            ),
            "optimizer_impl": own(self._impl, "torch's own optimizers, or torchao's in 8 bits"),
            "clip_grad": own(self._clip, "as it is", "grad_norm_clip"),
            "lr_warmup_steps": own(
                self._warmup_steps,
                "an integer counts steps; negative, and 0 with Megatron: the ratio counts",
                "warmup_steps",
            ),
            "lr_warmup_steps_ratio": own(
                self._warmup_ratio, "a share of all steps, where lr_warmup_steps says nothing", "warmup_steps"
            ),
            "init_lr_ratio": to.given(
                lambda context: bool(self.warmup(context)),
                "no effect without a warm-up",
                to.number(f"{self.ours}.optm_warmup_start_factor", "with a warm-up only"),
            ),
            "lr_warmup_init lr_start": own(self._warmup_init, "divided by lr", "warmup_start_factor"),
        }

    def _decay(self) -> dict[str, Converter]:
        own, decay, only = self._to, ("decay_type", "decay_ratio"), "with lr_decay_style = WSD only"
        return {
            "lr_scheduler_type": own(
                self._style, "`constant` → unset; `cosine` over all steps after warm-up", *decay
            ),
            "lr_decay_style": own(
                self._style,
                "`constant` → unset, `inverse_square_root` → `inverse_sqrt`",
                *decay,
                "decay_steps",
            ),
            "lr_decay_steps": own(
                self._decay_steps, "less the warm-up, which Megatron counts in it", "decay_steps"
            ),
            "min_lr_ratio": own(
                self._min_ratio,
                "null is 0; with a cosine only, whose warm-up starts there too",
                "min_lr_factor",
                "warmup_start_factor",
            ),
            "min_lr lr_min": own(
                self._min_lr, "divided by lr; without a decay it has no effect", "min_lr_factor"
            ),
            "lr_decay_ratio": Converter(self._decay_end, (), "1.0: all that follows the warm-up"),
            "num_cycles": to.given(
                lambda context: self.style(context) == "cosine",
                "no effect without a cosine decay",
                to.number(f"{self.ours}.optm_num_cycles", "with a cosine only"),
            ),
            "lr_wsd_decay_style": own(self._wsd_style, only, "wsd_decay_type"),
            "lr_wsd_decay_steps": own(self._wsd_steps, only, "decay_steps"),
        }

    def _optimizers(self) -> dict[str, Converter]:
        muon = " ".join(f"muon_{name}" for name in MUON_OPTIONS)
        momentum = f"{self.ours}.optm_momentum"
        only_muon = to.given(self.is_muon, "no effect without optimizer = muon", to.number(momentum))
        return {
            "weight_decay_incr_style": to.always(
                "verl ramps from weight_decay to weight_decay: it stays constant"
            ),
            "use_checkpoint_opt_param_scheduler": to.flag("train.ckpt.load_schedule", "as it is"),
            "total_training_steps": to.always("verl overwrites it with the number of steps it computes"),
            "zero_indexed_step": to.always("the first step has the rate of step 0 here"),
            "use_precision_aware_optimizer": lacking(False),
            "eps": to.number(f"{self.ours}.epsilon"),
            "decay_type": lacking("constant", "none"),
            "min_lr_factor": lacking(0.0),
            "main_grads_dtype exp_avg_dtype exp_avg_sq_dtype": lacking("fp32"),
            "use_layer_wise_distributed_optimizer": to.always("the optimizer's state is always sharded"),
            "muon_momentum": only_muon,
            muon: Converter(self._muon, (), "with optimizer = muon only"),
            "override_optimizer_config": lacking({}),
            "override_optimizer_config.eps": to.number(f"{self.ours}.epsilon"),
            "override_optimizer_config.momentum": to.number(momentum),
            " ".join(f"override_optimizer_config.{name}" for name in OFFLOAD_OPTIONS): to.always(
                "where the optimizer computes, and how it stores its state, changes speed and memory"
            ),
            "override_optimizer_config.*": lacking(),
        }

    # --- facts ------------------------------------------------------------------------------------------

    def key(self, name: str) -> str:
        """The full key of a name in this table."""
        return f"{self.optim}.{name}"

    def is_muon(self, context: ConversionContext) -> bool:
        """Whether the file asks for Muon."""
        return "muon" in context.text(self.key("optimizer")).lower()

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
        names = (
            ["lr_decay_style", "lr_scheduler_type"] if megatron else ["lr_scheduler_type", "lr_decay_style"]
        )
        for name in names:
            if context.has(self.key(name)):
                written = context.text(self.key(name), "constant")
                return _STYLES.get(written)
        return _STYLES[self.defaults["lr_scheduler_type"]]

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

    def _betas(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if not isinstance(leaf.value, list) or len(leaf.value) != 2:
            raise BadValue(f"expected two numbers, got {shown(leaf.value)}")
        return mapped((f"{self.ours}.optm_betas", [values.number(item) for item in leaf.value]))

    def _optimizer(self, context: ConversionContext, leaf: KeyPath) -> Result:
        name = _OPTIMIZERS.get(leaf.value) if isinstance(leaf.value, str) else None
        if name is None:
            raise BadValue(f"expected AdamW, Adam, SGD, Muon or AdamW8bit, got {shown(leaf.value)}")
        target = (f"{self.ours}.optm_name", name)
        if leaf.value == "sgd":
            return mapped(target, (f"{self.ours}.optm_momentum", 0.9), note="with Megatron's momentum")
        note = "its weight decay is decoupled" if (leaf.value, name) == ("adam", "AdamW") else ""
        return mapped(target, note=note)

    def _impl(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, "torch.optim"):
            return implicit("optimizers are torch's own")
        if leaf.value in ("torchao.optim", "bitsandbytes.optim"):
            return implicit("optimizers in 8 bits are torchao's, the others torch's own")
        return unknown(f"optimizers of {shown(leaf.value)} are not available here")

    def _muon(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if not self.is_muon(context):
            return implicit("no effect without optimizer = muon")
        return lacking().run(context, leaf)

    def _clip(self, context: ConversionContext, leaf: KeyPath) -> Result:
        """FSDP clips at grad_clip, Megatron at optim.clip_grad; the other key counts where that one is absent."""
        own, other = f"{self.prefix}.grad_clip", self.key("clip_grad")
        if not self.prefix:
            return to.number("train.optm_grad_norm_clip").run(context, leaf)
        first, second = (other, own) if is_megatron(context, self.role) else (own, other)
        if leaf.key == second and context.has(first):
            return implicit(f"`{first}` counts for this strategy")
        return to.number(f"{self.ours}.optm_grad_norm_clip").run(context, leaf)

    def _warmup_steps(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or (values.integer(leaf.value) < 1 and self.written_warmup(context) is None):
            return implicit("not above 0: lr_warmup_steps_ratio counts")
        return mapped(
            (f"{self.ours}.optm_warmup_steps", values.integer(leaf.value)), note=f"steps; {WARMUP_NOTE}"
        )

    def _warmup_ratio(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if self.written_warmup(context) is not None:
            return implicit("lr_warmup_steps is set and comes first")
        ratio = float(values.number(0.0 if leaf.value is None else leaf.value))
        if ratio > 1.0:
            raise BadValue(f"expected a share of all steps, at most 1.0, got {shown(leaf.value)}")
        value = self.warmup(context)
        share = "of all steps" if isinstance(value, float) else "of lr_decay_steps"
        note = "no warm-up" if value == 0 else f"a share {share}; {WARMUP_NOTE}"
        return mapped((f"{self.ours}.optm_warmup_steps", value), note=note)

    def _warmup_init(self, context: ConversionContext, leaf: KeyPath) -> Result:
        return self._share_of_lr(context, leaf, "warmup_start_factor")

    def _style(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: constant")
        if _STYLES[values.one_of(leaf.value, _STYLES)] != self.style(context):
            return implicit("another key names the decay for this strategy")
        targets = self.decay(context)
        note = "over all steps after warm-up" if len(targets) == 2 else ""
        if self.style(context) is None:
            note = "no decay after warm-up"
        return mapped(*targets, note=note)

    def _decay_steps(self, context: ConversionContext, leaf: KeyPath) -> Result:
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
        targets: list[tuple[str, Any]] = [(f"{self.ours}.optm_min_lr_factor", ratio)]
        note = "null is 0" if leaf.value is None else ""
        if ratio and self.warmup(context) and self.style(context) == "cosine":
            targets.append((f"{self.ours}.optm_warmup_start_factor", ratio))
            note = "verl's cosine also starts its warm-up there"
        return mapped(*targets, note=note)

    def _min_lr(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if self.style(context) is None:
            return implicit("no effect without a decay")
        return self._share_of_lr(context, leaf, "min_lr_factor")

    def _decay_end(self, context: ConversionContext, leaf: KeyPath) -> Result:
        """The share of the run at whose end VeOmni's rate is the smallest; here that is always the end."""
        if leaf.value is None or values.number(leaf.value) == 1 or self.style(context) is None:
            return implicit("the decay ends with the run, or there is none")
        raise BadValue("a decay that ends before the run does is not available: it ends with the run")

    def _share_of_lr(self, context: ConversionContext, leaf: KeyPath, factor: str) -> Result:
        if leaf.value is None:
            return implicit("null: 0")
        rate, peak = values.number(leaf.value), context.number(self.key("lr"), self.lr) or 0.0
        if peak <= 0.0:
            return implicit("no effect with a learning rate of 0")
        note = f"{leaf.key.rpartition('.')[2]} / lr = {rate} / {peak}" if rate else ""
        return mapped((f"{self.ours}.optm_{factor}", round(rate / peak, 12)), note=note)

    def _wsd_style(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if self.style(context) != "wsd":
            return implicit("no effect without lr_decay_style = WSD")
        same = {name: name for name in ("exponential", "cosine", "linear")}
        return to.choice(f"{self.ours}.optm_wsd_decay_type", same).run(context, leaf)

    def _wsd_steps(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or self.style(context) != "wsd":
            return implicit("no effect without lr_decay_style = WSD")
        values.integer(leaf.value)
        return mapped(*self.decay(context))
