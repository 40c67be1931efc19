"""`[reference]`: the frozen model that the KL terms compare with."""

from __future__ import annotations

from schema.config.base import Count, Natural, Section
from schema.config.key import cosmos_key, key
from schema.config.sections.policy import ParallelismConfig, of_role


# fmt: off
class ReferenceConfig(Section):
    """`[reference]`: the frozen model that the KL terms compare with. It exists when a KL term does."""

    model_name_or_path: str | None = key(None, "The model. Unset: the policy's initial weights.",
        acts="number: Loss and gradient of a KL term.", min_length=1, example="Qwen/Qwen3-0.6B")
    parallelism: ParallelismConfig | None = cosmos_key(None,
        "Its mesh: other sizes than the policy's, over the same ranks. Unset: the policy's. With stages (pp_size) "
        "its micro-batches have pp_micro_batch_size samples, unless reference.mini_batch is written.",
        inside=of_role("reference model"))
    offload: bool = key(False, "Whether its weights are kept in host memory between passes.",
        acts="number: Where FSDP keeps the weights.")
    fsdp_wrap_layers: list[str] = key([],
        "Class names of the modules that FSDP shards one by one. Empty: the model's layers.",
        example=["Qwen3DecoderLayer"], acts="number: Which modules FSDP shards one by one.")
    fsdp_wrap_min_params: Natural = key(0,
        "FSDP shards modules of at least this many parameters, less those of such modules within; 0: by layer.",
        acts="number: Which modules FSDP shards one by one.")
    mini_batch: Count | None = key(None, "Samples per micro-batch of its pass. Unset: as in training.",
        acts="number: Rows of a micro-batch of the pass.", example=4)
    max_token_len_per_mini_batch: Count | None = key(None,
        "Hard cap on the tokens of a micro-batch. Unset: as in training.",
        acts="number: Rows of a micro-batch of the pass.", example=16384)
