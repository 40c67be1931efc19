"""Replicas come, beat and go, over HTTP."""

from __future__ import annotations

import time

import pytest

from controller.client import calls as api
from schema.wire import messages as m
from schema.wire.messages import ErrorCode, LeaseStatus, Phase
from tests.controller.conftest import Stage, refused
from tests.controller.drivers import Trainer, make_header, train_step
from tests.support.controller import make_config
from tests.support.served import ServedController, served_controller


def leased(served: ServedController) -> int:
    return served.call(lambda: served.job.progress.status().states["leased"])


def test_registration_tells_a_replica_all_it_needs(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    reply = rollout.reply
    assert (reply.replica_id, reply.incarnation, reply.mode) == ("rollout-0.1", 1, "grpo")
    assert reply.publication is not None
    assert reply.config == served.job.config.to_dict()
    assert reply.run_dir == str(served.job.run_dir)
    assert reply.weight_store == str(served.job.run_dir / "weights")
    assert reply.data_file == str(served.job.run_dir / "data" / "train.safetensors")
    assert trainer.reply.policy_epoch > 0
    assert trainer.reply.publication is None


def test_an_older_incarnation_is_refused_everywhere(stage: Stage) -> None:
    served, _, old = stage.at_work()
    group = old.lease().groups[0]
    new = stage.joined(served)
    assert new.reply.incarnation == 2
    for call in (old.lease, old.beat, old.leave, lambda: old.finish([group])):
        assert refused(call).code is ErrorCode.STALE_INCARNATION
    assert leased(served) == 0


def test_a_replica_that_registers_again_keeps_the_leases_it_declares(stage: Stage) -> None:
    served, _, rollout = stage.at_work()
    kept, forgotten = rollout.lease(2).groups
    rollout.register(held_leases=[{"group_id": kept.group_id, "lease_id": kept.lease_id}])
    assert leased(served) == 1
    assert all(result.accepted for result in rollout.finish([kept]).results)
    late = rollout.push(forgotten, make_header(0, 0))
    assert late.code is ErrorCode.LEASE_LOST


def test_beats_keep_leases_and_forgotten_ones_go_to_others(stage: Stage) -> None:
    served, _, rollout = stage.at_work(make_config(controller={"lease_timeout": 1000.0, "heartbeat_timeout": 9000.0}))
    kept, forgotten = rollout.lease(2).groups
    rollout.beat({kept.lease_id})
    assert leased(served) == 2
    reply = rollout.beat({kept.lease_id, "invented"})
    assert reply.lost_leases == ["invented"]
    assert leased(served) == 1
    assert rollout.beat({forgotten.lease_id, kept.lease_id}).lost_leases == [forgotten.lease_id]
    served.skip(600.0)
    rollout.beat({kept.lease_id})
    served.skip(600.0)
    assert leased(served) == 1
    served.skip(600.0)
    assert leased(served) == 0


def test_nobody_is_late_because_the_controller_was_away(stage: Stage) -> None:
    timeouts = {"lease_timeout": 1000.0, "heartbeat_timeout": 1000.0}
    config = make_config(controller=timeouts, validation={"enable": True})
    with served_controller(run_dir := stage.run_dir(config), stage.valkey.url) as before:
        _, rollout = stage.ready(before)
        second = stage.joined(before, "rollout-1")
        validating, training = rollout.lease().groups[0], second.lease().groups[0]
        assert (validating.kind, training.kind) == ("validation", "train")
        before.skip(0.0)
    with served_controller(run_dir, stage.valkey.url, skipped=36_000.0) as after:
        after.skip(600.0)
        first, other = stage.rollout(after), stage.rollout(after, "rollout-1")
        first.reply, other.reply = rollout.reply, second.reply
        assert first.beat({validating.lease_id}).lost_leases == []
        assert other.beat({training.lease_id}).lost_leases == []
        assert set(stage.states(after).values()) == {"live"}


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_is_set_decides_about_nobody(stage: Stage, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Neither while a controller lives nor between two of them: who is silent is lost, all others are there."""
    real, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    timeouts = {"lease_timeout": 100.0, "heartbeat_timeout": 100.0, "start_timeout": 1000.0}
    config = make_config(controller=timeouts)

    with served_controller(run_dir := stage.run_dir(config), stage.valkey.url) as before:
        _, rollout = stage.ready(before)
        rollout.lease()
        ahead[0] = jump
        before.skip(60.0)
        assert (stage.states(before), leased(before)) == ({"policy-0": "live", "rollout-0": "live"}, 1)
        rollout.beat()
        before.skip(60.0)
        assert (stage.states(before), leased(before)) == ({"policy-0": "lost", "rollout-0": "live"}, 1)
        before.run(before.job.store.renew_lock())
    ahead[0] = 3 * jump
    with served_controller(run_dir, stage.valkey.url) as after:
        after.skip(20.0)
        assert (stage.states(after)["rollout-0"], leased(after)) == ("live", 1)
        after.skip(30.0)
        assert (stage.states(after)["rollout-0"], leased(after)) == ("live", 0), "it had 40 s left"
        after.skip(60.0)
        assert stage.states(after)["rollout-0"] == "lost"


def test_a_silent_replica_is_lost_and_comes_back_with_its_next_beat(stage: Stage) -> None:
    served, _, rollout = stage.at_work(make_config(controller={"heartbeat_timeout": 15.0}))
    group = rollout.lease().groups[0]
    served.skip(16.0)
    assert stage.states(served) == {"policy-0": "lost", "rollout-0": "lost"}
    assert leased(served) == 0
    assert rollout.beat().lost_leases == [group.lease_id]
    assert stage.states(served)["rollout-0"] == "live"


def test_what_the_launcher_saw_end_is_released_at_once(stage: Stage) -> None:
    served, _, rollout = stage.at_work()
    rollout.lease(2)
    user = stage.client(served)
    user.send(api.replica_exited("rollout-0", "killed by signal 9"))
    user.send(api.replica_exited("rollout-0", "killed by signal 9"))
    assert leased(served) == 0
    (info,) = [replica for replica in user.send(api.replicas()) if replica.role == "rollout"]
    assert (info.state, info.status) == ("lost", "killed by signal 9")
    assert refused(user.send, api.replica_exited("nobody", "")).code is ErrorCode.UNKNOWN_REPLICA


@pytest.mark.parametrize(("crashed", "dropped"), [(True, {"poison": 1}), (False, {})])
def test_only_a_crash_counts_for_what_a_replica_held(stage: Stage, crashed: bool, dropped: dict[str, int]) -> None:
    served, _, rollout = stage.at_work(make_config(controller={"max_attempts": 1}))
    user = stage.client(served)
    rollout.lease(1)
    user.send(api.replica_exited("rollout-0", "it ended", crashed=crashed))
    assert user.send(api.ledger()).dropped == dropped
    rollout.register()
    rollout.lease(1)
    served.skip(1000.0)
    assert user.send(api.ledger()).dropped == dropped, "silence is nobody's fault"


def test_whoever_is_superseded_was_pre_empted_until_somebody_says_that_it_crashed(stage: Stage) -> None:
    served, _, rollout = stage.at_work(make_config(controller={"max_attempts": 3}))
    user, ledger = stage.client(served), served.job.require_ledger()
    for life in range(1, 8):
        rollout.register(parent_pid=life)
        (group,) = rollout.lease(1).groups
        assert (group.group_id, ledger.table.groups[group.group_id].crashes) == ("e0-p0", 0)

    def report(life: int, crashed: bool = True) -> tuple[int, str, int]:
        user.send(api.replica_exited("rollout-0", "exit code 139", crashed=crashed, parent_pid=life))
        (info,) = [info for info in user.send(api.replicas()) if info.role == "rollout"]
        return ledger.table.groups["e0-p0"].crashes, info.state, leased(served)

    assert report(5) == (0, "live", 1), "of what it held nothing is known any more"
    assert report(6) == report(6) == (1, "live", 1), "once, and its successor goes on"
    assert report(7) == (2, "lost", 0)
    rollout.register(parent_pid=8)
    assert rollout.lease(1).groups[0].group_id == "e0-p0"
    rollout.register(parent_pid=9)
    assert report(8, crashed=False) == (2, "live", 0), "the launcher says that it was killed"
    assert rollout.lease(1).groups[0].group_id == "e0-p0"
    rollout.register(parent_pid=10)
    assert report(9) == (3, "live", 0)
    assert user.send(api.ledger()).dropped == {"poison": 1}


def test_a_draining_replica_gets_nothing_more_and_leaves(stage: Stage) -> None:
    served, _, rollout = stage.at_work()
    group = rollout.lease().groups[0]
    assert stage.client(served).send(api.drain(rollout.reply.replica_id)).draining
    assert rollout.lease(wait_s=30.0).status is LeaseStatus.DRAINING
    assert rollout.beat().commands == ["drain"]
    assert rollout.finish([group]).results[0].accepted
    rollout.leave()
    rollout.leave()
    assert refused(rollout.beat).code is ErrorCode.UNKNOWN_REPLICA


def test_a_new_trainer_ends_the_epoch_of_the_old_one(stage: Stage) -> None:
    served, old, rollout = stage.at_work()
    rollout.finish(rollout.lease(2).groups)
    assert old.batch(0) is not None
    new = stage.trainer(served)
    assert new.register(resume_step=0).policy_epoch > old.reply.policy_epoch
    states = stage.client(served).send(api.ledger()).states
    assert (states["ready"], states["batched"]) == (2, 0)
    for call in (old.batch, old.commit, old.publish, old.checkpoint):
        assert refused(call, 0).code is ErrorCode.STALE_EPOCH
    batch = new.batch(0)
    assert batch is not None
    assert batch[0].policy_epoch == new.reply.policy_epoch
    assert new.commit(0).committed_steps == 1


def test_a_trainer_from_an_older_checkpoint_rewinds_the_job(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(train={"ckpt": {"enable_checkpoint": True}}))
    for step in range(2):
        train_step(trainer, rollout, step)
    assert trainer.checkpoint(2).durable_steps == 2
    snapshot = trainer.client.send(api.ledger_snapshot(2))
    assert (snapshot.committed_steps, snapshot.timeline) == (2, 0)
    train_step(trainer, rollout, 2)
    train_step(trainer, rollout, 3)
    assert rollout.version == 4
    reply = trainer.register(resume_step=2)
    assert (reply.committed_steps, reply.timeline) == (2, 1)
    user = stage.client(served)
    assert [record.step for record in user.send(api.steps())] == [0, 1]
    assert rollout.lease().status is LeaseStatus.UPDATE
    published = trainer.publish(2).publication
    assert (published.version, published.timeline) == (2, 1)
    rollout.take(published)
    for step in range(2, 6):
        last = train_step(trainer, rollout, step)
    assert last.finished
    ledger = user.send(api.ledger())
    assert sum(ledger.states.values()) == ledger.created == 12
    assert ledger.states["trained"] + ledger.states["durable"] == 12


def test_a_trainer_that_dies_again_and_again_before_its_next_checkpoint_loses_nothing(stage: Stage) -> None:
    """The ledger contains the checkpoint, whatever its timeline: records, totals and ready groups stay."""
    served, trainer, rollout = stage.at_work(make_config(train={"ckpt": {"enable_checkpoint": True}}))
    for step in range(2):
        train_step(trainer, rollout, step, size=2)
    trainer.checkpoint(2)
    snapshot = trainer.client.send(api.ledger_snapshot(2))
    assert snapshot.staleness == {0: 8}
    user = stage.client(served)
    rollout.finish(rollout.lease(3).groups)
    for life in range(1, 5):
        train_step(trainer, rollout, 2, size=2)
        reply = trainer.register(resume_step=2, snapshot=snapshot)
        assert (reply.committed_steps, reply.timeline, reply.timeline_began) == (2, life, 2)
        assert reply.timeline_since == 0
        assert [record.step for record in user.send(api.steps())] == [0, 1]
        ledger = user.send(api.ledger())
        assert (ledger.states["durable"], ledger.states["ready"]) == (4, 3)
        assert ledger.staleness == {0: 8}
        assert [group["step"] for group in user._http.get("/v1/groups?state=durable").json()] == [0, 0, 1, 1]
        rollout.take(trainer.publish(2).publication)
    for step in range(2, 6):
        train_step(trainer, rollout, step, size=2)
    assert [record.step for record in user.send(api.steps())] == list(range(6))
    assert sum(user.send(api.ledger()).staleness.values()) == 24


def test_a_job_that_begins_from_a_snapshot_keeps_its_totals_and_can_begin_anew(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work(make_config(train={"ckpt": {"enable_checkpoint": True}}))
    for step in range(2):
        train_step(trainer, rollout, step, size=2)
    snapshot = trainer.client.send(api.ledger_snapshot(2))
    other = stage.serve(make_config(train={"ckpt": {"enable_checkpoint": True}}))
    trainer, rollout = stage.trainer(other), stage.rollout(other)
    user = stage.client(other)
    for _ in range(3):
        trainer.register(resume_step=2, snapshot=snapshot)
        assert user.send(api.ledger()).staleness == {0: 8}
    old = snapshot.model_dump(exclude={"staleness"})
    assert m.LedgerSnapshot.model_validate(old).staleness == {}
    assert trainer.register(resume_step=0).committed_steps == 0
    ledger = user.send(api.ledger())
    assert (ledger.created, ledger.staleness) == (0, {}), "the steps below the snapshot are trained again"
    trainer.publish(0)
    rollout.register()
    for step in range(6):
        train_step(trainer, rollout, step, size=2)
    assert user.send(api.ledger()).staleness == {0: 24}


def test_a_trainer_that_knows_nothing_of_its_weights_changes_nothing(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work()
    train_step(trainer, rollout, 0)
    reply = trainer.register(resume_step=None)
    assert (reply.committed_steps, reply.timeline) == (1, 0)


def test_a_trainer_ahead_of_the_job_is_refused(stage: Stage) -> None:
    trainer = stage.trainer(stage.serve())
    refusal = refused(trainer.register, resume_step=3)
    assert refusal.code is ErrorCode.CONFLICT
    assert "3 committed steps" in refusal.detail


def test_the_job_fails_by_name_when_replicas_do_not_register(stage: Stage) -> None:
    config = make_config(controller={"start_timeout": 60.0}, rollout={"parallelism": {"n_init_replicas": 2}})
    served = stage.serve(config)
    stage.joined(served)
    served.skip(61.0)
    status = stage.client(served).send(api.job())
    assert status.phase is Phase.FAILED
    assert "1 policy replica(s) and 1 rollout replica(s) did not register" in (status.last_error or "")
    assert "registered: rollout-0" in status.last_error


def test_replicas_that_registered_in_time_may_leave_later(stage: Stage) -> None:
    served = stage.serve(make_config(controller={"start_timeout": 60.0, "heartbeat_timeout": 5.0}))
    stage.ready(served)
    served.skip(100.0)
    assert stage.client(served).send(api.job()).phase is not Phase.FAILED


def test_gauges_and_versions_are_shown(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    rollout.beat(gauges={"idle_fraction": 0.25}, status="generating")
    train_step(trainer, rollout, 0)
    rollout.finish(rollout.lease(2).groups)
    assert trainer.batch(1) is not None
    trainer.commit(1, idle_fraction=0.5, reward_mean=0.75, staleness_mean=1.0)
    user = stage.client(served)
    status = user.send(api.job())
    assert status.idle == {"policy": 0.5, "rollout": 0.25}
    assert (status.reward, status.staleness_mean) == (0.75, 1.0)
    infos = {info.name: info for info in user.send(api.replicas())}
    assert infos["rollout-0"].status == "generating"
    assert infos["rollout-0"].gauges == {"idle_fraction": 0.25}
    rollout.leave()
    assert user.send(api.job()).idle == {"policy": 0.5}, "a replica that is gone is not idle"
    ended = user.send(api.operate("stop"))
    assert ended.idle == {"policy": 0.5, "rollout": 0.25}, "how it was, for the summary"
    user.send(api.operate("resume"))
    stage.trainer(served).register(resume_step=0)
    assert user.send(api.job()).reward is None, "every step is undone"


def test_trouble_beside_the_training_is_the_last_error(stage: Stage) -> None:
    served, trainer, _ = stage.at_work()
    assert served.job.facts.last_error is None
    request = m.HeartbeatRequest(incarnation=trainer.reply.incarnation, trouble="upload of step-4 failed")
    trainer.client.send(api.heartbeat(trainer.reply.replica_id, request))
    assert stage.client(served, "user").send(api.job()).last_error == "upload of step-4 failed"


PROFILED = {"enable_profiler": True, "sub_profiler_config": {"active_steps": 3, "warmup_steps": 2}}


def report(trainer: Trainer, order: m.ProfileOrder, state: m.ProfileState) -> m.HeartbeatReply:
    """A heartbeat that says how a profile stands."""
    status = m.ProfileStatus(**order.model_dump(), state=state, files=["trace"])
    request = m.HeartbeatRequest(incarnation=trainer.reply.incarnation, profile=status)
    return trainer.client.send(api.heartbeat(trainer.reply.replica_id, request))


def test_a_profile_is_handed_to_the_trainer_until_it_says_that_it_knows(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(profiler=PROFILED))
    user, replica = stage.client(served), trainer.reply.replica_id
    request = m.ProfileRequest(request_id="profile-1", first_step=4)
    asked = user.send(api.profile(replica, request))
    assert (asked.state, asked.first_step, asked.steps, asked.warmup, asked.ranks) == ("asked", 4, 3, 2, [0])
    assert user.send(api.profile(replica, request)) == asked, "sent twice it is one profile"
    order = trainer.beat().profile
    assert order is not None
    assert order == trainer.beat().profile
    assert order.profile_id == "profile-1"
    busy = refused(user.send, api.profile(replica, m.ProfileRequest()))
    assert (busy.code, "under way (asked; 3 steps from step 4 on)" in busy.detail) == (ErrorCode.CONFLICT, True)
    for state in ("recording", "written"):
        assert report(trainer, order, state).profile is None
    report(rollout, order, "written")
    seen = {one.role: one.profile for one in user.send(api.replicas())}["policy"]
    assert {one.role: one.profile for one in user.send(api.replicas())}["rollout"] is None, "it has none"
    assert seen is not None
    assert (seen.state, seen.files) == ("written", ["trace"])
    again = user.send(api.profile(replica, m.ProfileRequest(steps=1, warmup=0, ranks=[0, 0])))
    assert (again.first_step, again.steps, again.warmup, again.ranks) == (None, 1, 0, [0])
    assert report(trainer, order, "written").profile is not None, "an old report does not hide the new order"


def test_a_profile_that_was_asked_for_outlives_the_controller(stage: Stage) -> None:
    config = make_config(profiler=PROFILED)
    with served_controller(run_dir := stage.run_dir(config), stage.valkey.url) as before:
        trainer, _ = stage.ready(before)
        asked = stage.client(before).send(api.profile(trainer.reply.replica_id, m.ProfileRequest()))
    with served_controller(run_dir, stage.valkey.url) as after:
        successor = stage.trainer(after)
        successor.reply = trainer.reply
        order = successor.beat().profile
    assert order is not None
    assert order.profile_id == asked.profile_id


def test_profiles_that_nobody_can_record_are_refused(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(profiler=PROFILED))
    user, mine = stage.client(served), trainer.reply.replica_id

    def why(replica: str = mine, **request: object) -> str:
        return refused(user.send, api.profile(replica, m.ProfileRequest.model_validate(request))).detail

    assert "policy-9.1 is not registered" in why("policy-9.1")
    assert "rollout-0 is a rollout replica" in why(rollout.reply.replica_id)
    assert "has no rank 1, 7: its ranks are 0 alone" in why(ranks=[7, 1, 0])
    assert "step 6 does not exist: the last one of this job is 5" in why(first_step=6)
    train_step(trainer, rollout, 0)
    assert "step 0 is trained already: the job is at step 1" in why(first_step=0)
    trainer.leave("crashed")
    assert "policy-0 has state left" in why()
    user.send(api.operate("stop"))
    assert "the job is stopped" in why()


def test_a_job_that_takes_no_profiles_says_how_to_go_on_with_one_that_does(stage: Stage) -> None:
    served, trainer, _ = stage.at_work()
    call = api.profile(trainer.reply.replica_id, m.ProfileRequest())
    detail = refused(stage.client(served).send, call).detail
    assert "profiler.enable_profiler = false" in detail
    assert f"cosmos-launch --resume {served.job.run_dir} --set profiler.enable_profiler=true" in detail
