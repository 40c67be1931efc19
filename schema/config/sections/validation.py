"""`[validation]`: scoring on held-out data while training goes on; the loss there, in supervised training."""

from __future__ import annotations

from typing import Any

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
from schema.config.sections.dataset import DatasetConfig, DatasetPart

_AS_VALIDATION = "of this part. Unset: as [validation] says."


# fmt: off
class ValidationPart(DatasetPart):
    """One of several validation sets: a part of the data, with rewards and ways to draw answers of its own."""

    n_generation: Samples | None = key(None, f"Samples per prompt {_AS_VALIDATION}",
        acts="request or reply: Samples of a validation prompt.", example=8)
    temperature: float | None = key(None, f"Sampling temperature {_AS_VALIDATION}", ge=0.0, le=MAX_TEMPERATURE,
        acts="sampling parameter: `temperature` of the part.", example=0.6)
    top_p: float | None = key(None, f"Nucleus sampling {_AS_VALIDATION}", gt=0.0, le=1.0,
        acts="sampling parameter: `top_p` of the part.", example=0.95)
    top_k: int | None = key(None, f"Only the k likeliest tokens, -1 or 0 for all, {_AS_VALIDATION}", ge=-1,
        acts="sampling parameter: `top_k` of the part.", example=-1)
    repetition_penalty: Positive | None = key(None, f"Penalty on tokens already seen {_AS_VALIDATION}",
        acts="sampling parameter: `repetition_penalty` of the part.", example=1.1)
    max_response_length: Tokens | None = key(None, f"Longest answer in tokens {_AS_VALIDATION}",
        acts="sampling parameter: `max_tokens` of the part.", example=4096)
    reward_function: RewardSpec = key({},
        f"Reward functions, written as in train.train_policy.reward_function, {_AS_VALIDATION}",
        acts="request or reply: Rewards and score of a validation sample.", example={"boxed_math": 1.0})
    pass_score: float | None = key(None, f"Least score with which an answer passes {_AS_VALIDATION}",
        allow_inf_nan=False, acts="request or reply: pass@k of a validation.", example=0.5)

    @property
    def own(self) -> dict[str, Any]:
        """The keys of [validation] that stand here, with their values."""
        values = {name: getattr(self, name) for name in OWN_KEYS}
        return {name: value for name, value in values.items() if value not in (None, {}, "", [])}


OWN_KEYS = tuple(ValidationPart.__annotations__)
"""Keys of [validation] that each of its parts may have."""


class ValidationData(DatasetConfig):
    """The held-out data: one dataset, or several validation sets."""

    part: list[ValidationPart] = key([],  # type: ignore[assignment]  # more than other parts have
        "Several validation sets, one table each: [[validation.dataset.part]]. Each has the keys of a dataset, which "
        "then stands for none itself, and may have rewards and sampling of its own. `source` names its scores.")


class ValidationConfig(Section):
    """`[validation]`: scoring on held-out data while training goes on."""

    enable: bool = cosmos_key(False, "Whether validation runs.",
        acts="file: The held-out data, and that versions are scored.")
    freq: Count = cosmos_key(20, "Validation every so many training steps.",
        acts="request or reply: Which versions are scored.")
    before: bool = key(True, "Whether the initial weights are validated too.",
        acts="request or reply: Whether version 0 is scored.")
    only: bool = key(False,
        "Whether the job ends after validation of the initial weights: nothing is trained, and no trainer starts.",
        acts="process: A process that publishes the model in place of the trainer.", only="grpo")
    generate: bool = key(False,
        "Whether supervised training validates by answers as well: rollout replicas generate one to the last turn of "
        "each held-out conversation, from what stands in front of it, and reward_function scores them. "
        "Reinforcement always does.", acts="process: Rollout replicas of a supervised job.")
    reference_column_name: str = key("",
        "With `generate`: column of the reference answer that rewards compare with; dots reach into structs. "
        "Empty: the text of the last turn.", acts="request or reply: The answer that rewards get.", example="answer")
    batch_size: Samples | None = cosmos_key(None,
        "Prompts per validation lease; in supervised training conversations per micro-batch. Unset: as in training.",
        acts="request or reply: Prompts of a validation lease. number: Rows of a micro-batch of the pass.",
        example=128)
    dataset: ValidationData = cosmos_key(ValidationData,
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
    pass_score: float = key(1.0, "Least score with which an answer passes, for pass@k.",
        allow_inf_nan=False, acts="request or reply: pass@k of a validation.")
    max_replicas: Ranks = key(1, "Rollout replicas that may validate at the same time.",
        acts="request or reply: Replicas that hold validation leases.")

    @property
    def reward_weights(self) -> dict[str, float]:
        """Reward function -> weight; empty: the training rewards."""
        return reward_weights(self.reward_function)

    def of_set(self, label: str) -> ValidationConfig:
        """Return the keys by which the set of this label is validated: [validation], with the part's own in it."""
        part = next((part for part in self.dataset.part if part.label == label), None)
        return self if part is None else self.model_copy(update=part.own)

    @property
    def sets(self) -> dict[str, ValidationConfig]:
        """Return the keys of each validation set by its label; data without parts is one, without a label."""
        return {label: self.of_set(label) for label in [part.label for part in self.dataset.part] or [""]}
