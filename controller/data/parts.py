"""The parts of a run's data: for each its dataset, its role, and the rows of the dataset that belong to it.

    [train.train_policy.dataset] or its parts ─▶ training_parts     less the rows that are held out
    [validation.dataset], or those rows       ─▶ validation_parts

A dataset that stands alone is one part without a label.

Of much data some rows are prepared before all others, so that a job can begin with them (`EarlyRows`). They are
drawn from all rows by the seed (without shuffling they are the first ones), so that a pass which begins with them
and goes on with the others is as good a shuffle as any. Which rows they are depends on data and configuration alone,
not on whether a job begins with them: what is trained is the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from controller.data.errors import DataError
from controller.data.reading.own_class import has_ended, most_rows, rows_file, run_class
from controller.data.reading.sources import (
    FileSource,
    RowSource,
    files_of,
    open_source,
    optional_column,
    require_column,
)
from controller.data.rows import Keep
from controller.data.values import is_missing
from schema.config import SOURCE_SCORERS, Config, DatasetConfig
from schema.config.data_files import FileId
from schema.config.dataset_files import Role
from schema.config.sections.dataset import DatasetKeys, DatasetPart

logger = logging.getLogger("controller.data.prepare")  # one name for all of the preparation

_POLICY = "train.train_policy"
_TRAIN, _VALIDATION = f"{_POLICY}.dataset", "validation.dataset"
EARLY = 8192
"""Rows that are prepared before the others: of the data, or of each part with a share."""
LONG = 8 * EARLY
"""The rows that there are at least where any are early: fewer are prepared before an engine has booted."""
SPARE = 2
"""How many times the rows that a job needs there must be for it to begin early: some will be left out."""


@dataclass(frozen=True)
class Part:
    """Rows of one dataset in one role. section: the table that names them. label: of one of several; else empty."""

    role: Role
    section: str
    dataset: DatasetKeys
    source: RowSource
    keep: Keep
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the part in reports."""
        return f"{self.role}/{self.label}" if self.label else self.role

    def key(self, i: int) -> str:
        """The name of row i, the same in each preparation of the same data."""
        return f"{self.name}/{i}"

    def where(self, i: int) -> str:
        """Name row i for an error."""
        return self.source.where(i)

    @property
    def gives_source(self) -> bool:
        """Whether the part names the data source of rows that name none."""
        return isinstance(self.dataset, DatasetPart) and bool(self.dataset.source)

    def named_source(self, raw: dict[str, Any], column: str) -> str | None:
        """The data source that the part gives to a row that names none itself; None: it gives none."""
        if not isinstance(self.dataset, DatasetPart) or not self.dataset.source:
            return None
        return self.dataset.source if is_missing(optional_column(raw, column)) else None


def training_parts(config: Config, run_dir: Path, spare: float = 1.0) -> list[Part]:
    """The training data. Raises `DataError`.

    run_dir: rows of classes of the user's are kept there. spare: see `run_class`.
    """
    dataset = config.train.train_policy.dataset
    if not dataset.is_named:
        raise DataError(f"{_TRAIN}.name is empty: a job needs training data")
    apart = files_of(config.validation.dataset, "validation") if config.validation.enable else frozenset()
    opened = _opened(config, _TRAIN, dataset, "train", apart, run_dir, spare)
    _check_optional(config, opened)
    return [_training(config, part) for part in opened]


def validation_parts(config: Config, trained: list[Part], run_dir: Path) -> list[Part]:
    """The held-out data: its own, else what the parts that are trained on leave. Raises `DataError`."""
    dataset = config.validation.dataset
    if dataset.is_named:
        apart = files_of(config.train.train_policy.dataset, "train") if trained else frozenset()
        opened = _opened(config, _VALIDATION, dataset, "validation", apart, run_dir)
        return [_limited(part, config.effective_seed, frozenset()) for part in opened]
    held_out = [
        Part("validation", part.section, part.dataset, part.source, held.__contains__, part.label)
        for part in trained
        if (held := _held_out(part, config))
    ]
    if not held_out:
        raise DataError(
            "validation has no rows: name a dataset in validation.dataset.name (synthetic:addition: its held-out "
            "pairs), or hold rows of the training data out with train.train_policy.dataset.test_size"
        )
    for part in held_out:
        check_columns(config, part)
    return held_out


def answer_parts(config: Config, run_dir: Path) -> list[Part]:
    """The answers that an evaluation scores, each part with the columns that are read. Raises `DataError`."""
    evaluation = config.evaluation
    columns = {
        "prompt_column_name": evaluation.prompt_column_name,
        "responses_column_name": evaluation.responses_column_name,
        "reference_column_name": evaluation.reference_column_name,
    }
    opened = _opened(config, "evaluation.dataset", evaluation.dataset, "validation", frozenset(), run_dir)
    for part in opened:
        named = dict(columns)
        if "by_source" in evaluation.reward_weights and not part.gives_source:
            named["data_source_column_name"] = evaluation.data_source_column_name
        for key, name in named.items():
            if name:
                require_column(part.source, name, f"evaluation.{key}")
    return opened


def further_rows(config: Config, part: Part, kept: int, run_dir: Path) -> float:
    """How many times as many rows a class must give for enough to be kept; 1: they are, or it has no more."""
    dataset = part.dataset
    trains = part.role == "train" and not config.validation.only
    if not dataset.custom_class or not trains or not kept or dataset.max_samples:
        return 1.0
    least = most_rows(config, part.section, dataset)
    if least is None or has_ended(rows_file(config, part.section, dataset, run_dir)):
        return 1.0
    return max(1.0, least / kept)


def _opened(
    config: Config,
    section: str,
    dataset: DatasetConfig,
    role: Role,
    apart: Collection[FileId],
    run_dir: Path,
    spare: float = 1.0,
) -> list[Part]:
    """All parts of a dataset with all their rows, each with the columns that are read."""
    parts = []
    for place, keys in dataset.parts:
        key = f"{section}{place}"
        if role == "train" and keys.is_synthetic and keys.test_size:
            raise DataError(
                f"{key}.test_size: synthetic:addition holds out pairs of operands, not rows; name it in "
                "validation.dataset.name instead"
            )
        label = keys.label if isinstance(keys, DatasetPart) else ""
        if keys.custom_class:
            rows = run_class(config, key, keys, run_dir, spare)
            source: RowSource = FileSource(rows, name=keys.custom_class)
        else:
            source = open_source(keys, role, config.effective_seed, apart)
        parts.append(Part(role, key, keys, source, lambda _: True, label))
        if not config.is_evaluation:
            check_columns(config, parts[-1])
    return parts


def _check_optional(config: Config, parts: list[Part]) -> None:
    """Refuse a column that rows may lack where no part has it at all. Raises `DataError` of the first part."""
    for key, column in config.train.train_policy.optional_columns.items():
        faults = []
        for part in parts:
            try:
                require_column(part.source, column, f"{_POLICY}.{key}")
            except DataError as error:
                faults.append(error)
        if len(faults) == len(parts):
            raise faults[0]


def _training(config: Config, part: Part) -> Part:
    return _limited(part, config.effective_seed, _held_out(part, config))


def _held_out(part: Part, config: Config) -> frozenset[int]:
    return held_out_rows(len(part.source), part.dataset.test_size, config.effective_seed, part.section)


def _limited(part: Part, seed: int, held_out: frozenset[int]) -> Part:
    """A part without rows that are held out, and with no more than its `max_samples`."""
    n, most = len(part.source), part.dataset.max_samples
    if most is None or most >= n - len(held_out):
        return Part(part.role, part.section, part.dataset, part.source, lambda i: i not in held_out, part.label)
    drawn = np.random.default_rng(seed).permutation(n)[len(held_out) : len(held_out) + most]
    chosen = frozenset(drawn.tolist())
    return Part(part.role, part.section, part.dataset, part.source, chosen.__contains__, part.label)


def held_out_rows(n: int, test_size: float | int | None, seed: int, section: str = _TRAIN) -> frozenset[int]:
    """The rows that `test_size` takes from training: the first of a seeded permutation.

    A float is a share of the rows (rounded up), an integer a number. Raises `DataError` if nothing would be
    left to train on.
    """
    if not test_size:
        return frozenset()
    held_out = math.ceil(test_size * n) if isinstance(test_size, float) else test_size
    if held_out >= n:
        raise DataError(
            f"{section}.test_size = {test_size} holds out {held_out} of {n} rows: none is left to train on"
        )
    return frozenset(np.random.default_rng(seed).permutation(n)[:held_out].tolist())


def check_columns(config: Config, part: Part) -> None:
    """Refuse a part that lacks a column which the configuration names. Raises `DataError`."""
    source, role = part.source, part.role
    if role == "train" and (column := config.curriculum.column_name):
        require_column(source, column, f"{_POLICY}.curriculum.column_name")
    where = "" if role == "train" else " (dataset of [validation])"
    where = f" ({part.section})" if part.label else where
    if not config.is_grpo:
        for key, name in config.sft.columns.items():
            require_column(source, name, f"{_POLICY}.{key}{where}")
        return
    grpo = config.grpo
    require_column(source, grpo.prompt_column, f"{_POLICY}.prompt_column_name{where}")
    if grpo.response_column_name:
        require_column(source, grpo.response_column_name, f"{_POLICY}.response_column_name{where}")
    elif "answer" in source.columns:
        logger.warning(
            "%s has a column `answer`, but train.train_policy.response_column_name is empty: rewards get no "
            'reference answer, and the column as row["columns"]["answer"]',
            source.name,
        )
    if wants_source(config, part) and not part.gives_source:
        require_column(source, grpo.data_source_column_name, f"{_POLICY}.data_source_column_name{where}")
    if grpo.domain_column_name and role == "train":
        require_column(source, grpo.domain_column_name, f"{_POLICY}.domain_column_name{where}")


def wants_source(config: Config, part: Part) -> bool:
    """Whether a row needs its `data_source`: a reward or a teacher asks for it, or its column is named."""
    taught = part.role == "train" and any(teacher.source for teacher in config.teacher)
    named = config.grpo.data_source_column_name != "data_source"
    return taught or named or rewards_by_source(config, part) is not None


def rewards_by_source(config: Config, part: Part) -> str | None:
    """The key of the rewards of a part's rows if these are chosen by their source; None: they are not."""
    key, weights = f"{_POLICY}.reward_function", config.training_reward_weights
    if part.role == "validation" and (of_set := config.validation.of_set(part.label).reward_weights):
        key, weights = "validation.reward_function", of_set
    return key if "by_source" in weights else None


def check_source(name: Any, where: str, key: str) -> None:
    """Refuse a row that `by_source` could not score; `key` names the rewards. Raises `DataError`."""
    if not isinstance(name, str) or name not in SOURCE_SCORERS:
        raise DataError(
            f"{where}: no built-in reward function is known for the data source {name!r}; by_source knows "
            f"{', '.join(SOURCE_SCORERS)}; for other data name a function of your own in {key}: "
            '"path/to/file.py:function"'
        )


# ---- rows that are prepared before the others -----------------------------------------------------------------


@dataclass(frozen=True)
class EarlyRows:
    """The early rows of each part, by its name; none where there are few. total: all rows of all parts."""

    rows: Mapping[str, frozenset[int]]
    total: int

    @property
    def read(self) -> dict[str, int]:
        """How many rows of each part are early, for the metadata of the prepared file."""
        return {name: len(rows) for name, rows in self.rows.items() if rows}

    @classmethod
    def of(
        cls, config: Config, parts: Sequence[Part], read: Mapping[str, int] | None, *, goes_on: bool = False
    ) -> EarlyRows:
        """Choose the early rows of the training data.

        read: how many each part has had, in an earlier preparation for this run; None: that is not known. goes_on:
        whether the job goes on with rows of before, which are taken to have no early ones where nothing is known.
        """
        parts = [part for part in parts if part.role == "train"]
        kept = {part.name: _kept(part) for part in parts}
        total = sum(map(len, kept.values()))
        # Where a column orders all rows, or a class gives them one after the other, none can come before.
        ordered = bool(config.curriculum.column_name) or any(part.dataset.custom_class for part in parts)
        if ordered or (read is None and goes_on):
            return cls({name: frozenset() for name in kept}, total)
        if config.shares:  # each part has passes of its own
            long = max(map(len, kept.values()), default=0) >= LONG
            counts = dict.fromkeys(kept, EARLY if long else 0) if read is None else read
            places = {name: _chosen(config, name, len(rows), counts.get(name, 0)) for name, rows in kept.items()}
        else:  # all parts are one dataset
            count = (EARLY if total >= LONG else 0) if read is None else sum(read.values())
            chosen, places, start = _chosen(config, "train", total, count), {}, 0
            for name, rows in kept.items():
                places[name] = chosen[(chosen >= start) & (chosen < start + len(rows))] - start
                start += len(rows)
        return cls({name: frozenset(rows[places[name]].tolist()) for name, rows in kept.items()}, total)


def _kept(part: Part) -> npt.NDArray[np.int64]:
    return np.fromiter((i for i in range(len(part.source)) if part.keep(i)), np.int64)


def _chosen(config: Config, name: str, n: int, count: int) -> npt.NDArray[np.int64]:
    """Choose so many of n places."""
    if not config.train.train_policy.dataloader_shuffle or count >= n:
        return np.arange(min(count, n))
    rng = np.random.default_rng([config.effective_seed, crc32(name.encode())])
    return rng.choice(n, count, replace=False)


def may_begin(config: Config, total: int) -> bool:
    """Whether a job over so many rows can begin with the early ones: its steps must not depend on how many are left.

    A job that goes on from another one's checkpoint may have had them all.
    """
    steps, stops = config.train.max_num_steps, config.train.train_policy.domain_exhausted == "stop"
    if steps is None or (config.shares and stops) or config.train.resume or config.validation.only:
        return False
    return config.train.epoch * total >= SPARE * steps * _per_step(config)


def check_enough(config: Config, rows: int) -> None:
    """Refuse that a job which has begun goes on with fewer rows than it needs. Raises `DataError`."""
    steps, per_step = config.train.max_num_steps or 0, _per_step(config)
    if -(-config.train.epoch * rows // per_step) < steps:
        raise DataError(
            f"train.max_num_steps = {steps} takes {steps * per_step:,} rows, and train.epoch = {config.train.epoch} "
            f"times {rows:,} are there, since so many are left out: write fewer steps, or a bound that leaves fewer "
            "out"
        )


def _per_step(config: Config) -> int:
    """The rows of a step."""
    return config.groups_per_step if config.is_grpo else config.samples_per_step
