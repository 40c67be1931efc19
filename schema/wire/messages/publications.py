"""Messages about published weights: the trainer announces them, replicas report what came of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.util.text import PLAIN, Prose
from schema.wire.messages.base import Count, Message, Seconds, Text, TrainerRequest
from schema.wire.weights import Offer, Publication, StoreKey


# fmt: off
class PublishRequest(TrainerRequest):
    version: Count = Field(description="Committed steps contained in the weights.")
    uri: StoreKey
    manifest_hash: Text
    content_hash: Text
    n_bytes: Count
    kind: Literal["full", "delta"] = "full"
    begins: int | None = Field(default=None, ge=1, lt=2**53,
        description="Publication whose full version its chain begins with (`Publication.begins`); null: this one.")
    full_bytes: Count = Field(default=0, description="Bytes of all its tensors, however it is stored.")
    changed: Count = Field(default=0, description="Elements that differ from the version before.")
    elements: Count = Field(default=0, description="Elements of all its tensors; 0: not known.")
    metrics: Seconds = Field(default_factory=dict)
    offer: Offer | None = None
    newest_publication: int = Field(default=0, ge=0, lt=2**53,
        description="The highest publication id that the trainer ever heard of.")


class PublishReply(Message):
    publication: Publication
    collectable: list[int] = Field(default_factory=list,
        description="Publications that are not needed any more: their files may be deleted.")
    anchor: bool = Field(default=False,
        description="Attach a full version to the next publication: a replica could not read what there is.")


UpdateMode = Literal["in_place", "full"]
Transport = Literal["store", "collective"]


class UpdateReport(Message):
    """The outcome of a publication at one rollout replica."""

    replica_id: Text
    incarnation: Count
    status: Literal["applied", "unreadable"]
    transport: Transport = "store"
    mode: UpdateMode = Field(default="full",
        description="Whether changed elements were written in place, or all tensors loaded.")
    served_hash: str = Field(default="", max_length=256, pattern=PLAIN,
        description="Content hash computed from the weights being served; empty: not computed this time.")
    differs: bool = Field(default=False,
        description="Whether a comparison found other weights than the trainer's, which may leave no hash.")
    n_bytes: Count = Field(default=0,
        description="Bytes that were fetched for it, and for earlier ones that were overtaken before use.")
    seconds: Seconds = Field(default_factory=dict)
    detail: Prose = Field(default="", max_length=4096,
        description="Why it is unreadable, or why the transport is not the one that was asked for.")


class ReplicaUpdate(Message):
    """The newest report of a replica about a publication, for people."""

    replica_id: str
    at: float = Field(description="Unix time of the report.")
    status: Literal["applied", "unreadable"]
    transport: Transport
    mode: UpdateMode
    checked: bool | None = Field(
        description="Whether the served weights were found to be the trainer's; null: not compared.")
    n_bytes: int
    seconds: dict[str, float]
    detail: str


class PublicationInfo(Message):
    """A publication as people see it."""

    publication: Publication
    at: float = Field(description="Unix time of its publication; 0: not known.")
    valid: bool = Field(description="Whether its weights are part of the run (a rewind takes them out).")
    files: Literal["kept", "listed", "collected"] = Field(
        description="`listed`: the trainer was asked to remove its files; `collected`: it has been.")
    full_bytes: int
    ratio: float | None = Field(description="Bytes stored, of those of all tensors; null: not known.")
    density: float | None = Field(description="Elements changed, of all; null: not known.")
    seconds: dict[str, float] = Field(description="Of the trainer, by stage.")
    updates: list[ReplicaUpdate] = Field(description="What replicas have reported, newest last.")


class WeightsStatus(Message):
    """The newest weights, in short; `GET /v1/publications` shows more."""

    version: int
    publication: int
    kind: Literal["full", "delta"]
    n_bytes: int
    ratio: float | None = Field(description="Bytes stored, of those of all tensors; null: not known.")
    density: float | None = Field(description="Elements changed, of all; null: not known.")
    updated: int = Field(description="Replicas that have reported it in use.")
    pause_s: float | None = Field(
        description="Longest pause of generation at the newest version that replicas have reported.")
    unreadable: int = Field(description="Reports of versions that could not be read, of this controller.")
