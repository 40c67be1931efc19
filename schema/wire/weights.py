"""What a published weight version looks like to those who fetch it.

A *publication* is a small record that the controller hands out. It points at a *manifest*, a JSON file in the
weight store that names every data file and tensor with its hash. The manifest's own hash is in the publication,
so a replica that trusts the controller can check every byte before it uses one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MANIFEST_FORMAT: Literal[1] = 1
StoreKey = Annotated[
    str,
    Field(
        max_length=512,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$",
        description="Where the manifest lies in the weight store; nothing that leaves it.",
    ),
]


class Publication(BaseModel):
    """One published version. Ids rise by one per publication, over all timelines of a job; the first is 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: int = Field(ge=1)
    version: int = Field(ge=0, description="Committed steps contained in the weights.")
    timeline: int = Field(ge=0)
    uri: StoreKey
    manifest_hash: str = Field(max_length=256)
    content_hash: str = Field(
        max_length=256, description="Hash over all tensors' names, dtypes, shapes and hashes."
    )
    n_bytes: int = Field(ge=0)


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        max_length=255,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Beside the manifest; no folders.",
    )
    n_bytes: int = Field(ge=0)
    hash: str


class TensorEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str = Field(description="As safetensors writes it: F32, BF16, F16, …")
    shape: list[int]
    file: str
    hash: str = Field(description="xxh3-128 of the tensor's bytes in C order.")


class WeightManifest(BaseModel):
    """The index of one version in a store. `kind` and `base` leave room for deltas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = MANIFEST_FORMAT
    kind: Literal["full"] = "full"
    base: int | None = Field(default=None, description="Publication that a delta applies to; null when full.")
    version: int = Field(ge=0)
    timeline: int = Field(ge=0)
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]
    content_hash: str
