"""Models where a worker loads them: files are downloaded if they are not there yet, and judged by the same rules.

validate, start          check_rules(config)                        what is on that machine
trainer, replica         refusal(config, fetched_by(cached_file))   everything, before weights are loaded
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from schema.config.model_facts import FindFile, local_file
from schema.config.modules import CANNOT_LOAD
from schema.config.problem import Absent
from schema.config.root import Config
from schema.config.rules import check_models


def fetched_by(download: Callable[..., str | None]) -> FindFile:
    """Where files of models are, each downloaded once. download: `cached_file` of transformers, by which it loads.

    A model without such a file, or out of reach, has none here: loading it reports why.
    """

    @cache
    def find(name: str, revision: str | None, file: str) -> Path | None:
        try:
            path = download(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        except CANNOT_LOAD:
            return None
        return None if path is None else Path(path)

    return find


def of_policy(config: Config, find: FindFile) -> FindFile:
    """The same for the policy's model and tokenizer. Other models, which a rollout replica does not load, are not
    downloaded."""
    names = {config.policy.model_name_or_path, config.policy.tokenizer[0]}
    return lambda name, revision, file: (find if name in names else local_file)(name, revision, file)


def refusal(config: Config, find: FindFile) -> str:
    """All that the rules have against models and meshes, as `validate` shows it; "" where they have nothing.

    A directory that is absent here passes: a replica does not load each model of the job.
    """
    problems = check_models(config, find)
    return "\n".join(problem.render() for problem in problems if not isinstance(problem, Absent))
