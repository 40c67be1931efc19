"""verl's `data` table of RL files."""

from __future__ import annotations

from convert.engine import values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath
from convert.engine.values import BadValue, shown
from convert.verl.facts import (
    ROLLOUT,
    TRAIN,
    VALID,
    group_size,
    is_streamed,
    prompt_length,
    response_length,
    without_counterpart,
)


def files(context: ConversionContext, leaf: KeyPath) -> Result:
    """A file or a list of files; `~` is written out."""
    if leaf.value in (None, "", []):
        return implicit("null: none")
    names = values.texts(leaf.value)
    paths = [values.path(name) for name in names]
    return leaf.to(paths, note="`~` is written out, which only a shell would expand" if paths != names else "")


def image_column(context: ConversionContext, leaf: KeyPath) -> Result:
    """The column of images, of training and validation, which is written: rows with a value in it are refused."""
    name = values.text(leaf.value)
    context.warn(
        f"`{leaf.key}` = {name}: `validate --data` and a run look at this column, and refuse rows with a value "
        "in it: this build trains on text"
    )
    validates = context.get("data.val_files", None) not in (None, "", [])
    return leaf.to(*[name] * (1 + validates), note="rows with a value there are refused")


def most_samples(context: ConversionContext, leaf: KeyPath) -> Result:
    """How many rows of the files are used; -1: all."""
    if leaf.value is None or values.integer(leaf.value) < 1:
        return implicit("all rows")
    if not context.flag("data.shuffle"):
        context.warn(f"`{leaf.key}`: verl takes the first rows where shuffle = false; here they are drawn")
    return leaf.to(values.integer(leaf.value), note="drawn by train.seed")


def _tools(context: ConversionContext, leaf: KeyPath) -> Result:
    """Tools that verl's dataset renders into each prompt."""
    if leaf.value in (None, "", []):
        return implicit("null: no tools")
    turns = f"{ROLLOUT}.multi_turn"
    if leaf.value == context.get(f"{turns}.{leaf.name}", None) and context.flag(f"{turns}.enable"):
        return implicit(f"repeats {turns}")
    return without_counterpart(leaf.key)


def _max_prompt(context: ConversionContext, leaf: KeyPath) -> Result:
    longest = values.integer(leaf.value)
    total = prompt_length(context) + response_length(context)
    lengths = dict(zip(leaf.ours, (longest, longest, total), strict=True))
    if not context.get("data.val_files", None):
        del lengths[f"{VALID}.max_prompt_length"]
    return mapped(*lengths.items())


def longest_response(context: ConversionContext, leaf: KeyPath) -> Result:
    """The longest answer, and with the prompt before it what the model must hold."""
    written, longest = values.integer(leaf.value), response_length(context)
    note = "" if longest == written else f"rollout.response_length = {longest} is what verl generates up to"
    return leaf.to(longest, prompt_length(context) + longest, note=note)


def _streamed(context: ConversionContext) -> str:
    return "fully_async takes ppo_mini_batch_size × require_batches prompts" if is_streamed(context) else ""


def _batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, n = values.count(leaf.value), group_size(context)
    return leaf.to(prompts * n, note=f"{prompts} prompts × {n} samples")


def _gen_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, batch = values.integer(leaf.value), context.integer("data.train_batch_size", 1024) or 1024
    if prompts <= batch:
        return implicit("no more than needed: groups are made one by one here")
    return leaf.to(round(prompts / batch, 6), note=f"{prompts} / {batch} prompts")


def _prompt_forms(context: ConversionContext, leaf: KeyPath) -> Result:
    names = {"data.return_raw_input_ids": "raw_prompt_ids", "data.return_full_prompt": "full_prompt"}
    if leaf.value is None or not values.flag(leaf.value):
        return implicit("false: rewards get the rule and its raw chat")
    return leaf.to([form for key, form in names.items() if context.flag(key)])


def _workers(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None:
        values.integer(leaf.value)
    filtering = context.integer("data.filter_overlong_prompts_workers", 1) or 1
    loading = context.integer("data.dataloader_num_workers", 0) or 0
    if leaf.name == "filter_overlong_prompts_workers" and not context.flag("data.filter_overlong_prompts"):
        return implicit("no effect while filter_overlong_prompts = false")
    return leaf.to(max(filtering if filtering > 1 else 0, loading))


def _overlong(context: ConversionContext, leaf: KeyPath) -> Result:
    sections = (TRAIN, VALID) if context.get("data.val_files", None) else (TRAIN,)
    targets = [f"{section}.overlong_prompts" for section in sections]
    if leaf.key == "data.filter_overlong_prompts":
        if leaf.value is None or not values.flag(leaf.value):
            return implicit("false: truncation says what happens to longer prompts")
        return mapped(*((target, "drop") for target in targets), note="left out and counted")
    if context.flag("data.filter_overlong_prompts"):
        values.text(leaf.value)
        return implicit("no effect: longer prompts are filtered out")
    return truncated(leaf, targets)


def truncated(leaf: KeyPath, targets: list[str]) -> Result:
    """Convert what `truncation` says of prompts or conversations that are too long. targets: ours that say it."""
    name = values.text(leaf.value)
    if name not in ("error", "left", "right", "middle"):
        raise BadValue(f"expected error, left, right or middle, got {shown(name)}")
    return mapped(*((target, name) for target in targets))


def _trust(context: ConversionContext, leaf: KeyPath) -> Result:
    model = context.flag("actor_rollout_ref.model.trust_remote_code")
    value = leaf.value is not None and values.flag(leaf.value)
    note = "actor_rollout_ref.model.trust_remote_code is true, and there is one key per model"
    return leaf.to(value or model, note=note if model and not value else "")


def _sampler(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None:
        return implicit("null: none")
    column, names, ratios = (context.get(f"data.sampler.group_{part}", None) for part in ("key", "names", "ratios"))
    if not isinstance(column, str) or not isinstance(names, list) or not isinstance(ratios, list):
        return without_counterpart("data.sampler.class_path=own")
    total = sum(
        float(values.integer(ratio)) if isinstance(ratio, bool) else float(_positive(ratio)) for ratio in ratios
    )
    if len(names) != len(ratios) or total <= 0:
        raise BadValue("group_names and group_ratios do not belong together")
    pairs = zip(names, ratios, strict=True)
    return leaf.to(column, {values.text(name): round(float(ratio) / total, 12) for name, ratio in pairs})


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise BadValue(f"expected a share, got {shown(value)}")
    return float(value)
