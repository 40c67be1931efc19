"""The command `cosmos-launch eval`: its arguments, and what they mean together."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launcher.commands.options import Overrides
from launcher.errors import LaunchError

if TYPE_CHECKING:
    from launcher.evaluation.settings import Settings

REWARD = "reward_function"
Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="A run (its trained model, else the newest checkpoint), a checkpoint, a directory, a name of the hub.",
    ),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Data, rewards and engine. Unset: those of the first run that is named.",
    ),
]
SampleCount = Annotated[int | None, typer.Option("--samples", "-n", min=1, help="Answers to each prompt.")]
Temperature = Annotated[float | None, typer.Option("--temperature", min=0.0, help="0: greedy.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Where results go. Unset: <train.output_dir>/eval-<time>."),
]
Resumed = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the evaluation in this directory.")
]
Engine = Annotated[
    Literal["vllm", "transformers"] | None, typer.Option("--engine", help="Instead of rollout.backend.")
]
AnswersFile = Annotated[
    Path | None,
    typer.Option("--answers", metavar="FILE", help="Score the answers of this file; nothing is generated."),
]


def eval_(
    models: Models = None,
    config: ConfigFiles = None,
    set_: Overrides = None,
    samples: SampleCount = None,
    temperature: Temperature = None,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=-1, help="-1: off.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")] = None,
    pass_score: Annotated[float | None, typer.Option("--pass-score", help="Least score that passes.")] = None,
    engine: Engine = None,
    replicas: Annotated[int | None, typer.Option("--replicas", min=1, help="Rollout replicas.")] = None,
    output: Output = None,
    resume: Resumed = None,
    answers: AnswersFile = None,
) -> None:
    """Generate answers with one model or several, score them, and compare: mean@n, pass@k, maj@n by data source.

    Prompts, rewards and how answers are drawn come from [validation] of the configuration; the options change it for
    this evaluation. Each model has a job of its own, one after the other, without a trainer. What was interrupted
    goes on with --resume, or with the same command and the same -o.

    \b
      cosmos-launch eval --config run.toml                                the configuration's own model
      cosmos-launch eval outputs/20260131120000                           what a run has trained
      cosmos-launch eval outputs/a outputs/b/checkpoints/step-00000040 --config run.toml -n 8 --temperature 0.6
      cosmos-launch eval Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B --config run.toml --engine vllm --replicas 4 -o compared
      cosmos-launch eval --resume compared
      cosmos-launch eval --answers answers.jsonl --config run.toml        score answers that are there

    Writes DIR/eval.json (all numbers with 95 % intervals), DIR/<model>.answers.jsonl, and a run directory for each
    model. Exit code 0 if all answers of all models were scored, 1 if a job failed or some have no score.
    """
    from launcher.evaluation.settings import Sampling, Settings

    sampling = Sampling(samples, temperature, top_p, top_k, max_tokens, pass_score)
    drawn = sampling != Sampling() or engine is not None or replicas is not None
    if resume is not None:
        if models or config or set_ or output or answers or drawn:
            raise LaunchError("--resume goes on with an evaluation as it was begun", "leave all else out")
        raise typer.Exit(_go_on(resume))
    if answers is not None:
        if models or output or sampling != Sampling(pass_score=pass_score) or engine or replicas:
            hint = "leave models, and options of generation, out; results are in a run directory"
            raise LaunchError("--answers scores a file, and nothing is generated", hint)
        raise typer.Exit(_score_file(answers, config or [], set_ or [], pass_score))
    named = models or [""]
    settings = Settings(_configs(config or [], named), set_ or [], sampling, engine or "", replicas)
    raise typer.Exit(_compare(settings, named, output))


def _configs(given: Sequence[Path], models: Sequence[str]) -> Sequence[Path]:
    from launcher.evaluation.models import run_of

    if given:
        return given
    runs = [run for model in models if model and (run := run_of(model)) is not None and run.config_toml.is_file()]
    if not runs:
        raise LaunchError("no configuration is named", "cosmos-launch eval --config run.toml, or name a run")
    return [runs[0].config_toml]


def _compare(settings: Settings, named: Sequence[str], output: Path | None) -> int:
    from launcher.evaluation import run
    from launcher.evaluation.models import EvaluatedModel, find_models
    from launcher.paths import absolute
    from schema.config.loading.load import load

    if output is None:
        config = load(settings.configs, settings.overrides, os.environ).config
        stamp = time.strftime("%Y%m%d%H%M%S")
        output = Path(config.train.output_dir) / f"eval-{stamp}"
    directory = Path(absolute(str(output)))
    if named == [""]:
        config = load(settings.configs, settings.overrides, os.environ).config
        models = [EvaluatedModel("model", "", config.policy.model_name_or_path)]
    else:
        models = find_models(named, directory)
    return run.run(run.prepared(settings, models, directory, os.environ), os.environ)


def _go_on(directory: Path) -> int:
    from launcher.evaluation import run
    from launcher.paths import absolute

    return run.run(run.earlier(Path(absolute(str(directory))), os.environ), os.environ)


def _score_file(answers: Path, configs: Sequence[Path], overrides: Sequence[str], pass_score: float | None) -> int:
    """Score a file as `[evaluation]` does, by its rewards there, else by those of validation."""
    from launcher.job.launch import launch
    from launcher.job.request import LaunchRequest
    from launcher.paths import resolved
    from schema.config.loading.load import load
    from schema.config.loading.tomlwrite import dumps

    if not configs:
        raise LaunchError("no configuration is named", "cosmos-launch eval --answers FILE --config run.toml")
    if not answers.is_file():
        hint = 'name a file of which each line is {"prompt": TEXT, "responses": [TEXT, …], "answer": TEXT}'
        raise LaunchError(f"{answers} is not a file", hint)
    config = load(configs, overrides, os.environ).config
    data, written = resolved(config), config.evaluation.model_fields_set
    common = config.validation
    for label, of_set in common.sets.items():
        if REWARD not in written and of_set.reward_weights != common.reward_weights:
            raise LaunchError(
                f"answers of a file are scored by one function, and the validation set {label!r} has one of its own",
                "name it for this file: --set evaluation.reward_function=…",
            )
        if pass_score is None and "pass_score" not in written and of_set.pass_score != common.pass_score:
            raise LaunchError(
                f"answers of a file pass with one score, and the validation set {label!r} has one of its own",
                "name it for this file: --pass-score",
            )
    section = data["evaluation"]
    section["dataset"] |= {"name": "", "files": [str(answers.absolute())], "custom_class": "", "part": []}
    section["reference_column_name"] = section["reference_column_name"] or "answer"
    if config.is_grpo and REWARD not in written:
        section[REWARD] = data["validation"][REWARD] or data["train"]["train_policy"][REWARD]
    if "pass_score" not in written:
        section["pass_score"] = config.validation.pass_score
    section |= {} if pass_score is None else {"pass_score": pass_score}
    # Nothing else of the configuration has an effect, and what has none is warned of.
    whole = {name: data[name] for name in ("evaluation", "reward", "custom")}
    whole["train"] = {"output_dir": data["train"]["output_dir"]}
    with TemporaryDirectory(prefix="cosmos-eval-") as directory:
        path = Path(directory) / "evaluation.toml"
        path.write_text(dumps(whole), encoding="utf-8")
        return launch(LaunchRequest([path], [], os.environ))
