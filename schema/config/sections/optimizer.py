"""Keys that every trained model has: the optimizer and its schedule, precision, sharding and memory.

`[train]` holds them for the policy, `[critic]` for the critic.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import Amount, BetaFloat, Dtype, Section, UnitFloat

OptimizerImpl = Literal["fused", "foreach", "for-loop"]
LearningRate = Annotated[float, Field(ge=0.0, le=1.0)]


class OptimizerKeys(Section):
    """The optimizer and its schedule."""

    optm_name: Literal["AdamW", "Adam", "Muon"] = Field(default="AdamW", description="Optimizer.")
    optm_lr: LearningRate | list[LearningRate] = Field(
        default=1e-6,
        description="Peak learning rate, at most 1: a step of Adam moves each weight by about that. A list gives one "
        "for each optimizer.",
    )
    optm_impl: OptimizerImpl | list[OptimizerImpl] = Field(
        default="fused", description="Implementation of the optimizer; a list gives one for each optimizer."
    )
    optm_weight_decay: float = Field(default=0.01, ge=0.0, description="Decoupled weight decay.")
    optm_weight_decay_ramp: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How weight decay goes from optm_weight_decay_start to optm_weight_decay over all steps.",
    )
    optm_weight_decay_start: float | None = Field(
        default=None, ge=0.0, description="Weight decay at the first step of a ramp. Unset: 0.0."
    )
    optm_betas: list[BetaFloat] = Field(
        default=[0.9, 0.999], min_length=2, max_length=2, description="Betas of Adam: two numbers in [0, 1)."
    )
    optm_warmup_steps: Amount = Field(
        default=20,
        description="Linear warm-up: an integer is a number of steps, a float in [0.0, 1.0] a share of all "
        "steps.",
    )
    optm_warmup_start_factor: UnitFloat = Field(
        default=0.0,
        description="Share f of optm_lr from which the warm-up rises: step t of W has f + (1 - f)(t + 1)/W.",
    )
    optm_decay_ratio: UnitFloat | None = Field(
        default=None,
        description="Share of all steps, at the end, over which the rate decays. Unset or 0: no decay.",
    )
    optm_decay_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps, at the end, over which the rate decays: optm_decay_ratio in steps.",
    )
    optm_decay_type: Literal["linear", "cosine", "sqrt", "none", "wsd", "inverse_sqrt"] | None = Field(
        default=None,
        description="Shape of the decay; `wsd`: stable, then optm_wsd_decay_type; `inverse_sqrt`: as one over the "
        "square root of the step. Unset or `none`: constant.",
    )
    optm_num_cycles: float = Field(
        default=0.5,
        gt=0.0,
        description="Waves of a cosine decay; 0.5 goes down once, from the peak to the floor.",
    )
    optm_wsd_decay_type: Literal["cosine", "linear", "exponential"] = Field(
        default="cosine", description="Shape of the last part of a `wsd` schedule."
    )
    optm_min_lr_factor: UnitFloat = Field(
        default=0.0, description="The rate decays to this share of optm_lr and stays there."
    )
    optm_grad_norm_clip: float = Field(
        default=1.0, ge=0.0, description="Gradients are scaled down to this global norm; 0: no clipping."
    )
    epsilon: float = Field(default=1e-6, gt=0.0, description="Epsilon of the optimizer.")

    @property
    def learning_rate(self) -> float:
        """The peak learning rate of the one optimizer."""
        return self.optm_lr[0] if isinstance(self.optm_lr, list) else self.optm_lr

    @property
    def optimizer_impl(self) -> OptimizerImpl:
        """The implementation of the one optimizer."""
        return self.optm_impl[0] if isinstance(self.optm_impl, list) else self.optm_impl


class PrecisionKeys(Section):
    """Number formats, sharding and what is traded for memory."""

    master_dtype: Dtype = Field(
        default="float32",
        description="Type of the master weights that the optimizer updates. bfloat16 loses small updates.",
    )
    param_dtype: Dtype = Field(
        default="bfloat16",
        description="Type of parameters in forward and backward; outside they are in master_dtype.",
    )
    fsdp_reduce_dtype: Dtype = Field(default="float32", description="Type in which gradients are reduced.")
    fsdp_offload: bool = Field(default=False, description="Whether FSDP keeps parameters in host memory.")
    fsdp_gradient_offload: bool = Field(
        default=False, description="Whether FSDP keeps gradients in host memory."
    )
    optimizer_offload: bool = Field(
        default=False, description="Whether the optimizer's state is kept in host memory."
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = Field(
        default="default",
        description="Whether parameters are sharded again after forward: `default` does so unless pipelined.",
    )
    fsdp_wrap_layers: list[str] = Field(
        default=[],
        description="Class names of the modules that FSDP shards one by one. Empty: the model's layers.",
    )
    fsdp_wrap_min_params: int = Field(
        default=0, ge=0, description="FSDP shards modules of at least this many parameters; 0: by layer."
    )
    overlap_grad_reduce: bool = Field(
        default=True, description="Whether gradients are reduced while backward goes on."
    )
    recompute_granularity: Literal["full", "selective"] = Field(
        default="full",
        description="What model_gradient_checkpointing recomputes in backward: whole layers, or attention alone.",
    )
    recompute_moe_layers: bool = Field(
        default=False, description="Whether the expert layers alone are recomputed in backward."
    )
    activation_offload: bool = Field(
        default=False, description="Whether activations are kept in host memory."
    )
    compile: bool = Field(default=True, description="Whether the model is compiled with torch.compile.")
