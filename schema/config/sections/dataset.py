"""Where rows come from: `[train.train_policy.dataset]`, `[validation.dataset]` and `[evaluation.dataset]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import Amount, CustomCode, FreeTable, Section


class DatasetConfig(Section):
    """Where the rows come from. Relative paths are relative to the current directory."""

    name: str = Field(
        default="",
        description="Dataset: a local parquet, jsonl or json file, a directory of such files, "
        "`synthetic:addition` for the built-in generator, or a Hugging Face dataset name. A relative path "
        "is relative to the current directory. Empty: no dataset.",
    )
    files: list[str] = Field(
        default=[],
        description="Local data files read one after the other, in place of `name`; relative paths are relative "
        "to the current directory.",
    )
    subset: str | None = Field(
        default="", description="Subset (configuration) of a Hugging Face dataset, if any."
    )
    revision: str | None = Field(
        default="", description="Git revision of a Hugging Face dataset: a branch, a tag or a commit hash."
    )
    split: str | list[str] = Field(
        default="",
        description="Split, or list of splits taken one after the other. Empty: `train` where the dataset "
        "has it (validation: the held-out part).",
    )
    test_size: Amount | None = Field(
        default=None,
        description="Rows held out for validation: a float in [0.0, 1.0] is a share of the dataset, an "
        "integer a number of rows. Unset: nothing is held out.",
    )
    max_prompt_length: int | None = Field(
        default=None,
        ge=1,
        description="Longest prompt in tokens, chat template included. Unset: what the longest answer leaves.",
    )
    overlong_prompts: Literal["drop", "error", "left", "right"] = Field(
        default="drop",
        description="Prompts (supervised: conversations) that are too long: `drop` leaves them out and counts "
        "them, `error` refuses the dataset, `left` and `right` cut tokens on that side.",
    )
    image_column_name: str = Field(default="", description="Column of the images of a prompt. Empty: none.")
    custom_class: CustomCode | Literal[""] = Field(
        default="", description='Your own dataset: "path/to/file.py:Class". Empty: none.'
    )
    options: FreeTable = Field(
        default={},
        description="Options of the built-in generator (`synthetic:addition`): `n` rows, `digits` of the "
        "operands, `phrasings` 1 to 4, `held_out` share, `seed`, `demonstrations` (worked answers for "
        "supervised training).",
    )

    @property
    def is_named(self) -> bool:
        """Whether there is a dataset at all."""
        return bool(self.name or self.files)

    @property
    def splits(self) -> list[str]:
        """The splits as a list; empty when none is named."""
        if isinstance(self.split, list):
            return list(self.split)
        return [self.split] if self.split else []

    @property
    def is_synthetic(self) -> bool:
        """Whether the rows come from the built-in generator."""
        return self.name.startswith("synthetic:")
