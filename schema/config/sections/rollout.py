"""`[rollout]`: how answers are generated: the engine, its size and the sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.backends import BACKENDS, Backend, RolloutBackend
from schema.config.base import (
    MAX_TEMPERATURE,
    MOST_TOKENS,
    Count,
    CustomCode,
    FreeTable,
    Positive,
    Ranks,
    RanksOrAll,
    Samples,
    Seconds,
    Section,
    Seed,
    Tokens,
    UnitFloat,
)
from schema.config.key import cosmos_key, key
from schema.config.sections.policy import ParallelismConfig


# fmt: off
class RolloutParallelismConfig(ParallelismConfig):
    """`[rollout.parallelism]`: how many rollout replicas there are, and the size of each."""

    n_init_replicas: Ranks = cosmos_key(1, "Replicas started at the beginning.",
        acts="process: How many rollout processes are started.")
    tp_size: Ranks = cosmos_key(2, "Tensor-parallel size.",
        acts="engine argument: `tensor_parallel_size`; GPUs of a rollout process.")
    dp_shard_size: RanksOrAll = cosmos_key(-1,
        "vLLM: data-parallel copies in one engine; -1: one. Each has attention of its own; experts are shared with "
        "ep_size, which is what they are for: of a dense model further replicas (n_init_replicas) do the same.",
        acts="engine argument: `data_parallel_size`; GPUs of a rollout process.")
    cp_size: Ranks = cosmos_key(1, "Must be 1: an inference engine is not split along the sequence.",
        acts="refusal: Another value than 1.")
    ep_size: Ranks = cosmos_key(1,
        "vLLM: ranks that share the experts of a layer, each with whole ones: all of a stage (tp_size * "
        "dp_shard_size), or 1, where tp_size cuts each expert.", acts="engine argument: `enable_expert_parallel`.")
    pp_size: Ranks = cosmos_key(1, "vLLM: pipeline stages.",
        acts="engine argument: `pipeline_parallel_size`; GPUs of a rollout process.")
    pp_dynamic_shape: bool = cosmos_key(False, "Must be false: an engine takes any shape.",
        acts="refusal: Another value than false.")
    pp_micro_batch_size: Samples = cosmos_key(1, "Must be 1: an engine cuts its own micro-batches.",
        acts="refusal: Another value than 1.")
    pp_schedule: Literal["1F1B", "GPipe"] = key("1F1B", "Must be left out: an engine has its own schedule.",
        acts='refusal: Another value than "1F1B".')
    virtual_pp_size: Ranks = key(1, "Must be 1: an engine has one stage per rank.",
        acts="refusal: Another value than 1.")
    sequence_parallel: bool = key(False, "Must be false: an engine splits what it can by itself.",
        acts="refusal: Another value than false.")
    dp_replicate_size: Ranks = cosmos_key(1, "Must be 1: more replicas are n_init_replicas.",
        acts="refusal: Another value than 1.")


class SamplingConfig(Section):
    """`[rollout.sampling_config]`: how each token is drawn in training rollouts."""

    temperature: float = cosmos_key(1.0,
        "Sampling temperature, at least 0.01 and at most 100.", ge=0.0, le=MAX_TEMPERATURE,
        acts="sampling parameter: `temperature` of training rollouts; the trainer's logits.")
    top_p: float = cosmos_key(1.0, "Nucleus sampling; 1.0: off.",
        gt=0.0, le=1.0, acts="sampling parameter: `top_p`; the sets over which the trainer renormalises.")
    top_k: int = cosmos_key(-1, "Only the k likeliest tokens; -1 or 0: off.",
        ge=-1, acts="sampling parameter: `top_k`; the sets over which the trainer renormalises.")
    min_p: UnitFloat = key(0.0, "Only tokens at least this share as likely as the likeliest; 0.0: off.",
        acts="sampling parameter: `min_p`; the sets over which the trainer renormalises.")
    repetition_penalty: Positive = cosmos_key(1.0, "Penalty on tokens already seen; 1.0: off.",
        acts="sampling parameter: `repetition_penalty`; the same penalty on the trainer's logits.")
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = key(0.0,
        "Penalty on tokens already generated, once; 0.0: off.",
        acts="sampling parameter: `presence_penalty`; the same penalty on the trainer's logits.")
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = key(0.0,
        "Penalty on tokens already generated, per occurrence; 0.0: off.",
        acts="sampling parameter: `frequency_penalty`; the same penalty on the trainer's logits.")
    use_flashinfer: bool = cosmos_key(False,
        "vLLM: whether flashinfer's kernels apply top_p and top_k. They tell nothing of what is left, so "
        'sampling_correction = "raw" is needed.',
        acts="engine argument: `VLLM_USE_FLASHINFER_SAMPLER` of its processes.")
    seed: int | None = key(None, "Base of the per-sample seeds. Unset: rollout.seed, else the seed of the job.",
        ge=0, lt=2**63, acts="request or reply: Seeds of the samples of a leased group.", example=42)
    do_sample: bool = key(True, "false: always the likeliest token (not for training).",
        acts="sampling parameter: `do_sample`; other values than true are refused in training.")
    ignore_eos: bool = key(False, "Whether generation goes on after the end-of-text token.",
        acts="sampling parameter: Token ids that end an answer.")
    stop: list[str] = key([],
        "Strings that end an answer. One that is a special token of the tokenizer ends it at that token; one that "
        "holds such a token and more text is refused, one that is a part of such a token a warning.",
        acts="sampling parameter: `stop`; ids of special tokens.", example=["</answer>"])
    stop_token_ids: list[int] = key([], "Token ids that end an answer.",
        acts="sampling parameter: Token ids that end an answer.", example=[151645])
    min_tokens: int = key(0, "No end before this many tokens.",
        ge=0, le=MOST_TOKENS, acts="sampling parameter: `min_tokens`; the same on the trainer's logits.")
    sampling_correction: Literal["exact", "raw"] = key("exact",
        "How training accounts for filters (top_p, top_k, min_p), penalties and min_tokens. `exact`: log-probs of "
        "engine and trainer are those of the distribution sampled from; samples carry the ids that each token was "
        "drawn from. `raw`: of the plain softmax at the temperature on both sides: an approximation.",
        acts="sampling parameter: Whether samples bring kept sets; the trainer's logits.")
    extra: FreeTable = key({},
        "Further fields of vLLM's SamplingParams, passed through as they are.",
        acts="sampling parameter: Any other field, under its own name.",
        example={"logits_processors": ["my_package.Processor"]})

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def reshapes(self) -> bool:
        """Whether tokens are drawn from another distribution than the softmax at the temperature."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return self.filters or penalties != (1.0, 0.0, 0.0) or self.min_tokens > 0


_TURNS = "rollouts of several turns"


class MultiTurnRolloutConfig(Section):
    """`[rollout.multi_turn_config]`: how prompts are rendered; conversations of several turns, with tools."""

    enable: bool = cosmos_key(False, "Whether rollouts have several turns.", unbuilt=_TURNS)
    enable_tools: bool = cosmos_key(False, "Whether the model may call tools.", unbuilt=_TURNS)
    enable_thinking: bool = cosmos_key(False,
        "Whether the chat template's thinking mode is on, in a single turn too. A template without one ignores it.",
        acts="file: Tokens of a prepared row.")
    custom_chat_template_path: str | None = cosmos_key(None,
        "File of a chat template (Jinja), relative to the current directory, in a single turn too. Unset: the "
        "model's own.", acts="file: Tokens of a prepared row.", example="chat_template.jinja")
    max_assistant_turns: Count = cosmos_key(5, "Most assistant turns in a conversation.", unbuilt=_TURNS)
    add_generation_prompt: bool = cosmos_key(True, "Whether the template opens the assistant's turn.", unbuilt=_TURNS)
    continue_final_message: bool = cosmos_key(False, "Whether the last message is continued.", unbuilt=_TURNS)


class RolloutConfig(Section):
    """`[rollout]`: the inference engine, its size and its limits."""

    parallelism: RolloutParallelismConfig = cosmos_key(RolloutParallelismConfig, "Replicas and their size.",
        only="grpo")
    backend: RolloutBackend = cosmos_key("vllm",
        "Inference engine: `vllm`, or `transformers` for machines without vLLM.",
        acts="engine argument: Which engine is loaded.")
    enforce_eager: bool = cosmos_key(True, "vLLM: no CUDA graphs.", acts="engine argument: `enforce_eager`.")
    include_stop_str_in_output: bool = cosmos_key(False, "Whether a stop string stays in the answer.",
        acts="sampling parameter: `include_stop_str_in_output`.")
    gpu_memory_utilization: float = cosmos_key(0.8, "Share of GPU memory that the engine takes.",
        gt=0.0, le=1.0, acts="engine argument: `gpu_memory_utilization`.")
    enable_chunked_prefill: bool = cosmos_key(False, "vLLM: prompts are processed in chunks.",
        acts="engine argument: `enable_chunked_prefill`.")
    max_response_length: Tokens = cosmos_key(2048,
        "Longest answer in tokens. As long as policy.model_max_length or longer: an answer goes on until the longest "
        "sequence is full, and is dropped as `overlong` if that ends it.", acts="sampling parameter: `max_tokens`.")
    sample_timeout: Seconds | None = key(None,
        "Seconds that an answer may take. One that takes longer is given up and fails: it ends as `deadline`, has no "
        "score, and reward.on_error says what becomes of its group. Unset: as long as it takes.",
        acts="request or reply: When a sample that is not generated is pushed as failed.", example=600.0)
    n_generation: Samples = cosmos_key(16, "Samples per prompt: the size of a group.",
        acts="request or reply: Samples of a leased group.")
    n_generation_to_batch: bool = cosmos_key(False,
        "Whether the samples of a group are separate requests instead of the engine's n.",
        acts="request or reply: Engine requests of a group.")
    batch_size: Samples = cosmos_key(1, "Groups per lease request.",
        acts="request or reply: Groups asked for in a lease request.")
    quantization: str = cosmos_key("none",
        "vLLM: how the engine quantises what is published, anew at each version: `fp8` (one scale per tensor, also "
        "`fp8_per_tensor`), `fp8_per_channel`, `fp8_per_block`, `mxfp8`, or `int8_per_channel_weight_only` (experts "
        "alone).", min_length=1, acts="engine argument: `quantization`.", example="fp8")
    seed: Seed | None = cosmos_key(None, "Seed of the engine. Unset: the seed of the job.",
        acts="engine argument: `seed`; seeds of the samples.", example=42)
    sampling_config: SamplingConfig = cosmos_key(SamplingConfig, "How tokens are drawn.")
    vllm_use_flashinfer: bool = cosmos_key(False,
        "vLLM: whether flashinfer computes the attention. Unset, vLLM chooses.",
        acts="engine argument: `attention_config`.")
    multi_turn_config: MultiTurnRolloutConfig = cosmos_key(MultiTurnRolloutConfig,
        "How prompts are rendered; conversations of several turns.")
    max_num_seqs: Samples | None = key(None, "Sequences that the engine runs at once. Unset: the engine's default.",
        acts="engine argument: `max_num_seqs`; slots of the embedded engine.", example=256)
    max_num_batched_tokens: Tokens | None = key(None, "vLLM: tokens per engine step. Unset: the engine's default.",
        acts="engine argument: `max_num_batched_tokens`.", example=16384)
    max_model_len: int | None = key(None, "Longest sequence of the engine. Unset: policy.model_max_length.",
        ge=2, le=MOST_TOKENS, acts="engine argument: `max_model_len`.", example=8192)
    block_size: Tokens | None = key(None, "vLLM: tokens per KV-cache block. Unset: the engine's default.",
        acts="engine argument: `block_size`.", example=16)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto",
        "Type in which the engine computes. `auto`: the published weights' type.", acts="engine argument: `dtype`.")
    load_format: Literal["auto", "dummy"] = key("auto",
        "`auto` loads the model's weights at start; `dummy` starts with random ones and waits for the first "
        "publication.", acts="engine argument: `load_format`.")
    engine_kwargs: FreeTable = key({}, "Further engine arguments of vLLM, passed through as they are.",
        acts="engine argument: Any other argument, under its own name.", example={"swap_space": 4})
    max_concurrent_samples: Samples = key(256,
        "Samples in flight in one replica: how far it leases ahead, and how many the transformers engine decodes at "
        "once.", acts="request or reply: Samples in flight in a replica.")
    engine_class: CustomCode | Literal[""] = key("",
        'Your own engine in place of `backend`: "path/to/file.py:Class".', example="my/engine.py:MyEngine",
        unbuilt="inference engines of your own")
    custom_server: CustomCode | Literal[""] = key("", 'Your own generation server (agents): "path/to/file.py:Class".',
        example="my/server.py:MyServer", unbuilt="generation servers of your own")

    @property
    def computes_prompts_once(self) -> bool:
        """Whether all samples of a group say the same of their prompt, to the bit."""
        return self.backend == "transformers" and not self.n_generation_to_batch

    @property
    def engine(self) -> Backend:
        """Return the capabilities of the engine."""
        return BACKENDS[self.backend]
