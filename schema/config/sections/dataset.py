"""Where rows come from: `[train.train_policy.dataset]`, `[validation.dataset]` and `[evaluation.dataset]`."""

from __future__ import annotations

from typing import Literal

from schema.config.base import Amount, Count, CustomCode, FreeTable, Section
from schema.config.key import cosmos_key, key


# fmt: off
class DatasetConfig(Section):
    """Where the rows come from. Relative paths are relative to the current directory."""

    name: str = cosmos_key("",
        "Dataset: a local parquet, jsonl, json or arrow file, a directory of such files or what `save_to_disk` of "
        "`datasets` wrote, `synthetic:addition` for the built-in generator, or a Hugging Face dataset name. A "
        "relative path is relative to the current directory. Empty: no dataset.",
        acts="file: Rows of the prepared data.", example="data/train.parquet")
    files: list[str] = key([],
        "Local data files read one after the other, in place of `name`; relative paths are relative to the current "
        "directory.", acts="file: Rows of the prepared data.", example=["data/a.parquet", "data/b.parquet"])
    subset: str | None = cosmos_key("", "Subset (configuration) of a Hugging Face dataset, if any.",
        acts="file: Which subset is asked of the hub.", example="main")
    revision: str | None = cosmos_key("", "Git revision of a Hugging Face dataset: a branch, a tag or a commit hash.",
        acts="file: Which revision is asked of the hub.", example="main")
    split: str | list[str] = cosmos_key("",
        "Split, or list of splits taken one after the other. Of a directory, a split is a word of a file's path, and "
        "no file is of two. Empty: `train` where the dataset has it (validation: `validation`, else `test`); "
        "`cosmos-launch validate --data` says which files are read.", acts="file: Rows of the prepared data.",
        example="train")
    test_size: Amount | None = cosmos_key(None,
        "Rows held out for validation: a float in [0.0, 1.0] is a share of the dataset, an integer a number of rows. "
        "Unset: nothing is held out.", acts="file: Rows of each of the two data files.", example=0.05)
    max_prompt_length: Count | None = key(None,
        "Longest prompt in tokens, chat template included. Unset: what the longest answer leaves of "
        "policy.model_max_length; all but one token where it leaves nothing.",
        acts="file: Prompts left out of the prepared data.", example=1024)
    overlong_prompts: Literal["drop", "error", "left", "right"] = key("drop",
        "Prompts (supervised: conversations) that are too long: `drop` leaves them out and counts them, `error` "
        "refuses the dataset, `left` and `right` cut tokens on that side.",
        acts="file: Tokens of a prompt that is too long.")
    image_column_name: str = key("images",
        "Column of the images of a prompt, which this build cannot train on yet: rows with a value in it, or in a "
        "column or turn's key `images`, `image`, `videos`, `video`, `audios` or `audio`, and prompts with a "
        "placeholder such as <image> are refused. Empty: all rows are text, and none of these is looked at.",
        acts="file: Rows that are refused.", example="pictures")
    custom_class: CustomCode | Literal[""] = key("", 'Your own dataset: "path/to/file.py:Class". Empty: none.',
        example="my/file.py:MyClass", unbuilt="dataset classes of your own")
    options: FreeTable = key({},
        "Options of the built-in generator (`synthetic:addition`): `n` rows, `digits` of the operands, `phrasings` 1 "
        "to 4, `held_out` share, `seed`, `demonstrations` (worked answers for supervised training).",
        acts="file: Rows of the prepared data.", example={"n": 2000, "digits": 3})

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
