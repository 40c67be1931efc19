"""`[reward]`: how reward functions are run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import MAX_TIMEOUT, MOST_PROCESSES, Section

BUILTIN_REWARDS = ("boxed_math", "by_source", "format", "gsm8k", "single_choice")

SOURCE_SCORERS = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "boxed_math",
    "DigitalLearningGmbH/MATH-lighteval": "boxed_math",
    "HuggingFaceH4/MATH-500": "boxed_math",
    "HuggingFaceH4/aime_2024": "boxed_math",
    "math_dapo": "boxed_math",
    "agentica-org/DeepScaleR-Preview-Dataset": "boxed_math",
    "cais/mmlu": "single_choice",
    "allenai/ai2_arc": "single_choice",
    "synthetic:addition": "boxed_math",
}
"""`by_source`: the built-in reward function for the rows of each known data source."""


class RewardConfig(Section):
    """`[reward]`: how reward functions are run."""

    timeout: float = Field(
        default=10.0, gt=0.0, le=MAX_TIMEOUT, description="Seconds that the rewards of one sample may take."
    )
    num_workers: int = Field(
        default=1, ge=1, le=MOST_PROCESSES, description="Reward processes of each rollout replica."
    )
    on_error: Literal["retry", "mask", "drop"] = Field(
        default="retry",
        description="When a reward fails or takes too long: `retry` the group (up to "
        "controller.max_attempts), `mask` the sample, or `drop` the group. Never a reward of 0.",
    )
    outage_timeout: float = Field(
        default=1800.0,
        gt=0.0,
        le=MAX_TIMEOUT,
        description="Seconds without a score after which time-outs and connection errors of rewards stop the run. "
        "Until then one prompt at a time is tried, and such errors are retried whatever on_error says.",
    )
    prompt_forms: list[Literal["raw_prompt_ids", "full_prompt"]] = Field(
        default=[],
        description="What rewards get of the prompt beside the row: its token ids without the chat template "
        '(`row["raw_prompt_ids"]`), its text with it (`row["full_prompt"]`). The raw chat is always '
        '`row["prompt"]`.',
    )
