"""verl's supervised fine-tuning: sft_trainer.yaml, and the tables that its newer engine adds."""

from __future__ import annotations

from dataclasses import replace

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath, Rule, computed, rules_below
from convert.verl.data import files, image_column, truncated
from convert.verl.facts import POLICY, lacking, path_and_name, sharding
from convert.verl.mesh import Mesh, parallelism
from convert.verl.model import Model
from convert.verl.optim import Optim
from convert.verl.shared import Budget, checkpoint_rules
from convert.verl.trainer import trainer_rules, validates

_MESH, _ULYSSES = "policy.parallelism", "ulysses_sequence_parallel_size"


def sft_rules() -> tuple[Rule, ...]:
    """All rules of an SFT file."""
    custom = path_and_name("custom_cls", f"{POLICY}.dataset.custom_class")
    return (
        *_data(),
        *Model("model", "policy", old_path="partial_pretrain").rules(),
        *_fsdp(),
        *_engine(),
        *Optim("", "train", 1e-5, betas=(0.9, 0.95), scheduler="cosine", warmup=0.1).rules(),
        *checkpoint_rules(""),
        *checkpoint_rules("trainer"),
        *trainer_rules("sft"),
        Rule(_ULYSSES, _ulysses, 1, (f"engine.{_ULYSSES}", f"engine.fsdp_config.{_ULYSSES}")),
        Rule("use_remove_padding", to.flag("train.sequence_packing")),
        Rule("custom_cls.path", custom, also=("data.custom_cls.path",)),
        Rule("custom_cls.name", custom, also=("data.custom_cls.name",)),
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
    table = {
        "train_files": computed(
            f"{POLICY}.dataset.files", words="one file becomes a list; `~` is written out"
        )(files),
        "val_files": _val_files,
        "image_key": computed(
            f"{POLICY}.dataset.image_column_name",
            "validation.dataset.image_column_name",
            words="as it is: rows with a value there are refused",
            null="null: verl looks at none",
        )(image_column),
        "video_key": lacking("videos"),
        "audio_key": lacking("audios"),
        "prompt_key response_key prompt_dict_keys response_dict_keys": _column,
        "multiturn.enable multiturn.messages_key": _conversation,
        "multiturn.tools_key": lacking("tools"),
        "multiturn.enable_thinking_key": lacking("enable_thinking"),
        "enable_thinking_default": lacking("none"),
        "max_length": to.integer("policy.model_max_length"),
        "truncation": _truncation,
        "pad_mode": to.always("padding never changes a number here"),
        "ignore_input_ids_mismatch": to.always("a conversation is tokenised as a whole"),
        "balance_dp_token": to.unless(
            ["REMOVED"], "verl reads it no more", to.flag(f"{POLICY}.balance_dp_token")
        ),
        "chat_template": lacking(),
        "apply_chat_template_kwargs": lacking({}),
        "apply_chat_template_kwargs.*": lacking(),
        "use_shm": to.always("rows are indexed on disk, not copied to shared memory"),
        "num_workers": to.integer(f"{POLICY}.dataloader_num_workers"),
        "train_max_samples val_max_samples": lacking(-1),
    }
    older = {f"multiturn.{name}": (name,) for name in ("messages_key", "tools_key", "enable_thinking_key")}
    defaults = {"max_length": 1024, "balance_dp_token": False, "truncation": "error"}
    return (
        Rule("data.train_batch_size", to.integer("train.train_batch_per_replica"), default=256),
        *budget.rules(),
        *rules_below("data", table, None, defaults, older),
    )


@computed("validation.dataset.files", words="with test_freq > 0 only")
def _val_files(context: ConversionContext, leaf: KeyPath) -> Result:
    if not validates(context):
        return implicit("no effect without validation (test_freq = -1)")
    return files(context, leaf)


def _fsdp() -> tuple[Rule, ...]:
    old = "model.fsdp_config"
    return (
        Rule(
            f"{old}.model_dtype",
            to.choice("train.master_dtype", values.MASTERS),
            "fp32",
            ("engine.model_dtype",),
        ),
        Rule(
            f"{old}.wrap_policy.min_num_params",
            to.unless([0], "0: by layer, as always", to.integer("train.fsdp_wrap_min_params")),
            also=("engine.wrap_policy.min_num_params",),
        ),
        Rule(f"{old}.cpu_offload", _offload),
        Rule(f"{old}.offload_params", _offload),
        Rule(
            "model.strategy",
            to.always("how a model is sharded follows from policy.parallelism"),
            also=("engine.strategy",),
        ),
        Rule("engine.param_offload", to.flag("train.fsdp_offload")),
        Rule("engine.optimizer_offload", to.flag("train.optimizer_offload")),
        Rule("engine.dtype", to.choice("train.param_dtype", values.DTYPES)),
        Rule("engine.use_torch_compile", to.flag("train.compile")),
        Rule("engine.fsdp_size", _fsdp_size, also=tuple(f"engine.{table}.fsdp_size" for table in _ENGINES)),
    )


_ENGINES = ("fsdp_config", "megatron", "veomni")


def _engine() -> tuple[Rule, ...]:
    """The other keys of `engine`: those of a role's table for FSDP, Megatron or VeOmni, which are one table here.

    The names with the table stay as further spellings, under which `facts` asks for them.
    """
    taken = {name for rule in _fsdp() for name in rule.spellings} | {_ULYSSES, f"engine.{_ULYSSES}"}
    found: dict[str, Rule] = {}
    for rule in Mesh("engine", "policy", "train").rules():
        table, _, name = rule.key.removeprefix("engine.").partition(".")
        key = f"engine.{name}"
        if table not in _ENGINES or key in taken:
            continue
        known = found.get(key, replace(rule, key=key, also=()))
        found[key] = replace(known, also=(*known.also, rule.key))
    return tuple(found.values())


@computed(
    *(f"{_MESH}.{name}_size" for name in ("tp", "pp", "cp", "ep", "dp_shard")), words="the mesh of `engine`"
)
def _ulysses(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None:
        values.integer(leaf.value)
    return mapped(*parallelism(context, "engine", "policy").items())


@computed(
    f"{_MESH}.dp_shard_size", f"{_MESH}.dp_replicate_size", words="< 0 or ≥ world: shard over all ranks"
)
def _fsdp_size(context: ConversionContext, leaf: KeyPath) -> Result:
    values.integer(leaf.value)
    replicate, shard = sharding(context, "engine")
    return mapped((f"{_MESH}.dp_shard_size", shard), (f"{_MESH}.dp_replicate_size", replicate))


_OFFLOADED = ("train.fsdp_offload", "train.fsdp_gradient_offload", "train.optimizer_offload")


@computed(*_OFFLOADED, words="both true: parameters, gradients and optimizer")
def _offload(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix = "model.fsdp_config"
    if leaf.value is not None:
        values.flag(leaf.value)
    if not context.flag(f"{prefix}.cpu_offload"):
        return implicit("cpu_offload is not true: nothing is offloaded")
    if not context.flag(f"{prefix}.offload_params"):
        note = "without offload_params nothing is kept on the host"
        return mapped(("train.fsdp_offload", False), note=note)
    return mapped(*((key, True) for key in _OFFLOADED))


# --- columns ------------------------------------------------------------------------------------------------


def _has_turns(context: ConversionContext) -> bool:
    """Whether rows are conversations: said so, or the newer trainer's messages_key stands alone."""
    if context.has("data.multiturn.enable"):
        return context.flag("data.multiturn.enable")
    return not context.has("data.prompt_key")


@computed(f"{POLICY}.conversation_column_name", words="conversations in place of two columns")
def _conversation(context: ConversionContext, leaf: KeyPath) -> Result:
    if not _has_turns(context):
        return implicit("rows are prompt and response, not conversations")
    column = context.text("data.multiturn.messages_key", "messages")
    return mapped((f"{POLICY}.conversation_column_name", column))


@computed(
    f"{POLICY}.prompt_column_name",
    f"{POLICY}.response_column_name",
    words="with the key inside a struct: `column.key`",
)
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


@computed(
    f"{POLICY}.dataset.overlong_prompts",
    "validation.dataset.overlong_prompts",
    words="as it is; `right` with pad_mode = no_padding",
)
def _truncation(context: ConversionContext, leaf: KeyPath) -> Result:
    keys = [f"{POLICY}.dataset.overlong_prompts"]
    if validates(context):
        keys.append("validation.dataset.overlong_prompts")
    as_written = truncated(leaf, keys)
    newer = "no_padding" if context.below("engine") else "right"
    if context.get("data.pad_mode", newer) != "no_padding" or not as_written.targets:
        return as_written
    return mapped(*((key, "right") for key in keys), note="pad_mode = no_padding always cuts on the right")
