"""The first rows that a job trains on: `python -m controller.data.first_rows --run-dir DIR --rows N`.

    DIR/config.json  ->  DIR/data/rows.jsonl

Rows as rewards get them (see `controller.data.prepare`), but none is left out for its length: the tokenizer is
loaded only where `reward.prompt_forms` needs it. Exit code 2: the config or the data is at fault.
"""

from __future__ import annotations

import json
import logging
import sys
from itertools import islice
from pathlib import Path

from controller.data.conversations import read_prompt, read_tools
from controller.data.errors import DataError
from controller.data.media import refuse_media
from controller.data.prepare import tokenizer_of, training_source
from controller.data.prompts import dataset_of, prompt_forms, prompt_row, with_system
from controller.data.rows import Row, command, report_of, value
from schema.config import Config

logger = logging.getLogger("controller.data.first_rows")  # run with -m, __name__ would say nothing


def prepare(config: Config, run_dir: Path, rows: int) -> None:
    """Write the file. Raises `DataError`."""
    source, held_out = training_source(config)
    first = list(islice(((i, raw) for i, raw in enumerate(source.rows()) if i not in held_out), rows))
    if not first:
        raise DataError(f"train.train_policy.dataset: {source.name} has no rows")
    column = config.grpo.prompt_column
    prompts = [read_prompt(value(raw, column, source, i), source.where(i)) for i, raw in first]
    section, dataset = dataset_of(config, "train")
    for (i, raw), prompt in zip(first, prompts, strict=True):
        refuse_media(dataset, section, raw, prompt, source.where(i))
    forms: list[Row] = [{} for _ in first]
    if config.reward.prompt_forms:
        tokenizer = tokenizer_of(config)
        shows_tools = tokenizer.shows_tools()
        texts = [
            tokenizer.with_tools(read_tools(raw.get("tools"), source.where(i)) if shows_tools else None).text(
                with_system(config, prompt)
            )
            for (i, raw), prompt in zip(first, prompts, strict=True)
        ]
        forms = prompt_forms(config, tokenizer, prompts, texts)
    report = report_of(source)
    with (run_dir / "data" / "rows.jsonl").open("w", encoding="utf-8") as file:
        for (i, raw), prompt, added in zip(first, prompts, forms, strict=True):
            row = prompt_row(config, "train", source, i, raw, prompt, added, report)
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
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
