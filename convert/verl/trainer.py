"""verl's `trainer` table, and supervised fine-tuning: sft_trainer.yaml, with the tables of its newer engine."""

from __future__ import annotations

from dataclasses import replace

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath, Rule
from convert.engine.values import BadValue, shown
from convert.verl.data import truncated
from convert.verl.facts import (
    KEYS,
    POLICY,
    async_mode,
    group_size,
    is_streamed,
    machines,
    on_cpu,
    prompts_per_step,
    rollout_gpus,
    rollout_replicas,
    sharding,
    staleness,
    sync_interval,
)
from convert.verl.mesh import mesh, parallelism

_TRACKERS = ("console", "wandb", "tensorboard", "mlflow", "swanlab")
NEVER = 1_000_000_000  # steps; more than any run has


def _stale(context: ConversionContext, leaf: KeyPath) -> Result:
    if values.number(0 if leaf.value is None else leaf.value) < 0:
        raise BadValue(f"expected at least 0, got {shown(leaf.value)}")
    steps = sync_interval(context)
    return leaf.to(staleness(context), note=f"{steps} steps per version")


def _trigger(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to(values.count(leaf.value), staleness(context))


def _required(context: ConversionContext, leaf: KeyPath) -> Result:
    if values.number(1 if leaf.value is None else leaf.value) <= 0:
        raise BadValue(f"expected more than 0, got {shown(leaf.value)}")
    prompts, n = prompts_per_step(context), group_size(context)
    return leaf.to(prompts * n, note=f"{prompts} prompts × {n} samples")


def _streamed_steps(context: ConversionContext) -> str:
    counted = is_streamed(context) and context.get("rollout.total_rollout_steps", None) is not None
    return "fully_async counts rollout.total_rollout_steps" if counted else ""


def _epochs_of(context: ConversionContext, leaf: KeyPath) -> Result:
    passes = values.integer(leaf.value)
    other_key = "trainer.total_epochs" if leaf.key.startswith("rollout.") else "rollout.total_epochs"
    if context.kind == "rl" and is_streamed(context):
        passes = min(passes, context.integer(other_key, passes) or passes)
    return leaf.to(passes)


def _rollout_steps(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or not is_streamed(context):
        return implicit("total_epochs counts")
    prompts, batch = values.integer(leaf.value), prompts_per_step(context)
    return leaf.to(max(prompts // batch, 1), note=f"{prompts} / {batch} prompts")


def _versions_between_validations(context: ConversionContext, leaf: KeyPath) -> Result:
    if not is_streamed(context):
        return implicit("trainer.test_freq counts")
    freq = values.integer(-1 if leaf.value is None else leaf.value)
    if freq <= 0 or not context.get("data.val_files", None):
        return implicit("no validation during training, or no data for it")
    return leaf.to(True, freq * sync_interval(context))


def _mode(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name not in ("sync", "colocate_async", "separate_async"):
        raise BadValue(f"expected sync, colocate_async or separate_async, got {shown(name)}")
    return leaf.to(not async_mode(context))


def _bound(context: ConversionContext, leaf: KeyPath) -> Result:
    if async_mode(context) not in ("colocate_async", "separate_async"):
        return implicit("no effect with this trainer")
    if leaf.value is None:
        raise BadValue("null sets no bound; here one is always kept: train.train_policy.allowed_outdated_steps")
    return leaf.to(values.integer(leaf.value))


def _interval(context: ConversionContext, leaf: KeyPath) -> Result:
    if async_mode(context) != "separate_async":
        return implicit("no effect without trainer_mode = separate_async")
    return leaf.to(values.integer(leaf.value))


def _placed(context: ConversionContext, leaf: KeyPath) -> Result:
    nodes = gpus = values.integer(leaf.value)
    targets: list[tuple[str, int]] = []
    note = ""
    if context.kind == "rl":
        nodes, gpus = machines(context)
        targets = [("rollout.parallelism.n_init_replicas", rollout_replicas(context))]
        targets.append(("policy.parallelism.dp_shard_size", sharding(context)[1]))
        note = "with the GPUs of the rollouts" if rollout_gpus(context)[0] else ""
    if leaf.key == "trainer.nnodes":
        return mapped(("placement.nodes", nodes), *targets, note=note)
    if on_cpu(context):
        gpus, note = 0, "device: cpu"
    return mapped(("placement.gpus_per_node", gpus), *targets, note=note)


def _logger(context: ConversionContext, leaf: KeyPath) -> Result:
    names = values.texts(leaf.value)
    supported = [name for name in names if name in _TRACKERS]
    strange = [name for name in names if name not in _TRACKERS]
    if not supported:
        raise BadValue(f"expected some of {', '.join(_TRACKERS)}, got {shown(leaf.value)}")
    if strange:
        context.warn(f"no support for {', '.join(strange)} as a tracker: {', '.join(supported)} get the metrics")
    return leaf.to(supported, note=f"no support for {', '.join(strange)}" if strange else "")


def _answers_dir(context: ConversionContext, leaf: KeyPath) -> Result:
    train, held_out = (context.get(f"trainer.{name}_data_dir", None) for name in ("rollout", "validation"))
    path = values.path(train or held_out)
    if train and held_out and train != held_out:
        context.warn(
            f"answers of training and validation are below one directory, in train/ and validation/: {path}, not "
            f"{held_out}"
        )
    return leaf.to(path, note="answers of training and validation, in train/ and validation/ below the id of the run")


def _save_freq(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if steps <= 0:
        return leaf.to(False, note="-1: none")
    if context.kind == "rl" and is_streamed(context):
        steps *= sync_interval(context)  # it counts versions there
    return leaf.to(True, steps)


def _no_checkpoints(context: ConversionContext) -> str:
    steps = context.integer("trainer.save_freq", -1)
    return "" if steps is not None and steps > 0 else "no effect without checkpoints (save_freq = -1)"


def validates(context: ConversionContext) -> bool:
    """Whether the job validates at all: it has data for it, and a time."""
    freq = context.integer("trainer.test_freq", -1) or 0
    if not context.get("data.val_files", None):
        return False
    return freq > 0 or (context.kind == "rl" and context.flag("trainer.val_before_train", True))


def _test_freq(context: ConversionContext, leaf: KeyPath) -> Result:
    steps = values.integer(leaf.value)
    if context.kind == "rl" and is_streamed(context) and context.has("rollout.test_freq"):
        return implicit("fully_async counts rollout.test_freq")
    if not validates(context):
        return implicit("there is nothing to validate on" if steps > 0 else "-1: no validation")
    if steps <= 0:
        return leaf.to(True, NEVER, note="before training only")
    if context.kind == "sft":
        return leaf.to(True, steps, False, note="never before the first step")
    return leaf.to(True, steps)


def _before(context: ConversionContext, leaf: KeyPath) -> Result:
    before = leaf.value is None or values.flag(leaf.value)
    if not validates(context):
        return implicit("there is nothing to validate on, or validation is off")
    return leaf.to(before, True)


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
        note = "the newest checkpoint; without one the run starts afresh" if name == "auto" else ""
        return leaf.to(name == "auto", note=note)
    if leaf.value is None:
        return implicit("null: none")
    alone = leaf.key == "trainer.resume_path" and not context.has("trainer.resume_mode")
    if mode != "resume_path" and not alone:
        return implicit(f"no effect with resume_mode = {mode}")
    return to.path("train.resume").run(context, leaf)


def _keep(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.flag("trainer.remove_previous_ckpt_in_save"):
        return leaf.to(1, note="remove_previous_ckpt_in_save")
    count = -1 if leaf.value is None else values.integer(leaf.value)
    return leaf.to(count if count > 0 else -1, note="all" if count <= 0 else "")


_ULYSSES = "ulysses_sequence_parallel_size"


def other_engine_rules() -> tuple[Rule, ...]:
    """The other keys of `engine`: those of a role's table for FSDP, Megatron or VeOmni, which are one table here.

    The names with the table stay as further spellings, under which `facts` asks for them.
    """
    taken = {name for rule in KEYS.rules("sft engine", globals()) for name in rule.spellings}
    taken |= {_ULYSSES, f"engine.{_ULYSSES}"}
    rules: dict[str, Rule] = {}
    for rule in mesh("engine", "policy", "train"):
        table, _, name = rule.key.removeprefix("engine.").partition(".")
        key = f"engine.{name}"
        if table not in ("fsdp_config", "megatron", "veomni") or key in taken:
            continue
        engine_rule = rules.get(key, replace(rule, key=key, also=()))
        rules[key] = replace(engine_rule, also=(*engine_rule.also, rule.key))
    return tuple(rules.values())


def _ulysses(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None:
        values.integer(leaf.value)
    return mapped(*parallelism(context, "engine", "policy").items())


def _engine_fsdp_size(context: ConversionContext, leaf: KeyPath) -> Result:
    values.integer(leaf.value)
    replicate, shard = sharding(context, "engine")
    return leaf.to(shard, replicate)


def _offload_all(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix = "model.fsdp_config"
    if leaf.value is not None:
        values.flag(leaf.value)
    if not context.flag(f"{prefix}.cpu_offload"):
        return implicit("cpu_offload is not true: nothing is offloaded")
    if not context.flag(f"{prefix}.offload_params"):
        return leaf.to(False, note="without offload_params nothing is kept on the host")
    return leaf.to(True, True, True)


# --- columns ------------------------------------------------------------------------------------------------


def _has_turns(context: ConversionContext) -> bool:
    """Whether rows are conversations: said so, or the newer trainer's messages_key stands alone."""
    if context.has("data.multiturn.enable"):
        return context.flag("data.multiturn.enable")
    return not context.has("data.prompt_key")


def _conversation(context: ConversionContext, leaf: KeyPath) -> Result:
    if not _has_turns(context):
        return implicit("rows are prompt and response, not conversations")
    return leaf.to(context.text("data.multiturn.messages_key", "messages"))


def _column(context: ConversionContext, leaf: KeyPath) -> Result:
    if _has_turns(context):
        return implicit("no effect: rows are conversations")
    if leaf.value in (None, []):
        return implicit("null: none")
    side = "prompt" if "prompt" in leaf.key else "response"
    name = context.text(f"data.{side}_key", side)
    inner = context.get(f"data.{side}_dict_keys", None)
    parts = values.texts(inner) if inner not in (None, []) else []
    if parts and parts != [name]:
        name = ".".join([name, *parts])
    return mapped((f"{POLICY}.{side}_column_name", name))


def _sft_truncation(context: ConversionContext, leaf: KeyPath) -> Result:
    keys = list(leaf.ours if validates(context) else leaf.ours[:1])
    as_written = truncated(leaf, keys)
    newer = "no_padding" if context.below("engine") else "right"
    if context.get("data.pad_mode", newer) != "no_padding" or not as_written.targets:
        return as_written
    return mapped(*((key, "right") for key in keys), note="pad_mode = no_padding always cuts on the right")
