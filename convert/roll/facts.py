"""Facts that several keys of a ROLL file state together: devices, meshes, batches, and which roles there are.

    world  = devices of a training role
    fsdp2, deepspeed   global batch = per_device_train_batch_size · gradient_accumulation_steps · world / ulysses
    megatron           global batch = per_device_train_batch_size · gradient_accumulation_steps · world / (tp·pp·cp)
    rollout            samples = rollout_batch_size · num_return_sequences_in_group

One pipeline step of ROLL rolls out `samples` and takes samples / global batch optimizer steps on them (per
ppo_epoch). Expert parallelism regroups the same ranks and divides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from convert.engine.keys import words
from convert.engine.rules import ConversionContext, When
from convert.engine.values import BadValue
from convert.roll.device_mapping import DeviceMappingError, parse_device_mapping

TRAINING_STRATEGIES = ("fsdp2_train", "megatron_train", "deepspeed_train")
INFERENCE_STRATEGIES = ("megatron_infer", "fsdp2_infer", "deepspeed_infer", "hf_infer")


@dataclass(frozen=True)
class Mesh:
    """The mesh of one training role: sizes by dimension; `world` is their product without `ep`."""

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    virtual_pp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks that share one sample: what the page divides the global batch by."""
        return self.tp * self.pp * self.cp

    def sizes(self, role: str) -> list[tuple[str, int]]:
        """The mesh as keys of a role's `parallelism`; sizes of 1 that are our defaults too are left out."""
        sizes = {name: getattr(self, name) for name in words("tp dp_shard pp cp ep dp_replicate virtual_pp")}
        kept = (name for name in sizes if name in ("tp", "dp_shard") or sizes[name] != 1)
        return [(f"{role}.parallelism.{name}_size", sizes[name]) for name in kept]


def is_agentic(context: ConversionContext) -> bool:
    """Whether the file is of an agent pipeline, whose prompts are environments."""
    return context.kind == "agentic"


def strategy(context: ConversionContext, role: str) -> str:
    """The strategy's name of a role: ROLL's own default where the file is silent."""
    default = "vllm" if role == "actor_infer" else "deepspeed_train"
    return context.text(f"{role}.strategy_args.strategy_name", default)


def config_key(role: str, name: str) -> str:
    """The dotted key of a strategy's setting."""
    return f"{role}.strategy_args.strategy_config.{name}"


def devices(context: ConversionContext, role: str) -> list[int] | None:
    """The devices of a role; None where it names none. Raises BadValue."""
    value = context.get(f"{role}.device_mapping", None)
    if value is None:
        return None
    try:
        return parse_device_mapping(value)
    except DeviceMappingError as error:
        raise BadValue(f"{role}.device_mapping {error}") from None


def _size(context: ConversionContext, key: str) -> int:
    """A parallel size: at least 1; null and 0 mean 1. Raises BadValue."""
    size = context.integer(key, 1)
    if size is None or size == 0:
        return 1
    if size < 0 or size > 1_000_000:
        raise BadValue(f"{key} = {size} is not a parallel size")
    return size


def mesh(context: ConversionContext, role: str = "actor_train") -> Mesh:
    """The mesh of a training or log-prob role; without devices of its own it has those of actor_train.

    Raises BadValue where its sizes contradict each other.
    """
    world = len(devices(context, role) or devices(context, "actor_train") or [0])
    is_megatron = strategy(context, role).startswith("megatron")
    return _megatron(context, role, world) if is_megatron else _fsdp(context, role, world)


def _megatron(context: ConversionContext, role: str, world: int) -> Mesh:
    tp, pp, cp, ep, virtual_pp = (
        _size(context, config_key(role, f"{name}_parallel_size"))
        for name in words("tensor_model pipeline_model context expert_model virtual_pipeline_model")
    )
    if world % (tp * pp * cp):
        raise BadValue(f"{role} has {world} devices, which tp·pp·cp = {tp}·{pp}·{cp} does not divide")
    return Mesh(world, tp, pp, cp, ep, virtual_pp, dp_shard=world // (tp * pp * cp))


def _fsdp(context: ConversionContext, role: str, world: int) -> Mesh:
    """FSDP2 by ROLL's rule: a size of at most 1, or of at least the world, shards over all ranks."""
    cp = _size(context, f"{role}.model_args.ulysses_size")
    if world % cp:
        raise BadValue(f"{role} has {world} devices, which ulysses_size = {cp} does not divide")
    size, ep = (context.integer(config_key(role, "fsdp_size"), 1) or 1, _size(context, config_key(role, "ep_size")))
    if size <= 1 or size >= world:
        return Mesh(world, cp=cp, ep=ep, dp_shard=world // cp)
    if world % size or size % cp:
        raise BadValue(f"fsdp_size = {size} does not fit {world} devices with ulysses_size = {cp}")
    return Mesh(world, cp=cp, ep=ep, dp_shard=size // cp, dp_replicate=world // size)


def group_size(context: ConversionContext) -> int:
    """Samples of one prompt, at least 1."""
    key = "train_env_manager.group_size" if is_agentic(context) else "num_return_sequences_in_group"
    return max(context.integer(key, 1) or 1, 1)


def samples_per_step(context: ConversionContext) -> int:
    """Samples of one pipeline step. An agent pipeline counts trajectories, others prompts."""
    batch = context.integer("rollout_batch_size", 128) or 0
    return batch if is_agentic(context) else batch * group_size(context)


def global_batch(context: ConversionContext, role: str = "actor_train") -> tuple[int, str]:
    """Samples of one optimizer step by the formulas above, and the formula with its numbers. Raises BadValue."""
    per_device = context.integer(f"{role}.training_args.per_device_train_batch_size", 8) or 0
    steps = context.integer(f"{role}.training_args.gradient_accumulation_steps", 1) or 0
    shape = mesh(context, role)
    product = per_device * steps * shape.world
    shared = f"/{shape.model_ranks}" if shape.model_ranks > 1 else ""
    formula, (batch, rest) = f"{per_device}·{steps}·{shape.world}{shared}", divmod(product, shape.model_ranks)
    if product < 1 or rest:
        raise BadValue(f"{formula} is not a whole number of samples for a global batch")
    return batch, f"{formula} = {batch}"


def optimizer_steps(context: ConversionContext, role: str = "actor_train") -> int:
    """Optimizer steps of a role in one pipeline step; 1 where the batches do not divide.

    The policy's are those of all ppo_epochs together; the critic passes over a batch once.
    """
    if context.kind == "sft":
        return 1
    epochs = 1 if role == "critic" else max(context.integer("ppo_epochs", 1) or 1, 1)
    try:
        batch, _ = global_batch(context, role)
    except BadValue:
        return epochs
    return max(samples_per_step(context) // batch, 1) * epochs


def warmup(context: ConversionContext, role: str) -> int | float:
    """Warm-up in our steps (an integer) or as a share (a float), as ROLL chooses between its two keys."""
    steps = context.integer(f"{role}.training_args.warmup_steps", 0) or 0
    if steps > 0:
        return -(-steps // optimizer_steps(context, role))
    ratio = context.number(f"{role}.training_args.warmup_ratio", 0.0) or 0.0
    return float(ratio) if 0 < ratio <= 1 else 0


def sequence_length(context: ConversionContext) -> int | None:
    """Longest training sequence: sequence_length, or else prompt and response together; None: not said."""
    written = context.integer("sequence_length", None)
    if written is not None:
        return written
    response = context.integer("response_length", None)
    return None if response is None else response + (context.integer("prompt_length", 1024) or 0)


def response_length(context: ConversionContext) -> int | None:
    """Longest answer as ROLL sets it: the sequence without the prompt, whatever max_new_tokens says."""
    if is_agentic(context):
        return context.integer("actor_infer.generating_args.max_new_tokens", 8192)
    whole = sequence_length(context)
    return None if whole is None else whole - (context.integer("prompt_length", 1024) or 0)


def engine_size(context: ConversionContext) -> tuple[int, int, int]:
    """Tensor, pipeline and data size of one inference engine: its own keys, or else num_gpus_per_worker."""
    names = ("tensor_parallel_size", "tp_size", "tp")
    tp = next((_size(context, key) for name in names if context.has(key := config_key("actor_infer", name))), 0)
    pp, dp = (_size(context, config_key("actor_infer", f"{name}_parallel_size")) for name in ("pipeline", "data"))
    if not tp:
        tp = max(_size(context, "actor_infer.num_gpus_per_worker") // (pp * dp), 1)
    return tp, pp, dp


def engines(context: ConversionContext) -> list[list[int]] | None:
    """The devices of each inference engine; None where the file names none. Raises BadValue."""
    placed = devices(context, "actor_infer")
    if placed is None:
        return None
    size = math.prod(engine_size(context))
    if len(placed) % size:
        raise BadValue(f"{len(placed)} devices are not a multiple of the {size} of one engine")
    return [placed[start : start + size] for start in range(0, len(placed), size)]


def has_critic(context: ConversionContext) -> bool:
    """Whether a value model is trained: only for gae, ROLL's default estimator."""
    return has_advantages(context) and bool(context.get("adv_estimator", "gae") == "gae")


def only_with(condition: Callable[[ConversionContext], bool], otherwise: str) -> When:
    """Make a `when`: the key has no effect, for this reason, unless the condition holds."""
    return lambda context: "" if condition(context) else otherwise


no_critic = only_with(has_critic, "only gae has a critic")


def has_advantages(context: ConversionContext) -> bool:
    """Whether rewards become advantages: pairs of answers and teachers have none."""
    return context.kind not in ("dpo", "distillation", "sft")


def has_reward_kl(context: ConversionContext) -> bool:
    """Whether the KL to the reference is part of the reward."""
    return context.flag("add_token_level_kl", False) and (context.number("init_kl_coef", 0.2) or 0) > 0


def has_loss_kl(context: ConversionContext) -> bool:
    """Whether the KL to the reference is part of the loss."""
    return context.flag("use_kl_loss", False) and (context.number("kl_loss_coef", 0.0) or 0) > 0


def has_reference(context: ConversionContext) -> bool:
    """Whether any KL term needs the reference model."""
    return has_reward_kl(context) or has_loss_kl(context)


def has_validation(context: ConversionContext) -> bool:
    """Whether the file names data to validate on."""
    files = context.get("validation.data_args.file_name", None)
    files = files or context.get("actor_train.data_args.eval_file_name", None)
    return bool(files) and (context.integer("eval_steps", 10) or 0) > 0


def overlaps(context: ConversionContext) -> list[int]:
    """Devices that training and generation both name."""
    train, infer = devices(context, "actor_train"), devices(context, "actor_infer")
    return sorted(set(train or []) & set(infer or []))


def used_devices(context: ConversionContext) -> set[int]:
    """Devices that policy and rollout name. Raises BadValue."""
    return {device for role in ("actor_train", "actor_infer") for device in devices(context, role) or []}
