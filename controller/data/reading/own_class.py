"""Rows of a dataset class of the user's (`custom_class`), made by a process of its own.

    run_class ─config─▶ python -m controller.data.reading.own_rows ─appends─▶ DIR/data/own/<digest>.jsonl

The class is called with those of these arguments that it has parameters for:

    data_files   list of `files`, else [`name`]         config      `OwnConfig`, the keys of verl's `data`
    tokenizer    the policy's, of transformers          processor   None
    split, seed  of the dataset and the job             max_samples `max_samples`, else -1
    and the keys of [custom]                            parquet_files, as verl's supervised classes call data_files

Into `**kwargs`, which a class passes on to one of verl's, goes what verl gives it: data_files, tokenizer, config,
processor and max_samples.

It is map-style (`__len__` and `__getitem__`) or iterable (`__iter__`). An item is a dict, the columns of a row; one
without the prompt's column has it of `raw_prompt`, `messages` or `prompt`. A row is appended as it comes: a process
that was killed goes on behind the rows that are there, and a complete file is never made again, as long as the class,
its file and its arguments are the same. For training no more rows are asked of an iterable than all steps take, and
what is left out of them; a run that goes on with more steps appends further ones, and the first must be those that it
gave before. In validation and evaluation it is read to its end, or until there are `max_samples`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from controller.data.errors import DataError
from schema.config import Config
from schema.config.sections.dataset import DatasetKeys

logger = logging.getLogger("controller.data.reading.own_class")  # run with -m, __name__ would say nothing

_REPORT_EVERY_S = 5.0
BLOCK = 1 << 20


def run_class(config: Config, section: str, dataset: DatasetKeys, run_dir: Path, spare: float = 1.0) -> Path:
    """The file with all rows of a class. Raises `DataError` naming class, row and reason.

    section: where the configuration names it. spare: how many times as many rows as steps take are asked of an
    iterable, since some are left out.
    """
    target = rows_file(config, section, dataset, run_dir)
    most = most_rows(config, section, dataset)
    most = None if most is None else int(most * spare)
    if _has_enough(target, most):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "controller.data.reading.own_rows", section, str(target), str(most or "")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stderr=pipe, text=True, encoding="utf-8", errors="replace", start_new_session=True
    )
    reader = _LastLine(process)
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as config_input:
            config_input.write(config.model_dump_json())
        _wait(process, target, f"{section}.custom_class = {dataset.custom_class!r}", dataset.custom_class_timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what the class has started
        process.wait()
        reader.join(_READ_S)
    if process.returncode == 0 and _has_enough(target, most):
        return target
    why = reader.line or f"its process ended with exit code {process.returncode}"
    raise DataError(f"{section}.custom_class = {dataset.custom_class!r}: {why}")


def rows_file(config: Config, section: str, dataset: DatasetKeys, run_dir: Path) -> Path:
    """Where the rows of a class are. Raises `DataError`."""
    place = section.partition(".")[0]  # training and validation read as far as each needs
    return run_dir / "data" / "own" / f"{place}-{digest_of(config, dataset)}.jsonl"


class _LastLine(threading.Thread):
    """Passes what the class's process writes on, and keeps the last line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._process, self.line = process, ""
        self.start()

    def run(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith(FAULT):
                self.line = line.removeprefix(FAULT).strip()
            else:
                sys.stderr.write(line)


FAULT = "custom_class: "
_READ_S = 5.0
"""Seconds for the last lines of a process that has ended."""


def _wait(process: subprocess.Popen[str], target: Path, name: str, timeout: float) -> None:
    """Wait for the end of a class's process. Raises `DataError` where no row comes for so many seconds."""
    seen, since, reported = (-1, 0), time.monotonic(), time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now, status = time.monotonic(), target.stat() if target.exists() else None
        present = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        if present != seen:
            seen, since = present, now
        if now - since > timeout:
            raise DataError(
                f"{name}: no row came for {timeout:g} s, after {_count(target):,} rows; mend the class, or raise "
                "custom_class_timeout"
            )
        if now - reported > _REPORT_EVERY_S:
            reported = now
            logger.info("%s: %s MB of rows so far", name, f"{present[0] / 1e6:,.1f}")


def done_file(target: Path) -> Path:
    return target.with_suffix(".done")


def _has_enough(target: Path, most: int | None) -> bool:
    """Whether a file has all rows of its class, or as many as are asked of an iterable."""
    try:
        done = json.loads(done_file(target).read_text(encoding="utf-8"))
        return bool(done["ended"] or (most is not None and done["rows"] >= most))
    except (OSError, ValueError, KeyError):
        return False


def _count(target: Path) -> int:
    """The whole lines of a file."""
    if not target.exists():
        return 0
    with target.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(BLOCK), b""))


def digest_of(config: Config, dataset: DatasetKeys) -> str:
    """Identifies a class with its arguments: rows of another are not its own."""
    path = Path(dataset.custom_class.rpartition(":")[0])
    try:
        code = path.read_bytes()
    except OSError as error:
        raise DataError(f"custom_class = {dataset.custom_class!r}: {error.strerror or error}") from None
    names = ("custom_class", "name", "files", "split", "max_samples")
    facts = {name: getattr(dataset, name) for name in names}
    facts["versions"] = [_version(Path(name)) for name in dataset.files or [dataset.name] if name]
    facts |= {"custom": config.custom, "data": dict(own_config(config, dataset)), "seed": config.effective_seed}
    facts["tokenizer"] = config.policy.tokenizer
    text = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(code + text, digest_size=16).hexdigest()


def _version(path: Path) -> list[tuple[str, int, int]]:
    """Size and time of a file, or of each in a directory; empty where there is none."""
    if not path.exists():
        return []
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    statuses = [(entry.name, entry.stat()) for entry in paths if entry.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in statuses]


def has_ended(target: Path) -> bool:
    """Whether a file has all rows of its class: further ones cannot be had."""
    return _has_enough(target, None)


def most_rows(config: Config, section: str, dataset: DatasetKeys) -> int | None:
    """The most rows that are asked of an iterable; None: all.

    For training what all steps take, twice where groups are filtered; elsewhere `max_samples`.
    """
    steps = config.train.max_num_steps
    if not section.startswith("train."):
        return dataset.max_samples
    if steps is None:
        return None
    if not config.is_grpo:
        return steps * config.samples_per_step
    spare = 2 if config.grpo.filter_metrics else 1
    return spare * int((steps + config.staleness_bound + 1) * config.groups_per_step * config.controller.oversample)


class OwnConfig(dict[str, Any]):
    """The configuration that a class gets: verl's names of `data.*`, and the keys of [custom], as keys or attributes.

    `config.get(name, default)` has a default for what neither has.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
            return OwnConfig(value) if isinstance(value, dict) else value
        except KeyError:
            raise AttributeError(
                f"the configuration has no data.{name}; write it in [custom], or use config.get({name!r}, default)"
            ) from None


def own_config(config: Config, dataset: DatasetKeys) -> OwnConfig:
    """Answer verl's names with what our keys say."""
    policy, answer = config.train.train_policy, config.rollout.max_response_length
    files = dataset.files or [dataset.name]
    data = {
        "train_files": files,
        "val_files": files,
        "max_prompt_length": dataset.max_prompt_length or max(1, config.longest_sequence - answer),
        "max_response_length": answer,
        "prompt_key": policy.prompt_column_name or "prompt",
        "reward_fn_key": config.grpo.data_source_column_name if config.is_grpo else "data_source",
        "image_key": dataset.image_column_name,
        "video_key": "videos",
        "filter_overlong_prompts": dataset.overlong_prompts == "drop",
        "truncation": dataset.overlong_prompts if dataset.overlong_prompts != "drop" else "error",
        "return_raw_chat": True,
        "return_raw_input_ids": False,
        "return_full_prompt": False,
        "shuffle": policy.dataloader_shuffle,
        "seed": config.effective_seed,
        "train_batch_size": config.groups_per_step if config.is_grpo else config.samples_per_step,
        "trust_remote_code": config.policy.trust_remote_code,
        "apply_chat_template_kwargs": {},
        "use_shm": False,
    }
    return OwnConfig({**data, **config.custom})
