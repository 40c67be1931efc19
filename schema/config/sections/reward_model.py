"""`[reward_model]`: a model that scores answers, a role of its own."""

from __future__ import annotations

from typing import Literal

from schema.config.base import Count, CustomCode, Dtype, Natural, Ranks
from schema.config.key import key
from schema.config.sections.model_keys import ModelKeys


# fmt: off
class RewardModelConfig(ModelKeys):
    """`[reward_model]`: a model that scores answers."""

    enable: bool = key(False, "Whether answers are scored by a model.")
    model_name_or_path: str | None = key(None, "A model for sequence classification: a directory or a hub name.",
        min_length=1, example="Qwen/Qwen3-0.6B")
    custom_class: CustomCode | Literal[""] = key("", 'Your own scorer around any model: "path/to/file.py:Class".',
        example="my/file.py:MyClass")
    weight: float = key(1.0, "Weight of its score next to the reward functions.")
    n_init_replicas: Ranks = key(1, "Replicas started at the beginning.")
    dtype: Dtype = key("bfloat16", "Type in which it computes.")
    max_length: Count | None = key(None, "Longest text in tokens; longer ones are an error. Unset: the model's own.",
        example=4096)
    mini_batch: Count = key(16, "Answers scored at once.")
    max_token_len_per_mini_batch: Count | None = key(None,
        "Hard cap on the tokens scored at once, in place of mini_batch.", example=16384)
    offload: bool = key(False, "Whether its weights are kept in host memory between uses.")
    fsdp_wrap_min_params: Natural = key(0, "FSDP shards modules of at least this many parameters; 0: by layer.")
