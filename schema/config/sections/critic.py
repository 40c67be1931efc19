"""`[critic]`: the value model that `advantage_estimator = "gae"` needs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import UnitFloat
from schema.config.sections.model_keys import CheckpointingKeys, ModelKeys
from schema.config.sections.optimizer import OptimizerKeys, PrecisionKeys
from schema.config.sections.policy import LoraConfig, ParallelismConfig


class CriticConfig(CheckpointingKeys, ModelKeys, PrecisionKeys, OptimizerKeys):
    """`[critic]`: the value model. It takes the keys of the policy's model, mesh, optimizer and batches."""

    enable: bool = Field(default=False, description="Whether a critic is trained.")
    model_name_or_path: str | None = Field(
        default=None, min_length=1, description="Model with a value head on top. Unset: the policy's model."
    )
    parallelism: ParallelismConfig | None = Field(
        default=None, description="Its mesh. Unset: it is sharded like the policy."
    )
    lora: LoraConfig | None = Field(
        default=None, description="Low-rank adapters. Unset: all weights are trained."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps for which only the critic learns, before the policy does."
    )
    value_clip: UnitFloat = Field(
        default=0.5, description="Values move at most this far from the old ones inside the loss."
    )
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        default="token-mean",
        description="How token losses become one number; see train.train_policy.loss_type.",
    )
    mu_iterations: int = Field(default=1, ge=1, description="Passes over each batch.")
    batch_size_per_optimize: int | None = Field(
        default=None, ge=1, description="Samples per optimizer step. Unset: the whole batch."
    )
    mini_batch: int = Field(default=2, ge=1, description="Samples per micro-batch.")
    max_token_len_per_mini_batch: int | None = Field(
        default=None, ge=1, description="Hard cap on the tokens of a micro-batch, in place of mini_batch."
    )
    forward_mini_batch: int | None = Field(
        default=None, ge=1, description="Samples per micro-batch of the pass for values. Unset: mini_batch."
    )
    mini_batch_shuffle: bool = Field(
        default=False, description="Whether samples are shuffled (seeded) before each pass of mu_iterations."
    )
