"""A teacher behind a real HTTP server: the same numbers as a local one, and every way in which it can fail."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from policy_worker.errors import TeacherError
from policy_worker.model.micro_batch import TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.training.teacher_client import TeacherClient
from schema.config.sections.teacher import TeacherConfig
from tests.policy_worker.material import VOCABULARY, encode_step, make_config, random_samples, tiny_lm
from tests.policy_worker.training.test_grpo import assert_equal_gradients, make_grpo, trained
from tests.rollout_worker.tiny import random_model, save_model, tokenizer
from tests.support.certificates import make_certificates
from tests.support.ports import free_port
from tests.support.teacher_server import SERVED, TeacherServer, teacher_server
from tests.support.waiting import until

LOSSES: list[dict[str, Any]] = [
    {"loss": "reverse_kl_advantage"},
    {"loss": "reverse_kl_k2"},
    {"loss": "top_k_jsd", "top_k": 4},
]


@pytest.fixture(scope="module")
def running() -> Iterator[TeacherServer]:
    with teacher_server(tiny_lm(seed=2), tokenizer()) as server:
        yield server


@pytest.fixture
def server(running: TeacherServer) -> Iterator[TeacherServer]:
    """A server that does as it should, until the test says otherwise."""
    running.fault, running.seen = "", []
    yield running
    running.fault = ""


def client_of(server: TeacherServer, **keys: Any) -> TeacherClient:
    teacher = TeacherConfig(name="far", url=server.url, served_model=SERVED, **keys)
    return TeacherClient(teacher, VOCABULARY)


def asked(client: TeacherClient) -> TeacherClient:
    client.ask({row: TrainSample.of_wire(sample) for row, sample in enumerate(random_samples(3))})
    return finished(client)


def finished(client: TeacherClient) -> TeacherClient:
    try:
        until(lambda: client.advance(0.05) or client.is_done, "the answers of a teacher")
    finally:
        client.close()
    return client


@pytest.mark.parametrize("keys", LOSSES, ids=lambda keys: keys["loss"])
def test_it_teaches_what_a_local_model_teaches(group: RankGroup, server: TeacherServer, keys: dict[str, Any]) -> None:
    samples = random_samples(8, n_masked=1)
    far = [{"name": "one", "url": server.url, "served_model": SERVED, **keys}]
    metrics, gradients = trained(group, samples, {}, teacher=far)
    near, expected = trained(group, samples, {}, teacher=[{"name": "one", "model": "unused", **keys}])
    assert_equal_gradients(expected, gradients, 1e-5)
    assert metrics["teacher/one/kl"] == pytest.approx(near["teacher/one/kl"], rel=1e-4)
    body, key = server.seen[0]
    assert (body["max_tokens"], body["prompt_logprobs"], key) == (1, keys.get("top_k", 0), None)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other tokens", r"position \d+: it was sent token \d+, and answers of \d+"),
        ("fewer tokens", r"it was sent \d+ tokens, and answers of \d+"),
        ("above zero", r"position \d+: 0.5 is not a log-prob: it is above 0"),
        ("nan", r"position \d+: null is not a log-prob"),
        ("no log-probs", "its answer has no prompt_logprobs"),
        ("endless", r"POST /v1/completions is answered with more than \d+ bytes"),
        ("compressed", "POST /v1/completions is answered with compressed data"),
        ("deep", "POST /v1/completions is not answered with a JSON object"),
        ("refuses", "POST /v1/completions is refused with HTTP 400: .*--max-logprobs"),
    ],
)
def test_an_answer_of_something_else_is_an_error_by_name(server: TeacherServer, fault: str, message: str) -> None:
    server.fault = fault
    with pytest.raises(TeacherError, match=rf"^teacher far \({server.url}\): {message}"):
        asked(client_of(server))


def test_too_few_likeliest_tokens(server: TeacherServer) -> None:
    """As a server answers that caps what it is asked for."""
    original = server._entries
    server._entries = lambda body: original({**body, "prompt_logprobs": 2})
    try:
        with pytest.raises(TeacherError, match=r"position \d+: [23] tokens for top_k = 5"):
            asked(client_of(server, loss="top_k_jsd", top_k=5))
    finally:
        server._entries = original


@pytest.mark.parametrize("how", ["away", "500", "slow"])
def test_an_outage_is_a_pause(server: TeacherServer, how: str) -> None:
    """It says whom it waits for, goes on when the teacher is back, and ends with the same numbers."""
    expected = asked(client_of(server)).found
    keys = {"timeout": 0.2} if how == "slow" else {}
    if how == "away":
        server.stop()
    server.fault, server.delay = "" if how == "away" else how, 1.0
    client = client_of(server, **keys)
    client.ask({row: TrainSample.of_wire(sample) for row, sample in enumerate(random_samples(3))})
    try:
        until(lambda: client.advance(0.05) or client.trouble, "an outage")
        reason = {"away": "ConnectError", "500": "HTTP 500", "slow": "ReadTimeout"}[how]
        assert client.trouble.startswith(f"waits for teacher far ({server.url}): {reason}")
        assert "since" in client.trouble
        assert not client.is_done
        assert client.found == {}, "nothing is made up"
    finally:
        if how == "away":
            server.start()
        server.fault = ""
    found = finished(client).found
    assert client.trouble == ""
    assert all(torch.equal(found[row].logprobs, expected[row].logprobs) for row in expected)


def test_training_leaves_while_a_teacher_is_away(group: RankGroup, server: TeacherServer) -> None:
    """The step is not trained: it is polled for again, and the loop sees the request first."""
    server.fault = "500"
    samples = random_samples(8)
    config = make_config({}, teacher=[{"name": "far", "url": server.url, "served_model": SERVED}])
    algorithm = make_grpo(group, config, encode_step(samples))
    shutdown, said = ShutdownRequest(), []
    algorithm.teachers.shutdown, algorithm.teachers.say = shutdown, said.append
    watcher = threading.Thread(target=lambda: until(lambda: said, "a status") and shutdown.request("SIGTERM"))
    watcher.start()
    before = [p.detach().clone() for p in algorithm._trainer.model.parameters()]
    assert algorithm.train_on(algorithm.poll(0, 0.0)) is None
    watcher.join()
    assert said[0].startswith(f"waits for teacher far ({server.url}): HTTP 500")
    assert all(torch.equal(a, b) for a, b in zip(before, algorithm._trainer.model.parameters(), strict=True))
    server.fault = ""
    shutdown._event.clear()
    assert algorithm.train_on(algorithm.poll(0, 0.0))["teacher/far/tokens"] > 0


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def meet(server: TeacherServer, tokenize: Any = encode, longest: int = 100, **keys: Any) -> None:
    client = TeacherClient(TeacherConfig(name="far", url=server.url, **keys), VOCABULARY)
    client.meet(tokenize, longest)
    finished(client)


def test_a_teacher_is_looked_at_before_the_start(server: TeacherServer) -> None:
    meet(server)
    meet(server, served_model=SERVED)
    with pytest.raises(TeacherError, match="it does not serve 'other', but tiny"):
        meet(server, served_model="other")
    with pytest.raises(TeacherError, match="it takes 4096 tokens, and a sample of 4096 needs 4097"):
        meet(server, longest=4096)
    with pytest.raises(TeacherError, match="it has another tokenizer: a text of 3 tokens here is"):
        meet(server, lambda text: [1, 2, 3])


def test_a_server_without_tokenize_is_taken() -> None:
    with teacher_server(tiny_lm(seed=2)) as server:
        meet(server, lambda text: [1, 2, 3])


def test_no_proxy_gets_what_goes_to_a_plain_teacher(server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://me:secret@127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert asked(client_of(server)).found
    far = TeacherClient(TeacherConfig(name="far", url="https://teacher.example.com"), VOCABULARY)
    far.meet(encode, 100)
    until(lambda: far.advance(0.05) or far.trouble, "what it waits for")
    assert "through the proxy 127.0.0.1:9 of https_proxy" in far.trouble
    far.give_up()
    far.close()


def test_a_certificate_that_nobody_vouches_for_is_no_outage(tmp_path: Path) -> None:
    with (
        teacher_server(tiny_lm(seed=2), certificates=make_certificates(tmp_path)) as server,
        pytest.raises(TeacherError, match="its certificate is not trusted"),
    ):
        meet(server)


def test_the_key_is_sent_and_never_said(
    group: RankGroup, server: TeacherServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "s3cret-of-mine")
    caplog.set_level(logging.DEBUG)
    far = [{"name": "one", "url": server.url, "served_model": SERVED, "key_variable": "TEACHER_KEY"}]
    trained(group, random_samples(4), {}, teacher=far)
    assert {key for _, key in server.seen} == {"Bearer s3cret-of-mine"}
    server.fault = "refuses"
    with pytest.raises(TeacherError) as error:
        trained(group, random_samples(4), {}, teacher=far)
    assert "s3cret" not in caplog.text + str(error.value)
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(TeacherError, match=r"the variable TEACHER_KEY \(key_variable\) is not set"):
        trained(group, random_samples(4), {}, teacher=far)


@pytest.mark.soak
def test_it_agrees_with_vllm(tmp_path: Path) -> None:
    """The real server, which is not there yet when it is first asked; log-probs as of transformers."""
    pytest.importorskip("vllm")
    model, port = random_model(1), free_port()
    path = save_model(tmp_path / "model", model)
    program = ["vllm.entrypoints.openai.api_server", "--model", str(path), "--port", str(port)]
    options = ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", *program, *options]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server,
    ):
        try:
            teacher = TeacherConfig(
                name="far", url=f"http://127.0.0.1:{port}", loss="top_k_jsd", top_k=5, timeout=10.0
            )
            client = TeacherClient(teacher, 258)
            client.meet(encode, 200)
            until(lambda: client.advance(0.2) or client.is_done or server.poll() is not None, "vLLM")
            assert server.poll() is None, (tmp_path / "log").read_text()[-2000:]
            samples = random_samples(5)
            client.ask({row: TrainSample.of_wire(sample) for row, sample in enumerate(samples)})
            finished(client)
        finally:
            server.terminate()
    for row, sample in enumerate(samples):
        ids = torch.from_numpy(sample.token_ids.astype("int64"))
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0], 1)
        learned = [i for i in range(1, len(ids)) if sample.loss_mask[i]]
        own = torch.stack([log_p[i - 1, ids[i]] for i in learned])
        top = log_p[[i - 1 for i in learned]].topk(5).values
        assert torch.allclose(client.found[row].logprobs, own, atol=1e-4)
        assert torch.allclose(client.found[row].top.logprobs, top, atol=1e-4)
