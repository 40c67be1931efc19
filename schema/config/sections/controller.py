"""`[controller]`: the service between trainers and generators. All times are seconds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import MAX_TIMEOUT, NonEmptyStr, Section


class ControllerConfig(Section):
    """`[controller]`: the service between trainers and generators."""

    host: NonEmptyStr = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 for replicas on other machines."
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    heartbeat_interval: float = Field(
        default=2.0, gt=0.0, le=MAX_TIMEOUT, description="Seconds between a replica's heartbeats."
    )
    heartbeat_timeout: float = Field(
        default=15.0,
        gt=0.0,
        le=MAX_TIMEOUT,
        description="Seconds without a heartbeat after which a replica counts as dead.",
    )
    lease_timeout: float = Field(
        default=120.0,
        gt=0.0,
        le=MAX_TIMEOUT,
        description="Seconds after which a lease that no heartbeat renews expires.",
    )
    lock_timeout: float = Field(
        default=10.0,
        ge=1.0,
        le=MAX_TIMEOUT,
        description="Seconds without a sign of life after which a controller that stands by takes the job over.",
    )
    start_timeout: float = Field(
        default=600.0,
        gt=0.0,
        le=MAX_TIMEOUT,
        description="Seconds in which all first replicas must have registered.",
    )
    controller_lost_timeout: float = Field(
        default=1800.0,
        gt=0.0,
        le=MAX_TIMEOUT,
        description="Seconds for which workers keep trying to reach a lost controller.",
    )
    oversample: float = Field(
        default=1.0,
        ge=1.0,
        description="Groups in the making per group needed, for dynamic sampling; more only within the "
        "staleness bound.",
    )
    on_stale: Literal["wait", "drop", "mask_tokens"] = Field(
        default="wait",
        description="When a step waits for groups that are due: `wait` for them, `drop` them after "
        "straggler_timeout, or train what is there and mask the tokens that are too old.",
    )
    straggler_timeout: float | None = Field(
        default=None,
        gt=0.0,
        le=MAX_TIMEOUT,
        description="Seconds that a step waits for due groups before on_stale = drop drops them.",
    )
    max_attempts: int = Field(
        default=5,
        ge=1,
        description="Attempts at a group before it is dropped as poison; pre-emptions do not count.",
    )
    max_request_bytes: int = Field(
        default=256 * 1024 * 1024, ge=1024, description="Largest request body in bytes."
    )
    tls_cert: str = Field(
        default="",
        description="PEM file of the controller's certificate, with its chain: with it the API is served over "
        "https.",
    )
    tls_key: str = Field(default="", description="PEM file of the private key of controller.tls_cert.")
    tls_ca: str = Field(
        default="",
        description="PEM file of the authorities that may have signed controller.tls_cert: launcher and workers "
        "trust them. Empty: those that the system trusts.",
    )
    max_buffered_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=1024,
        description="Bytes of request bodies that may be held at once, three quarters of them by rollout replicas; "
        "beyond them callers are told to come back. The first 64 KiB of each body are not counted, and a single "
        "body is always taken.",
    )
    payload_store: str = Field(
        default="",
        description="Directory that all rollout and policy replicas share: large samples travel through it and "
        "not through the controller. Empty: all payloads are kept in Redis.",
    )
    payload_bytes: int = Field(
        default=256 * 1024,
        ge=0,
        description="Samples of this size and above travel through controller.payload_store.",
    )
    require_durable_redis: bool = Field(
        default=False,
        description="Whether a Redis without append-only file, or with an evicting policy, is an error "
        "instead of a warning.",
    )

    @property
    def scheme(self) -> Literal["http", "https"]:
        """How the API is reached."""
        return "https" if self.tls_cert else "http"
