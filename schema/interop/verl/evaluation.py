"""verl's evaluation.yaml: answers in a file, scored."""

from __future__ import annotations

from schema.interop.engine.rows import (
    How,
    Leaf,
    Reading,
    Result,
    Row,
    as_text,
    computed,
    implicit,
    mapped,
    text,
)
from schema.interop.verl.data import files
from schema.interop.verl.facts import lacking
from schema.interop.verl.reward import reward_name


def evaluation_rows() -> tuple[Row, ...]:
    """All rows of an evaluation file."""
    ours = "evaluation"
    return (
        Row(
            "data.path",
            How(files(f"{ours}.dataset.files"), (f"{ours}.dataset.files",), "one file becomes a list"),
        ),
        Row("data.prompt_key", text(f"{ours}.prompt_column_name"), default="prompt"),
        Row("data.response_key", text(f"{ours}.responses_column_name"), default="responses"),
        Row("data.data_source_key", text(f"{ours}.data_source_column_name"), default="data_source"),
        Row("data.reward_model_key", _reference, default="reward_model"),
        Row("data.last_user_msg_template", lacking()),
        Row("custom_reward_function.path", _reward),
        Row("custom_reward_function.name", _reward),
    )


@computed("evaluation.reference_column_name", words="`.ground_truth` inside this column, where verl looks")
def _reference(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value is None:
        return implicit("null: none")
    column = as_text(leaf.value)
    return mapped(("evaluation.reference_column_name", f"{column}.ground_truth"), note="its `ground_truth`")


@computed("evaluation.reward_function", words="`path:name`; null: `by_source`")
def _reward(reading: Reading, leaf: Leaf) -> Result:
    name = reward_name(reading)
    if name == "by_source":
        return implicit("null: the built-in scorer of each row's data source (by_source)")
    return mapped(("evaluation.reward_function", name), note="path:name")
