"""Prepared rows that jobs keep for each other (`enable_dataset_cache`): the files of a whole preparation.

    rows/<key>.train, <key>.validation     prepared files (schema.wire.prompts)
    rows/<key>.json                        their report, and the hashes of all of it: written last

A key is a hash of all that decides what rows are: content of the data, tokenizer, chat template, what the
configuration says of rows, versions of libraries, and our own code. Files are copied both ways, so a run does not
depend on the cache, and damage in one is not in the other. What is there is used if its hashes are right.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import controller.data
import schema
import tokenization
from controller.data.errors import DataError
from controller.data.parts import Part, rewards_by_source, wants_source
from controller.data.reading.cache import FileCache, rows_folder
from controller.data.reading.own_class import digest_of, most_rows
from controller.data.reading.sources import coverage_of
from controller.data.supervised import stops_of
from controller.data.tokenizer import PromptTokenizer
from schema.config import Config
from schema.util.atomic_file import remove_unfinished, replacing, write_text
from schema.wire import data_report
from schema.wire.data_report import DataReport

logger = logging.getLogger("controller.data.prepare")  # one name for all of the preparation

_KEYS = (
    "policy.external_modules", "policy.trust_remote_code", "policy.model_max_length", "rollout.max_response_length",
    "rollout.multi_turn_config.enable_thinking", "validation.enable", "validation.only",
    "validation.max_response_length", "validation.generate", "validation.reference_column_name",
    "reward.prompt_forms", "train.train_policy.type", "train.train_policy.system_prompt",
    "train.train_policy.domain_shares", "train.train_policy.curriculum.column_name",
)  # fmt: skip
"""Keys that decide what rows are, next to those of the datasets and the names of columns."""
_BLOCK = 4 * 1024 * 1024


def key_of(
    config: Config,
    parts: Sequence[Part],
    tokenizer: PromptTokenizer,
    vocabulary: int | None,
    early: Mapping[str, int],
) -> str:
    """The key of a preparation.

    vocabulary: ids below it have embeddings; None: not known. early: rows of each part that come before all others.
    """
    data = config.model_dump(mode="json")
    policy, identity = data["train"]["train_policy"], tokenizer.identity()
    facts = {
        "code": _code(),
        "libraries": [importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")],
        "modules": [_source(name) for name in config.policy.external_modules],
        "tokenizer": [*identity, *(_source(name) for name in tokenizer.modules)],
        "day": str(date.today()) if "strftime_now" in identity[0] else "",
        "ends": [vocabulary, *([] if config.is_grpo else sorted(stops_of(config, tokenizer).ids))],
        "stops": config.rollout.sampling_config.stop,
        "keys": [_value(data, key) for key in _KEYS],
        "columns": {name: value for name, value in policy.items() if name.endswith("_column_name")},
        "seed": config.effective_seed,
        "early": {"shuffled": config.train.train_policy.dataloader_shuffle, **early} if early else {},
        "longest": config.longest_sequence,
        "shares": bool(config.shares),
        "parts": [_part(config, part) for part in parts],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _value(data: dict[str, Any], key: str) -> Any:
    value: Any = data
    for name in key.split("."):
        value = value.get(name)
    return value


def _part(config: Config, part: Part) -> list[Any]:
    dataset = part.dataset
    by_source = (config.is_grpo and wants_source(config, part), rewards_by_source(config, part))
    code: Any = [digest_of(config, dataset), most_rows(config, part.section, dataset)] if dataset.custom_class else ""
    keys = dataset.model_dump(mode="json", exclude={"custom_class_timeout", "part"})
    covered = asdict(coverage_of(part.source))
    return [part.role, part.section, part.label, keys, code, covered, part.source.identity(), by_source]


def _code() -> str:
    """A hash of our own code that makes rows: any change of it may change them."""
    digest = hashlib.sha256()
    for package in (controller.data, tokenization, schema):
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _source(module: str) -> str:
    """A hash of a module's code; empty: it has no file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


class RowsCache:
    """The entry of one key in a cache."""

    def __init__(self, key: str, files: FileCache) -> None:
        self._key, self._files = key, files
        self._folder = rows_folder(files.root)
        self._record = self._folder / f"{key}.json"
        self._fault = ""

    def fetch(self, run_dir: Path, roles: Sequence[str], report: DataReport) -> bool:
        """Copy the files of these roles into a run, training last, and complete and write its report.

        False: they are not there, or cannot be used, of which there is a warning.
        """
        if not self._record.exists():
            return False
        (run_dir / "data").mkdir(parents=True, exist_ok=True)
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            hashes = record["sha256"]
            _agree("its report", hashes["report"], hashlib.sha256(record["report"].encode()).hexdigest())
            kept = data_report.parse(json.loads(record["report"]))
            if kept is None:
                raise ValueError("its report cannot be read")
            with ExitStack() as stack:
                for role in roles:
                    target = stack.enter_context(replacing(run_dir / "data" / f"{role}.safetensors"))
                    _agree(f"its {role} data", hashes[role], _copy(self._folder / f"{self._key}.{role}", target))
                report.files, report.cached = kept.files, str(self._record)
                report.warnings[:] = kept.warnings
                report.write(run_dir)
            self._record.touch()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._fault = f"prepared rows in the cache, {self._record}, cannot be used and are made anew: {error}"
            logger.warning("%s", self._fault)
            if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):  # a full disk damages none
                self._record.unlink(missing_ok=True)
            return False
        return True

    def keep(self, run_dir: Path, roles: Sequence[str], report: DataReport) -> None:
        """Copy the files of a run into the cache. What prevents it is a warning."""
        paths = {role: run_dir / "data" / f"{role}.safetensors" for role in roles}
        try:
            n_bytes = sum(path.stat().st_size for path in paths.values())
            if n_bytes > self._files.limit or not self._files.make_room(n_bytes):
                limit = f"train.train_policy.dataset_cache_size = {self._files.limit / 2**30:g} GiB"
                logger.warning("prepared rows of %.1f GB are not kept: %s has no room", n_bytes / 1e9, limit)
                return
            with self._files.alone(self._record.with_suffix(".lock")):
                if self._record.exists():
                    return  # another job was faster
                hashes = {}
                for role, path in paths.items():
                    target = self._folder / f"{self._key}.{role}"
                    remove_unfinished(target)
                    with replacing(target) as neighbour:
                        hashes[role] = _copy(path, neighbour)
                warnings = [text for text in report.warnings if text != self._fault]
                text = report.model_copy(update={"warnings": warnings}).model_dump_json()
                hashes["report"] = hashlib.sha256(text.encode()).hexdigest()
                write_text(self._record, json.dumps({"report": text, "sha256": hashes}))
        except (OSError, DataError) as error:
            logger.warning("prepared rows are not kept in the cache %s: %s", self._folder, error)


class NoCache:
    """In place of `RowsCache` where the configuration wants none."""

    def fetch(self, run_dir: Path, roles: Sequence[str], report: DataReport) -> bool:
        return False

    def keep(self, run_dir: Path, roles: Sequence[str], report: DataReport) -> None:
        """Keep nothing."""


def _agree(what: str, noted: str, found: str) -> None:
    if noted != found:
        raise ValueError(f"{what} has another hash than it had")


def _copy(source: Path, target: Path) -> str:
    """Copy a file; returns its SHA-256."""
    digest = hashlib.sha256()
    with source.open("rb") as reading, target.open("wb") as writing:
        while block := reading.read(_BLOCK):
            digest.update(block)
            writing.write(block)
    return digest.hexdigest()
