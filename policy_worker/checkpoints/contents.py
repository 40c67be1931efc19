"""What of a checkpoint is read on resume, and which schedule goes on: pure decisions.

A run that continues itself takes all that it has saved. One that starts from another run's checkpoint takes what
`train.ckpt.load_contents` names; without `extra` it takes weights (and optimizer) along and begins its own data,
schedule and step count from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from policy_worker.checkpoints.layout import DataFacts, Manifest, ScheduleFacts
from policy_worker.errors import CheckpointError
from policy_worker.model.lr_schedule import Schedule

KEY = "train.ckpt.load_contents"


@dataclass(frozen=True)
class Parts:
    """What is read. weights: from the state files, or from the export."""

    weights: Literal["state", "export"]
    optimizer: bool
    extra: bool


def parts_to_load(manifest: Manifest, wanted: Collection[str] | None) -> Parts:
    """What to read of a checkpoint. wanted: `load_contents`; None: all that was saved.

    Raises:
        CheckpointError: it does not hold what is wanted, or no weights at all.
    """
    held = {*manifest.contents, *(["hf_model"] if manifest.exported else [])}
    if wanted is None:
        if not held & {"model", "hf_model"}:
            raise CheckpointError("it holds no weights: it was saved without model and without export")
        weights: Literal["state", "export"] = "state" if "model" in held else "export"
        return Parts(weights, "optimizer" in held, "extra" in held)
    missing = [name for name in wanted if name not in held]
    if missing:
        raise CheckpointError(
            f"{KEY} asks for {', '.join(missing)}, and it holds {', '.join(sorted(held)) or 'nothing'}: "
            f"leave {missing[0]} out"
        )
    return Parts("export" if "hf_model" in wanted else "state", "optimizer" in wanted, "extra" in wanted)


def schedule_facts(schedule: Schedule, peak_lr: float) -> ScheduleFacts:
    return ScheduleFacts(peak_lr=peak_lr, **dataclasses.asdict(schedule))


def schedule_of(facts: ScheduleFacts) -> Schedule:
    return Schedule(**facts.model_dump(exclude={"peak_lr"}))


def schedule_differences(saved: ScheduleFacts, configured: ScheduleFacts) -> list[str]:
    """`name: checkpoint's value, configuration's value` of each field that differs."""
    before, now = saved.model_dump(), configured.model_dump()
    names = {
        "peak_lr": "train.optm_lr",
        "total_steps": "total steps",
        "min_factor": "train.optm_min_lr_factor",
    }
    return [
        f"{names.get(name, f'train.optm_{name}')}: {before[name]!r} in the checkpoint, {now[name]!r} configured"
        for name in before
        if before[name] != now[name]
    ]


def check_data(saved: DataFacts | None, now: DataFacts | None) -> None:
    """Raises `CheckpointError` unless the rows of a supervised job go on where they were."""
    if saved is None or now is None:
        return
    names = {"rows": "rows of the dataset", "seed": "train.seed", "batch": "rows of a step"}
    names["shuffle"] = "train.train_policy.dataloader_shuffle"
    for field, words in names.items():
        if getattr(saved, field) != getattr(now, field):
            raise CheckpointError(
                f"{words}: {getattr(saved, field)} when it was saved, {getattr(now, field)} now, so the position in "
                f'the data would be another; keep them equal, or begin the data anew with {KEY} = ["model", '
                f'"optimizer"] and train.ckpt.load_schedule = false'
            )
