"""verl's `trainer` table, of RL and SFT files."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed, rules_below
from convert.engine.values import BadValue, shown
from convert.verl.facts import (
    POLICY,
    async_mode,
    group_size,
    is_streamed,
    lacking,
    machines,
    no_critic,
    on_cpu,
    prompts_per_step,
    rollout_gpus,
    sharding,
    staleness,
    switched,
    sync_interval,
)
from convert.verl.rollout import replicas

_TRACKERS = ("console", "wandb", "tensorboard", "mlflow", "swanlab")
NEVER = 1_000_000_000  # steps; more than any run has


def trainer_rules(kind: str) -> tuple[Rule, ...]:
    """All rules of `trainer`. kind: `rl` or `sft`."""
    common = (
        Rule("trainer.total_epochs", _epochs, default=30 if kind == "rl" else 4),
        Rule("trainer.total_training_steps", to.integer("train.max_num_steps"), when=_streamed_steps),
        Rule(
            "trainer.project_name",
            to.text("logging.project_name"),
            default="verl_examples" if kind == "rl" else "gsm8k-sft",
        ),
        Rule("trainer.experiment_name", to.text("logging.experiment_name")),
        Rule("trainer.logger", _logger, default=["console", "wandb"]),
        Rule("trainer.nnodes", _machines, default=1),
        Rule("trainer.n_gpus_per_node", _machines, default=8),
        Rule("trainer.device", to.always("the launcher finds out what there is; `cpu` means no GPUs")),
        Rule("trainer.save_freq", _save_freq, default=-1),
        Rule("trainer.test_freq", _test_freq, default=-1),
        Rule("trainer.default_local_dir", to.path("train.output_dir")),
        Rule("trainer.resume_mode", _resume, default="auto"),
        Rule("trainer.resume_from_path", _resume, also=("trainer.resume_path",)),
        Rule("trainer.max_actor_ckpt_to_keep", _keep, None, ("trainer.max_ckpt_to_keep",), _no_checkpoints),
        Rule("trainer.balance_batch", to.flag(f"{POLICY}.balance_dp_token")),
        Rule("trainer.profile_interval", lacking([-1, -1])),
    )
    if kind == "sft":
        return (*common, Rule("trainer.seed", to.integer("train.seed"), default=1))
    return (
        *common,
        Rule("trainer.val_before_train", _before, default=True),
        *_newer_trainer(),
        *_recipes(),
        *rules_below("trainer", _once(), also={"log_val_generations": ("val_generations_to_log_to_wandb",)}),
        Rule("trainer.critic_warmup", to.integer("critic.warmup_steps"), default=0, when=no_critic),
        Rule(
            "trainer.remove_previous_ckpt_in_save",
            to.switch(
                ("train.ckpt.max_keep", 1), words="true → 1", off="false: previous checkpoints are kept"
            ),
            when=_no_checkpoints,
        ),
    )


def _once() -> dict[str, Converter]:
    """Keys that go their way one by one."""
    return {
        "log_val_generations": to.integer("logging.log_validation_samples"),
        "del_local_ckpt_after_load": to.flag("train.ckpt.delete_after_load"),
        "max_critic_ckpt_to_keep": to.always("one checkpoint holds all models: max_actor_ckpt_to_keep"),
        "max_ref_ckpt_to_keep": to.always("the reference model is not saved"),
        "use_legacy_worker_impl": to.always("chooses between two implementations inside verl"),
        "controller_nsight_options.* worker_nsight_options.* npu_profile.*": to.always(
            "details of verl's profilers"
        ),
        "val_only": lacking(False),
        "esi_redundant_time": lacking(0),
        "checkpoint_callback_class rollout_data_dir validation_data_dir profile_steps": lacking(),
    }


def _newer_trainer() -> tuple[Rule, ...]:
    """`trainer.v1`: asynchronous training, where theirs is bounded like ours."""
    ahead = to.always("groups are leased ahead as far as allowed_outdated_steps lets them")
    table = {
        "trainer_mode": _mode,
        "sampler.max_off_policy_threshold": _bound,
        "sampler.max_off_policy_strategy": to.always("groups are admitted so that none becomes too old"),
        "separate_async.parameter_sync_step": _interval,
        "separate_async.num_warmup_batches colocate_async.num_warmup_batches": ahead,
        "separate_async.hybrid_rollout.*": switched("trainer.v1.separate_async.hybrid_rollout.enable_switch"),
        "sampler.sync_refill_failed_groups": to.always("a group that fails is made again"),
        "sampler.custom_sampler.path sampler.custom_sampler.name": lacking(),
        "sampler.sampler_kwargs": lacking({}),
        "sampler.sampler_kwargs.*": lacking(),
        "sync": to.always("the synchronous trainer has no keys"),
    }
    return (
        Rule("trainer.use_v1", to.always("chooses between two trainers inside verl")),
        *rules_below("trainer.v1", table),
    )


def _recipes() -> tuple[Rule, ...]:
    """`async_training` and `rollout` of fully_async, and what one_step_off adds."""
    same = to.always("weights travel through weight_sync")
    going_on = "running answers always go on under new weights, each token with its version"
    table = {
        "staleness_threshold": _stale,
        "trigger_parameter_sync_step": _trigger,
        "require_batches": _required,
        "partial_rollout": to.switch(
            ("weight_sync.update_mode", "recompute"), words="true → `recompute`", off=going_on
        ),
        "use_rollout_log_probs": lacking(True),
        "compute_prox_log_prob": lacking(False),
        "use_trainer_do_validate parallel_validate_and_rollout": to.always(
            "validation runs on the rollout replicas"
        ),
        "compute_advantage_in_rollout": to.always("advantages are computed once per batch"),
        "checkpoint_engine.*": same,
    }
    return (
        *rules_below("async_training", table),
        Rule("rollout.total_rollout_steps", _rollout_steps),
        Rule("rollout.test_freq", _versions_between_validations),
        *rules_below(
            "rollout",
            {
                "n": to.always("verl reads actor_rollout_ref.rollout.n"),
                "total_epochs": to.given(is_streamed, "trainer.total_epochs counts", _epochs),
                "max_concurrent_samples_per_replica": to.integer("rollout.max_concurrent_samples"),
            },
        ),
        Rule("actor_rollout_ref.checkpoint_engine.*", same),
        Rule("actor_rollout_ref.checkpoint_engine", same),
        Rule("actor_rollout_ref.actor.use_rollout_log_probs", to.always("π_old are the rollout's log-probs")),
        Rule("trainer.weight_sync_with_ray", same),
    )


@computed(f"{POLICY}.allowed_outdated_steps", words="⌈(1 + threshold) · sync steps⌉ − 1")
def _stale(context: ConversionContext, leaf: KeyPath) -> Result:
    if values.number(0 if leaf.value is None else leaf.value) < 0:
        raise BadValue(f"expected at least 0, got {shown(leaf.value)}")
    steps = sync_interval(context)
    return mapped((f"{POLICY}.allowed_outdated_steps", staleness(context)), note=f"{steps} steps per version")


@computed("train.sync_weight_interval", f"{POLICY}.allowed_outdated_steps", words="as it is")
def _trigger(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = ("train.sync_weight_interval", values.count(leaf.value))
    return mapped(steps, (f"{POLICY}.allowed_outdated_steps", staleness(context)))


@computed("train.train_batch_per_replica", words="× ppo_mini_batch_size × rollout.n")
def _required(context: ConversionContext, leaf: KeyPath) -> Result:
    if values.number(1 if leaf.value is None else leaf.value) <= 0:
        raise BadValue(f"expected more than 0, got {shown(leaf.value)}")
    prompts, n = prompts_per_step(context), group_size(context)
    return mapped(("train.train_batch_per_replica", prompts * n), note=f"{prompts} prompts × {n} samples")


def _streamed_steps(context: ConversionContext) -> str:
    counted = is_streamed(context) and context.get("rollout.total_rollout_steps", None) is not None
    return "fully_async counts rollout.total_rollout_steps" if counted else ""


@computed(
    "train.epoch", words="as it is; in a file of fully_async the smaller of two", null="null: the default"
)
def _epochs(context: ConversionContext, leaf: KeyPath) -> Result:
    passes = values.integer(leaf.value)
    other = "trainer.total_epochs" if leaf.key.startswith("rollout.") else "rollout.total_epochs"
    if context.kind == "rl" and is_streamed(context):
        passes = min(passes, context.integer(other, passes) or passes)
    return mapped(("train.epoch", passes))


@computed("train.max_num_steps", words="prompts, divided by those of a step")
def _rollout_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or not is_streamed(context):
        return implicit("total_epochs counts")
    prompts, batch = values.integer(leaf.value), prompts_per_step(context)
    return mapped(("train.max_num_steps", max(prompts // batch, 1)), note=f"{prompts} / {batch} prompts")


@computed("validation.enable", "validation.freq", words="versions, times the steps between two")
def _versions_between_validations(context: ConversionContext, leaf: KeyPath) -> Result:
    if not is_streamed(context):
        return implicit("trainer.test_freq counts")
    freq = values.integer(-1 if leaf.value is None else leaf.value)
    if freq <= 0 or not context.get("data.val_files", None):
        return implicit("no validation during training, or no data for it")
    return mapped(("validation.enable", True), ("validation.freq", freq * sync_interval(context)))


@computed(f"{POLICY}.on_policy", words="`sync` → true, else false")
def _mode(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name not in ("sync", "colocate_async", "separate_async"):
        raise BadValue(f"expected sync, colocate_async or separate_async, got {shown(name)}")
    return mapped((f"{POLICY}.on_policy", not async_mode(context)))


@computed(f"{POLICY}.allowed_outdated_steps", words="in the asynchronous modes only")
def _bound(context: ConversionContext, leaf: KeyPath) -> Result:
    if async_mode(context) not in ("colocate_async", "separate_async"):
        return implicit("no effect with this trainer")
    if leaf.value is None:
        raise BadValue(
            "null sets no bound; here one is always kept: train.train_policy.allowed_outdated_steps"
        )
    return mapped((f"{POLICY}.allowed_outdated_steps", values.integer(leaf.value)))


@computed("train.sync_weight_interval", words="with separate_async only")
def _interval(context: ConversionContext, leaf: KeyPath) -> Result:
    if async_mode(context) != "separate_async":
        return implicit("no effect without trainer_mode = separate_async")
    return mapped(("train.sync_weight_interval", values.integer(leaf.value)))


@computed(
    "placement.gpus_per_node", "placement.nodes", words="as they are; `device: cpu` → gpus_per_node = 0"
)
def _machines(context: ConversionContext, leaf: KeyPath) -> Result:
    nodes = gpus = values.integer(leaf.value)
    targets: list[tuple[str, int]] = []
    note = ""
    if context.kind == "rl":
        nodes, gpus = machines(context)
        targets = [replicas(context), ("policy.parallelism.dp_shard_size", sharding(context)[1])]
        note = "with the GPUs of the rollouts" if rollout_gpus(context)[0] else ""
    if leaf.key == "trainer.nnodes":
        return mapped(("placement.nodes", nodes), *targets, note=note)
    if on_cpu(context):
        gpus, note = 0, "device: cpu"
    return mapped(("placement.gpus_per_node", gpus), *targets, note=note)


@computed(
    "logging.logger",
    words="console, wandb, tensorboard, mlflow, swanlab; others are named and left out",
    null="null: the default",
)
def _logger(context: ConversionContext, leaf: KeyPath) -> Result:
    names = values.texts(leaf.value)
    known = [name for name in names if name in _TRACKERS]
    strange = [name for name in names if name not in _TRACKERS]
    if not known:
        raise BadValue(f"expected some of {', '.join(_TRACKERS)}, got {shown(leaf.value)}")
    if strange:
        context.warn(f"no support for {', '.join(strange)} as a tracker: {', '.join(known)} get the metrics")
    return mapped(("logging.logger", known), note=f"no support for {', '.join(strange)}" if strange else "")


@computed("train.ckpt.enable_checkpoint", "train.ckpt.save_freq", words="−1 → no checkpoints")
def _save_freq(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps <= 0:
        return mapped(("train.ckpt.enable_checkpoint", False), note="-1: none")
    if context.kind == "rl" and is_streamed(context):
        steps *= sync_interval(context)  # it counts versions there
    return mapped(("train.ckpt.enable_checkpoint", True), ("train.ckpt.save_freq", steps))


def _no_checkpoints(context: ConversionContext) -> str:
    steps = context.integer("trainer.save_freq", -1)
    return "" if steps is not None and steps > 0 else "no effect without checkpoints (save_freq = -1)"


def validates(context: ConversionContext) -> bool:
    """Whether the job validates at all: it has data for it, and a time."""
    freq = context.integer("trainer.test_freq", -1) or 0
    if not context.get("data.val_files", None):
        return False
    return freq > 0 or (context.kind == "rl" and context.flag("trainer.val_before_train", True))


@computed("validation.enable", "validation.freq", "validation.before", words="−1: never during training")
def _test_freq(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if context.kind == "rl" and is_streamed(context) and context.has("rollout.test_freq"):
        return implicit("fully_async counts rollout.test_freq")
    if not validates(context):
        return implicit("there is nothing to validate on" if steps > 0 else "-1: no validation")
    if steps <= 0:
        return mapped(("validation.enable", True), ("validation.freq", NEVER), note="before training only")
    enabled = (("validation.enable", True), ("validation.freq", steps))
    if context.kind == "sft":
        return mapped(*enabled, ("validation.before", False), note="never before the first step")
    return mapped(*enabled)


@computed("validation.before", "validation.enable", words="as it is")
def _before(context: ConversionContext, leaf: KeyPath) -> Result:
    before = leaf.value is None or values.flag(leaf.value)
    if not validates(context):
        return implicit("there is nothing to validate on, or validation is off")
    return mapped(("validation.before", before), ("validation.enable", True))


@computed("train.resume", words="`auto` → true, `disable` → false, `resume_path` → the path")
def _resume(context: ConversionContext, leaf: KeyPath) -> Result:
    mode, place = context.text("trainer.resume_mode", "auto"), context.get("trainer.resume_from_path", None)
    if leaf.key == "trainer.resume_mode":
        name = "auto" if leaf.value is None else values.text(leaf.value)
        if name not in ("auto", "disable", "resume_path"):
            raise BadValue(f"expected auto, disable or resume_path, got {shown(name)}")
        if name == "resume_path" and not isinstance(place, str):
            raise BadValue("resume_path needs trainer.resume_from_path")
        if name == "resume_path":
            return to.path("train.resume").run(context, KeyPath(leaf.key, place))
        return mapped(
            ("train.resume", name == "auto"),
            note="the newest checkpoint; without one the run starts afresh" if name == "auto" else "",
        )
    if leaf.value is None:
        return implicit("null: none")
    alone = leaf.key == "trainer.resume_path" and not context.has("trainer.resume_mode")
    if mode != "resume_path" and not alone:
        return implicit(f"no effect with resume_mode = {mode}")
    return to.path("train.resume").run(context, leaf)


@computed("train.ckpt.max_keep", words="null → −1, all")
def _keep(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.flag("trainer.remove_previous_ckpt_in_save"):
        return mapped(("train.ckpt.max_keep", 1), note="remove_previous_ckpt_in_save")
    count = -1 if leaf.value is None else values.integer(leaf.value)
    return mapped(("train.ckpt.max_keep", count if count > 0 else -1), note="all" if count <= 0 else "")
