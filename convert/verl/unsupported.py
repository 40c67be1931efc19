"""The keys of verl without a counterpart: its part of the closed list of `convert.engine.unsupported`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from convert.engine.keys import words
from convert.engine.table import Table
from convert.engine.unsupported import EITHER_WAY, ClosedList

_T = TypeVar("_T")

LISTED = Table(Path(__file__).with_name("unsupported.txt"), {"EITHER_WAY": EITHER_WAY})


def _of_engine(table: Mapping[str, _T]) -> dict[str, _T]:
    """The entries of a role's tables of engines as those of `engine` in an SFT file, which is one of them."""
    tables = ("fsdp_config.", "megatron.", "veomni.")
    return {f"engine.{key.partition('.')[2]}": value for key, value in table.items() if key.startswith(tables)}


_ROLE = LISTED.reasons("role")
_REASONS = {
    **LISTED.reasons("none"),
    **_of_engine(_ROLE),
    **LISTED.reasons("none after engine"),
    **{key: reason for key, reason in _ROLE.items() if key.startswith("optim.")},
    **LISTED.reasons("none at the end"),
}
_METHOD = {
    **LISTED.neutral("method"),
    **_of_engine(LISTED.neutral("method of a role")),
    **LISTED.neutral("method after engine"),
}

_OF_FORKS = words("retriever reranker do_search max_turns env rllm es_manager agent_proxy ctx_manager agentlightning")
_DECISIVE = words(
    "actor_rollout_ref algorithm critic data rollout reward reward_model reward_manager custom_reward_function "
    "sandbox_fusion distillation async_training model optim engine"
)
"""The tables in which every key may decide what is trained; `model`, `optim` and `engine` belong to SFT files.

_OF_FORKS: tables and keys at the top of files of systems that are made from verl."""

_PLUMBING = re.compile(
    r"[_.].*|x-.*|hydra|cluster|slurm|launch\w*|docker|log|logs|logging|logger|loggers|trackers?|tracking|wandb|swanlab|"
    r"mlflow|tensorboard|ray(_.*)?|runtime(_env)?|environment|env_vars|envs|paths?|notes|meta|metadata|resources|"
    r"run|setup|monitor\w*|debug|nsight|nccl|(global_)?profil\w+|checkpoint\w*|transfer_queue|evaluation|"
    r"trainer\.((log|logging|val|valid\w*|test|eval\w*|save|resume|ckpt|checkpoint\w*|project|experiment)(_(?!prob).*)?|"
    r"(.*_)?(ray|hdfs|wandb|swanlab|mlflow|tensorboard|nsight|profil\w+|timeout|gpus?|nodes|nnodes|device|debug|"
    r"verbose|proxy|runtime|legacy)(_.*)?|.*_ckpt_(to|in|after)_.*)"
)
"""Tables at the top that are not verl's, and keys of `trainer`, that say where a job runs and what it shows."""

VERL = ClosedList(_REASONS, _METHOD, tables=(*_DECISIVE, *_OF_FORKS), plumbing=_PLUMBING, mixed=("trainer",))
