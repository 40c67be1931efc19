"""`actor_infer` of ROLL: sampling and the inference engine; `validation` samples by the same keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from convert.engine import values
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, Converter, KeyPath
from convert.engine.values import BadValue
from convert.roll import facts
from convert.roll.converters import KEYS, count, named_devices, reason

ROLE = "actor_infer"


def _new_tokens(context: ConversionContext, leaf: KeyPath) -> Result:
    longest = values.integer(leaf.value)
    whole = facts.response_length(context)
    if facts.is_agentic(context) or whole is None:
        return leaf.to(longest)
    if whole == longest:
        return implicit("the same as response_length")
    return implicit(f"ROLL takes the {whole} tokens of response_length instead")


def _top_k(value: Any) -> int:
    """Top-k where -1, 0 and null are off."""
    k = -1 if value is None else values.integer(value)
    return k if k > 0 else -1


# --- engine -------------------------------------------------------------------------------------------------


def _rollout_devices(context: ConversionContext, leaf: KeyPath) -> Result:
    groups = None if named_devices(context, leaf) is None else facts.engines(context)
    if groups is None:
        return implicit("null: no devices are named")
    (tp, pp, _), size, shared = facts.engine_size(context), len(groups[0]), facts.overlaps(context)
    note = f"{count(len(groups), 'engine')} of {count(size, 'device')}"
    if shared:
        part = "all" if len(shared) == len(facts.devices(context, "actor_train") or []) else f"{len(shared)}"
        note += f"; {part} of actor_train's devices too: in turns"
    placed: Any = [group[0] for group in groups] if size == 1 else groups
    return leaf.to(placed, len(groups), tp, pp, *(["time"] if shared else []), note=note)


def _engine_dimension(context: ConversionContext, leaf: KeyPath) -> Result:
    tp, pp, _ = facts.engine_size(context)
    return leaf.to(pp if leaf.ours[0].endswith("pp_size") else tp)


def _engine(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value == "sglang":
        context.warn("this build has no SGLang engine: the rollouts run in vLLM, which samples the same distribution")
        return leaf.to("vllm", note="vLLM takes the place of SGLang")
    name = values.one_of(leaf.value, ("vllm", "sglang", "hf_infer"))
    return leaf.to("transformers" if name == "hf_infer" else name)


def _engine_argument(context: ConversionContext, leaf: KeyPath) -> Result:
    name = facts.strategy(context, ROLE)
    if name == "sglang":
        return no_counterpart(reason(leaf.key))
    if name != "vllm":
        raise BadValue(f"not an argument of {name} that this converter knows")
    if leaf.value is None or leaf.value == {}:
        return implicit("null: the engine's default")
    return mapped((f"{leaf.ours[0]}.{leaf.rest}", leaf.value))


def _of_engine(name: str, converter: Converter) -> Converter:
    """A key of one engine; for another it is unknown."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if facts.strategy(context, ROLE) != name:
            raise BadValue(f"an argument of {name}, and the strategy is {facts.strategy(context, ROLE)}")
        return converter.run(context, leaf)

    return replace(converter, run=run)


def _experts(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("experts are split like every other layer")
    tp, _, dp = facts.engine_size(context)
    return leaf.to(tp * dp)


_without_engine = facts.only_with(
    lambda context: facts.strategy(context, ROLE) != "hf_infer", "hf_infer has no such option"
)
ACTOR_INFER_RULES = KEYS.rules("actor_infer", globals())


# --- validation ---------------------------------------------------------------------------------------------


_no_validation = facts.only_with(facts.has_validation, "no data to validate on is named, or eval_steps is 0")


def _validation_tokens(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.integer("val_sequence_length") is not None:
        return implicit("val_sequence_length - val_prompt_length is taken")
    return implicit("ROLL takes the length of training instead")


def _not_sampled(context: ConversionContext) -> str:
    greedy = "val_greedy is taken instead" if context.flag("val_greedy") else ""
    return _no_validation(context) or greedy


VALIDATION_RULES = KEYS.rules("validation", globals())
