"""verl's evaluation.yaml: answers in a file, scored."""

from __future__ import annotations

from schema.interop.engine.rules import (
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    as_text,
    computed,
    implicit,
    mapped,
    text,
)
from schema.interop.verl.data import files
from schema.interop.verl.facts import lacking
from schema.interop.verl.reward import reward_name


def evaluation_rules() -> tuple[Rule, ...]:
    """All rows of an evaluation file."""
    ours = "evaluation"
    return (
        Rule(
            "data.path",
            Converter(files(f"{ours}.dataset.files"), (f"{ours}.dataset.files",), "one file becomes a list"),
        ),
        Rule("data.prompt_key", text(f"{ours}.prompt_column_name"), default="prompt"),
        Rule("data.response_key", text(f"{ours}.responses_column_name"), default="responses"),
        Rule("data.data_source_key", text(f"{ours}.data_source_column_name"), default="data_source"),
        Rule("data.reward_model_key", _reference, default="reward_model"),
        Rule("data.last_user_msg_template", lacking()),
        Rule("custom_reward_function.path", _reward),
        Rule("custom_reward_function.name", _reward),
    )


@computed("evaluation.reference_column_name", words="`.ground_truth` inside this column, where verl looks")
def _reference(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None:
        return implicit("null: none")
    column = as_text(leaf.value)
    return mapped(("evaluation.reference_column_name", f"{column}.ground_truth"), note="its `ground_truth`")


@computed("evaluation.reward_function", words="`path:name`; null: `by_source`")
def _reward(context: ConversionContext, leaf: KeyPath) -> Result:
    name = reward_name(context)
    if name == "by_source":
        return implicit("null: the built-in scorer of each row's data source (by_source)")
    return mapped(("evaluation.reward_function", name), note="path:name")
