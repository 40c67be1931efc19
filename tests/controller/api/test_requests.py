"""What comes in over HTTP and is wrong: every answer is a problem with a code, never a 500."""

from __future__ import annotations

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from controller.api.routes import config as route
from controller.client import calls as api
from schema.config import Config, check_config
from schema.wire import messages as m
from schema.wire.frame import encode_frame, pack_bundle
from schema.wire.messages import ErrorCode, LeaseStatus
from tests.controller.conftest import Stage, asking, refused
from tests.controller.drivers import make_frame, make_header, train_step
from tests.support.controller import TOKENS, make_config
from tests.support.metric_names import undocumented_families
from tests.support.served import ServedController
from tests.support.waiting import PATIENCE, until


def send(url: str, role: str, method: str, path: str, **options: object) -> m.Problem:
    with asking(url, role) as http:
        answer = http.request(method, path, **options)  # type: ignore[arg-type]
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem = m.Problem.model_validate_json(answer.content)
    assert problem.status == answer.status_code
    return problem


def test_unknown_paths_and_methods_are_problems(idle: ServedController) -> None:
    for path in ("/v1/nothing", "/v1/groups/e9-p9", "/v1/samples/e9-p9/0"):
        assert send(idle.url, "user", "GET", path).code is ErrorCode.NOT_FOUND
    assert send(idle.url, "user", "PUT", "/v1/job").status == 405
    assert send(idle.url, "user", "POST", "/v1/job/explode").status == 422


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_refused_and_the_sender_gets_the_answer(stage: Stage, announced: bool) -> None:
    url = stage.serve(make_config(controller={"max_request_bytes": 100_000})).url
    body = b"x" * 5_000_000
    content = body if announced else (body[i : i + 65536] for i in range(0, len(body), 65536))
    problem = send(url, "rollout", "POST", "/v1/samples", content=content)
    assert (problem.status, problem.code) == (413, ErrorCode.TOO_LARGE)
    assert "max_request_bytes = 100000" in problem.detail


BAD_FRAMES = {
    "empty": b"",
    "no header": encode_frame({}, {}),
    "truncated": make_frame(make_header(0, 0))[:-1],
    "header of another shape": encode_frame({}, {"sample": '{"index": 0}'}),
    "neither score nor error": make_frame(make_header(0, 0, score=None, rewards={})),
    "generated tokens without a version": make_frame(
        make_header(0, 0).model_copy(update={"oldest_version": -1, "newest_version": -1})
    ),
    "more response than tokens": make_frame(make_header(0, 0).model_copy(update={"response_tokens": 60})),
}


def test_bad_frames_are_refused_by_name_and_change_nothing(stage: Stage) -> None:
    _, rollout = stage.ready(stage.serve())
    group = rollout.lease().groups[0]
    for name, frame in BAD_FRAMES.items():
        result = rollout.push(group, make_header(0, 0), frame)
        assert (result.accepted, result.code) == (False, ErrorCode.BAD_FRAME), name
        assert result.detail
    assert rollout.finish([group]).results[0].accepted


ONE_PUSH = m.PushList(replica_id="r", pushes=[m.PushItem(group_id="g", lease_id="l", index=0)])


@pytest.mark.parametrize(
    "body",
    [
        b"nothing",
        pack_bundle([b"x"], {}),
        pack_bundle([b"x"], {"pushes": "[]"}),
        pack_bundle([], {"pushes": ONE_PUSH.model_dump_json()}),
    ],
)
def test_bad_bundles_are_refused(idle: ServedController, body: bytes) -> None:
    problem = send(idle.url, "rollout", "POST", "/v1/samples", content=body)
    assert (problem.status, problem.code) == (422, ErrorCode.BAD_FRAME)


def test_a_future_version_is_a_refusal_of_that_sample_alone(stage: Stage) -> None:
    _, _, rollout = stage.at_work()
    group = rollout.lease().groups[0]
    pushes, frames = rollout.bundle([group])
    frames[0] = make_frame(make_header(0, 1))
    reply = rollout.client.send(api.push_many(pushes, frames))
    assert [result.code for result in reply.results] == [ErrorCode.FUTURE_VERSION, None]
    assert rollout.push(group, make_header(0, 0)).accepted


def test_pushes_commits_and_leases_can_be_repeated(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    request = rollout.lease_request(2)
    first = rollout.client.send(api.lease(request))
    assert rollout.client.send(api.lease(request)) == first
    call = api.push_many(*rollout.bundle(first.groups))
    results = [rollout.client.send(call).results for _ in range(3)]
    assert all(result.accepted for batch in results for result in batch)
    assert [any(result.duplicate for result in batch) for batch in results] == [False, True, True]
    assert trainer.batch(0) == trainer.batch(0)
    replies = [trainer.commit(0) for _ in range(3)]
    assert len({reply.model_dump_json() for reply in replies}) == 1
    publish = trainer.publish_request(1)
    assert trainer.client.send(api.publish(publish)) == trainer.client.send(api.publish(publish))
    ledger = stage.client(served).send(api.ledger())
    assert (ledger.duplicates, ledger.states["trained"]) == (8, 2)
    assert rollout.client.send(call).results[0].duplicate


def test_released_leases_keep_their_samples_for_the_next_holder(stage: Stage) -> None:
    _, _, rollout = stage.at_work()
    group = rollout.lease().groups[0]
    assert rollout.push(group, make_header(1, 0)).accepted
    assert rollout.client.send(api.release(group.lease_id)).released
    assert not rollout.client.send(api.release(group.lease_id)).released
    again = rollout.lease().groups[0]
    assert (again.group_id, again.done, again.seeds) == (group.group_id, [1], group.seeds)
    assert again.lease_id != group.lease_id


def test_samples_longer_than_the_model_takes_are_overlong_and_counted(stage: Stage) -> None:
    served, _, rollout = stage.at_work(make_config(policy={"model_max_length": 64}))
    rollout.finish(rollout.lease().groups, tokens=65)
    assert stage.client(served).send(api.ledger()).dropped == {"overlong": 1}


def test_steps_out_of_order_are_refused(stage: Stage) -> None:
    served, trainer, _ = stage.at_work()
    for call in (lambda: trainer.batch(1), lambda: trainer.commit(0), lambda: trainer.commit(5)):
        assert refused(call).code is ErrorCode.WRONG_STEP
    assert refused(trainer.publish, 1).code is ErrorCode.FUTURE_VERSION
    path = "/v1/steps/0/batch?policy_epoch=1&samples=1,x"
    assert send(served.url, "policy", "GET", path).code is ErrorCode.BAD_REQUEST


def test_weights_of_no_publication_must_be_replaced_before_leasing(stage: Stage) -> None:
    _, rollout = stage.ready(stage.serve())
    rollout.publication_id = 0
    reply = rollout.lease(wait_s=30.0)
    assert (reply.status, reply.update_to) == (LeaseStatus.UPDATE, 1)
    rollout.publication_id, rollout.version = 1, 7
    assert rollout.lease().status is LeaseStatus.UPDATE


@pytest.mark.parametrize(("size", "granted"), [(0, 0), (1, 1), (3, 2)])
def test_outdated_replicas_lease_as_many_groups_as_the_config_says(stage: Stage, size: int, granted: int) -> None:
    policy = {"outdated_rollout_fetch_batch_size": size, "allowed_outdated_steps": 4}
    trainer, rollout = stage.ready(stage.serve(make_config(train={"train_policy": policy})))
    trainer.publish(0)
    reply = rollout.lease(2)
    assert len(reply.groups) == granted
    assert granted or (reply.status, reply.update_to) == (LeaseStatus.UPDATE, 2)
    rollout.update()
    assert len(rollout.lease(2).groups) == 2


def test_the_config_is_shown_without_secrets(stage: Stage) -> None:
    config = make_config(
        redis={"url": "redis://me:hidden@host:1"}, custom={"wandb_api_key": "hidden", "note": "shown"}
    )
    served, _, rollout = stage.at_work(config)
    shown = stage.client(served).send(api.config())
    assert "hidden" not in json.dumps(shown)
    assert shown["custom"]["note"] == "shown"
    assert rollout.reply.config["redis"]["url"] == "redis://host:1"
    assert rollout.reply.config["custom"]["wandb_api_key"] == "hidden"


def test_a_config_can_be_validated(idle: ServedController) -> None:
    with asking(idle.url) as http:
        verdict = http.post("/v1/config/validate", json={"train": {"epoch": 0}, "polcy": {}}).json()
        assert not verdict["valid"]
        assert {"train.epoch", "polcy"} <= {problem["key"] for problem in verdict["problems"]}
        schema = http.get("/v1/config/schema").json()
        assert {"train", "policy", "rollout"} <= set(schema["properties"])
    assert send(idle.url, "user", "POST", "/v1/config/validate", content=b"[").status == 422


def test_of_many_faults_of_a_config_some_are_shown_and_all_are_counted(idle: ServedController) -> None:
    with asking(idle.url) as http:
        verdict = http.post("/v1/config/validate", json={"train": {f"k{i}": 0 for i in range(100)}}).json()
        assert len(verdict["problems"]) == route.MOST_PROBLEMS
        assert verdict["more"] >= 100 - route.MOST_PROBLEMS
    many = json.dumps({f"key{i}": 0 for i in range(200_000)}).encode()
    for content in (many, iter([many])):
        problem = send(idle.url, "user", "POST", "/v1/config/validate", content=content)
        assert (problem.status, problem.code) == (413, ErrorCode.TOO_LARGE)
        assert str(route.MAX_CONFIG_BYTES) in problem.detail


def test_the_job_goes_on_while_a_config_is_checked(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is held by the test, as by a config that takes long."""
    begun, go_on = threading.Event(), threading.Event()

    def held(data: dict[str, object]) -> Config:
        begun.set()
        assert go_on.wait(PATIENCE)
        return check_config(data)

    monkeypatch.setattr(route, "check_config", held)
    monkeypatch.setattr(route, "VALIDATE_SECONDS", PATIENCE)
    served, trainer, rollout = stage.at_work()

    def validate() -> int:
        with asking(served.url) as http:
            return http.post("/v1/config/validate", json={"train": {}}).status_code

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(validate)
        assert begun.wait(PATIENCE)
        train_step(trainer, rollout, 0)
        monkeypatch.setattr(route, "VALIDATE_SECONDS", 0.1)
        assert validate() == 503, "one at a time, and not for ever"
        go_on.set()
        assert first.result(PATIENCE) == 200
        until(lambda: validate() == 200, "the next one")


def test_people_can_look_at_groups_and_samples(stage: Stage) -> None:
    served, _, rollout = stage.at_work()
    done, other = rollout.lease(2).groups
    rollout.finish([done])
    frame = make_frame(make_header(0, 0))
    with asking(served.url) as http:
        states = {group["id"]: group["state"] for group in http.get("/v1/groups").json()}
        assert states == {done.group_id: "ready", other.group_id: "leased"}
        assert [group["id"] for group in http.get("/v1/groups?state=ready").json()] == [done.group_id]
        assert len(http.get("/v1/groups?limit=1&offset=1").json()) == 1
        assert http.get(f"/v1/groups/{done.group_id}").json()["samples"]["1"]["score"] == 1.0
        assert http.get(f"/v1/samples/{done.group_id}/0").content == frame
        assert http.get(f"/v1/samples/{other.group_id}/0").status_code == 404
        text = http.get("/metrics").text
        assert undocumented_families(text) == set()
        job_id = served.job.job_id
        assert f'cosmos_groups{{job="{job_id}",state="ready"}} 1.0' in text
        assert f'cosmos_phase{{job="{job_id}",phase="training"}} 1.0' in text


def test_a_caller_that_hangs_up_in_its_request_is_no_error(
    idle: ServedController, caplog: pytest.LogCaptureFixture
) -> None:
    url = httpx.URL(idle.url)
    with caplog.at_level(logging.DEBUG, "controller"):
        with socket.create_connection((url.host, url.port), timeout=PATIENCE) as connection:
            token = TOKENS["rollout"]
            head = f"POST /v1/leases HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        until(lambda: "hung up" in caplog.text, "the end of the call")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
