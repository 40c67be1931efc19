"""Checkpoints: everything that a trainer needs to go on, and what the controller needs of its ledger.

    <run_dir>/checkpoints/
      step-00000020/        complete, or it does not have this name
        .metadata, *.distcp   model and optimizer, by torch.distributed.checkpoint (any number of ranks may load)
        rng-00000.safetensors random state of each rank
        ledger.json           LedgerSnapshot: frontier and untrained positions
        trainer.json          step, timeline, ranks; written last
        export/               the model for transformers, with `train.ckpt.export_safetensors`
      latest                the newest one's name, written after it is complete

Written beside, forced to disk, renamed; then `latest`; then the controller is told, which may now forget payloads;
then older ones are pruned. (`.metadata` is a pickle of torch's own making; a checkpoint is a file of our own, read
by whoever may write to the run directory anyway. Nothing else here is one.)
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from controller import api
from policy_worker.errors import SettingsError
from policy_worker.export import export_model
from policy_worker.learner import Learner
from policy_worker.session import Session
from schema.config import Config
from schema.wire import messages as m

log = logging.getLogger(__name__)

FORMAT = 1
LATEST, TRAINER, LEDGER = "latest", "trainer.json", "ledger.json"


@dataclass(frozen=True)
class Found:
    """A complete checkpoint: where it is and how many committed steps it covers."""

    path: Path
    step: int


def checkpoints_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def find_checkpoint(config: Config, run_dir: Path) -> Found | None:
    """Where to resume from: a path if one is configured, else the newest of this run, else (`resume = true`) the
    newest of its neighbours in `train.output_dir`.

    Raises:
        SettingsError: the configured path holds no complete checkpoint.
    """
    own = newest_in(checkpoints_of(run_dir))
    if own is not None:  # a restarted trainer continues its own run, wherever that began
        return own
    resume = config.train.resume
    if isinstance(resume, str) and resume:
        path = Path(resume)
        found = _complete(path) or newest_in(path) or newest_in(checkpoints_of(path))
        if found is None:
            raise SettingsError(f"train.resume = {resume!r}: there is no complete checkpoint")
        return found
    if resume is True:
        others = [newest_in(checkpoints_of(run)) for run in run_dir.parent.iterdir() if run.is_dir()]
        complete = [found for found in others if found is not None]
        if complete:
            return max(complete, key=lambda found: (found.path / TRAINER).stat().st_mtime)
        log.info("train.resume = true: no complete checkpoint in %s, starting afresh", run_dir.parent)
    return None


def newest_in(directory: Path) -> Found | None:
    """The checkpoint that `latest` names, else (it was killed between the two) the one of the most steps."""
    try:
        named = _complete(directory / (directory / LATEST).read_text().strip())
    except OSError:
        named = None
    if named is not None:
        return named
    found = [_complete(path) for path in directory.glob("step-*")] if directory.is_dir() else []
    return max((f for f in found if f is not None), key=lambda f: f.step, default=None)


def _complete(path: Path) -> Found | None:
    try:
        facts = json.loads((path / TRAINER).read_text())
        return Found(path, int(facts["step"])) if facts["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Checkpointer:
    """Saves and restores; all ranks call alike. `session` on rank 0 only."""

    def __init__(
        self, config: Config, reply: m.RegisterReply, learner: Learner, session: Session | None
    ) -> None:
        self._config, self._learner, self._session = config, learner, session
        self._settings, self._timeline = config.train.ckpt, reply.timeline
        self._directory = checkpoints_of(Path(reply.run_dir))
        self._saved: int | None = None

    @property
    def enabled(self) -> bool:
        return self._settings.enable_checkpoint

    def due(self, step: int, last: bool) -> bool:
        """Whether to save now: by frequency, at the end, or because the user asked for it. A collective."""
        asked = self._session is not None and self._session.checkpoint_wanted.is_set()
        if self._learner.group.any(asked):
            return True
        return self.enabled and (last or step % self._settings.save_freq == 0)

    def save(self, step: int) -> None:
        """Save after `step` committed steps, once. A collective.

        Raises:
            OSError: the directory cannot be written; older checkpoints are untouched.
        """
        if step == self._saved:
            return
        group = self._learner.group
        beside = Path(group.lead(lambda: self._begin(step)))
        write_state(self._learner, beside)
        if self._settings.export_safetensors:
            export_model(self._learner, self._config, beside / "export")
        group.barrier()
        group.lead(lambda: self._finish(beside, step))
        self._saved = step

    def _begin(self, step: int) -> str:
        beside = self._directory / f".step-{step:08d}.{secrets.token_hex(4)}"
        beside.mkdir(parents=True)
        if self._session is not None:
            self._session.checkpoint_wanted.clear()
        return str(beside)

    def _finish(self, beside: Path, step: int) -> None:
        assert self._session is not None
        ledger = self._session.call(api.ledger_snapshot(step))
        (beside / LEDGER).write_text(ledger.model_dump_json())
        facts = {
            "format": FORMAT,
            "step": step,
            "timeline": self._timeline,
            "world": self._learner.group.world,
        }
        (beside / TRAINER).write_text(json.dumps(facts))
        _sync_tree(beside)
        target = self._directory / f"step-{step:08d}"
        if target.exists():  # of a timeline that was left
            shutil.rmtree(target)
        os.rename(beside, target)
        self._point_at(target)
        request = m.CheckpointRequest(**self._session.identity(), step=step, path=str(target))
        self._session.call(api.checkpoint(request))
        self._prune(target)
        log.info("saved checkpoint %s", target)

    def _point_at(self, target: Path) -> None:
        pointer = self._directory / LATEST
        beside = pointer.with_name(f".{LATEST}.{secrets.token_hex(4)}")
        beside.write_text(target.name)
        _sync(beside)
        os.replace(beside, pointer)
        _sync(self._directory)

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest `max_keep`, and what killed processes left half-written."""
        complete = [
            found for path in self._directory.glob("step-*") if (found := _complete(path)) is not None
        ]
        keep = len(complete) if self._settings.max_keep < 0 else max(self._settings.max_keep, 1)
        older = [f.path for f in sorted(complete, key=lambda f: f.step, reverse=True) if f.path != newest]
        for path in [*older[keep - 1 :], *self._directory.glob(".step-*")]:
            shutil.rmtree(path, ignore_errors=True)

    def restore(self, found: Found) -> None:
        """Load model, optimizer and random state. A collective; any number of ranks.

        Raises:
            SettingsError: the checkpoint is of another model.
        """
        read_state(self._learner, found.path)
        self._saved = found.step
        log.info("resumed from %s (%d committed steps)", found.path, found.step)


def write_state(learner: Learner, directory: Path) -> None:
    """Model, optimizer and random state of all ranks into a directory that exists. A collective."""
    dcp.save(_state(learner), checkpoint_id=directory)
    rng = {"cpu": torch.get_rng_state()}
    if learner.group.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(learner.group.device)
    save_file(rng, directory / _rng_file(learner))


def read_state(learner: Learner, directory: Path) -> None:
    """Inverse of `write_state`, by any number of ranks. A collective.

    Raises:
        SettingsError: the state is of another model.
    """
    state = _state(learner)
    try:
        dcp.load(state, checkpoint_id=directory)
    except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise SettingsError(f"checkpoint {directory} does not fit this model: {error}") from error
    optimizer = learner.optimizer
    set_state_dict(
        learner.model,
        optimizer.adamw,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    optimizer.apply_settings()
    path = directory / _rng_file(learner)
    if path.exists():  # not if there are more ranks now
        rng = load_file(path)
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and learner.group.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], learner.group.device)


def _state(learner: Learner) -> dict[str, Any]:
    model, optimizer = get_state_dict(learner.model, learner.optimizer.adamw)
    return {"model": model, "optimizer": optimizer}


def _rng_file(learner: Learner) -> str:
    return f"rng-{learner.group.rank:05d}.safetensors"


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
