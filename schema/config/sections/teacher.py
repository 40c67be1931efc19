"""`[[teacher]]`: models that the policy is distilled from, on its own samples; one table for each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import Count, NonEmptyStr, NotNegative, Seconds, Section
from schema.config.key import key

TeacherLoss = Literal["reverse_kl_advantage", "reverse_kl_k2", "reverse_kl_k3", "reverse_kl_full", "top_k_jsd"]
MOST_TOP_K = 1024
"""Entries of a teacher's distribution at each token: beyond, the full KL is cheaper."""


# fmt: off
class TeacherConfig(Section):
    """`[[teacher]]`: a frozen model that the policy learns from on its own samples (on-policy distillation)."""

    name: str = key(..., "What the teacher is called in metrics and messages.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$", acts="metric: Names of the teacher's metrics.", example="math")
    model: str | None = key(None,
        "A local model: a directory or a name on the hub, loaded by each trainer and sharded like the policy. Either "
        "this or url.", min_length=1, acts="number: The teacher's log-probs, and with them the gradient.",
        example="Qwen/Qwen3-8B")
    url: str | None = key(None,
        "A server with the OpenAI-compatible completions of vLLM, which returns log-probs of given tokens: its base, "
        "without /v1. An http:// address is asked without a proxy. Either this or model.",
        pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$", acts="request or reply: Where log-probs are asked for.",
        example="http://10.0.0.7:8000")
    served_model: NonEmptyStr | None = key(None,
        "The model's name at the url. Unset: the only one that the server has.",
        acts="request or reply: `model` of a request to the teacher.", example="Qwen/Qwen3-8B")
    key_variable: str | None = key(None,
        "The variable of the environment that holds the API key of the url. Unset: none is sent.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        acts="request or reply: The `authorization` header of a request to the teacher.", example="TEACHER_API_KEY")
    timeout: Seconds = key(120.0,
        "Seconds that one request to the url may take. Then, after connection errors and where the server is out of "
        "order, it is sent again for as long as the job runs: training waits.",
        acts="request or reply: When a request to the teacher is sent again.")
    source: list[NonEmptyStr] = key([],
        "The data sources (data_source_column_name) whose samples it teaches. Empty: all.",
        acts="number: Which samples the teacher has a part in.", example=["math"])
    weight: NotNegative = key(1.0,
        "Factor of the teacher's advantage or loss, next to the reward's. With reward weights of 0 the policy learns "
        "from the teacher alone.", acts="number: Size of the teacher's part of the gradient.")
    loss: TeacherLoss = key("reverse_kl_advantage",
        "How it teaches: by the reverse KL, as each token's advantage or as a term of the loss, estimated on the "
        "sampled token (k2, k3) or over the whole vocabulary (full, local models only); or by the Jensen-Shannon "
        "divergence over the teacher's top_k tokens and the rest.", acts="number: Loss and gradient.")
    top_k: Annotated[int, Field(ge=1, le=MOST_TOP_K)] = key(20,
        "Likeliest tokens of the teacher for top_k_jsd. vLLM serves 20 at most unless --max-logprobs allows more.",
        acts="number: Support of the divergence.")
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = key(0.5,
        "Share of the teacher in the mixture of top_k_jsd: towards 0 it is the forward KL, towards 1 the reverse KL, "
        "both scaled.", acts="number: Loss and gradient.")
    offload: bool = key(False, "Whether a local model's weights are kept in host memory between passes.",
        acts="number: Where FSDP keeps the weights.")
    mini_batch: Count | None = key(None, "Samples per micro-batch of a local model's pass. Unset: as in training.",
        acts="number: Rows of a micro-batch of the pass.", example=4)
    max_token_len_per_mini_batch: Count | None = key(None,
        "Hard cap on the tokens of a micro-batch of a local model's pass. Unset: as in training.",
        acts="number: Rows of a micro-batch of the pass.", example=16384)

    @property
    def is_local(self) -> bool:
        """Whether the trainer loads it."""
        return self.model is not None

    def teaches(self, source: str) -> bool:
        """Whether it has a part in samples of this data source; "" where there is but one."""
        return not self.source or source in self.source
