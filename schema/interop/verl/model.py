"""verl's `model` tables: of actor, rollout and reference together, of the critic, and of SFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schema.interop.engine.rules import (
    ABSENT,
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    always,
    as_flag,
    as_integer,
    as_number,
    as_texts,
    choice,
    flag,
    implicit,
    mapped,
    path,
    unless,
)
from schema.interop.verl.facts import ACTOR, MODEL, is_megatron, lacking, switched

_MEGATRON_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Model:
    """The rows of one model. prefix: its table in verl. ours: `policy` or `critic`."""

    def __init__(
        self,
        prefix: str,
        ours: str,
        when: Callable[[ConversionContext], str] | None = None,
        old_path: str = "",
    ) -> None:
        self.prefix, self.ours, self.when, self.old_path = prefix, ours, when, old_path
        self.train = "train" if ours == "policy" else ours

    def rules(self) -> tuple[Rule, ...]:
        """One row per key."""
        ours, train = self.ours, self.train
        checkpointing = flag(f"{ours}.model_gradient_checkpointing")
        external = Converter(
            _modules(f"{ours}.external_modules"),
            (f"{ours}.external_modules",),
            "one name, or several with commas, become a list",
        )
        trust = Converter(self._trust, (f"{ours}.trust_remote_code",), "true where model's or data's is")
        liger = (
            flag("policy.enable_liger_kernel")
            if ours == "policy"
            else always("the policy's key counts for all models")
        )
        packing = (
            Converter(self._packing, ("train.sequence_packing",), "as it is")
            if ours == "policy"
            else always("the policy's key counts for all models")
        )
        chunks = always("log-probs are always computed in chunks that never hold the whole vocabulary")
        table: list[tuple[str, Converter, tuple[str, ...]]] = [
            ("path", path(f"{ours}.model_name_or_path"), (self.old_path,) if self.old_path else ()),
            (
                "tokenizer_path",
                Converter(self._tokenizer, (f"{ours}.tokenizer_name_or_path",), "`~` is written out"),
                (),
            ),
            ("hf_config_path", lacking(), ()),
            ("use_shm", always("weights are mapped into memory, not copied to shared memory"), ()),
            ("custom_chat_template", lacking(), ()),
            ("external_lib", external, ("external_libs",)),
            ("trust_remote_code", trust, ()),
            ("enable_gradient_checkpointing", checkpointing, ()),
            (
                "gradient_checkpointing_kwargs.activations_checkpoint_granularity",
                unless(
                    [None],
                    "null: whole layers",
                    choice(f"{train}.recompute_granularity", {"full": "full", "selective": "selective"}),
                ),
                (),
            ),
            (
                "gradient_checkpointing_kwargs.activations_checkpoint_method",
                always("recomputation goes layer by layer"),
                (),
            ),
            (
                "gradient_checkpointing_kwargs.activations_checkpoint_num_layers",
                always("recomputation goes layer by layer"),
                (),
            ),
            ("enable_activation_offload", flag(f"{train}.activation_offload"), ()),
            ("use_remove_padding", packing, ()),
            ("truncate_padding", always("padding never changes a number here"), ()),
            ("use_liger", liger, ()),
            ("use_fused_kernels", chunks, ()),
            ("fused_kernel_options", chunks, ()),
            ("fused_kernel_options.*", chunks, ()),
            ("override_config", always("an empty table: nothing is overridden"), ()),
            ("override_config.moe_config.freeze_moe_router", flag(f"{ours}.freeze_moe_router"), ()),
            (
                "override_config.moe_config.*",
                Converter(self._override, (f"{ours}.override_config",), "as they are"),
                (),
            ),
            (
                "override_config.model_config.*",
                Converter(self._override, (f"{ours}.override_config",), "as they are"),
                (),
            ),
            ("override_config.*", Converter(self._override, (f"{ours}.override_config",), "as they are"), ()),
            ("lora_adapter_path", lacking(), ("lora.adapter_path",)),
            ("lora_rank", Converter(self._rank, (f"{ours}.lora.r",), "0: no adapters"), ()),
            (
                "lora_alpha",
                Converter(self._alpha, (f"{ours}.lora.lora_alpha",), "with lora_rank > 0 only"),
                (),
            ),
            (
                "target_modules",
                Converter(self._targets, (f"{ours}.lora.target_modules",), "with lora_rank > 0 only"),
                (),
            ),
            (
                "lora.dropout",
                Converter(self._dropout, (f"{ours}.lora.lora_dropout",), "with a rank > 0 only"),
                (),
            ),
            ("exclude_modules", lacking([]), ("lora.exclude_modules",)),
            (
                "lora.rank",
                Converter(self._nested_rank, (f"{ours}.lora.r",), "Megatron's adapters; 0: none"),
                (),
            ),
            (
                "lora.alpha",
                Converter(self._nested_alpha, (f"{ours}.lora.lora_alpha",), "with lora.rank > 0 only"),
                (),
            ),
            (
                "lora.target_modules",
                Converter(
                    self._nested_targets,
                    (f"{ours}.lora.target_modules",),
                    "Megatron's four linear layers → `all-linear`",
                ),
                (),
            ),
            ("lora.merge", always("rollouts always get merged weights"), ()),
            ("lora.*", Converter(self._other_lora, (), "details of Megatron's adapters"), ()),
        ]
        rules = [
            Rule(
                f"{self.prefix}.{name}",
                converter,
                self._defaults().get(name, ABSENT),
                tuple(f"{self.prefix}.{other}" for other in also),
                self.when,
            )
            for name, converter, also in table
        ]
        return (
            *rules,
            switched(f"{self.prefix}.tiled_mlp", f"{self.prefix}.tiled_mlp.enabled"),
            switched(f"{self.prefix}.mtp", f"{self.prefix}.mtp.enable"),
        )

    def _defaults(self) -> dict[str, Any]:
        return {"lora_alpha": 16, "target_modules": "all-linear"}

    def lora(self, context: ConversionContext, key: str = "lora_rank") -> bool:
        """Whether the model gets adapters: `lora_rank` of FSDP, or `lora.rank` of Megatron."""
        return (context.integer(f"{self.prefix}.{key}", 0) or 0) > 0

    def _tokenizer(self, context: ConversionContext, leaf: KeyPath) -> Result:
        own = f"{self.ours}.tokenizer_name_or_path"
        if leaf.value is not None and leaf.value == context.get(f"{self.prefix}.path", None):
            return implicit("the tokenizer of the model itself")
        return path(own).run(context, leaf)

    def _trust(self, context: ConversionContext, leaf: KeyPath) -> Result:
        data = self.prefix == MODEL and context.flag("data.trust_remote_code")
        value = leaf.value is not None and as_flag(leaf.value)
        note = "data.trust_remote_code is true, and there is one key per model" if data and not value else ""
        return mapped((f"{self.ours}.trust_remote_code", value or data), note=note)

    def _override(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or leaf.value == {}:
            return implicit("nothing is overridden")
        return mapped((f"{self.ours}.override_config.{leaf.rest}", leaf.value))

    def _rank(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or as_integer(leaf.value) <= 0:
            return implicit("rank 0: all weights are trained")
        return mapped((f"{self.ours}.lora.r", as_integer(leaf.value)))

    def _alpha(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or not self.lora(context):
            return implicit("no effect without adapters (lora_rank = 0)")
        return mapped((f"{self.ours}.lora.lora_alpha", as_number(leaf.value)))

    def _targets(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or not self.lora(context):
            return implicit("no effect without adapters (lora_rank = 0)")
        value = leaf.value if leaf.value == "all-linear" else as_texts(leaf.value)
        return mapped((f"{self.ours}.lora.target_modules", value))

    def _nested_rank(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if self.lora(context):
            return implicit("lora_rank is set and counts")
        return self._rank(context, leaf)

    def _nested_alpha(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or self.lora(context) or not self.lora(context, "lora.rank"):
            return implicit("no effect without lora.rank > 0")
        return mapped((f"{self.ours}.lora.lora_alpha", as_number(leaf.value)))

    def _nested_targets(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or self.lora(context) or not self.lora(context, "lora.rank"):
            return implicit("no effect without lora.rank > 0")
        names = as_texts(leaf.value)
        if sorted(names) == sorted(_MEGATRON_LINEAR):
            return mapped((f"{self.ours}.lora.target_modules", "all-linear"), note="every linear layer")
        return mapped(
            (f"{self.ours}.lora.target_modules", names), note="names of Megatron's modules: write the hub's"
        )

    def _packing(self, context: ConversionContext, leaf: KeyPath) -> Result:
        own = f"{ACTOR}.megatron.use_remove_padding"
        if self.prefix == MODEL and is_megatron(context) and context.has(own):
            return implicit(f"`{own}` counts with Megatron")
        return flag("train.sequence_packing").run(context, leaf)

    def _dropout(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or not self.lora(context, "lora.rank"):
            return implicit("no effect without adapters (lora.rank = 0)")
        return mapped((f"{self.ours}.lora.lora_dropout", as_number(leaf.value)))

    def _other_lora(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if not self.lora(context, "lora.rank"):
            return implicit("no effect without adapters (lora.rank = 0)")
        return lacking("lora", False, "pre", "xavier", "zero").run(context, leaf)


def _modules(ours: str) -> Callable[[ConversionContext, KeyPath], Result]:
    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, "", []):
            return implicit("null: none")
        names = [part.strip() for text in as_texts(leaf.value) for part in text.split(",")]
        return mapped((ours, [name for name in names if name]))

    return run
