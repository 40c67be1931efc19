"""What of verl has no counterpart: its part of the closed list of `convert.engine.unsupported`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from convert.engine.keys import words
from convert.engine.unsupported import EITHER_WAY, ClosedList, because, below

_T = TypeVar("_T")

_RAY = "starts and places Ray's actors; cosmos-launch does not use Ray and starts plain processes"
_HDFS = "verl's own HDFS client; here checkpoints lie below train.output_dir, and go to S3 by train.ckpt.upload_s3"
_SAMPLES = "GET /v1/samples/{group_id}/{index} shows a finished sample for as long as the controller keeps it"
_OWN_LOSS = (
    'a loss of verl\'s own; for one of yours write train.train_policy.variant = "path/to/file.py:function"'
)
_PROFILER = "a detail of verl's profilers; [profiler] records with torch's or Nsight's"
_MEDIA = "this build trains on text: rows with a video or a sound are refused by name"
_MEGATRON = "a setting of Megatron's own communication code, which is not used here"
_MEGATRON_MODEL = (
    "replaces a setting of Megatron's model, which may change what it computes or learns; policy.override_config "
    "replaces entries of the model's own configuration, and no loss balances experts"
)
_DIST_CKPT = "loads Megatron's own checkpoints; models are loaded from the hub's format"
_LORA = "the keys of [policy.lora] are peft's: it has no adapter to start from, and no list of exclusions"
_REWARD_LOOP = (
    "verl's own way to place and drive a generative reward model; [reward_model] scores with a classifier"
)
_TOOLS = (
    "verl renders the tools of this file into every prompt; here a prompt is rendered with the tools of its own row "
    "alone"
)
_TEMPLATE = (
    "rows are rendered by the tokenizer's own chat template, which gets enable_thinking alone, and in supervised "
    "fine-tuning not even that; write another to a file, name it in "
    "rollout.multi_turn_config.custom_chat_template_path, and remove this line"
)
_REPLAY = "the policy alone is sent to experts that the engine chose; other models choose for themselves"
_ROUTES = "the experts that the engine chose travel with their samples, never through files"
_OWN_ROUTES = (
    "R2 replays what the trainer itself chose for old log-probs; what the engine chose is replayed here (R3), by "
    'train.train_policy.routing_replay = "ids"'
)
_OTHER_ENGINE = "a detail of another of verl's engines; sharding follows from [policy.parallelism]"
_TITAN_KEYS = words(
    "param_offload optimizer_offload wrap_policy.* reshard_after_forward forward_prefetch use_orig_params "
    "mixed_precision use_torch_compile entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
    "entropy_checkpointing data_parallel_size data_parallel_replicate_size data_parallel_shard_size "
    "tensor_parallel_size expert_parallel_size pipeline_parallel_size context_parallel_size attn_type spmd_backend "
    "activation_checkpoint max_seq_len strategy seed full_determinism forward_only dtype"
)
_AUTOMODEL_KEYS = words(
    "strategy distributed_strategy tp_size pp_size cp_size ep_size dp_replicate_size dp_size sequence_parallel "
    "defer_fsdp_grad_sync param_offload optimizer_offload activation_checkpointing enable_fp8 enable_compile "
    "model_dtype attn_implementation backend_config.* moe_config.* mp_param_dtype mp_reduce_dtype mp_output_dtype "
    "seed full_determinism forward_only use_torch_compile entropy_from_logits_with_chunking "
    "entropy_from_logits_chunk_size entropy_checkpointing max_seq_len"
)
_TITAN_SCHEDULE = (
    "the schedule of verl's torchtitan engine; [train] has optm_decay_type and optm_min_lr_factor"
)
_QAT = "quantisation-aware training; train.fp8 computes in low precision"
_TRANSLATED = "an artefact of a machine translation, which verl does not read; its key is "

_OLD_POLICY = (
    "π_old are the rollout's own log-probs; train.train_policy.use_decoupled_loss computes them once more"
)

REWARD_MODEL_OPTIONS = words(
    "enable_resource_pool n_gpus_per_node nnodes use_reward_loop ulysses_sequence_parallel_size nccl_timeout dtype "
    "model_type model_config.* data_processor_config.* megatron.* rollout.* rollout profiler.* profile.* "
    "reward_loop_source reward_loop_module_path reward_loop_class_name"
)
MULTI_TURN_OPTIONS = words(
    "max_user_turns max_parallel_calls max_tool_response_length tool_response_truncate_side interaction_config_path "
    "format num_repeat_rollouts completion_callback enable_tokenization_sanity_check tokenization_sanity_check"
)
LOSS_OPTIONS = words(
    "policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub policy_loss.kl_cov_ratio "
    "policy_loss.ppo_kl_coef policy_loss.dro_beta policy_loss.tau_pos policy_loss.tau_neg tau_pos tau_neg"
)
"""Names of verl's options; what else stands in these tables is not verl's."""

OFFLOAD_OPTIONS = words(
    "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer"
)
MUON_OPTIONS = words(
    "nesterov split_qkv scale_mode coefficient_type num_ns_steps tp_mode fp32_matmul_prec "
    "extra_scale_factor scalar_optimizer match_adamw_update_rms"
)

_MODEL = {
    **because({_LORA: "lora_adapter_path exclude_modules lora.*"}),
    "hf_config_path": "a model's configuration comes with its weights; policy.override_config replaces entries of it",
    "custom_chat_template": _TEMPLATE,
    "tiled_mlp.*": "saves memory in very long sequences by cutting the MLP; context parallelism (cp_size) does here",
    "mtp.*": "multi-token prediction is neither trained nor used for drafts",
}
_ROLE = {
    **because(
        {
            _DIST_CKPT: (
                "megatron.use_dist_checkpointing megatron.dist_checkpointing_path "
                "megatron.dist_checkpointing_prefix"
            ),
            _MEGATRON: "megatron.override_ddp_config.* megatron.dynamic_context_parallel",
            _MEGATRON_MODEL: (
                "megatron.override_mcore_model_config megatron.override_mcore_model_config.* "
                "megatron.override_transformer_config megatron.override_transformer_config.*"
            ),
            _REPLAY: "megatron.router_replay.* veomni.router_replay.* router_replay.*",
            "training starts from the model of model.path, or from a checkpoint of cosmos-launch (train.resume)": (
                "veomni.load_checkpoint_path"
            ),
            _QAT: "megatron.qat.* fsdp_config.qat.* fsdp.qat.* qat.*",
            "the optimizer keeps its state in train.master_dtype": (
                "optim.use_precision_aware_optimizer optim.exp_avg_dtype optim.exp_avg_sq_dtype"
            ),
            "every layer is sharded by itself; fsdp_wrap_min_params makes larger units": (
                "fsdp_config.wrap_policy.disable fsdp.wrap_policy.disable"
            ),
            "arguments of the optimizer have keys of their own in [train]": (
                "optim.override_optimizer_config optim.override_optimizer_config.*"
            ),
            _PROFILER: "profiler.* profile.*",
        }
    ),
    "megatron.expert_tensor_parallel_size": "experts are split over ep_size ranks, and by tp_size like all layers",
    "megatron.num_layers_per_virtual_pipeline_stage": "policy.parallelism.virtual_pp_size counts stages, not layers",
    "optim.main_grads_dtype": "gradients are reduced in train.fsdp_reduce_dtype",
    **because(
        {
            _TITAN_SCHEDULE: "optim.decay_type optim.min_lr_factor",
            _OTHER_ENGINE: (
                "optim.wd_incr_style optim.master_weights optim.store_param_remainders optim.master_weight_dtype"
            ),
        }
    ),
    **dict.fromkeys((f"torchtitan.{name}" for name in _TITAN_KEYS), _OTHER_ENGINE),
    **dict.fromkeys((f"automodel.{name}" for name in _AUTOMODEL_KEYS), _OTHER_ENGINE),
    **{f"optim.muon_{name}": "Muon runs with torch's own settings" for name in MUON_OPTIONS},
    "checkpoint.*": "a detail of verl's checkpoint manager",
}
_ACTOR = {
    "calculate_sum_pi_squared": "a statistic that only verl's token-baseline estimators use",
    **because({_ROUTES: "megatron.router_replay.* veomni.router_replay.* router_replay.*"}),
    **because({_OWN_ROUTES: "megatron.router_replay.mode veomni.router_replay.mode router_replay.mode"}),
    "freeze_vision_tower": "policy.trainable_map chooses what is trained, by the names of parameters",
    **{
        f"policy_loss.loss_mode={name}": _OWN_LOSS
        for name in ("clip_cov", "kl_cov", "sapo", "dppo_tv", "dppo_kl", "dro", "bypass_mode")
    },
}
_TABLES = ("fsdp_config.", "megatron.", "veomni.")


def _of_engine(table: Mapping[str, _T]) -> dict[str, _T]:
    """The entries of a role's tables of engines as those of `engine` in an SFT file, which is one of them."""
    return {
        f"engine.{key.partition('.')[2]}": value for key, value in table.items() if key.startswith(_TABLES)
    }


_ROLLOUT = {
    **because(
        {
            "rollout.custom_server is the key for a server of your own": (
                "agent.default_agent_loop agent.agent_loop_config_path agent.agent_loop_manager_class chat_scheduler"
            ),
            "a detail of verl's tool calls; [rollout.multi_turn_config] has ours": " ".join(
                f"multi_turn.{name}" for name in MULTI_TURN_OPTIONS
            ),
            _MODEL["mtp.*"]: "mtp mtp.*",
            _ROLE["qat.*"]: "qat qat.*",
            _PROFILER: "profiler.* profile.*",
        }
    ),
    "quantization_config_file": "rollout.quantization names the method; its settings come with the model",
    "logprobs_mode": "log-probs are always those of the distribution sampled from (processed_logprobs)",
    "multi_turn.tool_config_path": _TOOLS,
    "multi_turn.function_tool_path": _TOOLS,
    "moe_load_balance_metrics_interval": "how evenly experts are used is not a metric here",
    "router_config_path": "the controller leases prompts to replicas; no router needs to be configured",
    "use_fire_sampling": "the first token is drawn like all others",
    "skip_rollout": "replays rollouts from files to test verl itself",
    "trace.backend": _SAMPLES,
    "prometheus.*": "the controller serves /metrics for Prometheus by itself",
    "disaggregation.*": "prefill and decoding run in one engine",
    "checkpoint.*": "rollouts keep no checkpoints",
    "engine_kwargs.vllm.swap_space": "vLLM of today has no swap space: a pre-empted request is computed again",
    "engine_kwargs.sglang.*": "an argument of SGLang's engine; vllm takes its place, with rollout.engine_kwargs",
    "engine_kwargs.trtllm.*": "an argument of TensorRT-LLM; vllm takes its place, with rollout.engine_kwargs",
}
_DATA = {
    **because(
        {
            _MEDIA: "video_key audio_key",
            _TOOLS: "tool_config_path function_tool_path",
            "the model's processor runs with its own settings": "mm_processor_kwargs mm_processor_kwargs.*",
            _TEMPLATE: (
                "apply_chat_template_kwargs apply_chat_template_kwargs.* chat_template multiturn.enable_thinking_key "
                "enable_thinking_key enable_thinking_default"
            ),
            "conversations carry their tools in the chat template": "multiturn.tools_key tools_key",
        }
    ),
    "train_max_samples": "data sets are taken whole: cut the file, or stop by train.max_num_steps",
    "val_max_samples": "data sets are taken whole: cut the file",
    "datagen.*": "rows made while training goes on; dataset.custom_class is the key for a dataset of yours",
    "sampler.class_path=own": "prompts are drawn by a seeded permutation, or by domain_shares, not by a class",
    "truncation=middle": "a row is cut left or right (dataset.overlong_prompts), never in its middle",
    "last_user_msg_template": "prompts are scored as they stand in the file",
}
_REWARD = {
    **because(
        {
            "your own manager becomes a reward function: train.train_policy.reward_function": (
                "reward_model.reward_manager reward_manager.name reward_manager.source reward_manager.module.path "
                "reward_manager.module.name reward.reward_manager.name reward.reward_manager.source "
                "reward.reward_manager.module.path reward.reward_manager.module.name"
            ),
            _REWARD_LOOP: " ".join(
                f"{table}.{name}"
                for table in ("reward.reward_model", "reward_model")
                for name in REWARD_MODEL_OPTIONS
            ),
            "call the sandbox from a reward function of your own": (
                "reward.sandbox_fusion.url reward_model.sandbox_fusion.url sandbox_fusion.url"
            ),
        }
    ),
    "reward_model.model.*": "a reward model is loaded like any other, and sharded by fsdp_wrap_min_params alone",
}
_ALGORITHM = {
    "rollout_correction.loss_type": "the loss is named by train.train_policy.variant, with `reinforce` among them",
    "rollout_is_mode": "weights are cut at a cap; rollout_correction.reject rejects by bounds, next to it",
    "rollout_is_veto_threshold": "sequences are rejected by their ratio, not by a single token",
    "rollout_correction.rollout_is_batch_normalize": "weights are truncated, not normalised over the batch",
    "rollout_correction.rollout_rs=k2,k3": "samples are rejected by ratios, not by the estimators k2 and k3",
    "rollout_correction.rollout_token_veto_threshold": "sequences are rejected by their ratio, not by a single token",
    "gdpo_reward_keys": "rewards are one number for each sample; several are not normalised one by one, as by GDPO",
    "use_pf_ppo": "samples are not drawn again by their reward before training",
}
_TRAINER = {
    **because(
        {
            "prompts are drawn by a seeded permutation, or by domain_shares": (
                "v1.sampler.custom_sampler.path v1.sampler.custom_sampler.name v1.sampler.sampler_kwargs "
                "v1.sampler.sampler_kwargs.*"
            ),
            _PROFILER: "profile_steps profile_interval",
        }
    ),
    "ray_wait_register_center_timeout": f"{_RAY}; controller.start_timeout is how long they may take to register",
    "default_hdfs_dir": _HDFS,
    "checkpoint_callback_class": "nothing is called back; checkpoints are directories of the run (train.output_dir)",
    "v1.separate_async.hybrid_rollout.*": "GPUs do not change roles while a job runs; [autoscale] adds replicas",
    "val_only": "validation belongs to a training run; [evaluation] scores answers that a file holds",
    "rollout_data_dir": _SAMPLES,
    "validation_data_dir": "no answers are dumped; GET /v1/validations has the scores of every validation",
    "esi_redundant_time": "a SIGTERM drains a replica in launcher.shutdown_timeout; no time is reserved before",
}
_ARTEFACTS = {
    "evaluation.dataset": f"{_TRANSLATED}data.path in evaluation.yaml",
    "evaluation.metrics": f"{_TRANSLATED}custom_reward_function: answers are scored by functions",
    "evaluation.frequency": f"{_TRANSLATED}trainer.test_freq (in steps) of a training run: validation.freq here",
    "数据.路径": f"{_TRANSLATED}data.path",
    "数据.提示键": f"{_TRANSLATED}data.prompt_key",
    "数据.响应键": f"{_TRANSLATED}data.response_key",
    "数据.数据源键": f"{_TRANSLATED}data.data_source_key",
    "数据.奖励模型键": f"{_TRANSLATED}data.reward_model_key",
    "自定义奖励函数.路径": f"{_TRANSLATED}custom_reward_function.path",
    "自定义奖励函数.名称": f"{_TRANSLATED}custom_reward_function.name",
    "优化器配置.学习率": f"{_TRANSLATED}optim.lr",
    "优化器配置.权重衰减": f"{_TRANSLATED}optim.weight_decay",
    "优化器配置.热身步数比例": f"{_TRANSLATED}optim.warmup_steps_ratio",
    "优化器配置.梯度裁剪": f"{_TRANSLATED}optim.clip_grad",
    "优化器配置.学习率调度器": f"{_TRANSLATED}optim.lr_scheduler",
}


_REASONS: dict[str, str] = {
    **because(
        {
            _RAY: "ray_init.* ray_kwargs.*",
            _PROFILER: "actor_rollout_ref.profiler.* actor_rollout_ref.profile.* global_profiler.tool",
            _ROLE["checkpoint.*"]: "checkpoint.* trainer.checkpoint.*",
            _OLD_POLICY: "async_training.use_rollout_log_probs async_training.compute_prox_log_prob",
        }
    ),
    "defaults": "Hydra composes the files that it names; verl's own defaults are known here, others are not read",
    **below("trainer", _TRAINER),
    **below("data", _DATA),
    **below("actor_rollout_ref.model", _MODEL),
    **below("actor_rollout_ref.actor", _ROLE | _ACTOR),
    **below("actor_rollout_ref.ref", _ROLE),
    "actor_rollout_ref.ref.sync_actor_alpha": "the reference becomes a copy of the policy, never a mixture",
    **below("actor_rollout_ref.rollout", _ROLLOUT),
    **below("critic", _ROLE),
    **_of_engine(_ROLE),
    **below("critic.model", _MODEL),
    "critic.loss_scale_factor": "the critic's loss is averaged by critic.loss_type",
    **_REWARD,
    **below("algorithm", _ALGORITHM),
    **below("model", _MODEL),
    **{key: reason for key, reason in _ROLE.items() if key.startswith("optim.")},
    "skip.*": "replays rollouts from files to test verl itself",
    "distillation.*": "distillation is not converted: name the teacher in [[teacher]]",
    "transfer_queue.*": "samples travel through the controller and its payload store",
    **_ARTEFACTS,
}

_ROLE_METHOD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(words("optim.decay_type optim.min_lr_factor"), ()),
    **dict.fromkeys(
        words(
            "qat.enable fsdp_config.qat.enable megatron.qat.enable megatron.override_transformer_config.* "
            "megatron.override_mcore_model_config.* optim.override_optimizer_config.* automodel.enable_fp8"
        ),
        (),
    ),
    "router_replay.mode": ("disabled",),
    "megatron.router_replay.mode": ("disabled",),
    "veomni.router_replay.mode": ("disabled",),
    "veomni.load_checkpoint_path": (),
}
_MODEL_METHOD: dict[str, tuple[Any, ...]] = {
    "custom_chat_template": (),
    "lora_adapter_path": (),
    "exclude_modules": (),
    "mtp.enable_train": (),
}
_REWARD_MANAGERS = ("naive", "batch", "prime", "dapo")

_METHOD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        words(
            "algorithm.rollout_is_mode algorithm.rollout_is_veto_threshold actor_rollout_ref.rollout.chat_scheduler "
            "algorithm.gdpo_reward_keys actor_rollout_ref.rollout.agent.agent_loop_manager_class optim.decay_type "
            "optim.min_lr_factor"
        ),
        (),
    ),
    **dict.fromkeys(
        words(
            "actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.actor.freeze_vision_tower "
            "optim.override_optimizer_config.* actor_rollout_ref.rollout.agent.agent_loop_config_path "
            "actor_rollout_ref.rollout.use_fire_sampling data.datagen.* data.sampler.class_path "
            "data.tool_config_path data.function_tool_path actor_rollout_ref.rollout.multi_turn.tool_config_path "
            "actor_rollout_ref.rollout.multi_turn.function_tool_path "
            "data.truncation sandbox_fusion.url algorithm.rollout_correction.rollout_is_batch_normalize "
            "algorithm.rollout_correction.rollout_rs "
            "algorithm.rollout_correction.rollout_token_veto_threshold algorithm.use_pf_ppo trainer.val_only "
            "trainer.v1.sampler.custom_sampler.path distillation.enabled"
        ),
        (),
    ),
    **below("actor_rollout_ref.actor", _ROLE_METHOD),
    **below("critic", _ROLE_METHOD),
    **_of_engine(_ROLE_METHOD),
    **below("actor_rollout_ref.model", _MODEL_METHOD),
    **below("critic.model", _MODEL_METHOD),
    **below("model", _MODEL_METHOD),
    "actor_rollout_ref.ref.sync_actor_alpha": (1,),
    "actor_rollout_ref.ref.router_replay.mode": ("disabled",),
    "actor_rollout_ref.ref.megatron.router_replay.mode": ("disabled",),
    "actor_rollout_ref.ref.veomni.router_replay.mode": ("disabled",),
    "actor_rollout_ref.rollout.agent.default_agent_loop": ("single_turn_agent",),
    "data.train_max_samples": (-1,),
    "data.chat_template": (),
    **dict.fromkeys(words("data.apply_chat_template_kwargs.* data.enable_thinking_default"), (EITHER_WAY,)),
    **dict.fromkeys(
        words("data.enable_thinking_key data.multiturn.enable_thinking_key"), ("enable_thinking",)
    ),
    **dict.fromkeys(words("data.tools_key data.multiturn.tools_key"), ("tools",)),
    "data.video_key": ("videos",),
    "data.audio_key": ("audios",),
    "reward_model.reward_manager": _REWARD_MANAGERS,
    "reward_model.reward_loop_class_name": (),
    "reward.reward_manager.name": _REWARD_MANAGERS,
    "reward_manager.name": _REWARD_MANAGERS,
    "algorithm.rollout_correction.loss_type": ("ppo_clip",),
}
"""What of the list decides what is trained -> verl's own defaults. Details of a part stand with its switch."""

_OF_FORKS = words(
    "retriever reranker do_search max_turns env rllm es_manager agent_proxy ctx_manager agentlightning"
)
_DECISIVE = words(
    "actor_rollout_ref algorithm critic data rollout reward reward_model reward_manager custom_reward_function "
    "sandbox_fusion distillation async_training model optim engine"
)
"""The tables in which every key may decide what is trained; `model`, `optim` and `engine` belong to SFT files.

_OF_FORKS: tables and keys at the top of files of systems that are made from verl."""

_PLUMBING = re.compile(
    r"[_.].*|x-.*|hydra|cluster|slurm|launch\w*|docker|log|logs|logging|logger|loggers|trackers?|tracking|wandb|swanlab|"
    r"mlflow|tensorboard|ray(_.*)?|runtime(_env)?|environment|env_vars|envs|paths?|notes|meta|metadata|resources|"
    r"run|setup|monitor\w*|debug|nsight|nccl|(global_)?profil\w+|checkpoint\w*|transfer_queue|evaluation|"
    r"trainer\.((log|logging|val|valid\w*|test|eval\w*|save|resume|ckpt|checkpoint\w*|project|experiment)(_(?!prob).*)?|"
    r"(.*_)?(ray|hdfs|wandb|swanlab|mlflow|tensorboard|nsight|profil\w+|timeout|gpus?|nodes|nnodes|device|debug|"
    r"verbose|proxy|runtime|legacy)(_.*)?|.*_ckpt_(to|in|after)_.*)"
)
"""Tables at the top that are not verl's, and keys of `trainer`, that say where a job runs and what it shows."""

VERL = ClosedList(_REASONS, _METHOD, tables=(*_DECISIVE, *_OF_FORKS), plumbing=_PLUMBING, mixed=("trainer",))
