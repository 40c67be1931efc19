"""verl's `data` table of RL files."""

from __future__ import annotations

from collections.abc import Sequence

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed, rules_below
from convert.engine.values import BadValue, shown
from convert.verl.facts import (
    POLICY,
    ROLLOUT,
    group_size,
    is_streamed,
    lacking,
    path_and_name,
    prompt_length,
    response_length,
    without_counterpart,
)
from convert.verl.rollout import longest_response
from convert.verl.unsupported import VERL

TRAIN, VALID = f"{POLICY}.dataset", "validation.dataset"

_LOOKED_AT = "rows with a value in a column of that name are refused"

_DEFAULTS = {
    "shuffle": True,
    "filter_overlong_prompts": False,
    "truncation": "error",
    "trust_remote_code": False,
    # Not given to the template at all, which thinks then, if it can.
    "apply_chat_template_kwargs.enable_thinking": True,
}


def data_rules() -> tuple[Rule, ...]:
    """All rules of `data`."""
    custom = path_and_name("data.custom_cls", f"{TRAIN}.custom_class")
    table = {
        "tokenizer": to.path("policy.tokenizer_name_or_path"),
        "use_shm": to.always("rows are indexed on disk, not copied to shared memory"),
        "train_files": files(f"{TRAIN}.files"),
        "val_files": files(f"{VALID}.files"),
        "train_max_samples val_max_samples": lacking(-1),
        "prompt_key": to.text(f"{POLICY}.prompt_column_name"),
        "reward_fn_key": to.text(f"{POLICY}.data_source_column_name"),
        "val_batch_size": to.integer("validation.batch_size"),
        "return_raw_input_ids return_full_prompt": _prompt_forms,
        "return_raw_chat": to.always("rewards always get the raw chat"),
        "return_multi_modal_inputs": to.always("concerns images"),
        "shuffle": to.flag(f"{POLICY}.dataloader_shuffle"),
        "cache_dir": to.always("rows are read where they lie"),
        "seed": to.integer("train.seed", "null: the default"),
        "validation_shuffle": to.always("the order of validation changes no result"),
        "dataloader_num_workers filter_overlong_prompts_workers": _workers,
        "filter_overlong_prompts truncation": _overlong,
        "image_key": image_column(TRAIN, VALID),
        "image_patch_size": to.always("the model's processor knows it"),
        "video_key": lacking("videos", words=_LOOKED_AT),
        "audio_key": lacking("audios", words=_LOOKED_AT),
        "trust_remote_code": _trust,
        "sampler.class_path sampler.class_name sampler.group_key sampler.group_names sampler.group_ratios": (
            _sampler
        ),
        "mm_processor_kwargs apply_chat_template_kwargs": lacking({}),
        "apply_chat_template_kwargs.enable_thinking": to.flag("rollout.multi_turn_config.enable_thinking"),
        "mm_processor_kwargs.* datagen.* apply_chat_template_kwargs.*": lacking(),
        "tool_config_path function_tool_path": _tools,
    }
    lengths = {"max_prompt_length": _max_prompt, "max_response_length": longest_response}
    streamed = {"train_batch_size": _batch, "gen_batch_size": _gen_batch}
    return (
        *rules_below("data", lengths, defaults={"max_prompt_length": 512, "max_response_length": 512}),
        *rules_below("data", streamed, _streamed, {"train_batch_size": 1024}),
        *rules_below("data", table, defaults=_DEFAULTS, also={"shuffle": ("shuffle_train_dataloader",)}),
        Rule("data.custom_cls.path", custom, also=("custom_cls.path",)),
        Rule("data.custom_cls.name", custom, also=("custom_cls.name",)),
    )


def files(ours: str, words: str = "one file becomes a list; `~` is written out") -> Converter:
    """A file or a list of files; `~` is written out."""

    @computed(ours, words=words)
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, "", []):
            return implicit("null: none")
        names = values.texts(leaf.value)
        paths = [values.path(name) for name in names]
        note = "`~` is written out, which only a shell would expand" if paths != names else ""
        return mapped((ours, paths), note=note)

    return convert


def image_column(train: str, valid: str) -> Converter:
    """The column of images, which is written: rows with a value in it are refused. train, valid: our sections."""
    keys = (f"{train}.image_column_name", f"{valid}.image_column_name")

    @computed(*keys, words="as it is: rows with a value there are refused", null="null: verl looks at none")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        name = values.text(leaf.value)
        context.warn(
            f"`{leaf.key}` = {name}: `validate --data` and a run look at this column, and refuse rows with a value "
            "in it: this build trains on text"
        )
        validates = context.get("data.val_files", None) not in (None, "", [])
        written = keys if validates else keys[:1]
        return mapped(*((key, name) for key in written), note="rows with a value there are refused")

    return convert


@computed(words="null, or what rollout.multi_turn names: see there")
def _tools(context: ConversionContext, leaf: KeyPath) -> Result:
    """Tools that verl's dataset renders into each prompt."""
    if leaf.value in (None, "", []):
        return implicit("null: no tools")
    turns = f"{ROLLOUT}.multi_turn"
    repeats = leaf.value == context.get(f"{turns}.{leaf.key.rpartition('.')[2]}", None)
    if repeats and context.flag(f"{turns}.enable"):
        return implicit(f"repeats {turns}")
    return without_counterpart(leaf.key)


@computed(
    f"{TRAIN}.max_prompt_length",
    f"{VALID}.max_prompt_length",
    "policy.model_max_length",
    words="model_max_length is prompt + answer",
)
def _max_prompt(context: ConversionContext, leaf: KeyPath) -> Result:
    longest = values.integer(leaf.value)
    total = prompt_length(context) + response_length(context)
    targets = [(f"{TRAIN}.max_prompt_length", longest), ("policy.model_max_length", total)]
    if context.get("data.val_files", None):
        targets.insert(1, (f"{VALID}.max_prompt_length", longest))
    return mapped(*targets)


def _streamed(context: ConversionContext) -> str:
    return "fully_async takes ppo_mini_batch_size × require_batches prompts" if is_streamed(context) else ""


@computed("train.train_batch_per_replica", words="prompts × rollout.n: ours counts samples")
def _batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, n = values.count(leaf.value), group_size(context)
    return mapped(("train.train_batch_per_replica", prompts * n), note=f"{prompts} prompts × {n} samples")


@computed(
    "controller.oversample", words="divided by train_batch_size; null: 1.0", null="null: no more than needed"
)
def _gen_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, batch = values.integer(leaf.value), context.integer("data.train_batch_size", 1024) or 1024
    if prompts <= batch:
        return implicit("no more than needed: groups are made one by one here")
    return mapped(("controller.oversample", round(prompts / batch, 6)), note=f"{prompts} / {batch} prompts")


@computed("reward.prompt_forms", words="true adds this form of the prompt")
def _prompt_forms(context: ConversionContext, leaf: KeyPath) -> Result:
    names = {"data.return_raw_input_ids": "raw_prompt_ids", "data.return_full_prompt": "full_prompt"}
    if leaf.value is None or not values.flag(leaf.value):
        return implicit("false: rewards get the rule and its raw chat")
    return mapped(("reward.prompt_forms", [form for key, form in names.items() if context.flag(key)]))


@computed(f"{POLICY}.dataloader_num_workers", words="the larger of the two; 1 is the reading process itself")
def _workers(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None:
        values.integer(leaf.value)
    filtering = context.integer("data.filter_overlong_prompts_workers", 1) or 1
    loading = context.integer("data.dataloader_num_workers", 0) or 0
    if leaf.key == "data.filter_overlong_prompts_workers" and not context.flag(
        "data.filter_overlong_prompts"
    ):
        return implicit("no effect while filter_overlong_prompts = false")
    workers = max(filtering if filtering > 1 else 0, loading)
    return mapped((f"{POLICY}.dataloader_num_workers", workers))


@computed(f"{TRAIN}.overlong_prompts", words="filter → `drop`, else truncation")
def _overlong(context: ConversionContext, leaf: KeyPath) -> Result:
    key = f"{TRAIN}.overlong_prompts"
    targets = [key, f"{VALID}.overlong_prompts"] if context.get("data.val_files", None) else [key]
    if leaf.key == "data.filter_overlong_prompts":
        if leaf.value is None or not values.flag(leaf.value):
            return implicit("false: truncation says what happens to longer prompts")
        return mapped(*((target, "drop") for target in targets), note="left out and counted")
    if context.flag("data.filter_overlong_prompts"):
        values.text(leaf.value)
        return implicit("no effect: longer prompts are filtered out")
    return truncated(leaf, targets)


def truncated(leaf: KeyPath, targets: Sequence[str]) -> Result:
    """What `truncation` says of prompts or conversations that are too long. targets: ours that say it."""
    name = values.text(leaf.value)
    if name in ("error", "left", "right"):
        return mapped(*((target, name) for target in targets))
    reason = VERL.reason(f"{leaf.key}={name}")
    if reason is None:
        raise BadValue(f"expected error, left, right or middle, got {shown(name)}")
    return no_counterpart(reason)


@computed("policy.trust_remote_code", words="true where data's or model's is")
def _trust(context: ConversionContext, leaf: KeyPath) -> Result:
    model = context.flag("actor_rollout_ref.model.trust_remote_code")
    value = leaf.value is not None and values.flag(leaf.value)
    note = ""
    if model and not value:
        note = "actor_rollout_ref.model.trust_remote_code is true, and there is one key per model"
    return mapped(("policy.trust_remote_code", value or model), note=note)


@computed(
    f"{POLICY}.domain_column_name", f"{POLICY}.domain_shares", words="GroupRatioSampler: shares by domain"
)
def _sampler(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix = "data.sampler"
    if leaf.value is None:
        return implicit("null: none")
    column, names, ratios = (
        context.get(f"{prefix}.group_{part}", None) for part in ("key", "names", "ratios")
    )
    if not isinstance(column, str) or not isinstance(names, list) or not isinstance(ratios, list):
        return without_counterpart(f"{prefix}.class_path=own")
    total = sum(
        float(values.integer(ratio)) if isinstance(ratio, bool) else float(_positive(ratio))
        for ratio in ratios
    )
    if len(names) != len(ratios) or total <= 0:
        raise BadValue("group_names and group_ratios do not belong together")
    shares = {
        values.text(name): round(float(ratio) / total, 12) for name, ratio in zip(names, ratios, strict=True)
    }
    return mapped((f"{POLICY}.domain_column_name", column), (f"{POLICY}.domain_shares", shares))


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise BadValue(f"expected a share, got {shown(value)}")
    return float(value)
