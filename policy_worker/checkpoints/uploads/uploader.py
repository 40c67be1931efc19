"""The queue of uploads, its thread, and what the trainer asks. Rank 0 has one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from policy_worker.checkpoints.layout import STEP, checkpoints_of, named_in
from policy_worker.checkpoints.uploads.hub import HubTarget
from policy_worker.checkpoints.uploads.s3 import S3Target
from policy_worker.checkpoints.uploads.upload_record import UploadRecord, check_whole, file_of, open_record
from policy_worker.errors import CheckpointError, SettingsError, UploadError, UploadFailedError, UploadStoppedError
from schema.config import Config
from weight_sync.stores.patience import USUAL, Delays

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often `finish` looks whether it should leave."""


class UploadTarget(Protocol):
    """Where copies go. `name` is part of the file names of records."""

    name: str

    def place(self, name: str) -> str: ...

    def probe(self) -> None: ...

    def upload(self, path: Path, record: UploadRecord) -> None: ...


@dataclass(frozen=True)
class UploadJob:
    """One directory on its way to one target."""

    path: Path
    step: int
    final: bool
    target: UploadTarget

    @property
    def key(self) -> tuple[str, str]:
        return self.target.name, self.path.name


class Uploader:
    """See the package's docstring. Without targets everything here does nothing.

    wanted: whether a target takes a directory (target's name, final). Methods are called from the training
    thread, and `offer` and `holds` from the one that writes checkpoints, too."""

    def __init__(
        self,
        targets: Sequence[UploadTarget],
        run_dir: Path,
        stop: threading.Event | None = None,
        wanted: Callable[[str, bool], bool] = lambda _target, _final: True,
    ) -> None:
        self._targets, self._run_dir, self._stop, self._wanted = (targets, run_dir, stop or threading.Event(), wanted)
        self._records = run_dir / "uploads"
        self._queue: queue.SimpleQueue[UploadJob] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: list[UploadJob] = []
        self._failed: dict[tuple[str, str], str] = {}
        self._failed_final: dict[tuple[str, str], str] = {}
        self._thread: threading.Thread | None = None

    def trouble(self) -> str:
        """Return the last upload that has failed for good; "" if there is none."""
        with self._lock:
            return next(reversed(self._failed.values()), "")

    def probe(self, strict: bool) -> None:
        """Look, before training, whether all targets take what will come.

        strict: raise; else say so and go on, since a run that has trained for a day must not end because the store
        is away when it is restarted.

        Raises `SettingsError`: naming key and remedy."""
        for target in self._targets:
            try:
                target.probe()
            except SettingsError as error:
                if strict:
                    raise
                log.error("uploads to %s will fail as things stand: %s", target.name, error)
            else:
                log.info("uploads go to %s", target.place("…"))

    def offer(self, path: Path, step: int, final: bool) -> None:
        """A checkpoint, or the final model, is complete: upload it while training goes on, if it is wanted."""
        for target in self._targets:
            if self._wanted(target.name, final):
                self._take(UploadJob(path, step, final, target))

    def places(self, name: str, final: bool) -> list[str]:
        """Where a directory of this name goes, for people."""
        return [target.place(name) for target in self._targets if self._wanted(target.name, final)]

    def resume(self) -> None:
        """Take the checkpoints that an earlier process did not finish or could not offer. The final model is offered
        again by whoever finishes the run."""
        checkpoints = named_in(checkpoints_of(self._run_dir))
        for target in self._targets:
            self._forget({path.name for _, path in checkpoints}, target)
            if self._wanted(target.name, False):
                for step, path in checkpoints:
                    self._take(UploadJob(path, step, False, target))

    def _forget(self, names: set[str], target: UploadTarget) -> None:
        """Remove the records of checkpoints that have been deleted."""
        for file in self._records.glob(f"{STEP}*.{target.name}.json"):
            if file.name.partition(".")[0] not in names:
                file.unlink(missing_ok=True)

    def _take(self, job: UploadJob) -> None:
        """A directory that is offered again while it is under way may have been replaced: it is looked at again."""
        with self._lock:
            self._pending.append(job)
            self._queue.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def holds(self, path: Path) -> bool:
        """Whether a directory is being read, or waits to be: it must not be deleted."""
        with self._lock:
            return any(job.path == path for job in self._pending)

    def raise_if_failed(self) -> None:
        """Raises `UploadFailedError` if the final upload has failed for good; earlier ones are in `trouble`."""
        with self._lock:
            failed = list(self._failed_final.values())
        if failed:
            raise UploadFailedError(
                f"{'; '.join(failed)}. Nothing was deleted: `cosmos-launch --resume` with this configuration tries "
                f"again and sends only what is missing"
            )

    def finish(self, timeout: float | None = None, leaving: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all uploads are done or have failed, or it is time to leave; whether nothing is left.

        timeout: seconds; None: as long as it takes, which `Patience` bounds where nothing succeeds.

        Raises `UploadFailedError`: the final upload failed, or did not end in time."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while self._left() and not leaving():
            if give_up is not None and time.monotonic() > give_up:
                left = ", ".join(f"{name} to {target}" for target, name in self._left())
                raise UploadFailedError(f"not uploaded within {timeout:.0f} s: {left}; --resume goes on with it")
            time.sleep(LOOK_S)
        self.raise_if_failed()
        return not self._left()

    def close(self, grace: float = 5.0) -> None:
        """Stop after the parts that are on their way; the next start goes on from there."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(grace)

    def _left(self) -> list[tuple[str, str]]:
        with self._lock:
            return [job.key for job in self._pending]

    # ---- the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                job = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            try:
                self._upload(job)
            except UploadStoppedError:
                return
            except (UploadError, CheckpointError) as error:
                self._fail(job, str(error))
            except OSError as error:  # a file here; what the network does is the target's matter
                self._fail(job, f"{error.filename or job.path}: {error.strerror or error}")
            except Exception as error:
                log.exception("an upload failed")
                self._fail(job, f"{type(error).__name__}: {error}")
            with self._lock:
                self._pending.remove(job)

    def _upload(self, job: UploadJob) -> None:
        began, place = time.monotonic(), job.target.place(job.path.name)
        record = open_record(file_of(self._records, job.path.name, job.target.name), job.path, job.step)
        if not record.progress.done:
            check_whole(job.path)
            log.info("uploading %s to %s", job.path, place)
            record.save()
            job.target.upload(job.path, record)
            record.progress.done = True
            record.save()
            log.info("uploaded %s to %s in %.1f s", job.path, place, time.monotonic() - began)
        with self._lock:
            self._failed.pop(job.key, None)
            self._failed_final.pop(job.key, None)

    def _fail(self, job: UploadJob, reason: str) -> None:
        text = f"upload of {job.path.name} to {job.target.name} failed: {reason}"
        log.error("%s", text)
        with self._lock:
            self._failed[job.key] = text
            if job.final:
                self._failed_final[job.key] = text


def make_uploader(config: Config, run_dir: Path, delays: Delays = USUAL) -> Uploader:
    """The uploader of this configuration. Raises `SettingsError`: the environment's AWS settings make no client."""
    ckpt, stop, run = config.train.ckpt, threading.Event(), run_dir.name
    targets: list[UploadTarget] = []
    if ckpt.upload_s3 and ckpt.s3_bucket:
        targets.append(S3Target(ckpt.s3_bucket, ckpt.s3_prefix, run, stop, delays))
    if ckpt.upload_hf:
        targets.append(HubTarget(ckpt.hf_repo_name, run, stop, delays))

    def wanted(target: str, final: bool) -> bool:
        return is_wanted(ckpt.upload_s3, final) if target == S3Target.name else True

    return Uploader(targets, run_dir, stop, wanted)


def is_wanted(upload: bool | str, final: bool) -> bool:
    """Whether `train.ckpt.upload_s3` means this checkpoint."""
    return upload in (True, "all") or (upload == "final" and final)
