"""A checkpoint of a trainer, ready to be written."""

from __future__ import annotations

from pathlib import Path

from policy_worker.checkpoints import directory
from policy_worker.checkpoints.layout import Manifest
from policy_worker.checkpoints.load import schedule_facts
from policy_worker.checkpoints.state import base_digests, capture_rng, state_to_save
from policy_worker.checkpoints.storage import Staging, pieces_of
from policy_worker.checkpoints.write import Draft
from policy_worker.trained.trainer import Trainer

CONTENTS = ["model", "optimizer", "extra"]


def draft(trainer: Trainer, root: Path, step: int, staging: Staging | None = None) -> Draft:
    """A checkpoint below `root` after so many steps, with copies of the state where there is a staging."""
    group = trainer.group
    unfinished = Path(group.lead(lambda: str(directory.begin(root, step))))
    pieces = {kind: pieces_of(state) for kind, state in state_to_save(trainer, CONTENTS).items()}
    if staging is not None:
        copies = iter(staging.copy([piece for of_kind in pieces.values() for piece in of_kind]))
        pieces = {kind: [next(copies) for _ in of_kind] for kind, of_kind in pieces.items()}
    manifest = Manifest(
        step=step, timeline=0, lineage=[(0, 0)], world=group.world, written_at=0.0, contents=CONTENTS,
        architecture=type(trainer.model.lm).__name__, exported=False, data=None, files={},
        schedule=schedule_facts(trainer.schedule, *trainer.optimizer.peak_lrs), bases=base_digests(trainer),
    )  # fmt: skip
    return Draft(
        unfinished, directory.hold(unfinished), pieces, capture_rng(group.device), manifest, ledger="{}",
        template=None, exporter=None,
    )  # fmt: skip
