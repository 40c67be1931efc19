"""The entries of `observables`, as plain data: key -> (kind, sentence, modules that read it, name read there)."""

from __future__ import annotations

Entry = tuple[str, str, str, str]

_PREPARE, _SOURCES = "controller/data/prepare.py", "controller/data/sources.py"
_ANSWERS, _BOUNDS = "controller/data/evaluation.py", ("max_prompt_length", "overlong_prompts")
_GRPO, _OPTIM, _FSDP = (
    "policy_worker/training/grpo.py",
    "policy_worker/model/optim.py",
    "policy_worker/parallel/fsdp.py",
)
_WORKER, _MODEL, _EXPORT = (
    "policy_worker/worker.py",
    "policy_worker/model/model.py",
    "policy_worker/checkpoints/export.py",
)
_SAVER, _FACTS, _JOB = (
    "policy_worker/checkpoints/save.py",
    "controller/state/job_facts.py",
    "controller/state/job.py",
)
_PLAN, _UPLOADS = "policy_worker/training/batch_plan.py", "policy_worker/checkpoints/uploads/uploader.py"
_SAMPLING, _REWARDS = "rollout_worker/groups/sampling.py", "rollout_worker/groups/pipeline.py"
_VLLM, _EMBEDDED = (
    "rollout_worker/engines/vllm/arguments.py",
    "rollout_worker/engines/transformers/settings.py",
)
_LEASES = "rollout_worker/groups/leasing.py"
_PUBLISH, _FOLLOW = "policy_worker/weights/publisher.py", "rollout_worker/weights/follower.py"
_ROLLOUT, _LEASING = "rollout_worker/worker.py", "controller/services/leases.py"
_PLACEMENT, _LAUNCH, _RUNDIR = "launcher/plan/placement.py", "launcher/job/job.py", "launcher/plan/rundir.py"
_REDIS = "schema/config/sections/redis.py"
_MEMBERS, _UPKEEP, _SERVE = (
    "controller/services/replicas.py",
    "controller/services/reaper.py",
    "controller/server.py",
)


def _e(kind: str, sentence: str, read_in: str, reads: str = "") -> Entry:
    return kind, sentence, read_in, reads


def _under(section: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    return {f"{section}.{name}": entry for name, entry in entries.items()}


_TRAIN = {
    "optm_lr": _e("number", "Learning rate of the optimizer.", _OPTIM),
    "optm_impl": _e("number", "Implementation that the optimizer runs.", _OPTIM),
    "optm_weight_decay": _e("number", "Weight decay of the optimizer.", _OPTIM),
    "optm_betas": _e("number", "Betas of the optimizer.", _OPTIM),
    "epsilon": _e("number", "Epsilon of the optimizer.", _OPTIM),
    "optm_grad_norm_clip": _e("number", "Norm of the gradients that are applied.", _OPTIM),
    "optm_warmup_steps": _e("number", "Learning rate of each step.", _WORKER),
    "optm_warmup_start_factor": _e("number", "Learning rate of the first step.", _WORKER),
    "optm_decay_ratio": _e("number", "Learning rate of the last steps.", _WORKER),
    "optm_decay_type": _e("number", "Learning rate of the last steps.", _WORKER),
    "optm_min_lr_factor": _e("number", "Learning rate of the last step.", _WORKER),
    "master_dtype": _e("number", "Type of the parameters that are updated.", _MODEL),
    "param_dtype": _e("number", "Type in which the model computes.", _FSDP),
    "fsdp_reduce_dtype": _e("number", "Type in which gradients are reduced.", _FSDP),
    "fsdp_reshard_after_forward": _e("number", "Which modules are sharded again after forward.", _FSDP),
    "transfer_dtype": _e(
        "file", "Type of the tensors that are published and exported.",
        f"{_PUBLISH} {_EXPORT}", "effective_transfer_dtype",
    ),
    "train_batch_per_replica": _e(
        "request or reply", "Groups of a step; rows of a supervised step.",
        f"{_FACTS} policy_worker/training/sft.py", "samples_per_step",
    ),
    "epoch": _e("request or reply", "Steps of the job.", _FACTS),
    "max_num_steps": _e("request or reply", "Steps of the job.", _FACTS),
    "resume": _e(
        "file", "Checkpoint from which training goes on.", "policy_worker/checkpoints/find.py launcher/job/run.py"
    ),
    "output_dir": _e("file", "Where the run's directory is.", _RUNDIR),
    "timestamp": _e("file", "Name of the run's directory.", _RUNDIR),
    "sync_weight_interval": _e(
        "request or reply", "After which commits weights are published.", f"controller/services/steps.py {_FACTS}"
    ),
    "deterministic": _e(
        "number", "Whether torch uses deterministic kernels, and each group is decoded by itself.",
        f"{_WORKER} {_EMBEDDED} {_LEASES}",
    ),
    "seed": _e(
        "request or reply", "Order of the rows, initial random state and seeds of samples.",
        f"{_MEMBERS} {_JOB} {_WORKER} {_PREPARE}", "effective_seed",
    ),
    "sequence_packing": _e("number", "Shape of a micro-batch.", f"{_PLAN} policy_worker/trainer.py"),
    "ckpt.enable_checkpoint": _e("file", "Whether checkpoints are written.", _SAVER),
    "ckpt.save_freq": _e("file", "After which steps checkpoints are written.", _SAVER),
    "ckpt.save_freq_in_epoch": _e("file", "After which epochs checkpoints are written.", _SAVER),
    "ckpt.save_mode": _e("process", "The thread that writes a checkpoint.", _SAVER),
    "ckpt.save_contents": _e("file", "Files of a checkpoint.", _SAVER),
    "ckpt.load_contents": _e(
        "number", "What is read of a checkpoint, and the step that follows.",
        "policy_worker/checkpoints/load.py policy_worker/checkpoints/find.py",
    ),
    "ckpt.load_schedule": _e("number", "Learning rates after a resume.", "policy_worker/checkpoints/load.py"),
    "ckpt.delete_after_load": _e(
        "file", "Whether the checkpoint that was resumed from stays.", "policy_worker/checkpoints/retention.py"
    ),
    "ckpt.max_keep": _e("file", "How many checkpoints stay.", "policy_worker/checkpoints/retention.py"),
    "ckpt.export_safetensors": _e("file", "`export` in each checkpoint.", _SAVER),
    "ckpt.upload_s3": _e("file", "What is uploaded to the bucket.", _UPLOADS),
    "ckpt.s3_bucket": _e("file", "Bucket that checkpoints are uploaded to.", _UPLOADS),
    "ckpt.s3_prefix": _e("file", "Keys of what is uploaded.", _UPLOADS),
    "ckpt.upload_hf": _e("file", "Whether exports are committed to the hub.", _UPLOADS),
    "ckpt.hf_repo_name": _e("file", "Repository that exports are committed to.", _UPLOADS),
}  # fmt: skip

_POLICY_LOSS = {
    "type": _e("process", "Which roles are started and what is trained.", f"{_PLACEMENT} {_JOB}", "is_grpo"),
    "variant": _e("number", "Loss and gradient.", _GRPO),
    "temperature": _e("sampling parameter", "`temperature` of training rollouts; the trainer's logits.",
                      f"{_SAMPLING} {_GRPO}", "sampling_temperature"),
    "epsilon_low": _e("number", "Gradient where the ratio is clipped.", _GRPO),
    "epsilon_high": _e("number", "Gradient where the ratio is clipped.", _GRPO),
    "positive_nll_coef": _e("number", "Loss and gradient.", _GRPO),
    "lower_bound_ratio": _e("number", "Gradient where the dual clip acts.", _GRPO),
    "loss_type": _e("number", "Loss and gradient.", _GRPO),
    "unbiased_loss_max_tokens": _e("number", "Loss and gradient.", _GRPO),
    "unbiased_advantage": _e("number", "Advantages, and with them the gradient.", _GRPO),
    "entropy_coeff": _e("number", "Loss and gradient.", _GRPO),
    "mu_iterations": _e("metric", "`optimizer_steps` of a step.", _PLAN),
    "batch_size_per_optimize": _e("metric", "`optimizer_steps` of a step.", _PLAN),
    "mini_batch": _e("number", "Rows of a micro-batch.", _PLAN),
    "max_token_len_per_mini_batch": _e("number", "Rows of a micro-batch.", _PLAN),
    "balance_dp_token": _e("number", "Rows of each rank.", _PLAN),
    "allowed_outdated_steps": _e("request or reply", "How many groups are leased ahead of training.",
                                 _FACTS, "staleness_bound"),
    "on_policy": _e("request or reply", "How many groups are leased ahead of training.",
                    _FACTS, "staleness_bound"),
    "outdated_rollout_fetch_batch_size": _e("request or reply", "Groups leased to a replica of old weights.",
                                            _LEASING),
    "filter_reward_metric": _e("request or reply", "Groups dropped as `zero_variance`.", _FACTS,
                               "filter_metrics"),
    "rollout_as_token_ids": _e("request or reply", "Whether a pushed sample carries its text.", _REWARDS),
    "reward_function": _e("request or reply", "Rewards and score of a sample.", f"{_REWARDS} {_ROLLOUT}",
                          "reward_weights"),
    "overlong_reward.enable_overlong_penalty": _e("number", "Score of a long answer.", _REWARDS),
    "overlong_reward.buffer_length": _e("number", "Score of a long answer.",
                                        "rollout_worker/rewards/scoring.py"),
    "overlong_reward.penalty_factor": _e("number", "Score of a long answer.",
                                         "rollout_worker/rewards/scoring.py"),
    "dataloader_shuffle": _e("request or reply", "Order of the rows.", f"{_JOB} policy_worker/training/sft.py"),
    "prompt_column_name": _e("file", "Tokens and `prompt` of a prepared row.", _PREPARE),
    "response_column_name": _e("file", "`answer` of a prepared row.", _PREPARE),
    "data_source_column_name": _e("file", "`data_source` of a prepared row.", _PREPARE),
    "conversation_column_name": _e("file", "Tokens of a prepared row.", _PREPARE),
    "system_prompt": _e("file", "Tokens of a prepared row.", _PREPARE),
}  # fmt: skip

_DATASET = {
    "name": _e("file", "Rows of the prepared data.", _SOURCES),
    "files": _e("file", "Rows of the prepared data.", _SOURCES),
    "subset": _e("file", "Which subset is asked of the hub.", _SOURCES),
    "revision": _e("file", "Which revision is asked of the hub.", _SOURCES),
    "split": _e("file", "Rows of the prepared data.", _SOURCES, "splits"),
    "options": _e("file", "Rows of the prepared data.", _SOURCES),
    "max_prompt_length": _e("file", "Prompts left out of the prepared data.", _PREPARE),
    "overlong_prompts": _e("file", "Tokens of a prompt that is too long.", _PREPARE),
}

_POLICY = {
    "model_name_or_path": _e("engine argument", "`model` of the engine; the weights that are trained.",
                             f"{_MODEL} {_VLLM} {_EMBEDDED}"),
    "model_revision": _e("engine argument", "`revision` of the engine, and of the trained model.",
                         f"{_MODEL} {_VLLM} {_EMBEDDED}"),
    "tokenizer_name_or_path": _e("engine argument", "`tokenizer` of the engine; tokens of the data.",
                                 f"controller/data/tokenizer.py rollout_worker/groups/tokens.py {_VLLM}"),
    "trust_remote_code": _e("engine argument", "`trust_remote_code` of the engine and of every load.",
                             f"{_MODEL} {_EXPORT} {_VLLM} {_EMBEDDED} {_PREPARE}"),
    "external_modules": _e("process", "Modules that a process has imported.",
                            f"{_PREPARE} {_MODEL} rollout_worker/groups/tokens.py "
                            "rollout_worker/engines/vllm/adapter.py"),
    "model_max_length": _e("engine argument", "`max_model_len` of the engine; rows left out of the data.",
                           f"{_PREPARE} {_LEASING} {_REWARDS}"),
    "model_gradient_checkpointing": _e("number", "Whether the model recomputes activations.", _MODEL),
    "parallelism.dp_shard_size": _e("process", "`WORLD_SIZE` of a policy replica.", f"{_PLACEMENT} {_WORKER}"),
}  # fmt: skip

_ENGINE = {
    "parallelism.n_init_replicas": _e("process", "How many rollout processes are started.",
                                      f"{_PLACEMENT} {_MEMBERS}"),
    "parallelism.tp_size": _e("engine argument", "`tensor_parallel_size`; GPUs of a rollout process.",
                              f"{_VLLM} schema/config/layout.py"),
    "backend": _e("engine argument", "Which engine is loaded.", "rollout_worker/engines/__init__.py"),
    "enforce_eager": _e("engine argument", "`enforce_eager`.", _VLLM),
    "gpu_memory_utilization": _e("engine argument", "`gpu_memory_utilization`.", _VLLM),
    "enable_chunked_prefill": _e("engine argument", "`enable_chunked_prefill`.", _VLLM),
    "max_num_seqs": _e("engine argument", "`max_num_seqs`; slots of the embedded engine.",
                       f"{_VLLM} {_EMBEDDED}"),
    "max_num_batched_tokens": _e("engine argument", "`max_num_batched_tokens`.", _VLLM),
    "max_model_len": _e("engine argument", "`max_model_len`.", f"{_VLLM} {_EMBEDDED} {_PREPARE}",
                        "engine_max_len"),
    "block_size": _e("engine argument", "`block_size`.", _VLLM),
    "dtype": _e("engine argument", "`dtype`.", f"{_VLLM} {_EMBEDDED}"),
    "load_format": _e("engine argument", "`load_format`.", f"{_VLLM} {_EMBEDDED}"),
    "engine_kwargs": _e("engine argument", "Any other argument, under its own name.", _VLLM),
    "seed": _e("engine argument", "`seed`; seeds of the samples.", f"{_VLLM} {_LEASING}",
               "engine_seed|sampling_seed"),
    "include_stop_str_in_output": _e("sampling parameter", "`include_stop_str_in_output`.", _SAMPLING),
    "max_response_length": _e("sampling parameter", "`max_tokens`.", f"{_SAMPLING} {_PREPARE}"),
    "n_generation": _e("request or reply", "Samples of a leased group.", f"{_FACTS} {_LEASING}"),
    "n_generation_to_batch": _e("request or reply", "Engine requests of a group.",
                                "rollout_worker/groups/leasing.py"),
    "batch_size": _e("request or reply", "Groups asked for in a lease request.", "rollout_worker/groups/leasing.py"),
    "max_concurrent_samples": _e("request or reply", "Samples in flight in a replica.",
                                 f"{_EMBEDDED} rollout_worker/engines/vllm/engine.py"),
}  # fmt: skip

_SAMPLING_CONFIG = {
    "temperature": _e("sampling parameter", "`temperature` of training rollouts; the trainer's logits.",
                      f"{_SAMPLING} {_GRPO}", "sampling_temperature"),
    "seed": _e("request or reply", "Seeds of the samples of a leased group.", _LEASING, "sampling_seed"),
    "ignore_eos": _e("sampling parameter", "Token ids that end an answer.", _SAMPLING),
    "stop": _e("sampling parameter", "`stop`.", _SAMPLING),
    "stop_token_ids": _e("sampling parameter", "Token ids that end an answer.", _SAMPLING),
    "extra": _e("sampling parameter", "Any other field, under its own name.", _SAMPLING),
    **{
        name: _e("sampling parameter", f"`{name}`; other values than {neutral} are refused in training.",
                 _SAMPLING)
        for name, neutral in {
            "top_p": "1.0", "top_k": "-1 and 0", "min_p": "0.0", "repetition_penalty": "1.0",
            "presence_penalty": "0.0", "frequency_penalty": "0.0", "min_tokens": "0", "do_sample": "true",
        }.items()
    },
}  # fmt: skip

_VALIDATION = {
    "enable": _e("file", "The held-out data, and that versions are scored.", f"{_PREPARE} {_JOB}"),
    "freq": _e("request or reply", "Which versions are scored.", _FACTS),
    "before": _e("request or reply", "Whether version 0 is scored.", _FACTS),
    "batch_size": _e("request or reply", "Prompts of a validation lease.", _FACTS),
    "n_generation": _e("request or reply", "Samples of a validation prompt.", _FACTS),
    "max_replicas": _e("request or reply", "Replicas that hold validation leases.", _FACTS),
    "temperature": _e("sampling parameter", "`temperature` of validation.", _SAMPLING),
    "top_p": _e("sampling parameter", "`top_p` of validation.", _SAMPLING),
    "top_k": _e("sampling parameter", "`top_k` of validation.", _SAMPLING),
    "repetition_penalty": _e("sampling parameter", "`repetition_penalty` of validation.", _SAMPLING),
    "max_response_length": _e("sampling parameter", "`max_tokens` of validation.", f"{_SAMPLING} {_PREPARE}"),
    "reward_function": _e("request or reply", "Rewards and score of a validation sample.",
                          f"{_REWARDS} {_ROLLOUT}", "validation_reward_weights"),
    **_under("dataset", _DATASET),
    "dataset.test_size": _e("refusal", "Held-out rows are taken from the training data.",
                            "schema/config/rules/data.py"),
}  # fmt: skip

_EVALUATION = {
    "prompt_column_name": _e("file", "`prompt` of an answer that is scored.", _ANSWERS),
    "responses_column_name": _e("file", "The answers that are scored.", _ANSWERS),
    "reference_column_name": _e("file", "`answer` that they are compared with.", _ANSWERS),
    "data_source_column_name": _e("file", "Sources by which scores are told apart.", _ANSWERS),
    "reward_function": _e("file", "Scores of the answers.", "rollout_worker/evaluate.py", "reward_weights"),
    **_under("dataset", {name: entry for name, entry in _DATASET.items() if name not in _BOUNDS}),
    **{
        f"dataset.{name}": _e("refusal", "All answers of the file are scored.",
                              "schema/config/rules/evaluation.py")
        for name in (*_BOUNDS, "test_size")
    },
}  # fmt: skip

_CONTROLLER = {
    "host": _e("process", "Address of the controller.", f"{_LAUNCH} {_SERVE}"),
    "port": _e("process", "Port of the controller.", f"launcher/job/run.py {_SERVE}"),
    "heartbeat_interval": _e("request or reply", "Answer to a registration.", _MEMBERS),
    "heartbeat_timeout": _e("request or reply", "When a silent replica counts as lost.", f"{_JOB} {_MEMBERS}"),
    "lease_timeout": _e("request or reply", "When an unrenewed lease goes to another replica.",
                        f"{_FACTS} {_LEASING}"),
    "lock_timeout": _e("process", "When a controller that stands by takes the job over.", _SERVE),
    "start_timeout": _e("request or reply", "When a job whose replicas do not come fails.", _UPKEEP),
    "controller_lost_timeout": _e("process", "When a worker that reaches no controller ends.",
                                  f"policy_worker/session.py {_ROLLOUT}"),
    "oversample": _e("request or reply", "How many groups are leased.", _FACTS),
    "on_stale": _e("request or reply", "Whether late groups are waited for or dropped.", _FACTS),
    "straggler_timeout": _e("request or reply", "When late groups are dropped.", _FACTS),
    "max_attempts": _e("request or reply", "After how many failures a group is dropped.", _FACTS),
    "max_request_bytes": _e("request or reply", "Which requests are answered 413.",
                            f"controller/api/app.py {_ROLLOUT}"),
    "tls_cert": _e("process", "Certificate that the API is served with.", _SERVE),
    "tls_key": _e("process", "Certificate that the API is served with.", _SERVE),
    "tls_ca": _e("process", "`COSMOS_TLS_CA` of the workers: whom they trust.", f"{_LAUNCH} {_RUNDIR}"),
    "max_buffered_bytes": _e("request or reply", "Which requests are answered 503 while others are read.",
                             "controller/api/app.py"),
    "payload_store": _e("file", "Whether the payloads of large samples lie in this directory.",
                        "controller/state/job.py rollout_worker/groups/pushing.py policy_worker/worker.py"),
    "payload_bytes": _e("file", "Which samples lie in the payload store.", "rollout_worker/groups/pushing.py"),
    "require_durable_redis": _e("refusal", "A server without an append-only file.",
                                f"launcher/preflight/checks.py {_SERVE}"),
}  # fmt: skip

_HOST = "rollout_worker/weights/host_weights.py"
_SEND = f"policy_worker/weights/nccl_sender.py {_HOST}"
_WEIGHT_SYNC = {
    "transport": _e("request or reply", "Whether publications say where the trainer sends them from.", _SEND),
    "collective_timeout": _e("request or reply", "When a version comes from the store after all.", _SEND),
    "encoding": _e("file", "Whether publications hold all weights or what changed.", _PUBLISH),
    "anchor_interval": _e("file", "Which publications have a full version.", _PUBLISH),
    "store": _e("file", "Where weight versions are written.", _MEMBERS),
    "store_timeout": _e(
        "request or reply", "How long a store that fails is tried again.", f"{_PUBLISH} {_FOLLOW}"
    ),
    "keep": _e("file", "Which weight versions stay.", _JOB),
    "host_cache": _e("file", "Where a host keeps the weights that its replicas load.", _HOST),
    "update_mode": _e(
        "engine argument",
        "What becomes of the cache of running requests.",
        f"{_EMBEDDED} rollout_worker/engines/vllm/engine.py",
    ),
    "checksum_interval": _e("request or reply", "Which reports of a replica carry a hash.", _FOLLOW),
}

TABLE: dict[str, Entry] = {
    **_under("train", _TRAIN),
    **_under("train.train_policy", _POLICY_LOSS),
    **_under("train.train_policy.dataset", _DATASET),
    "train.train_policy.dataset.test_size": _e("file", "Rows of each of the two data files.", _PREPARE),
    **_under("policy", _POLICY),
    **_under("rollout", _ENGINE),
    **_under("rollout.sampling_config", _SAMPLING_CONFIG),
    **_under("validation", _VALIDATION),
    **_under("evaluation", _EVALUATION),
    "reward.timeout": _e("request or reply", "When a slow reward is an error.", _ROLLOUT),
    "reward.num_workers": _e("process", "Reward processes of a replica.", _ROLLOUT),
    "reward.on_error": _e("request or reply", "What becomes of a group with a failed sample.", _FACTS),
    "reward.outage_timeout": _e("request or reply", "When a job whose rewards time out fails.", _JOB),
    "reward.prompt_forms": _e("file", "`raw_prompt_ids` and `full_prompt` of a prepared row.", _PREPARE),
    **_under("controller", _CONTROLLER),
    "redis.url": _e("process", "Server that the controller uses.", f"launcher/plan/redis_server.py {_SERVE}"),
    "redis.key_prefix": _e("file", "Names of the keys in Redis.", _SERVE),
    "redis.tls_ca": _e("process", "Which server's certificate is trusted.", _REDIS),
    "redis.tls_cert": _e("process", "Certificate shown to a server that asks for one.", _REDIS),
    "redis.tls_key": _e("process", "Certificate shown to a server that asks for one.", _REDIS),
    **_under("weight_sync", _WEIGHT_SYNC),
    "placement.gpus_per_node": _e("process", "`CUDA_VISIBLE_DEVICES` of the processes.", _PLACEMENT),
    "placement.share": _e("process", "Whether two roles may have one GPU.", _PLACEMENT),
    "placement.policy": _e("process", "`CUDA_VISIBLE_DEVICES` of policy processes.", _PLACEMENT),
    "placement.rollout": _e("process", "`CUDA_VISIBLE_DEVICES` of rollout processes.", _PLACEMENT),
    "launcher.max_restarts": _e("process", "How often a process is started again.", _LAUNCH),
    "launcher.restart_backoff": _e("process", "When a process is started again.", _LAUNCH),
    "launcher.restart_backoff_max": _e("process", "When a process is started again.", _LAUNCH),
    "launcher.shutdown_timeout": _e("process", "When a process that does not end is killed.",
                                    f"{_LAUNCH} {_ROLLOUT} {_WORKER}"),
    "launcher.cpu_threads": _e("process", "`COSMOS_CPU_THREADS` and `OMP_NUM_THREADS`.", _PLACEMENT),
    "launcher.export_final": _e("file", "`final` in the run's directory.", "policy_worker/training/loop.py"),
    "logging.project_name": _e("request or reply", "`project` of the job's status and summary.",
                               "controller/services/job.py"),
    "logging.experiment_name": _e("request or reply", "`name` of the job's status and summary.",
                                  "controller/services/job.py"),
    "custom": _e("request or reply", "What reward functions get as `custom`.", _ROLLOUT),
}  # fmt: skip
