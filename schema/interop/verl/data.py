"""verl's `data` table of RL files."""

from __future__ import annotations

from collections.abc import Callable

from schema.interop.engine.rules import (
    BadValue,
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    always,
    as_flag,
    as_integer,
    as_path,
    as_text,
    as_texts,
    computed,
    flag,
    implicit,
    integer,
    mapped,
    no_counterpart,
    path,
    shown,
    text,
    unless,
)
from schema.interop.engine.unsupported import reason_for
from schema.interop.verl.facts import (
    POLICY,
    group_size,
    is_streamed,
    lacking,
    prompt_length,
    response_length,
    without_counterpart,
)
from schema.interop.verl.rollout import RESPONSE

TRAIN, VALID = f"{POLICY}.dataset", "validation.dataset"


def data_rules() -> tuple[Rule, ...]:
    """All rows of `data`."""
    custom = Converter(_custom_class, (f"{TRAIN}.custom_class",), "`path:name`")
    forms = Converter(_prompt_forms, ("reward.prompt_forms",), "true adds this form of the prompt")
    workers = Converter(
        _workers,
        (f"{POLICY}.dataloader_num_workers",),
        "the larger of the two; 1 is the reading process itself",
    )
    overlong = Converter(_overlong, (f"{TRAIN}.overlong_prompts",), "filter → `drop`, else truncation")
    group = Converter(
        _sampler,
        (f"{POLICY}.domain_column_name", f"{POLICY}.domain_shares"),
        "GroupRatioSampler: shares by domain",
    )
    return (
        Rule("data.tokenizer", path("policy.tokenizer_name_or_path")),
        Rule("data.use_shm", always("rows are indexed on disk, not copied to shared memory")),
        Rule(
            "data.train_files",
            Converter(
                files(f"{TRAIN}.files"), (f"{TRAIN}.files",), "one file becomes a list; `~` is written out"
            ),
        ),
        Rule(
            "data.val_files",
            Converter(
                files(f"{VALID}.files"), (f"{VALID}.files",), "one file becomes a list; `~` is written out"
            ),
        ),
        Rule("data.train_max_samples", lacking(-1)),
        Rule("data.val_max_samples", lacking(-1)),
        Rule("data.prompt_key", text(f"{POLICY}.prompt_column_name")),
        Rule("data.reward_fn_key", text(f"{POLICY}.data_source_column_name")),
        Rule("data.max_prompt_length", _max_prompt, default=512),
        Rule("data.max_response_length", RESPONSE, default=512),
        Rule("data.train_batch_size", _batch, default=1024, when=_streamed),
        Rule("data.gen_batch_size", _gen_batch, when=_streamed),
        Rule("data.val_batch_size", integer("validation.batch_size")),
        Rule("data.return_raw_input_ids", forms),
        Rule("data.return_raw_chat", always("rewards always get the raw chat")),
        Rule("data.return_full_prompt", forms),
        Rule("data.return_multi_modal_inputs", always("concerns images")),
        Rule("data.shuffle", flag(f"{POLICY}.dataloader_shuffle"), default=True),
        Rule("data.seed", Converter(_seed, ("train.seed",), "null: the default")),
        Rule("data.validation_shuffle", always("the order of validation changes no result")),
        Rule("data.dataloader_num_workers", workers),
        Rule("data.filter_overlong_prompts_workers", workers),
        Rule("data.filter_overlong_prompts", overlong, default=False),
        Rule("data.truncation", overlong, default="error"),
        Rule(
            "data.image_key",
            unless(
                ["images"],
                "verl's default, which counts for rows that have such a column only; for images write "
                f"{TRAIN}.image_column_name",
                text(f"{TRAIN}.image_column_name"),
            ),
        ),
        Rule("data.image_patch_size", always("the model's processor knows it")),
        Rule("data.video_key", lacking("videos")),
        Rule("data.audio_key", lacking("audios")),
        Rule("data.mm_processor_kwargs", lacking({})),
        Rule("data.mm_processor_kwargs.*", lacking()),
        Rule(
            "data.trust_remote_code",
            Converter(_trust, ("policy.trust_remote_code",), "true where data's or model's is"),
            default=False,
        ),
        Rule("data.custom_cls.path", custom, also=("custom_cls.path",)),
        Rule("data.custom_cls.name", custom, also=("custom_cls.name",)),
        Rule("data.datagen.*", lacking()),
        Rule("data.sampler.class_path", group),
        Rule("data.sampler.class_name", group),
        Rule("data.sampler.group_key", group),
        Rule("data.sampler.group_names", group),
        Rule("data.sampler.group_ratios", group),
        Rule("data.apply_chat_template_kwargs", lacking({})),
        Rule(
            "data.apply_chat_template_kwargs.enable_thinking",
            flag("rollout.multi_turn_config.enable_thinking"),
        ),
        Rule("data.apply_chat_template_kwargs.*", lacking()),
        Rule("data.tool_config_path", always("repeats rollout.multi_turn")),
        Rule("data.function_tool_path", always("repeats rollout.multi_turn")),
    )


def files(ours: str) -> Callable[[ConversionContext, KeyPath], Result]:
    """A file or a list of files; `~` is written out."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, "", []):
            return implicit("null: none")
        names = as_texts(leaf.value)
        paths = [as_path(name) for name in names]
        note = "`~` is written out, which only a shell would expand" if paths != names else ""
        return mapped((ours, paths), note=note)

    return run


@computed(
    f"{TRAIN}.max_prompt_length",
    f"{VALID}.max_prompt_length",
    "policy.model_max_length",
    words="model_max_length is prompt + answer",
)
def _max_prompt(context: ConversionContext, leaf: KeyPath) -> Result:
    longest = as_integer(leaf.value)
    total = prompt_length(context) + response_length(context)
    targets = [(f"{TRAIN}.max_prompt_length", longest), ("policy.model_max_length", total)]
    if context.get("data.val_files", None):
        targets.insert(1, (f"{VALID}.max_prompt_length", longest))
    return mapped(*targets)


def _streamed(context: ConversionContext) -> str:
    return "fully_async takes ppo_mini_batch_size × require_batches prompts" if is_streamed(context) else ""


@computed("train.train_batch_per_replica", words="prompts × rollout.n: ours counts samples")
def _batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, n = as_integer(leaf.value), group_size(context)
    if prompts < 1:
        raise BadValue(f"expected at least 1, got {prompts}")
    return mapped(("train.train_batch_per_replica", prompts * n), note=f"{prompts} prompts × {n} samples")


@computed("controller.oversample", words="divided by train_batch_size; null: 1.0")
def _gen_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None:
        return implicit("null: no more than needed")
    prompts, batch = as_integer(leaf.value), context.integer("data.train_batch_size", 1024) or 1024
    if prompts <= batch:
        return implicit("no more than needed: groups are made one by one here")
    return mapped(("controller.oversample", round(prompts / batch, 6)), note=f"{prompts} / {batch} prompts")


def _prompt_forms(context: ConversionContext, leaf: KeyPath) -> Result:
    names = {"data.return_raw_input_ids": "raw_prompt_ids", "data.return_full_prompt": "full_prompt"}
    if leaf.value is None or not as_flag(leaf.value):
        return implicit("false: rewards get the row and its raw chat")
    return mapped(("reward.prompt_forms", [form for key, form in names.items() if context.flag(key)]))


def _seed(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None:
        return implicit("null: the default")
    return mapped(("train.seed", as_integer(leaf.value)))


def _workers(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None:
        as_integer(leaf.value)
    filtering = context.integer("data.filter_overlong_prompts_workers", 1) or 1
    loading = context.integer("data.dataloader_num_workers", 0) or 0
    if leaf.key == "data.filter_overlong_prompts_workers" and not context.flag(
        "data.filter_overlong_prompts"
    ):
        return implicit("no effect while filter_overlong_prompts = false")
    workers = max(filtering if filtering > 1 else 0, loading)
    return mapped((f"{POLICY}.dataloader_num_workers", workers))


def _overlong(context: ConversionContext, leaf: KeyPath) -> Result:
    key = f"{TRAIN}.overlong_prompts"
    targets = [key, f"{VALID}.overlong_prompts"] if context.get("data.val_files", None) else [key]
    if leaf.key == "data.filter_overlong_prompts":
        if leaf.value is None or not as_flag(leaf.value):
            return implicit("false: truncation says what happens to longer prompts")
        return mapped(*((target, "drop") for target in targets), note="left out and counted")
    name = as_text(leaf.value)
    if context.flag("data.filter_overlong_prompts"):
        return implicit("no effect: longer prompts are filtered out")
    if name in ("error", "left", "right"):
        return mapped(*((target, name) for target in targets))
    reason = reason_for(context.system, f"{leaf.key}={name}")
    if reason is None:
        raise BadValue(f"expected error, left, right or middle, got {shown(name)}")
    return no_counterpart(reason)


def _trust(context: ConversionContext, leaf: KeyPath) -> Result:
    model = context.flag("actor_rollout_ref.model.trust_remote_code")
    value = leaf.value is not None and as_flag(leaf.value)
    note = (
        "actor_rollout_ref.model.trust_remote_code is true, and there is one key per model"
        if model and not value
        else ""
    )
    return mapped(("policy.trust_remote_code", value or model), note=note)


def _custom_class(context: ConversionContext, leaf: KeyPath) -> Result:
    file, name = context.get("data.custom_cls.path", None), context.get("data.custom_cls.name", None)
    if not isinstance(file, str) or not isinstance(name, str):
        return implicit("null: none") if leaf.value is None else implicit("no effect without the other one")
    return mapped((f"{TRAIN}.custom_class", f"{as_path(file)}:{name}"), note="path:name")


def _sampler(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix = "data.sampler"
    if leaf.value is None:
        return implicit("null: none")
    column, names, ratios = (
        context.get(f"{prefix}.group_{part}", None) for part in ("key", "names", "ratios")
    )
    if not isinstance(column, str) or not isinstance(names, list) or not isinstance(ratios, list):
        return without_counterpart(context.system, f"{prefix}.class_path=own")
    total = sum(
        float(as_integer(ratio)) if isinstance(ratio, bool) else float(_positive(ratio)) for ratio in ratios
    )
    if len(names) != len(ratios) or total <= 0:
        raise BadValue("group_names and group_ratios do not belong together")
    shares = {
        as_text(name): round(float(ratio) / total, 12) for name, ratio in zip(names, ratios, strict=True)
    }
    return mapped((f"{POLICY}.domain_column_name", column), (f"{POLICY}.domain_shares", shares))


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise BadValue(f"expected a share, got {shown(value)}")
    return float(value)
