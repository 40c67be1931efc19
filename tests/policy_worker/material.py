"""Small models, samples and tables that the trainer's tests share. Everything is real, only small."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from policy_worker.checkpoints.export import export_model
from policy_worker.checkpoints.source_files import source_files
from policy_worker.model import lora
from policy_worker.model.model import PolicyModel, ValueModel
from policy_worker.model.prepare import prepare_model
from policy_worker.model.trainable import freeze
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.critic import Critic
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from policy_worker.training.loop import Algorithm
from schema.config import Config
from schema.config.chat_template import read_template
from schema.wire.batch import StepTable, encode_batch
from schema.wire.sample import Sample, SampleHeader, encode_sample
from tests.support.metric_names import undocumented

VOCABULARY = 61


TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.15,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""A few thousand parameters, with weights large enough that outputs are not uniform."""


def tiny_lm(seed: int = 0, *, layers: int = 2, tie: bool = True) -> PreTrainedModel:
    """A Qwen3."""
    torch.manual_seed(seed)
    shape = TINY | {"num_hidden_layers": layers, "tie_word_embeddings": tie}
    return AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=VOCABULARY, **shape))


MIXTURE = {
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "experts_implementation": "eager",  # the only one that takes float64
}


def tiny_family(
    family: str,
    seed: int = 0,
    *,
    tie: bool = True,
    vocabulary: int = VOCABULARY,
    heads: int = 4,
    kv_heads: int = 4,
    layers: int = 2,
) -> PreTrainedModel:
    """A model of the shape of one of the families that people train."""
    torch.manual_seed(seed)
    further: dict[str, Any] = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)},
        "phi3": {"sliding_window": 5},
        "qwen3_moe": MIXTURE | {"num_experts": 4},
        "ernie4_5_moe": MIXTURE | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2},
        "glm4_moe": MIXTURE | {"n_routed_experts": 4, "n_shared_experts": 2, "use_qk_norm": True},
    }
    shape = TINY | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": layers}
    shape |= {"tie_word_embeddings": tie, "vocab_size": vocabulary}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **further.get(family, {})))
    for name, parameter in lm.named_parameters():  # biases and the weights of norms begin at 0 or 1
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    return lm.to(torch.get_default_dtype())  # some routers say which type theirs are of


def tiny_experts(seed: int = 0, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A Qwen3 of four experts, two of which see a token."""
    torch.manual_seed(seed)
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=vocabulary, **TINY, **experts))


def tiny_model(seed: int = 0, *, packed: bool = False, recompute: bool = False, layers: int = 2) -> PolicyModel:
    return prepare_model(PolicyModel(tiny_lm(seed, layers=layers)), packed=packed, recompute=recompute)


def tiny_critic(seed: int = 2, *, packed: bool = False, layers: int = 2) -> ValueModel:
    """A critic of the same shape that already expects something."""
    lm = AutoModel.from_config(tiny_lm(layers=layers).config)
    lm.load_state_dict(tiny_lm(seed, layers=layers).model.state_dict())
    model = ValueModel(lm)
    torch.nn.init.normal_(model.value_head, std=0.3)
    return prepare_model(model, packed=packed, recompute=False)


def make_trainer(config: Config, group: RankGroup, model: PolicyModel | None = None, *, layers: int = 2) -> Trainer:
    """A trainer of tiny models, with those that the configuration asks for. layers: of each but a given one."""
    packed = config.train.sequence_packing
    if model is None:
        model = tiny_model(packed=packed, layers=layers)
        freeze(model.lm, config.policy.trainable_map, routers=config.policy.freeze_moe_router)
    if config.policy.lora is not None and lora.adapters_of(model.lm) is None:
        lora.inject(model.lm, config.policy.lora, "policy.lora")
    reference = tiny_model(seed=1, layers=layers) if config.has_reference else None
    critic = None
    if config.has_critic:
        values = tiny_critic(packed=packed, layers=layers)
        if config.critic.lora is not None:
            lora.inject(values.lm, config.critic.lora, "critic.lora")
        critic = Critic(values, config, group, Schedule.of_config(config.critic, total_steps=10))
    teachers = {one.name: tiny_model(seed=2 + i, layers=layers) for i, one in enumerate(config.local_teachers)}
    return Trainer(model, config, group, Schedule(10), reference, critic, teachers)


def write_model(directory: Path, seed: int = 0) -> Path:
    tiny_lm(seed).save_pretrained(directory)
    return directory


_OF_BOTH = ("param_dtype", "optm_lr", "optm_impl", "optm_warmup_steps")


def export_whole(trainer: Trainer, config: Config, target: Path, *, average: bool = False) -> None:
    """Export a model with the files that belong to it. A collective."""
    files = source_files(config, trainer.model.lm.config, read_template(config))
    export_model(trainer, config, target, files, average=average)


def make_config(grpo: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A configuration of a small float32 job on one rank; `grpo` and `train` override its keys.

    With "gae" it has a critic, whose optimizer is the policy's.
    """
    data: dict[str, Any] = {
        "train": {
            "param_dtype": "float32",
            "compile": False,
            "optm_lr": 1e-3,
            "optm_impl": "foreach",
            "optm_warmup_steps": 0,
            "train_batch_per_replica": 8,
            **(train or {}),
        },
        "policy": {
            "model_name_or_path": "unused",
            "model_gradient_checkpointing": False,
            "parallelism": {"tp_size": 1, "dp_shard_size": -1},
            **sections.pop("policy", {}),
        },
        "rollout": {"n_generation": 4, "parallelism": {"tp_size": 1}, **sections.pop("rollout", {})},
        **sections,
    }
    policy = data["train"].setdefault("train_policy", {"type": "grpo", **(grpo or {})})
    if policy.get("advantage_estimator") == "gae":
        critic = {name: data["train"][name] for name in _OF_BOTH}
        data["critic"] = {"enable": True, "model_gradient_checkpointing": False, **critic, **data.get("critic", {})}
    return Config.model_validate(data)


def sft_config(sft: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **sections: Any) -> Config:
    return make_config(train={"train_policy": {"type": "sft", **(sft or {})}, **(train or {})}, **sections)


def make_sample(
    index: int,
    prompt: Sequence[int],
    response: Sequence[int],
    logprobs: Sequence[float],
    score: float | None,
    version: int = 0,
    **header: Any,
) -> Sample:
    """A sample of one segment, made by one weight version."""
    n_prompt, n_response = len(prompt), len(response)
    facts: dict[str, Any] = {
        "index": index,
        "prompt_tokens": n_prompt,
        "response_tokens": n_response,
        "total_tokens": n_prompt + n_response,
        "oldest_version": version,
        "newest_version": version,
        "finish_reason": "stop",
        "rewards": {} if score is None else {"right": score},
        "score": score,
        "error": "TimeoutError: too slow" if score is None else None,
    }
    return Sample(
        header=SampleHeader(**(facts | header)),
        token_ids=np.array([*prompt, *response], np.int32),
        loss_mask=np.array([0] * n_prompt + [1] * n_response, np.uint8),
        logprobs=np.array([0.0] * n_prompt + list(logprobs), np.float32),
        version_starts=np.array([0, n_prompt], np.int32),
        version_values=np.array([-1, version], np.int32),
    )


def random_samples(
    n: int = 8, seed: int = 0, *, version: int | Sequence[int] = 0, n_masked: int = 0, longest: int = 12
) -> list[Sample]:
    """Samples of random tokens and lengths, with behaviour log-probs near those of an undecided policy.

    version: of all samples, or one for each.
    """
    versions = [version] * n if isinstance(version, int) else version
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        prompt = rng.integers(3, VOCABULARY, rng.integers(2, 7)).tolist()
        response = rng.integers(3, VOCABULARY, rng.integers(1, longest)).tolist()
        logprobs = -np.log(VOCABULARY) + rng.normal(0, 0.4, len(response))
        score = None if i < n_masked else float(rng.integers(0, 3)) - 0.5
        samples.append(make_sample(i, prompt, response, np.minimum(logprobs, 0).tolist(), score, versions[i]))
    return samples


def with_common_prompts(samples: Sequence[Sample], group_size: int = 4) -> list[Sample]:
    """The same answers, each to the prompt of its group's first one; the last one of all keeps its own."""
    found = []
    for i, sample in enumerate(samples[:-1]):
        first, cut = samples[i - i % group_size], sample.header.prompt_tokens
        prompt = first.token_ids[: first.header.prompt_tokens].tolist()
        header = sample.header.model_dump(include={"finish_reason"})
        response, logprobs = sample.token_ids[cut:].tolist(), sample.logprobs[cut:].tolist()
        version, score = sample.header.oldest_version, sample.header.score
        found.append(make_sample(sample.header.index, prompt, response, logprobs, score, version, **header))
    return [*found, samples[-1]]


def from_sources(samples: Sequence[Sample], names: Sequence[str], group_size: int = 4) -> list[Sample]:
    """The same, each group from the next of these sources."""
    return [
        replace(s, header=s.header.model_copy(update={"source": names[i // group_size % len(names)]}))
        for i, s in enumerate(samples)
    ]


def with_experts(samples: Sequence[Sample], mixtures: int, experts: int, per_token: int = 2) -> list[Sample]:
    """The same, with experts that an engine might have chosen for their tokens, and weights of these; for equal
    prompts the same."""

    def drawn(tokens: int, seed: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(seed)
        order = rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (tokens, mixtures, 1)), axis=2)
        return order[..., :per_token], rng.random((tokens, mixtures, per_token), np.float32)

    found = []
    for number, sample in enumerate(samples):
        prompt = sample.token_ids[: sample.header.prompt_tokens]
        parts = (drawn(len(prompt), zlib.crc32(prompt.tobytes())), drawn(sample.header.response_tokens - 1, number))
        ids, weights = (np.concatenate(part).flatten() for part in zip(*parts, strict=True))
        shape = np.array([mixtures, per_token], np.int32)
        found.append(replace(sample, expert_shape=shape, expert_ids=ids, expert_weights=weights))
    return found


def with_shared_prefixes(samples: list[Sample], length: int = 2) -> list[Sample]:
    """The same, and all responses of more than `length` tokens begin alike."""
    for sample in samples:
        if sample.header.response_tokens > length:
            start = sample.header.prompt_tokens
            sample.token_ids[start : start + length] = range(7, 7 + length)
    return samples


def cut_short(samples: list[Sample]) -> list[Sample]:
    """The same, every third ended by the longest answer."""
    return [
        replace(s, header=s.header.model_copy(update={"finish_reason": "stop" if i % 3 else "length"}))
        for i, s in enumerate(samples)
    ]


def with_kept_sets(samples: Sequence[Sample]) -> list[Sample]:
    """The same, each token drawn from itself and the four ids behind it; no answer could begin with 0 or 2."""
    found = []
    for sample in samples:
        tokens = sample.token_ids[sample.loss_mask == 1]
        sets = (tokens[:, None] + np.arange(5, dtype=np.int32)) % VOCABULARY
        counts, held = np.full(len(tokens), 5, np.int32), np.array([0, 2], np.int32)
        found.append(replace(sample, kept_counts=counts, kept_ids=sets.ravel(), held_ids=held))
    return found


def with_baselines(samples: Sequence[Sample], scores: Sequence[float], group_size: int = 4) -> list[Sample]:
    """The same, and behind each group a greedy sample of this score."""
    found: list[Sample] = []
    for number, score in enumerate(scores):
        found += samples[number * group_size : (number + 1) * group_size]
        found.append(
            make_sample(group_size, [5, 6], [7 + number] * 30, [-1.0] * 30, score, baseline=True)  # the longest
        )
    return found


def make_table(samples: Sequence[Sample], group_size: int = 4, step: int = 0, timeline: int = 0) -> StepTable:
    """The table that a controller would send along with these samples, in this order."""
    headers = [sample.header for sample in samples]
    groups = [number // group_size for number in range(len(samples))]
    return StepTable(
        step=step,
        timeline=timeline,
        policy_epoch=1,
        group_ids=[f"g{number}" for number in range(max(groups, default=-1) + 1)],
        group=groups,
        index=[header.index for header in headers],
        score=[header.score for header in headers],
        rewards={"right": [header.rewards.get("right") for header in headers]},
        prompt_tokens=[header.prompt_tokens for header in headers],
        response_tokens=[header.response_tokens for header in headers],
        total_tokens=[header.total_tokens for header in headers],
        oldest_version=[header.oldest_version for header in headers],
        newest_version=[header.newest_version for header in headers],
        finish_reason=[header.finish_reason for header in headers],
        source=[header.source for header in headers] if any(header.source for header in headers) else [],
        baseline=[header.baseline for header in headers] if any(header.baseline for header in headers) else [],
    )


def train_step(algorithm: Algorithm, step: int) -> dict[str, float]:
    """What the loop does on a controller that always has a batch. docs/metrics.md defines all that is reported."""
    metrics = None
    while metrics is None:
        batch = algorithm.poll(step, 0.0)
        if batch is not None:
            metrics = algorithm.train_on(batch)
    assert undocumented(metrics) == set()
    return metrics


def encode_step(samples: Sequence[Sample], **table: Any) -> bytes:
    """The whole batch as the controller sends it."""
    return encode_batch(make_table(samples, **table), [encode_sample(sample) for sample in samples])
