"""Rules of the model that the user names: it and its tokenizer are there, modules to import can be found."""

from __future__ import annotations

from schema.config.modules import is_importable
from schema.config.paths import exists, home_hint, local_path
from schema.config.problem import Problem
from schema.config.root import Config


def model_is_there(config: Config) -> list[Problem]:
    """A local model is a directory with a config.json; anything else is a name on the hub."""
    key, name = "policy.model_name_or_path", config.policy.model_name_or_path
    path = local_path(name)
    if path is None:
        return []
    problems = _directory_problems(key, name, "model", ("config.json",))
    revision = config.policy.model_revision
    if not problems and revision:
        key, message = "policy.model_revision", "a local model has no revisions"
        related = ("policy.model_name_or_path",)
        problems.append(Problem(key, message, revision, "leave it out", related=related))
    return problems


def tokenizer_is_there(config: Config) -> list[Problem]:
    """A local tokenizer is a directory with the files of one."""
    name = config.policy.tokenizer_name_or_path
    if name is None or local_path(name) is None:
        return []
    files = ("tokenizer_config.json", "tokenizer.json")
    return _directory_problems("policy.tokenizer_name_or_path", name, "tokenizer", files)


def _directory_problems(key: str, name: str, kind: str, files: tuple[str, ...]) -> list[Problem]:
    """What is wrong with a local directory that must hold one of some files."""
    path = local_path(name)
    if path is None:
        return []
    if not exists(path):
        relative = "paths are relative to the current directory; a name on the hub has the form owner/name"
        return [Problem(key, f"{name} does not exist", name, home_hint(name) or relative)]
    if not path.is_dir():
        hint = f"name the directory of the {kind}"
        return [Problem(key, f"{name} is a file, not a {kind}'s directory", name, hint)]
    if not any(exists(path / file) for file in files):
        hint = "name the directory that `save_pretrained` wrote"
        return [Problem(key, f"{name} is no {kind}: it has no {' or '.join(files)}", name, hint)]
    return []


def modules_can_be_imported(config: Config) -> list[Problem]:
    """External modules are found where Python looks. They are not imported: that runs their code."""
    problems = []
    for name in config.policy.external_modules:
        if not all(part.isidentifier() for part in name.split(".")):
            message, hint = f"`{name}` is not the name of a module", "write it with dots: package.module"
        elif not is_importable(name):
            message = f"there is no module `{name.partition('.')[0]}`"
            hint = "install it in this environment, or put its directory into PYTHONPATH"
        else:
            continue
        problems.append(Problem("policy.external_modules", message, name, hint))
    return problems


def code_is_trusted(config: Config) -> list[Problem]:
    """Warning: a model's own code does what it likes."""
    if not config.policy.trust_remote_code:
        return []
    key, name = "policy.trust_remote_code", config.policy.model_name_or_path
    message = f"Python code that comes with {name} or its tokenizer runs on these machines"
    return [Problem(key, message, True, "leave it out unless the model needs it and you trust its authors")]


MODEL_RULES = (model_is_there, tokenizer_is_there, modules_can_be_imported)
MODEL_WARNINGS = (code_is_trusted,)
