"""Ways to convert a value that only ROLL's table needs, and the table itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from convert.engine import to, values
from convert.engine.keys import renamed
from convert.engine.model import Result, implicit, mapped, no_counterpart, unsupported
from convert.engine.rules import WARMUP_NOTE, ConversionContext, Converter, KeyPath, computed
from convert.engine.table import Table
from convert.engine.unsupported import EITHER_WAY, same
from convert.engine.values import BadValue, shown
from convert.roll import facts
from convert.roll.device_mapping import DeviceMappingError, parse_device_mapping
from convert.roll.facts import config_key, optimizer_steps, warmup
from convert.roll.unsupported import ROLL, THINKING
from schema.config.problem import ConfigError, Problem

reason = ROLL.known_reason
"""The reason why a key of ROLL has no counterpart, from the closed list."""

POLICY = "train.train_policy"
OFF = (None, False)
SCHEDULES = renamed(
    "linear cosine cosine_with_min_lr=cosine constant=none constant_with_warmup=none inverse_sqrt "
    "warmup_stable_decay=wsd wsd"
)
"""Hugging Face's name of a schedule -> ours."""


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 device`, `2 devices`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def role_of(leaf: KeyPath) -> str:
    """The role of a key; supervised fine-tuning trains by the policy's."""
    return leaf.key.partition(".")[0].replace("sft_train", "actor_train")


def named_devices(context: ConversionContext, leaf: KeyPath) -> list[int] | None:
    """The devices of a `device_mapping`, None for null. Raises ConfigError: nothing can be placed without them."""
    if leaf.value is None:
        return None
    try:
        return parse_device_mapping(leaf.value)
    except DeviceMappingError as error:
        problem = Problem(leaf.key, str(error), leaf.value, file=context.source.name, line=leaf.line)
        raise ConfigError([problem]) from None


def lost(*neutral: Any) -> Converter:
    """No counterpart, unless the value asks for nothing (null, false, 0 or one of `neutral`).

    With EITHER_WAY among `neutral` false and 0 ask for something.
    """
    nothing = (None, "", "null", *(() if EITHER_WAY in neutral else (False, 0)), *neutral)

    @computed(words="no counterpart")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        asks_nothing = any(same(leaf.value, value) for value in nothing)
        return implicit("asks for nothing") if asks_nothing else no_counterpart(reason(leaf.key))

    return convert


def is_one_of(value: Any, names: Iterable[str]) -> bool:
    """Whether a value is one of these names; tables and lists are none."""
    return isinstance(value, str) and value in names


def dtype(ours: str) -> Converter:
    """A type by any of its names; null is the default."""
    words = "`bf16` → `bfloat16`, `fp16` → `float16`, `fp32` → `float32`"
    return to.choice(ours, values.DTYPES, words, "null: the default")


def model_dtype(context: ConversionContext, leaf: KeyPath) -> Result:
    """A model's type; next to the strategy's param_dtype it is the type of the master weights."""
    stored = values.DTYPES[values.one_of(leaf.value, values.DTYPES)]
    computing = context.get(config_key(role_of(leaf), "param_dtype"), None)
    if computing is None:
        return leaf.to(stored)
    if is_one_of(computing, values.DTYPES) and values.DTYPES[computing] == stored:
        return implicit("the same as the strategy's param_dtype")
    master = (leaf.ours[1], values.MASTERS[leaf.value])
    return mapped(master, note="param_dtype of the strategy computes")


def model_name(context: ConversionContext, leaf: KeyPath) -> Result:
    """The model of a role: ROLL overwrites all three by pretrain unless each of them names one."""
    roles = ("actor_train", "actor_infer", "reference")
    all_named = all(context.get(f"{role}.model_args.model_name_or_path", None) is not None for role in roles)
    pretrain = None if all_named else context.get("pretrain", None)
    if pretrain is None:
        return leaf.to(values.path(leaf.value))
    return implicit("the same as pretrain" if pretrain == leaf.value else f"ROLL takes pretrain = {pretrain} instead")


def paths(value: Any) -> list[str]:
    """A path or a list of them; a leading `~` is written out."""
    return [values.path(item) for item in values.texts(value)]


def policy_template(context: ConversionContext) -> Any:
    """The chat template that `actor_train` names, None without."""
    return context.get("actor_train.data_args.template", None)


def warmup_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    """Steps over which the rate rises."""
    steps, rising = values.integer(leaf.value), warmup(context, role_of(leaf))
    if steps <= 0 and rising:
        return implicit("0: warmup_ratio is taken")
    if steps < 0:
        raise BadValue(f"expected at least 0, got {steps}")
    each = optimizer_steps(context, role_of(leaf))
    notes = [f"{each} optimizer steps in each training step"] if each > 1 else []
    notes += [WARMUP_NOTE] if steps else []
    return leaf.to(rising, note="; ".join(notes))


def warmup_ratio(context: ConversionContext, leaf: KeyPath) -> Result:
    """The share of all steps over which the rate rises."""
    ratio = values.number(leaf.value)
    if (context.integer(f"{role_of(leaf)}.training_args.warmup_steps", 0) or 0) > 0:
        return implicit("warmup_steps is taken instead")
    if ratio == 0:
        return implicit("0: no warm-up")
    if not 0 < ratio <= 1:
        raise BadValue(f"expected a share from 0 to 1, got {shown(leaf.value)}")
    return leaf.to(float(ratio), note=WARMUP_NOTE)


def schedule(context: ConversionContext, leaf: KeyPath) -> Result:
    """The way a rate falls after its warm-up, and the share of all steps over which it does."""
    name = leaf.value
    if not isinstance(name, str) or name.lower() not in SCHEDULES:
        raise BadValue(f"expected one of {', '.join(SCHEDULES)}, got {shown(name)}")
    ours = SCHEDULES[name.lower()]
    if ours in ("none", "inverse_sqrt"):  # they have no end
        return leaf.to(ours)
    rising, total = warmup(context, role_of(leaf)), context.integer("max_steps", 500) or 0
    if isinstance(rising, int):
        rising = rising / total if rising < total else 0.0
    return leaf.to(ours, round(1.0 - rising, 6))


def reshard(context: ConversionContext, leaf: KeyPath) -> Result:
    """Whether parameters are sharded again after forward."""
    return leaf.to("always" if values.flag(leaf.value) else "never")


def sharded(known: tuple[str, ...], what: str = "") -> Converter:
    """The strategy of a role, one of these: it changes how its model is sharded, and no number."""

    @computed(words="all strategies become FSDP2")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        values.one_of(leaf.value, known)
        return implicit(f"{what}sharded by FSDP2 with the sizes of the strategy_config; the numbers are the same")

    return convert


def repeats(other: Callable[[ConversionContext], Any], words: str, taken: str) -> Converter:
    """A key that only repeats another one. taken: what ROLL takes where the two disagree."""

    @computed(words=words)
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        expected = other(context)
        if leaf.value is None or leaf.value == expected:
            return implicit(words)
        return implicit(f"ROLL takes {taken}{'' if expected is None else f' ({shown(expected)})'} instead")

    return convert


def recompute_granularity(context: ConversionContext, leaf: KeyPath) -> Result:
    """Whole layers or attention are recomputed. ours: the switch, and what it recomputes."""
    if leaf.value is None:
        alone = context.flag(config_key(role_of(leaf), "moe_layer_recompute"))
        return implicit("moe_layer_recompute decides") if alone else leaf.to(False)
    if leaf.value not in ("full", "selective"):
        raise BadValue(f"expected full or selective, got {shown(leaf.value)}")
    return leaf.to(True, leaf.value)


def recompute_experts(context: ConversionContext, leaf: KeyPath) -> Result:
    """Layers of experts are recomputed, whatever else is. ours: these layers, and the switch of recomputation."""
    around = context.get(config_key(role_of(leaf), "recompute_granularity"), None)
    if leaf.value is None or not values.flag(leaf.value):
        return leaf.to(False)
    if around == "full":
        return implicit("whole layers are recomputed, experts among them")
    return leaf.to(True, *([True] if around is None else []))


def template(context: ConversionContext, leaf: KeyPath) -> Result:
    """The chat template of prompts: the tokenizer's own by any of its names; another one is a method of its own.

    ours: the key that says whether it thinks; none: conversations are rendered by the template alone.
    """
    chosen = context.get("global_template", None)
    if leaf.key != "global_template" and chosen:
        return implicit(f"ROLL takes global_template = {chosen} instead")
    if leaf.value is None and leaf.key == "global_template":
        return implicit("null: data_args.template counts")
    name = "native" if leaf.value is None else values.text(leaf.value)
    if name not in THINKING:
        return no_counterpart(reason(leaf.key))
    if not leaf.ours and not THINKING[name]:
        return unsupported(reason(leaf.key))
    note = "the tokenizer's own chat template"
    return leaf.to(THINKING[name], note=note) if leaf.ours else implicit(note)


KEYS = Table(Path(__file__).with_name("keys.txt"), globals(), vars(facts))
"""The rows of all keys; a part is made with the functions of its module."""
