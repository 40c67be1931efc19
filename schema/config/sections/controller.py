"""`[controller]`: the service between trainers and generators. All times are seconds."""

from __future__ import annotations

from typing import Literal

from schema.config.base import MAX_TIMEOUT, Count, Natural, NonEmptyStr, Seconds, Section
from schema.config.key import key


# fmt: off
class ControllerConfig(Section):
    """`[controller]`: the service between trainers and generators."""

    host: NonEmptyStr = key("127.0.0.1", "Address to listen on; 0.0.0.0 for replicas on other machines.",
        acts="process: Address of the controller.")
    port: int = key(0, "Port to listen on; 0: any free one.", ge=0, le=65535, acts="process: Port of the controller.")
    heartbeat_interval: Seconds = key(2.0, "Seconds between a replica's heartbeats.",
        acts="request or reply: Answer to a registration.")
    heartbeat_timeout: Seconds = key(15.0, "Seconds without a heartbeat after which a replica counts as dead.",
        acts="request or reply: When a silent replica counts as lost.")
    lease_timeout: Seconds = key(120.0, "Seconds after which a lease that no heartbeat renews expires.",
        acts="request or reply: When an unrenewed lease goes to another replica.")
    lock_timeout: float = key(10.0,
        "Seconds without a sign of life after which a standby controller takes the job over.", ge=1.0, le=MAX_TIMEOUT,
        acts="process: When a standby controller takes the job over.")
    start_timeout: Seconds = key(600.0, "Seconds in which all first replicas must have registered.",
        acts="request or reply: When a job whose replicas do not come fails.")
    controller_lost_timeout: Seconds = key(1800.0,
        "Seconds for which workers keep trying to reach a lost controller.",
        acts="process: When a worker that reaches no controller ends.")
    oversample: float = key(1.0,
        "Groups in the making per group needed, for dynamic sampling; more only within the staleness bound.", ge=1.0,
        acts="request or reply: How many groups are leased.")
    on_stale: Literal["wait", "drop", "mask_tokens"] = key("wait",
        "When a step waits for groups that are due: `wait` for them, `drop` them after straggler_timeout, or train "
        "what is there and mask the tokens that are too old.",
        acts="request or reply: Whether late groups are waited for or dropped.",
        unbuilt="masking of tokens that are too old", neutral=("wait", "drop"))
    straggler_timeout: Seconds | None = key(None,
        "Seconds that a step waits for due groups before on_stale = drop drops them.",
        acts="request or reply: When late groups are dropped.", example=60.0)
    max_attempts: Count = key(5, "Attempts at a group before it is dropped as poison; pre-emptions do not count.",
        acts="request or reply: After how many failures a group is dropped.")
    max_request_bytes: int = key(256 * 1024 * 1024, "Largest request body in bytes.",
        ge=1024, acts="request or reply: Which requests are answered 413.")
    tls_cert: str = key("",
        "PEM file of the controller's certificate, with its chain: with it the API is served over https.",
        acts="process: Certificate that the API is served with.", example="/etc/ssl/this-side.pem")
    tls_key: str = key("", "PEM file of the private key of controller.tls_cert.",
        acts="process: Certificate that the API is served with.", example="/etc/ssl/this-side.key")
    tls_ca: str = key("",
        "PEM file of the authorities that may have signed controller.tls_cert: launcher and workers trust them. "
        "Empty: those that the system trusts.", acts="process: `COSMOS_TLS_CA` of the workers: whom they trust.",
        example="/etc/ssl/private-ca.pem")
    max_buffered_bytes: int = key(1024 * 1024 * 1024,
        "Bytes of request bodies that may be held at once, three quarters of them by rollout replicas; beyond them "
        "callers get 503 and come back later. The first 64 KiB of each body are not counted, and a single body is "
        "always taken.", ge=1024, acts="request or reply: Which requests are answered 503 while others are read.")
    payload_store: str = key("",
        "Directory that all rollout and policy replicas share: large samples travel through it and not through the "
        "controller. Empty: all payloads are kept in Redis.",
        acts="file: Whether the payloads of large samples lie in this directory.", example="/shared/payloads")
    payload_bytes: Natural = key(256 * 1024,
        "Samples of this size and above travel through controller.payload_store.",
        acts="file: Which samples lie in the payload store.")
    require_durable_redis: bool = key(False,
        "Whether a Redis without append-only file, or with an evicting policy, is an error instead of a warning.",
        acts="refusal: A server without an append-only file.")

    @property
    def scheme(self) -> Literal["http", "https"]:
        """How the API is reached."""
        return "https" if self.tls_cert else "http"
