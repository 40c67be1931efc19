"""Where to resume from: which checkpoints come into question, in order, and which of them is whole.

    this run has checkpoints        its newest; it continues itself, wherever it began from
    train.resume = path             that one, or the newest in it
    train.resume = true             the newest of the neighbours in train.output_dir

A damaged one is passed over for the newest older one that led to it, and that is logged. Only an explicit path
is taken at its word: then damage is an error. Nothing is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from policy_worker.checkpoints.layout import (
    LATEST,
    LEDGER,
    FoundCheckpoint,
    Manifest,
    checkpoints_of,
    faults,
    look,
    named_in,
    share_of,
)
from policy_worker.errors import CheckpointError, DamagedCheckpointError
from policy_worker.parallel.rank_group import RankGroup
from schema.config import Config
from schema.wire.messages import LedgerSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidates:
    """Checkpoints to try, in order. own: of the run that continues. strict: the first one or none."""

    found: list[FoundCheckpoint]
    own: bool = False
    strict: bool = False
    damage: tuple[str, ...] = ()


def is_ancestor(older: Manifest, newer: Manifest) -> bool:
    """Whether training went from one to the other: every timeline is left at the step where the next begins."""
    ends = {
        timeline: following for (timeline, _), (_, following) in zip(newer.lineage, newer.lineage[1:], strict=False)
    }
    if newer.lineage:
        ends[newer.lineage[-1][0]] = newer.step
    return older.timeline in ends and older.step <= ends[older.timeline]


def complete_in(directory: Path, steps: range | None = None) -> tuple[list[FoundCheckpoint], list[str]]:
    """All checkpoints in a directory by (timeline, step), newest first, and what is wrong with others there.

    steps: look at no others."""
    complete, damage = [], []
    for step, path in named_in(directory):
        if steps is not None and step not in steps:
            continue
        try:
            complete.append(look(path))
        except CheckpointError as error:
            damage.append(str(error))
    complete.sort(key=lambda checkpoint: checkpoint.age, reverse=True)
    return complete, damage


def newest_in(directory: Path) -> FoundCheckpoint | None:
    """The checkpoint that `latest` names, else the newest that is there."""
    chain = chain_in(directory)[0]
    return chain[0] if chain else None


def chain_in(directory: Path) -> tuple[list[FoundCheckpoint], list[str]]:
    """The newest checkpoint and those that led to it, newest first; and the damage that was seen."""
    complete, damage = complete_in(directory)
    name = _pointer(directory)
    named = [checkpoint for checkpoint in complete if checkpoint.path.name == name]
    if name and not named:
        damage.append(f"{directory / LATEST} names {name}, which is not whole")
    return chain_of(named[0] if named else complete[0], complete) if complete else [], damage


def _pointer(directory: Path) -> str:
    """Return the name in `latest`; "" where there is none: the first save was killed before it could be written."""
    try:
        return (directory / LATEST).read_text().strip()
    except OSError:
        return ""


def chain_of(newest: FoundCheckpoint, complete: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """`newest`, then its ancestors among `complete`, newest first."""
    older = [each for each in complete if each != newest and is_ancestor(each.manifest, newest.manifest)]
    return [newest, *sorted(older, key=lambda checkpoint: checkpoint.age, reverse=True)]


def candidates(config: Config, run_dir: Path) -> Candidates:
    """List what may be resumed from.

    Raises `SettingsError`: the configured path holds no checkpoint; see `layout.read_manifest`."""
    chain_here, damage = chain_in(checkpoints_of(run_dir))
    if chain_here or damage:
        return Candidates(chain_here, own=True, damage=tuple(damage))
    resume = config.train.resume
    if isinstance(resume, str) and resume:
        try:
            return Candidates([found_at(Path(resume))], strict=True)
        except CheckpointError as error:
            raise type(error)(f"train.resume = {resume!r}: it holds no complete checkpoint: {error}") from error
    if resume is True:
        runs = [run for run in run_dir.parent.iterdir() if run.is_dir() and run != run_dir]
        chains = [chain_in(checkpoints_of(run)) for run in runs]
        whole = [chain for chain, _ in chains if chain]
        whole.sort(key=lambda chain: chain[0].manifest.written_at, reverse=True)
        seen = tuple(fault for _, faults_seen in chains for fault in faults_seen)
        return Candidates([checkpoint for chain in whole for checkpoint in chain], damage=seen)
    return Candidates([])


def found_at(path: Path) -> FoundCheckpoint:
    """The checkpoint that a path means: itself, or the newest in a directory of them, or of a run.

    Raises `CheckpointError`: there is none. `DamagedCheckpointError`: it does not show any more which one is the
    newest."""
    directory = checkpoints_of(path) if checkpoints_of(path).is_dir() else path
    whole, damage = chain_in(directory)
    if whole and (not damage or whole[0].path.name == _pointer(directory)):
        return whole[0]
    if damage:
        older = f"; {whole[0].path} is whole" if whole else ""
        raise DamagedCheckpointError(f"{'; '.join(damage)}{older}")
    return look(path)


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that is resumed from, proven whole.

    step: committed steps of this run that its weights stand for: the checkpoint's, or 0 where only the weights are
    taken along (see `contents`). own: of the run that continues."""

    found: FoundCheckpoint
    step: int
    own: bool

    @property
    def path(self) -> Path:
        return self.found.path


def choose(group: RankGroup, config: Config, run_dir: Path) -> Resumption | None:
    """The checkpoint to resume from, if any, every byte verified; the ranks share the reading. A collective.

    Raises `SettingsError`: the configured path holds no complete checkpoint; `DamagedCheckpointError`: an explicit
    path's is damaged, or all of those that there are."""
    listed = group.lead(lambda: _listed(candidates(config, run_dir)))
    damage = list(listed["damage"])
    whole = first_whole(group, listed["paths"][:1] if listed["strict"] else listed["paths"], damage)
    if whole is not None:
        return _resumption(whole, config, listed["own"])
    if damage:
        other = "name an older one with train.resume" if listed["strict"] else "begin a new run"
        raise DamagedCheckpointError(
            f"no checkpoint to resume from is whole: {'; '.join(damage)}. Nothing was deleted: put back the "
            f"right files, or {other}"
        )
    if config.train.resume is True and group.leads:
        log.info("train.resume = true: no complete checkpoint in %s, starting afresh", run_dir.parent)
    return None


def first_whole(group: RankGroup, paths: Iterable[str], damage: list[str]) -> FoundCheckpoint | None:
    """The first of these checkpoints of which every byte is as written; the ranks share the reading. A collective.

    damage: what was seen before, if anything; what is wrong with those that are passed over is added to it."""
    for path in map(Path, paths):
        checkpoint = look(path)
        files = checkpoint.manifest.files
        wrong = faults(path, files, share_of(files, group.rank, group.world))
        seen = [fault for of_rank in group.gather(wrong) for fault in of_rank]
        if not seen:
            if damage and group.leads:
                log.error("falling back to the older checkpoint %s: %s", path, "; ".join(damage))
            return checkpoint
        damage += seen
    return None


def _listed(choice: Candidates) -> dict[str, object]:
    return {
        "paths": [str(checkpoint.path) for checkpoint in choice.found],
        "own": choice.own,
        "strict": choice.strict,
        "damage": list(choice.damage),
    }


def _resumption(checkpoint: FoundCheckpoint, config: Config, own: bool) -> Resumption:
    wanted = config.train.ckpt.load_contents
    keeps_position = own or wanted is None or "extra" in wanted
    return Resumption(checkpoint, checkpoint.step if keeps_position else 0, own)


def before_step(
    group: RankGroup, config: Config, run_dir: Path, step: int, timeline: int, began_from: str
) -> Resumption | None:
    """The checkpoint with the weights that training step `step` of a timeline was begun with, or the nearest before
    them that is there and whole; None: the configured model. A collective.

    began_from: the checkpoint that the trainer of that step had started from; empty: none. What is passed over on the
    way, being damaged, is logged.

    Raises `CheckpointError`: a checkpoint vanishes meanwhile."""
    root = checkpoints_of(run_dir)
    damage: list[str] = []

    def listed() -> list[str]:
        chain = chain_in(root)[0]
        paths = [str(c.path) for c in chain if c.step <= step and c.manifest.timeline <= timeline]
        return paths or _first_of_run(config, run_dir, began_from, step)

    whole = first_whole(group, group.lead(listed), damage)
    of_this_run = whole is not None and whole.path.parent == root
    if group.leads:
        unseen = complete_in(root, range(whole.step + 1 if whole and of_this_run else 0, step + 1))[1]
        if unseen := [*unseen, *(damage if whole is None else [])]:
            log.warning("passed over on the way to the weights of step %d: %s", step, "; ".join(unseen))
    return None if whole is None else _resumption(whole, config, of_this_run)


def _first_of_run(config: Config, run_dir: Path, began_from: str, step: int) -> list[str]:
    """The checkpoint of another run that this one began from, if it is still there."""
    path = Path(began_from)
    if not began_from or path.parent == checkpoints_of(run_dir):
        return []
    try:
        begun = _resumption(look(path), config, own=False)
    except CheckpointError as error:
        log.warning("the checkpoint that the run began from cannot be read: %s", error)
        return []
    return [str(path)] if begun.step <= step else []


def snapshot_of(checkpoint: FoundCheckpoint) -> LedgerSnapshot | None:
    """The ledger of a checkpoint; None if it holds none.

    Raises `DamagedCheckpointError`: the file is not what a controller has written."""
    if LEDGER not in checkpoint.manifest.files:
        return None
    wrong, path = faults(checkpoint.path, checkpoint.manifest.files, [LEDGER]), checkpoint.path / LEDGER
    if wrong:
        raise DamagedCheckpointError(wrong[0])
    try:
        return LedgerSnapshot.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error


def newest_snapshot(run_dir: Path, resumption: Resumption | None) -> LedgerSnapshot | None:
    """The ledger of the newest checkpoint of this run, else of the one that it began from."""
    try:
        newest = newest_in(checkpoints_of(run_dir)) or (resumption.found if resumption else None)
        return None if newest is None else snapshot_of(newest)
    except CheckpointError as error:
        log.error("the ledger of the newest checkpoint cannot be read: %s", error)
        return None
