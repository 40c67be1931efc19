"""Read the answers that an evaluation scores: `python -m controller.data.evaluation --run-dir DIR`.

    DIR/config.json  ->  DIR/data/evaluation.jsonl

One line per prompt: {"key", "prompt", "answer", "data_source", "responses": [text, …], …}, with the other columns, as
training rewards get them. A row is written whole or it is an error that names it, once all rows have been looked at:
nothing is left out, for a score over fewer answers than the file holds is another score. Exit code 2: the config or
the data is at fault, and the last line of stderr says how; DIR/data/report.json has all of them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from controller.data.errors import DataError
from controller.data.parts import Part, answer_parts, check_source
from controller.data.reading.sources import column
from controller.data.rows import (
    batches,
    command,
    judged,
    reference,
    refuse_bad,
    report_of,
    reported,
    value,
    with_columns,
)
from controller.data.values import json_list, jsonable
from schema.config import Config, EvaluationConfig
from schema.util.atomic_file import replacing
from schema.wire.data_report import DataReport, FileReport

logger = logging.getLogger("controller.data.evaluation")  # run with -m, __name__ would say nothing

_SECTION = "evaluation"


def prepare(config: Config, run_dir: Path, report_only: bool = False) -> int:
    """Write the file and its report; answers its rows. Raises `DataError`. report_only: nothing else."""
    with reported(run_dir) as report, ExitStack() as stack:
        path = run_dir / "data" / "evaluation.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        target = stack.enter_context(replacing(path)) if not report_only else Path(os.devnull)
        _read(config, report, stack.enter_context(target.open("w", encoding="utf-8")), run_dir)
        report.write(run_dir)
        return sum(rows.kept for rows in report.files.values())


def _read(config: Config, report: DataReport, file: TextIO, run_dir: Path) -> None:
    parts = answer_parts(config, run_dir)
    for part in parts:
        name = f"{_SECTION}/{part.label}" if part.label else _SECTION
        rows = report.files[name] = report_of(part.source)
        for batch in batches(part.source, lambda _: True):
            rows.read += len(batch)
            for i, row in batch:
                with judged(rows.bad):
                    line = read_row(config, part, i, row, rows)
                    file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
                    rows.kept += 1
    refuse_bad(report)
    for part, rows in zip(parts, report.files.values(), strict=True):
        if not rows.read:
            raise DataError(f"{part.section}: {part.source.name} has no rows")
        logger.info("%s rows of %s read", f"{rows.read:,}", part.source.name)


def read_row(config: Config, part: Part, i: int, row: dict[str, Any], report: FileReport) -> dict[str, Any]:
    """One line of the file. Raises `DataError` for a row without answers, reference or known source.

    What becomes of columns is noted in the report.
    """
    section, source = config.evaluation, part.source
    answers = value(row, section.responses_column_name, source, i)
    line = {
        "key": f"{_SECTION}/{part.label}/{i + 1}" if part.label else f"{_SECTION}/{i + 1}",
        "prompt": jsonable(value(row, section.prompt_column_name, source, i)),
        "responses": _responses(answers, section, source.where(i)),
        "data_source": _source_of(row, section, part, i),
    }
    columns = {
        "prompt": section.prompt_column_name,
        "responses": section.responses_column_name,
        "data_source": section.data_source_column_name,
        "answer": section.reference_column_name,
    }
    if section.reference_column_name:
        line["answer"] = reference(row, section.reference_column_name, source, i, report)
    # Not the answers of the row once more: a reward gets one, and the row with each.
    others = {name: content for name, content in row.items() if name != section.responses_column_name}
    return with_columns(line, columns, others, source, i, report)


def _source_of(row: dict[str, Any], section: EvaluationConfig, part: Part, i: int) -> str | None:
    """The row's source, by which scores are grouped; None without such a column. `by_source` must know it."""
    given = part.named_source(row, section.data_source_column_name)
    if "by_source" in section.reward_weights:
        name = value(row, section.data_source_column_name, part.source, i) if given is None else given
        check_source(name, part.where(i), f"{_SECTION}.reward_function")
        return str(name)
    if given is not None:
        return given
    try:
        name = column(row, section.data_source_column_name)
    except KeyError:
        return None
    return None if name is None else str(name)


def _responses(written: Any, section: EvaluationConfig, where: str) -> list[str]:
    answers = json_list(written, str) or [written] if isinstance(written, str) else written  # CSV has lists as JSON
    if not isinstance(answers, list) or not answers or not all(isinstance(text, str) for text in answers):
        raise DataError(
            f"{where}: `{section.responses_column_name}` must be a text or a list of texts, "
            f"got {type(written).__name__}"
        )
    return answers


def main(argv: list[str] | None = None) -> int:
    """The command line; answers the exit code."""
    return command("controller.data.evaluation", "Read the answers that are scored.", prepare, argv)


if __name__ == "__main__":
    sys.exit(main())
