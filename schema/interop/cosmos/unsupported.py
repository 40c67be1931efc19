"""What of cosmos-rl has no counterpart: its part of the closed list of `schema.interop.engine.unsupported`."""

from __future__ import annotations

from typing import Any

_DIFFUSION = "diffusion and world models are not trained here"
_VLA = "vision-language-action models and their simulators are not trained here"
_DISTILLATION = "distillation from a teacher is not built here; the schema has no key for it"
_TRANSPORT = "weights travel as files of a store or by vLLM's own transfer; there is no such step"
_DATALOADER = (
    "the controller deals prompts from one seeded order (train.seed), every position exactly once; there is no "
    "loader per rank to tune"
)
_REMOTE = "rewards run in the rollout replicas; a function of your own may call a service"
_TRAINER = "trainers are chosen by train.train_policy.type; losses and estimators of your own have their keys"
_TRACKER = "trackers are set up by their own environment variables (WANDB_…) and need no key"
_PATTERN = (
    "parameters are chosen by name in policy.trainable_map, not by regular expression: list the modules there"
)
_ADAPTER = "training starts from one fresh adapter: merge the old ones into the model"
_SCHEDULE = "the schedule of pipeline stages follows from pp_size and virtual_pp_size"

COSMOS_NONE: dict[str, str] = {
    "controller_execution_id": "the controller makes the id of a job itself",
    "eth_ips": "sockets and NCCL choose their interface by their own environment variables (NCCL_SOCKET_IFNAME)",
    "train.prefetch_payloads": _DATALOADER,
    "train.ema_enable": "no moving average of the weights is kept",
    "train.ema_decay": "no moving average of the weights is kept",
    "train.ema_update_step_interval": "no moving average of the weights is kept",
    "train.logprob_dtype": "log-probs are computed in float32",
    "train.p2p_sync_pack_tensors": _TRANSPORT,
    "train.p2r_sync_groups_per_round": _TRANSPORT,
    "train.coalesce_weight_sync": "replicas always take the newest publication; older ones are passed over",
    "train.non_text": _VLA,
    "train.save_ckpt_at_exit": "cosmos-launch stop ends in order, and --resume goes on from the newest checkpoint",
    "train.signal_to_handle": "SIGTERM drains a process; POST /v1/job/checkpoint saves at any time",
    "train.train_policy.temperature": "cosmos-rl divides the trainer's logits alone by it; here trainer and rollouts "
    "have one temperature, the one that samples",
    "train.train_policy.trainer_type": _TRAINER,
    "train.train_policy.algo": _TRAINER,
    "train.train_policy.loss_type=token-sum": "a sum grows with the batch; token-mean with a larger rate is the same",
    "train.train_policy.dataset.local_dir": "dataset.name takes a local directory as well as a name on the hub",
    "train.train_policy.dataloader_seed": _DATALOADER,
    "train.train_policy.dataloader_drop_last": _DATALOADER + "; the last step may be short",
    "train.train_policy.dataloader_broadcast": _DATALOADER,
    "train.train_policy.dataloader_batch_size": _DATALOADER,
    "train.train_policy.data_dispatch_as_rank_in_mesh": _DATALOADER,
    "train.train_policy.enable_dp_load_balancing": "balance_dp_token deals samples by their tokens",
    "train.train_policy.load_balanced_pool_size": "balance_dp_token deals samples by their tokens",
    "train.train_policy.load_balanced_max_tokens_for_batch": "max_token_len_per_mini_batch caps a micro-batch",
    "train.train_policy.load_balanced_batching_strategy": "balance_dp_token deals samples by their tokens",
    "train.train_policy.load_balanced_batches_per_optimizer_step": "train_batch_per_replica sets the batch",
    "train.train_policy.use_remote_reward": _REMOTE,
    "train.train_policy.remote_reward.*": _REMOTE,
    "train.train_policy.bypass_reward": "without rewards there is nothing to learn from",
    "train.train_policy.group_reward_calculation": "reward functions score one sample at a time",
    "train.train_policy.advantage_low": "advantages are not clipped; an estimator of your own can",
    "train.train_policy.advantage_high": "advantages are not clipped; an estimator of your own can",
    "train.train_policy.dpo_reference_policy": _TRAINER,
    "train.train_policy.off_policy_masking_delta": "rollout_correction rejects sequences by their ratio",
    "train.train_policy.uncentralized_training": "every sample is in the controller's ledger: none is lost",
    "train.train_policy.max_inflight_steps": "at most (allowed_outdated_steps + 1) steps of groups are outstanding",
    "policy.parallelism.pp_schedule": _SCHEDULE,
    "policy.parallelism.pp_layers_per_stage": _SCHEDULE,
    "rollout.parallelism.pp_schedule": _SCHEDULE,
    "rollout.parallelism.pp_layers_per_stage": _SCHEDULE,
    "policy.parallelism.cp_rotate_method": "how ranks exchange a sequence changes speed alone",
    "rollout.parallelism.cp_rotate_method": "how ranks exchange a sequence changes speed alone",
    "policy.lora.lora_names": _ADAPTER,
    "policy.lora.lora_path": _ADAPTER,
    "policy.lora.primary_adapter": _ADAPTER,
    "policy.diffusers.*": _DIFFUSION,
    "policy.diffusers_config.*": _DIFFUSION,
    "policy.is_diffusers": _DIFFUSION,
    "policy.model_safetensor_path": "policy.model_name_or_path names the directory that holds the safetensors",
    "policy.freeze_pattern": _PATTERN,
    "policy.trainable_pattern": _PATTERN,
    "policy.enable_liger_cross_entropy": "enable_liger_kernel is the one switch for Liger kernels",
    "policy.enable_liger_fused_cross_entropy": "log-probs are computed chunk by chunk, never over the whole batch",
    "policy.aux_loss_coeff": "there is no auxiliary router loss in reinforcement learning here",
    "rollout.backend=vla": _VLA,
    "rollout.completion_admission": "every sample is leased, pushed under its lease and counted once",
    "rollout.n_generation_mini_batch": _DIFFUSION,
    "rollout.async_r2r_sync": _TRANSPORT,
    "rollout.r2r_sync_pack_tensors": _TRANSPORT,
    "rollout.r2r_sync_bucket_size_bytes": _TRANSPORT,
    "rollout.prefetch_rollout": "replicas lease ahead by themselves",
    "rollout.prefetch_queue_maxsize": "replicas lease ahead by themselves",
    "rollout.broadcast_all_params": _TRANSPORT,
    "validation.use_remote_reward": _REMOTE,
    "validation.remote_reward.*": _REMOTE,
    "validation.dataset.local_dir": "dataset.name takes a local directory as well as a name on the hub",
    "logging.wandb_run_id": _TRACKER,
    "logging.wandb_run_name": "logging.experiment_name names the run",
    "logging.wandb_resume": _TRACKER,
    "logging.group_name": _TRACKER,
    "logging.level": "each process logs to its own file; the level is not a key of the job",
    "logging.log_interval": "metrics are kept and shown for every step",
    "logging.multi_modal_log_interval": _VLA,
    "logging.report_mfu": "tokens per second are reported; utilisation depends on a peak that no key names",
    "vla.*": _VLA,
    "distillation.*": _DISTILLATION,
}
"""cosmos-rl's key -> why it has no counterpart."""

_POLICY = "train.train_policy"

COSMOS_METHOD: dict[str, tuple[Any, ...]] = {
    "distillation.enable": (),
    "train.ema_enable": (),
    "train.non_text": (),
    f"{_POLICY}.trainer_type": ("grpo", "sft"),
    f"{_POLICY}.algo": ("grpo",),
    f"{_POLICY}.loss_type": (),
    f"{_POLICY}.use_remote_reward": (),
    f"{_POLICY}.bypass_reward": (),
    f"{_POLICY}.group_reward_calculation": (),
    f"{_POLICY}.advantage_low": (-5.0,),
    f"{_POLICY}.advantage_high": (5.0,),
    f"{_POLICY}.dpo_reference_policy": (),
    f"{_POLICY}.off_policy_masking_delta": (),
    "policy.is_diffusers": (),
    "policy.freeze_pattern": (),
    "policy.trainable_pattern": (),
    "policy.aux_loss_coeff": (),
    "policy.lora.lora_path": (),
    "rollout.backend": (),
}
"""What of the list decides what is trained -> cosmos-rl's own defaults. Details of a part stand with its switch."""
