"""`[reference]`: the frozen model that the KL terms compare with."""

from __future__ import annotations

from pydantic import Field

from schema.config.base import Section
from schema.config.sections.policy import ParallelismConfig


class ReferenceConfig(Section):
    """`[reference]`: the frozen model that the KL terms compare with. It exists when a KL term does."""

    model_name_or_path: str | None = Field(
        default=None, min_length=1, description="The model. Unset: the policy's initial weights."
    )
    parallelism: ParallelismConfig | None = Field(
        default=None, description="Its mesh. Unset: it is sharded like the policy."
    )
    offload: bool = Field(
        default=False, description="Whether its weights are kept in host memory between passes."
    )
    fsdp_wrap_layers: list[str] = Field(
        default=[],
        description="Class names of the modules that FSDP shards one by one. Empty: the model's layers.",
    )
    fsdp_wrap_min_params: int = Field(
        default=0, ge=0, description="FSDP shards modules of at least this many parameters; 0: by layer."
    )
    mini_batch: int | None = Field(
        default=None, ge=1, description="Samples per micro-batch of its pass. Unset: as in training."
    )
    max_token_len_per_mini_batch: int | None = Field(
        default=None, ge=1, description="Hard cap on the tokens of a micro-batch. Unset: as in training."
    )
