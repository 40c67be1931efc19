"""One rank of a policy replica from registration to leave."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import numpy as np
import torch
from transformers.utils import cached_file

from controller.client import Refused
from policy_worker.checkpoints.find import Resumption, before_step, choose, newest_snapshot, snapshot_of
from policy_worker.checkpoints.load import weights_directory
from policy_worker.checkpoints.save import Checkpointer
from policy_worker.errors import (
    CheckpointError,
    JobFinishedError,
    LeftBehindError,
    NoCheckpointError,
    SettingsError,
    UnlikeError,
)
from policy_worker.model.load import load_critic, load_model, load_reference, load_teacher
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import Environment, RankEnvironment, ShutdownRequest
from policy_worker.replicas.base import Alone, Registration, Replicas
from policy_worker.replicas.rendezvous import meet
from policy_worker.replicas.round import Peers
from policy_worker.session import Caller, LeaveRequestedError, Session
from policy_worker.trained.critic import Critic
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.recording import BatchRecorder
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from policy_worker.training.loop import Algorithm, Loop
from policy_worker.training.sft import HeldOut, Sft
from policy_worker.training.teachers import Teachers, tokenizer_of
from policy_worker.training.time_share import TimeShare
from policy_worker.weights.publisher import publish_once
from schema.config import Config, check_model_warnings
from schema.config.fetched import fetched_by, refusal
from schema.config.layout import reference_is_within
from schema.config.rules.profiler import absent_ranks
from schema.config.trained import settings_digest
from schema.wire import messages as m
from schema.wire import payload_file
from schema.wire.batch_file import Facts, folder_of

log = logging.getLogger(__name__)


def run_rank(environment: Environment, ranks: RankEnvironment, shutdown: ShutdownRequest) -> None:
    """Train until the job is finished or this replica is asked to leave.

    Raises:
        PolicyError and its kinds, ControllerError, WeightError, OSError: training cannot go on. The session is
            left in order (without waiting for a controller that does not answer).
    """
    group = RankGroup(ranks, meet(ranks, environment, shutdown) if ranks.meeting else None)
    session = Session(environment, shutdown, group.world) if group.leads else None
    reason = "crashed"
    try:
        reason = _train(environment, ranks, group, session, shutdown)
        log.info("leaving: %s", reason)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        shutdown.request(reason)  # whatever still tries to reach the controller gives up
        if session is not None:
            session.leave(reason)
        group.close()


def _train(
    environment: Environment,
    ranks: RankEnvironment,
    group: RankGroup,
    session: Session | None,
    shutdown: ShutdownRequest,
) -> str:
    reply, resumption = _register(group, session)
    config = Config.model_validate(reply.config)
    several = config.policy.parallelism.n_init_replicas > 1
    if config.validation.only and session is not None:
        _refuse_models(config, group)
        return publish_once(config, session)
    group.set_control_timeout(config.controller.controller_lost_timeout)
    shutdown.grace = config.launcher.shutdown_timeout
    time_share = TimeShare(group, session, shutdown) if config.shares_time else None
    if time_share is not None:
        time_share.take()
    trainer = make_trainer(config, group, reply.total_steps, resumption)
    registration = Registration(config, reply, trainer, session, shutdown)
    checkpointer = Checkpointer(registration, leads=not several)
    step = checkpointer.restore(resumption) if resumption is not None else 0
    replicas: Replicas | None = None if several else Alone()
    while replicas is None:
        peers = Peers(registration, environment, ranks)
        try:
            step = _enter(peers, registration, checkpointer, step)
            replicas = peers
        except LeftBehindError as error:
            log.warning("%s", error)
            reply, resumption = _register(group, session)
            registration = registration._replace(reply=reply)
            checkpointer = Checkpointer(registration, leads=False)
            step = checkpointer.restore(resumption) if resumption is not None else 0
    if time_share is not None:
        time_share.tensors = trainer.resident
    loop = Loop(registration, checkpointer, time_share, replicas)
    caller = session or Caller(environment, shutdown, config.controller.controller_lost_timeout)
    try:
        return loop.run(_algorithm(registration, caller, replicas, resumption), step)
    finally:
        replicas.close()
        checkpointer.close(shutdown.grace)
        loop.publisher.close()


def _enter(peers: Peers, registration: Registration, checkpointer: Checkpointer, step: int) -> int:
    """Take part in the training of other policy replicas. Returns how many steps the weights contain."""
    config, reply, trainer, *_ = registration
    run_dir = Path(reply.run_dir)

    def heal(wanted: int) -> None:
        try:
            resumption_point = before_step(trainer.group, config, run_dir, wanted, reply.timeline, "")
            if resumption_point is None or resumption_point.step != wanted:
                raise CheckpointError(f"it is not in {run_dir}, which all machines must share")
            checkpointer.restore(resumption_point)
        except CheckpointError as error:
            raise UnlikeError(
                f"the checkpoint of step {wanted} that the other policy replicas have saved cannot be loaded: {error}"
            ) from error

    return peers.enter(step, heal)


def make_trainer(config: Config, group: RankGroup, total_steps: int, resumption: Resumption | None) -> Trainer:
    """Random states, model, optimizer and schedule as training begins with them. A collective.

    resumption: what will be restored into it.

    Raises `SettingsError`: the configuration cannot work on these ranks, or with this model; `CheckpointError`: the
    checkpoint does not hold what is asked for."""
    _refuse_models(config, group)
    _arrange(config, group)
    _seed(config)
    weights, lead = weights_directory(resumption, config), group.lead
    restored = resumption is not None and weights is None
    model = load_model(config, weights, restored=restored, lead=lead)
    apart = config.has_reference and not reference_is_within(config)
    reference = load_reference(config, model, lead=lead) if apart else None
    teachers = {each.name: load_teacher(config, each, model, lead=lead) for each in config.local_teachers}
    critic = None
    if config.has_critic:
        of_critic = Schedule.of_config(config.critic, total_steps)
        critic = Critic(load_critic(config, model, lead=lead), config, group, of_critic)
    schedule = Schedule.of_config(config.train, total_steps)
    return Trainer(model, config, group, schedule, reference, critic, teachers)


def _algorithm(
    registration: Registration, caller: Caller, replicas: Replicas, resumption: Resumption | None = None
) -> Algorithm:
    config, reply, trainer, *_ = registration
    if reply.mode == "sft":
        data = Path(reply.data_file)
        held_out = None
        if config.validation.enable:
            held_out = HeldOut(config, trainer, data.with_name("validation.safetensors"), reply.total_steps)
        return Sft(config, trainer, data, held_out, replicas)
    store = config.controller.payload_store
    payloads = payload_file.directory(store, reply.job_id) if store else None
    source = BatchSource(trainer.group, caller.call, reply.policy_epoch, config.staleness_bound, payloads)
    if isinstance(caller, Session):
        source.seen = caller.history.took
        if config.profiler.record_batches:
            recorder = _recorder(config, reply, trainer.group.world, resumption, payloads)
            source.keep = lambda table, frames: recorder.keep(table, frames) if replicas.leads else None
            caller.troubles.append(recorder.trouble)
    algorithm = Grpo(config, trainer, source, replicas)
    _meet_teachers(config, algorithm.teachers, caller)
    source.prefetch(caller.client().send, algorithm.rows_needed)
    return algorithm


def _meet_teachers(config: Config, teachers: Teachers, caller: Caller) -> None:
    """Look at the servers of teachers before anything is generated.

    Raises `TeacherError`: one is not what is meant; `LeaveRequestedError`: a request to leave came while one did not
    answer."""
    teachers.shutdown = caller.shutdown
    if isinstance(caller, Session):
        session = caller

        def say(status: str) -> None:
            session.status = status or "training"

        teachers.say = say
        session.troubles.append(lambda: teachers.trouble)
    if any(teacher.url for teacher in config.teacher) and not teachers.meet(tokenizer_of(config)):
        raise LeaveRequestedError(caller.shutdown.reason or "asked to leave on another rank")


def _recorder(
    config: Config, reply: m.RegisterReply, ranks: int, resumption: Resumption | None, payloads: Path | None
) -> BatchRecorder:
    facts = Facts(
        job_id=reply.job_id,
        total_steps=reply.total_steps,
        ranks=ranks,
        settings=settings_digest(config),
        began_from="" if resumption is None else str(resumption.path),
    )
    return BatchRecorder(folder_of(Path(reply.run_dir)), config.profiler.record_batches, facts, payloads)


def _register(group: RankGroup, session: Session | None) -> tuple[m.RegisterReply, Resumption | None]:
    """Register, and again with the step of a checkpoint when one is to be resumed: only then is it known."""
    reply = _tell(group, session, None)
    config = Config.model_validate(reply.config)
    if reply.members:  # whose weights it needs when it joins, not those of a checkpoint that may go
        return reply, None
    resumption = choose(group, config, Path(reply.run_dir))
    if session is not None:
        session.history.snapshot = lambda: newest_snapshot(Path(reply.run_dir), resumption)
    several = config.policy.parallelism.n_init_replicas > 1  # the first one has to say what it begins with
    if resumption is None and reply.committed_steps == 0 and not several:
        return reply, None
    if resumption is None and reply.committed_steps and not config.train.ckpt.enable_checkpoint:
        raise NoCheckpointError(
            f"{reply.committed_steps} steps are committed and no checkpoint holds their weights: the run cannot go "
            f"on; write train.ckpt.enable_checkpoint = true before the next one"
        )
    # A run that keeps checkpoints and was killed before its first one begins again.
    return _tell(group, session, resumption.step if resumption else 0, resumption), resumption


def _tell(
    group: RankGroup, session: Session | None, step: int | None, resumption: Resumption | None = None
) -> m.RegisterReply:
    """One registration by rank 0, its answer for all. step: committed steps in the weights, if known."""

    def register() -> object:
        assert session is not None
        snapshot = None if resumption is None or not step else snapshot_of(resumption.found)
        try:
            return session.register(step, snapshot).model_dump(mode="json")
        except Refused as error:
            if error.code == m.ErrorCode.CONFLICT:
                raise SettingsError(str(error)) from error
            if error.code == m.ErrorCode.JOB_FINISHED:
                raise JobFinishedError(error.detail) from error
            raise

    return m.RegisterReply.model_validate(group.lead(register))


def _arrange(config: Config, group: RankGroup) -> None:
    group.arrange(ParallelDims.of_config(config.policy.parallelism, group.world))
    for problem in absent_ranks(config, group.world):
        raise SettingsError(problem.render())


def _refuse_models(config: Config, group: RankGroup) -> None:
    """Apply the rules that need files of models again: `validate` may have run where they were not. Raises
    `SettingsError`."""
    find = fetched_by(cached_file)
    if faults := refusal(config, find):
        raise SettingsError(faults)
    for warning in check_model_warnings(config, find) if group.leads else ():
        log.warning("%s", warning.render())


def _seed(config: Config) -> None:
    seed = config.effective_seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if config.train.deterministic:
        # cuBLAS is not deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
