"""The keys that verl's documentation pages name, page by page: in their blocks, and in their prose alone.

Blocks that a page shows by themselves (the optimizer of Megatron) stand where verl reads them.
"""

from __future__ import annotations

from tests.convert.files import under

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"

_DATA = under(
    "data",
    "tokenizer train_files val_files prompt_key max_prompt_length max_response_length train_batch_size "
    "return_raw_input_ids return_raw_chat truncation",
)
_ACTOR_KEYS = under(
    _ACTOR,
    "strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
    "ppo_max_token_len_per_gpu grad_clip clip_ratio entropy_coeff use_kl_loss kl_loss_coef kl_loss_type ppo_epochs "
    "shuffle ulysses_sequence_parallel_size optim.lr optim.lr_warmup_steps_ratio optim.min_lr_ratio "
    "optim.warmup_style optim.total_training_steps fsdp_config.wrap_policy.min_num_params "
    "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap fsdp_config.param_offload fsdp_config.grad_offload "
    "fsdp_config.optimizer_offload fsdp_config.fsdp_size",
)
_REF_KEYS = under(
    _REF,
    "fsdp_config.param_offload fsdp_config.wrap_policy.min_num_params "
    "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap log_prob_micro_batch_size "
    "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu "
    "ulysses_sequence_parallel_size",
)
_ROLLOUT_KEYS = under(
    _ROLLOUT,
    "name temperature top_k top_p prompt_length response_length dtype gpu_memory_utilization ignore_eos "
    "enforce_eager free_cache_engine load_format tensor_model_parallel_size max_num_batched_tokens max_num_seqs "
    "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
    "log_prob_max_token_len_per_gpu do_sample n",
)
_REWARD_MODEL = under(
    "reward_model",
    "enable model.input_tokenizer model.path model.external_lib model.fsdp_config.min_num_params "
    "model.fsdp_config.param_offload micro_batch_size_per_gpu max_length reward_manager",
)
_ALGORITHM = under("algorithm", "gamma gemma lam adv_estimator kl_penalty kl_ctrl.type kl_ctrl.kl_coef")
_TRAINER = under(
    "trainer",
    "total_epochs project_name experiment_name logger nnodes n_gpus_per_node save_freq test_freq critic_warmup "
    "default_hdfs_dir default_local_dir",
)

_OLD = [
    *_DATA,
    "data.val_batch_size",
    *under(
        "actor_rollout_ref",
        "hybrid_engine model.path model.external_lib model.external_libs model.override_config "
        "model.enable_gradient_checkpointing model.use_remove_padding",
    ),
    *_ACTOR_KEYS,
    *_REF_KEYS,
    *_ROLLOUT_KEYS,
    *_REWARD_MODEL,
    *_ALGORITHM,
    *_TRAINER,
]

_NEWER_RL = [
    *under(
        "data",
        "return_full_prompt shuffle filter_overlong_prompts filter_overlong_prompts_workers image_key "
        "trust_remote_code custom_cls.path custom_cls.name",
    ),
    "custom_cls.path",
    "custom_cls.name",
    *under(
        "actor_rollout_ref.model",
        "override_config.model_config override_config.moe_config.freeze_moe_router enable_activation_offload "
        "trust_remote_code",
    ),
    *under(
        _ACTOR,
        "use_torch_compile data_loader_seed optim.lr_warmup_steps optim.num_cycles checkpoint.save_contents "
        "checkpoint.load_contents",
    ),
    *under(
        _ROLLOUT,
        "engine_kwargs.vllm.swap_space engine_kwargs.vllm.disable_mm_preprocessor_cache "
        "engine_kwargs.sglang.attention_backend val_kwargs.top_k val_kwargs.top_p val_kwargs.temperature "
        "val_kwargs.n val_kwargs.do_sample",
    ),
    *under(
        f"{_ACTOR}.optim",
        "optimizer clip_grad lr_warmup_init lr_decay_steps lr_decay_style min_lr weight_decay "
        "weight_decay_incr_style lr_wsd_decay_style lr_wsd_decay_steps use_checkpoint_opt_param_scheduler",
    ),
    "reward_model.model.trust_remote_code",
    "custom_reward_function.path",
    "custom_reward_function.name",
    *under("algorithm", "use_kl_in_reward kl_ctrl.horizon kl_ctrl.target_kl"),
    *under(
        "trainer",
        "log_val_generations val_before_train resume_mode resume_from_path remove_previous_ckpt_in_save "
        "del_local_ckpt_after_load ray_wait_register_center_timeout",
    ),
]

_SFT = [
    *under("optim", "lr weight_decay warmup_steps_ratio clip_grad lr_scheduler"),
    *under(
        "model",
        "partial_pretrain fsdp_config.model_dtype fsdp_config.wrap_policy.min_num_params fsdp_config.cpu_offload "
        "fsdp_config.offload_params external_lib enable_gradient_checkpointing trust_remote_code lora_rank "
        "lora_alpha target_modules use_liger",
    ),
]
_EVALUATION = under("data", "path prompt_key response_key data_source_key reward_model_key")

_TRANSLATED = [
    *under("evaluation", "dataset metrics frequency"),
    *under("数据", "路径 提示键 响应键 数据源键 奖励模型键"),
    *under("自定义奖励函数", "路径 名称"),
    *under("优化器配置", "学习率 权重衰减 热身步数比例 梯度裁剪 学习率调度器"),
]

PAGES: dict[str, list[str]] = {
    "old page": _OLD,
    "newer page": [*(key for key in _OLD if key != "data.val_batch_size"), *_NEWER_RL, *_SFT, *_EVALUATION],
    "translated page": [
        *(key for key in _OLD if key != "data.val_batch_size"),
        *_NEWER_RL,
        *under(_ROLLOUT, "agent.custom_async_server.path agent.custom_async_server.name"),
        *_SFT,
        *_TRANSLATED,
        *_EVALUATION,
    ],
}
"""Page -> every key that it names."""
