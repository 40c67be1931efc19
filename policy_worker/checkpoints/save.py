"""When and how a trainer saves: the one object that the training loop speaks to. All ranks call alike.

    each step     check()      errors of the save in the background, of uploads
    after commit  due() ─▶ save()      copy, then write here (`sync`) or in the background (`async`)
    at the end    finish()     wait for what is still being written or uploaded

There is never more than one save at a time: the next one waits for the one before.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from controller.client import calls as api
from policy_worker.background import Background
from policy_worker.checkpoints import directory
from policy_worker.checkpoints.export import ExportNames, prepare_export, write_export
from policy_worker.checkpoints.find import Resumption
from policy_worker.checkpoints.layout import (
    DataFacts,
    FoundCheckpoint,
    Manifest,
    ScheduleFacts,
    checkpoints_of,
    template_of,
)
from policy_worker.checkpoints.load import data_facts, load, schedule_facts
from policy_worker.checkpoints.retention import Housekeeper
from policy_worker.checkpoints.source_files import Files
from policy_worker.checkpoints.state import (
    BASE,
    MODEL,
    OPTIMIZER,
    base_digests,
    capture_rng,
    loss_scales,
    state_to_save,
)
from policy_worker.checkpoints.storage import Staging, TensorPiece, pieces_of
from policy_worker.checkpoints.uploads import Uploader, make_uploader
from policy_worker.checkpoints.write import Draft, Exporter, write
from policy_worker.errors import CheckpointSaveError
from policy_worker.replicas.base import Registration
from policy_worker.session import Caller
from policy_worker.trained.model import TrainedModel
from schema.config.chat_template import kept_template
from schema.wire import messages as m

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rhythm:
    """`[train.ckpt]`'s frequencies. data_passes 0: by steps only."""

    enabled: bool
    steps: int
    data_passes: int = 0

    def due(self, step: int, *, last: bool, data_passes: int, data_passes_before: int) -> bool:
        """Whether to save after `step` committed steps.

        last: no step follows. data_passes, data_passes_before: passes over the data that are complete now, and were
        when this was asked last."""
        if not self.enabled:
            return False
        by_data_pass = (
            self.data_passes > 0 and data_passes // self.data_passes > data_passes_before // self.data_passes
        )
        return last or by_data_pass or step % self.steps == 0


def _rows(facts: DataFacts | None) -> tuple[int, str, bool] | None:
    """How many rows there are, their hash, and whether further ones are being prepared; None: no file to read now."""
    return None if facts is None else (facts.rows, facts.digest, facts.unfinished)


def _schedule_of(trained: TrainedModel) -> ScheduleFacts:
    return schedule_facts(trained.schedule, *trained.optimizer.peak_lrs)


class Checkpointer:
    """See the module's docstring. `session` on rank 0 only."""

    def __init__(self, registration: Registration, *, leads: bool = True) -> None:
        """A collective. leads: whether to begin with `lead`.

        Raises `CheckpointSaveError`: checkpoints are on, and their directory cannot be written; `SettingsError`:
        uploads are on, or exports, and cannot work."""
        config, reply, trainer, session, self._shutdown = registration
        self._config, self._trainer, self._session = config, trainer, session
        self._settings = config.train.ckpt
        self._rhythm = Rhythm(
            self._settings.enable_checkpoint, self._settings.save_freq, self._settings.save_freq_in_epoch
        )
        self._directory = checkpoints_of(Path(reply.run_dir))
        self._data = data_facts(config, reply)
        self._awaits_rows = trainer.group.any(self._data is not None and self._data.unfinished)
        """Whether some rank has seen a part of the rows alone."""
        self._lineage: list[tuple[int, int]] = [(reply.timeline, 0)]
        self._timeline = reply.timeline
        self._saved: int | None = None
        self._bases: dict[str, str] | None = None
        self._data_passes = 0
        self._background = Background()
        asynchronous = self._settings.save_mode == "async"
        self._staging = Staging(trainer.group.device) if asynchronous else None
        patience = config.controller.controller_lost_timeout
        self._group = trainer.group.sibling(patience) if asynchronous else trainer.group
        self._caller: Caller | None = None if session is None else session.another()
        self._uploader = Uploader((), Path(reply.run_dir))
        self._housekeeper = Housekeeper(self._directory, self._settings, self._uploader)
        self._reply, self._leads = reply, False
        self._template: str | None = None
        self.export_files: Files = {}
        """Rank 0, where the model will be exported: what each export copies."""
        if leads:
            self.lead()

    @property
    def enabled(self) -> bool:
        return self._settings.enable_checkpoint

    def lead(self) -> None:
        """Save from now on, as the only one of all policy replicas. A collective. Raises as the constructor."""
        if self._leads:
            return
        self._leads = True
        self._trainer.group.lead(lambda: self._prepare(self._reply))
        self._housekeeper.uploader = self._uploader

    def _prepare(self, reply: m.RegisterReply) -> None:
        """Rank 0: clean up after the dead, and find out now whether saving, exporting and uploading will work."""
        if self.enabled:
            self._prepare_directory()
        self._template = kept_template(Path(reply.run_dir))
        if self._config.launcher.export_final or (self.enabled and self._settings.export_safetensors):
            self.export_files = prepare_export(self._trainer.model, self._config, self._template)
        self._uploader = make_uploader(self._config, Path(reply.run_dir))
        self._uploader.probe(strict=reply.committed_steps == 0)
        if self._session is not None:
            self._session.troubles.append(self._uploader.trouble)
        self._uploader.resume()

    def _prepare_directory(self) -> None:
        try:
            directory.check_writable(self._directory)
        except OSError as error:
            raise CheckpointSaveError(
                f"checkpoints cannot be written to {self._directory}: {error.strerror or error}; mend the "
                f"directory, or write train.output_dir or train.ckpt.enable_checkpoint = false"
            ) from error
        directory.clean(self._directory)

    # ---- resume -----------------------------------------------------------------------------------------------

    def restore(self, resumption: Resumption) -> int:
        """Load what is to be loaded; the committed steps from which training goes on. A collective.

        Raises `CheckpointError`: the checkpoint is of another model or data, or lacks what is asked for."""
        load(resumption, self._trainer, self._config, self._data)
        if self._trainer.group.leads and template_of(resumption.found) != self._template:
            log.warning(
                "checkpoint %s was trained with another chat template of the job's own than this run's data are "
                "prepared with",
                resumption.path,
            )
        manifest = resumption.found.manifest
        if resumption.step == manifest.step:
            self._data_passes = manifest.epochs
            self._saved = resumption.step if resumption.own else None
            self._lineage = [*manifest.lineage, (self._timeline, resumption.step)]
        self._housekeeper.resumed_from(resumption.path)
        return resumption.step

    # ---- save -------------------------------------------------------------------------------------------------

    def due(self, step: int, *, last: bool, data_passes: int | None = None) -> bool:
        """Whether to save now: by frequency, at the end, or because it was asked for. A collective.

        data_passes: passes over the data that are complete after `step` committed steps; None: as many as so many
        batches of rows make."""
        if data_passes is None:
            self._count_rows()
            whole = self._data is not None and not self._awaits_rows
            data_passes = self._data.at(step).position // self._data.rows if whole and self._data else 0
        before, self._data_passes = self._data_passes, max(self._data_passes, data_passes)
        if self._trainer.group.any(self._shutdown.checkpoint_asked):
            return True
        return self._rhythm.due(step, last=last, data_passes=self._data_passes, data_passes_before=before)

    def _count_rows(self) -> None:
        """While rows are being prepared, rank 0 says how many there are. A collective."""
        if not self._awaits_rows:
            return
        facts = self._trainer.group.lead(lambda: _rows(data_facts(self._config, self._reply)))
        if facts is None:
            return
        rows, digest, self._awaits_rows = facts
        if self._data is not None:
            self._data = self._data.model_copy(update={"rows": rows, "digest": digest})

    def save(self, step: int) -> None:
        """Save after `step` committed steps, once. A collective; returns as soon as training may go on.

        Raises `CheckpointSaveError`: this one could not be written (`sync`), or the one before (`async`); `Refused`,
        `ControllerLost`, `LeaveRequestedError`: see `Session.call`."""
        self._shutdown.checkpoint_asked = False
        if step == self._saved:
            return
        began = time.monotonic()
        self.wait()
        waited = time.monotonic() - began
        if waited > 1.0:
            log.warning("training waited %.1f s for the checkpoint before: save more seldom", waited)
        draft = self._draft(step)
        self._saved = step
        if self._staging is None:
            self._write(draft)
        else:
            self._background.start(lambda: self._write(draft))
        log.info("checkpoint of step %d held training up for %.2f s", step, time.monotonic() - began)

    def _draft(self, step: int) -> Draft:
        trainer, group = self._trainer, self._trainer.group
        if self._bases is None:
            self._bases = base_digests(trainer)
        unfinished, ledger = group.lead(lambda: self._begin(step))
        contents = list(self._settings.save_contents)
        kinds = {*contents, MODEL, BASE} if self._settings.export_safetensors else {*contents}
        pieces = {kind: pieces_of(state) for kind, state in state_to_save(trainer, kinds).items()}
        manifest = Manifest(
            step=step,
            timeline=self._timeline,
            lineage=self._lineage,
            epochs=self._data_passes,
            world=group.world,
            written_at=0.0,
            architecture=type(trainer.model.lm).__name__.removeprefix("FSDP"),
            contents=contents,
            exported=self._settings.export_safetensors,
            schedule=_schedule_of(trainer) if "extra" in contents else None,
            critic_schedule=_schedule_of(trainer.critic) if trainer.critic and "extra" in contents else None,
            kl_coefficient=trainer.kl_coefficient if "extra" in contents else None,
            loss_scales=loss_scales(trainer) if OPTIMIZER in contents else {},
            data=None if self._data is None else self._data.at(step),
            bases=self._bases,
            files={},
        )
        return Draft(
            unfinished=Path(unfinished),
            lock=self._hold(Path(unfinished)),
            pieces=self._copied(pieces),
            states=capture_rng(group.device),
            manifest=manifest,
            ledger=ledger,
            template=self._template,
            exporter=self._exporter() if group.leads and manifest.exported else None,
        )

    def _copied(self, pieces: dict[str, list[TensorPiece]]) -> dict[str, list[TensorPiece]]:
        if self._staging is None:
            return pieces
        copies = iter(self._staging.copy([piece for of_kind in pieces.values() for piece in of_kind]))
        return {kind: [next(copies) for _ in of_kind] for kind, of_kind in pieces.items()}

    def _begin(self, step: int) -> tuple[str, str | None]:
        """Rank 0: a directory, and what the controller wants kept."""
        assert self._session is not None
        ledger = self._session.call(api.ledger_snapshot(step)).model_dump_json()
        try:
            return str(directory.begin(self._directory, step)), ledger
        except OSError as error:
            raise CheckpointSaveError(
                f"checkpoint of step {step} could not be written to {self._directory}: {error.strerror or error}. "
                f"Nothing was deleted; mend the directory, then resume"
            ) from error

    def _hold(self, unfinished: Path) -> IO[bytes]:
        try:
            return directory.hold(unfinished)
        except OSError as error:
            raise CheckpointSaveError(
                f"rank {self._trainer.group.rank} does not see {unfinished}, which rank 0 has just made: "
                f"{error.strerror or error}; train.output_dir must be a directory that all machines share"
            ) from error

    def _exporter(self) -> Exporter:
        """Names are collected now, while no step runs; the weights come from the files."""
        names, config, files = ExportNames(self._trainer.model), self._config, self.export_files
        return lambda gather, target: write_export(names, gather, config, target, files)

    def _write(self, draft: Draft) -> None:
        """In the main thread or in the background: the checkpoint, then everybody who has to know."""
        complete = write(draft, self._group)
        if complete is not None:
            self._announce(complete)

    def _announce(self, complete: FoundCheckpoint) -> None:
        """Rank 0: the controller may forget payloads now, older checkpoints may go, this one may be uploaded."""
        assert self._session is not None
        assert self._caller is not None
        request = m.CheckpointRequest(**self._session.identity(), step=complete.step, path=str(complete.path))
        reply = self._caller.call(api.checkpoint(request))
        self._uploader.offer(complete.path, complete.step, final=False)
        self._housekeeper.tidy(complete, reply.scores)

    # ---- look after it ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has failed in the background. A collective while a save is under way.

        Raises:
            CheckpointSaveError, and whatever telling the controller or an upload has raised.
        """
        if self._background.busy and self._trainer.group.any(self._background.failed):
            self.wait()
            raise CheckpointSaveError("another rank could not finish its checkpoint: its log says why")
        self._uploader.raise_if_failed()

    def wait(self) -> None:
        """Wait for the save that is under way. Raises as `check`."""
        self._background.wait()

    def offer_final(self, export: Path, step: int) -> None:
        """Rank 0 hands the final export to the uploader, if there is one; it comes last, after the last checkpoint.

        Raises `CheckpointSaveError`: see `check`."""
        self.wait()
        self._uploader.offer(export, step, final=True)

    def finish(self) -> bool:
        """Before leaving: whether everything that was begun is complete; what is not goes on with the next start.

        Raises `CheckpointSaveError`, `UploadFailedError`: see `check`."""
        self.wait()
        return self._uploader.finish(leaving=lambda: bool(self._shutdown))

    def close(self, seconds: float) -> None:
        """On the way out, whatever the reason: give a save that is under way some time, and no more."""
        try:
            if not self._background.wait(seconds):
                log.error("a checkpoint is still being written after %.0f s: left unfinished", seconds)
        except Exception:
            log.exception("the checkpoint that was being written has failed")
        self._uploader.close()
        if self._caller is not None:
            self._caller.close()
