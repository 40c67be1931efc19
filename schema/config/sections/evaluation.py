"""`[evaluation]`: scoring answers that a file already holds, without generating any."""

from __future__ import annotations

from schema.config.base import NonEmptyStr, RewardSpec, Section, reward_weights
from schema.config.key import cosmos_key, key
from schema.config.sections.dataset import DatasetConfig


# fmt: off
class EvaluationConfig(Section):
    """`[evaluation]`: scoring answers that a file already holds."""

    dataset: DatasetConfig = cosmos_key(
        DatasetConfig,
        "The file with the answers.",
        inside=dict.fromkeys(
            ("test_size", "max_prompt_length", "overlong_prompts", "image_column_name"),
            "refusal: All answers of the file are scored.",
        ),
    )
    prompt_column_name: NonEmptyStr = key("prompt", "Column of the prompt.",
        acts="file: `prompt` of an answer that is scored.")
    responses_column_name: NonEmptyStr = key("responses", "Column of the answers: a text or a list of texts.",
        acts="file: The answers that are scored.")
    reference_column_name: str = key("", "Column of the reference answer; a dotted name reaches into a struct.",
        acts="file: `answer` that they are compared with.", example="answer")
    data_source_column_name: NonEmptyStr = key("data_source",
        "Column that names a row's source: scores are reported by source.",
        acts="file: Sources by which scores are reported.")
    reward_function: RewardSpec = key("by_source",
        "Reward functions, written as in train.train_policy.reward_function.", acts="file: Scores of the answers.",
        example={"boxed_math": 1.0})
    pass_score: float = key(1.0, "Least score with which an answer passes, for pass@k.",
        allow_inf_nan=False, acts="file: pass@k in evaluation.json.")

    @property
    def reward_weights(self) -> dict[str, float]:
        """Reward function -> weight, however it was written."""
        return reward_weights(self.reward_function)
