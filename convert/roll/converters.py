"""Ways to convert a value that only ROLL's tables need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped, no_counterpart, unsupported
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed
from convert.engine.unsupported import EITHER_WAY, same
from convert.engine.values import BadValue, shown
from convert.roll.device_mapping import DeviceMappingError, parse_device_mapping
from convert.roll.facts import config_key
from convert.roll.unsupported import ROLL, THINKING
from schema.config.problem import ConfigError, Problem

reason = ROLL.known_reason
"""Why a key of ROLL has no counterpart, from the closed list."""

POLICY = "train.train_policy"
NEUTRAL = (None, False, 0, 0.0, "", "null")

LORA_KEYS = ("lora_target", "lora_rank", "lora_alpha", "lora_dropout", "additional_target")


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 device`, `2 devices`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def named_devices(context: ConversionContext, leaf: KeyPath) -> list[int] | None:
    """The devices of a `device_mapping`, None for null. Raises ConfigError: nothing can be placed without them."""
    if leaf.value is None:
        return None
    try:
        return parse_device_mapping(leaf.value)
    except DeviceMappingError as error:
        problem = Problem(leaf.key, str(error), leaf.value, file=context.source.name, line=leaf.line)
        raise ConfigError([problem]) from None


def lost(key: str, *neutral: Any) -> Converter:
    """No counterpart, unless the value asks for nothing (null, false, 0 or one of `neutral`).

    With EITHER_WAY among `neutral` false and 0 ask for something.
    """
    why = reason(key)

    @computed(words="no counterpart")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        off = (None, "", "null") if EITHER_WAY in neutral else NEUTRAL
        asks_nothing = any(same(leaf.value, value) for value in (*off, *neutral))
        return implicit("asks for nothing") if asks_nothing else no_counterpart(why)

    return convert


def is_one_of(value: Any, names: Iterable[str]) -> bool:
    """Whether a value is one of these names; tables and lists are none."""
    return isinstance(value, str) and value in names


def dtype(ours: str) -> Converter:
    """A type by any of its names; null is the default."""
    words = "`bf16` → `bfloat16`, `fp16` → `float16`, `fp32` → `float32`"
    return to.choice(ours, values.DTYPES, words, "null: the default")


def model_dtype(role: str, section: str) -> Converter:
    """A model's type; next to the strategy's param_dtype it is the type of the master weights."""
    words = "with a param_dtype of the strategy: the master weights, float32 for `fp16`"

    @computed(f"{section}.param_dtype", f"{section}.master_dtype", words=words)
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        plain = dtype(f"{section}.param_dtype").run(context, leaf)
        computing = context.get(config_key(role, "param_dtype"), None)
        if not plain.targets or computing is None:
            return plain
        stored = values.DTYPES[leaf.value]
        if is_one_of(computing, values.DTYPES) and values.DTYPES[computing] == stored:
            return implicit("the same as the strategy's param_dtype")
        return mapped(
            (f"{section}.master_dtype", values.MASTERS[leaf.value]),
            note="param_dtype of the strategy computes",
        )

    return convert


def reshard(section: str) -> Converter:
    """Whether parameters are sharded again after forward."""
    return to.converted(
        f"{section}.fsdp_reshard_after_forward",
        lambda value: "always" if values.flag(value) else "never",
        "true → `always`, false → `never`",
        "null: the default",
    )


def repeats(
    other: Callable[[ConversionContext], Any], words: str, differs: Callable[[KeyPath, Any], Result]
) -> Converter:
    """A key that only repeats another one: implicit where it says the same, else `differs`."""

    @computed(words=words)
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        expected = other(context)
        if leaf.value is None or leaf.value == expected:
            return implicit(words)
        return differs(leaf, expected)

    return convert


def wins(what: str) -> Callable[[KeyPath, Any], Result]:
    """What ROLL does where two keys disagree: the other one is taken."""
    return lambda leaf, expected: implicit(
        f"ROLL takes {what}" + ("" if expected is None else f" ({shown(expected)})") + " instead"
    )


def under(prefix: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same rules below a table."""
    return tuple(
        replace(rule, key=f"{prefix}.{rule.key}", also=tuple(f"{prefix}.{name}" for name in rule.also))
        for rule in rules
    )


def recomputation(role: str, model: str, section: str) -> dict[str, Converter]:
    """What is recomputed of a role: whole layers, attention, and independently of both the layers of experts.

    model, section: ours with model_gradient_checkpointing, and with what it recomputes.
    """
    switch, granularity = f"{model}.model_gradient_checkpointing", f"{section}.recompute_granularity"
    experts = f"{section}.recompute_moe_layers"

    @computed(switch, granularity, words="null: nothing is recomputed, or what moe_layer_recompute says")
    def whole(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            alone = context.flag(config_key(role, "moe_layer_recompute"))
            return implicit("moe_layer_recompute decides") if alone else mapped((switch, False))
        if leaf.value not in ("full", "selective"):
            raise BadValue(f"expected full or selective, got {shown(leaf.value)}")
        return mapped((switch, True), (granularity, leaf.value))

    @computed(experts, switch, words="without recompute_granularity these layers alone")
    def of_experts(context: ConversionContext, leaf: KeyPath) -> Result:
        around = context.get(config_key(role, "recompute_granularity"), None)
        if leaf.value is None or not values.flag(leaf.value):
            return mapped((experts, False))
        if around == "full":
            return implicit("whole layers are recomputed, experts among them")
        return mapped((experts, True), *([(switch, True)] if around is None else []))

    return {"recompute_granularity": whole, "moe_layer_recompute": of_experts}


def template(key: str, ours: str = "rollout.multi_turn_config.enable_thinking") -> Converter:
    """The chat template of prompts: the tokenizer's own by any of its names; another one is a method of its own.

    ours: the key that says whether it thinks; "": none does, as conversations are rendered by the template alone.
    """

    @computed(*filter(None, [ours]), words="the tokenizer's own, thinking or not; others: see the list")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        chosen = context.get("global_template", None)
        if leaf.key != "global_template" and chosen:
            return implicit(f"ROLL takes global_template = {chosen} instead")
        if leaf.value is None and leaf.key == "global_template":
            return implicit("null: data_args.template counts")
        name = "native" if leaf.value is None else values.text(leaf.value)
        if name not in THINKING:
            return no_counterpart(reason(key))
        if not ours:
            thinks = THINKING[name]
            return implicit("the tokenizer's own chat template") if thinks else unsupported(reason(key))
        return mapped((ours, THINKING[name]), note="the tokenizer's own chat template")

    return convert
