"""verl: configurations of its RL trainers (FSDP and Megatron), its SFT trainer and its evaluation.

    actor_rollout_ref, algorithm, critic …   ─▶ rl          actor, rollout, algorithm, reward, data, trainer
    optim + model (partial_pretrain, path)   ─▶ sft         sft
    data.path + data.response_key            ─▶ evaluation  reward

verl counts prompts where we count samples, is synchronous by default, and keeps trainer and engine on the same
GPUs: what follows from that for a whole file is added in `_finish`. Facts of several keys are in `facts`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from convert.engine.keys import words
from convert.engine.model import Result, implicit, mapped, unknown
from convert.engine.rules import HYDRA_KEYS, ConversionContext, KeyPath, Reader, Rule
from convert.engine.source import Source
from convert.verl import actor, algorithm, data, mesh, optim, rollout, shared, trainer
from convert.verl.algorithm import needs_critic, reward_name
from convert.verl.facts import KEYS, POLICY, async_mode, has_critic, staleness, sync_interval, widths
from convert.verl.unsupported import VERL

KINDS = {
    "rl": "reinforcement learning (ppo_trainer.yaml, ppo_megatron_trainer.yaml)",
    "sft": "supervised fine-tuning (sft_trainer.yaml)",
    "evaluation": "evaluation (evaluation.yaml)",
}
_SIGNS = ("actor_rollout_ref", "algorithm.adv_estimator", "optim with model.partial_pretrain", "data.response_key")


def _detect(source: Source) -> str | None:
    def has(keys: str) -> bool:
        return any(source.has(*key.split(".")) for key in words(keys))

    if has("actor_rollout_ref algorithm.adv_estimator algorithm.kl_ctrl"):
        return "rl"
    if has("optim.lr") and has("data.train_files model.path model.fsdp_config"):
        return "sft"
    if has("model.partial_pretrain data.messages_key data.max_length data.multiturn 优化器配置"):
        return "sft"
    if has("data.response_key data.reward_model_key evaluation.metrics 数据 自定义奖励函数"):
        return "evaluation"
    if has("data.train_files reward_model.reward_manager critic.cliprange_value"):
        return "rl"
    return "rl" if has("trainer.default_hdfs_dir custom_reward_function") else None


@cache
def _rules(kind: str) -> tuple[Rule, ...]:
    silent = {"epochs": 30 if kind == "rl" else 4, "project": "verl_examples" if kind == "rl" else "gsm8k-sft"}
    modules = (data, actor, mesh, optim, rollout, algorithm, trainer, shared)
    return KEYS.rules(kind, silent, *map(vars, modules))


def _of_own_class(context: ConversionContext, leaf: KeyPath) -> Result | None:
    """Convert a key of `data` that only a dataset class of the user's can read: its `config` answers for [custom]."""
    name = leaf.key.removeprefix("data.")
    has_class = isinstance(context.get("data.custom_cls.path", None), str)
    if name == leaf.key or leaf.value is None or not has_class:
        return None
    return mapped((f"custom.{name}", leaf.value), note="for the dataset class, whose `config` has it")


def _artefact(key: str, value: Any) -> Result | None:
    """Convert what belongs to Hydra, wherever it stands: `_target_` names a class, verl's own or another one."""
    name = key.rpartition(".")[2]
    if name in HYDRA_KEYS:
        return implicit("tells Hydra how to make the table")
    if name != "_target_":
        return None
    is_own = str(value).startswith("verl.") or value is None
    return implicit("names verl's own class of this table") if is_own else unknown("not a class of verl's own")


def _finish(context: ConversionContext) -> None:
    """Add what follows from verl as such."""
    if context.kind == "evaluation":
        return
    sections = ("train", "critic") if context.kind == "rl" and has_critic(context) else ("train",)
    for section in sections:
        context.add(f"{section}.epsilon", 1e-8, "torch's default, which verl leaves as it is")
    if not context.has("trainer.default_local_dir"):
        run = "gsm8k" if context.kind == "rl" else "test"
        project, name = context.text("trainer.project_name"), context.text("trainer.experiment_name", run)
        note = "verl's default: checkpoints/ with trainer.project_name and experiment_name"
        context.add("train.output_dir", f"checkpoints/{project}/{name}", note)
    if context.kind == "sft":
        context.add(f"{POLICY}.type", "sft", "sft_trainer")
        return
    context.add("policy.parallelism.tp_size", widths(context)["tp"], "verl's default: no tensor parallelism")
    mode = async_mode(context)
    if not mode:
        context.add(f"{POLICY}.on_policy", True, "verl trains on what the newest weights have made")
    elif mode == "one_step_off":
        context.add(f"{POLICY}.allowed_outdated_steps", 1, "one_step_off: a batch is made while one is trained")
    elif mode == "fully_async":
        bound = "fully_async: ⌈(1 + staleness_threshold) · trigger_parameter_sync_step⌉ − 1"
        context.add(f"{POLICY}.allowed_outdated_steps", staleness(context), bound)
        interval = "fully_async's default: trigger_parameter_sync_step = 4"
        context.add("train.sync_weight_interval", sync_interval(context), interval)
    elif not context.has("trainer.v1.sampler.max_off_policy_threshold"):
        context.add(f"{POLICY}.allowed_outdated_steps", 8, "verl's default: max_off_policy_threshold = 8")
    if reward_name(context) == "by_source":
        note = "no custom_reward_function: the scorer of each row's data source"
        context.add(f"{POLICY}.reward_function", "by_source", note)
    column = "reward_model.ground_truth"
    context.add(f"{POLICY}.response_column_name", column, "where verl's data sets keep the reference answer")
    if needs_critic(context):
        context.add("critic.enable", True, "adv_estimator = gae needs a critic")
    _warn(context)


def _warn(context: ConversionContext) -> None:
    if context.below("algorithm.kl_ctrl") and not context.has("algorithm.use_kl_in_reward"):
        context.warn(
            "algorithm.kl_ctrl is written without algorithm.use_kl_in_reward: verl before 0.3 put this KL into "
            "the reward, later versions do not; theirs of today is taken. To keep it, write "
            f"{POLICY}.kl_in_reward.beta = {context.number('algorithm.kl_ctrl.kl_coef', 0.001)}"
        )
    top_k = context.number("actor_rollout_ref.rollout.top_k", -1) or -1
    if (context.number("actor_rollout_ref.rollout.top_p", 1.0) or 1.0) < 1.0 and top_k < 1:
        context.warn(
            "actor_rollout_ref.rollout.top_p below 1 without a top_k: the trainer renormalises over the ids that "
            "top_p left, which are too many to send for a large vocabulary; `validate` names the two ways out"
        )


READER = Reader(
    system="verl",
    title="verl",
    kinds=KINDS,
    unsupported=VERL,
    detect=_detect,
    signs=_SIGNS,
    own=("actor_rollout_ref", "algorithm.adv_estimator", "model.partial_pretrain"),
    rules=_rules,
    finish=_finish,
    artefacts=_artefact,
    own_code=_of_own_class,
)
