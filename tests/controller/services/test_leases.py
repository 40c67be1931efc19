"""Leases over HTTP: what a group carries, and validation rounds between training leases."""

from __future__ import annotations

from controller.client import calls as api
from schema.config import Config
from schema.wire.messages import LeaseReply, LeaseStatus, Phase
from schema.wire.prompts import write_prompts
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import Rollout, train_step
from tests.support.controller import make_config
from tests.support.served import served_controller

EVERY_4 = {"enable": True, "freq": 4, "before": True}


def kinds(reply: LeaseReply) -> set[str]:
    return {group.kind for group in reply.groups}


def validate(rollout: Rollout) -> None:
    """Work until no validation group is granted."""
    while kinds(reply := rollout.lease(2)) == {"validation"}:
        rollout.finish(reply.groups)
    for group in reply.groups:
        rollout.client.send(api.release(group.lease_id))


def test_the_initial_weights_come_first_at_the_replica_that_takes_part(stage: Stage) -> None:
    served, _, rollout = stage.at_work(make_config(validation=EVERY_4))
    other = stage.joined(served, "rollout-1")
    user = stage.client(served)
    assert user.send(api.job()).phase is Phase.VALIDATING
    first = rollout.lease(2)
    assert kinds(first) == {"validation"}
    assert [group.position for group in first.groups] == [0, 1]
    assert {group.pinned_version for group in first.groups} == {0}
    assert first.groups[0].row == {"prompt": "validation 0", "answer": "0"}
    assert kinds(other.lease()) == {"train"}
    assert kinds(rollout.lease(5)) == {"validation"}
    assert user.send(api.validations()) == []
    rollout.finish(first.groups)


def test_a_round_becomes_a_record_and_outlives_the_controller(stage: Stage) -> None:
    served, _, rollout = stage.at_work(make_config(controller=PATIENT, validation={**EVERY_4, "n_generation": 3}))
    reply = rollout.lease(2)
    assert [len(group.seeds) for group in reply.groups] == [3, 3]
    rollout.finish(reply.groups)
    (last,) = rollout.lease(2).groups
    served.skip(20.0)  # as if the clock of the host had been set back: no date comes from the one of leases
    rollout.finish([last])
    (record,) = stage.client(served).send(api.validations())
    assert record.at <= served.job.wall()
    assert (record.version, record.samples, record.errors) == (0, 9, 0)
    assert record.score_mean is not None
    assert abs(record.score_mean - 1 / 3) < 1e-9
    assert record.response_tokens_mean == 3
    status = stage.client(served).send(api.job())
    assert status.validation == record
    assert kinds(rollout.lease()) == {"train"}
    assert stage.client(served).send(api.ledger()).created == 1


def test_a_supervised_job_leases_the_last_turns_of_held_out_conversations(stage: Stage) -> None:
    validation = {**EVERY_4, "generate": True, "reward_function": "boxed_math", "freq": 2}
    train = {"train_policy": {"type": "sft"}, "train_batch_per_replica": 5, "max_num_steps": 2}
    config = Config.model_validate({"train": train, "validation": validation, "controller": PATIENT})
    run_dir = stage.run_dir(config, 12, 3)
    masks = [[0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1], [0, 1]]
    ids = [[10 * (i + 1) + k for k in range(len(mask))] for i, mask in enumerate(masks)]
    rows = [{"prompt": f"validation {i}", "answer": str(i)} for i in range(3)]
    write_prompts(run_dir / "data" / "validation.safetensors", ids, rows, masks)
    served = stage.stack.enter_context(served_controller(run_dir, stage.valkey.url))
    trainer, rollout, user = stage.trainer(served), stage.rollout(served), stage.client(served)
    assert trainer.register().mode == "sft"
    trainer.publish(0)
    rollout.register()
    reply = rollout.lease(9)
    assert [group.prompt_token_ids for group in reply.groups] == [[10, 11, 12, 13, 14], [20, 21], [30]]
    assert reply.groups[0].row == rows[0]
    rollout.finish(reply.groups)
    assert rollout.lease().reason == "supervised training asks for answers in validations alone"
    assert not trainer.commit(0, loss=1.0).publish
    assert trainer.commit(1, loss=1.0).publish
    trainer.publish(2)
    trainer.leave("finished")
    assert user.send(api.job()).phase is Phase.FINISHING
    rollout.update()
    served.restart()
    rollout.finish(rollout.lease(9).groups)
    assert user.send(api.job()).phase is Phase.FINISHED
    assert [record.version for record in user.send(api.validations())] == [0, 2]
    assert user.send(api.ledger()).created == 0


def test_the_job_ends_after_the_validation_of_the_final_weights(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(validation=EVERY_4))
    validate(rollout)
    for step in range(6):
        train_step(trainer, rollout, step)
        if step < 5:
            validate(rollout)
    user = stage.client(served)
    trainer.leave("finished")
    assert user.send(api.job()).phase is Phase.FINISHING
    assert "waits for the last validation: rollout-0 is live" in user.send(api.job()).sentence
    rollout.version, rollout.publication_id = 5, 6
    behind = rollout.lease()
    assert (behind.status, behind.update_to) == (LeaseStatus.UPDATE, 7)
    rollout.update()
    reply = rollout.lease(9)
    assert kinds(reply) == {"validation"}
    assert "validates version 6: 0 of" in user.send(api.job()).sentence
    other = stage.joined(served, "rollout-1")
    assert other.lease().status is LeaseStatus.THROTTLED
    rollout.finish(reply.groups)
    assert user.send(api.job()).phase is Phase.FINISHED
    assert rollout.lease().status is other.lease().status is LeaseStatus.FINISHED
    assert [record.version for record in user.send(api.validations())] == [0, 4, 6]


def test_without_rollout_replicas_the_job_ends_without_its_last_round_and_says_so(stage: Stage) -> None:
    config = make_config(
        validation={**EVERY_4, "before": False},
        train={"max_num_steps": 1},
        controller={"start_timeout": 100.0, "heartbeat_timeout": 10.0},
    )
    served, trainer, rollout = stage.at_work(config)
    train_step(trainer, rollout, 0)
    trainer.leave("finished")
    rollout.leave()
    user = stage.client(served)
    served.skip(50.0)
    assert user.send(api.job()).phase is Phase.FINISHING
    served.skip(101.0)
    status = user.send(api.job())
    assert status.phase is Phase.FINISHED
    assert "no final validation" in (status.last_error or "")


def test_a_dead_replicas_validation_groups_go_to_another(stage: Stage) -> None:
    served, _, first = stage.at_work(make_config(validation=EVERY_4))
    second = stage.joined(served, "rollout-1")
    taken = first.lease(3).groups
    assert first.beat().lost_leases == []
    stage.client(served).send(api.replica_exited("rollout-0", "killed"))
    again = second.lease(3).groups
    assert [group.group_id for group in again] == [group.group_id for group in taken]
    assert [group.seeds for group in again] == [group.seeds for group in taken]
    second.finish(again)
    assert len(stage.client(served).send(api.validations())) == 1


def test_leased_groups_carry_prompt_row_and_seeds(stage: Stage) -> None:
    _, _, rollout = stage.at_work(make_config(train={"train_policy": {"type": "grpo", "dataloader_shuffle": False}}))
    (group,) = rollout.lease().groups
    assert group.prompt_token_ids == [1, 2, 3]
    assert group.row == {"prompt": "train 0", "answer": "0"}
    assert len(set(group.seeds)) == 2
    assert (group.kind, group.attempt, group.deadline) == ("train", 1, 1)


def test_a_job_that_only_validates_ends_with_the_round_and_a_start_that_goes_on_keeps_it(stage: Stage) -> None:
    config = make_config(controller=PATIENT, validation={**EVERY_4, "only": True})
    served, trainer, rollout = stage.at_work(config)
    user = stage.client(served)
    assert (user.send(api.job()).phase, user.send(api.job()).total_steps) == (Phase.VALIDATING, 0)
    rollout.finish(rollout.lease(2).groups)
    trainer.leave("finished")  # what publishes the model has nothing else to do
    served.stop()
    served.restart()
    assert trainer.register(None).publication is not None
    (last,) = rollout.lease(8).groups
    assert user.send(api.job()).phase is Phase.VALIDATING
    rollout.finish([last])
    assert rollout.lease().status is LeaseStatus.THROTTLED
    trainer.leave("finished")
    assert user.send(api.job()).phase is Phase.FINISHED
    assert [record.version for record in user.send(api.validations())] == [0]
