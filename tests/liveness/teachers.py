"""Probes of teachers: what each adds to a step, where it is kept, and how a server of one is asked."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

from policy_worker.model.micro_batch import TrainSample
from policy_worker.training.teacher_client import TeacherClient
from policy_worker.training.teachers import _key
from schema.config import Config
from tests.liveness.probe import Made, Place, With, under, watch
from tests.liveness.trained import MODELS, gradient, gradient_over, grpo_of, sharded_modules, trainer_of, unclipped
from tests.policy_worker.material import from_sources, random_samples, tiny_lm, train_step, write_model
from tests.support.teacher_server import TeacherServer, teacher_server
from tests.support.waiting import until


def with_teacher(place: Place, **keys: Any) -> dict[str, Any]:
    data = unclipped(place)
    data["policy"]["model_name_or_path"] = str(write_model(place.directory(), 0))
    data["teacher"] = [{"name": "one", "model": str(write_model(place.directory(), 3)), **keys}]
    return data


def by_divergence(place: Place) -> dict[str, Any]:
    return with_teacher(place, loss="top_k_jsd", top_k=3)


def teacher_metrics(config: Config, place: Place) -> list[str]:
    """Names of the metrics that speak of teachers."""
    return sorted(name for name in train_step(grpo_of(config, place)[0], 0) if name.startswith("teacher/"))


def place_of_a_teacher(config: Config, place: Place) -> list[str]:
    """Where FSDP keeps the weights of a teacher between its passes; nothing where it does not shard it."""
    (model,) = trainer_of(config, place).teachers.values()
    return [type(kept.offload_policy).__name__ for _, kept in sharded_modules(model)]


def request_to_a_teacher(config: Config, place: Place) -> list[Any]:
    """Which server is asked, for which model, with which key, and whether an answer after a while is waited for."""
    (teacher,) = config.teacher
    samples = {0: TrainSample.of_wire(random_samples(1)[0])}
    port = teacher.url.rpartition(":")[2]
    server, found = _servers(place)[int(port)], []
    server.seen, server.fault, server.delay = [], "slow", 0.5
    with patch.dict(os.environ, {"KEY_A": "a", "KEY_B": "b"}):
        client = TeacherClient(teacher, 61, _key(teacher))
        client.ask(samples)
        until(lambda: client.advance(0.05) or client.is_done or client.trouble, "an answer or a time-out")
        found = [port, client.is_done, *((body["model"], key) for body, key in server.seen[:1])]
        client.close()
    server.fault = ""
    return found


def _servers(place: Place) -> dict[int, TeacherServer]:
    if not hasattr(place, "teacher_servers"):
        servers = [place.stack.enter_context(teacher_server(tiny_lm(3))) for _ in range(2)]
        place.teacher_servers = {server.port: server for server in servers}
    return place.teacher_servers


def _address(number: int) -> Made:
    return Made(lambda place: list(_servers(place).values())[number].url)


def with_server(place: Place) -> dict[str, Any]:
    data = unclipped(place)
    data["teacher"] = [{"name": "far", "url": _address(0).make(place), "served_model": "a"}]
    return data


gradient_of_sources = gradient_over(lambda samples: from_sources(samples, ["math", "code"]), "gradient_of_sources")
watch(gradient, with_teacher, under("teacher", model=MODELS, weight=(1.0, 0.5)))
watch(gradient_of_sources, with_teacher, under("teacher", source=(["math"], ["math", "code"])))
other_loss = With("reverse_kl_k2", {"teacher.top_k": 20})
watch(gradient, by_divergence, under("teacher", loss=("top_k_jsd", other_loss), top_k=(3, 7), beta=(0.5, 0.2)))
watch(teacher_metrics, with_teacher, under("teacher", name=("one", "two")))
watch(place_of_a_teacher, with_teacher, under("teacher", offload=(False, True)))
watch(
    request_to_a_teacher,
    with_server,
    under(
        "teacher",
        url=(_address(0), _address(1)),
        served_model=("a", "b"),
        key_variable=("KEY_A", "KEY_B"),
        timeout=(60.0, 0.1),
    ),
)
