"""`[validation]`: scoring on held-out data while training goes on; the loss there, in supervised training."""

from __future__ import annotations

from schema.config.base import (
    MAX_TEMPERATURE,
    Count,
    Positive,
    Ranks,
    RewardSpec,
    Samples,
    Section,
    Tokens,
    reward_weights,
)
from schema.config.key import cosmos_key, key
from schema.config.sections.dataset import DatasetConfig


# fmt: off
class ValidationConfig(Section):
    """`[validation]`: scoring on held-out data while training goes on."""

    enable: bool = cosmos_key(False, "Whether validation runs.",
        acts="file: The held-out data, and that versions are scored.")
    freq: Count = cosmos_key(20, "Validation every so many training steps.",
        acts="request or reply: Which versions are scored.")
    before: bool = key(True, "Whether the initial weights are validated too.",
        acts="request or reply: Whether version 0 is scored.")
    batch_size: Samples | None = cosmos_key(None,
        "Prompts per validation lease; in supervised training conversations per micro-batch. Unset: as in training.",
        acts="request or reply: Prompts of a validation lease. number: Rows of a micro-batch of the pass.",
        example=128)
    dataset: DatasetConfig = cosmos_key(DatasetConfig,
        "The held-out data. Empty name: the rows held out by train.train_policy.dataset.test_size.",
        inside={"test_size": "refusal: Held-out rows are taken from the training data."})
    temperature: float = cosmos_key(0.0, "Sampling temperature, at least 0.01 and at most 100; 0.0: greedy.",
        ge=0.0, le=MAX_TEMPERATURE, acts="sampling parameter: `temperature` of validation.")
    top_p: float | None = cosmos_key(None, "Nucleus sampling. Unset: off.",
        gt=0.0, le=1.0, acts="sampling parameter: `top_p` of validation.", example=0.95)
    top_k: int | None = cosmos_key(1, "Only the k likeliest tokens; -1 or 0: off.",
        ge=-1, acts="sampling parameter: `top_k` of validation.")
    repetition_penalty: Positive = cosmos_key(1.0, "Penalty on tokens already seen; 1.0: off.",
        acts="sampling parameter: `repetition_penalty` of validation.")
    n_generation: Samples = cosmos_key(1, "Samples per prompt.",
        acts="request or reply: Samples of a validation prompt.")
    max_response_length: Tokens | None = cosmos_key(None,
        "Longest answer in tokens. Unset: rollout.max_response_length.",
        acts="sampling parameter: `max_tokens` of validation.", example=2048)
    reward_function: RewardSpec = cosmos_key({},
        "Reward functions, written as in train.train_policy.reward_function. Empty: the same as there.",
        acts="request or reply: Rewards and score of a validation sample.", example={"boxed_math": 1.0})
    max_replicas: Ranks = key(1, "Rollout replicas that may validate at the same time.",
        acts="request or reply: Replicas that hold validation leases.")

    @property
    def reward_weights(self) -> dict[str, float]:
        """Reward function -> weight; empty: the training rewards."""
        return reward_weights(self.reward_function)
