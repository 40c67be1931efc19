"""verl's rewards: `reward_model`, `custom_reward_function`, the newer `reward` that holds both, and evaluation.yaml,
where answers of a file are scored by the same functions."""

from __future__ import annotations

from convert.engine import values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath
from convert.verl.facts import POLICY, response_length, without_counterpart


def reward_name(context: ConversionContext) -> str:
    """The reward function of the job: the user's, or the scorer that goes by the row's data source."""
    file = context.get("custom_reward_function.path", None)
    if not isinstance(file, str) or not file:
        return "by_source"
    name = context.get("custom_reward_function.name", None)
    return f"{values.path(file)}:{name if isinstance(name, str) and name else 'compute_score'}"


def _custom_reward(context: ConversionContext, leaf: KeyPath) -> Result:
    name = reward_name(context)
    if name == "by_source":
        return implicit("null: the built-in scorer of each row's data source (by_source)")
    context.warn(
        f"{name} is called with verl's arguments (data_source, solution_str, ground_truth, extra_info) there; "
        "here a reward function takes the answer and the row: adapt it, see docs/migrate.md"
    )
    return leaf.to(name, note="path:name")


def _manager(context: ConversionContext, leaf: KeyPath) -> Result:
    name = "naive" if leaf.value is None else values.text(leaf.value)
    if name in ("naive", "batch", "prime", "dapo"):
        return implicit("rewards always run in processes of their own, in parallel with generation")
    return without_counterpart(leaf.key)


def _overlong_penalty(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix, ours = "reward_model.reward_kwargs.overlong_buffer_cfg", f"{POLICY}.overlong_reward"
    if not context.flag(f"{prefix}.enable"):
        return implicit("false: answers are not penalised for their length")
    name = leaf.key.rpartition(".")[2]
    if name == "enable":
        return mapped((f"{ours}.enable_overlong_penalty", True))
    if name == "len":
        longest = response_length(context)
        note = f"the penalty begins at {longest} - {leaf.value} tokens"
        return mapped((f"{ours}.buffer_length", values.integer(leaf.value)), note=note)
    return mapped((f"{ours}.penalty_factor", values.number(leaf.value)))


def _reward_kwargs(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == {}:
        return implicit("null: none")
    return mapped((f"custom.{leaf.rest}", leaf.value), note="[custom] hands it to your functions")


def _one_module(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, "", []):
        return implicit("null: none")
    return leaf.to([values.text(leaf.value)])


def _reference_column(context: ConversionContext, leaf: KeyPath) -> Result:
    column = values.text(leaf.value)
    return leaf.to(f"{column}.ground_truth", note="its `ground_truth`")


def _scored_by(context: ConversionContext, leaf: KeyPath) -> Result:
    name = reward_name(context)
    if name == "by_source":
        return implicit("null: the built-in scorer of each row's data source (by_source)")
    return leaf.to(name, note="path:name")
