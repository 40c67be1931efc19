"""`[validation]`: scoring on held-out data while training goes on."""

from __future__ import annotations

from pydantic import Field

from schema.config.base import (
    MAX_TEMPERATURE,
    MOST_RANKS,
    MOST_SAMPLES,
    MOST_TOKENS,
    RewardSpec,
    Section,
    reward_weights,
)
from schema.config.sections.dataset import DatasetConfig


class ValidationConfig(Section):
    """`[validation]`: scoring on held-out data while training goes on."""

    enable: bool = Field(default=False, description="Whether validation runs.")
    freq: int = Field(default=20, ge=1, description="Validation every so many training steps.")
    before: bool = Field(default=True, description="Whether the initial weights are validated too.")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SAMPLES,
        description="Prompts per validation lease. Unset: as in training.",
    )
    dataset: DatasetConfig = Field(
        default_factory=DatasetConfig,
        description="The held-out data. Empty name: the rows held out by "
        "train.train_policy.dataset.test_size.",
    )
    temperature: float = Field(
        default=0.0,
        ge=0.0,
        le=MAX_TEMPERATURE,
        description="Sampling temperature, at least 0.01 and at most 100; 0.0: greedy.",
    )
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="Nucleus sampling. Unset: off.")
    top_k: int | None = Field(default=1, ge=-1, description="Only the k likeliest tokens; -1 or 0: off.")
    repetition_penalty: float = Field(
        default=1.0, gt=0.0, description="Penalty on tokens already seen; 1.0: off."
    )
    n_generation: int = Field(default=1, ge=1, le=MOST_SAMPLES, description="Samples per prompt.")
    max_response_length: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="Longest answer in tokens. Unset: rollout.max_response_length.",
    )
    reward_function: RewardSpec = Field(
        default={},
        description="Reward functions, written as in train.train_policy.reward_function. Empty: the same as "
        "there.",
    )
    max_replicas: int = Field(
        default=1, ge=1, le=MOST_RANKS, description="Rollout replicas that may validate at the same time."
    )

    @property
    def reward_weights(self) -> dict[str, float]:
        """Reward function -> weight; empty: the training rewards."""
        return reward_weights(self.reward_function)
