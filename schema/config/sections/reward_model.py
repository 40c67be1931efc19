"""`[reward_model]`: a model that scores answers, a role of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import MOST_RANKS, CustomCode, Dtype
from schema.config.sections.model_keys import ModelKeys


class RewardModelConfig(ModelKeys):
    """`[reward_model]`: a model that scores answers."""

    enable: bool = Field(default=False, description="Whether answers are scored by a model.")
    model_name_or_path: str | None = Field(
        default=None,
        min_length=1,
        description="A model for sequence classification: a directory or a hub name.",
    )
    custom_class: CustomCode | Literal[""] = Field(
        default="", description='Your own scorer around any model: "path/to/file.py:Class".'
    )
    weight: float = Field(default=1.0, description="Weight of its score beside the reward functions.")
    n_init_replicas: int = Field(
        default=1, ge=1, le=MOST_RANKS, description="Replicas started at the beginning."
    )
    dtype: Dtype = Field(default="bfloat16", description="Type in which it computes.")
    max_length: int | None = Field(
        default=None,
        ge=1,
        description="Longest text in tokens; longer ones are an error. Unset: the model's own.",
    )
    mini_batch: int = Field(default=16, ge=1, description="Answers scored at once.")
    max_token_len_per_mini_batch: int | None = Field(
        default=None, ge=1, description="Hard cap on the tokens scored at once, in place of mini_batch."
    )
    offload: bool = Field(
        default=False, description="Whether its weights are kept in host memory between uses."
    )
    fsdp_wrap_min_params: int = Field(
        default=0, ge=0, description="FSDP shards modules of at least this many parameters; 0: by layer."
    )
