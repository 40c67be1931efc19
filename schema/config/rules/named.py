"""Rules of the models that are named: their files are there and their config.json is read; modules are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from schema.config.model_facts import BrokenModelError, FindFile, ModelFacts, local_file, read_facts
from schema.config.modules import is_importable
from schema.config.paths import address_fault, exists, home_hint, local_path
from schema.config.problem import Absent, Problem
from schema.config.root import Config

MODEL, CRITIC = "policy.model_name_or_path", "critic.model_name_or_path"
_REFERENCE = "reference.model_name_or_path"
_Read = tuple[ModelFacts | None, list[Problem]]
"""A model's facts, or None and what is wrong with its config.json; nothing is wrong with one that is not here."""


def policy_facts(config: Config, find: FindFile) -> _Read:
    """The facts of the policy's model, or why they cannot be read."""
    return facts_at(MODEL, *_named(config)[MODEL], find)


def named_models(config: Config, find: FindFile) -> dict[str, _Read]:
    """By key, the models that the policy's ranks compute: its own, and others where they are named, teachers too."""
    return {key: facts_at(key, *model, find) for key, model in _named(config).items()}


def _named(config: Config) -> dict[str, tuple[str, str | None, Mapping[str, Any]]]:
    """By the key that names it: a model's directory or hub name, its revision, what replaces entries of its file."""
    policy, critic = config.policy, config.critic
    models: dict[str, tuple[str, str | None, Mapping[str, Any]]] = {
        MODEL: (policy.model_name_or_path, policy.model_revision, policy.override_config)
    }
    if config.has_reference and config.reference.model_name_or_path is not None:
        models[_REFERENCE] = (config.reference.model_name_or_path, None, {})
    if config.has_critic and critic.model_name_or_path is not None:
        models[CRITIC] = (critic.model_name_or_path, critic.model_revision, critic.override_config)
    for number, teacher in enumerate(config.teacher):
        if teacher.is_local:
            models[f"teacher[{number}].model"] = (str(teacher.model), None, {})
    return models


def facts_at(key: str, name: str, revision: str | None, override: Mapping[str, Any], find: FindFile) -> _Read:
    """The facts of the model that a key names, or why they cannot be read."""
    try:
        return read_facts(name, revision, override, find), []
    except BrokenModelError as error:
        hint = "write the model again with `save_pretrained`, or name another"
        return None, [Problem(key, str(error), name, hint)]


def model_is_there(config: Config) -> Iterator[Problem]:
    """A local model is a directory with a config.json; anything else is a name on the hub."""
    name, revision = config.policy.model_name_or_path, config.policy.model_revision
    problems = directory_problems(MODEL, name, "model", ("config.json",))
    yield from problems
    if not problems:
        yield from _revision_problems("policy", name, revision)
    critic = config.critic
    if config.has_critic:
        yield from _revision_problems("critic", critic.model_name_or_path or name, critic.model_revision)


def _revision_problems(section: str, name: str, revision: str | None) -> Iterator[Problem]:
    if revision and local_path(name) is not None:
        message, related = "a local model has no revisions", (f"{section}.model_name_or_path",)
        yield Problem(f"{section}.model_revision", message, revision, "leave it out", related=related)


def tokenizer_is_there(config: Config) -> list[Problem]:
    """A local tokenizer is a directory with the files of one."""
    name = config.policy.tokenizer_name_or_path
    if name is None:
        return []
    files = ("tokenizer_config.json", "tokenizer.json")
    return directory_problems("policy.tokenizer_name_or_path", name, "tokenizer", files)


def directory_problems(key: str, name: str, kind: str, files: tuple[str, ...]) -> list[Problem]:
    """Report the fault of a local directory that must hold one of some files; nothing with a name on the hub."""
    path = local_path(name)
    if path is None:
        return []
    if fault := address_fault(name, f"a {kind} is"):
        return [Problem(key, fault[0], name, fault[1])]
    if not exists(path):
        relative = "paths are relative to the current directory; a name on the hub has the form owner/name"
        return [Absent(key, f"{name} does not exist", name, home_hint(name) or relative)]
    if not path.is_dir():
        hint = f"name the directory of the {kind}"
        return [Problem(key, f"{name} is a file, not a {kind}'s directory", name, hint)]
    if kind == "model" and exists(path / "adapter_config.json"):
        hint = "merge them into their base (`merge_and_unload` of peft), save that and name it"
        return [Problem(key, f"{name} holds adapters (adapter_config.json), which are not read", name, hint)]
    if not any(exists(path / file) for file in files):
        hint = "name the directory that `save_pretrained` wrote"
        return [Problem(key, f"{name} is not a {kind}: it has no {' or '.join(files)}", name, hint)]
    return []


def modules_can_be_imported(config: Config) -> Iterator[Problem]:
    """External modules are found where Python looks. They are not imported: that runs their code."""
    for name in config.policy.external_modules:
        if not all(part.isidentifier() for part in name.split(".")):
            message, hint = f"`{name}` is not the name of a module", "write it with dots: package.module"
        elif not is_importable(name):
            message = f"the module `{name.partition('.')[0]}` cannot be found"
            hint = "install it in this environment, or put its directory into PYTHONPATH"
        else:
            continue
        yield Problem("policy.external_modules", message, name, hint)


def unread_models(config: Config) -> Iterator[Problem]:
    """Warning, where a configuration is checked: models that are not on this machine, so that the rules pass them."""
    for key, (name, revision, _) in _named(config).items():
        if local_file(name, revision, "config.json") is not None:
            continue
        message = (
            f"{name} is not on this machine: meshes, lengths and options are not checked yet against its heads, "
            "layers, experts, positions and vocabulary"
        )
        hint = "workers check them before they load weights; to check them now, download its config.json"
        yield Problem(key, message, name, hint)


NAMED_RULES = (model_is_there, tokenizer_is_there, modules_can_be_imported)
