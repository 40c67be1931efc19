"""verl's supervised fine-tuning: sft_trainer.yaml, and the tables that its newer engine adds."""

from __future__ import annotations

from dataclasses import replace

from convert.engine import values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath, Rule
from convert.verl.data import files, truncated
from convert.verl.facts import KEYS, POLICY, sharding
from convert.verl.mesh import mesh, parallelism
from convert.verl.trainer import validates

_ULYSSES = "ulysses_sequence_parallel_size"


def _validated_files(context: ConversionContext, leaf: KeyPath) -> Result:
    if not validates(context):
        return implicit("no effect without validation (test_freq = -1)")
    return files(context, leaf)


def other_engine_rules() -> tuple[Rule, ...]:
    """The other keys of `engine`: those of a role's table for FSDP, Megatron or VeOmni, which are one table here.

    The names with the table stay as further spellings, under which `facts` asks for them.
    """
    taken = {name for rule in KEYS.rules("sft engine", globals()) for name in rule.spellings}
    taken |= {_ULYSSES, f"engine.{_ULYSSES}"}
    rules: dict[str, Rule] = {}
    for rule in mesh("engine", "policy", "train"):
        table, _, name = rule.key.removeprefix("engine.").partition(".")
        key = f"engine.{name}"
        if table not in ("fsdp_config", "megatron", "veomni") or key in taken:
            continue
        known = rules.get(key, replace(rule, key=key, also=()))
        rules[key] = replace(known, also=(*known.also, rule.key))
    return tuple(rules.values())


def _ulysses(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None:
        values.integer(leaf.value)
    return mapped(*parallelism(context, "engine", "policy").items())


def _engine_fsdp_size(context: ConversionContext, leaf: KeyPath) -> Result:
    values.integer(leaf.value)
    replicate, shard = sharding(context, "engine")
    return leaf.to(shard, replicate)


def _offload_all(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix = "model.fsdp_config"
    if leaf.value is not None:
        values.flag(leaf.value)
    if not context.flag(f"{prefix}.cpu_offload"):
        return implicit("cpu_offload is not true: nothing is offloaded")
    if not context.flag(f"{prefix}.offload_params"):
        return leaf.to(False, note="without offload_params nothing is kept on the host")
    return leaf.to(True, True, True)


# --- columns ------------------------------------------------------------------------------------------------


def _has_turns(context: ConversionContext) -> bool:
    """Whether rows are conversations: said so, or the newer trainer's messages_key stands alone."""
    if context.has("data.multiturn.enable"):
        return context.flag("data.multiturn.enable")
    return not context.has("data.prompt_key")


def _conversation(context: ConversionContext, leaf: KeyPath) -> Result:
    if not _has_turns(context):
        return implicit("rows are prompt and response, not conversations")
    return leaf.to(context.text("data.multiturn.messages_key", "messages"))


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


def _sft_truncation(context: ConversionContext, leaf: KeyPath) -> Result:
    keys = list(leaf.ours if validates(context) else leaf.ours[:1])
    as_written = truncated(leaf, keys)
    newer = "no_padding" if context.below("engine") else "right"
    if context.get("data.pad_mode", newer) != "no_padding" or not as_written.targets:
        return as_written
    return mapped(*((key, "right") for key in keys), note="pad_mode = no_padding always cuts on the right")
