"""ROLL's top-level keys, the algorithm aside: the run, its batches and lengths, its data and its output."""

from __future__ import annotations

import math
from typing import Any

from convert.engine import values
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, KeyPath
from convert.engine.values import BadValue, shown
from convert.roll import facts
from convert.roll.converters import KEYS, reason


def _rollout_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, samples = values.count(leaf.value), facts.samples_per_step(context)
    of_prompts = f"{prompts} prompts · {facts.group_size(context)} samples"
    return leaf.to(samples, note="trajectories of one step" if facts.is_agentic(context) else of_prompts)


def _no_groups(context: ConversionContext) -> str:
    if facts.is_agentic(context):
        return "an agent pipeline takes train_env_manager.group_size"
    return "" if facts.has_advantages(context) else "this pipeline compares no samples of a prompt"


def _group(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to(values.count(leaf.value))


def _longest_answer(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.integer("sequence_length") is not None:
        return implicit("ROLL takes sequence_length - prompt_length instead")
    note = "model_max_length = prompt_length + response_length"
    return leaf.to(values.integer(leaf.value), facts.sequence_length(context), note=note)


def _longest_sequence(context: ConversionContext, leaf: KeyPath) -> Result:
    length, response = values.integer(leaf.value), facts.response_length(context)
    if facts.is_agentic(context) or response is None:
        return leaf.to(length)
    return leaf.to(length, response, note="max_response_length = sequence_length - prompt_length")


def _val_sequence(context: ConversionContext, leaf: KeyPath) -> Result:
    prompt = context.integer("val_prompt_length") or context.integer("prompt_length", 1024) or 0
    return leaf.to(values.integer(leaf.value) - prompt)


def _max_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps < 1:
        return implicit("no limit: num_train_epochs ends the run")
    note = "max_steps alone ends a run of ROLL: so many epochs are never the limit"
    return leaf.to(steps, steps, note=note)


def _save_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    return leaf.to(True, steps, "sync") if steps >= 1 else leaf.to(False)


def _positive(value: Any) -> int:
    return max(values.integer(value), 0) or -1


def _eval_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps < 1:
        return implicit("no validation")
    if not facts.has_validation(context):
        return implicit("no data to validate on is named (validation.data_args.file_name)")
    return leaf.to(True, steps)


def _resume(context: ConversionContext, leaf: KeyPath) -> Result:
    if isinstance(leaf.value, bool) or leaf.value in ("true", "false", "True", "False"):
        return leaf.to(values.flag(leaf.value))
    return leaf.to(values.path(leaf.value), note="must be a checkpoint of cosmos-launch")


def _async_ratio(context: ConversionContext, leaf: KeyPath) -> Result:
    ratio = values.number(leaf.value)
    if ratio < 0 or ratio > 1_000_000:
        raise BadValue(f"expected a ratio of at least 0, got {shown(leaf.value)}")
    note = "at most so many batches are generated ahead" if ratio else "generation waits for the new weights"
    return leaf.to(math.ceil(ratio), note=note)


def _oversampled(context: ConversionContext, leaf: KeyPath, additional: int) -> Result:
    batch = max(context.integer("rollout_batch_size", 128) or 1, 1)
    return leaf.to(round(1 + additional / batch, 4))


def _additional_prompts(context: ConversionContext, leaf: KeyPath) -> Result:
    used, additional = context.flag("is_use_additional_prompts"), values.integer(leaf.value)
    if not used or additional < 1:
        return implicit("no additional prompts are used")
    return _oversampled(context, leaf, additional)


def _use_additional(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("no surplus of prompts, as here by default")
    additional = context.integer("max_additional_running_prompts", 16) or 0
    return _oversampled(context, leaf, max(additional, 0))


def _without_devices(context: ConversionContext) -> str:
    return "" if facts.used_devices(context) else "no role names its devices"


def _gpus_per_node(context: ConversionContext, leaf: KeyPath) -> Result:
    each = values.count(leaf.value)
    used = facts.used_devices(context)
    nodes = max(used) // each + 1 if used else 1
    if nodes == 1 and used and len(used) < each:
        return implicit("the roles name their devices; the machine's other GPUs are left alone")
    return leaf.to(each, *([nodes] if nodes > 1 else []))


def _reward_pretrain(context: ConversionContext, leaf: KeyPath) -> Result:
    if not facts.has_critic(context):
        return implicit("names the critic's weights, and only gae has a critic")
    if context.get("critic.model_args.model_name_or_path", None) is not None:
        return implicit("critic.model_args.model_name_or_path is taken instead")
    return leaf.to(values.path(leaf.value))


def _run_name(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.has("exp_name"):
        same = context.get("exp_name") == leaf.value
        return implicit("exp_name names the run") if same else no_counterpart(reason("tracker_kwargs.name"))
    return leaf.to(str(leaf.value))


def _profile(context: ConversionContext, leaf: KeyPath) -> Result:
    switches = ("profiler.enable_profiler", "profiler.sub_profiler_config.do_profile", *leaf.ours[1:])
    return mapped(*((switch, True) for switch in switches))


def _val_greedy(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(("validation.temperature", 0.0), ("validation.top_k", 1))


def _pipeline_cls(context: ConversionContext, leaf: KeyPath) -> Result:
    name = "" if leaf.value is None else str(leaf.value).rpartition(".")[2]
    if not name or name.startswith("SFT" if context.kind == "sft" else "RLVR"):
        return implicit("the pipeline that the file's keys are of")
    return no_counterpart(reason("pipeline_cls"))


_LOGGERS = {name: ["console", name] for name in ("wandb", "tensorboard", "swanlab", "mlflow")}
_LOGGERS["stdout"] = ["console"]
_as_text = str

PIPELINE_RULES = KEYS.rules("pipeline", globals())
