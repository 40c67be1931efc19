"""Keys that every trained model has: the optimizer and its schedule, precision, sharding and memory.

`[train]` holds them for the policy, `[critic]` for the critic.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import Amount, BetaFloat, Count, Dtype, Natural, NotNegative, Positive, Section, UnitFloat
from schema.config.key import cosmos_key, key

OptimizerName = Literal["AdamW", "Adam", "SGD", "Muon", "AdamW8bit", "Adam8bit"]
OptimizerImpl = Literal["fused", "foreach", "for-loop"]
LearningRate = Annotated[float, Field(ge=0.0, le=1.0)]


_LAST_STEPS = "number: Learning rate of the last steps."


# fmt: off
class OptimizerKeys(Section):
    """The optimizer and its schedule."""

    optm_name: OptimizerName = cosmos_key("AdamW",
        "Optimizer. `Muon` is for the matrices of the layers, and AdamW takes embeddings, output layer, norms and "
        "biases next to it. `AdamW8bit` and `Adam8bit` keep moments in 8 bits; they need the package torchao.",
        acts="number: Optimizer that updates the weights.")
    optm_lr: LearningRate | list[LearningRate] = cosmos_key(1e-6,
        "Peak learning rate, at most 1: a step of Adam moves each weight by about that. A list gives one for each "
        "optimizer: [Muon's, AdamW's].", acts="number: Learning rate of the optimizer.")
    optm_impl: OptimizerImpl | list[OptimizerImpl] = cosmos_key("fused",
        "Implementation of the optimizer; a list gives one for each optimizer. Muon has `for-loop` alone: one value "
        "is that of the AdamW next to it.", acts="number: Implementation that the optimizer runs.")
    optm_momentum: BetaFloat | None = key(None, "Momentum of SGD (unset: 0.0) or Muon (unset: 0.95).",
        example=0.9, acts="number: Momentum of the optimizer.")
    optm_weight_decay: NotNegative = cosmos_key(0.01,
        "Weight decay: decoupled from the gradient, but in Adam, Adam8bit and SGD, where it is added to it.",
        acts="number: Weight decay of the optimizer.")
    optm_weight_decay_ramp: Literal["constant", "linear", "cosine"] = key("constant",
        "How weight decay goes from optm_weight_decay_start at the first step to optm_weight_decay at the last.",
        acts="number: Weight decay of each step.")
    optm_weight_decay_start: NotNegative | None = key(None, "Weight decay at the first step of a ramp. Unset: 0.0.",
        example=0.1, acts="number: Weight decay of the first step.")
    optm_betas: list[BetaFloat] = cosmos_key([0.9, 0.999], "Betas of Adam: two numbers in [0, 1).",
        min_length=2, max_length=2, acts="number: Betas of the optimizer.")
    optm_warmup_steps: Amount = cosmos_key(20,
        "Linear warm-up: an integer is a number of steps, a float in [0.0, 1.0] a share of all steps.",
        acts="number: Learning rate of each step.")
    optm_warmup_start_factor: UnitFloat = key(0.0,
        "Share f of optm_lr from which the warm-up rises: step t of W has f + (1 - f)(t + 1)/W.",
        acts="number: Learning rate of the first step.")
    optm_decay_ratio: UnitFloat | None = cosmos_key(None,
        "Share of all steps, at the end, over which the rate decays. Unset or 0: no decay.", acts=_LAST_STEPS,
        example=0.2)
    optm_decay_steps: Count | None = key(None,
        "Steps, at the end, over which the rate decays: optm_decay_ratio in steps.", example=200, acts=_LAST_STEPS)
    optm_decay_type: Literal["linear", "cosine", "sqrt", "none", "wsd", "inverse_sqrt"] | None = cosmos_key(None,
        "Shape of the decay; `wsd`: stable, then optm_wsd_decay_type; `inverse_sqrt`: as one over the square root of "
        "the step. Unset or `none`: constant.", acts=_LAST_STEPS, example="cosine")
    optm_num_cycles: Positive = key(0.5, "Waves of a cosine decay; 0.5 goes down once, from the peak to the floor.",
        acts=_LAST_STEPS)
    optm_wsd_decay_type: Literal["cosine", "linear", "exponential"] = key("cosine",
        "Shape of the last part of a `wsd` schedule.", acts=_LAST_STEPS)
    optm_min_lr_factor: UnitFloat = cosmos_key(0.0, "The rate decays to this share of optm_lr and stays there.",
        acts="number: Learning rate of the last step.")
    optm_grad_norm_clip: NotNegative = cosmos_key(1.0,
        "Gradients are scaled down to this global norm; 0: no clipping.",
        acts="number: Norm of the gradients that are applied.")
    epsilon: Positive = cosmos_key(1e-6, "Epsilon of the optimizer.", acts="number: Epsilon of the optimizer.")


class PrecisionKeys(Section):
    """Number formats, sharding and what is traded for memory."""

    master_dtype: Dtype = cosmos_key("float32",
        "Type of the master weights that the optimizer updates: float32, or bfloat16, which loses small updates.",
        acts="number: Type of the parameters that are updated.")
    param_dtype: Dtype = cosmos_key("bfloat16",
        "Type of parameters in forward and backward; outside they are in master_dtype. With float16 the loss is "
        "scaled, and a step whose gradients overflow is skipped.", acts="number: Type in which the model computes.")
    fsdp_reduce_dtype: Dtype = cosmos_key("float32", "Type in which gradients are reduced.",
        acts="number: Type in which gradients are reduced.")
    fsdp_offload: bool = cosmos_key(False,
        "Whether FSDP keeps parameters in host memory, and with them gradients and the optimizer, whose step then "
        "runs on the host. Each unit comes to the device for its forward and its backward.",
        acts="number: Where FSDP keeps the weights.")
    fsdp_gradient_offload: bool = key(False,
        "Whether reduced gradients are kept in host memory until they are applied. fsdp_offload implies it.",
        acts="number: Where gradients are between backward and step.")
    optimizer_offload: bool = key(False,
        "Whether the optimizer's state is kept in host memory. It comes to the device for the step of some "
        "parameters after others, which computes there. fsdp_offload implies it.",
        acts="number: How many parameters step at a time.")
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = cosmos_key("default",
        "Whether parameters are sharded again after forward: `default` does so unless pipelined.",
        acts="number: Which modules are sharded again after forward.")
    fsdp_wrap_layers: list[str] = key([],
        "Class names of the modules that FSDP shards one by one. Empty: the model's layers.",
        example=["Qwen3DecoderLayer"], acts="number: Which modules FSDP shards one by one.")
    fsdp_wrap_min_params: Natural = key(0,
        "FSDP shards modules of at least this many parameters, less those of such modules within; 0: by layer.",
        acts="number: Which modules FSDP shards one by one.")
    fsdp_accumulation: Literal["sharded", "whole"] = key("sharded",
        "How gradients add up over micro-batches. `sharded`: each is reduced, so that a rank keeps those of its "
        "shard. `whole`: they are reduced once, until which a rank keeps those of all parameters that it gathers, in "
        "fsdp_reduce_dtype; faster where networks are slow.",
        acts="number: Whether a backward reduces gradients.")
    overlap_grad_reduce: bool = key(True,
        "Whether gradients are reduced while backward goes on. False: all at once after it, until which each rank "
        "keeps the gradients of all parameters that it gathers, in fsdp_reduce_dtype.",
        acts="number: Whether a backward reduces gradients.")
    recompute_granularity: Literal["full", "selective"] = key("full",
        "What model_gradient_checkpointing recomputes in backward: whole layers, or attention alone.",
        acts="number: Which modules are recomputed.")
    recompute_moe_layers: bool = key(False,
        "Whether model_gradient_checkpointing recomputes the expert layers alone, exchanges of tokens too; with "
        "`selective` these and attention.", acts="number: Which modules are recomputed.")
    activation_offload: bool = cosmos_key(False,
        "Whether what a layer keeps for its backward is in host memory meanwhile: its activations, or with "
        "model_gradient_checkpointing what it begins to recompute from.",
        acts="number: Which modules keep activations in host memory.")
    compile: bool = cosmos_key(True,
        "Whether the layers of the model are compiled with torch.compile, each by itself and for rows of any length. "
        "Takes minutes at the start, and a C++ compiler; on a CPU hardly faster.",
        acts="number: Whether the layers of the model are compiled.")
