"""ROLL's top-level keys, the algorithm aside: the run, its batches and lengths, its data and its output."""

from __future__ import annotations

import math
from typing import Any

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, KeyPath, Rule, computed
from convert.engine.values import BadValue, shown
from convert.roll.converters import POLICY, lost, reason, template
from convert.roll.facts import (
    group_size,
    has_advantages,
    has_critic,
    has_validation,
    is_agentic,
    response_length,
    samples_per_step,
    sequence_length,
    used_devices,
    without_devices,
)

_BATCH = "train.train_batch_per_replica"


@computed(_BATCH, words="prompts · num_return_sequences_in_group samples make one training step")
def _rollout_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts = values.count(leaf.value)
    samples = samples_per_step(context)
    if is_agentic(context):
        return mapped((_BATCH, samples), note="trajectories of one step")
    return mapped((_BATCH, samples), note=f"{prompts} prompts · {group_size(context)} samples")


def _no_groups(context: ConversionContext) -> str:
    if is_agentic(context):
        return "an agent pipeline takes train_env_manager.group_size"
    return "" if has_advantages(context) else "this pipeline compares no samples of a prompt"


@computed("rollout.n_generation", _BATCH, words="the size of a group")
def _group(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(("rollout.n_generation", values.count(leaf.value)))


@computed(
    "rollout.max_response_length",
    "policy.model_max_length",
    words="the longest answer; with prompt_length the longest sequence",
    null="null: follows from sequence_length",
)
def _response_length(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.integer("sequence_length") is not None:
        return implicit("ROLL takes sequence_length - prompt_length instead")
    length = values.integer(leaf.value)
    return mapped(
        ("rollout.max_response_length", length),
        ("policy.model_max_length", sequence_length(context)),
        note="model_max_length = prompt_length + response_length",
    )


@computed(
    "policy.model_max_length",
    "rollout.max_response_length",
    words="the longest sequence; without prompt_length the longest answer",
    null="null: prompt_length + response_length",
)
def _sequence_length(context: ConversionContext, leaf: KeyPath) -> Result:
    length, response = values.integer(leaf.value), response_length(context)
    if is_agentic(context) or response is None:
        return mapped(("policy.model_max_length", length))
    return mapped(
        ("policy.model_max_length", length),
        ("rollout.max_response_length", response),
        note="max_response_length = sequence_length - prompt_length",
    )


@computed(
    "validation.max_response_length",
    words="val_sequence_length - val_prompt_length",
    null="null: as in training",
)
def _val_sequence(context: ConversionContext, leaf: KeyPath) -> Result:
    prompt = context.integer("val_prompt_length") or context.integer("prompt_length", 1024) or 0
    return mapped(("validation.max_response_length", values.integer(leaf.value) - prompt))


@computed("train.max_num_steps", "train.epoch", words="the length of the run; it alone ends a run of ROLL")
def _max_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps < 1:
        return implicit("no limit: num_train_epochs ends the run")
    return mapped(
        ("train.max_num_steps", steps),
        ("train.epoch", steps),
        note="max_steps alone ends a run of ROLL: so many epochs are never the limit",
    )


@computed(
    "train.ckpt.enable_checkpoint",
    "train.ckpt.save_freq",
    "train.ckpt.save_mode",
    words="a checkpoint every so many steps, while training waits; 0: none",
)
def _save_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps < 1:
        return mapped(("train.ckpt.enable_checkpoint", False))
    return mapped(
        ("train.ckpt.enable_checkpoint", True),
        ("train.ckpt.save_freq", steps),
        ("train.ckpt.save_mode", "sync"),
    )


def _kept(value: Any) -> int:
    kept = values.integer(value)
    return kept if kept > 0 else -1


@computed(
    "validation.enable", "validation.freq", words="validation every so many steps, if its data is named"
)
def _eval_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps < 1:
        return implicit("no validation")
    if not has_validation(context):
        return implicit("no data to validate on is named (validation.data_args.file_name)")
    return mapped(("validation.enable", True), ("validation.freq", steps))


@computed("train.resume", words="true: the newest checkpoint; a path: that one", null="null: a fresh run")
def _resume(context: ConversionContext, leaf: KeyPath) -> Result:
    if isinstance(leaf.value, bool) or leaf.value in ("true", "false", "True", "False"):
        return mapped(("train.resume", values.flag(leaf.value)))
    return mapped(("train.resume", values.path(leaf.value)), note="must be a checkpoint of cosmos-launch")


@computed(f"{POLICY}.allowed_outdated_steps", words="the staleness bound, rounded up; 0: on-policy")
def _async_ratio(context: ConversionContext, leaf: KeyPath) -> Result:
    ratio = values.number(leaf.value)
    if ratio < 0 or ratio > 1_000_000:
        raise BadValue(f"expected a ratio of at least 0, got {shown(leaf.value)}")
    note = "at most so many batches are generated ahead" if ratio else "generation waits for the new weights"
    return mapped((f"{POLICY}.allowed_outdated_steps", math.ceil(ratio)), note=note)


@computed("controller.oversample", words="1 + additional prompts / rollout_batch_size, if they are used")
def _additional_prompts(context: ConversionContext, leaf: KeyPath) -> Result:
    used = context.flag("is_use_additional_prompts") or context.flag("use_additional_prompts")
    more, batch = values.integer(leaf.value), context.integer("rollout_batch_size", 128) or 1
    if not used or more < 1:
        return implicit("no additional prompts are used")
    return mapped(("controller.oversample", round(1 + more / max(batch, 1), 4)))


@computed("controller.oversample", words="with max_additional_running_prompts")
def _use_additional(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("no surplus of prompts, as here by default")
    more = context.integer("max_additional_running_prompts", 16) or 0
    batch = max(context.integer("rollout_batch_size", 128) or 1, 1)
    return mapped(("controller.oversample", round(1 + max(more, 0) / batch, 4)))


@computed(
    "placement.gpus_per_node",
    "placement.nodes",
    words="GPUs of each machine; the machines are as many as the devices need",
)
def _gpus_per_node(context: ConversionContext, leaf: KeyPath) -> Result:
    each = values.count(leaf.value)
    used = used_devices(context)
    nodes = max(used) // each + 1 if used else 1
    if nodes > 1:
        return mapped(("placement.gpus_per_node", each), ("placement.nodes", nodes))
    if used and len(used) < each:
        return implicit("the roles name their devices; the machine's other GPUs are left alone")
    return mapped(("placement.gpus_per_node", each))


@computed(
    "critic.model_name_or_path",
    words="the critic's initial weights, if there is one",
    null="null: the policy's model",
)
def _reward_pretrain(context: ConversionContext, leaf: KeyPath) -> Result:
    if not has_critic(context):
        return implicit("names the critic's weights, and only gae has a critic")
    if context.get("critic.model_args.model_name_or_path", None) is not None:
        return implicit("critic.model_args.model_name_or_path is taken instead")
    return mapped(("critic.model_name_or_path", values.path(leaf.value)))


@computed("logging.experiment_name", words="the tracker's name of the run, where exp_name is silent")
def _run_name(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.has("exp_name"):
        same = context.get("exp_name") == leaf.value
        return implicit("exp_name names the run") if same else no_counterpart(reason("tracker_kwargs.name"))
    return mapped(("logging.experiment_name", str(leaf.value)))


_PROFILED = (("profiler.enable_profiler", True), ("profiler.sub_profiler_config.do_profile", True))


@computed("profiler.enable_profiler", words="a trace of the trainer")
def _profile(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(*_PROFILED)


@computed("profiler.enable_profiler", "profiler.sub_profiler_config.profile_memory", words="with memory")
def _profile_memory(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(*_PROFILED, ("profiler.sub_profiler_config.profile_memory", True))


@computed("validation.temperature", words="true → 0.0")
def _val_greedy(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(("validation.temperature", 0.0), ("validation.top_k", 1))


@computed(words="the pipelines RLVR and SFT have a counterpart")
def _pipeline_cls(context: ConversionContext, leaf: KeyPath) -> Result:
    name = "" if leaf.value is None else str(leaf.value).rpartition(".")[2]
    if not name or name.startswith("SFT" if context.kind == "sft" else "RLVR"):
        return implicit("the pipeline that the file's keys are of")
    return no_counterpart(reason("pipeline_cls"))


_LOGGERS = {
    "wandb": ["console", "wandb"],
    "tensorboard": ["console", "tensorboard"],
    "swanlab": ["console", "swanlab"],
    "mlflow": ["console", "mlflow"],
    "stdout": ["console"],
}
_FLAGS_OFF = (False, None)

PIPELINE_RULES: tuple[Rule, ...] = (
    Rule("pipeline_cls", _pipeline_cls),
    Rule("pretrain", to.path("policy.model_name_or_path")),
    Rule("reward_pretrain", _reward_pretrain),
    Rule("rollout_batch_size", _rollout_batch, default=128),
    Rule("num_return_sequences_in_group", _group, default=1, when=_no_groups),
    Rule(
        "prompt_length",
        to.integer(f"{POLICY}.dataset.max_prompt_length", "longer prompts are left out, as in ROLL", null=""),
        default=1024,
    ),
    Rule("response_length", _response_length),
    Rule("sequence_length", _sequence_length),
    Rule(
        "val_prompt_length", to.integer("validation.dataset.max_prompt_length", "as it is", "as in training")
    ),
    Rule("val_sequence_length", _val_sequence),
    Rule("exp_name", to.text("logging.experiment_name")),
    Rule("seed", to.integer("train.seed"), default=42),
    Rule("output_dir", to.path("train.output_dir"), default="./output"),
    Rule(
        "track_with",
        to.choice("logging.logger", _LOGGERS, words="as well as the console; `stdout`: the console alone"),
        default="tensorboard",
    ),
    Rule("tracker_kwargs.project", to.converted("logging.project_name", str, "the tracker's project", "")),
    Rule("tracker_kwargs.name", _run_name),
    Rule("max_steps", _max_steps, default=500),
    Rule("save_steps", _save_steps, default=50),
    Rule(
        "max_ckpt_to_keep",
        to.converted("train.ckpt.max_keep", _kept, "0 → -1: all are kept", null=""),
        default=0,
    ),
    Rule("logging_steps", lost("logging_steps", 1)),
    Rule("eval_steps", _eval_steps, default=10),
    Rule("resume_from_checkpoint", _resume),
    Rule("async_generation_ratio", _async_ratio, default=0),
    Rule(
        "is_num_return_sequences_expand",
        to.flag("rollout.n_generation_to_batch", "the samples of a group as requests of their own", null=""),
    ),
    Rule("is_use_additional_prompts", _use_additional, also=("use_additional_prompts",)),
    Rule("max_additional_running_prompts", _additional_prompts),
    Rule("max_running_requests", to.integer("rollout.max_concurrent_samples"), default=128),
    Rule("num_gpus_per_node", _gpus_per_node, default=8, when=without_devices),
    Rule("num_nodes", to.always("follows from the devices and num_gpus_per_node, as in ROLL")),
    Rule("profiler_timeline", to.unless(_FLAGS_OFF, "no trace", _profile)),
    Rule("profiler_memory", to.unless(_FLAGS_OFF, "no trace", _profile_memory)),
    Rule("report_length_and_rewards", lost("report_length_and_rewards")),
    Rule(
        "is_offload_states",
        to.unless(
            _FLAGS_OFF,
            "states stay on the GPU",
            to.always("what shares a GPU makes room by placement.share; what does not has no need to"),
        ),
    ),
    Rule(
        "is_offload_optimizer_states_in_train_step",
        to.unless(_FLAGS_OFF, "states stay on the GPU", to.flag("train.optimizer_offload", "as it is")),
    ),
    Rule("global_template", template("global_template")),
    *(
        Rule(key, lost(key))
        for key in ("rollout_dump_dir", "save_logging_board_dir", "render_save_dir", "model_download_type")
    ),
    Rule("val_greedy", to.unless(_FLAGS_OFF, "validation samples", _val_greedy)),
    Rule("val_n_sample", to.integer("validation.n_generation")),
)
