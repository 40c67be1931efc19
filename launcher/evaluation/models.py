"""Which models an evaluation compares: names of the hub, directories, checkpoints and runs, and their weights.

RUN_DIR      of a finished run the trained model (final/), else its newest checkpoint
CHECKPOINT   exported before anything starts, below the evaluation's directory
DIRECTORY    a model that transformers loads
owner/name   a model of the hub
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.errors import LaunchError
from launcher.paths import absolute
from launcher.plan.checkpoints import newest_checkpoint
from launcher.plan.rundir import RunDir, is_run, read_json
from schema.util.atomic_file import write_text

LONGEST_LABEL = 60
_UNUSABLE = re.compile(r"[^A-Za-z0-9._-]+")
_OF = "exported_from.json"
"""File of an export that says of which checkpoint it is."""
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """One model. label: its name in tables, and of its directory."""

    label: str
    given: str
    """The name that was given; empty: the model is the configuration's own."""
    path: str
    """The name or directory from which it is loaded."""
    checkpoint: str = ""
    """The checkpoint that is exported to `path` first; empty: nothing is."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_of(given: str) -> RunDir | None:
    """The run that a model is of: itself, or that of the checkpoint; None: it is of none that is here."""
    path = Path(absolute(given))
    return next((RunDir(each) for each in (path, *list(path.parents)[:2]) if is_run(each)), None)


def find_models(given: Sequence[str], directory: Path) -> list[EvaluatedModel]:
    """Find each of these. directory: of the evaluation. Raises LaunchError: one is nothing that can be evaluated."""
    models: list[EvaluatedModel] = []
    for name in given:
        path, label, checkpoint = _find(name)
        label = _unique(label, [model.label for model in models])
        if checkpoint:
            path = str(directory / "models" / label)
        models.append(EvaluatedModel(label, name, path, checkpoint))
    return models


def _find(given: str) -> tuple[str, str, str]:
    """Return path, label, and the checkpoint to be exported if there is one."""
    path = Path(absolute(given))
    if not path.is_dir():
        is_here = "/" in given and Path(absolute(given)).parent.is_dir()  # then it is not meant for the hub
        if path.exists() or is_here or not _HUB.fullmatch(given):
            raise LaunchError(
                f"{given} is not a model: neither a directory of that name exists, nor can it be a name of the hub",
                "name a directory, a checkpoint, a run, or a model of the hub as owner/name",
            )
        return given, label_of(given), ""
    if is_run(path):
        run = RunDir(path)
        finished = (run.summary() or {}).get("outcome") == "finished"
        if finished and (path / "final" / "config.json").exists():
            return str(path / "final"), label_of(f"{path.name}-final"), ""
        if (newest := newest_checkpoint(run.checkpoints)) is None:
            raise LaunchError(f"{given} has neither a checkpoint nor a trained model", "name another model")
        path = newest.path
    if (path / "config.json").exists():
        name = f"{path.parent.name}-{path.name}" if path.name == "final" else path.name
        return str(path), label_of(name), ""
    return "", label_of(f"{path.parent.parent.name}-{path.name}"), str(path)


def label_of(name: str) -> str:
    """Return a name as a label: one that files can have."""
    label = _UNUSABLE.sub("-", name).strip("-.")
    return label[-LONGEST_LABEL:].lstrip("-.") or "model"


def _unique(label: str, taken: Collection[str]) -> str:
    count, unique = 1, label
    while unique in taken or unique == "models":
        count, unique = count + 1, f"{label}-{count + 1}"
    return unique


def is_exported(model: EvaluatedModel) -> bool:
    """Whether there is nothing to export: the model is not a checkpoint, or the export of this very one is there."""
    if not model.checkpoint:
        return True
    path = Path(model.path)
    return (path / "config.json").exists() and read_json(path / _OF) == _identity(model)


def _identity(model: EvaluatedModel) -> dict[str, Any]:
    """The checkpoint of which an export is: another one can have its name."""
    return {"checkpoint": model.checkpoint, "written": Path(model.checkpoint).stat().st_mtime_ns}


def export(model: EvaluatedModel) -> None:
    """Export the model's checkpoint, unless that was done. Raises LaunchError with what went wrong."""
    if is_exported(model):
        return
    import shutil
    import subprocess

    from launcher.plan.credentials import without_secrets

    command = [sys.executable, "-P", "-m", "policy_worker.export_command", model.checkpoint, model.path, "--json"]
    env = {**without_secrets(os.environ), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    shutil.rmtree(model.path, ignore_errors=True)  # of another checkpoint, or an export that was cut off
    Path(model.path).parent.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(command, env=env, check=False, capture_output=True, encoding="utf-8", errors="replace")
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        raise LaunchError(f"{model.given} cannot be evaluated: {lines[0].removeprefix('error: ')}")
    write_text(Path(model.path) / _OF, json.dumps(_identity(model)))
