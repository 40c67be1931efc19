"""verl's `model` tables: of actor, rollout and reference together, of the critic, and of SFT."""

from __future__ import annotations

from typing import Any

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, When, computed, rules_below
from convert.verl.facts import ACTOR, MODEL, is_megatron, lacking, switched
from schema.config.overrides import is_dropout

_DEFAULTS = {"lora_alpha": 16, "target_modules": "all-linear"}
_MEGATRON_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Model:
    """The rules of one model. prefix: its table in verl. ours: `policy` or `critic`."""

    def __init__(self, prefix: str, ours: str, when: When | None = None, old_path: str = "") -> None:
        self.prefix, self.ours, self.when, self.old_path = prefix, ours, when, old_path
        self.train = "train" if ours == "policy" else ours

    def rules(self) -> tuple[Rule, ...]:
        """One rule per key."""
        ours, lora, words = self.ours, f"{self.ours}.lora", "with lora_rank > 0 only"
        flat, nested = "no effect without adapters (lora_rank = 0)", "no effect without lora.rank > 0"
        table = {
            "path": to.path(f"{ours}.model_name_or_path"),
            "tokenizer_path": Converter(
                self._tokenizer, (f"{ours}.tokenizer_name_or_path",), "`~` is written out"
            ),
            "use_shm": to.always("weights are mapped into memory, not copied to shared memory"),
            "hf_config_path custom_chat_template lora_adapter_path": lacking(),
            "external_lib": _modules(f"{ours}.external_modules"),
            "trust_remote_code": Converter(
                self._trust, (f"{ours}.trust_remote_code",), "true where model's or data's is"
            ),
            **self._speed(),
            "override_config": to.always("an empty table: nothing is overridden"),
            "override_config.moe_config.freeze_moe_router": to.flag(f"{ours}.freeze_moe_router"),
            "override_config.moe_config.* override_config.model_config.* override_config.*": Converter(
                self._override, (f"{ours}.override_config",), "as they are"
            ),
            "lora_rank": Converter(self._rank, (f"{lora}.r",), "0: no adapters"),
            "lora_alpha": to.given(self._lora, flat, to.number(f"{lora}.lora_alpha", words)),
            "target_modules": to.given(
                self._lora, flat, to.converted(f"{lora}.target_modules", _targets, words)
            ),
            "lora.dropout": to.given(
                self._megatron_lora,
                "no effect without adapters (lora.rank = 0)",
                to.number(f"{lora}.lora_dropout", "with a rank > 0 only"),
            ),
            "exclude_modules": lacking([]),
            "lora.rank": Converter(self._nested_rank, (f"{lora}.r",), "Megatron's adapters; 0: none"),
            "lora.alpha": to.given(
                self._only_megatron_lora, nested, to.number(f"{lora}.lora_alpha", "with lora.rank > 0 only")
            ),
            "lora.target_modules": to.given(
                self._only_megatron_lora, nested, _megatron_targets(f"{lora}.target_modules")
            ),
            "lora.merge": to.always("rollouts always get merged weights"),
            "lora.*": Converter(self._other_lora, (), "details of Megatron's adapters"),
        }
        also = {
            "path": (self.old_path,) if self.old_path else (),
            "external_lib": ("external_libs",),
            "lora_adapter_path": ("lora.adapter_path",),
            "exclude_modules": ("lora.exclude_modules",),
        }
        return (
            *rules_below(self.prefix, table, self.when, _DEFAULTS, also),
            Rule(f"{self.prefix}.tiled_mlp.*", switched(f"{self.prefix}.tiled_mlp.enabled")),
            Rule(f"{self.prefix}.mtp.*", switched(f"{self.prefix}.mtp.enable")),
        )

    def _speed(self) -> dict[str, Converter]:
        """Keys that change speed or memory but never numbers."""
        train, kwargs = self.train, "gradient_checkpointing_kwargs.activations_checkpoint"
        granularity = {"full": "full", "selective": "selective"}
        chunks = to.always("log-probs are always computed in chunks that never hold the whole vocabulary")
        table = {
            "enable_gradient_checkpointing": to.flag(f"{self.ours}.model_gradient_checkpointing"),
            f"{kwargs}_granularity": to.unless(
                [None], "null: whole layers", to.choice(f"{train}.recompute_granularity", granularity)
            ),
            f"{kwargs}_method {kwargs}_num_layers": to.always("recomputation goes layer by layer"),
            "enable_activation_offload": to.flag(f"{train}.activation_offload"),
            "truncate_padding": to.always("padding never changes a number here"),
            "use_fused_kernels fused_kernel_options fused_kernel_options.*": chunks,
            "use_fused_loss return_last_hidden_state": chunks,
        }
        if self.ours != "policy":
            return table | {
                "use_remove_padding use_liger": to.always("the policy's key counts for all models")
            }
        return table | {
            "use_remove_padding": Converter(self._packing, ("train.sequence_packing",), "as it is"),
            "use_liger": to.flag("policy.enable_liger_kernel"),
        }

    def _lora(self, context: ConversionContext) -> bool:
        """Whether the model gets adapters by FSDP's key."""
        return (context.integer(f"{self.prefix}.lora_rank", 0) or 0) > 0

    def _megatron_lora(self, context: ConversionContext) -> bool:
        """Whether it gets them by Megatron's."""
        return (context.integer(f"{self.prefix}.lora.rank", 0) or 0) > 0

    def _only_megatron_lora(self, context: ConversionContext) -> bool:
        return self._megatron_lora(context) and not self._lora(context)

    def _tokenizer(self, context: ConversionContext, leaf: KeyPath) -> Result:
        own = f"{self.ours}.tokenizer_name_or_path"
        if leaf.value is not None and leaf.value == context.get(f"{self.prefix}.path", None):
            return implicit("the tokenizer of the model itself")
        return to.path(own).run(context, leaf)

    def _trust(self, context: ConversionContext, leaf: KeyPath) -> Result:
        data = self.prefix == MODEL and context.flag("data.trust_remote_code")
        value = leaf.value is not None and values.flag(leaf.value)
        note = "data.trust_remote_code is true, and there is one key per model" if data and not value else ""
        return mapped((f"{self.ours}.trust_remote_code", value or data), note=note)

    def _override(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or leaf.value == {}:
            return implicit("nothing is overridden")
        if is_dropout(leaf.rest):
            return implicit("dropout is off in training: log-probs would be of another model")
        return mapped((f"{self.ours}.override_config.{leaf.rest}", leaf.value))

    def _rank(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or values.integer(leaf.value) <= 0:
            return implicit("rank 0: all weights are trained")
        return mapped((f"{self.ours}.lora.r", values.integer(leaf.value)))

    def _nested_rank(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if self._lora(context):
            return implicit("lora_rank is set and counts")
        return self._rank(context, leaf)

    def _packing(self, context: ConversionContext, leaf: KeyPath) -> Result:
        own = f"{ACTOR}.megatron.use_remove_padding"
        if self.prefix == MODEL and is_megatron(context) and context.has(own):
            return implicit(f"`{own}` counts with Megatron")
        return to.flag("train.sequence_packing").run(context, leaf)

    def _other_lora(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if not self._megatron_lora(context):
            return implicit("no effect without adapters (lora.rank = 0)")
        return lacking("lora", False, "pre", "xavier", "zero").run(context, leaf)


def _targets(value: Any) -> str | list[str]:
    return "all-linear" if value == "all-linear" else values.texts(value)


def _megatron_targets(ours: str) -> Converter:
    @computed(ours, words="Megatron's four linear layers → `all-linear`")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        names = values.texts(leaf.value)
        if sorted(names) == sorted(_MEGATRON_LINEAR):
            return mapped((ours, "all-linear"), note="every linear layer")
        return mapped((ours, names), note="names of Megatron's modules: write the hub's")

    return convert


def _modules(ours: str) -> Converter:
    @computed(ours, words="one name, or several with commas, become a list")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, "", []):
            return implicit("null: none")
        names = [part.strip() for text in values.texts(leaf.value) for part in text.split(",")]
        return mapped((ours, [name for name in names if name]))

    return convert
