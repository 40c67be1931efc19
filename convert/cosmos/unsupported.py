"""What of cosmos-rl has no counterpart: its part of the closed list of `convert.engine.unsupported`."""

from __future__ import annotations

from typing import Any

from convert.engine.keys import words
from convert.engine.unsupported import ClosedList, because

_DIFFUSION = "diffusion and world models are not trained here"
_VLA = "vision-language-action models and their simulators are not trained here"
_DISTILLATION = "distillation is not converted: name the teacher in [[teacher]]"
_TRANSPORT = "weights travel as files of a store or by vLLM's own transfer; such a step does not exist"
_DATALOADER = (
    "the controller deals prompts from one seeded order (train.seed), every position exactly once; no "
    "loader per rank needs tuning"
)
_REMOTE = "rewards run in the rollout replicas; a function of your own may call a service"
_TRAINER = "trainers are chosen by train.train_policy.type; losses and estimators of your own have their keys"
_TRACKER = "trackers are set up by their own environment variables (WANDB_…) and need no key"
_PATTERN = (
    "parameters are chosen by name in policy.trainable_map, not by regular expression: list the modules there"
)
_ADAPTER = "training starts from one fresh adapter: merge the old ones into the model"
_STAGES = "stages have equally many layers, those of pp_size * virtual_pp_size"

_REASONS: dict[str, str] = {
    **because(
        {
            _DATALOADER: (
                "train.prefetch_payloads train.train_policy.dataloader_seed "
                "train.train_policy.dataloader_broadcast train.train_policy.dataloader_batch_size "
                "train.train_policy.data_dispatch_as_rank_in_mesh"
            ),
            "the moving average is updated after each optimizer step": "train.ema_update_step_interval",
            _TRANSPORT: (
                "train.p2p_sync_pack_tensors train.p2r_sync_groups_per_round rollout.async_r2r_sync "
                "rollout.r2r_sync_pack_tensors rollout.r2r_sync_bucket_size_bytes rollout.broadcast_all_params"
            ),
            _VLA: "train.non_text rollout.backend=vla logging.multi_modal_log_interval vla.*",
            _TRAINER: (
                "train.train_policy.trainer_type train.train_policy.algo "
                "train.train_policy.dpo_reference_policy"
            ),
            "dataset.name takes a local directory as well as a name on the hub": (
                "train.train_policy.dataset.local_dir validation.dataset.local_dir"
            ),
            "balance_dp_token deals samples by their tokens": (
                "train.train_policy.enable_dp_load_balancing train.train_policy.load_balanced_pool_size "
                "train.train_policy.load_balanced_batching_strategy"
            ),
            _REMOTE: (
                "train.train_policy.use_remote_reward train.train_policy.remote_reward.* "
                "validation.use_remote_reward validation.remote_reward.*"
            ),
            "train.train_policy.advantage_clip cuts advantages on both sides alike": (
                "train.train_policy.advantage_low train.train_policy.advantage_high"
            ),
            _STAGES: ("policy.parallelism.pp_layers_per_stage rollout.parallelism.pp_layers_per_stage"),
            "how ranks exchange a sequence changes speed alone": (
                "policy.parallelism.cp_rotate_method rollout.parallelism.cp_rotate_method"
            ),
            _ADAPTER: "policy.lora.lora_names policy.lora.lora_path policy.lora.primary_adapter",
            _DIFFUSION: (
                "policy.diffusers.* policy.diffusers_config.* policy.is_diffusers "
                "rollout.n_generation_mini_batch"
            ),
            _PATTERN: "policy.freeze_pattern policy.trainable_pattern",
            "replicas lease ahead by themselves": "rollout.prefetch_rollout rollout.prefetch_queue_maxsize",
            _TRACKER: "logging.wandb_run_id logging.wandb_resume logging.group_name",
        }
    ),
    "controller_execution_id": "the controller makes the id of a job itself",
    "eth_ips": "sockets and NCCL choose their interface by their own environment variables (NCCL_SOCKET_IFNAME)",
    "train.logprob_dtype": "log-probs are computed in float32",
    "train.coalesce_weight_sync": "replicas always take the newest publication; older ones are passed over",
    "train.save_ckpt_at_exit": "cosmos-launch stop ends in order, and --resume goes on from the newest checkpoint",
    "train.signal_to_handle": "SIGTERM drains a process; POST /v1/job/checkpoint saves at any time",
    "train.train_policy.temperature": "cosmos-rl divides the trainer's logits alone by it; here trainer and rollouts "
    "have one temperature, the one that samples",
    "train.train_policy.dataloader_drop_last": _DATALOADER + "; the last step may be short",
    "train.train_policy.load_balanced_max_tokens_for_batch": "max_token_len_per_mini_batch caps a micro-batch",
    "train.train_policy.load_balanced_batches_per_optimizer_step": "train_batch_per_replica sets the batch",
    "train.train_policy.bypass_reward": "without rewards there is nothing to learn from",
    "train.train_policy.group_reward_calculation": "reward functions score one sample at a time",
    "train.train_policy.uncentralized_training": "every sample is in the controller's ledger: none is lost",
    "train.train_policy.max_inflight_steps": "at most (allowed_outdated_steps + 1) steps of groups are outstanding",
    "policy.model_safetensor_path": "policy.model_name_or_path names the directory that holds the safetensors",
    "policy.enable_liger_cross_entropy": "enable_liger_kernel is the one switch for Liger kernels",
    "policy.enable_liger_fused_cross_entropy": "log-probs are computed chunk by chunk, never over the whole batch",
    "policy.aux_loss_coeff": "reinforcement learning here has no auxiliary router loss",
    "rollout.completion_admission": "every sample is leased, pushed under its lease and counted once",
    "logging.wandb_run_name": "logging.experiment_name names the run",
    "logging.level": "each process logs to its own file; the level is not a key of the job",
    "logging.log_interval": "metrics are kept and shown for every step",
    "logging.report_mfu": "tokens per second are reported; utilisation depends on a peak that no key names",
    "distillation.*": _DISTILLATION,
}
"""cosmos-rl's key -> why it has no counterpart."""

_POLICY = "train.train_policy"

_METHOD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        words(
            "distillation.enable train.ema_update_step_interval train.non_text policy.is_diffusers "
            "policy.freeze_pattern "
            "policy.trainable_pattern policy.aux_loss_coeff policy.lora.lora_path rollout.backend"
        ),
        (),
    ),
    f"{_POLICY}.trainer_type": ("grpo", "sft"),
    f"{_POLICY}.algo": ("grpo",),
    f"{_POLICY}.use_remote_reward": (),
    f"{_POLICY}.bypass_reward": (),
    f"{_POLICY}.group_reward_calculation": (),
    f"{_POLICY}.advantage_low": (-5.0,),
    f"{_POLICY}.advantage_high": (5.0,),
    f"{_POLICY}.dpo_reference_policy": (),
}
"""What of the list decides what is trained -> cosmos-rl's own defaults. Details of a part stand with its switch."""

_TABLES = words("train policy rollout validation distillation critic reference reward reward_model")
"""The tables in which every key may decide what is trained."""

COSMOS = ClosedList(_REASONS, _METHOD, tables=_TABLES)
