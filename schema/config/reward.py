"""`[reward]`: how reward functions are run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import Section

BUILTIN_REWARDS = ("boxed_math", "format", "gsm8k", "single_choice")


class RewardConfig(Section):
    """`[reward]`: how reward functions are run."""

    timeout: float = Field(
        default=10.0, gt=0.0, description="Seconds that the rewards of one sample may take."
    )
    num_workers: int = Field(default=1, ge=1, description="Reward processes of each rollout replica.")
    on_error: Literal["retry", "mask", "drop"] = Field(
        default="retry",
        description="When a reward fails or takes too long: `retry` the group (up to "
        "controller.max_attempts), `mask` the sample, or `drop` the group. Never a reward of 0.",
    )
