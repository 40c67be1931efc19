"""Probes of checkpoints, exports and the exchange of gradients, on a real controller where one takes part."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from policy_worker.checkpoints.find import Resumption, _resumption, candidates
from policy_worker.checkpoints.layout import look
from policy_worker.checkpoints.load import load, parts_of
from policy_worker.checkpoints.save import Checkpointer
from policy_worker.process import Environment, RankEnvironment, ShutdownRequest
from policy_worker.replicas.base import Registration
from policy_worker.replicas.exchange import Exchange, Round
from policy_worker.replicas.round import Peers
from policy_worker.session import Session
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.training.loop import Loop
from schema.config import Config
from schema.wire import messages as m
from schema.wire.messages.members import MemberReply
from tests.liveness.probe import UNSET, Made, Place, With, changed, grpo, sft, under, watch
from tests.liveness.trained import registered, trainer_of
from tests.policy_worker.checkpoint_material import make_checkpoint, save_state
from tests.policy_worker.material import export_whole
from tests.support.controller import TOKENS

CKPT = "train.ckpt"


def gradients_in_the_store(config: Config, place: Place) -> list[str]:
    """What a policy replica writes into the weight store for others to fetch, of whom none comes."""
    with registered(config, place) as (served, session):
        environment = Environment(served.url, TOKENS["policy"], "policy-0", None, None)
        trainer, shutdown = trainer_of(config, place), ShutdownRequest()
        registration = Registration(config, session.reply, trainer, session, shutdown)
        peers = Peers(registration, environment, RankEnvironment())
        order = {"epoch": 1, "parts": [0], "members": [session.reply.replica_id, "other"], "counts": [1, 1]}
        peers._order = MemberReply(action="exchange", step=0, leads=True, **order)
        found: list[str] = []

        def exchange(transport: Exchange, round_: Round) -> None:
            try:
                transport.notes(round_, {0: b"a note"})
            finally:
                written = Path(session.reply.weight_store).glob("*-gradients.*")
                found.extend(path.name.partition(".")[2] for path in written)

        assert peers._attempt(exchange) is None
        return found


def files_of_a_checkpoint(config: Config, place: Place) -> tuple[bool, list[str]]:
    """Whether a checkpoint is still to be waited for when training goes on, and what is in its directory then."""
    with registered(config, place) as (_, session):
        checkpointer = _checkpointer(config, place, session)
        checkpointer.save(0)
        busy = checkpointer._background.busy
        checkpointer.finish()
        root = Path(session.reply.run_dir) / "checkpoints"
        return busy, sorted(str(path.relative_to(root)) for path in root.rglob("*.safetensors"))


def _checkpointer(config: Config, place: Place, session: Session | None = None) -> Checkpointer:
    reply = _reply(config, place) if session is None else session.reply
    return Checkpointer(Registration(config, reply, trainer_of(config, place), session, ShutdownRequest()))


def steps_that_are_saved(config: Config, place: Place) -> list[int]:
    """Return after which of forty steps, five to a pass over the data, a checkpoint is due."""
    checkpointer = _checkpointer(config, place)
    return [step for step in range(1, 41) if checkpointer.due(step, last=False, data_passes=step // 5)]


def checkpoints_that_stay(config: Config, place: Place) -> list[str]:
    """Return which of four old checkpoints remain when another one is complete."""
    checkpointer = _checkpointer(config, place)
    paths = [make_checkpoint(checkpointer._directory, step) for step in range(1, 6)]
    checkpointer._housekeeper.resumed_from(paths[3])
    checkpointer._housekeeper.tidy(look(paths[4]), {})
    return sorted(path.name for path in checkpointer._directory.iterdir())


def what_is_resumed(config: Config, place: Place) -> str:
    """The checkpoint from which a fresh run goes on."""
    run = Path(config.train.output_dir) / "fresh"
    run.mkdir(parents=True, exist_ok=True)
    found = candidates(config, run).found
    return str(found[0].path) if found else ""


def what_is_read(config: Config, place: Place) -> tuple[object, int]:
    """What is taken from another run's checkpoint of three steps, and how many steps it counts for."""
    resumption = _resumption(look(_older_run(place)), config, own=False)
    return parts_of(resumption, config), resumption.step


def rates_after_resume(config: Config, place: Place) -> list[float]:
    """Learning rates of forty steps; the checkpoint was to decay, the configuration is not."""
    trainer = trainer_of(config, place)
    trainer.schedule = Schedule(40, decay_ratio=0.5, decay_type="linear")
    root = place.directory()
    save_state(trainer, root)
    trainer.schedule = Schedule(40)
    load(Resumption(look(root / "step-00000000"), 0, own=True), trainer, config, None)
    return [trainer.lr(step) for step in range(40)]


def _reply(config: Config, place: Place) -> m.RegisterReply:
    return m.RegisterReply(
        replica_id="policy-0.1", incarnation=1, job_id="job", config=config.to_dict(), job_seed=1,
        mode="grpo" if config.is_grpo else "sft", timeline=0, committed_steps=0, total_steps=10, policy_epoch=1,
        heartbeat_interval=1.0, heartbeat_timeout=5.0, run_dir=str(place.directory()),
        weight_store=str(place.directory()), data_file="", publication=None,
    )  # fmt: skip


def _older_run(place: Place) -> Path:
    root = place.root / "outputs" / "older" / "checkpoints"
    return root / "step-00000003" if root.exists() else make_checkpoint(root, 3, latest=True)


def patience_of_a_trainer(config: Config, place: Place) -> tuple[float, float]:
    """How long it looks for a lost controller, and how long it may take to leave."""
    with registered(config, place) as (_, session):
        return session.patience, session.shutdown.grace


brief = under("controller", heartbeat_interval=0.2, heartbeat_timeout=0.5)
two = changed(grpo, {f"{CKPT}.enable_checkpoint": True, "policy.parallelism.n_init_replicas": 2} | brief)
watch(gradients_in_the_store, two, under("policy", exchange=("collective", "store")))
saving = changed(grpo, under(CKPT, enable_checkpoint=True, save_mode="sync"))
contents = (["model", "optimizer", "extra"], ["model", "extra"])
files = under(CKPT, export_safetensors=(True, False), save_contents=contents, save_mode=("sync", "async"))
watch(files_of_a_checkpoint, saving, files)
due = under(CKPT, enable_checkpoint=(True, False), save_freq=(20, 7), save_freq_in_epoch=(0, 3))
watch(steps_that_are_saved, changed(saving, under("train", epoch=4)), due)
watch(checkpoints_that_stay, saving, under(CKPT, max_keep=(3, -1), delete_after_load=(False, True)))
weights_alone = With(["model"], {f"{CKPT}.load_schedule": False})
watch(what_is_read, saving, under(CKPT, load_contents=(UNSET, weights_alone)))
watch(rates_after_resume, saving, under(CKPT, load_schedule=(True, False)))
for folder, resumed in (
    (Made(lambda place: str(_older_run(place).parents[2])), True),
    (Made(lambda place: str(place.root / "elsewhere")), Made(lambda place: str(_older_run(place)))),
):
    watch(what_is_resumed, changed(grpo, under("train", output_dir=folder)), under("train", resume=(False, resumed)))
patience = {"controller.controller_lost_timeout": (60.0, 90.0), "launcher.shutdown_timeout": (10.0, 20.0)}
watch(patience_of_a_trainer, grpo, patience)

# ---- exports --------------------------------------------------------------------------------------------------


def exported_type(config: Config, place: Place) -> set[str]:
    """The type of the exported tensors."""
    target = place.directory() / "final"
    export_whole(trainer_of(config, place), config, target)
    with safe_open(target / "model.safetensors", framework="pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def files_at_the_end(config: Config, place: Place) -> bool:
    """Whether a finished run leaves a model."""
    reply = _reply(config, place)
    registration = Registration(config, reply, trainer_of(config, place), None, ShutdownRequest())
    loop = Loop(registration, Checkpointer(registration))
    loop._leads = True
    loop._finish(0)
    return (Path(reply.run_dir) / "final" / "config.json").exists()


def averaged_weight(config: Config, place: Place) -> list[float]:
    """A weight of the averaged model that is exported after a step; nothing where none is kept."""
    trainer, target = trainer_of(config, place), place.directory() / "final_ema"
    if trainer.ema is None:
        return []
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.step(0)
    export_whole(trainer, config, target, average=True)
    with safe_open(target / "model.safetensors", framework="pt") as file:
        return [file.get_tensor("model.norm.weight").flatten()[0].item()]


exact = changed(sft, under("train", transfer_dtype="float32"))
watch(averaged_weight, exact, under("train", ema_decay=(0.5, 0.9)))
watch(averaged_weight, sft, under("train", ema_decay=(UNSET, 0.9)))
watch(exported_type, sft, under("train", transfer_dtype=("float32", "bfloat16")))
watch(files_at_the_end, sft, under("launcher", export_final=(True, False)))
