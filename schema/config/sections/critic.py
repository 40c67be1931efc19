"""`[critic]`: the value model that `advantage_estimator = "gae"` needs."""

from __future__ import annotations

from typing import Literal

from schema.config.base import Count, Natural, UnitFloat
from schema.config.key import cosmos_key, key
from schema.config.sections.model_keys import CheckpointingKeys, ModelKeys
from schema.config.sections.optimizer import OptimizerKeys, PrecisionKeys
from schema.config.sections.policy import LoraConfig, ParallelismConfig, of_role

_LOSS = "number: Loss and gradient of the critic."


# fmt: off
class CriticConfig(CheckpointingKeys, ModelKeys, PrecisionKeys, OptimizerKeys):
    """`[critic]`: the value model. It takes the keys of the policy's model, mesh, optimizer and batches."""

    enable: bool = key(False, "Whether a critic is trained.", acts="number: Advantages, and with them the gradient.")
    model_name_or_path: str | None = key(None,
        "Model with a value head on top, which begins at 0. Unset: the policy's initial weights.",
        acts="number: Weights that the critic begins with.", min_length=1, example="Qwen/Qwen3-0.6B")
    tokenizer_name_or_path: str | None = key(None,
        "Tokenizer that the model was trained with, where it is not in the model's directory: its tokens must be "
        "those of the policy's tokenizer. Unset: the model's own.",
        acts="refusal: A critic that reads other tokens than the policy writes.", min_length=1,
        example="Qwen/Qwen3-0.6B")
    parallelism: ParallelismConfig | None = cosmos_key(None,
        "Its mesh: other sizes than the policy's, over the same ranks. Unset: the policy's. With stages (pp_size) "
        "its micro-batches have pp_micro_batch_size samples in the place of critic.mini_batch.",
        inside=of_role("critic"))
    lora: LoraConfig | None = cosmos_key(None,
        "Low-rank adapters next to the model, whose own weights are frozen and kept in critic.param_dtype. Unset: "
        "all weights are trained.")
    compile: bool = key(False,
        "Whether the layers of the critic are compiled with torch.compile, as those of train.compile.",
        acts="number: Whether the layers of the critic are compiled.")
    warmup_steps: Natural = key(0, "Steps for which only the critic learns, before the policy does.",
        acts="metric: `optimizer_steps` of the first steps.")
    value_clip: UnitFloat = key(0.5, "Values move at most this far from the old ones inside the loss.", acts=_LOSS)
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = key("token-mean",
        "How token losses become one number; see train.train_policy.loss_type.", acts=_LOSS)
    mu_iterations: Count = key(1, "Passes over each batch.", acts="number: Optimizer steps of the critic.")
    batch_size_per_optimize: Count | None = key(None, "Samples per optimizer step. Unset: the whole batch.",
        acts="number: Optimizer steps of the critic.", example=64)
    mini_batch: Count = key(2, "Samples per micro-batch.", acts="number: Rows of a micro-batch of the critic.")
    max_token_len_per_mini_batch: Count | None = key(None,
        "Hard cap on the tokens of a micro-batch, in place of mini_batch.",
        acts="number: Rows of a micro-batch of the critic.", example=16384)
    forward_mini_batch: Count | None = key(None,
        "Samples per micro-batch of the pass for values. Unset: as in training.",
        acts="number: Rows of a micro-batch of the pass.", example=4)
    mini_batch_shuffle: bool = key(False, "Whether samples are shuffled (seeded) before each pass of mu_iterations.",
        acts="number: Rows of each optimizer step of the critic.")
