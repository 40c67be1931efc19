"""An evaluation from its settings to its results: a job for each model, and what is left to do of an earlier start.

    models found ─▶ checkpoints exported ─▶ all configurations checked ─▶ plan.json ─▶ job ─▶ job ─▶ … ─▶ eval.json

A model whose job has finished is not run again; a job that was interrupted goes on and keeps the samples that were
scored. Whatever goes wrong before the first job changes nothing but exports.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from launcher.errors import LaunchError
from launcher.evaluation import report
from launcher.evaluation.models import EvaluatedModel, export, is_exported
from launcher.evaluation.settings import Settings
from launcher.plan.rundir import RunDir, read_json
from launcher.processes.signals import ended_by_exit, stop_signals
from launcher.restarts import EXIT_FAILED, EXIT_OK, SIGNALLED
from schema.config.loading.tomlwrite import dumps
from schema.util.atomic_file import write_text
from schema.wire.messages import SourceScores

PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The models of an evaluation, and its directory, which holds `<label>.toml` of each."""

    directory: Path
    models: Sequence[EvaluatedModel]

    def config_of(self, model: EvaluatedModel) -> Path:
        return self.directory / f"{model.label}.toml"


def prepared(
    settings: Settings, models: Sequence[EvaluatedModel], directory: Path, env: Mapping[str, str]
) -> Evaluation:
    """Export, write what will be run, and check it. An equal evaluation in the directory goes on.

    Raises ConfigError, LaunchError: a model, a configuration, or another evaluation that the directory holds.
    """
    evaluation = Evaluation(directory, models)
    plan = {"format": report.FORMAT, "models": [model.as_dict() for model in models]}
    for model in models:  # a fault of the configuration comes before minutes of exporting
        settings.of_model(replace(model, path="owner/name"), directory, env)
    with ended_by_exit():
        for model in models:
            if not is_exported(model):
                typer.echo(f"exporting {model.checkpoint}")
            export(model)
    texts = {model.label: dumps(settings.of_model(model, directory, env)) for model in models}
    if (earlier := read_json(directory / PLAN)) is not None:
        same = all(
            (path := evaluation.config_of(model)).exists() and path.read_text(encoding="utf-8") == texts[model.label]
            for model in models
        )
        if earlier != plan or not same:
            raise LaunchError(
                f"{directory} holds an evaluation of other models or settings",
                f"name another directory with -o; cosmos-launch eval --resume {directory} goes on with the one there",
            )
    directory.mkdir(parents=True, exist_ok=True)
    for model in models:
        write_text(evaluation.config_of(model), texts[model.label], mode=0o600)
    _check(evaluation, env)
    write_text(directory / PLAN, json.dumps(plan, indent=2, ensure_ascii=False) + "\n")
    return evaluation


def earlier(directory: Path, env: Mapping[str, str]) -> Evaluation:
    """The evaluation that a directory holds. Raises ConfigError, LaunchError: it holds none."""
    plan = read_json(directory / PLAN)
    if plan is None:
        raise LaunchError(f"{directory} holds no evaluation", "name the directory that `cosmos-launch eval` has made")
    evaluation = Evaluation(directory, [EvaluatedModel(**model) for model in plan["models"]])
    for model in evaluation.models:
        export(model)
    _check(evaluation, env)
    return evaluation


def _check(evaluation: Evaluation, env: Mapping[str, str]) -> None:
    from launcher.job.checked import check, check_start
    from launcher.job.request import LaunchRequest

    for model in evaluation.models:
        check_start(check(LaunchRequest([evaluation.config_of(model)], [], env)))


def run(evaluation: Evaluation, env: Mapping[str, str]) -> int:
    """Run the job of each model that has not finished, and show all results; the exit code."""
    directory, models = evaluation.directory, evaluation.models
    code = EXIT_OK
    for number, model in enumerate(models, 1):
        if report.record_of(RunDir(directory / model.label)) is not None:
            typer.echo(f"model {number} of {len(models)}, {model.label}: evaluated before")
            if not report.answers_path(model, directory).exists():  # killed in between
                report.write_answers(model, directory)
            continue
        typer.echo(f"model {number} of {len(models)}, {model.label}: {model.path}")
        ended = _run_one(evaluation, model, env)
        report.write_results(models, directory)
        if ended > SIGNALLED:
            typer.echo(f"cosmos-launch eval --resume {directory} goes on from here.")
            return ended
        code = max(code, EXIT_OK if ended == EXIT_OK else EXIT_FAILED)
    results = report.write_results(models, directory)
    columns = {
        result["label"]: {
            name: SourceScores.model_validate(scores) for name, scores in result.get("scores", {}).items()
        }
        for result in results
    }
    typer.echo("\n" + report.table(columns) + "\n")
    for result in results:
        if result["outcome"] != "finished":
            typer.echo(f"{result['label']}: {result['outcome']}: {result['reason']} (logs: {result['run_dir']}/logs)")
    typer.echo(f"results: {directory / 'eval.json'}; answers: {directory}/*.answers.jsonl")
    return EXIT_FAILED if code or any(result.get("errors") for result in results) else EXIT_OK


def _run_one(evaluation: Evaluation, model: EvaluatedModel, env: Mapping[str, str]) -> int:
    from launcher.job.checked import check
    from launcher.job.directory import FinishedError, opened
    from launcher.job.launch import run_job
    from launcher.job.request import LaunchRequest

    run_dir = evaluation.directory / model.label
    resume = "" if (run_dir / "config.json").is_file() else None
    checked = check(LaunchRequest([evaluation.config_of(model)], [], env, resume))
    before = {number: signal.getsignal(number) for number in (*stop_signals(), signal.SIGUSR1)}
    try:
        with opened(checked) as start:
            result = run_job(start)
    except FinishedError:  # whose scores could not be read
        typer.echo(f"{run_dir} has finished, and its scores are lost: remove it, and it is evaluated again")
        return EXIT_FAILED
    finally:
        for number, handler in before.items():  # a job ends by ignoring them
            signal.signal(number, handler)
    if result.exit_code == EXIT_OK and (record := report.record_of(RunDir(run_dir))) is not None:
        written = report.write_answers(model, evaluation.directory)
        if written < record.samples + record.errors:
            sys.stderr.write(f"note: the texts of {written} of {record.samples + record.errors} samples are kept\n")
        shutil.rmtree(run_dir / "weights", ignore_errors=True)  # a copy of the model
    return result.exit_code
