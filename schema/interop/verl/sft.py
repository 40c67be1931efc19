"""verl's supervised fine-tuning: sft_trainer.yaml, and the tables that its newer engine adds."""

from __future__ import annotations

from schema.interop.engine import to, values
from schema.interop.engine.model import Result, implicit, mapped, no_counterpart
from schema.interop.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed
from schema.interop.engine.values import BadValue, shown
from schema.interop.verl.data import files
from schema.interop.verl.facts import POLICY, lacking, world_size
from schema.interop.verl.model import Model
from schema.interop.verl.optim import Optim
from schema.interop.verl.shared import Budget, checkpoint_rules
from schema.interop.verl.trainer import trainer_rules, validates
from schema.interop.verl.unsupported import VERL

_MESH = "policy.parallelism"


def sft_rules() -> tuple[Rule, ...]:
    """All rules of an SFT file."""
    return (
        *_data(),
        *Model("model", "policy", old_path="partial_pretrain").rules(),
        *_fsdp(),
        *Optim("", "train", 1e-5, betas=(0.9, 0.95), scheduler="cosine", warmup=0.1).rules(),
        *checkpoint_rules(""),
        *checkpoint_rules("trainer"),
        *trainer_rules("sft"),
        Rule("ulysses_sequence_parallel_size", _ulysses, 1, ("engine.ulysses_sequence_parallel_size",)),
        Rule("use_remove_padding", to.flag("train.sequence_packing")),
        Rule("custom_cls.path", _custom_class, also=("data.custom_cls.path",)),
        Rule("custom_cls.name", _custom_class, also=("data.custom_cls.name",)),
    )


def _data() -> tuple[Rule, ...]:
    budget = Budget(
        per_gpu="data.micro_batch_size_per_gpu",
        ours=(f"{POLICY}.mini_batch", f"{POLICY}.max_token_len_per_mini_batch"),
        whole="data.micro_batch_size",
        switch="data.use_dynamic_bsz",
        tokens="data.max_token_len_per_gpu",
        role="engine",
    )
    column = Converter(
        _column,
        (f"{POLICY}.prompt_column_name", f"{POLICY}.response_column_name"),
        "with the key inside a struct: `column.key`",
    )
    turns = Converter(
        _conversation, (f"{POLICY}.conversation_column_name",), "conversations in place of two columns"
    )
    return (
        Rule("data.train_batch_size", to.integer("train.train_batch_per_replica"), default=256),
        *budget.rules(),
        Rule(
            "data.train_files",
            Converter(
                files(f"{POLICY}.dataset.files"),
                (f"{POLICY}.dataset.files",),
                "one file becomes a list; `~` is written out",
            ),
        ),
        Rule("data.val_files", _val_files),
        Rule("data.prompt_key", column),
        Rule("data.response_key", column),
        Rule("data.prompt_dict_keys", column),
        Rule("data.response_dict_keys", column),
        Rule("data.multiturn.enable", turns),
        Rule("data.multiturn.messages_key", turns, also=("data.messages_key",)),
        Rule("data.multiturn.tools_key", lacking("tools"), also=("data.tools_key",)),
        Rule(
            "data.multiturn.enable_thinking_key",
            lacking("enable_thinking"),
            also=("data.enable_thinking_key",),
        ),
        Rule("data.enable_thinking_default", lacking("none")),
        Rule("data.max_length", to.integer("policy.model_max_length"), default=1024),
        Rule("data.truncation", _truncation),
        Rule("data.pad_mode", to.always("padding never changes a number here")),
        Rule("data.ignore_input_ids_mismatch", to.always("a conversation is tokenised as a whole")),
        Rule("data.balance_dp_token", to.flag(f"{POLICY}.balance_dp_token"), default=False),
        Rule("data.chat_template", lacking()),
        Rule("data.apply_chat_template_kwargs", lacking({})),
        Rule("data.apply_chat_template_kwargs.*", lacking()),
        Rule("data.use_shm", to.always("rows are indexed on disk, not copied to shared memory")),
        Rule("data.num_workers", to.integer(f"{POLICY}.dataloader_num_workers")),
        Rule("data.train_max_samples", lacking(-1)),
        Rule("data.val_max_samples", lacking(-1)),
    )


@computed("validation.dataset.files", words="with test_freq > 0 only")
def _val_files(context: ConversionContext, leaf: KeyPath) -> Result:
    if not validates(context):
        return implicit("no effect without validation (test_freq = -1)")
    return files("validation.dataset.files")(context, leaf)


def _fsdp() -> tuple[Rule, ...]:
    old = "model.fsdp_config"
    offload = Converter(
        _offload,
        ("train.fsdp_offload", "train.fsdp_gradient_offload", "train.optimizer_offload"),
        "both true: parameters, gradients and optimizer",
    )
    return (
        Rule(
            f"{old}.model_dtype",
            to.choice("train.master_dtype", values.DTYPES),
            "fp32",
            ("engine.model_dtype",),
        ),
        Rule(
            f"{old}.wrap_policy.min_num_params",
            to.unless([0], "0: by layer, as always", to.integer("train.fsdp_wrap_min_params")),
            also=("engine.wrap_policy.min_num_params",),
        ),
        Rule(f"{old}.cpu_offload", offload),
        Rule(f"{old}.offload_params", offload),
        Rule(
            "model.strategy",
            to.always("how a model is sharded follows from policy.parallelism"),
            also=("engine.strategy",),
        ),
        Rule("engine.param_offload", to.flag("train.fsdp_offload")),
        Rule("engine.optimizer_offload", to.flag("train.optimizer_offload")),
        Rule("engine.dtype", to.choice("train.param_dtype", values.DTYPES)),
        Rule("engine.use_torch_compile", to.flag("train.compile")),
        Rule("engine.fsdp_size", _fsdp_size),
    )


def sequence_ranks(context: ConversionContext) -> int:
    """Ranks that share a sequence."""
    return max(context.integer("ulysses_sequence_parallel_size", 1) or 1, 1)


def ranks(context: ConversionContext) -> int:
    """Ranks with data of their own."""
    return max(world_size(context) // sequence_ranks(context), 1)


@computed(f"{_MESH}.cp_size", f"{_MESH}.dp_shard_size", f"{_MESH}.tp_size", words="as it is")
def _ulysses(context: ConversionContext, leaf: KeyPath) -> Result:
    size = 1 if leaf.value is None else values.integer(leaf.value)
    _, shard = _sharding(context)
    return mapped(
        (f"{_MESH}.cp_size", max(size, 1)), (f"{_MESH}.tp_size", 1), (f"{_MESH}.dp_shard_size", shard)
    )


def _sharding(context: ConversionContext) -> tuple[int, int]:
    size, world = context.integer("engine.fsdp_size", -1), world_size(context)
    if size is None or size <= 0 or size >= world:
        return 1, ranks(context)
    shard = max(size // sequence_ranks(context), 1)
    return max(ranks(context) // shard, 1), shard


@computed(
    f"{_MESH}.dp_shard_size", f"{_MESH}.dp_replicate_size", words="< 0 or ≥ world: shard over all ranks"
)
def _fsdp_size(context: ConversionContext, leaf: KeyPath) -> Result:
    values.integer(leaf.value)
    replicate, shard = _sharding(context)
    return mapped((f"{_MESH}.dp_shard_size", shard), (f"{_MESH}.dp_replicate_size", replicate))


def _offload(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix = "model.fsdp_config"
    if leaf.value is not None:
        values.flag(leaf.value)
    if not context.flag(f"{prefix}.cpu_offload"):
        return implicit("cpu_offload is not true: nothing is offloaded")
    if not context.flag(f"{prefix}.offload_params"):
        return mapped(
            ("train.fsdp_offload", False), note="without offload_params nothing is kept on the host"
        )
    keys = ("fsdp_offload", "fsdp_gradient_offload", "optimizer_offload")
    return mapped(*((f"train.{key}", True) for key in keys))


# --- columns ------------------------------------------------------------------------------------------------


def _has_turns(context: ConversionContext) -> bool:
    """Whether rows are conversations: said so, or the newer trainer's messages_key stands alone."""
    if context.has("data.multiturn.enable"):
        return context.flag("data.multiturn.enable")
    return not context.has("data.prompt_key")


def _conversation(context: ConversionContext, leaf: KeyPath) -> Result:
    if not _has_turns(context):
        return implicit("rows are prompt and response, not conversations")
    column = context.text("data.multiturn.messages_key", "messages")
    return mapped((f"{POLICY}.conversation_column_name", column))


def _column(context: ConversionContext, leaf: KeyPath) -> Result:
    if _has_turns(context):
        return implicit("no effect: rows are conversations")
    if leaf.value in (None, []):
        return implicit("null: none")
    side = "prompt" if "prompt" in leaf.key else "response"
    name = context.text(f"data.{side}_key", side)
    inner = context.get(f"data.{side}_dict_keys", None)
    parts = values.texts(inner) if inner not in (None, []) else []
    if parts and parts != [name]:
        name = ".".join([name, *parts])
    return mapped((f"{POLICY}.{side}_column_name", name))


@computed(words="a longer sample is dropped as `overlong` and counted, never cut")
def _truncation(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name == "error":
        return implicit("a longer sample is dropped as `overlong` and counted, never cut")
    reason = VERL.reason(f"sft:{leaf.key}={name}")
    if reason is None:
        raise BadValue(f"expected error, left, right or middle, got {shown(name)}")
    return no_counterpart(reason)


@computed(f"{POLICY}.dataset.custom_class", words="`path:name`")
def _custom_class(context: ConversionContext, leaf: KeyPath) -> Result:
    file, name = context.get("custom_cls.path", None), context.get("custom_cls.name", None)
    if not isinstance(file, str) or not isinstance(name, str):
        return implicit("null: none") if leaf.value is None else implicit("no effect without the other one")
    return mapped((f"{POLICY}.dataset.custom_class", f"{values.path(file)}:{name}"), note="path:name")
