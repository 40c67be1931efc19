"""Rows on their way from a source to a prepared file: in batches, by column, within a bound, as JSON.

Source ─batches─▶ [(index, row)] ─value, Bound.fit─▶ Prepared ─extras, jsonable─▶ data/*.safetensors
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from controller.data.errors import DataError
from controller.data.sources import Source, column
from controller.data.tokenizer import Ids, Mask
from schema.config import Config
from schema.config.modules import ExternalModuleError
from schema.util.text import configure_logging

logger = logging.getLogger("controller.data.prepare")  # one name for all of the preparation

BATCH = 256  # rows tokenised in one call: the tokenizer's own overhead is gone beyond this
REPORT_EVERY_S = 2.0
Row = dict[str, Any]
Keep = Callable[[int], bool]


@dataclass
class Prepared:
    """Rows of one file, how many were left out or cut, and for which reason."""

    token_ids: list[Ids] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)

    def add(self, ids: Ids, row: Row, mask: Mask | None = None) -> None:
        self.token_ids.append(ids)
        self.rows.append(row)
        if mask is not None:
            self.masks.append(mask)


@dataclass(frozen=True)
class Bound:
    """The most tokens that a row may have, and what happens to a row of more.

    what: of what it is the bound. reason: where it comes from. section: the dataset's section in the config.
    """

    tokens: int
    what: str
    reason: str
    section: str
    rule: Literal["drop", "error", "left", "right"]

    def fit(self, length: int, where: str, out: Prepared) -> slice | None:
        """Which tokens stay; None: the row is left out. Counts what it leaves out or cuts.

        Raises `DataError` naming the row when the rule is `error`.
        """
        if length <= self.tokens:
            return slice(None)
        if self.rule == "error":
            raise DataError(
                f"{where}: {length} tokens, and {self.what} may have {self.tokens} ({self.reason}); shorten it, "
                f'raise that bound, or write {self.section}.overlong_prompts = "drop", "left" or "right"'
            )
        if self.rule == "drop" or self.tokens < 1:
            out.left_out[f"{self.what} of more than {self.tokens} tokens ({self.reason})"] += 1
            return None
        out.cut[f"{self.what} cut on the {self.rule} to {self.tokens} tokens ({self.reason})"] += 1
        return slice(length - self.tokens, None) if self.rule == "left" else slice(self.tokens)


def batches(source: Source, keep: Keep) -> Iterator[list[tuple[int, Row]]]:
    """Kept rows with their index in the source, in batches; says how far it is on long work."""
    total, reported = len(source), time.monotonic()
    batch: list[tuple[int, Row]] = []
    for i, row in enumerate(source.rows()):
        if keep(i):
            batch.append((i, row))
        if len(batch) == BATCH:
            yield batch
            batch = []
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                logger.info("%s: %s of %s rows", source.name, f"{i + 1:,}", f"{total:,}")
    if batch:
        yield batch


def value(row: Row, name: str, source: Source, i: int) -> Any:
    """The value of a column of row i. Raises `DataError` where it is missing or empty."""
    try:
        found = column(row, name)
    except KeyError:
        raise DataError(f"{source.where(i)} has no `{name}`; it has {', '.join(row)}") from None
    if found is None:
        raise DataError(f"{source.where(i)}: `{name}` is empty; remove the row or give it a value")
    return found


def extras(row: Row, reserved: set[str]) -> Row:
    """The other columns, without what JSON cannot hold (bytes, images)."""
    others = {name: inner for name, inner in row.items() if name not in reserved}
    return {name: inner for name, inner in ((n, jsonable(v)) for n, v in others.items()) if inner is not None}


def jsonable(value: Any) -> Any:
    """The value as JSON holds it, or None if it cannot: dates become text, NaN and bytes nothing."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        return {str(name): jsonable(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, np.generic):
        return jsonable(value.item())
    return None


def command(
    prog: str, description: str, work: Callable[..., object], argv: list[str] | None, **counts: str
) -> int:
    """The command line of a preparation; answers the exit code.

    work: takes the config of `--run-dir` and that directory, and `counts` by name: options with their help, which
    take a number.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="directory of the run, with its config.json"
    )
    for name, words in counts.items():
        parser.add_argument(f"--{name}", type=int, required=True, help=words)
    options = vars(parser.parse_args(argv))
    run_dir = options.pop("run_dir")
    configure_logging()
    logging.getLogger("huggingface_hub").propagate = False  # it writes by a handler of its own
    try:
        work(
            Config.model_validate_json((run_dir / "config.json").read_text(encoding="utf-8")),
            run_dir,
            **options,
        )
    except (DataError, ValueError, OSError, ExternalModuleError) as error:
        logging.getLogger(prog).error("%s", " ".join(str(error).split()))  # one line: the launcher shows it
        return 2
    return 0
