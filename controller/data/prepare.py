"""Prepare the data of a run: `python -m controller.data.prepare --run-dir DIR`.

    DIR/config.json  ->  DIR/data/train.safetensors, and DIR/data/validation.safetensors if validation is on

A prepared row is {"key", "prompt", "answer", ...}: a stable name of where it came from, the prompt as text or
messages, the reference answer (if `response_column_name` is set), and every other column that JSON can hold.
For supervised training it is {"key", ...} and the file has a loss mask.

Invariant: a row is written whole or left out, counted and reported; nothing is ever cut. Exit code 2: the
config or the data is at fault, and the last line of stderr says how.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from controller.data.conversations import read_messages, read_prompt
from controller.data.errors import DataError
from controller.data.sources import Role, Source, column, open_source, require_column
from controller.data.tokenizer import Ids, Mask, PromptTokenizer
from schema.config import Config
from schema.wire.prompts import write_prompts

logger = logging.getLogger("controller.data.prepare")  # run with -m, __name__ would say nothing

BATCH = 256  # rows tokenised in one call: the tokenizer's own overhead is gone beyond this
REPORT_EVERY_S = 2.0
Row = dict[str, Any]
Keep = Callable[[int], bool]


@dataclass
class Prepared:
    """Rows of one file, and how many were left out for which reason."""

    token_ids: list[Ids] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, ids: Ids, row: Row, mask: Mask | None = None) -> None:
        self.token_ids.append(ids)
        self.rows.append(row)
        if mask is not None:
            self.masks.append(mask)


def prepare(config: Config, run_dir: Path) -> dict[str, int]:
    """Write the data files of a run; answers rows by file. Raises `DataError`."""
    dataset = config.train.train_policy.dataset
    if not dataset.name:
        raise DataError("train.train_policy.dataset.name is empty: a job needs training data")
    if dataset.is_synthetic and dataset.test_size:
        raise DataError(
            "train.train_policy.dataset.test_size: synthetic:addition holds out pairs of operands, not rows; "
            "name it in validation.dataset.name instead"
        )
    source = open_source(dataset, "train", config.effective_seed)
    _check_columns(config, source, "train.train_policy")
    held_out = held_out_rows(len(source), dataset.test_size, config.effective_seed)
    jobs: list[tuple[Role, Source, Keep]] = [("train", source, lambda i: i not in held_out)]
    if config.validation.enable and config.is_grpo:
        jobs.append(("validation", *_validation_source(config, source, held_out)))
    tokenizer = PromptTokenizer(config.policy.model_name_or_path, config.policy.model_revision)
    counts: dict[str, int] = {}
    for role, rows, keep in jobs:
        if config.is_grpo:
            prepared = prepare_prompts(config, tokenizer, rows, keep, role)
        else:
            prepared = prepare_conversations(config, tokenizer, rows, keep)
        counts[role] = _write(run_dir / "data" / f"{role}.safetensors", prepared, rows.name, role)
    return counts


def held_out_rows(n: int, test_size: float | int | None, seed: int) -> frozenset[int]:
    """The rows that `test_size` takes from training: the first of a seeded permutation.

    A float is a share of the rows (rounded up), an integer a number. Raises `DataError` if nothing would be
    left to train on.
    """
    if not test_size:
        return frozenset()
    wanted = math.ceil(test_size * n) if isinstance(test_size, float) else test_size
    if wanted >= n:
        raise DataError(
            f"train.train_policy.dataset.test_size = {test_size} holds out {wanted} of {n} rows: "
            "none is left to train on"
        )
    return frozenset(np.random.default_rng(seed).permutation(n)[:wanted].tolist())


def _validation_source(config: Config, train: Source, held_out: frozenset[int]) -> tuple[Source, Keep]:
    dataset = config.validation.dataset
    if dataset.name:
        source = open_source(dataset, "validation", config.effective_seed)
        _check_columns(config, source, "validation")
        return source, lambda _: True
    if held_out:
        return train, lambda i: i in held_out
    raise DataError(
        "validation has no rows: name a dataset in validation.dataset.name (synthetic:addition: its held-out "
        "pairs), or hold rows of the training data out with train.train_policy.dataset.test_size"
    )


def _check_columns(config: Config, source: Source, section: str) -> None:
    if not config.is_grpo:
        name = config.sft.conversation_column_name
        require_column(source, name, "train.train_policy.conversation_column_name")
        return
    where = "" if section == "train.train_policy" else f" (dataset of [{section}])"
    require_column(source, config.grpo.prompt_column, f"train.train_policy.prompt_column_name{where}")
    if config.grpo.response_column_name:
        key = f"train.train_policy.response_column_name{where}"
        require_column(source, config.grpo.response_column_name, key)
    elif "answer" in source.columns:
        logger.warning(
            "%s has a column `answer`, but train.train_policy.response_column_name is empty: rewards get no "
            "reference answer",
            source.name,
        )


# ---- prompts ----------------------------------------------------------------------------------------------


def prepare_prompts(
    config: Config, tokenizer: PromptTokenizer, source: Source, keep: Keep, role: Role
) -> Prepared:
    """Prompts of reinforcement, each with room for a whole answer."""
    grpo, out = config.grpo, Prepared()
    answer_tokens = config.rollout.max_response_length
    if role == "validation":
        answer_tokens = config.validation.max_response_length or answer_tokens
    room = min(config.engine_max_len, config.policy.model_max_length) - answer_tokens
    reserved = {grpo.prompt_column, grpo.response_column_name, "key", "prompt", "answer"}
    for batch in _batches(source, keep):
        prompts = [
            read_prompt(_value(raw, grpo.prompt_column, source, i), _where(source, i)) for i, raw in batch
        ]
        for (i, raw), prompt, ids in zip(batch, prompts, tokenizer.prompts(prompts), strict=True):
            if not prompt or not len(ids):
                out.left_out["an empty prompt"] += 1
            elif len(ids) > room:
                out.left_out[
                    f"a prompt that leaves no room: more than {room} tokens (policy.model_max_length or "
                    f"rollout.max_model_len, less max_response_length = {answer_tokens})"
                ] += 1
            else:
                row: Row = {"key": f"{role}/{i}", "prompt": prompt}
                if grpo.response_column_name:
                    row["answer"] = jsonable(_value(raw, grpo.response_column_name, source, i))
                out.add(ids, row | _extras(raw, reserved))
    return out


# ---- conversations ----------------------------------------------------------------------------------------


def prepare_conversations(config: Config, tokenizer: PromptTokenizer, source: Source, keep: Keep) -> Prepared:
    """Conversations of supervised training, with the loss on the assistant's tokens alone."""
    sft, out = config.sft, Prepared()
    longest = config.policy.model_max_length
    system = [{"role": "system", "content": sft.system_prompt}] if sft.system_prompt else []
    for batch in _batches(source, keep):
        conversations = [
            system + read_messages(_value(raw, sft.conversation_column_name, source, i), _where(source, i))
            for i, raw in batch
        ]
        encoded = tokenizer.conversations(conversations)
        for (i, raw), (ids, mask) in zip(batch, encoded, strict=True):
            if not mask.any():
                out.left_out["nothing that the assistant says"] += 1
            elif len(ids) > longest:
                out.left_out[f"more than policy.model_max_length = {longest} tokens"] += 1
            else:
                out.add(
                    ids, {"key": f"train/{i}"} | _extras(raw, {sft.conversation_column_name, "key"}), mask
                )
    return out


# ---- rows -------------------------------------------------------------------------------------------------


def _batches(source: Source, keep: Keep) -> Iterator[list[tuple[int, Row]]]:
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


def _value(row: Row, name: str, source: Source, i: int) -> Any:
    try:
        value = column(row, name)
    except KeyError:
        raise DataError(f"{_where(source, i)} has no `{name}`; it has {', '.join(row)}") from None
    if value is None:
        raise DataError(f"{_where(source, i)}: `{name}` is empty; remove the row or give it a value")
    return value


def _where(source: Source, i: int) -> str:
    return f"{source.name}, row {i}"


def _extras(row: Row, reserved: set[str]) -> Row:
    """The other columns, without what JSON cannot hold (bytes, images)."""
    extras = {name: value for name, value in row.items() if name not in reserved}
    return {name: value for name, value in ((n, jsonable(v)) for n, v in extras.items()) if value is not None}


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


def _write(path: Path, prepared: Prepared, name: str, role: Role) -> int:
    for reason, count in prepared.left_out.items():
        logger.warning("%s: %s of %s rows left out: %s", role, count, name, reason)
    if not prepared.rows:
        reasons = "; ".join(f"{count} with {reason}" for reason, count in prepared.left_out.items())
        raise DataError(
            f"{role}: no row of {name} is left" + (f": {reasons}" if reasons else ": it is empty")
        )
    metadata = {"source": name, "left_out": json.dumps(prepared.left_out)}
    write_prompts(path, prepared.token_ids, prepared.rows, prepared.masks or None, metadata)  # type: ignore[arg-type]
    tokens = sum(map(len, prepared.token_ids))
    logger.info("%s: %s rows of %s prepared, %s tokens", role, f"{len(prepared.rows):,}", name, f"{tokens:,}")
    return len(prepared.rows)


def main(argv: list[str] | None = None) -> int:
    """The command line; answers the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m controller.data.prepare", description="Prepare a run's data."
    )
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="directory of the run, with its config.json"
    )
    run_dir = parser.parse_args(argv).run_dir
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it writes by a handler of its own
    try:
        config = Config.model_validate_json((run_dir / "config.json").read_text(encoding="utf-8"))
        prepare(config, run_dir)
    except (DataError, ValueError, OSError) as error:
        logger.error("%s", " ".join(str(error).split()))  # one line: it is what the launcher shows
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
