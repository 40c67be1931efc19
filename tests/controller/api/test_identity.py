"""A rollout token speaks for the replica that registered with its secret, and for no other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from controller.client import AsyncClient, Client, Unauthorized
from controller.client import calls as api
from controller.state.replicas import Registry
from rollout_worker import session
from rollout_worker.lease_table import LeaseTable
from rollout_worker.session import NameTakenError, Session, SupersededError
from schema.wire import messages as m
from schema.wire.messages import ErrorCode
from schema.wire.messages.recovery import DeclareLeases
from tests.controller.conftest import Stage, refused
from tests.controller.drivers import Rollout, make_frame, make_header, request_id
from tests.support.controller import TOKENS, make_config
from tests.support.served import ServedController, served_controller
from tests.support.waiting import PATIENCE, until

SILENCE = 15.0
SECRET = secrets.token_urlsafe(32)
ANOTHER = "another-secret-0123456789"


def serve(stage: Stage) -> ServedController:
    return stage.serve(make_config(controller={"heartbeat_timeout": SILENCE}))


def rollout(stage: Stage, served: ServedController, secret: str = "") -> Rollout:
    client = Client(served.url, TOKENS["rollout"], secret=secret)
    return Rollout(stage.stack.enter_context(client))


def live(stage: Stage, served: ServedController) -> Rollout:
    """A replica with a secret, with the newest weights."""
    trainer = stage.trainer(served)
    trainer.register()
    trainer.publish(0)
    holder = rollout(stage, served, SECRET)
    holder.register()
    return holder


def held(stage: Stage) -> tuple[ServedController, Rollout]:
    """A controller, and a replica of it with a secret."""
    served = serve(stage)
    return served, live(stage, served)


def states(stage: Stage, served: ServedController) -> dict[str, str]:
    return {info.replica_id: info.state for info in stage.client(served).send(api.replicas())}


@pytest.mark.parametrize("secret", ["", ANOTHER])
def test_nobody_acts_for_a_replica_without_its_secret(stage: Stage, secret: str) -> None:
    served, holder = held(stage)
    group = holder.lease().groups[0]
    thief = rollout(stage, served, secret)
    thief.reply, thief.version, thief.publication_id = holder.reply, holder.version, holder.publication_id
    mine, number, send = holder.reply.replica_id, holder.reply.incarnation, thief.client.send
    frame = make_frame(make_header(0, 0))
    report = m.UpdateReport(replica_id=mine, incarnation=number, status="unreadable", detail="no")
    calls: dict[str, Callable[[], Any]] = {
        "heartbeat": thief.beat,
        "lease": thief.lease,
        "declare": lambda: send(api.declare_leases(mine, DeclareLeases(incarnation=number, leases=[]))),
        "release": lambda: send(api.release(group.lease_id)),
        "push": lambda: thief.push(group, make_header(0, 0), frame),
        "push many": lambda: thief.finish([group]),
        "report": lambda: send(api.report_update(holder.publication_id, report)),
        "poll": lambda: send(api.latest_publication(0, 0.0, mine, number)),
        "drain": lambda: send(api.drain(mine)),
        "leave": thief.leave,
    }
    for name, call in calls.items():
        error = refused(call)
        assert (error.status, error.code) == (403, ErrorCode.NOT_YOURS), name
    taken = refused(thief.register)
    assert (taken.status, taken.code) == (409, ErrorCode.NAME_TAKEN)
    assert 0 < taken.retry_after <= SILENCE
    assert "'rollout-0' is held by replica rollout-0.1" in taken.detail
    assert SECRET not in f"{taken}"
    assert states(stage, served)[mine] == "live"
    assert holder.beat().lost_leases == []
    assert all(result.accepted for result in holder.finish([group]).results)


def test_who_knows_the_secret_takes_the_place_at_once(stage: Stage) -> None:
    served, old = held(stage)
    new = rollout(stage, served, SECRET)
    assert new.register().incarnation == 2
    assert refused(old.beat).code is ErrorCode.STALE_INCARNATION
    assert new.lease().groups


def test_the_user_drains_without_it_and_the_name_stays_held(stage: Stage) -> None:
    served, holder = held(stage)
    stage.client(served).send(api.drain(holder.reply.replica_id))
    assert states(stage, served)[holder.reply.replica_id] == "draining"
    assert refused(rollout(stage, served, ANOTHER).register).code is ErrorCode.NAME_TAKEN


@pytest.mark.parametrize("end", ["silent", "left", "exited"])
def test_a_name_that_nobody_holds_is_anybodys(stage: Stage, end: str) -> None:
    served, holder = held(stage)
    if end == "silent":
        served.skip(SILENCE + 1)
    elif end == "left":
        holder.leave()
    else:
        stage.client(served).send(api.replica_exited("rollout-0", "killed"))
    other = rollout(stage, served, ANOTHER)
    assert other.register().incarnation == 2
    assert refused(holder.beat).code is ErrorCode.STALE_INCARNATION
    assert refused(holder.register).code is ErrorCode.NAME_TAKEN


def test_another_controller_knows_the_hash_alone(stage: Stage) -> None:
    config = make_config(controller={"heartbeat_timeout": SILENCE})
    with served_controller(run_dir := stage.run_dir(config), stage.valkey.url) as before:
        live(stage, before)
    with stage.valkey.client() as redis:
        stored = b"".join(redis.dump(key) or b"" for key in redis.keys("*"))
    assert SECRET.encode() not in stored
    with served_controller(run_dir, stage.valkey.url) as after:
        assert refused(rollout(stage, after, ANOTHER).register).code is ErrorCode.NAME_TAKEN
        assert rollout(stage, after, SECRET).register().incarnation == 2


def test_a_record_of_before_is_open_to_all() -> None:
    request = m.RegisterRequest(request_id=request_id(), role="rollout", name="r")
    registry = Registry(SILENCE)
    record = registry.register(request, 0.0).replica.to_record()
    del record["secret_hash"]
    again = request.model_copy(update={"request_id": request_id()})
    assert Registry(SILENCE, [record]).register(again, 1.0, SECRET).replica.incarnation == 2


def test_a_repeated_registration_needs_the_secret_too() -> None:
    request = m.RegisterRequest(request_id=request_id(), role="rollout", name="r")
    registry = Registry(SILENCE)
    registry.register(request, 0.0, SECRET)
    assert registry.register(request, 1.0, SECRET).repeated
    registry.expire(2 * SILENCE)
    with pytest.raises(Exception, match="has ended") as caught:
        registry.register(request, 2 * SILENCE, ANOTHER)
    assert getattr(caught.value, "code", None) is ErrorCode.STALE_INCARNATION


@pytest.mark.parametrize("secret", ["short", "a" * 64, "two words and some more letters"])
def test_a_secret_that_can_be_guessed_is_refused_and_not_shown(stage: Stage, secret: str) -> None:
    error = refused(rollout(stage, serve(stage), secret).register)
    assert error.code is ErrorCode.BAD_REQUEST
    assert secret not in error.detail


# ---- the replica's side ---------------------------------------------------------------------------------------


def sessions(served: ServedController, secret: str, work: Callable[[Session], Any]) -> Any:
    async def run() -> Any:
        async with AsyncClient(served.url, TOKENS["rollout"], secret=secret) as client:
            return await asyncio.wait_for(work(Session(client, "rollout-0", LeaseTable())), PATIENCE)

    return asyncio.run(run())


def test_a_replica_waits_for_its_name_as_long_as_a_silent_holder_keeps_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(stage)
    live(stage, served)

    async def once_silent(own: Session) -> m.RegisterReply:
        registering = asyncio.create_task(own.register())
        await asyncio.to_thread(until, lambda: "waiting for the name" in caplog.text, "the first refusal")
        await asyncio.to_thread(served.skip, SILENCE + 1)
        return await registering

    assert sessions(served, ANOTHER, once_silent).incarnation == 2
    monkeypatch.setattr(session, "NAME_MARGIN", -SILENCE)
    with pytest.raises(NameTakenError, match="COSMOS_REPLICA_NAME"):
        sessions(served, "a-third-secret-0123456789", lambda own: own.register())


def test_a_replica_whose_id_is_anothers_ends(stage: Stage) -> None:
    """As when a store lost history and two registrations have been given one id."""
    served, holder = held(stage)

    async def beat(own: Session) -> None:
        own.reply = holder.reply
        await own.call(lambda it: api.heartbeat(it.replica_id, m.HeartbeatRequest(incarnation=it.incarnation)))

    with pytest.raises(SupersededError):
        sessions(served, ANOTHER, beat)


def test_the_policy_token_reaches_no_rollout_replica(stage: Stage) -> None:
    served = serve(stage)
    mine = live(stage, served).reply.replica_id
    with pytest.raises(Unauthorized, match="token of policy"):
        stage.client(served, "policy").send(api.drain(mine))
