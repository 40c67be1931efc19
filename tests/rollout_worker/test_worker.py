"""The worker loop against a real controller: what it pushes, how it follows weights, how it leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from controller.client import Client, Unauthorized
from controller.client import calls as api
from rollout_worker.engines.base import EngineConfigError
from rollout_worker.rewards.registry import RewardConfigError
from rollout_worker.session import SupersededError
from schema.wire.messages import Phase, ReplicaInfo
from schema.wire.prompts import write_prompts
from schema.wire.sample import Sample
from tests.rollout_worker.stage import MAX_LEN, Publisher, Stage, plain_logprobs
from tests.rollout_worker.tiny import Models, tokenizer
from tests.support.served import ServedController
from tests.support.waiting import PATIENCE, until

PROMPTS = [f"question {i}?" for i in range(16)]


def check_sample(sample: Sample, models: Models) -> None:
    """Log-probs are of the weights that each token's version names; the reward is the text's length."""
    versions = sample.token_versions()
    mask = sample.loss_mask == 1
    for version in set(versions[mask].tolist()):
        mine = mask & (versions == version)
        expected = plain_logprobs(models.of(version), sample)
        np.testing.assert_allclose(sample.logprobs[mine], expected[mine], atol=1e-4)
    assert not sample.logprobs[~mask].any()
    (reward,) = sample.header.rewards.values()
    assert sample.text is not None
    assert reward == len(sample.text)
    assert sample.header.score == 0.5 * reward
    response = sample.token_ids[mask]
    assert sample.text == tokenizer().decode(response, skip_special_tokens=True)
    if sample.text:
        assert sample.part_values.tolist() == [0.25 * reward]
        upto = int(sample.part_positions[0]) - sample.header.prompt_tokens
        assert tokenizer().decode(response[: upto + 1], skip_special_tokens=True)
        assert not tokenizer().decode(response[:upto], skip_special_tokens=True)


@pytest.mark.parametrize("bound", [0, pytest.param(1, marks=pytest.mark.soak), 3])
def test_a_whole_job_within_its_staleness_bound(stage: Stage, bound: int) -> None:
    config = stage.config(train__train_policy__allowed_outdated_steps=bound, train__max_num_steps=5)
    served, trainer = stage.begin(config, PROMPTS)
    worker = stage.worker(served.url)
    for t in range(5):
        for sample in trainer.step(t):
            check_sample(sample, stage.models)
            assert 0 <= t - sample.header.oldest_version <= bound
    user = stage.client(served, "user")
    until(lambda: "idle_fraction" in rollout_replica(user).gauges, "a heartbeat after the first lease")
    trainer.leave()
    worker.join()
    status, ledger = user.send(api.job()), user.send(api.ledger())
    assert status.phase == Phase.FINISHED
    assert sum(ledger.states.values()) == ledger.created
    assert ledger.max_staleness <= bound
    assert (ledger.over_bound, ledger.states["leased"]) == (0, 0)
    replica = rollout_replica(user)
    assert replica.state == "left"
    assert 0.0 <= replica.gauges["idle_fraction"] <= 1.0


def rollout_replica(user: Client) -> ReplicaInfo:
    (replica,) = [one for one in user.send(api.replicas()) if one.role == "rollout"]
    return replica


def first_batches(
    stage: Stage, folder: str, begun: Callable[[Stage], object] = lambda stage: None, **changes: object
) -> dict[tuple[int, ...], list[list[int]]]:
    """Tokens of the samples by prompt, of two batches that are all of version 0.

    begun: is called once the controller has opened the data.
    """
    own = replace(stage, directory=stage.directory / folder)
    own.directory.mkdir()
    served, trainer = own.begin(own.config(train__sync_weight_interval=2, **changes), PROMPTS)
    begun(own)
    worker = own.worker(served.url)
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for t in range(2):
        for sample in trainer.step(t):
            prompt = tuple(sample.token_ids[sample.loss_mask == 0].tolist())
            found.setdefault(prompt, []).append(sample.token_ids.tolist())
    worker.stop()
    return found


def test_samples_follow_from_the_seed_whoever_makes_them_and_how(stage: Stage) -> None:
    changes = {"train__train_policy__dataloader_shuffle": False}
    together = first_batches(stage, "a", **changes)
    apart = first_batches(stage, "b", rollout__n_generation_to_batch=True, rollout__batch_size=2, **changes)
    assert len(together.keys() & apart.keys()) >= 2
    for prompt in together.keys() & apart.keys():
        assert together[prompt] == apart[prompt]
        assert together[prompt][0] != together[prompt][1]


def other_rows(stage: Stage) -> None:
    """Another file takes the place of the prepared rows."""
    write_prompts(stage.run_dir / "data" / "train.safetensors", [[5, 6]] * 16, [{"prompt": "?", "answer": ""}] * 16)


def test_rows_are_the_same_whoever_reads_them(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    changes: dict[str, object] = {"train__train_policy__dataloader_shuffle": False, "controller__oversample": 1.0}
    seen = []
    for folder, begun, local in (("a", None, None), ("b", other_rows, True), ("c", None, False)):
        caplog.clear()
        batches = first_batches(stage, folder, begun or (lambda _: None), train__local_dataset=local, **changes)
        said = [text for text in caplog.messages if text.startswith("prepared rows")]
        seen.append(({prompt: batches[prompt] for prompt in sorted(batches)[:2]}, [text[:26] for text in said]))
    reads, comes = ["prepared rows are read in "], ["prepared rows come with ea"]
    assert [said for _, said in seen] == [reads, comes, []]
    assert seen[0][0] == seen[1][0] == seen[2][0]


def test_each_group_has_a_greedy_sample_that_is_scored_like_the_others(stage: Stage) -> None:
    config = stage.config(train__train_policy__advantage_estimator="remax")
    served, trainer = stage.begin(config, PROMPTS)
    worker = stage.worker(served.url)
    for t in range(2):
        samples = trainer.step(t)
        assert [sample.header.index for sample in samples] == [0, 1, 2, 0, 1, 2]
        assert [sample.header.baseline for sample in samples] == [False, False, True] * 2
        for sample in samples:
            check_sample(sample, stage.models)
        for sample in samples[2::3]:
            check_greedy(sample, stage.models)
    user = stage.client(served, "user")
    assert user.send(api.ledger()).staleness.keys() <= {0, 1}
    assert sum(user.send(api.ledger()).staleness.values()) == 8
    worker.stop()


def check_greedy(sample: Sample, models: Models) -> None:
    """Each token is the likeliest of its version."""
    versions = sample.token_versions()
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    for version in set(versions[sample.loss_mask == 1].tolist()):
        with torch.no_grad():
            logits = models.of(version)(input_ids=ids, use_cache=False).logits[0]
        for at in np.flatnonzero(versions == version):
            assert logits[at - 1].max() - logits[at - 1, sample.token_ids[at]] <= 1e-4


def test_validation_samples_are_of_the_pinned_version(stage: Stage) -> None:
    config = stage.config(
        train__max_num_steps=3,
        validation__enable=True,
        validation__freq=2,
        validation__n_generation=4,
        validation__temperature=1.0,
        validation__top_k=-1,
    )
    served, trainer = stage.begin(config, PROMPTS)
    worker = stage.worker(served.url)
    for t in range(3):
        trainer.step(t)
    trainer.leave()
    worker.join()
    records = stage.client(served, "user").send(api.validations())
    assert {record.version for record in records} >= {0, 3}
    for record in records:
        assert (record.samples, record.errors) == (12, 0)


def test_prompts_and_rewards_that_fail_are_errors_by_name(stage: Stage) -> None:
    """One sample each of two groups fails and is masked; groups that cannot be generated are dropped."""
    config = stage.config(
        reward__timeout=5.0,  # what is no hanging reward needs milliseconds, if the machine lets it
        reward__retries=0,
        reward__on_error="mask",
        train__max_num_steps=5,
        train__train_batch_per_replica=8,
        custom__marker=str(stage.directory / "marker-"),
    )
    prompts = ["hang", "raise", "x" * MAX_LEN, "unknown", *PROMPTS]
    served, trainer = stage.begin(config, prompts, ["hang", "raise", "long", "unknown", *map(str, range(16))])
    stage.worker(served.url)
    headers = [sample.header for t in range(5) for sample in trainer.step(t)]
    assert len(headers) == 36
    told = sorted(header.error for header in headers if header.error is not None)
    assert len(told) == 2
    assert told[0].startswith("KeyError: 'no reward for this'")
    assert told[1].startswith("RewardTimeout: the sample took longer than 5 s\nin reward function ")
    assert all((header.score is None) == (header.error is not None) for header in headers)
    dropped = stage.client(served, "user").send(api.ledger()).dropped
    assert dropped == {"reward_error": 2}


def test_answers_as_long_as_a_sequence_end_with_it_and_count_as_overlong(stage: Stage) -> None:
    """The engine could hold longer sequences; no sample is longer than training takes, and none is cut unseen."""
    config = stage.config(
        policy__model_max_length=20,
        rollout__max_model_len=64,
        rollout__max_response_length=64,
        rollout__sampling_config={"stop_token_ids": list(range(48))},
        train__train_policy__dataloader_shuffle=False,
        reward__on_error="mask",
        train__max_num_steps=3,
    )
    served, trainer = stage.begin(config, ["x" * 20, "x" * 19, *PROMPTS])
    stage.worker(served.url)
    samples = [sample for t in range(3) for sample in trainer.step(t)]
    assert max(sample.header.total_tokens for sample in samples) == 20
    ended = [sample.header.finish_reason for sample in samples]
    assert ended == ["stop" if sample.token_ids[-1] < 48 else "overlong" for sample in samples]
    assert {"stop", "overlong"} == set(ended)
    dropped = stage.client(served, "user").send(api.ledger()).dropped
    assert dropped["reward_error"] == 1, "the prompt of 20 tokens"
    assert dropped["overlong"] >= 1, "groups of which every answer was ended by the sequence"
    assert set(dropped) == {"reward_error", "overlong"}


def test_a_drained_worker_finishes_what_it_holds_and_leaves(stage: Stage) -> None:
    served, _ = stage.begin(stage.config(train__train_policy__allowed_outdated_steps=3), PROMPTS)
    worker = stage.worker(served.url)
    user = stage.client(served, "user")
    until(lambda: user.send(api.ledger()).states["leased"] or user.send(api.ledger()).states["ready"], "a lease")
    user.send(api.drain(rollout_replica(user).replica_id))
    worker.join()
    ledger = user.send(api.ledger())
    assert ledger.states["leased"] == 0
    assert ledger.states["ready"] >= 1


@pytest.mark.parametrize("how", [pytest.param("the deadline", marks=pytest.mark.soak), "a second request"])
def test_a_drained_worker_pushes_what_is_finished_and_gives_back_the_rest(stage: Stage, how: str) -> None:
    """One reward hangs. Its group's other sample is kept for whoever makes the group next."""
    config = stage.config(
        custom__marker=str(stage.directory / "marker-"),
        reward__timeout=600.0,
        reward__num_workers=2,  # one hangs
        launcher__shutdown_timeout=1.0 if how == "the deadline" else 1000.0,
        train__train_policy__dataloader_shuffle=False,
    )
    served, trainer = stage.begin(config, ["hang", *PROMPTS], ["hang", *map(str, range(16))])
    worker = stage.worker(served.url)
    groups = served.job.require_ledger().table.groups
    until(lambda: (group := groups.get("e0-p0")) and len(group.samples) == 1, "half a group")
    times = worker.worker.times  # to push and to say good-bye there would be less than a second
    worker.worker.times = replace(times, push=PATIENCE, goodbye=PATIENCE)
    worker.ask("drain")
    if how == "a second request":
        worker.ask("stop")
    worker.join()
    group = groups["e0-p0"]
    assert (group.state, len(group.samples), group.crashes, group.failures) == ("waiting", 1, 0, 0)
    trainer.batch(0)
    stage.worker(served.url, "another")
    for t in range(4):
        trainer.step(t)
    assert group.state == "trained"
    assert group.attempt == 2


def test_a_straggler_is_waited_for_while_others_go_on(stage: Stage) -> None:
    """On policy, one reward takes its time: the step waits for its group and nothing is dropped."""
    served, trainer = slow_job(stage, on_stale="wait")
    until(lambda: served.job.require_ledger().table.ready == 1, "the other group of the step")
    assert trainer.batch(0, wait_s=0.5) is None
    (stage.directory / "marker-go").touch()
    assert len(trainer.step(0)) == 4
    assert stage.client(served, "user").send(api.ledger()).dropped == {}


def test_a_straggler_is_dropped_when_that_is_asked_for(stage: Stage) -> None:
    """Time passes by a jump of the clock, in which no lease and no replica expires: else others are late, too."""
    never = {"lease_timeout": 1e6, "heartbeat_timeout": 1e6}
    served, trainer = slow_job(stage, on_stale="drop", straggler_timeout=1000.0, **never)
    until(lambda: served.job.require_ledger().table.ready == 1, "the other group of the step")
    assert trainer.batch(0) is None
    served.skip(1001.0)
    assert trainer.batch(0) is None  # now the straggler is dropped
    served.skip(1.0)  # whoever waits for its place is told at the next tick
    for t in range(3):
        trainer.step(t)
    user = stage.client(served, "user")
    assert user.send(api.ledger()).dropped == {"stale": 1}
    until(lambda: not any(one.leases for one in user.send(api.replicas())), "the worker has forgotten it")


def slow_job(stage: Stage, **controller: object) -> tuple[ServedController, Publisher]:
    """A job of one replica in which the first reward of the first prompt hangs until the test lets it go."""
    changes = {f"controller__{key}": value for key, value in controller.items()}
    config = stage.config(
        custom__marker=str(stage.directory / "marker-"),
        reward__timeout=600.0,
        reward__num_workers=2,  # one hangs
        train__train_policy__allowed_outdated_steps=0,
        train__train_policy__dataloader_shuffle=False,
        train__max_num_steps=3,
        **changes,
    )
    served, trainer = stage.begin(config, ["hang", *PROMPTS], ["hang", *map(str, range(16))])
    stage.worker(served.url)
    return served, trainer


def test_work_whose_leases_are_lost_is_forgotten(stage: Stage) -> None:
    """The clock jumps: every lease expires at once. The worker hears of it and goes on with new ones."""
    served, trainer = stage.begin(stage.config(train__train_policy__allowed_outdated_steps=3), PROMPTS)
    worker = stage.worker(served.url)
    for t in range(4):
        trainer.step(t)
        served.skip(10_000.0)
    trainer.leave()
    worker.join()
    ledger = stage.client(served, "user").send(api.ledger())
    assert sum(ledger.states.values()) == ledger.created
    assert sum(ledger.staleness.values()) == 16


def test_a_second_process_of_the_same_name_takes_over(stage: Stage) -> None:
    served, trainer = stage.begin(stage.config(), PROMPTS)
    first = stage.worker(served.url)
    trainer.step(0)
    second = stage.worker(served.url)
    with pytest.raises(SupersededError):
        first.join()
    for t in range(1, 4):
        trainer.step(t)
    trainer.leave()
    second.join()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"train__train_policy__reward_function": "/nowhere/r.py:f", "policy__model_name_or_path": "/nowhere"},
            RewardConfigError,  # before the engine looks for its model
            "no file",
        ),
        ({"policy__model_name_or_path": "/nowhere/model"}, EngineConfigError, "/nowhere/model"),
        ({"rollout__parallelism": {"tp_size": 2}}, EngineConfigError, "tp_size"),
        ({"policy__model_max_length": 10**9}, EngineConfigError, "max_model_len"),
    ],
)
def test_settings_that_cannot_work_are_named(
    stage: Stage, changes: dict[str, object], error: type[Exception], words: str
) -> None:
    stage.prepare(stage.config(**changes), PROMPTS)
    served = stage.serve()
    worker = stage.worker(served.url)
    with pytest.raises(error, match=words):
        worker.join()


def test_a_wrong_token_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.prepare(stage.config(), PROMPTS)
    served = stage.serve()
    monkeypatch.setitem(__import__("tests.rollout_worker.stage", fromlist=["TOKENS"]).TOKENS, "rollout", "wrong")
    worker = stage.worker(served.url)
    with pytest.raises(Unauthorized):
        worker.join()
