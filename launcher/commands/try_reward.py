"""`cosmos-launch try-reward`: rewards on the first rows of the training data, without a model or a job.

    first rows (controller.data.first_rows) ─▶ answers to each ─▶ reward processes (rollout_worker.evaluate) ─▶ table

Both steps are processes of their own, in a temporary directory. What fails is not scored again, so that it is seen;
one process scores all, so that what the functions print is in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.commands.options import AsJson, Configs, Overrides, print_json, printable
from launcher.errors import LaunchError
from launcher.processes.signals import ended_by_exit
from launcher.processes.step import not_logged, run_step
from launcher.restarts import EXIT_FAILED, EXIT_OK

READING = 600.0
"""Seconds to read the rows, which may have to be downloaded."""
STARTING = 600.0
"""Seconds for reward processes to start, more than they may take; scoring comes on top."""
WIDEST = 44
"""Characters of an answer in the table."""
MOST_PRINTED = 200
"""Lines, the last ones, of what the functions have printed."""
_MODEL = "policy.model_name_or_path"
Record = dict[str, Any]


def try_reward(
    config: Configs,
    set_: Overrides = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="How many rows. Default: 3, or one for each of --answers.")
    ] = None,
    completion: Annotated[str | None, typer.Option(metavar="TEXT", help="Score this answer to each row.")] = None,
    answers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Score these: line i, {"completion": TEXT} or a text, to row i.'),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score answers to the first rows by the job's reward functions, and show what they return.

    Without --completion and --answers each row gets its own reference, as it is, boxed and behind ####, and an
    empty answer. Needs no model. Exit code 0 if all were scored, 1 if a function failed.

    \b
      cosmos-launch try-reward run.toml
      cosmos-launch try-reward run.toml --rows 1 --completion '<think>1+1</think>\\boxed{2}'
    """
    import tempfile

    from schema.config import Config

    if completion is not None and answers is not None:
        raise LaunchError("--completion and --answers exclude each other")
    own_answers = None if answers is None else list(read_answers(answers))[:rows]
    if own_answers == []:
        raise LaunchError(f"{answers} holds no answer")
    data, weights = _settings(config, set_ or [], os.environ)
    count = len(own_answers) if own_answers is not None else rows or 3
    with ended_by_exit(), tempfile.TemporaryDirectory(prefix="cosmos-try-") as name:
        directory = Path(name)
        (directory / "data").mkdir()
        (directory / "config.json").write_text(json.dumps(data), encoding="utf-8")
        schemes = Config.model_validate(data).data_schemes
        rewards, options = data["reward"]["environment"], ["--rows", str(count)]
        run_step(directory, "controller.data.first_rows", options, READING, rewards=rewards, data=schemes)
        read = [json.loads(line) for line in _lines(directory / "data" / "rows.jsonl")]
        if own_answers is not None and len(read) < count:
            raise LaunchError(f"{answers} has {count} answers, and the training data {len(read)} rows")
        alike = None if completion is None else {"given": completion}
        tried = own_answers if own_answers is not None else [alike or examples(row) for row in read]
        scored, printed = _score(directory, data, read, tried)
    if as_json:
        print_json({"functions": weights, "answers": scored, "printed": printed})
    else:
        typer.echo(printable("\n".join(lines(weights, read, scored, printed))))
    raise typer.Exit(EXIT_FAILED if any(answer["error"] for answer in scored) else EXIT_OK)


def examples(row: Mapping[str, Any]) -> dict[str, str]:
    """Answers from which one sees what a reward looks at: kind -> text."""
    if row.get("answer") in (None, ""):
        return {"empty": ""}
    reference = str(row["answer"])
    final = reference.rpartition("####")[2].strip()
    boxed = f"<think>…</think>\\boxed{{{final}}}"
    return {"reference": reference, "boxed": boxed, "####": f"#### {final}", "empty": ""}


def read_answers(path: Path) -> Iterator[dict[str, str]]:
    """Answers of a file, one a line. Raises LaunchError naming the line."""
    for number, line in enumerate(_lines(path), 1):
        try:
            answer = json.loads(line)
            json.dumps(answer, ensure_ascii=False).encode()  # half of a surrogate pair is not text
        except (ValueError, RecursionError) as error:
            raise LaunchError(f"{path}, line {number} is not JSON: {error}") from None
        text = answer.get("completion") if isinstance(answer, dict) else answer
        if not isinstance(text, str):
            hint = 'write a text, or an object: {"completion": "…"}'
            raise LaunchError(f"{path}, line {number} holds no answer", hint)
        yield {"given": text}


def _lines(path: Path) -> list[str]:
    """Raises LaunchError. Not `splitlines`: it also cuts at what JSON leaves as it is, such as U+2028."""
    try:
        with path.open(encoding="utf-8") as file:
            return list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from None


def _settings(
    paths: Sequence[Path], overrides: Sequence[str], env: Mapping[str, str]
) -> tuple[Record, dict[str, float]]:
    """The resolved configuration of an evaluation by the job's rewards, and their weights.

    A model that is not there is no fault here. Raises ConfigError, LaunchError.
    """
    from launcher.paths import resolved
    from launcher.preflight.checks import unset_variables
    from schema.config import Config, ConfigError
    from schema.config.base import reward_weights
    from schema.config.loading.load import load

    try:
        loaded = load(paths, overrides, env)
    except ConfigError as error:
        if any(problem.key != _MODEL for problem in error.problems):
            raise
        loaded = load(paths, [*overrides, f'{_MODEL}="any/model"'], env)
    config = loaded.config
    if config.is_evaluation or not config.is_grpo:
        reason = "is an evaluation" if config.is_evaluation else "trains on conversations, without rewards"
        hint = f"cosmos-launch --config {paths[0]} scores its answers" if config.is_evaluation else ""
        raise LaunchError(f"{paths[0]} {reason}", hint)
    if unset := unset_variables(config, env):
        raise ConfigError(loaded.placed(unset))
    data = resolved(config)
    data["evaluation"]["reward_function"] = data["train"]["train_policy"]["reward_function"]
    data["reward"] |= {"retries": 0, "num_workers": 1}
    names = Config.model_validate(data).reward_names
    weights = reward_weights(data["evaluation"]["reward_function"])
    return data, {names[function]: weight for function, weight in weights.items()}


def _score(
    directory: Path, data: Record, rows: Sequence[Record], tried: Sequence[Mapping[str, str]]
) -> tuple[list[Record], list[str]]:
    """Score each answer; also what the functions have printed."""
    lines_ = [json.dumps({**row, "responses": list(texts.values())}) for row, texts in zip(rows, tried, strict=True)]
    (directory / "data" / "evaluation.jsonl").write_text("\n".join(lines_) + "\n", encoding="utf-8")
    limit = STARTING + data["reward"]["timeout"] * sum(map(len, tried))
    environment = data["reward"]["environment"]
    output = run_step(directory, "rollout_worker.evaluate", [], limit, result="scores.jsonl", rewards=environment)
    scored = []
    for line, texts in zip(_lines(directory / "scores.jsonl"), tried, strict=True):
        scores = json.loads(line)
        columns = (scores[name] for name in ("rewards", "scores", "seconds", "errors"))
        for (kind, text), rewards, score, seconds, error in zip(texts.items(), *columns, strict=True):
            values = {"rewards": rewards, "score": score, "seconds": seconds, "error": error}
            scored.append({"row": scores["key"], "kind": kind, "completion": text, **values})
    return scored, not_logged(output)[-MOST_PRINTED:]


def lines(
    weights: Mapping[str, float], rows: Sequence[Record], scored: Sequence[Record], printed: Sequence[str]
) -> Iterator[str]:
    """The scores for people: a block per row, then what was printed and the errors in full."""
    titles = [f"{name} × {weight:g}" for name, weight in weights.items()]
    sizes = [max(8, len(title)) for title in titles]
    heads = "".join(f"  {title:>{size}}" for title, size in zip(titles, sizes, strict=True))
    errors: dict[str, int] = {}
    for row in rows:
        prompt = row["prompt"]
        prompt = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""
        yield f"{row['key']}: {_cut(prompt, 90)}"
        yield f"  the row has {', '.join(row)}"
        if isinstance(row.get("columns"), dict):
            yield f'  row["columns"] has {", ".join(row["columns"])}'
        yield f"  {'answer':<10}{'':<{WIDEST}}{heads}{'score':>10}{'ms':>9}"
        for answer in (scored_answer for scored_answer in scored if scored_answer["row"] == row["key"]):
            cells = [_number(answer["rewards"].get(name)) for name in weights]
            values = "".join(f"  {cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
            note = f"  error {errors.setdefault(answer['error'], len(errors) + 1)}" if answer["error"] else ""
            text = _cut(answer["completion"], WIDEST)
            score, taken = _number(answer["score"]), 1000 * answer["seconds"]
            yield f"  {answer['kind']:<10}{text:<{WIDEST}}{values}{score:>10}{taken:>9.1f}{note}"
        yield ""
    if printed:
        yield from ("printed by the functions:", *(f"  {line}" for line in printed), "")
    for error, number in errors.items():
        yield from (f"error {number}: {error.rstrip()}", "")
    failed = sum(answer["error"] is not None for answer in scored)
    yield (f"{failed} of {len(scored)} answers could not be scored" if failed else f"{len(scored)} answers scored")


def _cut(text: str, size: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= size else flat[: size - 1] + "…"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
