"""verl's `model` tables: of actor, rollout and reference together, of the critic, and of SFT."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath, Rule, When
from convert.verl.facts import ACTOR, KEYS, MODEL, is_megatron, lacking
from schema.config.overrides import is_dropout

_MEGATRON_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def model(prefix: str, ours: str, when: When | None = None, old_path: str = "") -> tuple[Rule, ...]:
    """The rules of one model. prefix: its table in verl. ours: `policy` or `critic`. old_path: spelling of `path`."""
    return KEYS.rules("model", Model(prefix, ours, when, old_path), globals())


class Model:
    """What the rows of one model say; see `model`."""

    def __init__(self, prefix: str, ours: str, when: When | None, old_path: str) -> None:
        self.prefix, self.ours, self.when, self.old_path = prefix, ours, when, old_path
        self.train = "train" if ours == "policy" else ours
        self.packed = "the policy" if ours == "policy" else "others"

    def _lora(self, context: ConversionContext) -> bool:
        """Whether the model gets adapters by FSDP's key."""
        return (context.integer(f"{self.prefix}.lora_rank", 0) or 0) > 0

    def _megatron_lora(self, context: ConversionContext) -> bool:
        """Whether it gets them by Megatron's."""
        return (context.integer(f"{self.prefix}.lora.rank", 0) or 0) > 0

    def _only_megatron_lora(self, context: ConversionContext) -> bool:
        return self._megatron_lora(context) and not self._lora(context)

    def _tokenizer(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is not None and leaf.value == context.get(f"{self.prefix}.path", None):
            return implicit("the tokenizer of the model itself")
        return to.path(leaf.ours[0]).run(context, leaf)

    def _trust(self, context: ConversionContext, leaf: KeyPath) -> Result:
        data = self.prefix == MODEL and context.flag("data.trust_remote_code")
        value = leaf.value is not None and values.flag(leaf.value)
        note = "data.trust_remote_code is true, and there is one key per model" if data and not value else ""
        return leaf.to(value or data, note=note)

    def _override(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or leaf.value == {}:
            return implicit("nothing is overridden")
        if is_dropout(leaf.rest):
            return implicit("dropout is off in training: log-probs would be of another model")
        return mapped((f"{leaf.ours[0]}.{leaf.rest}", leaf.value))

    def _rank(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or values.integer(leaf.value) <= 0:
            return implicit("rank 0: all weights are trained")
        return leaf.to(values.integer(leaf.value))

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


def _targets(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to("all-linear" if leaf.value == "all-linear" else values.texts(leaf.value))


def _megatron_targets(context: ConversionContext, leaf: KeyPath) -> Result:
    names = values.texts(leaf.value)
    if sorted(names) == sorted(_MEGATRON_LINEAR):
        return leaf.to("all-linear", note="every linear layer")
    return leaf.to(names, note="names of Megatron's modules: write the hub's")


def _modules(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, "", []):
        return implicit("null: none")
    names = [part.strip() for text in values.texts(leaf.value) for part in text.split(",")]
    return leaf.to([name for name in names if name])
