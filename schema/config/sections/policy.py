"""`[policy]`: the model that is trained and how one replica is sharded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import (
    MOST_RANKS,
    MOST_SAMPLES,
    MOST_TOKENS,
    NonEmptyStr,
    RanksOrAll,
    Section,
    UnitFloat,
)
from schema.config.sections.model_keys import CheckpointingKeys, ModelKeys


class ParallelismConfig(Section):
    """`[policy.parallelism]`: how many replicas there are, and the mesh of each."""

    n_init_replicas: int = Field(
        default=1, ge=1, le=MOST_RANKS, description="Replicas started at the beginning."
    )
    tp_size: int = Field(default=2, ge=1, le=MOST_RANKS, description="Tensor-parallel size.")
    cp_size: int = Field(default=1, ge=1, le=MOST_RANKS, description="Context-parallel size.")
    ep_size: int = Field(default=1, ge=1, le=MOST_RANKS, description="Expert-parallel size.")
    dp_shard_size: RanksOrAll = Field(
        default=1, description="Ranks over which parameters are sharded (FSDP); -1: all that are left."
    )
    pp_size: int = Field(default=1, ge=1, le=MOST_RANKS, description="Pipeline-parallel size.")
    pp_dynamic_shape: bool = Field(
        default=False, description="Whether pipeline stages accept varying shapes."
    )
    pp_micro_batch_size: int = Field(
        default=1,
        ge=1,
        le=MOST_SAMPLES,
        description="Samples per pipeline micro-batch; batch / this must be a multiple of pp_size.",
    )
    dp_replicate_size: int = Field(
        default=1, ge=1, le=MOST_RANKS, description="Copies of the sharded model inside one replica (HSDP)."
    )
    virtual_pp_size: int = Field(
        default=1,
        ge=1,
        le=MOST_RANKS,
        description="Pipeline stages that each rank holds (interleaved schedule).",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Whether tensor parallelism also splits norms and dropout along the sequence.",
    )


class LoraConfig(Section):
    """`[policy.lora]`: low-rank adapters instead of full training."""

    r: int = Field(default=8, ge=1, description="Rank.")
    lora_alpha: float = Field(default=8.0, gt=0.0, description="Scale of the adapter: alpha / r.")
    lora_dropout: UnitFloat = Field(default=0.0, description="Dropout before the adapter.")
    target_modules: list[str] | str | None = Field(
        default=None, description="Modules that get adapters: a list of names, or `all-linear`."
    )
    use_rslora: bool = Field(
        default=False,
        description="Rank-stabilised LoRA: scale alpha / sqrt(r) instead of alpha / r (arXiv 2312.03732).",
    )
    modules_to_save: list[str] | None = Field(
        default=None, description="Further modules that are trained whole and saved with the adapter."
    )
    alpha_pattern: dict[str, float] | None = Field(
        default=None, description="lora_alpha per module: regular expression = alpha; the first match wins."
    )
    r_pattern: dict[str, int] | None = Field(
        default=None, description="Rank per module: regular expression = r; the first match wins."
    )
    init_lora_weights: (
        bool | Annotated[str, Field(pattern=r"^(gaussian|eva|olora|pissa|pissa_niter_\d+|loftq)$")]
    ) = Field(
        default=True,
        description="true: B starts at zero, so the adapter changes nothing at first; false: both random "
        "(for debugging); or gaussian, eva, olora, pissa, pissa_niter_<n>, loftq.",
    )


class PolicyConfig(CheckpointingKeys, ModelKeys):
    """`[policy]`: the model that is trained and how one replica is sharded."""

    parallelism: ParallelismConfig = Field(
        default_factory=ParallelismConfig, description="Replicas and their mesh."
    )
    model_name_or_path: NonEmptyStr = Field(
        default="Qwen/Qwen2.5-VL-7B-Instruct",
        description="Model: a local directory (relative to the current directory) or a Hugging Face model "
        "name.",
    )
    model_max_length: int = Field(
        default=4096,
        ge=2,
        le=MOST_TOKENS,
        description="Longest training sequence in tokens (prompt and response). Longer samples are dropped "
        "as `overlong` and counted, never cut.",
    )
    lora: LoraConfig | None = Field(
        default=None, description="Low-rank adapters. Unset: all weights are trained."
    )
    trainable_map: dict[str, bool] | None = Field(
        default=None, description="Which parameters or modules train: exact name = true or false. Unset: all."
    )
    enable_liger_kernel: bool = Field(
        default=False, description="Whether Liger kernels replace the model's own."
    )
    moe_token_dispatcher: Literal["allgather", "alltoall"] = Field(
        default="alltoall", description="How tokens reach the experts of other ranks."
    )
    moe_grouped_gemm: bool = Field(
        default=False, description="Whether the experts of a rank run as one grouped matrix product."
    )
    moe_shared_expert_overlap: bool = Field(
        default=False, description="Whether the shared expert computes while tokens travel to the others."
    )

    @property
    def tokenizer(self) -> tuple[str, str | None]:
        """Where the tokenizer is, and its revision: one of its own has none, a hub's default branch is taken."""
        if self.tokenizer_name_or_path is not None:
            return self.tokenizer_name_or_path, None
        return self.model_name_or_path, self.model_revision
