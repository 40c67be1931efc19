"""`[evaluation]`: scoring answers that a file already holds, without generating any."""

from __future__ import annotations

from pydantic import Field

from schema.config.base import NonEmptyStr, RewardSpec, Section, reward_weights
from schema.config.sections.dataset import DatasetConfig


class EvaluationConfig(Section):
    """`[evaluation]`: scoring answers that a file already holds."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig, description="The file with the answers.")
    prompt_column_name: NonEmptyStr = Field(default="prompt", description="Column of the prompt.")
    responses_column_name: NonEmptyStr = Field(
        default="responses", description="Column of the answers: a text or a list of texts."
    )
    reference_column_name: str = Field(
        default="", description="Column of the reference answer; a dotted name reaches into a struct."
    )
    data_source_column_name: NonEmptyStr = Field(
        default="data_source", description="Column that names a row's source: scores are told apart by it."
    )
    reward_function: RewardSpec = Field(
        default="by_source", description="Reward functions, written as in train.train_policy.reward_function."
    )

    @property
    def is_wanted(self) -> bool:
        """Whether this configuration is an evaluation: a file with answers is named."""
        return bool(self.dataset.name or self.dataset.files)

    @property
    def reward_weights(self) -> dict[str, float]:
        """Reward function -> weight, however it was written."""
        return reward_weights(self.reward_function)
