"""A value to show for each key: chosen where the default says nothing, else the default itself.

A test holds that every one is of the key's type; keys of the same name share theirs.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

EXAMPLES: dict[str, Any] = {
    # by the whole key
    "custom": {"mine": 1},
    "policy.model_name_or_path": "Qwen/Qwen3-0.6B",
    "train.train_policy.domain_shares": {"math": 0.7, "code": 0.3},
    "train.train_policy.reward_function": {"boxed_math": 1.0, "format": 0.2},
    "validation.reward_function": {"boxed_math": 1.0},
    "evaluation.reward_function": {"boxed_math": 1.0},
    # by its last part
    "alpha_pattern": {".*mlp.*": 16.0},
    "batch_size": 128,
    "batch_size_per_optimize": 64,
    "behav_imp_weight_cap": 5.0,
    "block_size": 16,
    "cpu_threads": 4,
    "custom_chat_template_path": "chat_template.jinja",
    "custom_class": "my/file.py:MyClass",
    "custom_server": "my/server.py:MyServer",
    "dataloader_prefetch_factor": 4,
    "domain_column_name": "domain",
    "engine_class": "my/engine.py:MyEngine",
    "engine_kwargs": {"swap_space": 4},
    "experiment_name": "first-try",
    "external_modules": ["my_package"],
    "extra": {"logits_processors": ["my_package.Processor"]},
    "fa_version": 3,
    "files": ["data/a.parquet", "data/b.parquet"],
    "filter_reward_metric": ["boxed_math"],
    "forward_mini_batch": 4,
    "fsdp_wrap_layers": ["Qwen3DecoderLayer"],
    "gpus_per_node": 8,
    "host_cache": "/scratch/weights",
    "image_column_name": "images",
    "load_contents": ["model", "optimizer"],
    "max_length": 4096,
    "max_model_len": 8192,
    "max_num_batched_tokens": 16384,
    "max_num_seqs": 256,
    "max_num_steps": 500,
    "max_prompt_length": 1024,
    "max_response_length": 2048,
    "max_token_len_per_mini_batch": 16384,
    "mini_batch": 4,
    "min_filter_prefix_tokens": 32,
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "model_revision": "main",
    "modules_to_save": ["lm_head"],
    "name": "data/train.parquet",
    "options": {"n": 2000, "digits": 3},
    "optm_decay_ratio": 0.2,
    "optm_decay_steps": 200,
    "optm_decay_type": "cosine",
    "optm_weight_decay_start": 0.1,
    "override_config": {"attention_dropout": 0.0},
    "payload_store": "/shared/payloads",
    "policy": [0, 1],
    "positive_nll_coef": 0.1,
    "prompt_column_name": "question",
    "prompt_forms": ["full_prompt"],
    "r_pattern": {".*mlp.*": 16},
    "rank_filter": [0],
    "reference_column_name": "answer",
    "reference_reset_interval": 100,
    "reject_above": 2.0,
    "reject_below": 0.5,
    "response_column_name": "answer",
    "revision": "main",
    "s3_bucket": "my-bucket",
    "seed": 42,
    "mini_batch_shuffle_seed": 42,
    "split": "train",
    "stop": ["</answer>"],
    "stop_token_ids": [151645],
    "store": "/shared/weights",
    "straggler_timeout": 60.0,
    "subset": "main",
    "system_prompt": "You are a careful mathematician.",
    "target_modules": "all-linear",
    "test_size": 0.05,
    "timestamp": "my-run",
    "tls_ca": "/etc/ssl/private-ca.pem",
    "tls_cert": "/etc/ssl/this-side.pem",
    "tls_key": "/etc/ssl/this-side.key",
    "tokenizer_name_or_path": "Qwen/Qwen3-0.6B",
    "top_p": 0.95,
    "trainable_map": {"model.embed_tokens.weight": False},
    "transfer_dtype": "bfloat16",
    "aipo_rho": 4.0,
    "unbiased_loss_max_tokens": 2048,
    "url": "redis://localhost:6379/0",
    **{role: [2, 3] for role in ("rollout", "reference", "critic", "reward_model")},
}


def example_value(key: str, info: FieldInfo) -> Any:
    """A value that the key takes."""
    if key in EXAMPLES:
        return EXAMPLES[key]
    default = info.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return get_args(info.annotation)[0]
    if default is None or default in ("", [], {}):
        return EXAMPLES[key.rpartition(".")[2]]
    return default
