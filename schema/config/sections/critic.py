"""`[critic]`: the value model that `advantage_estimator = "gae"` needs."""

from __future__ import annotations

from typing import Literal

from schema.config.base import Count, Natural, UnitFloat
from schema.config.key import cosmos_key, key
from schema.config.sections.model_keys import CheckpointingKeys, ModelKeys
from schema.config.sections.optimizer import OptimizerKeys, PrecisionKeys
from schema.config.sections.policy import LoraConfig, ParallelismConfig


class CriticConfig(CheckpointingKeys, ModelKeys, PrecisionKeys, OptimizerKeys):
    """`[critic]`: the value model. It takes the keys of the policy's model, mesh, optimizer and batches."""

    enable: bool = key(False, "Whether a critic is trained.")
    model_name_or_path: str | None = key(
        None,
        "Model with a value head on top. Unset: the policy's model.",
        min_length=1,
        example="Qwen/Qwen3-0.6B",
    )
    parallelism: ParallelismConfig | None = cosmos_key(
        None, "Its mesh. Unset: it is sharded like the policy."
    )
    lora: LoraConfig | None = cosmos_key(None, "Low-rank adapters. Unset: all weights are trained.")
    warmup_steps: Natural = key(0, "Steps for which only the critic learns, before the policy does.")
    value_clip: UnitFloat = key(0.5, "Values move at most this far from the old ones inside the loss.")
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = key(
        "token-mean", "How token losses become one number; see train.train_policy.loss_type."
    )
    mu_iterations: Count = key(1, "Passes over each batch.")
    batch_size_per_optimize: Count | None = key(
        None, "Samples per optimizer step. Unset: the whole batch.", example=64
    )
    mini_batch: Count = key(2, "Samples per micro-batch.")
    max_token_len_per_mini_batch: Count | None = key(
        None, "Hard cap on the tokens of a micro-batch, in place of mini_batch.", example=16384
    )
    forward_mini_batch: Count | None = key(
        None, "Samples per micro-batch of the pass for values. Unset: mini_batch.", example=4
    )
    mini_batch_shuffle: bool = key(
        False, "Whether samples are shuffled (seeded) before each pass of mu_iterations."
    )
