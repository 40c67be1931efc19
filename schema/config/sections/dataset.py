"""Where rows come from: `[train.train_policy.dataset]`, `[validation.dataset]` and `[evaluation.dataset]`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import PrivateAttr

from schema.config.base import Amount, Count, CustomCode, FreeTable, Positive, Seconds, Section
from schema.config.key import cosmos_key, key
from schema.config.paths import local_path

CACHE_GIB = 100.0


@dataclass(frozen=True)
class CacheSettings:
    """The cache of a job's data: `dataset_cache_dir` and `dataset_cache_size` of [train.train_policy]."""

    directory: str = ""
    gib: float = CACHE_GIB

    @property
    def root(self) -> Path:
        """Its directory, with the default resolved."""
        if self.directory:
            return Path(self.directory).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cosmos-launch"

    @property
    def n_bytes(self) -> int:
        """The most bytes that it may have."""
        return int(self.gib * 2**30)


# fmt: off
class DatasetKeys(Section):
    """Keys of one dataset, which stands alone or is a part of several."""

    name: str = cosmos_key("",
        "Dataset: a parquet, jsonl, json, arrow, csv or tsv file, or a directory of such files or of what "
        "`save_to_disk` of `datasets` wrote, by its path or address (s3://, gs://, hdfs://, abfs://); "
        "`synthetic:addition` for the built-in generator, or a Hugging Face dataset name. A relative path is "
        "relative to the current directory. Empty: no dataset.",
        acts="file: Rows of the prepared data.", example="data/train.parquet")
    files: list[str] = key([],
        "Data files read one after the other, in place of `name`, by their paths or addresses (s3://, …); relative "
        "paths are relative to the current directory.", acts="file: Rows of the prepared data.",
        example=["data/a.parquet", "data/b.parquet"])
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
    max_samples: Count | None = key(None,
        "Rows that are used at most, drawn from the others by train.seed. Unset: all.",
        acts="file: Rows of the prepared data.", example=5000)
    max_prompt_length: Count | None = key(None,
        "Longest prompt in tokens, chat template included. Unset: what the longest answer leaves of "
        "policy.model_max_length; all but one token where it leaves nothing.",
        acts="file: Prompts left out of the prepared data.", example=1024)
    overlong_prompts: Literal["drop", "error", "left", "right", "middle"] = key("drop",
        "Prompts (supervised: conversations) that are too long: `drop` leaves them out and counts them, `error` "
        "refuses the dataset, `left` and `right` cut tokens on that side, `middle` those between the first and the "
        "last half of what is allowed.",
        acts="file: Tokens of a prompt that is too long.")
    image_column_name: str = key("images",
        "Column of the images of a prompt, which this build cannot train on yet: rows with a value in it, or in a "
        "column or turn's key `images`, `image`, `videos`, `video`, `audios` or `audio`, and prompts with a "
        "placeholder such as <image> are refused. Empty: all rows are text, and none of these is looked at.",
        acts="file: Rows that are refused.", example="pictures")
    custom_class: CustomCode | Literal[""] = key("",
        'Your own dataset: "path/to/file.py:Class", map-style or iterable, run in a process of its own. It is called '
        "with those of data_files (`files`, else `name`), tokenizer, config, processor, split, seed, max_samples and "
        "the keys of [custom] that it has parameters for; each item is a dict, the columns of a row. Empty: none.",
        acts="file: Rows of the prepared data.", example="my/file.py:MyClass")
    custom_class_timeout: Seconds = key(600.0, "Seconds that the class may take for its start, and for one row.",
        acts="refusal: When a class that hangs is given up.", example=30.0)
    options: FreeTable = key({},
        "Options of the built-in generator (`synthetic:addition`): `n` rows, `digits` of the operands, `phrasings` 1 "
        "to 4, `held_out` share, `seed`, `demonstrations` (worked answers for supervised training).",
        acts="file: Rows of the prepared data.", example={"n": 2000, "digits": 3})

    _cache: CacheSettings = PrivateAttr(default_factory=CacheSettings)

    @property
    def cache(self) -> CacheSettings:
        """The cache of the job that the section belongs to."""
        return self._cache

    def keep_in(self, cache: CacheSettings) -> None:
        """Use the cache of the job: the whole configuration says so, once it is read."""
        self._cache = cache

    @property
    def is_named(self) -> bool:
        """Whether this names rows itself."""
        return bool(self.name or self.files or self.custom_class)

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


class DatasetPart(DatasetKeys):
    """One of several datasets: the keys of a dataset, and its name and share among them."""

    source: str = key("",
        "What this part is called in shares and reports. It is the row's data source where the data has no column of "
        "that name (train.train_policy.data_source_column_name). Empty: the name of its dataset or first file.",
        max_length=200, acts="file: `data_source` of a prepared row, and names of sources.", example="gsm8k")
    share: Positive | None = key(None,
        "Share of this part among the prompts that are trained; those of all parts add up to 1. Its rows are passed "
        "through as often as that takes (domain_exhausted). Unset in all parts: their rows are one dataset.",
        acts="request or reply: Which part the next prompt is of.", example=0.7)

    @property
    def label(self) -> str:
        """The name of this part in reports."""
        name = self.name or next(iter(self.files), "") or self.custom_class
        name = name.rstrip("/") or name
        return self.source or (name.rpartition("/")[2] if local_path(name) else name)


class DatasetConfig(DatasetKeys):
    """Where the rows come from. Relative paths are relative to the current directory."""

    part: list[DatasetPart] = key([],
        "Several datasets, one table each: [[train.train_policy.dataset.part]] and the like. Each has the keys of a "
        "dataset, which then stands for none itself, and may have a share of its own.")

    @property
    def is_named(self) -> bool:
        """Whether there is a dataset at all."""
        return bool(self.name or self.files or self.custom_class or self.part)

    @property
    def parts(self) -> list[tuple[str, DatasetKeys]]:
        """The datasets that are read, each with its place below the section (`.part[0]`; empty: the section)."""
        if not self.part:
            return [("", self)]
        return [(f".part[{i}]", part) for i, part in enumerate(self.part)]

    def keep_in(self, cache: CacheSettings) -> None:
        """Use the cache of the job, in all parts."""
        for _, part in self.parts:
            part._cache = cache
        self._cache = cache

    @property
    def holds_out(self) -> bool:
        """Whether rows are held out for validation."""
        return any(part.test_size for _, part in self.parts)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part by its label, as they are written; empty: no part has one."""
        return {part.label: part.share for part in self.part if part.share is not None}
