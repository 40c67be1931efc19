"""`actor_train.data_args` of ROLL: the files of the prompts, their columns, and the domains they belong to."""

from __future__ import annotations

import math
from typing import Any

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath, Rule, computed
from convert.engine.values import BadValue
from convert.roll.converters import POLICY, lost, template

ROLE = "actor_train"


def paths(value: Any) -> list[str]:
    """A path or a list of them; a leading `~` is written out."""
    return [values.path(item) for item in values.texts(value)]


@computed("validation.dataset.files", words="data to validate on", null="null: none")
def _eval_files(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.get("validation.data_args.file_name", None):
        return implicit("validation.data_args.file_name is taken instead")
    return mapped(("validation.dataset.files", paths(leaf.value)))


@computed(
    f"{POLICY}.prompt_column_name",
    words="the column of the question, a conversation",
    null="null: prompt is the column",
)
def _messages(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.get(f"{ROLE}.data_args.prompt", None) is not None:
        context.warn(
            "data_args.prompt and data_args.messages exclude each other, and ROLL refuses both; prompt is taken"
        )
        return implicit("data_args.prompt is taken; ROLL refuses both")
    return mapped((f"{POLICY}.prompt_column_name", values.text(leaf.value)))


@computed(
    f"{POLICY}.domain_shares", words="share of prompts by domain; the last one is what the others leave"
)
def _shares(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, {}):
        return implicit("no shares")
    domains = context.below(f"{ROLE}.data_args.domain_interleave_probs")
    if len(domains) <= 1:
        return implicit("one domain: all prompts are its")
    context.warn(
        "domain_shares counts a row by its value in domain_column_name, ROLL by the reward whose tag_included "
        "holds that value: where they differ, write the domain into the column"
    )
    share, key = values.number(leaf.value), f"{POLICY}.domain_shares.{leaf.rest}"
    *others, last = domains
    left = round(1.0 - math.fsum(values.number(domains[name]) for name in others), 12)
    if leaf.rest != last or abs(left - share) <= 1e-6:
        return mapped((key, share))
    if left <= 0:
        raise BadValue(
            f"the other domains have {1.0 - left:g} in all and leave nothing for {last}, the last one"
        )
    context.warn(
        f"domain_interleave_probs do not add up to 1: ROLL gives {last}, the last domain, what the others leave of a "
        f"batch, {left:g} in place of {share:g}"
    )
    return mapped((key, left), note="ROLL gives the last domain what the others leave")


@computed(f"{POLICY}.domain_column_name", words="the column of a row's domain, if shares are set")
def _tag(context: ConversionContext, leaf: KeyPath) -> Result:
    if len(context.below(f"{ROLE}.data_args.domain_interleave_probs")) <= 1:
        return implicit("one domain: no shares to keep")
    return mapped((f"{POLICY}.domain_column_name", values.text(leaf.value)))


@computed(
    f"{POLICY}.prompt_column_name",
    words="the column of the question, a text; see the warning",
    null="null: messages is the column",
)
def _prompt(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    context.warn(
        f"data_args.prompt = {name}: ROLL gives a model the text of this column as it is, without a chat template. "
        "Here it is the user's message in the model's own template; for the bare text write a file with "
        "{{ messages[0]['content'] }} and name it in rollout.multi_turn_config.custom_chat_template_path"
    )
    return mapped((f"{POLICY}.prompt_column_name", name))


DATA_ARGS: tuple[Rule, ...] = (
    Rule("template", template(f"{ROLE}.data_args.template"), default="native"),
    Rule(
        "file_name",
        to.converted(f"{POLICY}.dataset.files", paths, "read one after the other", "null: no data"),
    ),
    Rule("eval_file_name", _eval_files),
    Rule("prompt", _prompt),
    Rule("messages", _messages),
    Rule(
        "response",
        to.text(
            f"{POLICY}.response_column_name",
            "the column of the reference answer",
            "null: ground_truth is the column",
        ),
    ),
    Rule("tag", _tag, default="tag"),
    Rule("id", to.always("a row is known by its position in the dataset")),
    Rule("domain_interleave_probs.*", _shares),
    Rule(
        "interleave_probs",
        to.unless((None, "1.0", 1.0, 1), "one dataset", lost(f"{ROLE}.data_args.interleave_probs")),
    ),
    Rule("preprocessing_num_workers", to.integer(f"{POLICY}.dataloader_num_workers")),
    Rule(
        "cache_path",
        to.converted(f"{POLICY}.enable_dataset_cache", lambda value: True, "set → true", "null: no cache"),
    ),
    Rule("dataset_type", to.always("the format follows from the ending of the file")),
    Rule("dataset_dir", to.always("ROLL's file_name holds the whole path")),
)
