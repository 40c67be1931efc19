"""What happens to the job of the drill, and what it does meanwhile.

The load rises, and the scaler starts replicas; a share of all pods is pre-empted, first with notice, then without;
the controller is moved to another node; a node is gone; the load falls, and replicas leave; the job ends.
"""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from controller.client import Client, ControllerError
from controller.client import calls as api
from schema.wire import event_file
from schema.wire.messages import EventKind, Phase
from schema.wire.messages.autoscale import AutoscaleStatus
from tests.chaos.judge import Evidence, Resumed, Shape, judge, parse
from tests.drill.cluster import SPOT_S, Cluster
from tests.drill.network import Network
from tests.drill.pod import Pod
from tests.e2e.loaded import loaded, put_load
from tests.e2e.program import GROUPS, command, write_config

T = TypeVar("T")
MOUNT = "/cosmos"
BOUND = 2
LOADS = (0.02, 0.3, 0.0)
"""Seconds of a reward, one at a time in each replica: at the start, at the peak, at the end."""
SHARE = 0.3
"""Of the pods that are pre-empted at once."""
NODES = ["node-a", "node-b", "node-c", "node-d"]
LONG = 600.0


@dataclass(frozen=True)
class Plan:
    """positions: groups of the data, each trained once. most: rollout replicas. standby: `kubernetes.standby`.
    images: see `cluster.Cluster`."""

    positions: int = 1600
    most: int = 5
    seed: int = 0
    images: Path | None = None
    standby: bool = False


@dataclass
class Struck:
    """One thing that happened. began: Unix time. gap: longest time without a step. whole: seconds until as many
    replicas worked as were wanted, and a step was trained."""

    what: str
    pods: list[str]
    began: float
    whole: float = 0.0
    gap: float = 0.0


@dataclass
class Outcome:
    """violations: of `tests.chaos.judge` and of the pods' ends."""

    struck: list[Struck] = field(default_factory=list)
    scaled: list[tuple[float, int, int]] = field(default_factory=list)
    """Unix time, wanted and working replicas, every second."""
    totals: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


class Drill:
    """folder: empty; its model is made before (`examples.quickstart.make_model`). say: gets lines as they happen."""

    def __init__(self, folder: Path, model: Path, plan: Plan, say: Callable[[str], None]) -> None:
        self.folder, self.plan, self.say = folder, plan, say
        self.random = random.Random(plan.seed)
        self.outcome = Outcome()
        manifests = _render(folder, model, plan)
        self.network = Network()
        self.cluster = Cluster(manifests, folder / "cluster", self.network, NODES, say, plan.images)
        self.volume = self.cluster.claim(f"{self.cluster.name}-runs")
        for path in (folder / "job").iterdir():
            path.rename(self.volume / path.name)
        self._sampled = 0.0

    # ---- looking ------------------------------------------------------------------------------------------

    def ask(self, call: Any) -> Any:
        """The controller's answer; None while it is away."""
        token = self.cluster.secret(f"{self.cluster.name}-tokens", "user")
        try:
            with Client(self.cluster.controller, token, patience=1.0) as client:
                return client.send(call)
        except ControllerError:
            return None

    def scaling(self) -> AutoscaleStatus | None:
        found: AutoscaleStatus | None = self.ask(api.autoscale())
        return found

    def until(self, what: str, holds: Callable[[], T]) -> T:
        """Let time pass until it holds, and note each second how many replicas are wanted and work."""

        def look() -> T:
            if time.time() - self._sampled >= 1.0:
                self._sampled = time.time()
                if (found := self.scaling()) is not None:
                    self.outcome.scaled.append((self._sampled, found.desired, found.working))
            return holds()

        return self.cluster.until(what, look, LONG)

    def step(self) -> int:
        status = self.ask(api.job())
        return -1 if status is None else int(status.step)

    def until_whole(self, steps: int = 3) -> None:
        """Until all wanted replicas work, and some more steps have been trained."""
        first = self.until("the controller", lambda: self.step() + 1) - 1
        self.until("the wanted replicas", self._is_whole)
        self.until("further steps", lambda: self.step() >= first + steps)

    def _is_whole(self) -> bool:
        found = self.scaling()
        pods = self.cluster.of_component("rollout")
        return found is not None and found.working >= min(found.desired, len(pods)) >= 1 and not self._missing()

    def _missing(self) -> bool:
        return any(len(self.cluster.of_component(one.component)) < one.replicas for one in self.cluster.workloads)

    # ---- what happens -------------------------------------------------------------------------------------

    def strike(self, what: str, pods: list[Pod], act: Callable[[], object]) -> None:
        """Let something happen, and wait until the job is whole again."""
        names = [f"{pod.name} on {pod.node}" for pod in pods]
        self.say(f"== {what}: {', '.join(names)}")
        struck = Struck(what, [pod.component for pod in pods], time.time())
        act()
        self.until_whole()
        struck.whole = time.time() - struck.began
        self.outcome.struck.append(struck)

    def some(self) -> list[Pod]:
        """A share of all pods, drawn."""
        pods = [pod for pod in self.cluster.pods if pod.leaving is None]
        return self.random.sample(pods, math.ceil(SHARE * len(pods)))

    def preempt(self, pods: list[Pod], notice: float) -> None:
        for pod in pods:
            if notice:
                self.cluster.delete(pod, notice)
            else:
                pod.signal(signal.SIGKILL)

    def in_charge(self) -> list[Pod]:
        """The controller that serves; any where none does."""
        pods = self.cluster.of_component("controller")
        return [pod for pod in pods if pod.ready][:1] or pods[:1]

    def move_controller(self) -> None:
        """To another node: it is drained, and nothing new comes to it meanwhile."""
        (pod, *_) = self.in_charge()
        self.cluster.nodes.remove(pod.node)
        self.cluster.delete(pod)
        self.cluster.tick()
        self.cluster.nodes.append(pod.node)

    def stop(self, pod: Pod) -> None:
        """Let its worker stand still, until its pod has found that out, or was one too many."""
        starts = pod.starts
        pod.worker().send_signal(signal.SIGSTOP)
        self.until(
            "the end of a worker that stands still", lambda: pod.starts > starts or pod not in self.cluster.pods
        )

    def busiest(self) -> str:
        """The node with the most pods, of those the one with a pod of the policy."""
        pods = self.cluster.pods
        return max(
            self.cluster.nodes,
            key=lambda node: (
                sum(p.node == node for p in pods),
                any(p.component == "policy" for p in pods if p.node == node),
            ),
        )

    def load(self, seconds: float, what: str, holds: Callable[[AutoscaleStatus], bool]) -> None:
        """Another load, until the number of replicas is as it should be then."""
        self.say(f"== a reward takes {seconds:g} s")
        struck = Struck(what, [], time.time())
        put_load(self.volume / "job.toml", seconds)

        def is_there() -> bool:
            found = self.scaling()
            return found is not None and holds(found)

        self.until(what, is_there)
        struck.whole = time.time() - struck.began
        self.outcome.struck.append(struck)

    def refused(self) -> None:
        """What NetworkPolicies forbid does not work, and what they allow does."""
        (rollout, *_), redis = self.cluster.of_component("rollout"), f"{self.cluster.name}-redis"
        port = int(self.cluster.controller.rpartition(":")[2])
        for service, number, opens in ((redis, 6379, False), (f"{self.cluster.name}-controller", port, True)):
            code = f"import socket; socket.create_connection(({self.cluster.services[service]!r}, {number}), 2)"
            line = ["ip", "netns", "exec", rollout.namespace, sys.executable, "-S", "-c", code]
            ended = subprocess.run(line, capture_output=True, check=False)
            if (ended.returncode == 0) is not opens:
                self.outcome.violations.append(f"{rollout.name} reaches {service}: {not opens}")

    def run(self) -> Outcome:
        """The whole script. Raises AssertionError where something never comes."""
        most = self.plan.most
        with self.network, self.cluster:
            put_load(self.volume / "job.toml", LOADS[0])
            self.until("step 3", lambda: self.step() >= 3)
            self.refused()
            self.load(LOADS[1], "the load rises", lambda found: found.working >= most)
            some = self.some()
            self.strike("pre-empted with notice", some, lambda: self.preempt(some, SPOT_S))
            other = self.some()
            self.strike("killed", other, lambda: self.preempt(other, 0.0))
            self.strike("controller moved", self.in_charge(), self.move_controller)
            (stopped, *_) = self.cluster.of_component("rollout")
            self.strike("a worker stands still", [stopped], lambda: self.stop(stopped))
            node = self.busiest()
            lost = [pod for pod in self.cluster.pods if pod.node == node]
            self.strike("a node is gone", lost, lambda: self.cluster.lose(node))
            self.load(LOADS[2], "the load falls", lambda found: found.replicas <= most // 2)
            self.until("the end of the job", lambda: self.cluster.workload("policy").complete)
            self.finish()
        return self.outcome

    # ---- what came of it ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Judge the run, then let all pods leave."""
        status = self.until("the controller", lambda: self.ask(api.job()))
        ledger = self.until(
            "the last leases", lambda: (found := self.ask(api.ledger())) and not found.states["leased"] and found
        )
        steps = self.until("the steps", lambda: self.ask(api.steps()))
        summary = {
            "outcome": "finished" if status.phase is Phase.FINISHED else status.phase,
            "status": status.model_dump(mode="json"),
            "ledger": ledger.model_dump(mode="json"),
            "steps": [one.model_dump(mode="json") for one in steps],
        }
        pods = sorted([*self.cluster.gone, *self.cluster.pods], key=lambda pod: pod.born)
        witness = parse(
            line
            for pod in pods
            if pod.component == "policy"
            for line in pod.log.read_text(errors="replace").splitlines()
        )
        shape = Shape(self.plan.positions, 1, GROUPS, 4, BOUND)
        codes = self.cluster.clear()
        left = [f"{name} ended with code {code}" for name, code in codes.items() if code]
        self.outcome.violations += judge(Evidence(0, summary, witness, left), shape)
        run = self.volume / "run"
        events = list(event_file.read(event_file.path_of(run)))
        at = sorted(event.at for event in events if event.kind is EventKind.STEP)
        for struck in self.outcome.struck:
            end = struck.began + struck.whole
            times = [struck.began, *(one for one in at if struck.began <= one <= end), end]
            struck.gap = max(b - a for a, b in pairwise(times))
        self.outcome.totals = {
            "seconds": round(at[-1] - at[0], 1),
            "steps": len(steps),
            "groups": ledger.states["trained"] + ledger.states["durable"],
            "dropped": sum(ledger.dropped.values()),
            "over_bound": ledger.over_bound,
            "max_staleness": ledger.max_staleness,
            "resumed": sum(isinstance(one, Resumed) for one in witness),
            "steps_trained_again": sum(not isinstance(one, Resumed) for one in witness) - len(steps),
            "pods": len(pods),
            "containers": sum(pod.starts for pod in pods),
            "scaler_without_answer": self.cluster.missed,
        }


def _render(folder: Path, model: Path, plan: Plan) -> Path:
    """The manifests of a job whose files are in `folder`/job, and in a pod at `MOUNT`. Where they are."""
    job, manifests = folder / "job", folder / "manifests"
    job.mkdir(parents=True)
    (job / "model").symlink_to(model)
    config = write_config(job, job / "model", steps=plan.positions, rows=plan.positions, validation=False)
    loaded(config, max_replicas=plan.most, interval=2.0, scale_down_delay=8.0)
    (job / "model").unlink()
    subprocess.run(["cp", "-r", str(model), str(job / "model")], check=True)
    subprocess.run(["chmod", "-R", "a+rX", str(job)], check=True)
    config.write_text(config.read_text().replace(str(job), MOUNT))
    own = {
        "kubernetes.image": json.dumps("registry.example.com/cosmos-launch:0.1.0"),
        "placement.gpus_per_node": "0",
        "policy.parallelism.dp_shard_size": "1",
        "kubernetes.pod_cpus": "1",
        "kubernetes.standby": str(plan.standby).lower(),
        "train.ckpt.enable_checkpoint": "true",
        "train.ckpt.save_freq": "20",
        "controller.heartbeat_timeout": "10.0",
    }
    written = [f"--set={key}={value}" for key, value in own.items()]
    answer = command("--config", config, *written, "--target", "kubernetes", "-o", manifests)
    assert answer.returncode == 0, answer.stderr
    return manifests
