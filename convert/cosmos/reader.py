"""cosmos-rl's own TOML: our schema is its schema, so its keys pass through; older and newer ones are mapped.

Values are passed on exactly as they are written, right or wrong: `validate` judges them as it judges ours.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from convert.cosmos.rules import KEYS, OURS, RENAMED_RULES, plain, sampled_temperature, trained_temperature
from convert.cosmos.unsupported import COSMOS
from convert.engine import to
from convert.engine.model import Result, mapped
from convert.engine.rules import WARMUP_NOTE, ConversionContext, Converter, KeyPath, Reader, Rule
from convert.engine.source import Source
from schema.config.keys import deviation_of, leaf_keys
from schema.config.loading.explain import annotation_of
from schema.config.rules.idle import SFT_READS
from schema.config.sections.train import TrainingConfig
from schema.config.sections.train_policy import GrpoConfig, SFTDataConfig

_POLICY = "train.train_policy"
_GRPO_SIGNS = {"temperature", "use_remote_reward"} | (
    GrpoConfig.model_fields.keys() - SFTDataConfig.model_fields.keys()
)
_SECTIONS = ("train", "policy", "rollout")


def _detect(source: Source) -> str | None:
    has_signature = any(source.has(*path) for path in (("train", "train_policy"), ("policy", "model_name_or_path")))
    if not has_signature and not (sum(isinstance(source.data.get(name), dict) for name in _SECTIONS) >= 2):
        return None
    return _kind(source)


def _kind(source: Source) -> str:
    """grpo or sft: as written, else by keys that only one of them has, which is how cosmos-rl guesses it."""
    train = source.data.get("train")
    policy = train.get("train_policy") if isinstance(train, dict) else None
    if not isinstance(policy, dict):
        return "grpo"
    written = policy.get("type")
    if written in ("grpo", "sft"):
        return str(written)
    return "grpo" if any(key in policy for key in _GRPO_SIGNS) else "sft"


def _pass(key: str, ours: str) -> Converter:
    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        note = WARMUP_NOTE if key == "train.optm_warmup_steps" and leaf.value else ""
        return mapped((f"{key}.{leaf.rest}" if leaf.rest else key, plain(leaf.value)), note=note)

    return Converter(run, (ours,), "as it is")


def _is_table(annotation: Any) -> bool:
    """Whether a key can hold a table of somebody's own keys."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is_table(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return any(_is_table(part) for part in get_args(annotation))
    return origin is dict or annotation is dict


@cache
def _rules(kind: str) -> Sequence[Rule]:
    section = GrpoConfig if kind == "grpo" else SFTDataConfig
    renamed = {spelling for rule in RENAMED_RULES for spelling in rule.spellings}
    rules: list[Rule] = []
    for key in leaf_keys():
        path = tuple(key.split("."))
        if path[:2] == ("train", "train_policy") and path[2] not in section.model_fields:
            continue
        if key in renamed:
            continue
        of_rollouts = path[0] == "rollout" and key.removeprefix("rollout.") not in SFT_READS
        idle = kind == "sft" and (of_rollouts or key == "train.sync_weight_interval")
        for name in (key, f"{key}.*") if _is_table(annotation_of(path)) else (key,):
            converter = to.always("supervised training generates nothing") if idle else _pass(key, name)
            rules.append(Rule(name, converter))
    return (*rules, *(rule for rule in RENAMED_RULES if kind == "grpo" or not _is_grpo_only(rule)))


def _is_grpo_only(rule: Rule) -> bool:
    ours = rule.converter.ours
    return bool(ours) and all(
        key.startswith(f"{_POLICY}.") and key.split(".")[2] not in SFTDataConfig.model_fields for key in ours
    )


def _finish(context: ConversionContext) -> None:
    """Add their defaults that are not ours. A file that a conversion wrote has ours where it is silent."""
    if context.source.is_ours:
        context.warn(f"{OURS}; there is nothing to convert")
        return
    if not context.has(f"{_POLICY}.type") and context.kind == "sft":
        context.add(f"{_POLICY}.type", "sft", "cosmos-rl guesses it from the other keys")
    if not context.has("train.train_batch_per_replica") and context.kind == "grpo":
        _add_batch(context)
    trained, sampled = trained_temperature(context), sampled_temperature(context)
    if context.kind == "grpo" and trained != sampled:
        context.warn(
            f"cosmos-rl samples at the temperature {sampled} (rollout.sampling_config.temperature) and divides the "
            f"trainer's logits by {trained} (train.train_policy.temperature): two policies. Here both use the one "
            f"that samples, {sampled}"
        )
    enabled = ("validation.enable", "train.enable_validation")
    before = ("validation.before", "validation.val_before_train")
    is_enabled = any(context.get(key, None) is True for key in enabled)
    if is_enabled and not any(context.has(key) for key in before):
        context.add("validation.before", False, "cosmos-rl's default: val_before_train = false")


def _add_batch(context: ConversionContext) -> None:
    key = "train.train_batch_per_replica"
    deviation = deviation_of(key)
    assert deviation is not None
    theirs, ours = deviation.theirs, TrainingConfig.model_fields["train_batch_per_replica"].default
    group = context.integer("rollout.n_generation", 16) or 16
    replicas = context.integer("policy.parallelism.n_init_replicas", 1) or 1
    if theirs * replicas % group == 0:
        context.add(key, theirs, f"cosmos-rl's default: train_batch_per_replica = {theirs}")
        return
    whole = ours if ours * replicas % group == 0 else group
    context.add(key, whole, f"cosmos-rl's default of {theirs} samples is not a whole number of groups of {group}")


READER = Reader(
    system="cosmos-rl",
    title="cosmos-rl",
    kinds={"grpo": "reinforcement learning", "sft": "supervised fine-tuning"},
    unsupported=COSMOS,
    detect=_detect,
    signs=("train.train_policy", "policy.model_name_or_path", *_SECTIONS),
    own=("train.train_policy", "policy.model_name_or_path"),
    rules=_rules,
    finish=_finish,
    interpolates=False,
    prose=tuple(paragraph for _, paragraph in KEYS.parts["prose"]),
)
