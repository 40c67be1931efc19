"""`[launcher]`: how cosmos-launch runs the processes of a job. All times are seconds."""

from __future__ import annotations

from pydantic import Field

from schema.config.base import MAX_TIMEOUT, MOST_PROCESSES, Section


class LauncherConfig(Section):
    """`[launcher]`: how the processes of a job are run."""

    max_restarts: int = Field(
        default=3, ge=0, description="Restarts of one replica before the job ends with an error."
    )
    restart_backoff: float = Field(
        default=1.0,
        ge=0.0,
        le=MAX_TIMEOUT,
        description="Seconds before the first restart; doubled for each further one.",
    )
    restart_backoff_max: float = Field(
        default=60.0, ge=0.0, le=MAX_TIMEOUT, description="Longest wait before a restart in seconds."
    )
    shutdown_timeout: float = Field(
        default=30.0,
        gt=0.0,
        le=MAX_TIMEOUT,
        description="Seconds in which processes may end in order before they are killed.",
    )
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        le=MOST_PROCESSES,
        description="Torch threads of each worker process. Unset: cores divided by worker processes, at "
        "least 1.",
    )
    export_final: bool = Field(
        default=True, description="Whether the trained model is exported for transformers at the end."
    )
