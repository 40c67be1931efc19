"""What of ROLL has no counterpart: its part of the closed list of `convert.engine.unsupported`."""

from __future__ import annotations

from typing import Any

from convert.engine.fallback import MEGATRON_SPEED
from convert.engine.keys import words
from convert.engine.unsupported import EITHER_WAY, ClosedList, because, below

_RAY = "steers Ray's actors; cosmos-launch does not use Ray and supervises plain processes"
_HYDRA = "a setting of Hydra, which composes ROLL's files before ROLL sees them"
_ENVIRONMENT = (
    "environment variables are set in the shell that starts cosmos-launch; every process inherits them"
)
_LOGS = "logs, dumps and traces lie in the run's own directory below train.output_dir"
_DUMP = (
    "nothing is dumped; GET /v1/samples/{group_id}/{index} shows a finished sample for as long as the controller "
    "keeps it"
)
_TRACKER = "trackers are set up by their own environment variables (WANDB_…, SWANLAB_…) and need no key"
_IN_ENVIRONMENT = "a secret: give it in the environment (WANDB_API_KEY, SWANLAB_API_KEY), never in a file"
_MOCK = "records and replays rollouts to test ROLL itself"
_TEMPLATE = (
    "rows are rendered by the tokenizer's own chat template, as ROLL's native, qwen2_5 and qwen3 do, in supervised "
    "fine-tuning without a choice of thinking; write another one to a file, name it in "
    "rollout.multi_turn_config.custom_chat_template_path, and remove this line"
)
_REWARD_SCALE = (
    "rewards are scaled, centred and clipped by train.train_policy.reward_shaping alone; do more in a reward "
    "function of your own"
)
_ADVANTAGE = (
    "these advantages are not whitened again after the estimator; an estimator of your own can "
    '(train.train_policy.advantage_estimator = "path/to/file.py:function")'
)
_ESTIMATOR = (
    "an estimator over ROLL's agent steps; one of your own can do it "
    '(train.train_policy.advantage_estimator = "path/to/file.py:function")'
)
_MASK = "masked samples leave the loss alone: they count in the advantages of their group, and in whitening"
_WEIGHT = "all samples weigh the same in the loss; loss_type says how they are averaged"
_LOSS = 'a loss of ROLL\'s own; train.train_policy.variant = "path/to/file.py:function" is the key for one of yours'
_CORRECTION = (
    "rollout_correction weighs and rejects by token, sequence or geometric mean of the probability ratio, by "
    "one rule and with detached weights"
)
_AGENT = (
    "environments of agents have no keys in this schema; multi-turn rollouts and custom_server are where they "
    "will attach"
)
_REWARD = (
    "a worker of ROLL's own; write the reward as a function and name it in "
    'train.train_policy.reward_function ("path/to/file.py:function")'
)
_DEEPSPEED = "DeepSpeed's own setting; training is sharded by FSDP2 here"
_MEGATRON = "Megatron's own setting; training is sharded by FSDP2 and DTensor here"
_SGLANG = "SGLang's own setting; the engine here is vLLM, whose further arguments go to rollout.engine_kwargs"
_BEAM = "beam search makes no samples of the policy: it cannot be trained on"
_SCHEDULER = "how ROLL schedules requests among its workers; here replicas lease groups from the controller"

_PIPELINE = (
    "of ROLL's pipelines RLVR and SFT are converted: environments of agents, pairs of answers (DPO) and diffusion "
    "are not trained here, and a teacher (distillation) is written as [[teacher]]"
)
_DPO = "a part of ROLL's DPO pipeline: training on pairs of answers is not supported"
_DISTILLATION = "a part of ROLL's distillation, which is not converted: name the teacher in [[teacher]]"

THINKING = {
    "native": True,
    "qwen2_5": True,
    "qwen3": True,
    "native_nonthinking": False,
    "qwen3_nothink": False,
}
"""ROLL's templates that are the tokenizer's own -> whether it thinks, where it can. `native` and `qwen2_5` leave that
to the template, which then thinks."""
TEMPLATES = tuple(THINKING)

_DEEPSPEED_TABLES = ("deepspeed_zero", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_cpuoffload")

DPO_KEYS = ("chosen_key", "rejected_key", "ipo", "beta", "label_smoothing")
DISTILLATION_ROLES = ("student", "teacher", "student_train", "student_infer")
DISTILLATION_SWITCHES = ("is_pure_opd", "use_opd", "opsd_mode")
_DISTILLATION_KEYS = words(
    "student_pretrain teacher_pretrain pure_opd_pipeline_type opd_kl_coef opsd_solution_key "
    "opsd_max_solution_length logits_topk distill_loss_weight distill_on_prompt kd_objective kd_temperature "
    "teacher_temperature adaptive_kl_alpha skew_lambda logits_transfer_backend question_key answer_key"
)

_TOP = {
    **because(
        {
            _LOGS: "logging_dir base_dir profiler_output_dir length_profiler_dir save_logging_board_dir",
            _DUMP: "rollout_dump_dir render_save_dir",
            _RAY: "rpc_timeout local_rank alive_check_interval",
            _SCHEDULER: "router_args.* generate_opt_level",
            _TRACKER: "tracker_kwargs.* model_name",
            _REWARD_SCALE: (
                "reward_clip reward_norm reward_shift reward_scale use_reward_scaling use_reward_norm "
                "whiten_rewards norm_mean_type norm_std_type reward_normalization.grouping "
                "reward_normalization.method reward_normalization.norm_mean_type reward_normalization.norm_std_type"
            ),
            _ADVANTAGE: "whiten_advantages",
            _MASK: "mask_type",
            _WEIGHT: "difficulty_loss_weight length_loss_weight",
            _LOSS: "use_topr_loss use_topr_neg_loss_coef",
            _AGENT: (
                "batch_adjust_mode episode_reward_weight step_reward_weight step_reward_gamma ratio_type "
                "custom_envs.* custom_env.* agent_config_common.* env_manager_cls all_response_pattern "
                "action_pattern think_action_pattern sokoban_format_penalty frozen_format_penalty "
                "single_prompt_agent_system_template single_prompt_agent_template agent_system_template "
                "agent_template"
            ),
            _DPO: "use_reference_model train_batch_size",
        }
    ),
    "hydra.*": _HYDRA,
    "defaults": _HYDRA + ": keys of the files it names are not in this one; convert the composed file",
    "system_envs.*": _ENVIRONMENT,
    "report_length_and_rewards": "lengths and rewards of every group are metrics here",
    "logging_steps": "metrics are kept and shown for every step",
    "user_defined_rollout_loop_cls": _SCHEDULER + "; rollout.custom_server is the key for one of your own",
    "rollout_mock.*": _MOCK,
    "model_update_buffer_size_mb": "weights travel as files of a store; no buffer needs a size",
    "model_download_type": "models come from the hub or a directory; HF_ENDPOINT names a mirror",
    "val_batch_size": "a validation scores its whole dataset",
    "checkpoint_config.*": "checkpoints stay below train.output_dir and go to S3 by train.ckpt.upload_s3; "
    "no second copy is kept elsewhere",
    "tracker_kwargs.api_key": _IN_ENVIRONMENT,
    **{f"{name}.*": _DEEPSPEED for name in _DEEPSPEED_TABLES},
    "system_key": "a system prompt is the same for all rows (train.train_policy.system_prompt), or part of a "
    "conversation: write it into the rows",
    "global_template": _TEMPLATE,
    "tag_to_template.*": "all rows are rendered by one chat template",
    "dataset_filter.*": "rows are not filtered by source or difficulty: filter the files",
    "vlm_filter.*": "rows are not filtered by their images: filter the files",
    "add_len_reward": _REWARD_SCALE + "; overlong_reward penalises long answers",
    "gamma": "estimators of groups spread one score over all tokens; reinforce_plus_plus and gae discount",
    "adv_estimator": _ESTIMATOR,
    "rl_loss_coef": _WEIGHT + "; the learning rate scales the whole loss",
    "l2": "weights decay by train.optm_weight_decay, not by a term of the loss",
    "minibatch_data_iter_num": "a batch is passed over by mu_iterations as a whole",
    "num_nodes": "the number of machines follows from the devices and num_gpus_per_node, as in ROLL",
    "enable_old_logprobs_recompute": "π_old is the policy that sampled; use_decoupled_loss is the key for a "
    "policy recomputed by the trainer",
    "force_disable_old_logprobs_recompute": "π_old is the policy that sampled: nothing is recomputed",
    "train_infer_correction.*": _CORRECTION,
    "reward.*": _REWARD,
    "reward_model.*": "a model that scores answers is the section [reward_model], which wants a model for "
    "sequence classification; ROLL's generates its verdict",
    "pipeline_cls": _PIPELINE,
    **dict.fromkeys(DPO_KEYS, _DPO),
    **{f"{role}.*": _DISTILLATION for role in DISTILLATION_ROLES},
    **dict.fromkeys((*DISTILLATION_SWITCHES, *_DISTILLATION_KEYS), _DISTILLATION),
}

_WORKER = {
    **because(
        {
            _RAY: "name max_concurrency",
            "micro-batches are packed, not padded to a rounded length": (
                "sequence_length_round_in_train sequence_length_round_in_infer"
            ),
            _LOSS: "topr_positive_weight topr_negative_weight pg_variant",
            _BEAM: "generating_args.num_beams generating_args.length_penalty",
        }
    ),
    "worker_cls": "the class of ROLL's worker, with a loss of its own where it is not ROLL's default; "
    'train.train_policy.variant = "path/to/file.py:function" is the key for a loss of yours',
    "backend_timeout": "how long a collective may take follows from the launcher's and controller's time-outs",
    "system_envs.*": _ENVIRONMENT,
    "offload_nccl": "communicators are not taken down between phases",
    "sequence_packing_args.*": "packing fills each micro-batch up to max_token_len_per_mini_batch",
    "model_args.adapter_name_or_path": "training starts from fresh adapters: merge the old ones into the model",
    "model_args.moe_aux_loss_coef": "reinforcement learning here has no auxiliary router loss",
    "model_args.model_type": "the policy is a language model here: neither diffusion nor another kind is trained",
    "router_replay.mode": "the policy alone is sent to experts that the engine chose; the critic chooses for itself",
    "model_args.vision_dp": "images are not split over ranks",
    "model_args.freeze_module_prefix": "parts of the policy can be frozen (policy.trainable_map), none of the critic",
    "model_args.autocast_adapter_dtype": "adapters have train.master_dtype like every trained weight",
    "training_args.output_dir": _LOGS,
    "training_args.logging_steps": "metrics are kept and shown for every step",
    "training_args.save_steps": "checkpoints follow save_steps at the top of the file",
    "training_args.save_strategy": "checkpoints follow save_steps at the top of the file",
    "training_args.ddp_timeout": "how long a collective may take follows from the time-outs of the launcher",
    "training_args.tf32": "float32 products are those of torch's default; NVIDIA_TF32_OVERRIDE changes them",
    "training_args.lr_scheduler_kwargs.*": "a further parameter of a Hugging Face schedule",
    "data_args.template": _TEMPLATE,
    "data_args.interleave_probs": "files are read one after the other and shuffled together; domain_shares "
    "sets shares",
}

_MODEL_SPEED = (
    *MEGATRON_SPEED,
    *words("recompute_method recompute_num_layers recompute_modules attention_backend"),
)
_MEGATRON_KEYS = (
    *words(
        "bf16 fp16 overlap_param_gather use_precision_aware_optimizer accumulate_allreduce_grads_in_fp32 "
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d ckpt_format expert_tensor_parallel_size "
        "distrib_optim_fully_reshardable"
    ),
    *_MODEL_SPEED,
    *(f"additional_configs.{name}" for name in _MODEL_SPEED),
)
_ROUTER_LOSSES = tuple(
    f"{table}{name}"
    for table in ("", "additional_configs.")
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")
)
_MEDIA_KEYS = words(
    "image_max_pixels image_min_pixels video_folder video_fps video_max_frames video_min_frames video_max_pixels "
    "video_min_pixels video_total_pixels custom_data_kwargs_func"
)

_DEEPSPEED_KEYS = words(
    "zero_optimization.* bf16.* fp16.* train_batch_size train_micro_batch_size_per_gpu "
    "gradient_accumulation_steps gradient_clipping wall_clock_breakdown zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer"
)

_ENV_MANAGER_KEYS = words(
    "max_env_num_per_worker num_env_groups group_size group_size_redundancy tags num_groups_partition "
    "max_traj_per_env format_penalty llm_proxy.* group_filter_cls worker_cls max_env_step_concurrent"
)

_REWARD_KEYS = words(
    "code_url use_local judge_prompt judge_model_type judge_model_name judge_api_url format_pattern "
    "reward_type response_length_penalty_coef query_filter_config response_filter_config "
    "reward_manager_config worker_cls"
)

ROLES = ("actor_train", "actor_infer", "reference", "critic", "validation", "sft_train")
TRAINING_ROLES = ("actor_train", "reference", "critic", "sft_train")
_ENVIRONMENTS = ("train_env_manager", "val_env_manager")


def general(key: str) -> tuple[str, ...]:
    """The names under which a key of one role stands in the list: `<role>`, `<trainer>`, `<environments>`.

    The role of supervised fine-tuning has the policy's entries.
    """
    role, _, rest = key.partition(".")
    if role == "sft_train":
        return (f"actor_train.{rest}", f"<role>.{rest}", f"<trainer>.{rest}")
    names = {"<role>": ROLES, "<trainer>": TRAINING_ROLES, "<environments>": _ENVIRONMENTS}
    return tuple(f"{name}.{rest}" for name, roles in names.items() if rest and role in roles)


_SETTINGS = "<trainer>.strategy_args.strategy_config"

_REASONS: dict[str, str] = {
    **_TOP,
    **{f"<role>.{key}": reason for key, reason in _WORKER.items()},
    **below(_SETTINGS, dict.fromkeys(_DEEPSPEED_KEYS, _DEEPSPEED)),
    **below(_SETTINGS, dict.fromkeys(_MEGATRON_KEYS, _MEGATRON)),
    **below(_SETTINGS, dict.fromkeys(_ROUTER_LOSSES, _WORKER["model_args.moe_aux_loss_coef"])),
    f"{_SETTINGS}.wrap_policy.*": "every layer is sharded by itself; how they are cut changes no number",
    f"{_SETTINGS}.use_batched_model_update": "weights travel through weight_sync",
    **below(
        "<role>.data_args", dict.fromkeys(_MEDIA_KEYS, "this build trains on text, not on images or videos")
    ),
    "<role>.use_remove_padding": "micro-batches are packed (train.sequence_packing), or padded with the same numbers",
    "validation.eval_steps": "ROLL reads eval_steps at the top of the file alone",
    "offload_nccl": _WORKER["offload_nccl"],
    "actor_infer.strategy_args.strategy_config.*": _SGLANG,
    **below("<environments>", dict.fromkeys(_ENV_MANAGER_KEYS, _AGENT)),
    "<environments>.system_envs.*": _ENVIRONMENT,
    "actor_train.router_replay.mode": (
        "R2 replays what the trainer itself chose for old log-probs; what the engine chose is replayed here (R3), by "
        'train.train_policy.routing_replay = "ids"'
    ),
    **below("rewards.<domain>", dict.fromkeys(_REWARD_KEYS, _REWARD)),
    "rewards.<domain>.judge_api_key": _IN_ENVIRONMENT,
    "rewards.<domain>.system_envs": _ENVIRONMENT,
    "rewards.<domain>.model": "a reward model is the section [reward_model]; a function needs none",
}
"""ROLL's key -> why it has no counterpart. What stands in angle brackets is any name of its kind; see `general`."""

_METHOD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        words(
            "pipeline_cls adv_estimator whiten_advantages reward_clip reward_norm reward_shift "
            "use_reward_scaling use_reward_norm whiten_rewards norm_mean_type norm_std_type add_len_reward "
            "reward_normalization.norm_mean_type reward_normalization.norm_std_type "
            "difficulty_loss_weight length_loss_weight use_topr_loss "
            "use_topr_neg_loss_coef l2 train_infer_correction.is_weight.weight_type "
            "train_infer_correction.filters train_infer_correction.* dataset_filter.* "
            "train_env_manager.format_penalty "
            "actor_train.model_args.adapter_name_or_path actor_train.model_args.moe_aux_loss_coef "
            "actor_train.model_args.model_type rewards.<domain>.worker_cls "
            "rewards.<domain>.response_length_penalty_coef rewards.<domain>.format_pattern "
            "rewards.<domain>.reward_manager_config"
        ),
        (),
    ),
    **dict.fromkeys(DISTILLATION_SWITCHES, ()),
    **below("actor_train.strategy_args.strategy_config", dict.fromkeys(_ROUTER_LOSSES, ())),
    **below("actor_train.data_args", dict.fromkeys(_MEDIA_KEYS, ())),
    "global_template": TEMPLATES,
    "actor_train.data_args.template": TEMPLATES,
    "tag_to_template.*": (),
    "system_key": (),
    "gamma": (1,),
    "reward_scale": (1,),
    "reward_normalization.method": ("identity",),
    "mask_type": ("loss",),
    "rl_loss_coef": (EITHER_WAY, 1),
    "minibatch_data_iter_num": (1,),
    "train_infer_correction.is_weight.detach": (EITHER_WAY, True),
    "ratio_type": ("token",),
    "batch_adjust_mode": ("copy",),
    "user_defined_rollout_loop_cls": (
        "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop",
    ),
    "train_env_manager.group_filter_cls": ("roll.pipeline.agentic.agentic_pipeline.GroupFilter",),
    "actor_train.worker_cls": (
        "roll.pipeline.base_worker.ActorWorker",
        "roll.pipeline.rlvr.actor_worker.ActorWorker",
        "roll.pipeline.agentic.agentic_actor_worker.ActorWorker",
    ),
    "actor_train.pg_variant": ("ppo",),
    "<role>.router_replay.mode": ("disable",),
    "actor_train.data_args.interleave_probs": ("1.0", 1),
    "actor_infer.generating_args.num_beams": (1,),
    "rewards.<domain>.query_filter_config": ("no_filter",),
    "rewards.<domain>.response_filter_config": ("no_filter",),
}
"""What of the list decides what is trained -> ROLL's own defaults. Details of a part stand with its switch."""

_TABLES = (
    *ROLES,
    *DISTILLATION_ROLES,
    *_ENVIRONMENTS,
    *words(
        "rewards reward reward_model reward_normalization train_infer_correction dataset_filter vlm_filter "
        "custom_envs custom_env"
    ),
)
"""The tables in which every key may decide what is trained."""

ROLL = ClosedList(_REASONS, _METHOD, general, _TABLES, flat=True)
