"""The form of a published weight version, as those who fetch it see it.

A *publication* is a small record that the controller hands out. It points at a *manifest*, a JSON file in the
weight store that names every data file and tensor with its hash. The manifest's own hash is in the publication,
so a replica that trusts the controller can check every byte before it uses one.

A version is stored *full* (all tensors), as a *delta* (what changed against the version before), or both. The
manifest of a delta lists the versions before it as a *chain* of links, each with its hashes, so a process that holds
any of them, or nothing, finds a way from there. `docs/weights.md` specifies the bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from schema.util.text import PLAIN

MANIFEST_FORMAT: Literal[2] = 2
MAX_CHAIN = 512
"""Links that a manifest may list."""
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
"""A tensor takes about 300 bytes of it: room for 200,000, ten times as many as the largest models have."""
StoreKey = Annotated[
    str,
    Field(
        max_length=512,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$",
        description="Where the manifest lies in the weight store; nothing that leaves it.",
    ),
]


class _Record(BaseModel):
    """Unknown fields are refused, and nothing changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# fmt: off
class Offer(_Record):
    """Where the trainer hands a publication out itself, for some seconds after it was announced.

    Whoever has the token may take part; what is received is believed only where it has the publication's hashes.
    """

    address: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]*$|^::1$")
    port: int = Field(ge=1, le=65535)
    round: int = Field(ge=1, lt=2**53, description="Rises by one per offer of a trainer process.")
    token: str = Field(max_length=32, pattern=r"^[0-9a-f]{32}$", description="Drawn at random for each offer.")
    fabric: Literal["tcp", "nccl"] = Field(default="tcp",
        description="What carries it: TCP between host memories, or NCCL between GPUs.")


class Publication(_Record):
    """One published version. Ids rise by one per publication, over all timelines of a job; the first is 1."""

    id: int = Field(ge=1)
    version: int = Field(ge=0, description="Committed steps contained in the weights.")
    timeline: int = Field(ge=0)
    uri: StoreKey
    manifest_hash: str = Field(max_length=256, pattern=PLAIN)
    content_hash: str = Field(max_length=256, pattern=PLAIN,
        description="Hash over all tensors' names, dtypes, shapes and hashes.")
    n_bytes: int = Field(ge=0, description="Bytes of its data files.")
    kind: Literal["full", "delta"] = "full"
    begins: int = Field(default=0, ge=0,
        description="Publication whose full version a replica without weights begins with: all from there on up to "
        "this one are needed. 0: this one itself.")
    offer: Offer | None = Field(default=None,
        description="Of the collective transport; the files lie in the store all the same.")


class FileEntry(_Record):
    name: str = Field(max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Beside the manifest; no folders.")
    n_bytes: int = Field(ge=0)
    hash: str


class TensorEntry(_Record):
    """One tensor of a version. In the manifest of a delta: one that changed."""

    dtype: str = Field(description="As safetensors writes it: F32, BF16, F16, …")
    shape: list[int]
    file: str
    hash: str = Field(
        description="Of the tensor as it is in this version: xxh3-128 over the digests of its blocks, each of 2^20 "
        "elements in C order.")
    changed: int | None = Field(default=None, ge=0,
        description="Elements that the file holds of it, as sparse blocks (U8); null: the file holds all of it.")


class Piece(_Record):
    """A manifest in the store, and the bytes of the data files that it names."""

    uri: StoreKey
    manifest_hash: str = Field(max_length=256)
    n_bytes: int = Field(ge=0)


class ChainLink(_Record):
    """One version of a chain: how to come to it from the link before, and from nothing."""

    version: int = Field(ge=0)
    content_hash: str = Field(max_length=256)
    delta: Piece | None = None
    full: Piece | None = None


class WeightManifest(_Record):
    """The index of one stored form of one version."""

    format: Literal[2] = MANIFEST_FORMAT
    kind: Literal["full", "delta"] = "full"
    version: int = Field(ge=0)
    timeline: int = Field(ge=0)
    base: str | None = Field(default=None,
        description="Content hash of the version that a delta applies to; null when full.")
    files: list[FileEntry]
    tensors: dict[str, TensorEntry] = Field(description="All tensors; of a delta those that changed.")
    content_hash: str = Field(description="Of all tensors of the version, whatever this manifest lists.")
    chain: list[ChainLink] = Field(default_factory=list, max_length=MAX_CHAIN,
        description="Versions before it, oldest first, as far as they are kept; the last one is the base of a delta.")
