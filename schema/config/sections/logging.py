"""`[logging]`: where metrics go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import NonEmptyStr, Section


class LoggingConfig(Section):
    """`[logging]`: where metrics go."""

    logger: list[Literal["console", "wandb", "tensorboard", "mlflow", "swanlab"]] = Field(
        default=["console"], description="Trackers that receive the metrics."
    )
    project_name: NonEmptyStr = Field(default="cosmos_rl", description="Project name for trackers.")
    experiment_name: str | None = Field(
        default=None,
        min_length=1,
        description="Short name of this run. Unset: the name of the output directory.",
    )
    log_validation_samples: int = Field(
        default=0, ge=0, description="Answers of each validation that are sent to the trackers."
    )
