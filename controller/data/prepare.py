"""Prepare the data of a run: `python -m controller.data.prepare --run-dir DIR`.

    DIR/config.json  ->  DIR/data/train.safetensors, and DIR/data/validation.safetensors if validation is on
                         DIR/data/report.json: what became of the rows (schema.wire.data_report)

A prepared row is {"key", "prompt", "answer", ...}: a stable name of where it came from, the prompt as text or
messages, the reference answer (if `response_column_name` is set), its `data_source` (if something asks for it), the
prompt in the `reward.prompt_forms`, and every column of the data as JSON holds it (`controller.data.values`); those
with the name of one of these are in its `columns`.
For supervised training it is {"key", ...} and the file has a loss mask.

Of much data some rows are prepared before the others (`controller.data.parts.EarlyRows`), and with `--early` put in
place at once, as the beginning of a file that is replaced by the whole one.

Invariant: a row is written whole, or left out, or (where `overlong_prompts` says so) its tokens are cut; the last two
are counted and reported. A row that cannot be used at all is an error, once all rows have been looked at. Exit code
2: the config or the data is at fault, and the last line of stderr says how.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from controller.data.chunks import PreparedPart, prepared_chunks
from controller.data.errors import DataError
from controller.data.parts import (
    EarlyRows,
    Part,
    check_enough,
    further_rows,
    may_begin,
    training_parts,
    validation_parts,
)
from controller.data.prompts import PromptChunks
from controller.data.reading.cache import FileCache
from controller.data.reading.rows_cache import NoCache, RowsCache, key_of
from controller.data.rows import BATCH, REPORT_EVERY_S, command, refuse_bad, report_of, report_option, reported
from controller.data.supervised import ConversationChunks
from controller.data.tokenizer import PromptTokenizer
from schema.config import Config
from schema.config.chat_template import keep_template, kept_template
from schema.config.dataset_files import Role
from schema.config.model_facts import BrokenModelError, read_facts
from schema.config.modules import import_external
from schema.util.atomic_file import replacing
from schema.wire.data_report import UNFINISHED, DataReport, FileReport, has_all_rows, lines, read, set_aside
from schema.wire.prompts import PromptFile, PromptFileError, PromptWriter

logger = logging.getLogger("controller.data.prepare")  # run with -m, __name__ would say nothing

_POLICY = "train.train_policy"
SPARE, MOST_SPARE = 1.2, 128.0
"""Rows that are asked of a class in addition, where too many were left out; and how many times as many at most."""
AHEAD = 2
"""Chunks that a worker prepares ahead, where the configuration leaves it open."""


def prepare(config: Config, run_dir: Path, report_only: bool = False, early: bool = False) -> dict[str, int]:
    """Write the data files of a run and their report; answers rows by part. Raises `DataError`.

    report_only: write nothing else. early: where there are early rows, they are in place before the others are
    prepared, so that the job, which is new, can begin with them.
    """
    if early and has_all_rows(run_dir / "data" / "train.safetensors") and (done := read(run_dir)) is not None:
        return _said(done)  # killed at its very end: the job may have begun
    spare: float | None = 1.0
    while spare is not None:
        counts, spare = _prepare(config, run_dir, report_only, early, spare)
    return counts


def _prepare(
    config: Config, run_dir: Path, report_only: bool, early: bool, spare: float
) -> tuple[dict[str, int], float | None]:
    """Do as `prepare`; answers, too, how many times the rows of a class that is iterable are needed; None: there are
    enough.

    spare: how many times were asked of it.
    """
    with reported(run_dir) as report, ExitStack() as stack:
        parts, unread = parts_of(config, run_dir, spare), _leaves_training_out(config)
        tokenizer, path = tokenizer_of(config), run_dir / "data" / "train.safetensors"
        aside = None if report_only else set_aside(path)
        begun = not report_only and (aside is not None or path.exists())
        if begun and kept_template(run_dir) != tokenizer.own_template:
            logger.warning("earlier steps of this run were trained with another chat template of the job's own")
        earlier = None if unread else _earlier(config, run_dir, aside)
        grows = earlier is not None and bool(config.train.train_policy.dataset.custom_class)
        goes_on = bool(config.train.resume) or any((run_dir / "checkpoints").glob("*"))
        read_before = None if earlier is None else earlier.early_read
        first = EarlyRows.of(config, parts, read_before, goes_on=goes_on)
        roles = ("train", "validation") if unread else tuple(dict.fromkeys(part.role for part in parts))
        cache = NoCache() if grows else _cache(config, parts, tokenizer, first)
        if not cache.fetch(run_dir, () if report_only else roles, report):
            files = _Files(config, tokenizer, parts, run_dir, report, stack)
            files.read("validation")
            if first.read:
                files.read("train", first)
                files.note_early(first, earlier if path.exists() and not report_only else None, runs=early)
                if early and not report_only and earlier is None and may_begin(config, first.total):
                    files.let_begin()
            files.read("train", first, others=True)
            if (further := files.further_rows()) > 1.0:
                return {}, files.checked(spare * max(2.0, SPARE * further))
            files.finish()
            report.write(run_dir)
            if not report_only:
                keep_template(run_dir, tokenizer.own_template)
                files.write(earlier if grows else None)
                if unread:  # the controller, and a start that goes on, look for both files
                    with replacing(path) as neighbour:
                        shutil.copyfile(run_dir / "data" / "validation.safetensors", neighbour)
                cache.keep(run_dir, roles, report)
        elif not report_only:
            keep_template(run_dir, tokenizer.own_template)
        if aside is not None:
            aside.unlink()
        return _said(report), None


class _Files:
    """The prepared files of a run on their way, with the rows of all parts that were read."""

    def __init__(
        self,
        config: Config,
        tokenizer: PromptTokenizer,
        parts: Sequence[Part],
        run_dir: Path,
        report: DataReport,
        stack: ExitStack,
    ) -> None:
        self._config, self._tokenizer, self._run_dir, self._report = config, tokenizer, run_dir, report
        self._writers = {
            role: stack.enter_context(_writer(config, run_dir / "data" / f"{role}.safetensors", role))
            for role in dict.fromkeys(part.role for part in parts)
        }
        make = PromptChunks if config.is_grpo else ConversationChunks
        self._chunks = {part.name: make(config, tokenizer, part) for part in parts}
        for part in parts:
            report.files[part.name] = report_of(part.source, self._chunks[part.name].what)
        vocabulary = _vocabulary(config)
        self._parts = [
            PreparedPart(part, report.files[part.name], self._writers[part.role], vocabulary) for part in parts
        ]
        self._early: dict[str, str] = {}
        self._begun = False

    def _of(self, role: Role) -> list[PreparedPart]:
        return [prepared for prepared in self._parts if prepared.part.role == role]

    def read(self, role: Role, early: EarlyRows | None = None, *, others: bool = False) -> None:
        """Prepare rows of all parts of a role: the early ones, or all others. Raises `DataError`."""
        for prepared in self._of(role):
            rows = frozenset[int]() if early is None else early.rows[prepared.part.name]
            self._read(prepared, rows, others=others or early is None)

    def _read(self, prepared: PreparedPart, rows: frozenset[int], *, others: bool) -> None:
        part, keep = prepared.part, prepared.part.keep
        if not rows and not others:
            return
        if rows:
            part = replace(part, keep=(lambda i: keep(i) and i not in rows) if others else rows.__contains__)
        policy, file = self._config.train.train_policy, prepared.report
        size = max(BATCH, (self._config.grpo.dataloader_batch_size if self._config.is_grpo else None) or BATCH)
        workers, ahead = policy.dataloader_num_workers, policy.dataloader_prefetch_factor or AHEAD
        total, reported_at = len(part.source), time.monotonic()
        for chunk in prepared_chunks(part, self._chunks[part.name], size, workers, ahead):
            prepared.add(chunk)
            if workers and time.monotonic() - reported_at > REPORT_EVERY_S:
                reported_at = time.monotonic()
                logger.info("%s: %s of %s rows", part.source.name, f"{file.read:,}", f"{total:,}")

    def further_rows(self) -> float:
        """How many times the rows of classes are needed, where too many of them were left out."""
        times = [further_rows(self._config, part.part, len(part), self._run_dir) for part in self._of("train")]
        return max(times, default=1.0)

    def checked(self, spare: float) -> float:
        """Refuse to ask for that many times the rows that all steps take. Raises `DataError`."""
        if spare > MOST_SPARE:
            refuse_bad(self._report)
            self._complete()
            counts = [(part.report.source, len(part), part.report.read) for part in self._of("train")]
            rows = "; ".join(f"{name}: {kept:,} of {asked:,}" for name, kept, asked in counts)
            raise DataError(f"so few rows are kept of a class that all steps cannot have theirs ({rows})")
        logger.info("too few rows are kept: the class is asked for further ones")
        return spare

    def note_early(self, early: EarlyRows, begun: PromptFile | None, *, runs: bool) -> None:
        """All rows for training so far are early ones.

        begun: the rows that the run has begun with; None: it has not. runs: whether it runs now. Raises `DataError`
        where these are others.
        """
        self._early = self._writers["train"].early(early.read)
        self._begun = begun is not None and runs
        if begun is not None and f'"{begun.early_digest}"' not in self._early.get("early", ""):
            refuse_bad(self._report)
            raise DataError(
                "the run has begun with other rows than those that come first now: the data have changed, or how "
                "rows are prepared; mend a row in its place instead of removing it, or begin a new run"
            )

    def let_begin(self) -> None:
        """Put the rows so far in place, unless they are too few for a job. Raises `DataError` where some are bad."""
        refuse_bad(self._report)
        self._refuse_unknown_ids()
        if not all(len(part) for part in self._parts if self._config.shares or part.part.role == "validation"):
            return
        if not len(self._writers["train"]) or self._lacking():
            return
        self._begun = self._report.unfinished = True
        self._complete()
        self._report.write(self._run_dir)
        keep_template(self._run_dir, self._tokenizer.own_template)
        for role in reversed(self._writers):
            self._write(role, self._early | {UNFINISHED: "true"} if role == "train" else {})
        rows = len(self._writers["train"])
        logger.info("%s rows are prepared, and the job begins with them while the others are", f"{rows:,}")

    def finish(self) -> None:
        """Complete the report, and check what is there. Raises `DataError`."""
        for prepared in self._parts:
            self._chunks[prepared.part.name].warn(prepared.report)
        self._complete()
        self._report.unfinished = False
        if self._of("train"):
            _note_trained(self._parts)
        refuse_bad(self._report)
        self._refuse_unknown_ids()
        self._check_left()
        if self._begun:
            check_enough(self._config, len(self._writers["train"]))

    def _complete(self) -> None:
        for prepared in self._parts:
            prepared.finish(self._chunks[prepared.part.name].bound, self._tokenizer.decode)

    def write(self, earlier: PromptFile | None) -> None:
        """Put all rows in place. earlier: the file with whose rows they may begin; None: there is none."""
        # The training data last: where it is, everything is, however this process may have ended.
        if "validation" in self._writers and not (self._begun and self._path("validation").exists()):
            self._write("validation", {})
        if "train" in self._writers:
            if self._begun:
                self._keep_open()
            self._write("train", self._early | self._writers["train"].grown_from(earlier))

    def _keep_open(self) -> None:
        """Leave the file that is replaced under another name: over NFS it would be gone for those who read it."""
        kept = self._path("begun")
        with suppress(OSError):  # a file system without links
            kept.unlink(missing_ok=True)
            kept.hardlink_to(self._path("train"))

    def _path(self, name: str) -> Path:
        return self._run_dir / "data" / f"{name}.safetensors"

    def _write(self, role: Role, more: dict[str, str]) -> None:
        reports = [prepared.report for prepared in self._of(role)]
        self._writers[role].finish(_metadata(reports) | more)

    def _refuse_unknown_ids(self) -> None:
        """Refuse rows with token ids that the model has no embeddings for. Raises `DataError`.

        Rules of the configuration compare the tokenizer with the model; special tokens that only a text which spells
        them out becomes are left to this.
        """
        config = self._config
        for prepared in self._parts:
            if (rows := prepared.beyond).count:
                few = ", ".join(rows.first[:3]) + ", …" * (rows.count > 3)
                model = config.policy.model_name_or_path
                raise DataError(
                    f"{rows.count} rows of the {prepared.part.role} data have token ids that "
                    f"policy.model_name_or_path = {model} has no embeddings for (vocab_size = "
                    f"{_vocabulary(config)}): {few}; leave these rows out, or name the tokenizer that the model was "
                    "made with"
                )

    def _check_left(self) -> None:
        """Refuse a part, or a domain with a share, of which no row is left. Raises `DataError`."""
        for prepared in self._parts:
            report = prepared.report
            if not report.kept:
                reasons = "; ".join(f"{rows.count} with {reason}" for reason, rows in report.left_out.items())
                why = f": {reasons}" if reasons else ": it is empty"
                raise DataError(f"{prepared.part.name}: no row of {report.source} is left{why}")
        if name := self._lacking():
            domains = set().union(*(prepared.domains for prepared in self._of("train")))
            raise DataError(
                f"{_POLICY}.domain_shares.{name}: no row of this domain is left; with shares there are rows of "
                f"{', '.join(sorted(domains)) or 'none'}, in the column {self._config.grpo.domain_column_name!r}"
            )

    def _lacking(self) -> str:
        """A domain that has a share and no row; empty: none."""
        if not self._config.is_grpo or self._config.validation.only:
            return ""
        domains = set().union(*(prepared.domains for prepared in self._of("train")))
        return next((name for name in self._config.grpo.domain_shares if name not in domains), "")


def parts_of(config: Config, run_dir: Path, spare: float = 1.0) -> list[Part]:
    """All parts of a job's data. Raises `DataError`.

    run_dir: rows of classes of the user's are kept there. spare: see `run_class`.
    """
    parts = [] if _leaves_training_out(config) else training_parts(config, run_dir, spare)
    return [*parts, *validation_parts(config, parts, run_dir)] if config.validation.enable else parts


def _leaves_training_out(config: Config) -> bool:
    """Whether nothing trains on the training data."""
    return config.validation.only and config.validation.dataset.is_named


def _earlier(config: Config, run_dir: Path, aside: Path | None) -> PromptFile | None:
    """The rows that the run has had, or the run whose checkpoint it goes on from; None: none.

    aside: where they are all of them.
    """
    resume, folders = config.train.resume, [run_dir]
    if isinstance(resume, str) and resume:
        folders += [Path(resume), *Path(resume).parents[:2]]  # a run, its checkpoints, or one of these
    elif resume:  # the neighbour that has saved last
        saved = [path for path in run_dir.parent.glob("*/checkpoints") if path.parent != run_dir]
        folders += [path.parent for path in sorted(saved, key=lambda path: path.stat().st_mtime, reverse=True)[:1]]
    for candidate in (aside, *(folder / "data" / "train.safetensors" for folder in folders)):
        try:
            if candidate is not None and candidate.exists():
                return PromptFile(candidate)
        except PromptFileError:
            continue
    return None


def _said(report: DataReport) -> dict[str, int]:
    """Log the report; answers rows by part."""
    for text in lines(report):
        logger.info("%s", text)
    return {name: file.kept for name, file in report.files.items()}


def _cache(
    config: Config, parts: Sequence[Part], tokenizer: PromptTokenizer, early: EarlyRows
) -> RowsCache | NoCache:
    policy = config.train.train_policy
    if not policy.enable_dataset_cache:
        return NoCache()
    key = key_of(config, parts, tokenizer, _vocabulary(config), early.read)
    return RowsCache(key, FileCache(policy.dataset.cache.root, policy.dataset.cache.n_bytes))


def _writer(config: Config, path: Path, role: Role) -> PromptWriter:
    sets = config.generates and bool(config.validation.dataset.part)
    return PromptWriter(path, masks=not config.is_grpo, sources=bool(config.shares) if role == "train" else sets)


def _vocabulary(config: Config) -> int | None:
    """The ids below which the model has embeddings; None: that is not known here."""
    policy = config.policy
    try:
        facts = read_facts(policy.model_name_or_path, policy.model_revision, policy.override_config)
    except BrokenModelError:
        return None  # loading the model reports it
    return None if facts is None else facts.vocabulary


def _note_trained(ready: Sequence[PreparedPart]) -> None:
    """Note the rows of validation whose tokens are trained on too, whichever file they are from."""
    trained = np.concatenate([collected.hashes for collected in ready if collected.part.role == "train"])
    for collected in ready:
        if collected.part.role == "validation":
            collected.note_trained(trained)


def tokenizer_of(config: Config) -> PromptTokenizer:
    """The policy's tokenizer, after its external modules are imported."""
    policy = config.policy
    import_external(policy.external_modules)
    if policy.trust_remote_code:
        logger.warning("policy.trust_remote_code = true: code of %s may run here", policy.tokenizer[0])
    return PromptTokenizer.of(config)


def _metadata(reports: Sequence[FileReport]) -> dict[str, str]:
    """The metadata of a file: where its rows are from, how many were left out and cut, by reason."""
    counted: dict[str, dict[str, int]] = {"left_out": {}, "cut": {}}
    for report in reports:
        for name, reasons in (("left_out", report.left_out), ("cut", report.cut)):
            for reason, rows in reasons.items():
                counted[name][reason] = counted[name].get(reason, 0) + rows.count
    sources = {"source": ", ".join(report.source for report in reports)}
    return sources | {name: json.dumps(reasons) for name, reasons in counted.items()}


def _options(parser: argparse.ArgumentParser) -> None:
    report_option(parser)
    parser.add_argument("--early", action="store_true", help="let a job begin before all of much data is prepared")


def main(argv: list[str] | None = None) -> int:
    """The command line; answers the exit code."""
    return command("controller.data.prepare", "Prepare a run's data.", prepare, argv, _options)


if __name__ == "__main__":
    sys.exit(main())
