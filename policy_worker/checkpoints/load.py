"""Reading a checkpoint into a trainer, on any number of ranks; what of it is read, and which schedule goes on.

A run that continues itself takes all that it has saved. One that starts from another run's checkpoint takes what
`train.ckpt.load_contents` names; without `extra` it takes weights (and optimizer) along and begins its own data,
schedule and step count from the start.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from policy_worker.checkpoints.find import Resumption
from policy_worker.checkpoints.layout import EXPORT, DataFacts, Manifest, ScheduleFacts, state_files
from policy_worker.checkpoints.state import (
    CRITIC,
    CRITIC_OPTIMIZER,
    EMA,
    OPTIMIZER,
    REFERENCE,
    average_state,
    base_digest,
    load_loss_scales,
    load_model_state,
    load_state,
    optimizer_state,
    reference_state,
    restore_rng,
)
from policy_worker.errors import CheckpointError
from policy_worker.model.model import Backbone, PolicyModel
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.frozen import EarlierPolicy
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.model import TrainedModel
from policy_worker.trained.trainer import Trainer
from schema.config import Config
from schema.wire import messages as m
from schema.wire.prompts import OTHER_ROWS, PromptFile, PromptFileError

log = logging.getLogger(__name__)

# ---- decisions ----

KEY = "train.ckpt.load_contents"


@dataclass(frozen=True)
class CheckpointParts:
    """The parts that are read. weights: from the state files, or from the export."""

    weights: Literal["state", "export"]
    optimizer: bool
    extra: bool


def parts_to_load(manifest: Manifest, wanted: Collection[str] | None) -> CheckpointParts:
    """Choose what to read of a checkpoint. wanted: `load_contents`; None: all that was saved.

    Raises `CheckpointError`: it does not hold what is wanted, or no weights at all."""
    held = {*manifest.contents, *(["hf_model"] if manifest.exported else [])}
    if wanted is None:
        if not held & {"model", "hf_model"}:
            raise CheckpointError("it holds no weights: it was saved without model and without export")
        weights: Literal["state", "export"] = "state" if "model" in held else "export"
        return CheckpointParts(weights, "optimizer" in held, "extra" in held)
    missing = [name for name in wanted if name not in held]
    if missing:
        raise CheckpointError(
            f"{KEY} asks for {', '.join(missing)}, and it holds {', '.join(sorted(held)) or 'nothing'}: "
            f"leave {missing[0]} out"
        )
    return CheckpointParts("export" if "hf_model" in wanted else "state", "optimizer" in wanted, "extra" in wanted)


def schedule_facts(schedule: Schedule, peak_lr: float, *further_lrs: float) -> ScheduleFacts:
    return ScheduleFacts(peak_lr=peak_lr, further_lrs=further_lrs, **dataclasses.asdict(schedule))


def schedule_of(facts: ScheduleFacts) -> Schedule:
    return Schedule(**facts.model_dump(exclude={"peak_lr", "further_lrs"}))


def schedule_differences(saved: ScheduleFacts, configured: ScheduleFacts, section: str = "train") -> list[str]:
    """`name: checkpoint's value, configuration's value` of each field that differs; section: of the keys."""
    before, now = saved.model_dump(), configured.model_dump()
    names = {
        "peak_lr": f"{section}.optm_lr",
        "further_lrs": f"{section}.optm_lr[1]",
        "total_steps": "total steps",
        "min_factor": f"{section}.optm_min_lr_factor",
    }
    return [
        f"{names.get(name, f'{section}.optm_{name}')}: {before[name]!r} in the checkpoint, {now[name]!r} configured"
        for name in before
        if before[name] != now[name]
    ]


def check_data(saved: DataFacts | None, now: DataFacts | None) -> None:
    """Raises `CheckpointError` unless the rows of a supervised job go on where they were."""
    if saved is None or now is None:
        return
    begun = now.early and saved.rows == now.early  # by a trainer that has seen the early rows alone
    if saved.rows == now.rows and saved.digest and now.digest and saved.digest != now.digest:
        log.warning(OTHER_ROWS)
    if begun or (saved.rows in now.grown and saved.position <= saved.rows):
        saved = saved.model_copy(update={"rows": now.rows})
    names = {"rows": "rows of the dataset", "seed": "train.seed", "batch": "rows of a step"}
    names["shuffle"] = "train.train_policy.dataloader_shuffle"
    for field, words in names.items():
        if getattr(saved, field) != getattr(now, field):
            raise CheckpointError(
                f"{words}: {getattr(saved, field)} when it was saved, {getattr(now, field)} now, so the position in "
                f'the data would be another; keep them equal, or begin the data anew with {KEY} = ["model", '
                f'"optimizer"] and train.ckpt.load_schedule = false'
            )


# ---- reading ----


def data_facts(config: Config, reply: m.RegisterReply) -> DataFacts | None:
    """None for reinforcement, whose ledger knows. A file that cannot be read is the algorithm's to complain of."""
    if reply.mode != "sft":
        return None
    try:
        data = PromptFile(Path(reply.data_file))
    except PromptFileError:
        return None
    return DataFacts(
        rows=len(data),
        grown=tuple(data.grown),
        early=data.early,
        unfinished=data.unfinished,
        digest=data.digest,
        seed=config.effective_seed,
        shuffle=config.sft.dataloader_shuffle,
        batch=config.samples_per_step,
        position=0,
    )


def parts_of(resumption: Resumption, config: Config) -> CheckpointParts:
    """Choose what is read of a resumption. Raises `CheckpointError` naming the checkpoint."""
    wanted = None if resumption.own else config.train.ckpt.load_contents
    try:
        return parts_to_load(resumption.found.manifest, wanted)
    except CheckpointError as error:
        raise type(error)(f"checkpoint {resumption.path}: {error}") from error


def weights_directory(resumption: Resumption | None, config: Config) -> str | None:
    """The export to load the model from, where that is what is resumed; None: the configured model.

    Raises `CheckpointError`: the checkpoint does not hold what is asked for."""
    if resumption is None or parts_of(resumption, config).weights != "export":
        return None
    return str(resumption.path / EXPORT)


def load(resumption: Resumption, trainer: Trainer, config: Config, rows: DataFacts | None) -> None:
    """Weights, optimizer, schedule and random states, as far as they are asked for. A collective.

    Raises `CheckpointError`: it is of another model or data."""
    parts, manifest = parts_of(resumption, config), resumption.found.manifest
    try:
        _check_model(manifest, trainer)
        if parts.extra and resumption.step:
            check_data(manifest.data, None if rows is None else rows.at(resumption.step))
        if parts.weights == "state":
            load_model_state(trainer.model, resumption.path)
        check_base("policy", manifest, trainer.model, config, trainer.group)
        if parts.optimizer:
            load_state(resumption.path, optimizer_state(trainer), OPTIMIZER, trainer.model)
            load_loss_scales(trainer, manifest.loss_scales)
        if parts.extra and resumption.step:
            _restore_reference(resumption, trainer)
        if parts.weights == "state" or resumption.own:
            _restore_critic(resumption, trainer, config, parts.optimizer)
        _restore_average(resumption, trainer, saved=parts.extra)
    except CheckpointError as error:
        raise type(error)(f"checkpoint {resumption.path} cannot be resumed: {error}") from error
    if parts.extra:
        if manifest.kl_coefficient is not None and trainer.adapts_kl:
            trainer.kl_coefficient = manifest.kl_coefficient
        takes = config.train.ckpt.load_schedule
        _restore_schedule("train", manifest.schedule, trainer, takes)
        if trainer.critic is not None:
            _restore_schedule("critic", manifest.critic_schedule, trainer.critic, takes)
        group = trainer.group
        restore_rng(
            resumption.path, rank=group.rank, saved_world=manifest.world, seed=config.effective_seed,
            step=manifest.step, device=group.device,
        )  # fmt: skip
    if trainer.group.leads:
        _say(resumption, parts, trainer)


def _restore_reference(resumption: Resumption, trainer: Trainer) -> None:
    """The reference model as it was reset last. Before the first reset it is the one that was loaded."""
    files = [path for path in state_files(resumption.path, REFERENCE) if path.exists()]
    within = isinstance(trainer.reference, EarlierPolicy)
    if not trainer.reset_interval and not (within and files):
        return
    if not files and resumption.step <= trainer.reset_interval:
        return
    if not files:
        raise CheckpointError(
            f"it holds no reference model, and train.train_policy.reference_reset_interval = "
            f"{trainer.reset_interval} has reset it before step {resumption.step}: leave the key out, or begin the "
            f"run anew from its export"
        )
    if isinstance(trainer.reference, PolicyModel):
        load_model_state(trainer.reference, resumption.path, REFERENCE)
    else:
        load_state(resumption.path, reference_state(trainer), REFERENCE, trainer.model)


def _restore_critic(resumption: Resumption, trainer: Trainer, config: Config, optimizer: bool) -> None:
    """The critic, where this job and the checkpoint have one; else it begins anew, and that is said."""
    critic = trainer.critic
    if critic is None:
        return
    weights, moments = (state_files(resumption.path, kind) for kind in (CRITIC, CRITIC_OPTIMIZER))
    if not weights:
        if trainer.group.leads:
            log.warning("checkpoint %s holds no critic: it begins anew", resumption.path)
        return
    load_model_state(critic.model, resumption.path, CRITIC)
    check_base("critic", resumption.found.manifest, critic.model, config, critic.group)
    if optimizer and moments:
        load_state(resumption.path, optimizer_state(critic, CRITIC_OPTIMIZER), CRITIC_OPTIMIZER, critic.model)


def _restore_average(resumption: Resumption, trainer: Trainer, *, saved: bool) -> None:
    """The moving average that was saved; else it begins with the weights that were loaded."""
    files = [path for path in state_files(resumption.path, EMA) if saved]
    if trainer.ema is None:
        if files and trainer.group.leads:
            log.warning("the moving average in %s is left out: train.ema_decay is not written", resumption.path)
        return
    if files:
        load_state(resumption.path, average_state(trainer), EMA, trainer.model)
        return
    trainer.ema.reset()
    if trainer.group.leads:
        log.warning("no moving average is taken from %s: train.ema_decay begins with its weights", resumption.path)


def _check_model(manifest: Manifest, trainer: Trainer) -> None:
    here = type(trainer.model.lm).__name__.removeprefix("FSDP")
    if manifest.architecture != here:
        raise CheckpointError(
            f"it is of a {manifest.architecture}, policy.model_name_or_path is a {here}: name the model that it was "
            f"trained from"
        )


def check_base(
    role: str, manifest: Manifest, model: Backbone, config: Config, group: RankGroup | None = None
) -> None:
    """Adapters go on next to the weights that they were trained with. A collective of the group.

    Raises `CheckpointError`: `model` has others."""
    if base_digest(model, group) == manifest.bases.get(role):
        return
    name, keys = config.policy.model_name_or_path, "train"
    if role == "critic":
        name, keys = config.critic.model_name_or_path or name, role
    raise CheckpointError(
        f"its adapters are of another base than {role}.model_name_or_path = {name!r}: name the model that they were "
        f'trained next to, in the type that it had ({keys}.param_dtype = "{model.lm.dtype}" here)'
    )


def _restore_schedule(section: str, saved: ScheduleFacts | None, trained: TrainedModel, takes: bool) -> None:
    """takes: the saved one is used, else the configured one; what differs is shown."""
    if saved is None:
        return
    configured = schedule_facts(trained.schedule, *trained.optimizer.peak_lrs)
    for difference in schedule_differences(saved, configured, section):
        if trained.group.leads:
            used = "checkpoint's" if takes else "configured one"
            log.warning("%s; the %s is used (train.ckpt.load_schedule = %s)", difference, used, str(takes).lower())
    if takes:
        trained.schedule = schedule_of(saved)
        trained.optimizer.set_peak_lrs((saved.peak_lr, *saved.further_lrs))


def _say(resumption: Resumption, parts: CheckpointParts, trainer: Trainer) -> None:
    manifest, group = resumption.found.manifest, trainer.group
    log.info("resumed from %s (%d committed steps)", resumption.path, manifest.step)
    left_out = [
        words
        for held, words in (
            (parts.weights == "state", "weights are the export's, in its type"),
            (parts.optimizer, "the optimizer begins anew"),
            (parts.extra, "schedule and random states begin anew"),
            (resumption.step == manifest.step, "steps and data are counted from 0"),
        )
        if not held
    ]
    if left_out:
        log.warning("of checkpoint %s not everything was taken: %s", resumption.path, "; ".join(left_out))
    if manifest.world != group.world:
        log.info("it was saved on %d ranks and is resumed on %d", manifest.world, group.world)
