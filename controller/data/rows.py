"""Rows on their way from a source to a prepared file: in batches, by column, within a bound, as JSON.

Source ─batches─▶ [(index, row)] ─value, Bound.fit─▶ Prepared ─with_columns─▶ data/*.safetensors
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from controller.data.errors import DataError
from controller.data.loss_masks.tokens import Ids, Mask
from controller.data.reading.sources import RowSource, column, coverage_of
from controller.data.reading.tables import PASSED
from controller.data.values import is_missing, jsonable
from schema.config import Config
from schema.config.modules import ExternalModuleError
from schema.util.text import configure_logging
from schema.wire.data_report import LISTED, DataReport, FileReport, Rows

logger = logging.getLogger("controller.data.prepare")  # one name for all of the preparation

BATCH = 256  # rows tokenised in one call: the tokenizer's own overhead is gone beyond this
REPORT_EVERY_S = 2.0
Row = dict[str, Any]
Keep = Callable[[int], bool]
Indices = npt.NDArray[np.int64]


@dataclass
class Prepared:
    """A chunk of rows, and what became of the others."""

    report: FileReport
    token_ids: list[Ids] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """The domain of each row, where domains have shares."""
    order: list[float] = field(default_factory=list)
    """The number of each row in the curriculum, where a column orders them."""

    def add(self, ids: Ids, row: Row, mask: Mask | None = None) -> None:
        self.token_ids.append(ids)
        self.rows.append(row)
        if mask is not None:
            self.masks.append(mask)

    def leave_out(self, reason: str, where: str) -> None:
        self.report.left_out.setdefault(reason, Rows()).add(where)


@dataclass(frozen=True)
class Bound:
    """The most tokens that a row may have, and what happens to a row of more.

    what: of what it is the bound, with its article. reason: where it comes from. section: the dataset's section.
    """

    tokens: int
    what: str
    reason: str
    section: str
    rule: Literal["drop", "error", "left", "right", "middle"]

    def fit(self, length: int, where: str, out: Prepared) -> slice | Indices | None:
        """Select the tokens that stay; None: the row is left out. Notes the length, and what it leaves out or cuts.

        Raises `DataError` naming the row when the rule is `error`.
        """
        out.lengths.append(length)
        if length <= self.tokens:
            return slice(None)
        if self.rule == "error":
            raise DataError(
                f"{where}: {length} tokens, and {self.what} may have {self.tokens} ({self.reason}); shorten it, "
                f'raise that bound, or write {self.section}.overlong_prompts = "drop", "left", "right" or "middle"'
            )
        if self.rule == "drop" or self.tokens < 1:
            out.leave_out(f"{self.what} of more than {self.tokens} tokens ({self.reason})", where)
            return None
        cut = f"cut {'in' if self.rule == 'middle' else 'on'} the {self.rule} to {self.tokens} tokens ({self.reason})"
        out.report.cut.setdefault(cut, Rows()).add(where)
        if self.rule == "middle":
            begin = self.tokens // 2
            places: Indices = np.r_[:begin, length - (self.tokens - begin) : length]
            return places
        return slice(length - self.tokens, None) if self.rule == "left" else slice(self.tokens)


@contextmanager
def judged(bad: Rows) -> Iterator[None]:
    """A row at fault is noted, and the others are looked at all the same."""
    try:
        yield
    except DataError as error:
        bad.add(str(error), LISTED)


@contextmanager
def named(where: str) -> Iterator[None]:
    """An error of the row at `where` that does not say so."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


class _Kept(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self._texts.append(record.getMessage())


@contextmanager
def reported(run_dir: Path) -> Iterator[DataReport]:
    """The report of a preparation: our warnings go into it, and the error that ends it, with which it is written.

    Who ends well writes it, before the data.
    """
    report = DataReport()
    kept, ours = (_Kept(report.warnings), [logging.getLogger(name) for name in ("controller.data", "tokenization")])
    for part in ours:
        part.addHandler(kept)
    try:
        yield report
    except Exception as error:
        report.error = str(error)
        report.write(run_dir)
        raise
    finally:
        for part in ours:
            part.removeHandler(kept)


def refuse_bad(report: DataReport) -> None:
    """Raise one `DataError` for all bad rows of all files; each has a line in the log."""
    bad = report.bad
    if bad.count == 1:
        raise DataError(bad.first[0])
    if bad.count:
        for text in bad.first:
            logger.error("%s", " ".join(text.split()))
        listed = "" if bad.count == len(bad.first) else f" ({len(bad.first)} of them are named above)"
        raise DataError(f"{bad.count:,} rows cannot be used{listed}; the first: {bad.first[0]}")


def share_of(n: int, keep: Keep, size: int, number: int, workers: int) -> Keep:
    """Choose the kept rows in every so many batches: those of one of several workers. n: all rows."""
    kept = np.fromiter(map(keep, range(n)), bool, n)
    share = (kept & ((np.cumsum(kept) - 1) // size % workers == number)).tobytes()
    return lambda i: share[i] != 0


def batches(
    source: RowSource, keep: Keep, size: int = BATCH, *, quiet: bool = False
) -> Iterator[list[tuple[int, Row]]]:
    """Kept rows with their index in the source, in batches; says how far it is on long work, unless it is quiet."""
    total, reported = len(source), time.monotonic()
    batch: list[tuple[int, Row]] = []
    for i, row in enumerate(source.rows(keep)):
        if row is not PASSED:
            batch.append((i, row))
        if len(batch) == size:
            yield batch
            batch = []
            if not quiet and time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                logger.info("%s: %s of %s rows", source.name, f"{i + 1:,}", f"{total:,}")
    if batch:
        yield batch


def value(row: Row, name: str, source: RowSource, i: int) -> Any:
    """The value of a column of row i. Raises `DataError` where it is missing or empty, or bytes."""
    try:
        content = column(row, name)
    except KeyError:
        raise DataError(f"{source.where(i)} has no `{name}`; it has {', '.join(row)}") from None
    if is_missing(content):
        raise DataError(f"{source.where(i)}: `{name}` is empty; remove the row or give it a value")
    if isinstance(content, bytes):
        raise DataError(f"{source.where(i)}: `{name}` holds bytes; write it as text")
    return content


def number(row: Row, name: str, source: RowSource, i: int) -> float:
    """The number in a column of row i. Raises `DataError` where there is none."""
    content = value(row, name, source, i)
    try:
        result = math.nan if isinstance(content, bool | list | dict) else float(content)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise DataError(f"{source.where(i)}: `{name}` must be a number, not {str(content)[:40]!r}")
    return result


def with_columns(
    ours: Row, columns: Mapping[str, str], raw: Row, source: RowSource, i: int, report: FileReport
) -> Row:
    """Row i as rewards get it: what is ours, then all columns of the data.

    A column whose name is one of ours is in `columns` of the row, unless ours was read of it. columns: of which
    column each of our names was read; "": of none. Raises `DataError` for a value that JSON cannot hold.
    """
    others: Row = {}
    for name, content in raw.items():
        if columns.get(name) != name:
            with named(f"{source.where(i)}, column `{name}`"):
                others[name] = jsonable(content, partial(_note, report, name))
    taken = [name for name in others if name in ours or name in columns]
    if not taken:
        return ours | others
    taken += ["columns"] if "columns" in others else []
    for name in taken:
        _remark(report, f'column `{name}`: prepared rows have it as row["columns"]["{name}"]')
    kept = {name: content for name, content in others.items() if name not in taken}
    return ours | kept | {"columns": {name: others[name] for name in taken}}


def _note(report: FileReport, name: str, what: str) -> None:
    _remark(report, f"column `{name}`: prepared rows have {what}")


def _remark(report: FileReport, text: str) -> None:
    if text not in report.remarks:
        report.remarks.append(text)


def reference(row: Row, name: str, source: RowSource, i: int, report: FileReport) -> Any:
    """The reference answer of row i, as JSON holds it. Raises `DataError` where it is missing or has no such form."""
    content = value(row, name, source, i)
    with named(f"{source.where(i)}, column `{name}`"):
        return jsonable(content, partial(_note, report, name))


def report_of(source: RowSource, what: str = "row") -> FileReport:
    """An empty report of a file's rows, with what is read of the dataset and what is not."""
    coverage = coverage_of(source)
    return FileReport(
        source=source.name,
        what=what,
        files=coverage.read,
        unread=coverage.unread,
        how=coverage.how,
        remarks=list(coverage.remarks),
    )


def report_option(parser: argparse.ArgumentParser) -> None:
    """The option of a preparation that writes a report."""
    parser.add_argument("--report-only", action="store_true", help="write data/report.json alone")


def command(
    prog: str,
    description: str,
    work: Callable[..., object],
    argv: list[str] | None,
    add: Callable[[argparse.ArgumentParser], object] = report_option,
) -> int:
    """The command line of a preparation; answers the exit code.

    work: takes the config of `--run-dir` and that directory, and by name the options that `add` adds.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run, with its config.json")
    add(parser)
    options = vars(parser.parse_args(argv))
    run_dir = options.pop("run_dir")
    configure_logging()
    logging.getLogger("huggingface_hub").propagate = False  # it writes by a handler of its own
    try:
        config = Config.model_validate_json((run_dir / "config.json").read_text(encoding="utf-8"))
        work(config, run_dir, **options)
    except (DataError, ValueError, OSError, ExternalModuleError) as error:
        logging.getLogger(prog).error("%s", " ".join(str(error).split()))  # one line: the launcher shows it
        return 2
    return 0
