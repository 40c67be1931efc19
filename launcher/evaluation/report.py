"""The results of an evaluation: eval.json, a table with a column for each model, and the answers of each.

eval.json              what `table` shows, with all digits
<label>.answers.jsonl  a line for each prompt that has an answer, as `[evaluation]` reads it: the prepared row, with
                       prompt, responses, answer (as rewards get them), data_source; and scores, rewards, extracted
                       answers and errors, in the order of the responses; `unanswered`: samples that were never
                       generated, which are no responses
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import LaunchError
from launcher.evaluation.models import EvaluatedModel
from launcher.plan.rundir import RunDir, read_json
from launcher.trackers.follow import validation_metrics
from schema.scores.summary import estimates_of
from schema.util.atomic_file import replacing, write_text
from schema.wire import event_file, sample_file
from schema.wire.messages import Estimate, SampleRecord, SourceScores, ValidationRecord
from schema.wire.prompts import PromptFile, PromptFileError

FORMAT = 1
ALL = "all"
NONE = "–"
WIDEST = 34
EVERY_SAMPLE = 1 << 40


def record_of(run: RunDir) -> ValidationRecord | None:
    """The scores of a model whose job has finished; None: it has not, or what it wrote cannot be read."""
    summary = run.summary()
    if summary is None or summary["outcome"] != "finished":
        return None
    if summary.get("validations"):
        return ValidationRecord.model_validate(summary["validations"][-1])
    recorded = event_file.course(event_file.read(event_file.path_of(run.path))).validations
    return recorded[-1] if recorded else None


def result_of(model: EvaluatedModel, directory: Path) -> dict[str, Any]:
    """Return the entry of one model in eval.json, whatever became of it."""
    run = RunDir(directory / model.label)
    summary, record = run.summary() or {}, record_of(run)
    result = {**model.as_dict(), "run_dir": str(run.path), "outcome": summary.get("outcome", "not run")}
    if record is None:
        return {**result, "reason": summary.get("reason", "")}
    of_sources = {name: of_source for name, of_source in record.sources.items() if name != ALL}
    scores = {ALL: record.scores, **of_sources}
    return {
        **result,
        "answers": str(answers_path(model, directory)),
        "seconds": summary.get("total_elapsed_s"),
        "samples": record.samples,
        "errors": record.errors,
        "rewards": record.rewards_mean,
        "response_tokens_mean": record.response_tokens_mean,
        "metrics": validation_metrics(record),
        "scores": {name: of_source.model_dump(mode="json") for name, of_source in scores.items() if of_source},
    }


def write_results(models: Sequence[EvaluatedModel], directory: Path) -> list[dict[str, Any]]:
    """Write eval.json of what there is; answers its models."""
    results = [result_of(model, directory) for model in models]
    configs = [read_json(directory / model.label / "config.json") for model in models]
    drawn = next((config["validation"] for config in configs if config), None)
    whole = {"format": FORMAT, "validation": drawn, "models": results}
    write_text(directory / "eval.json", json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
    return results


# ---- answers --------------------------------------------------------------------------------------------------


def answers_path(model: EvaluatedModel, directory: Path) -> Path:
    return directory / f"{model.label}.answers.jsonl"


def write_answers(model: EvaluatedModel, directory: Path) -> int:
    """Write the answers of a model whose job has finished; how many samples they are.

    Samples of which a killed controller had not written the text yet are not among them, though their scores are.
    """
    folder = sample_file.folder_of(directory / model.label)
    groups: dict[str, list[SampleRecord]] = defaultdict(list)
    for record in sample_file.find(folder, kind="validation", step=0, limit=EVERY_SAMPLE):
        groups[record.group].append(record)
    try:
        rows = PromptFile(directory / model.label / "data" / "validation.safetensors")
        with replacing(answers_path(model, directory)) as neighbour, neighbour.open("w", encoding="utf-8") as file:
            for group, records in groups.items():
                if line := _line(records, rows.row(int(group.rpartition("-p")[2]))):
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except PromptFileError as error:
        raise LaunchError(f"the answers of {model.label} are not written: {error}") from None
    return sum(map(len, groups.values()))


def _line(every: Sequence[SampleRecord], row: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a prompt. row: its prepared row. Empty where nothing was generated."""
    records = [record for record in every if record.finish_reason != "abort"]
    if not records:
        return {}
    first = records[0]
    columns = {name: value for name, value in row.items() if name != "key"}  # rewards get them again
    return columns | {
        "prompt": row.get("prompt", first.prompt),
        "responses": [record.answer for record in records],
        "answer": row.get("answer", ""),
        "data_source": first.source or None,
        "set": first.part or None,
        "scores": [record.score for record in records],
        "rewards": [record.rewards for record in records],
        "extracted": [record.extracted for record in records],
        "errors": [record.error for record in records],
        "finish_reasons": [record.finish_reason for record in records],
        "response_tokens": [record.response_tokens for record in records],
        "unanswered": len(every) - len(records),
    }


# ---- the table ------------------------------------------------------------------------------------------------


def table(columns: Mapping[str, Mapping[str, SourceScores]]) -> str:
    """Scores by model and source as text: a line for each estimate of each source, a column for each model."""
    sources = list(dict.fromkeys(source for scores in columns.values() for source in scores if source != ALL))
    if len(sources) != 1:
        sources.append(ALL)
    rows = [["source", "prompts", "", *columns]]
    for source in sources:
        rows += _rows(source, [scores.get(source) for scores in columns.values()])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *_notes(columns)])


def _rows(source: str, scores: Sequence[SourceScores | None]) -> Iterator[list[str]]:
    estimates = [{} if of_model is None else estimates_of(of_model) for of_model in scores]
    prompts = max((of_model.prompts for of_model in scores if of_model is not None), default=0)
    head = [source if len(source) <= WIDEST else source[: WIDEST - 1] + "…", f"{prompts:,}"]
    for name in dict.fromkeys(name for of_model in estimates for name in of_model):
        yield [*head, name, *(cell(of_model.get(name)) for of_model in estimates)]
        head = ["", ""]


def cell(estimate: Estimate | None) -> str:
    """One estimate, with its interval where there is one."""
    if estimate is None:
        return NONE
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.4f}"
    return f"{estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


def _notes(columns: Mapping[str, Mapping[str, SourceScores]]) -> Iterator[str]:
    """Yield what the numbers do not have: samples without a score, answers that nothing extracts."""
    yield "[…]: 95 % intervals, by resampling prompts"
    for label, scores in columns.items():
        whole = scores.get(ALL)
        if whole is None:
            yield f"{label}: no scores"
            continue
        if whole.errors:
            count = whole.errors + whole.samples
            yield f"{label}: {whole.errors:,} of {count:,} samples have no score, and are in no number"
        if not whole.answers and whole.n > 1:
            yield f"{label}: no maj@{whole.n}, for the rewards extract no answers (docs/metrics.md, Estimates)"
