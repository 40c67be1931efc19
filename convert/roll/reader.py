"""ROLL: RLVR, SFT and agent pipelines (`rlvr_config.yaml`, `sft_config.yaml`, `agentic_*.yaml`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from convert.engine import values
from convert.engine.keys import unsupported_key, words
from convert.engine.model import Result, implicit
from convert.engine.rules import HYDRA_KEYS, ConversionContext, KeyPath, Reader, Rule
from convert.engine.source import Source
from convert.engine.values import BadValue
from convert.roll.actor_infer import ACTOR_INFER_RULES, VALIDATION_RULES
from convert.roll.algorithm import ALGORITHM_RULES
from convert.roll.converters import KEYS, POLICY, reason
from convert.roll.facts import engine_size, engines, global_batch, has_critic, is_agentic, mesh
from convert.roll.pipeline import PIPELINE_RULES
from convert.roll.rewards import REWARD_RULES, scorers
from convert.roll.training import ACTOR_TRAIN_RULES, ROLE_RULES
from convert.roll.unsupported import DISTILLATION_ROLES, DPO_KEYS, ROLL

SFT_ROLE = "sft_train"
_ROLES = ("actor_train", "actor_infer")
_PIPELINE = ("rollout_batch_size", "num_return_sequences_in_group")
_AGENT = ("train_env_manager", "custom_envs", "custom_env", "env_manager_cls")

_RULES = (
    *(*PIPELINE_RULES, *ALGORITHM_RULES, *ACTOR_TRAIN_RULES),
    *(*ACTOR_INFER_RULES, *VALIDATION_RULES, *ROLE_RULES, *REWARD_RULES),
)


# --- supervised fine-tuning ---------------------------------------------------------------------------------


_SHARED = words(
    "pipeline_cls pretrain exp_name seed output_dir track_with tracker_kwargs.project tracker_kwargs.name "
    "save_steps max_ckpt_to_keep logging_steps eval_steps resume_from_checkpoint num_gpus_per_node num_nodes "
    "profiler_timeline profiler_memory report_length_and_rewards is_offload_states "
    "is_offload_optimizer_states_in_train_step save_logging_board_dir render_save_dir model_download_type"
)
"""The top-level keys that mean the same in every pipeline of ROLL, and that a supervised file has."""


def _accumulation(context: ConversionContext, leaf: KeyPath) -> Result:
    batch, formula = global_batch(context)
    return leaf.to(batch, note=f"global batch {formula}")


def _max_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps < 1:
        return implicit("num_train_epochs ends the run")
    return leaf.to(steps, steps, note="max_steps alone ends the run")


_OWN = {rule.key: rule for rule in KEYS.rules("sft_train", globals())}


def _of_the_role(rule: Rule) -> Rule:
    """A rule of the policy as one of `sft_train`, with the policy's name as another spelling: `facts` ask by it."""
    key, *also = (name.replace("actor_train", SFT_ROLE, 1) for name in (rule.key, *rule.also))
    return replace(_OWN.get(rule.key, rule), key=key, also=(*also, rule.key, *rule.also))


SFT_RULES = (
    *(rule for rule in PIPELINE_RULES if rule.key in _SHARED),
    *KEYS.rules("sft", globals()),
    *map(_of_the_role, ACTOR_TRAIN_RULES),
)


# --- the file -----------------------------------------------------------------------------------------------


def _detect(source: Source) -> str | None:
    if source.has(SFT_ROLE):
        return "sft"
    if not any(map(source.has, (*_ROLES, *_PIPELINE, *DISTILLATION_ROLES))):
        return None
    if any(map(source.has, _AGENT)):
        return "agentic"
    if any(map(source.has, DISTILLATION_ROLES)):
        return "distillation"
    rolls_out = any(map(source.has, ("actor_infer", *_PIPELINE)))
    pairs = any(map(source.has, DPO_KEYS))
    return "dpo" if pairs or (source.has("train_batch_size") and not rolls_out) else "rlvr"


def _artefact(key: str, value: Any) -> Result | None:
    """Recognise the keys of Hydra, wherever they stand."""
    is_hydras = key.rpartition(".")[2] in ("_target_", *HYDRA_KEYS)
    return implicit("tells Hydra how to make the table, which ROLL reads as it is") if is_hydras else None


def _finish(context: ConversionContext) -> None:
    """Add what ROLL does without a key for it, and sizes that our defaults would set otherwise."""
    context.add("train.compile", False, "ROLL does not compile the policy")
    _add_meshes(context)
    if context.kind == "sft":
        context.add(f"{POLICY}.type", "sft", "ROLL's SFT pipeline")
        context.add(f"{POLICY}.dataloader_shuffle", False, "ROLL keeps the order of the file")
    else:
        _add_data(context)
    _add_pipeline(context)
    models = ("pretrain", "actor_train.model_args.model_name_or_path")
    if all(context.get(key, None) is None for key in models):
        context.warn("no model is named (pretrain): write policy.model_name_or_path")
    if has_critic(context) and not context.has("adv_estimator"):
        context.warn("adv_estimator is not set, and ROLL's default is gae: a critic is trained")


def _add_pipeline(context: ConversionContext) -> None:
    """Name the pipeline: the script that starts a file chooses it, here its keys do, unless one of them names it."""
    kind = "distillation" if any(map(context.below, DISTILLATION_ROLES)) else context.kind
    if kind not in ("rlvr", "sft") and not context.has("pipeline_cls"):
        title = "DPO" if kind == "dpo" else kind
        note = f"the file is of ROLL's {title} pipeline; {reason('pipeline_cls')}"
        context.add(unsupported_key("pipeline"), kind, note)


def _add_meshes(context: ConversionContext) -> None:
    try:
        for key, size in mesh(context).sizes("policy"):
            context.add(key, size, "follows from the devices of the role that trains")
        if context.kind == "sft":
            return
        for name, size in zip(("tp", "pp"), engine_size(context), strict=False):
            if name == "tp" or size > 1:
                context.add(f"rollout.parallelism.{name}_size", size, "follows from actor_infer's engine")
        _check_agreement(context)
    except BadValue:
        return  # the entries of the keys that contradict each other say so


def _check_agreement(context: ConversionContext) -> None:
    groups = engines(context)
    written = context.integer("actor_infer.num_gpus_per_worker", None)
    sizes = engine_size(context)
    if groups and written not in (None, math.prod(sizes)):
        factors = " · ".join(str(size) for size in sizes if size > 1) or "1"
        context.warn(f"num_gpus_per_worker = {written}, but the engine is of {factors} devices, which ROLL takes")


def _add_data(context: ConversionContext) -> None:
    if is_agentic(context):
        context.warn("the environments of an agent pipeline have no keys here yet: the data must be named by hand")
        return
    if not context.has("actor_train.data_args.response"):
        note = "the column that ROLL's rule rewards read"
        context.add(f"{POLICY}.response_column_name", "ground_truth", note)
    if not any(scorers(context).values()):
        note = "no reward of the file has a function here: write one"
        context.add(f"{POLICY}.reward_function", "path/to/reward.py:function", note)
        context.warn(f"{POLICY}.reward_function must be written by hand")


READER = Reader(
    system="roll",
    title="ROLL",
    kinds={
        "rlvr": "reinforcement learning with verifiable rewards",
        "sft": "supervised fine-tuning",
        "agentic": "an agent pipeline",
        "dpo": "a DPO pipeline",
        "distillation": "a distillation pipeline",
    },
    unsupported=ROLL,
    detect=_detect,
    signs=(*_ROLES, *_PIPELINE, SFT_ROLE),
    own=(*_ROLES, SFT_ROLE),
    rules=lambda kind: SFT_RULES if kind == "sft" else _RULES,
    finish=_finish,
    prose=tuple(paragraph for _, paragraph in KEYS.parts["prose"]),
    artefacts=_artefact,
)
