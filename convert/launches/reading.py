"""The configuration that a file holds, or that the job starts which it describes.

TOML, YAML    the file itself, with Hydra's words applied and what its `defaults` name
verl          its module's configuration, with Hydra's words; verl's own files come from --search-path, or what
              they say is that of the converter's table of verl's defaults
ROLL          the YAML that --config_path and --config_name name
cosmos-rl     the TOML that --config names
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convert.engine.foreign import script_kind
from convert.engine.keys import leaves, lookup, store
from convert.engine.rules import ABSENT
from convert.engine.source import Source, read_file, read_source
from convert.hydra.compose import compose
from convert.hydra.words import Act, BadWord, Override, parse_word
from convert.launches.programs import OWN_FILES, Program, engine_keys, is_choice, program
from convert.launches.shell import launches_of
from convert.launches.words import Launch, Script, launch_of_text
from schema.config.problem import ConfigError, Problem


@dataclass(frozen=True)
class Configuration:
    """A configuration that is converted. notes: what to look at.

    system, kind: where they are known by how the job is started.
    """

    source: Source
    system: str | None = None
    kind: str | None = None
    notes: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConversionRequest:
    """A request for the configuration of a file.

    words: of Hydra, after those of the file. search_path: directories of named files.
    number: of a script's job, from 1; None: its only one. answers: what the job depends on, by name. home: the
    directory that a script sees as its user's.
    """

    words: Sequence[str] = ()
    search_path: Sequence[Path] = ()
    number: int | None = None
    answers: Mapping[str, str] = field(default_factory=dict)
    home: str = ""


def configuration(path: Path, request: ConversionRequest) -> Configuration:
    """The configuration that a file is or starts. Raises ConfigError."""
    words, search_path = request.words, request.search_path
    overrides = _overrides(words)
    text = read_file(path)
    if script_kind(text, path.name) == "a shell script":
        started, notes = _of_script(launches_of(path, text, request.answers, request.home), path, request.number)
        job = configuration_of(replace(started, words=(*started.words, *words)), search_path)
        return replace(job, notes=(*notes, *job.notes), env=started.env)
    if request.answers or request.number is not None:
        message = "is not a shell script, which alone has variables and several jobs"
        raise ConfigError([Problem("", message, hint="leave out --env and --launch", file=str(path))])
    if (launch := launch_of_text(text, str(path), path.parent)) is not None:
        return configuration_of(replace(launch, words=(*launch.words, *words)), search_path)
    source = read_source(text, str(path))
    if _is_yaml(source, path) and (overrides or isinstance(source.data.get("defaults"), list)):
        return composed(path, source, overrides, search_path)
    if overrides:
        message = f"`{words[0]}` is a word of Hydra, which does not read TOML"
        raise ConfigError([Problem("", message, hint="change the key in the file", file=str(path))])
    return Configuration(source)


def _is_yaml(source: Source, path: Path) -> bool:
    return path.suffix != ".toml" and not source.is_ours


def _overrides(words: Sequence[str]) -> list[Override]:
    overrides, problems = [], []
    for word in words:
        try:
            overrides.append(parse_word(word))
        except BadWord as error:
            problems.append(Problem("", f"the word `{word[:80]}`: {error}"))
    if problems:
        raise ConfigError(problems)
    return overrides


def _of_script(script: Script, path: Path, number: int | None) -> tuple[Launch, tuple[str, ...]]:
    """The requested job of a script, and notes. Raises ConfigError: which of several, or on what it depends."""
    launches, name = script.launches, str(path)
    if number is None and len(launches) > 1:
        listed = "; ".join(f"{i}: line {launch.line}, {launch.shown()}" for i, launch in enumerate(launches[:9], 1))
        others = f"; and {len(launches) - 9} more" if len(launches) > 9 else ""
        message = f"starts {len(launches)} jobs: {listed}{others}"
        raise ConfigError([Problem("", message, hint="choose one: --launch N", file=name)])
    if number is not None and launches and not 1 <= number <= len(launches):
        message = f"--launch {number}: the script starts {len(launches)} job{'s'[: len(launches) > 1]}"
        raise ConfigError([Problem("", message, hint=f"a number from 1 to {len(launches)}", file=name)])
    launch = launches[(number or 1) - 1] if launches else None
    if asked := script.asked_by(launch):
        problems = [
            Problem("", f"the job depends on {what}", hint=f"--env {shlex.quote(f'{key}=VALUE')}", file=name)
            for key, what in asked.items()
        ]
        raise ConfigError(problems)
    assert launch is not None
    return launch, script.notes


def composed(path: Path, source: Source, words: Sequence[Override], folders: Sequence[Path]) -> Configuration:
    """A YAML with what its `defaults` name, and words applied. Raises ConfigError."""
    result = compose(path, words, folders, OWN_FILES)
    notes = [f"{note}, which Hydra refuses" for note in result.notes]
    if others := [file for file in result.files if file != path]:
        notes.append(f"composed with {_listed([os.path.normpath(file) for file in others])}")
    system = "verl" if result.left_out else None
    if result.left_out:
        notes.append(_left_out(result.left_out))
    return Configuration(replace(source, data=result.data, lines=result.lines), system, None, tuple(notes))


def configuration_of(launch: Launch, search_path: Sequence[Path]) -> Configuration:
    """The configuration of a job. search_path: where named files are looked for. Raises ConfigError."""
    if launch.system == "verl":
        return _of_verl(launch, search_path)
    options = launch.options
    if launch.system == "roll":
        name, folder = options.get("config_name", ""), options.get("config_path", "")
        names = [f"{folder}/{name}.yaml".lstrip("/") if not folder.startswith("/") else f"{folder}/{name}.yaml"]
        names.append(f"{name}.yaml")
        remedy = "--config_path and --config_name"
    else:
        name = options.get("config", "")
        names, remedy = [name], "--config"
    if not name:
        raise _problem(launch, f"{launch.program} is started without {remedy}", "convert its configuration itself")
    path = _first(names, [Path(), launch.folder, *_parents(launch.folder), *search_path])
    if path is None:
        hint = "convert the file itself, or name its directory: --search-path DIR"
        raise _problem(launch, f"names the configuration {names[0]}, which is not there", hint)
    text = read_file(path)
    source = read_source(text, str(path))
    note = (f"{launch.file} starts {launch.program} with {path}",)
    overrides = launch.overrides()
    if _is_yaml(source, path) and (overrides or isinstance(source.data.get("defaults"), list)):
        composition = composed(path, source, overrides, search_path)
        return replace(composition, notes=(*note, *composition.notes))
    if overrides:
        message = f"`{overrides[0].word}` is a word of Hydra, which {launch.program} does not read"
        raise _problem(launch, message, "change the key in the file")
    return Configuration(source, launch.system, None, note)


def _of_verl(launch: Launch, search_path: Sequence[Path]) -> Configuration:
    started, options, words = program(launch.program), launch.options, launch.overrides()
    if started.kind == "sft":  # whose processes are torchrun's
        ranks = {key: n for key, n in launch.ranks.items() if key not in {word.key for word in words}}
        words += [parse_word(f"++{key}={n}") for key, n in ranks.items()]
    name = (options.get("config_name") or options.get("cn") or started.config).removesuffix(".yaml")
    named = options.get("config_path") or options.get("cp") or ""
    folders = (
        [Path(named)] if named.startswith("/") else [place / named for place in (Path(), launch.folder) if named]
    )
    folders += [place for root in search_path for place in (root, *(root / below for below in started.folders))]
    path = _first([f"{name}.yaml"], folders)
    line = "" if launch.line in (None, 1) else f" in line {launch.line}"
    where = (f"{launch.file} starts {launch.program}{line}",)
    if path is not None:
        others = [folder for folder in folders if folder.is_dir()]
        composition = composed(path, Source(launch.file, {}), words, others)
        source = replace(composition.source, lines={})  # of files, not of the words
        return Configuration(source, "verl", started.kind, (*where, *composition.notes))
    return _of_words(launch, started, name, words, where)


def _of_words(
    launch: Launch, started: Program, name: str, words: Sequence[Override], notes: tuple[str, ...]
) -> Configuration:
    """The keys that the words write; all others have the converter's defaults of verl."""
    data: dict[str, Any] = {}
    engine, chosen = engine_keys(started.kind, name, words)
    for key, value in chosen.items():
        store(data, tuple(key.split(".")), value)
    removed = []
    for word in words:
        if word.act is Act.REMOVE:
            removed.append(word.word)
        elif not is_choice(word) and not _place(data, word):
            message = f"the word `{word.word[:80]}`: a part of `{word.key}` has a value in front of it"
            raise _problem(launch, message, "keep one of the two")
    for key, value in started.defaults.items():
        if lookup(data, tuple(key.split(".")), ABSENT) is ABSENT and not _twin(data, key):
            store(data, tuple(key.split(".")), value)
    if started.config not in (name, f"{name}_trainer") and name not in OWN_FILES:
        hint = "its directory: --search-path DIR"
        raise _problem(launch, f"is configured by {name}.yaml, which is not here", hint)
    said = [*notes, _left_out((name,))]
    if engine:
        said.append(f"{engine} trains, as the names of files say")
    if removed:
        said.append(
            f"{_listed(removed)} removes keys of verl's files, which are not here: their defaults are written"
        )
    lines = {path: launch.line for path, _ in leaves(data)} if launch.line else {}
    return Configuration(Source(launch.file, data, lines), "verl", started.kind, tuple(said))


def _place(data: dict[str, Any], word: Override) -> bool:
    if isinstance(word.value, dict) and word.value:
        return all(store(data, (*word.parts, *map(str, path)), value) for path, value in leaves(word.value))
    return store(data, word.parts, word.value)


def _twin(data: dict[str, Any], key: str) -> bool:
    """Whether another spelling of a default's key is written: Megatron's, or that of steps for a share."""
    twins = {"optim.lr_scheduler_type": ("optim.lr_decay_style", "optim.warmup_style", "optim.lr_scheduler")}
    return any(lookup(data, tuple(twin.split(".")), ABSENT) is not ABSENT for twin in twins.get(key, ()))


def _left_out(names: Sequence[str]) -> str:
    return (
        f"{_listed([f'{name}.yaml' for name in names])} of verl itself is not here: what it says is that of the "
        "converter's table of verl's defaults; --search-path DIR reads your verl's own (verl/trainer/config)"
    )


def _first(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    places = (folder / name for folder in folders for name in names)
    return next((place for place in places if place.is_file()), None)


def _parents(folder: Path) -> list[Path]:
    """The directories around that of a script: jobs are started from the root of their repository."""
    return list(folder.absolute().parents)[:4]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _problem(launch: Launch, message: str, hint: str) -> ConfigError:
    return ConfigError([Problem("", message, hint=hint, file=launch.file, line=launch.line)])
