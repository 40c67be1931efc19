"""Facts that several keys of a verl file say together: sizes, switches, lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from convert.engine import values
from convert.engine.fallback import MEGATRON_SPEED
from convert.engine.keys import renamed, words
from convert.engine.model import Result, implicit, mapped, no_counterpart, unknown
from convert.engine.rules import ConversionContext, Converter, KeyPath, computed, needs
from convert.engine.table import Table
from convert.engine.values import BadValue, shown
from convert.verl.unsupported import LISTED, VERL

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
POLICY = "train.train_policy"

TRAIN, VALID = f"{POLICY}.dataset", "validation.dataset"
CORRECTION = f"{POLICY}.rollout_correction"
KL_TYPES = renamed("kl=k1 k1 abs mse=k2 k2 low_var_kl=k3 k3 full")
GRANULARITY = renamed("full selective")

_OUTCOME_ESTIMATORS = words(
    "grpo grpo_vectorized rloo rloo_vectorized remax opo gpg grpo_passk reinforce_plus_plus_baseline"
)


def group_size(context: ConversionContext) -> int:
    """Samples per prompt: rollout.n."""
    return max(context.integer(f"{ROLLOUT}.n", 1) or 1, 1)


def world_size(context: ConversionContext) -> int:
    """GPUs of the trainer: nnodes * n_gpus_per_node."""
    nodes, gpus = context.integer("trainer.nnodes", 1), context.integer("trainer.n_gpus_per_node", 8)
    return max((nodes or 1) * (gpus or 1), 1)


def is_megatron(context: ConversionContext, role: str = ACTOR) -> bool:
    """Whether a role is trained by Megatron: its strategy or class says so, or only Megatron's block is there."""
    strategy = context.text(f"{role}.strategy")
    if strategy:
        return strategy.startswith("megatron")
    if str(context.values.get(f"{role}._target_", "")).endswith(("McoreEngineConfig", "MegatronEngineConfig")):
        return True
    return bool(context.below(f"{role}.megatron"))


def is_veomni(context: ConversionContext, role: str = ACTOR) -> bool:
    """Whether a role is trained by VeOmni."""
    return context.text(f"{role}.strategy") == "veomni"


def not_veomni(context: ConversionContext) -> bool:
    """Whether the actor is trained by another engine than VeOmni."""
    return not is_veomni(context)


def is_on(switch: str) -> Callable[[ConversionContext], bool]:
    """A condition: that switch of the file is true."""
    return lambda context: context.flag(switch)


def widths(context: ConversionContext, role: str = ACTOR) -> dict[str, int]:
    """tp, pp, cp and ep of a role: Megatron's own sizes, or Ulysses' for FSDP, VeOmni's for both of its two."""
    if is_veomni(context, role):
        ring = context.integer(f"{role}.veomni.ulysses_parallel_size", 1) or 1
        experts = context.integer(f"{role}.veomni.expert_parallel_size", 1) or 1
        return {"tp": 1, "pp": 1, "cp": max(ring, 1), "ep": max(experts, 1)}
    if not is_megatron(context, role):
        name = "ulysses_sequence_parallel_size"
        own = context.integer(f"{role}.{name}", 1) or 1
        # verl copies the role's size over the engine's where it is above 1
        sequence = own if own > 1 else context.integer(f"{role}.fsdp_config.{name}", 1) or 1
        return {"tp": 1, "pp": 1, "cp": max(sequence, 1), "ep": 1}
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    return {
        short: max(context.integer(f"{role}.megatron.{name}_parallel_size", 1) or 1, 1)
        for short, name in names.items()
    }


def has_adapters(context: ConversionContext) -> bool:
    """Whether the policy trains adapters, by FSDP's key or Megatron's."""
    keys = ("lora_rank", "lora.rank")
    return any((context.integer(f"actor_rollout_ref.model.{key}", 0) or 0) > 0 for key in keys)


def data_parallel(context: ConversionContext, role: str = ACTOR) -> int:
    """Ranks with data of their own."""
    size = widths(context, role)
    return max(world_size(context) // (size["tp"] * size["pp"] * size["cp"]), 1)


def sharding(context: ConversionContext, role: str = ACTOR) -> tuple[int, int]:
    """(dp_replicate_size, dp_shard_size) by verl's rule for fsdp_size: < 0 or >= world shards over all, 1
    replicates; Megatron's distributed optimizer shards over all."""
    ranks, world = data_parallel(context, role), world_size(context)
    if is_veomni(context, role):  # which counts ranks with data of their own
        shard = context.integer(f"{role}.veomni.fsdp_size", -1) or -1
        return (1, ranks) if shard < 0 or shard >= ranks else (max(ranks // shard, 1), shard)
    size = -1 if is_megatron(context, role) else context.integer(f"{role}.fsdp_config.fsdp_size", -1)
    if size is None or size < 0 or size >= world or size == 0:
        return 1, ranks
    ring = widths(context, role)["cp"]
    shard = max(size // ring, 1)
    return max(ranks // shard, 1), shard


def rollout_gpus(context: ConversionContext) -> tuple[int, int]:
    """(nodes, GPUs of each) that rollouts have for themselves; (0, 0) where they share the trainer's.

    The recipes with a trainer and a rollout of their own have a table `rollout` for it; newer trainers have the
    same keys in actor_rollout_ref.rollout.
    """
    if recipe(context):
        nodes, gpus = context.integer("rollout.nnodes", 1), context.integer("rollout.n_gpus_per_node", 8)
        return max(nodes or 1, 1), max(gpus or 1, 1)
    nodes = context.integer(f"{ROLLOUT}.nnodes", 0) or 0
    return (nodes, context.integer(f"{ROLLOUT}.n_gpus_per_node", 8) or 8) if nodes > 0 else (0, 0)


def machines(context: ConversionContext) -> tuple[int, int]:
    """(nodes, GPUs of each) of the whole job: the trainer's, and what rollouts have for themselves.

    Ray puts two small pools on one machine, for which verl has no key: here, where 8 GPUs are enough for both.
    """
    nodes, gpus = (context.integer("trainer.nnodes", 1) or 1, context.integer("trainer.n_gpus_per_node", 8) or 8)
    rollout_nodes, rollout_gpus_per_node = rollout_gpus(context)
    if rollout_nodes == 0:
        return nodes, gpus
    if nodes == rollout_nodes and gpus + rollout_gpus_per_node <= 8:
        return nodes, gpus + rollout_gpus_per_node
    return nodes + rollout_nodes, max(gpus, rollout_gpus_per_node)


def rollout_replicas(context: ConversionContext) -> int:
    """Engines: the GPUs of the hybrid engine (or rollout's own) over the GPUs of one engine."""
    nodes, each = rollout_gpus(context)
    return max((nodes * each if nodes > 0 else world_size(context)) // engine_size(context), 1)


def engine_size(context: ConversionContext) -> int:
    """GPUs of one rollout engine; HF rollouts have one each."""
    if is_hf(context):
        return 1
    size = 1
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        size *= max(context.integer(f"{ROLLOUT}.{name}", 1) or 1, 1)
    return size


def is_hf(context: ConversionContext) -> bool:
    """Whether rollouts are made by transformers' generate."""
    return context.text(f"{ROLLOUT}.name", "vllm") == "hf"


def on_cpu(context: ConversionContext) -> bool:
    """Whether the file says that there are no GPUs."""
    return context.text("trainer.device", "cuda") == "cpu"


def response_length(context: ConversionContext) -> int:
    """Longest answer: rollout.response_length where written, else data.max_response_length."""
    own = context.integer(f"{ROLLOUT}.response_length", None)
    return own or context.integer("data.max_response_length", 512) or 512


def prompt_length(context: ConversionContext) -> int:
    """Longest prompt in tokens."""
    return context.integer("data.max_prompt_length", 512) or 512


def recipe(context: ConversionContext) -> str:
    """`fully_async` or `one_step_off`, trainers of their own whose rollouts have a table `rollout`; else ""."""
    written = context.below("async_training")
    if any(name in written for name in ("staleness_threshold", "trigger_parameter_sync_step", "require_batches")):
        return "fully_async"
    if "partial_rollout" in written:
        return "fully_async"
    own = context.below("rollout")
    return "one_step_off" if "nnodes" in own or "n_gpus_per_node" in own else ""


def is_streamed(context: ConversionContext) -> bool:
    """Whether fully_async's trainer takes its batches from a stream of samples."""
    return recipe(context) == "fully_async"


def async_mode(context: ConversionContext) -> str:
    """A recipe, or `colocate_async` or `separate_async` of the newer trainer; "" for the synchronous ones."""
    mode = recipe(context) or context.text("trainer.v1.trainer_mode", "sync")
    if mode in ("fully_async", "one_step_off"):
        return mode
    return mode if mode in ("colocate_async", "separate_async") and context.flag("trainer.use_v1", True) else ""


def prompts_per_step(context: ConversionContext) -> int:
    """Prompts of one training step: data.train_batch_size, or what fully_async fetches at once."""
    if not is_streamed(context):
        return context.integer("data.train_batch_size", 1024) or 1024
    batches = context.number("async_training.require_batches", 1) or 1
    return max(int((context.integer(f"{ACTOR}.ppo_mini_batch_size", 256) or 256) * batches), 1)


def sync_interval(context: ConversionContext) -> int:
    """Steps between two versions that fully_async hands to its rollouts."""
    return max(context.integer("async_training.trigger_parameter_sync_step", 4) or 1, 1)


def staleness(context: ConversionContext) -> int:
    """allowed_outdated_steps of fully_async: ceil((1 + s) k) - 1, s = staleness_threshold, k = sync_interval.

    Between two versions, k steps apart, its rollouts may hold or start (1 + s) k R samples in all, those left
    from before included; R are trained per step, first come, first served. So the last of them, made with the
    weights of step t, is trained in step t + ceil((1 + s) k) - 1. Without staleness that is k - 1, the least
    that an interval of k allows; s = 1 and k = 1 is one step off.
    """
    share = Fraction(str(context.number("async_training.staleness_threshold", 0.1) or 0))
    return max(math.ceil((1 + max(share, Fraction(0))) * sync_interval(context)) - 1, 0)


def estimator(context: ConversionContext) -> str:
    """The advantage estimator by verl's name."""
    return context.text("algorithm.adv_estimator", "gae")


def has_critic(context: ConversionContext) -> bool:
    """verl's rule: critic.enable where it is written, else only gae has one."""
    written = context.get("critic.enable", None)
    return written if isinstance(written, bool) else estimator(context) == "gae"


def has_reference(context: ConversionContext) -> bool:
    """verl makes a reference model for a KL term, in the loss or in the reward."""
    return context.flag(f"{ACTOR}.use_kl_loss") or context.flag("algorithm.use_kl_in_reward")


def no_critic(context: ConversionContext) -> str:
    """Why keys of the critic have no effect; "" if they have."""
    if has_critic(context):
        return ""
    return f"verl makes no critic for adv_estimator = {estimator(context)}"


def no_reference(context: ConversionContext) -> str:
    """Why keys of the reference model have no effect; "" if they have."""
    if has_reference(context):
        return ""
    return "verl makes no reference model while use_kl_loss and use_kl_in_reward are false"


no_reward_model = needs("reward_model.enable", "no effect while reward_model.enable = false")
"""Why keys of the reward model have no effect; "" if they have."""


def no_discount(context: ConversionContext) -> str:
    """Why gamma has no effect; "" if it has."""
    name = estimator(context)
    return f"{name} spreads one score over the answer: no discount" if name in _OUTCOME_ESTIMATORS else ""


def not_gae(context: ConversionContext) -> str:
    """Why lambda has no effect; "" if it has."""
    return "" if estimator(context) == "gae" else f"{estimator(context)} has no lambda"


def not_vllm(context: ConversionContext) -> str:
    """Why an option of vLLM has no effect; "" if it has."""
    return "HF rollouts have no such option" if is_hf(context) else ""


greedy_validation = needs(
    f"{ROLLOUT}.val_kwargs.do_sample", "validation is greedy while val_kwargs.do_sample = false"
)
"""Why sampling keys of validation have no effect; "" if they have."""


def without_counterpart(key: str) -> Result:
    """`none` with the reason of the closed list; `unknown` where the list has none."""
    reason = VERL.reason(key)
    return no_counterpart(reason) if reason is not None else unknown("not a value that this converter knows")


def lacking(*neutral: Any, words: str = "") -> Converter:
    """`implicit` for values that ask for nothing, else without counterpart, with the reason of the list."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if any(leaf.value == value and type(leaf.value) is type(value) for value in (None, *neutral)):
            return implicit("asks for nothing")
        return without_counterpart(leaf.key)

    return Converter(run, (), words or "a value that asks for something has no counterpart: see the list")


def switched(switch: str) -> Converter:
    """A table that one flag turns on: off, all of it is `implicit`; on, it has no counterpart."""

    @computed(words=f"has an effect with `{switch}: true` only")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        if not context.flag(switch):
            return implicit(f"off: {switch} is not true")
        return without_counterpart(leaf.key)

    return convert


def path_and_name(table: str, ours: str, validation: str = "") -> Converter:
    """The keys `path` and `name` of a table, which together name some code.

    validation: the key that has the same where validation has files of its own.
    """

    @computed(ours, *([validation] if validation else []), words="`path:name`")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        file, name = context.get(f"{table}.path", None), context.get(f"{table}.name", None)
        if isinstance(file, str) and isinstance(name, str):
            code = f"{values.path(file)}:{name}"
            if validation and context.get("data.val_files", None):
                return mapped((ours, code), (validation, code), note="path:name; of both datasets")
            return leaf.to(code, note="path:name")
        return implicit("null: none" if leaf.value is None else "no effect without the other one")

    return convert


def replays_routing(context: ConversionContext) -> bool:
    """Whether the actor is trained with the experts that the engine chose."""
    tables = ("", "megatron.", "veomni.")
    modes = (context.get(f"{ACTOR}.{table}router_replay.mode", None) for table in tables)
    return "R3" in modes


@computed(f"{POLICY}.routing_replay", words="`R3` → `ids`; `R2`: see the list", null="null: off")
def router_replay(context: ConversionContext, leaf: KeyPath) -> Result:
    """The actor's `router_replay.mode`. R3 replays what the engine chose, R2 what the trainer did."""
    mode = values.text(leaf.value)
    if mode == "disabled":
        return implicit("the trainer chooses experts by itself")
    if mode == "R2":
        return without_counterpart(leaf.key)
    if mode != "R3":
        raise BadValue(f"expected disabled, R2 or R3, got {shown(mode)}")
    stops = "verl ends at the first batch without rollout.enable_rollout_routing_replay"
    recorded = context.flag(f"{ROLLOUT}.enable_rollout_routing_replay")
    return leaf.to("ids", note="" if recorded else stops)


def recorded_routing(context: ConversionContext, leaf: KeyPath) -> Result:
    """The engine's part of R3."""
    values.flag(leaf.value)
    if replays_routing(context):
        return implicit("follows from train.train_policy.routing_replay")
    return implicit("verl uses the experts that engines return with router_replay.mode = R3 alone")


def compiled(context: ConversionContext, leaf: KeyPath) -> Result:
    """True or false as it is, unless replayed experts enter the layers from outside."""
    if replays_routing(context):
        return leaf.to(False, note="layers that replayed experts enter are not compiled")
    return leaf.to(values.flag(leaf.value))


KEYS = Table(Path(__file__).with_name("keys.txt"), globals(), LISTED.constants, {"MEGATRON_SPEED": MEGATRON_SPEED})
"""The rows of all keys; a part is made with the functions of its module."""
