"""`[reward]`: how reward functions are run."""

from __future__ import annotations

from typing import Literal

from schema.config.base import MOST_PROCESSES, Seconds, Section
from schema.config.key import key

BUILTIN_REWARDS = {
    "boxed_math": "math_verify",
    "by_source": "math_verify",
    "format": "",
    "gsm8k": "",
    "single_choice": "",
}
"""The built-in reward functions, each with the package that it needs besides ours; "": none."""

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

MAX_RETRIES = 100


# fmt: off
class RewardConfig(Section):
    """`[reward]`: how reward functions are run."""

    timeout: Seconds = key(10.0, "Seconds that the rewards of one sample may take.",
        acts="request or reply: When a slow reward is an error.")
    num_workers: int = key(2,
        "Reward processes of each rollout replica. With one, a sample that hangs holds up all others.", ge=1,
        le=MOST_PROCESSES, acts="process: Reward processes of a replica.")
    retries: int = key(1,
        "How often a sample is scored again after its reward failed, took too long or crashed, before on_error says "
        "what becomes of it.", ge=0, le=MAX_RETRIES,
        acts="request or reply: Rewards of a sample whose function fails now and then.")
    on_error: Literal["retry", "mask", "drop"] = key("retry",
        "When a reward fails or takes too long, retries included: `retry` the group (up to controller.max_attempts), "
        "`mask` the sample, or `drop` the group. Never a reward of 0.",
        acts="request or reply: What becomes of a group with a failed sample.")
    outage_timeout: Seconds = key(1800.0,
        "Seconds without a score after which time-outs and connection errors of rewards stop the run. Until then one "
        "prompt at a time is tried, and such errors are retried whatever on_error says.",
        acts="request or reply: When a job whose rewards time out fails.")
    environment: list[str] = key([],
        "Variables that reward processes get from the environment of the job, by name. Of all others they see PATH, "
        "HOME and the like; no secret, and no GPU: CUDA_VISIBLE_DEVICES is empty unless it is named here.",
        acts="process: Environment of a reward process.", example=["OPENAI_API_KEY"])
    prompt_forms: list[Literal["raw_prompt_ids", "full_prompt"]] = key([],
        "What rewards get of the prompt in addition to the row: its token ids without the chat template "
        '(`row["raw_prompt_ids"]`), its text with it (`row["full_prompt"]`). The raw chat is always `row["prompt"]`.',
        acts="file: `raw_prompt_ids` and `full_prompt` of a prepared row.", example=["full_prompt"])
