"""One rank that publishes what a script says: `python -m tests.policy_worker.publish_program OUT SCRIPT`.

The controller, its store and the process group are real; only the training is the script's. SCRIPT is JSON, a list of

    compare      find what has changed as on a GPU with a copy of what was announced
    touch n      change every n-th element of what this rank has of each parameter
    publish      take a snapshot, which must begin a publication; rank 0 writes what it must contain to OUT
    owe          the same, but the publication before is still on its way
    settle       wait until everything is announced
    catch up     wait as for a batch, and publish what is owed
    hold, release    the store is a file, and is a directory again
    ask          replicas wait for a full version
    report       a replica has reported that it cannot read the newest publication
    fail         publishing must fail: write the error to OUT
    leave        this replica is asked to leave
    stopped      wait until publishing has been given up
    exhaust      no memory is left for a full form any more
    die          end without a word
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from controller.client import Client
from controller.client import calls as api
from policy_worker.model.model import DTYPES
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import Environment, RankEnvironment, ShutdownRequest
from policy_worker.replicas.base import Registration
from policy_worker.session import Session
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from policy_worker.weights import release as publish_release
from policy_worker.weights.publisher import Publisher
from schema.config import Config
from schema.wire import messages as m
from tests.policy_worker.material import tiny_model
from tests.support.controller import TOKENS
from tests.support.waiting import until
from weight_sync import hub_tensors
from weight_sync.publishing.device_copy import DeviceCopy


class Program:
    """All ranks run the same script."""

    def __init__(self, out: Path) -> None:
        self._out, self._shutdown = out, ShutdownRequest()
        self.group = RankGroup(RankEnvironment.of_environ())
        environment = Environment.of_environ()
        self.session = Session(environment, self._shutdown, self.group.world) if self.group.leads else None
        register = None if self.session is None else self.session.register
        reported = self.group.lead(lambda: register(0).model_dump(mode="json") if register else None)
        reply = m.RegisterReply.model_validate(reported)
        config = Config.model_validate(reply.config)
        self._dtype = DTYPES[config.train.effective_transfer_dtype]
        self._trainer = Trainer(tiny_model(), config, self.group, Schedule(10))
        self._store = Path(reply.weight_store)
        registration = Registration(config, reply, self._trainer, self.session, self._shutdown)
        self.publisher = Publisher(registration)
        self._expected = 0
        self._url = environment.url

    def run(self, line: str) -> None:
        words = line.split()
        getattr(self, "_".join(word for word in words if not word.isdigit()))(
            *[int(word) for word in words if word.isdigit()]
        )

    def compare(self) -> None:
        self.publisher._shadow._on_device = DeviceCopy(lambda _: 2**30, smallest=0)

    def touch(self, n: int) -> None:
        with torch.no_grad():
            for parameter in self._trainer.model.parameters():
                local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.view(-1)[::n] *= 1.25

    def publish(self) -> None:
        expected = {name: t.clone() for name, t in hub_tensors(self._trainer.model.lm, dtype=self._dtype)}
        assert self.publisher.publish(0)
        if self.group.leads:
            save_file(expected, self._out / f"expected-{self._expected}.safetensors")
        self._expected += 1

    def owe(self) -> None:
        assert not self.publisher.publish(0)
        assert self.publisher.owed

    def settle(self) -> None:
        settled = self.publisher.settle(1.0)
        if self.group.leads:
            (self._out / "settled").write_text(str(settled))

    def catch_up(self) -> None:
        assert self.publisher.owed
        while max(self.group.gather(self.publisher.signals()[1])):
            time.sleep(0.01)
        self.publish()
        assert not self.publisher.owed

    def hold(self) -> None:
        self.group.barrier()
        if self.group.leads:
            if self._store.exists():
                self._store.rename(self._store.with_name("away"))
            self._store.touch()
        self.group.barrier()

    def exhaust(self) -> None:
        def write_full(*_: object) -> None:
            raise MemoryError("no memory for a full form")

        publish_release.write_full = write_full  # type: ignore[assignment]

    def release(self) -> None:
        if self.session is not None:
            until(lambda: "cannot be written" in self.publisher.trouble(), "a trouble that is reported")
            self._store.unlink()
            away = self._store.with_name("away")
            if away.exists():
                away.rename(self._store)
        self.group.barrier()

    def ask(self) -> None:
        if self.session is not None:
            self.session.anchor_asked = True

    def report(self) -> None:
        if self.session is None:
            return
        with Client(self._url, TOKENS["rollout"]) as client:
            who = client.send(api.register(m.RegisterRequest(request_id=uuid.uuid4().hex, role="rollout", name="r")))
            newest = client.send(api.latest_publication())
            assert newest is not None
            report = m.UpdateReport(
                replica_id=who.replica_id, incarnation=who.incarnation, status="unreadable", detail="torn"
            )
            client.send(api.report_update(newest.id, report))

    def fail(self) -> None:
        try:
            self.publisher.settle(0.0)
        except Exception as error:
            (self._out / f"error-{self.group.rank}").write_text(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("nothing failed")

    def leave(self) -> None:
        self._shutdown.request("signal SIGTERM")

    def stopped(self) -> None:
        until(lambda: bool(self.publisher.signals()[0]), "publishing that is given up")
        self.group.barrier()

    def die(self) -> None:
        os._exit(9)

    def end(self) -> None:
        self.publisher.close()
        if self.session is not None:
            publications = [p.model_dump() for p in self.session.history.claim()["publications"]]
            (self._out / "publications.json").write_text(json.dumps(publications))
            (self._out / "metrics.json").write_text(json.dumps(self.publisher.metrics))
            self._shutdown.request("done")
            self.session.leave("done")
        self.group.close()


def main() -> None:
    torch.set_num_threads(1)
    program = Program(Path(sys.argv[1]))
    for line in json.loads(sys.argv[2]):
        program.run(line)
    program.end()


if __name__ == "__main__":
    main()
