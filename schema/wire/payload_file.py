"""Payloads that do not pass through the controller: a sample's frame in a shared directory, and a stub in its place.

    rollout replica ── frame ──▶ <store>/<job>/<group>.<lease>.<index> ──▶ trainer
          └───────── stub ─────▶ controller ── stub ──▶ trainer

A stub is a frame without tensors: the sample's header as in any frame (`schema.wire.sample`), and under "file" the
name, the length and the BLAKE2b hash of the file with the whole frame. The name follows from group, lease and index,
so it can be checked against the push that brings it, and no stub can point outside of the directory. A file is
written under another name, synced and renamed before its stub travels; readers check length and hash.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schema.util.atomic_file import replacing
from schema.wire.frame import FrameError, encode_frame, read_metadata
from schema.wire.invalid import describe

STUB_KEY = "file"
NAME = re.compile(r"(e\d{1,18}-p\d{1,18}(?:-s\d{1,9})?)\.([A-Za-z0-9_-]{1,64})\.(\d{1,9})", re.ASCII)
"""Group, lease and index of the sample: no separator of paths can be in it."""


class StubEntry(BaseModel):
    """The entry of a stub about its file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(max_length=160)
    n_bytes: int = Field(ge=8, lt=2**53)
    hash: str = Field(pattern=r"^[0-9a-f]{32}$", description="BLAKE2b of 16 bytes.")


@dataclass(frozen=True, slots=True)
class FileName:
    """The parts of a name."""

    group_id: str
    lease_id: str
    index: int

    def __str__(self) -> str:
        return f"{self.group_id}.{self.lease_id}.{self.index}"

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """The parts, or None if no sample's file has this name."""
        match = NAME.fullmatch(name)
        parsed = None if match is None else cls(match[1], match[2], int(match[3]))
        return parsed if parsed is not None and str(parsed) == name else None


def directory(store: str | Path, job_id: str) -> Path:
    """Where a job keeps its payloads. Raises `ValueError` for an id that cannot be the name of a directory."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", job_id) or set(job_id) == {"."}:
        raise ValueError(f"{job_id!r} cannot name a directory of payloads")
    return Path(store) / job_id


def write(root: Path, name: FileName, frame: bytes) -> bytes:
    """Put a sample's frame into the directory; answers the stub that is pushed instead.

    Raises:
        OSError: the directory cannot be written.
        FrameError: it is not the frame of a sample.
    """
    metadata = read_metadata(frame)
    if "sample" not in metadata:
        raise FrameError("frame has no sample header")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = root / str(name)
    with replacing(path) as neighbour, neighbour.open("wb") as file:
        file.write(frame)
        file.flush()
        os.fsync(file.fileno())
    entry = StubEntry(name=str(name), n_bytes=len(frame), hash=_hash(frame))
    return encode_frame({}, {**metadata, STUB_KEY: entry.model_dump_json()})


def read_entry(frame: bytes | memoryview) -> StubEntry | None:
    """Read a stub's entry about its file; None for a frame that carries its tensors itself. Raises `FrameError`."""
    return entry_of(read_metadata(frame))


def entry_of(metadata: Mapping[str, str]) -> StubEntry | None:
    """Read the entry from a frame's metadata; see `read_entry`."""
    text = metadata.get(STUB_KEY)
    if text is None:
        return None
    try:
        entry = StubEntry.model_validate_json(text)
    except ValidationError as error:
        raise FrameError(f"the stub of a payload is invalid: {describe(error.errors(include_url=False))}") from None
    if FileName.parse(entry.name) is None:
        raise FrameError(f"the stub of a payload names {entry.name!r}, which is not the file of a sample")
    return entry


def is_there(root: Path, entry: StubEntry) -> bool:
    """Whether the file of a stub exists and has its length."""
    try:
        return (root / entry.name).stat().st_size == entry.n_bytes
    except OSError:
        return False


def resolve(root: Path | None, frame: bytes | memoryview) -> bytes | memoryview:
    """The whole frame of a sample: the given one, or that which it stands for, checked.

    Raises:
        FrameError: the file is missing, of another length or content, or the directory does not exist.
    """
    entry = read_entry(frame)
    if entry is None:
        return frame
    if root is None:
        raise FrameError(
            f"the payload {entry.name} lies in a shared directory, but controller.payload_store is empty"
        )
    path = root / entry.name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FrameError(f"the payload {path} cannot be read: {error.strerror or error}") from None
    if len(data) != entry.n_bytes or not hmac.compare_digest(_hash(data), entry.hash):
        raise FrameError(f"the payload {path} is damaged: its {len(data)} bytes are not those that were pushed")
    return data


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
