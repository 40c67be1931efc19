"""Checkpoints for tests: made from a trainer without a controller, or only by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from policy_worker.checkpoints import directory
from policy_worker.checkpoints.export import ExportNames, write_export
from policy_worker.checkpoints.find import Resumption
from policy_worker.checkpoints.layout import (
    FileFacts,
    FoundCheckpoint,
    Manifest,
    hash_of_file,
    look,
    name_of,
    write_manifest,
)
from policy_worker.checkpoints.load import load, schedule_facts
from policy_worker.checkpoints.source_files import source_files
from policy_worker.checkpoints.state import BASE, base_digests, capture_rng, loss_scales, state_to_save
from policy_worker.checkpoints.storage import Staging, pieces_of
from policy_worker.checkpoints.write import Draft, write
from policy_worker.trained.trainer import Trainer
from schema.config import Config

ALL = ["model", "optimizer", "extra"]


def manifest(step: int, **facts: Any) -> Manifest:
    """Of one rank and timeline 0, without files."""
    plain: dict[str, Any] = {
        "step": step, "timeline": 0, "lineage": [(0, 0)], "world": 1, "written_at": 1000.0 + step,
        "architecture": "Qwen3ForCausalLM", "contents": ALL, "exported": False, "schedule": None, "data": None,
        "files": {},
    }  # fmt: skip
    return Manifest.model_validate(plain | facts)


def make_checkpoint(root: Path, step: int, *, latest: bool = False, **facts: Any) -> Path:
    """A complete checkpoint that holds one small file."""
    path = root / name_of(step)
    path.mkdir(parents=True)
    (path / "ledger.json").write_text(f'{{"committed_steps": {step}}}')
    files: dict[str, FileFacts] = {"ledger.json": hash_of_file(path / "ledger.json")}
    write_manifest(path, manifest(step, **{"files": files, **facts}))
    if latest:
        directory.point_at(path)
    return path


def save_state(
    trainer: Trainer, root: Path, step: int = 0, *, staged: bool = False, exports: Config | None = None
) -> FoundCheckpoint | None:
    """What the saver does, without a controller. A collective. exports: of this job, with the checkpoint."""
    group = trainer.group
    unfinished = Path(group.lead(lambda: str(directory.begin(root, step))))
    kinds = ALL if exports is None else [*ALL, BASE]
    pieces = {kind: pieces_of(state) for kind, state in state_to_save(trainer, kinds).items()}
    if staged:
        staging = Staging(group.device)
        copies = iter(staging.copy([piece for of_kind in pieces.values() for piece in of_kind]))
        pieces = {kind: [next(copies) for _ in of_kind] for kind, of_kind in pieces.items()}
    schedule = schedule_facts(trainer.schedule, *trainer.optimizer.peak_lrs)
    critic = trainer.critic
    of_critic = critic and schedule_facts(critic.schedule, *critic.optimizer.peak_lrs)
    draft = Draft(
        unfinished=unfinished,
        lock=directory.hold(unfinished),
        pieces=pieces,
        states=capture_rng(group.device),
        manifest=manifest(
            step,
            world=group.world,
            architecture=type(trainer.model.lm).__name__.removeprefix("FSDP"),
            schedule=schedule,
            critic_schedule=of_critic,
            kl_coefficient=trainer.kl_coefficient,
            loss_scales=loss_scales(trainer),
            bases=base_digests(trainer),
        ),
        ledger="{}",
        template=None,
        exporter=None,
    )
    if exports is not None and group.leads:
        names, files = ExportNames(trainer.model), source_files(exports, trainer.model.lm.config, None)
        draft = replace(draft, exporter=lambda gather, path: write_export(names, gather, exports, path, files))
    return write(draft, group)


def load_state(trainer: Trainer, path: Path, config: Config) -> None:
    """A collective."""
    found = look(path)
    load(Resumption(found, found.step, own=True), trainer, config, None)
