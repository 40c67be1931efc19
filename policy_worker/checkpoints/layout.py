"""The files of a checkpoint, and its manifest.

    <run_dir>/checkpoints/
      step-00000020/               complete, or it does not have this name
        model-00000.safetensors      what rank 0 held of the model (`storage`)
        optimizer-00000.safetensors  and of the optimizer; `critic-…`, `critic_optimizer-…`, `reference-…` likewise
        ema-00000.safetensors        and of the moving average, where there is one
        rng-00000.safetensors        random states of rank 0 (`rng`)
        ledger.json                  LedgerSnapshot: frontier and untrained positions
        chat_template.jinja          the job's own, with which its data are prepared
        export/                      the model for transformers, with `train.ckpt.export_safetensors`
        manifest.json                sizes and hashes of all that, written last
      latest                       name of the newest one, moved last
      best.json                    name and score of the best validated one
      .step-00000040.1b2c3d4e/     being written; its `lock` is held by who writes it
      .trash-9a8b7c6d/             being deleted

Nothing here is a pickle. Hashes are xxh3-128, against torn, stale and flipped bytes, not against forgers.

A checkpoint is whole if every file of its manifest is there, of its size, with its hash. Reading all of it takes as
long as the disk does, so the ranks share the files. Sizes are compared first, before anything is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from policy_worker.errors import CheckpointError, DamagedCheckpointError
from schema.config.chat_template import FILE as TEMPLATE

FORMAT = 2
MANIFEST, LEDGER, EXPORT = "manifest.json", "ledger.json", "export"
LATEST, BEST, LOCK = "latest", "best.json", "lock"
STEP, UNFINISHED, TRASH = "step-", ".step-", ".trash-"
_NAME = re.compile(rf"{STEP}(\d{{8,}})")
_CHUNK = 4 * 1024 * 1024


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileFacts(_Facts):
    """Size and hash of one file."""

    bytes: int = Field(ge=0)
    hash: str


class ScheduleFacts(_Facts):
    """The learning-rate schedule: fields of `policy_worker.trained.lr_schedule.Schedule`, and the rates at factor 1.

    further_lrs: of the optimizers after the first."""

    peak_lr: float
    further_lrs: tuple[float, ...] = ()
    total_steps: int
    warmup_steps: int | float
    warmup_start_factor: float
    decay_ratio: float | None
    decay_type: str | None
    min_factor: float
    decay_steps: int | None = None
    num_cycles: float = 0.5
    wsd_decay_type: str = "cosine"


class DataFacts(_Facts):
    """Which stream of rows supervised training has consumed, and how far; reinforcement has its ledger.

    grown: numbers of rows that the stream had before. early: rows with which it may have begun, before the others
    were prepared; unfinished: whether the others are still being prepared. A checkpoint does not hold these three.
    digest: the hash of the prepared rows; empty: an earlier version saved it.
    """

    rows: int
    seed: int
    shuffle: bool
    batch: int
    position: int
    digest: str = ""
    grown: tuple[int, ...] = Field(default=(), exclude=True)
    early: int = Field(default=0, exclude=True)
    unfinished: bool = Field(default=False, exclude=True)

    def at(self, step: int) -> DataFacts:
        """The same stream where a run is in it after `step` committed steps."""
        return self.model_copy(update={"position": step * self.batch})


def _below(name: str) -> str:
    """A name of a file of a checkpoint: nothing that leads out of it."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is not the name of a file below the checkpoint")
    return name


class Manifest(_Facts):
    """The facts of a checkpoint. lineage: [timeline, its first step] of each timeline that led here, oldest first."""

    format: int = FORMAT
    step: int = Field(ge=0, description="Committed steps that the weights contain.")
    timeline: int
    lineage: list[tuple[int, int]]
    epochs: int = Field(default=0, description="Passes over the data whose rows were all trained or dropped.")
    world: int = Field(ge=1, description="Ranks that wrote it.")
    written_at: float = Field(description="Unix time.")
    architecture: str = Field(description="Class of the transformers model.")
    contents: list[str] = Field(description="train.ckpt.save_contents when it was written.")
    exported: bool
    schedule: ScheduleFacts | None
    critic_schedule: ScheduleFacts | None = None
    data: DataFacts | None
    bases: dict[str, str] = Field(
        default={}, description="Digests of the models whose adapters are here: `policy`, `critic`."
    )
    kl_coefficient: float | None = Field(default=None, description="Of the KL in the reward, as it had adapted.")
    loss_scales: dict[str, tuple[float, int]] = Field(
        default={}, description="Loss scale, and steps since it changed, of models in float16: `policy`, `critic`."
    )
    files: dict[Annotated[str, AfterValidator(_below)], FileFacts]


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that has its name and a readable manifest; its other files may still be damaged."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Committed steps that it covers."""
        return self.manifest.step

    @property
    def age(self) -> tuple[int, int]:
        """Timeline and step, by which checkpoints of a run are in order."""
        return self.manifest.timeline, self.manifest.step


def template_of(checkpoint: FoundCheckpoint) -> str | None:
    """The job's own chat template that a checkpoint was trained with; None: none. Raises OSError, ValueError."""
    if TEMPLATE not in checkpoint.manifest.files:
        return None
    return (checkpoint.path / TEMPLATE).read_bytes().decode()


def checkpoints_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def name_of(step: int) -> str:
    return f"{STEP}{step:08d}"


def named_in(directory: Path) -> list[tuple[int, Path]]:
    """List what has the name of a checkpoint, by step; copies kept next to them have other names."""
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.glob(f"{STEP}*"))
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def state_file(kind: str, rank: int) -> str:
    """kind: the first part of the keys in it, such as `model`, `optimizer` or `critic`."""
    return f"{kind}-{rank:05d}.safetensors"


def state_files(directory: Path, kind: str) -> list[Path]:
    """All ranks' files of a kind, in order of rank."""
    return sorted(directory.glob(f"{kind}-*.safetensors"))


def rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The manifest, with a hash of itself."""
    body = manifest.model_dump(mode="json")
    text = json.dumps({"manifest": body, "hash": _hash_of(body)}, indent=1)
    (directory / MANIFEST).write_text(text)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises `CheckpointError`: there is none, or it is of another format; `DamagedCheckpointError`: it is not what was
    written."""
    path = directory / MANIFEST
    try:
        written = json.loads(path.read_text())
    except FileNotFoundError:
        lacks = f"it has no {MANIFEST}" if directory.is_dir() else "it does not exist"
        raise CheckpointError(f"{directory} is not a checkpoint: {lacks}") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    body = written.get("manifest") if isinstance(written, dict) else None
    if not isinstance(body, dict):
        raise DamagedCheckpointError(f"{path} is not a manifest of a checkpoint")
    if body.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {body.get('format')}, this build reads format {FORMAT}: resume it with the build "
            f"that wrote it, or start from its export with policy.model_name_or_path"
        )
    if written.get("hash") != _hash_of(body):
        raise DamagedCheckpointError(f"{path} was altered: it does not have the hash that it names")
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        raise DamagedCheckpointError(f"{path} is not a manifest of a checkpoint: {error}") from error


def look(directory: Path) -> FoundCheckpoint:
    """The checkpoint in a directory. Raises as `read_manifest`."""
    return FoundCheckpoint(directory, read_manifest(directory))


def hash_of_file(path: Path) -> FileFacts:
    """Read a file to its end. Raises `OSError`."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
            size += len(chunk)
    return FileFacts(bytes=size, hash=state.hexdigest())


def _hash_of(body: dict[str, Any]) -> str:
    text: str = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    return text


def share_of(files: Mapping[str, FileFacts], rank: int, world: int) -> list[str]:
    """The files that this rank verifies: together all, each once, about as many bytes each."""
    by_size = sorted(files, key=lambda name: (-files[name].bytes, name))
    return by_size[rank::world]


def faults(directory: Path, files: Mapping[str, FileFacts], names: list[str] | None = None) -> list[str]:
    """List what is wrong with these files (None: all) of a checkpoint, each with its path."""
    chosen = list(files) if names is None else names
    return [fault for name in chosen if (fault := _fault(directory / name, files[name])) is not None]


def _fault(path: Path, written: FileFacts) -> str | None:
    try:
        size = path.stat().st_size
        if size != written.bytes:
            return f"{path} has {size} bytes, written were {written.bytes}"
        if hash_of_file(path).hash != written.hash:
            return f"{path} was altered: it does not have the hash of what was written"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None
