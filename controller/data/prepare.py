"""Prepare the data of a run: `python -m controller.data.prepare --run-dir DIR`.

    DIR/config.json  ->  DIR/data/train.safetensors, and DIR/data/validation.safetensors if validation is on
                         DIR/data/report.json: what became of the rows (schema.wire.data_report)

A prepared row is {"key", "prompt", "answer", ...}: a stable name of where it came from, the prompt as text or
messages, the reference answer (if `response_column_name` is set), its `data_source` (if something asks for it), the
prompt in the `reward.prompt_forms`, and every column of the data as JSON holds it (`controller.data.values`); those
with the name of one of these are in its `columns`.
For supervised training it is {"key", ...} and the file has a loss mask.

Invariant: a row is written whole, or left out, or (where `overlong_prompts` says so) its tokens are cut; the last two
are counted and reported. A row that cannot be used at all is an error, once all rows have been looked at. Exit code
2: the config or the data is at fault, and the last line of stderr says how.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path

import numpy as np

from controller.data.errors import DataError
from controller.data.prompts import prepare_prompts, wants_source
from controller.data.rows import Keep, Prepared, command, refuse_bad, reported
from controller.data.sources import RowSource, open_source, require_column
from controller.data.supervised import prepare_conversations
from controller.data.tokenizer import PromptTokenizer
from schema.config import Config
from schema.config.chat_template import keep_template, kept_template
from schema.config.dataset_files import Role, files_of
from schema.config.model_facts import BrokenModelError, read_facts
from schema.config.modules import import_external
from schema.wire.data_report import FileReport, Rows, lines
from schema.wire.prompts import write_prompts

logger = logging.getLogger("controller.data.prepare")  # run with -m, __name__ would say nothing

_POLICY = "train.train_policy"


def prepare(config: Config, run_dir: Path, report_only: bool = False) -> dict[str, int]:
    """Write the data files of a run and their report; answers rows by file. Raises `DataError`.

    report_only: write nothing else.
    """
    with reported(run_dir) as report:
        template, ready = _ready(config)
        if not report_only and (earlier := run_dir / "data" / "train.safetensors").exists():
            earlier.unlink()  # however this ends, it is not data of this configuration
            if kept_template(run_dir) != template:
                logger.warning("earlier steps of this run were trained with another chat template of the job's own")
        report.files |= {role: prepared.report for role, prepared in ready}
        _note_trained(dict(ready))
        refuse_bad(report)
        for role, prepared in ready:
            refuse_unknown_ids(config, role, prepared)
            _check_left(role, prepared.report)
        for text in lines(report):
            logger.info("%s", text)
        report.write(run_dir)
        if not report_only:
            keep_template(run_dir, template)
            # The training data last: where it is, everything is, however this process may have ended.
            for role, prepared in reversed(ready):
                _write(run_dir / "data" / f"{role}.safetensors", prepared)
        return {role: prepared.report.kept for role, prepared in ready}


def refuse_unknown_ids(config: Config, role: Role, prepared: Prepared) -> None:
    """Refuse rows with token ids that the model has no embeddings for. Raises `DataError`.

    Rules of the configuration compare the tokenizer with the model; special tokens that only a text which spells them
    out becomes are left to this.
    """
    policy = config.policy
    try:
        facts = read_facts(policy.model_name_or_path, policy.model_revision, policy.override_config)
    except BrokenModelError:
        return  # whoever loads the model reports it
    if facts is None or facts.vocabulary is None:
        return
    rows = [
        f"{prepared.rows[i]['key']} ({ids.max()})"
        for i, ids in enumerate(prepared.token_ids)
        if len(ids) and ids.max() >= facts.vocabulary
    ]
    if rows:
        few = ", ".join(rows[:3]) + ", …" * (len(rows) > 3)
        raise DataError(
            f"{len(rows)} rows of the {role} data have token ids that policy.model_name_or_path = {facts.name} has "
            f"no embeddings for (vocab_size = {facts.vocabulary}): {few}; leave these rows out, or name the "
            f"tokenizer that the model was made with"
        )


def _ready(config: Config) -> tuple[str | None, list[tuple[Role, Prepared]]]:
    """The job's own chat template, and the prepared rows of each file."""
    source, held_out = training_source(config)
    jobs: list[tuple[Role, RowSource, Keep]] = [("train", source, lambda i: i not in held_out)]
    if config.validation.enable:
        jobs.append(("validation", *_validation_source(config, source, held_out)))
    tokenizer = tokenizer_of(config)
    prepared = prepare_prompts if config.is_grpo else prepare_conversations
    return tokenizer.own_template, [
        (role, prepared(config, tokenizer, rows, keep, role)) for role, rows, keep in jobs
    ]


def _note_trained(ready: dict[Role, Prepared]) -> None:
    """Note the rows of validation whose tokens are trained on too, whichever file they are from."""
    if "validation" not in ready:
        return
    trained, validated = (
        np.array([hash(ids.tobytes()) for ids in ready[role].token_ids], np.int64) for role in ("train", "validation")
    )
    rows = ready["validation"]
    for i in np.flatnonzero(np.isin(validated, trained)).tolist():
        text = f"{rows.report.what}s that are trained on too: their results say little"
        rows.report.noted.setdefault(text, Rows()).add(str(rows.rows[i]["key"]))


def training_source(config: Config) -> tuple[RowSource, frozenset[int]]:
    """The training data, and which of its rows are held out for validation. Raises `DataError`."""
    dataset = config.train.train_policy.dataset
    if not dataset.is_named:
        raise DataError(f"{_POLICY}.dataset.name is empty: a job needs training data")
    if dataset.is_synthetic and dataset.test_size:
        raise DataError(
            "train.train_policy.dataset.test_size: synthetic:addition holds out pairs of operands, not rows; "
            "name it in validation.dataset.name instead"
        )
    apart = files_of(config.validation.dataset, "validation") if config.validation.enable else frozenset()
    source = open_source(dataset, "train", config.effective_seed, apart)
    _check_columns(config, source, "train")
    return source, held_out_rows(len(source), dataset.test_size, config.effective_seed)


def tokenizer_of(config: Config) -> PromptTokenizer:
    """The policy's tokenizer, after its external modules are imported."""
    policy = config.policy
    import_external(policy.external_modules)
    if policy.trust_remote_code:
        logger.warning("policy.trust_remote_code = true: code of %s may run here", policy.tokenizer[0])
    return PromptTokenizer.of(config)


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


def _validation_source(config: Config, train: RowSource, held_out: frozenset[int]) -> tuple[RowSource, Keep]:
    dataset = config.validation.dataset
    if dataset.is_named:
        apart = files_of(config.train.train_policy.dataset, "train")
        source = open_source(dataset, "validation", config.effective_seed, apart)
        _check_columns(config, source, "validation")
        return source, lambda _: True
    if held_out:
        return train, lambda i: i in held_out
    raise DataError(
        "validation has no rows: name a dataset in validation.dataset.name (synthetic:addition: its held-out "
        "pairs), or hold rows of the training data out with train.train_policy.dataset.test_size"
    )


def _check_columns(config: Config, source: RowSource, role: Role) -> None:
    where = "" if role == "train" else " (dataset of [validation])"
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
    if wants_source(config, role):
        require_column(source, grpo.data_source_column_name, f"{_POLICY}.data_source_column_name{where}")


def _check_left(role: Role, report: FileReport) -> None:
    if report.kept:
        return
    reasons = "; ".join(f"{rows.count} with {reason}" for reason, rows in report.left_out.items())
    raise DataError(f"{role}: no row of {report.source} is left" + (f": {reasons}" if reasons else ": it is empty"))


def _write(path: Path, prepared: Prepared) -> None:
    report = prepared.report
    counted = {
        name: json.dumps({reason: rows.count for reason, rows in reasons.items()})
        for name, reasons in (("left_out", report.left_out), ("cut", report.cut))
    }
    metadata = {"source": report.source, **counted}
    write_prompts(path, prepared.token_ids, prepared.rows, prepared.masks or None, metadata)  # type: ignore[arg-type]


def main(argv: list[str] | None = None) -> int:
    """The command line; answers the exit code."""
    return command("controller.data.prepare", "Prepare a run's data.", prepare, argv)


if __name__ == "__main__":
    sys.exit(main())
