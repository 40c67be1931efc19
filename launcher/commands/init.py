"""`cosmos-launch init`: write a recipe to a file, with everything that it needs.

    recipe ─▶ Fit (this machine, or what the options say) ─▶ text ─▶ checked ─▶ run.toml
                                                             ├─▶ config.schema.json, which editors complete from
                                                             ├─▶ reward.py, a reward of one's own to start from
                                                             └─▶ a tiny model, where the recipe trains one

Nothing that is there is replaced without --force, and nothing is written unless all of it can be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.options import AsJson, report
from launcher.errors import LaunchError
from launcher.recipes import RECIPES, REWARD, REWARD_FILE, Fit, Recipe

SCHEMA_FILE = "config.schema.json"
STDOUT = Path("-")
ADDITION_RUNS = Path("outputs/addition")


def init(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Which one; without it they are listed.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write; - prints it.")
    ] = Path("run.toml"),
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A model in place of the recipe's: a directory, there already or not, or a name."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to write it for. Default: those found.")] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="vllm|transformers", help="Default: vllm where it is installed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented configuration to start from."""
    if recipe is None:
        recipes = {name: listed.title for name, listed in RECIPES.items()}
        report(as_json, "\n".join(listing()), recipes=recipes)
        return
    written = start(InitRequest(recipe, output, model or "", gpus, engine or "", force), os.environ)
    report(as_json, "\n".join(lines(written)), **asdict(written))


@dataclass(frozen=True, slots=True)
class InitRequest:
    """The options of the command line; empty, or None, where one is left out."""

    recipe: str
    output: Path = Path("run.toml")
    model: str = ""
    gpus: int | None = None
    engine: str = ""
    force: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """The result of `init`. files: what each is, by its path; empty where the configuration goes to the screen.

    fits: the machine. notes: what is to be known. commands: what to do next.
    """

    recipe: str
    fits: str
    configuration: str
    files: dict[str, str]
    notes: list[str]
    commands: list[str]


def lines(written: Written) -> list[str]:
    """Describe the result for people."""
    if not written.files:
        return [written.configuration.rstrip("\n")]
    return [
        *(f"{path}: {description}" for path, description in written.files.items()),
        *(f"note: {note}" for note in written.notes),
        "",
        *written.commands,
    ]


def listing() -> list[str]:
    """The recipes, for people."""
    size = max(map(len, RECIPES)) + 2
    rows = [f"  {recipe.name:<{size}}{recipe.title}" for recipe in RECIPES.values()]
    return ["Recipes:", *rows, "", "cosmos-launch init grpo -o run.toml", "cosmos-launch init addition-sft"]


def start(request: InitRequest, env: Mapping[str, str]) -> Written:
    """Write everything. Raises LaunchError (nothing was written), ConfigError."""
    from launcher.commands.tiny_model import write_tiny_model

    recipe = _recipe(request.recipe)
    fit = fit_of(request, env)
    to_screen = request.output == STDOUT
    name = "run.toml" if to_screen else str(request.output)
    model_dir = Path(name).with_name(Path(name).stem + "-model")
    model = request.model or (str(model_dir) if recipe.makes_model else "")
    if recipe.needs_model and not model:
        model = _trained_model()
    longest = _positions(model)
    text = recipe.text(fit, name, model, longest)
    makes_model = recipe.makes_model and not request.model
    notes = absent = _absent(request.model)
    if text != recipe.text(fit, name, model):
        notes = [f"policy.model_max_length = {longest}: {model} has no more positions"]
    if to_screen and makes_model:
        raise LaunchError(
            f"{recipe.name} makes a model next to its file, and -o - does not write one",
            "-o run.toml, or name a model with --model",
        )
    if to_screen:
        return Written(recipe.name, recipe.words(fit), text, {}, notes, [])
    _check_places(request, model_dir if makes_model else None)
    _check(text, model_is_absent=bool(absent) or makes_model)
    files = {name: f"{recipe.name}, for {recipe.words(fit)}"}
    try:
        request.output.parent.mkdir(parents=True, exist_ok=True)
        if makes_model:
            write_tiny_model(model_dir)
            files[str(model_dir)] = "the model that it trains, 0.33M random parameters"
        request.output.write_text(text, encoding="utf-8")
        schema, reward = (request.output.with_name(name) for name in (SCHEMA_FILE, REWARD_FILE))
        files |= {str(schema): description} if (description := _write_schema(schema)) else {}
        files |= {} if recipe.supervised else {str(reward): _write_reward(request.output)}
    except OSError as error:
        raise LaunchError(f"{error.filename or request.output} cannot be written: {error.strerror}") from None
    commands = [f"cosmos-launch validate {name}", f"cosmos-launch --config {name}"]
    if not recipe.supervised:
        commands.insert(1, f"cosmos-launch try-reward {name}")
    return Written(recipe.name, recipe.words(fit), text, files, notes, commands)


def _absent(model: str) -> list[str]:
    """A note where a model is a path at which nothing is yet: it may be copied or trained until the start."""
    from schema.config.paths import exists, local_path

    path = local_path(model) if model and not model.startswith("~") else None
    if path is None or exists(path):
        return []
    return [f"{model} is not there yet: validate and a start refuse it until it is"]


def _positions(model: str) -> int | None:
    """The longest sequence of a model; None: not known, or the check says what is wrong with it."""
    from schema.config.model_facts import BrokenModelError, read_facts

    try:
        facts = read_facts(model, None, {}) if model else None
    except BrokenModelError:
        return None
    return facts.longest if facts else None


def _check(text: str, model_is_absent: bool) -> None:
    """Raises ConfigError: a recipe that this machine, or the model, does not suit."""
    import tomllib

    from schema.config import check_config

    data = tomllib.loads(text)
    if model_is_absent:
        data["policy"]["model_name_or_path"] = "any/model"
    check_config(data)


def fit_of(request: InitRequest, env: Mapping[str, str]) -> Fit:
    """The machine as the options say, else as it is. Raises LaunchError."""
    from launcher.plan.machine import find_machine, has_module
    from launcher.preflight.packages import C_COMPILERS, has_compiler
    from schema.config.backends import BACKENDS

    engine = request.engine or ("vllm" if has_module("vllm") else "transformers")
    if engine not in BACKENDS:
        raise LaunchError(f"--engine {engine} is unknown", f"the engines are {' and '.join(BACKENDS)}")
    gpus = len(find_machine(env).gpus) if request.gpus is None else request.gpus
    return Fit(gpus, engine, compiles=gpus > 0 and has_compiler(C_COMPILERS, "CC", env))


def _recipe(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]
    from schema.config.loading.explain import closest

    close = closest(name, RECIPES)
    hint = f"did you mean {close}?" if close else f"the recipes are {', '.join(RECIPES)}"
    raise LaunchError(f"unknown recipe {name!r}", hint)


def _trained_model() -> str:
    """The newest model that addition-sft has left here."""
    from launcher.plan.rundir import newest

    run = newest(ADDITION_RUNS)
    if run is None or not (run.path / "final" / "config.json").is_file():
        raise LaunchError(
            "addition-grpo goes on from a model that addition-sft has trained, and none was found in "
            f"{ADDITION_RUNS}",
            "cosmos-launch init addition-sft && cosmos-launch --config run.toml, or name one with --model",
        )
    return str(run.path / "final")


def _check_places(request: InitRequest, model: Path | None) -> None:
    if request.output.is_dir():
        raise LaunchError(f"{request.output} is a directory", f"-o {request.output / 'run.toml'}")
    existing = [path for path in (request.output, model) if path is not None and path.exists()]
    if existing and not request.force:
        raise LaunchError(f"{existing[0]} already exists", "choose another name with -o, or --force to replace it")


def _write_schema(path: Path) -> str:
    """The schema for editors, next to the file; an existing one that differs is left alone."""
    from schema.config.reference.export import schema_text

    text = schema_text()
    if path.exists():
        same = path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text
        return "" if same else "left as it is (cosmos-launch schema -o writes the one of this version)"
    path.write_text(text, encoding="utf-8")
    return "what editors complete and check with"


def _write_reward(config: Path) -> str:
    """A reward to start from, next to the configuration; an existing file is left alone."""
    path = config.with_name(REWARD_FILE)
    if path.exists():
        return "left as it is"
    text = REWARD.replace("{config}", str(config)).replace("{file}", str(path))
    path.write_text(text, encoding="utf-8")
    return f"a reward of your own to start from, which a comment in {config} names"
