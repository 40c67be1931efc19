"""Records of uploads on disk: one JSON file per checkpoint and target, next to the checkpoints, never inside one.

    <run_dir>/uploads/step-00000020.s3.json
    <run_dir>/uploads/final.hub.json

A record is written before anything is sent and after every part, under another name and renamed, so it is whole
whenever the process is killed. It names multipart uploads; which of their parts have arrived, S3 itself knows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policy_worker.checkpoints.layout import MANIFEST, faults, hash_of_file, read_manifest
from policy_worker.errors import DamagedCheckpointError
from schema.util.atomic_file import write_text

log = logging.getLogger(__name__)


class FileProgress(BaseModel):
    """One file on its way to S3. etags: of finished parts, by number."""

    model_config = ConfigDict(extra="forbid")

    upload_id: str = ""
    part_bytes: int = Field(default=0, ge=0)
    etags: dict[int, str] = Field(default_factory=dict)
    sha256: str = ""
    done: bool = False


class UploadProgress(BaseModel):
    """One directory on its way to one target. stamp: identity of its contents."""

    model_config = ConfigDict(extra="forbid")

    step: int
    stamp: str
    done: bool = False
    files: dict[str, FileProgress] = Field(default_factory=dict)


class UploadRecord:
    """The record of one upload; methods may be called from several threads."""

    def __init__(self, file: Path, progress: UploadProgress) -> None:
        self.file, self.progress = file, progress
        self._lock = threading.Lock()

    def save(self) -> None:
        """Write it to disk."""
        with self._lock:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, self.progress.model_dump_json(indent=1), durable=True)

    def finished_part(self, name: str, number: int, etag: str) -> None:
        with self._lock:
            self.progress.files[name].etags[number] = etag
        self.save()

    def file_progress(self, name: str) -> FileProgress:
        with self._lock:
            return self.progress.files.setdefault(name, FileProgress())


def file_of(directory: Path, name: str, target: str) -> Path:
    return directory / f"{name}.{target}.json"


def open_record(file: Path, path: Path, step: int) -> UploadRecord:
    """The record of an upload: what is known of it, or a new one where these contents are not those it knows.

    Raises `OSError`: the directory cannot be read."""
    stamp = stamp_of(path)
    known = read_record(file)
    if known is not None and known.progress.stamp == stamp:
        return known
    return UploadRecord(file, UploadProgress(step=step, stamp=stamp))


def read_record(file: Path) -> UploadRecord | None:
    """None if there is none, or it cannot be read: then the upload begins again."""
    try:
        return UploadRecord(file, UploadProgress.model_validate(json.loads(file.read_text())))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        log.warning("%s cannot be read, the upload begins again: %s", file, error)
        return None


def files_in(path: Path) -> list[Path]:
    """All files below a directory, by name."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def stamp_of(path: Path) -> str:
    """Identity of a directory's contents; of a checkpoint the hash of its manifest, which names those of all files.

    So the upload of a model that is exported again from the same weights goes on where it was. Raises `OSError`."""
    if (path / MANIFEST).exists():
        return hash_of_file(path / MANIFEST).hash
    lines = [f"{file.relative_to(path)} {hash_of_file(file).hash}" for file in files_in(path)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def check_whole(path: Path) -> None:
    """Raises `DamagedCheckpointError` for a checkpoint that is not what was written: no copy is made of it."""
    if not (path / MANIFEST).exists():
        return
    wrong = faults(path, read_manifest(path).files)
    if wrong:
        raise DamagedCheckpointError(f"{'; '.join(wrong[:3])}: put back the right files, or delete {path}")
