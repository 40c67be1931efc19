"""`[policy]`: the model that is trained and how one replica is sharded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import (
    MOST_TOKENS,
    Count,
    NonEmptyStr,
    Positive,
    Ranks,
    RanksOrAll,
    Samples,
    Section,
    UnitFloat,
)
from schema.config.key import Deviation, cosmos_key, key
from schema.config.sections.model_keys import CheckpointingKeys, ModelKeys

_RANKS = "process: `WORLD_SIZE` of a policy replica."


# fmt: off
class ParallelismConfig(Section):
    """`[policy.parallelism]`: how many replicas there are, and the mesh of each."""

    n_init_replicas: Ranks = cosmos_key(1,
        "Replicas that train together. Each batch is cut into this many parts. If a replica dies, the others compute "
        "its parts and continue with the same optimizer step; its successor joins them.",
        acts="process: How many policy replicas are started.")
    tp_size: Ranks = cosmos_key(2,
        "Tensor-parallel size: ranks that share each layer's heads, width and experts, and the vocabulary.",
        acts=_RANKS)
    cp_size: Ranks = cosmos_key(1,
        "Context-parallel size: ranks that share sequences, a piece of the positions each.", acts=_RANKS)
    ep_size: Ranks = cosmos_key(1,
        "Expert-parallel size: ranks that share the experts of each layer. They are of those of dp_shard_size, or "
        "those of tp_size, which share them anyway.", acts="number: Which experts of a layer a rank holds.")
    dp_shard_size: RanksOrAll = cosmos_key(1,
        "Ranks over which parameters are sharded (FSDP); -1: all that are left.", acts=_RANKS)
    pp_size: Ranks = cosmos_key(1,
        "Pipeline-parallel size: ranks that have some of the layers each, which micro-batches go through one after "
        "the other.", acts=_RANKS)
    pp_dynamic_shape: bool = cosmos_key(True,
        "Whether pipeline stages accept varying shapes.", acts="refusal: false, where there is a pipeline.",
        deviation=Deviation(False,
            "Every rank of a pipeline knows the shape of what it receives, so micro-batches keep their lengths and "
            "none is padded to another's."))
    pp_micro_batch_size: Samples = cosmos_key(1,
        "Samples per pipeline micro-batch; batch / this must be a multiple of pp_size.",
        acts="file: Samples of a micro-batch, where there is a pipeline.")
    dp_replicate_size: Ranks = cosmos_key(1, "Copies of the sharded model inside one replica (HSDP).", acts=_RANKS)
    pp_schedule: Literal["1F1B", "GPipe"] = key("1F1B",
        "Order of work in a pipeline: a backward as soon as there is one (interleaved with virtual_pp_size > 1), or "
        "all forwards of an optimizer step before its backwards, which keeps the activations of all micro-batches.",
        acts="process: Order of forwards and backwards of a rank.")
    virtual_pp_size: Ranks = key(1, "Pipeline stages that each rank holds (interleaved schedule).",
        acts="number: Which layers a rank has.")
    sequence_parallel: bool = key(False,
        "Whether tensor-parallel ranks have a part of the positions each between layers, instead of all of them.",
        acts="number: Which exchanges tensor-parallel ranks make.")


def of_role(model: str) -> dict[str, str]:
    """Effects of the keys of a mesh that belongs to a model next to the policy."""
    sizes = ("tp_size", "cp_size", "ep_size", "dp_shard_size", "pp_size", "dp_replicate_size")
    part = f"number: Which part of the {model} a rank holds."
    return dict.fromkeys(sizes, part) | {"n_init_replicas": "refusal: Another number than the policy's."}


ALTERING = ("pissa", "olora")
"""How initialisers begin that move a part of the base's weights into the adapter."""
_ADAPTERS = "number: Which weights train, and what they begin with."
Initialiser = Annotated[str, Field(pattern=r"^(gaussian|eva|olora|pissa|pissa_niter_\d+|loftq)$")]


class LoraConfig(Section):
    """`[policy.lora]`: low-rank adapters instead of full training."""

    r: Count = cosmos_key(8, "Rank.", acts=_ADAPTERS)
    lora_alpha: Positive = cosmos_key(8.0, "Scale of the adapter: alpha / r.",
        acts="number: Scale of what the adapter adds.")
    lora_dropout: UnitFloat = cosmos_key(0.0, "Dropout before the adapter, in training steps alone.",
        acts="number: Loss and gradient of a training step.")
    target_modules: list[str] | str | None = cosmos_key(None,
        "Modules that get adapters: a list of names or ends of names, a regular expression of whole names, or "
        "`all-linear`: all linear layers but the output layer. Unset: peft's choice for this kind of model.",
        acts=_ADAPTERS, example="all-linear")
    use_rslora: bool = cosmos_key(False,
        "Rank-stabilised LoRA: scale alpha / sqrt(r) instead of alpha / r (arXiv 2312.03732).",
        acts="number: Scale of what the adapter adds.")
    use_dora: bool = key(False,
        "Weight-decomposed adapters (DoRA): the rows of W + s B A have trained lengths of their own, so that A and B "
        "turn them alone (arXiv 2402.09353). For linear layers, without tensor parallelism.",
        acts="number: Length of the rows of adapted weights.")
    modules_to_save: list[str] | None = cosmos_key(None,
        "Further modules that are trained whole and saved with the adapter.", acts=_ADAPTERS, example=["lm_head"])
    alpha_pattern: dict[str, float] | None = cosmos_key(None,
        "lora_alpha per module: regular expression = alpha; the first match wins.",
        acts="number: Scale of what the adapter adds.", example={".*mlp.*": 16.0})
    r_pattern: dict[str, int] | None = cosmos_key(None,
        "Rank per module: regular expression = r; the first match wins.", acts=_ADAPTERS, example={".*mlp.*": 16})
    init_lora_weights: bool | Initialiser = cosmos_key(True,
        "true: B starts at zero, so the adapter changes nothing at first; false: both random (for debugging); "
        "gaussian: as true, with a normal A; olora, pissa, pissa_niter_<n>: the adapter starts as the largest part "
        "of the weight, which is taken out of the base; eva, loftq: refused.", acts=_ADAPTERS)

    @property
    def begins_with_base(self) -> bool:
        """Whether what trains begins with numbers of the base's weights."""
        return self.use_dora or self.alters_base

    @property
    def alters_base(self) -> bool:
        """Whether the initialiser moves a part of the base's weights into the adapter."""
        return isinstance(self.init_lora_weights, str) and self.init_lora_weights.startswith(
            ("pissa", "olora")
        )


class PolicyConfig(CheckpointingKeys, ModelKeys):
    """`[policy]`: the model that is trained and how one replica is sharded."""

    parallelism: ParallelismConfig = cosmos_key(ParallelismConfig, "Replicas and their mesh.")
    exchange: Literal["collective", "store"] = key("collective",
        "How several policy replicas exchange the gradients of their parts: directly (gloo, NCCL), or through "
        "weight_sync.store, for which they need not reach each other.", acts="file: Gradients in the weight store.")
    model_name_or_path: NonEmptyStr = cosmos_key("Qwen/Qwen2.5-VL-7B-Instruct",
        "Model: a local directory (relative to the current directory) or a Hugging Face model name.",
        acts="engine argument: `model` of the engine; the weights that are trained.", example="Qwen/Qwen3-0.6B")
    model_max_length: int = cosmos_key(4096,
        "Longest training sequence in tokens (prompt and response). Longer samples are dropped as `overlong` and "
        "counted, never cut.", ge=2, le=MOST_TOKENS,
        acts="engine argument: `max_model_len` of the engine; rows left out of the data.")
    lora: LoraConfig | None = cosmos_key(None,
        "Low-rank adapters next to the model, whose own weights are frozen and kept in train.param_dtype. Unset: all "
        "weights are trained.")
    trainable_map: dict[str, bool] | None = cosmos_key(None,
        "Which parameters or modules train: exact name in the transformers model = true or false. The longest name "
        "decides; what no name matches trains, but for what freeze_moe_router keeps. Unset: all.",
        example={"model.embed_tokens.weight": False}, acts="number: Which weights a step leaves as they are.")
    enable_liger_kernel: bool = cosmos_key(False,
        "Whether Liger's kernels (package liger-kernel, GPUs) compute norms, rotary embeddings and MLPs of the "
        "models of training.", acts="number: Which kernels compute the layers.")
    moe_token_dispatcher: Literal["allgather", "alltoall"] = key("alltoall",
        "How tokens reach the experts of other ranks: each travels to those of its experts, or all to every rank.",
        acts="number: Which exchanges a layer of experts makes.")
    moe_grouped_gemm: bool = key(False,
        "Whether the experts of a rank run as one grouped matrix product; else one after the other.",
        acts="number: Which implementation of experts transformers computes with.")
    moe_shared_expert_overlap: bool = key(False,
        "Whether the shared expert computes while tokens travel to the others.",
        acts="number: When the shared expert of a layer computes.")

    @property
    def dispatcher(self) -> Literal["allgather", "alltoall", "overlapped"]:
        """How tokens reach the experts of other ranks; overlapped: `alltoall`, while a shared expert computes."""
        return "overlapped" if self.moe_shared_expert_overlap else self.moe_token_dispatcher

    @property
    def tokenizer(self) -> tuple[str, str | None]:
        """Where the tokenizer is, and its revision: one of its own has none, a hub's default branch is taken."""
        if self.tokenizer_name_or_path is not None:
            return self.tokenizer_name_or_path, None
        return self.model_name_or_path, self.model_revision

    @property
    def tokenizer_key(self) -> str:
        """The key of the configuration that names the tokenizer."""
        named = "model" if self.tokenizer_name_or_path is None else "tokenizer"
        return f"policy.{named}_name_or_path"
