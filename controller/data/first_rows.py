"""The first rows that a job trains on: `python -m controller.data.first_rows --run-dir DIR --rows N`.

    DIR/config.json  ->  DIR/data/rows.jsonl

Rows as rewards get them (see `controller.data.prepare`), but none is left out for its length: the tokenizer is
loaded only where `reward.prompt_forms` needs it. Exit code 2: the config or the data is at fault.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from controller.data.conversations import read_prompt
from controller.data.errors import DataError
from controller.data.media import refuse_media
from controller.data.parts import Part, training_parts
from controller.data.prepare import tokenizer_of
from controller.data.prompts import domain_of, prompt_forms, prompt_row, tools_of, with_system
from controller.data.rows import Prepared, Row, command, report_of, value
from controller.data.tokenizer import PromptTokenizer
from schema.config import Config

logger = logging.getLogger("controller.data.first_rows")  # run with -m, __name__ would say nothing


def prepare(config: Config, run_dir: Path, rows: int) -> None:
    """Write the file. Raises `DataError`."""
    parts = training_parts(config, run_dir)
    tokenizer = tokenizer_of(config) if config.reward.prompt_forms else None
    with (run_dir / "data" / "rows.jsonl").open("w", encoding="utf-8") as file:
        for part, first in zip(parts, _dealt(config, parts, rows), strict=True):
            for row in _first(config, part, first, tokenizer):
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


_Numbered = list[tuple[int, Row]]


def _dealt(config: Config, parts: list[Part], rows: int) -> list[_Numbered]:
    """The first rows of each part, in turns until there are enough: a short part has its place taken by others.

    Raises `DataError` where a part has none.
    """
    streams: list[Iterator[tuple[int, Row]] | None] = [_trained(config, part) for part in parts]
    first: list[_Numbered] = [[] for _ in parts]
    while any(streams):
        for k, stream in enumerate(streams):
            if sum(map(len, first)) == rows:
                return first
            if stream is None:
                continue
            row = next(stream, None)
            if row is not None:
                first[k].append(row)
            elif first[k]:
                streams[k] = None
            else:
                raise DataError(f"{parts[k].section}: {parts[k].source.name} has no rows")
    return first


def _trained(config: Config, part: Part) -> Iterator[tuple[int, Row]]:
    """The rows of a part that are trained on, as far as their domain decides it."""
    domains = config.grpo.domain_shares
    for i, raw in enumerate(part.source.rows()):
        if part.keep(i) and (not domains or domain_of(config, part.source, i, raw) in domains):
            yield i, raw


def _first(config: Config, part: Part, first: _Numbered, tokenizer: PromptTokenizer | None) -> Iterator[Row]:
    """Rows of a part as rewards get them. Raises `DataError`."""
    source = part.source
    column = config.grpo.prompt_column
    prompts = [read_prompt(value(raw, column, source, i), source.where(i)) for i, raw in first]
    for (i, raw), prompt in zip(first, prompts, strict=True):
        refuse_media(part.dataset, part.section, raw, prompt, source.where(i))
    forms: list[Row] = [{} for _ in first]
    if tokenizer is not None:
        out, shows_tools = Prepared(report_of(source)), tokenizer.shows_tools()
        texts = [
            tokenizer.with_tools(tools_of(config, raw, source.where(i), shows_tools, out)).text(
                with_system(config, prompt, raw, source.where(i))
            )
            for (i, raw), prompt in zip(first, prompts, strict=True)
        ]
        forms = prompt_forms(config, tokenizer, prompts, texts)
    report = report_of(source)
    for (i, raw), prompt, added in zip(first, prompts, forms, strict=True):
        yield prompt_row(config, part, i, raw, prompt, added, report)
    for text in report.remarks:
        logger.info("%s", text)


def main(argv: list[str] | None = None) -> int:
    """The command line; answers the exit code."""
    words = "Write the first rows of the training data."
    return command(
        "controller.data.first_rows",
        words,
        prepare,
        argv,
        lambda parser: parser.add_argument("--rows", type=int, required=True, help="how many"),
    )


if __name__ == "__main__":
    sys.exit(main())
