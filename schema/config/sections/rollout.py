"""`[rollout]`: how answers are generated: the engine, its size and the sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import (
    MAX_TEMPERATURE,
    MOST_RANKS,
    MOST_SAMPLES,
    MOST_TOKENS,
    CustomCode,
    FreeTable,
    RanksOrAll,
    Section,
    UnitFloat,
)
from schema.config.sections.policy import ParallelismConfig


class RolloutParallelismConfig(ParallelismConfig):
    """`[rollout.parallelism]`: how many rollout replicas there are, and the size of each."""

    dp_shard_size: RanksOrAll = Field(default=-1, description="Data-parallel size of one engine; -1: one.")
    dp_replicate_size: int = Field(
        default=1, ge=1, le=MOST_RANKS, description="Must be 1: more replicas are n_init_replicas."
    )


class SamplingConfig(Section):
    """`[rollout.sampling_config]`: how each token is drawn in training rollouts."""

    temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=MAX_TEMPERATURE,
        description="Sampling temperature, at least 0.01 and at most 100.",
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1.0: off.")
    top_k: int = Field(default=-1, ge=-1, description="Only the k likeliest tokens; -1 or 0: off.")
    min_p: UnitFloat = Field(
        default=0.0, description="Only tokens at least this share as likely as the likeliest; 0.0: off."
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0.0, description="Penalty on tokens already seen; 1.0: off."
    )
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(
        default=0.0, description="Penalty on tokens already generated, once; 0.0: off."
    )
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(
        default=0.0, description="Penalty on tokens already generated, per occurrence; 0.0: off."
    )
    use_flashinfer: bool = Field(default=False, description="Whether flashinfer does the sampling.")
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Base of the per-sample seeds. Unset: rollout.seed, else the seed of the job.",
    )
    do_sample: bool = Field(default=True, description="false: always the likeliest token (not for training).")
    ignore_eos: bool = Field(
        default=False, description="Whether generation goes on after the end-of-text token."
    )
    stop: list[str] = Field(default=[], description="Strings that end an answer.")
    stop_token_ids: list[int] = Field(default=[], description="Token ids that end an answer.")
    min_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS, description="No end before this many tokens.")
    extra: FreeTable = Field(
        default={}, description="Further fields of vLLM's SamplingParams, passed through as they are."
    )


class MultiTurnRolloutConfig(Section):
    """`[rollout.multi_turn_config]`: conversations of several turns, with tools."""

    enable: bool = Field(default=False, description="Whether rollouts have several turns.")
    enable_tools: bool = Field(default=False, description="Whether the model may call tools.")
    enable_thinking: bool = Field(
        default=False, description="Whether the chat template's thinking mode is on."
    )
    custom_chat_template_path: str | None = Field(
        default=None,
        description="File of a chat template, relative to the current directory. Unset: the model's own.",
    )
    max_assistant_turns: int = Field(default=5, ge=1, description="Most assistant turns in a conversation.")
    add_generation_prompt: bool = Field(
        default=True, description="Whether the template opens the assistant's turn."
    )
    continue_final_message: bool = Field(default=False, description="Whether the last message is continued.")


class RolloutConfig(Section):
    """`[rollout]`: the inference engine, its size and its limits."""

    parallelism: RolloutParallelismConfig = Field(
        default_factory=RolloutParallelismConfig, description="Replicas and their size."
    )
    backend: Literal["vllm", "transformers"] = Field(
        default="vllm",
        description="Inference engine: `vllm`, or `transformers` for machines without vLLM.",
    )
    enforce_eager: bool = Field(default=True, description="vLLM: no CUDA graphs.")
    include_stop_str_in_output: bool = Field(
        default=False, description="Whether a stop string stays in the answer."
    )
    gpu_memory_utilization: float = Field(
        default=0.8, gt=0.0, le=1.0, description="Share of GPU memory that the engine takes."
    )
    enable_chunked_prefill: bool = Field(default=False, description="vLLM: prompts are processed in chunks.")
    max_response_length: int = Field(
        default=2048, ge=1, le=MOST_TOKENS, description="Longest answer in tokens."
    )
    n_generation: int = Field(
        default=16, ge=1, le=MOST_SAMPLES, description="Samples per prompt: the size of a group."
    )
    n_generation_to_batch: bool = Field(
        default=False,
        description="Whether the samples of a group are separate requests instead of the engine's n.",
    )
    batch_size: int = Field(default=1, ge=1, le=MOST_SAMPLES, description="Groups per lease request.")
    quantization: str = Field(
        default="none", min_length=1, description="Quantisation of the engine's weights."
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**32, description="Seed of the engine. Unset: the seed of the job."
    )
    sampling_config: SamplingConfig = Field(
        default_factory=SamplingConfig, description="How tokens are drawn."
    )
    vllm_use_flashinfer: bool = Field(default=False, description="vLLM: use flashinfer's attention.")
    multi_turn_config: MultiTurnRolloutConfig = Field(
        default_factory=MultiTurnRolloutConfig, description="Conversations of several turns."
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SAMPLES,
        description="Sequences that the engine runs at once. Unset: the engine's default.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="vLLM: tokens per engine step. Unset: the engine's default.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        le=MOST_TOKENS,
        description="Longest sequence of the engine. Unset: policy.model_max_length.",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="vLLM: tokens per KV-cache block. Unset: the engine's default.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type in which the engine computes. `auto`: the published weights' type."
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="`auto` loads the model's weights at start; `dummy` starts with random ones and waits "
        "for the first publication.",
    )
    engine_kwargs: FreeTable = Field(
        default={}, description="Further engine arguments of vLLM, passed through as they are."
    )
    max_concurrent_samples: int = Field(
        default=256,
        ge=1,
        le=MOST_SAMPLES,
        description="Samples in flight in one replica: how far it leases ahead, and how many the "
        "transformers engine decodes at once.",
    )
    engine_class: CustomCode | Literal[""] = Field(
        default="", description='Your own engine in place of `backend`: "path/to/file.py:Class".'
    )
    custom_server: CustomCode | Literal[""] = Field(
        default="", description='Your own generation server (agents): "path/to/file.py:Class".'
    )
