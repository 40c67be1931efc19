"""What a control plane does for the manifests of one job, in the least that they need.

Workloads have as many pods as they should, on the emptiest nodes; pods of a Deployment and a StatefulSet are
restarted where they are, those of a JobSet are made anew, all of them. A Service has the address of a ready pod,
names are in /etc/hosts. KEDA's part is its published formula (`benchmarks.fleet.hpa`), with the number that the
controller says at the URL, and with the token, of the ScaledObject.
"""

from __future__ import annotations

import base64
import itertools
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from benchmarks.fleet.hpa import Hpa
from tests.drill.network import Network, rules
from tests.drill.pod import MACHINE, Pod

T = TypeVar("T")
Object = dict[str, Any]
LABEL = "app.kubernetes.io/component"
TICK, PROBE_S, SYNC_S = 0.1, 0.5, 3.0
"""Seconds between looks: at processes, at Services, at the controller's number (15 in a cluster)."""
EVICTION_S = 5.0
"""From the loss of a node to its pods elsewhere (340 in a cluster, by default)."""
BACKOFF_S = 1.0
"""Before a container is started again (10 in a cluster, and then longer)."""
SPOT_S = 30.0
"""From the notice of a pre-emption to the end of the machine."""


@dataclass
class Workload:
    """A Deployment, a StatefulSet, or a Job of a JobSet. attempt: how often the last one was made anew."""

    name: str
    kind: str
    component: str
    template: Object
    replicas: int
    claims: list[str]
    most: int = 0
    final: list[int] = field(default_factory=list)
    attempt: int = 0
    complete: bool = False
    numbers: itertools.count[int] = field(default_factory=itertools.count)


class Cluster:
    """work: a folder for pods and volumes. nodes: by name. say: gets what happens, in words. images: a folder of
    root file systems by component; a component without one has this machine's."""

    def __init__(
        self,
        manifests: Path,
        work: Path,
        network: Network,
        nodes: list[str],
        say: Callable[[str], None],
        images: Path | None = None,
    ) -> None:
        self.work, self.network, self.say, self.images = work, network, say, images
        self.nodes, self._lost = list(nodes), dict[str, float]()
        read = (
            one
            for path in sorted((manifests / "base").glob("*.yaml"))
            for one in yaml.safe_load_all(path.read_text())
        )
        every: list[Object] = list(read)
        self.objects = [one for one in every if "metadata" in one]
        (self.namespace,) = (one["namespace"] for one in every if one["kind"] == "Kustomization")
        self.pods: list[Pod] = []
        self.gone: list[Pod] = []
        self.missed = 0
        """Looks of the scaler that nobody answered."""
        (config,) = self.of("ConfigMap")
        self.name = str(config["metadata"]["name"]).removesuffix("-config")
        self.services = {one["metadata"]["name"]: network.new_address("service") for one in self.of("Service")}
        self._serving: dict[str, Pod | None] = dict.fromkeys(self.services)
        self.workloads = [found for one in self.objects if (found := _workload(one)) is not None]
        self._probed = self._synced = 0.0

    def of(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    def secret(self, name: str, key: str) -> str:
        (found,) = (one for one in self.of("Secret") if one["metadata"]["name"] == name)
        return str(found.get("stringData", {}).get(key) or base64.b64decode(found["data"][key]).decode())

    def claim(self, name: str) -> Path:
        """The folder of a claim. Every user may write there, as fsGroup lets those of a pod."""
        path = self.work / "claims" / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        return path

    def workload(self, component: str) -> Workload:
        return next(one for one in self.workloads if one.component == component)

    def of_component(self, component: str) -> list[Pod]:
        """Its pods that have not been told to leave."""
        return [pod for pod in self.pods if pod.component == component and pod.leaving is None]

    @property
    def controller(self) -> str:
        """URL of the controller, from this machine."""
        (service,) = (one for one in self.of("Service") if one["metadata"]["name"].endswith("-controller"))
        return f"http://{self.services[service['metadata']['name']]}:{service['spec']['ports'][0]['port']}"

    # ---- time ---------------------------------------------------------------------------------------------

    def until(self, what: str, holds: Callable[[], T], seconds: float = 240.0) -> T:
        """Let time pass until it holds. Raises AssertionError."""
        give_up = time.monotonic() + seconds
        while not (value := holds()):
            assert time.monotonic() < give_up, f"waited {seconds:.0f} s in vain for {what}"
            self.tick()
            time.sleep(TICK)
        return value

    def tick(self) -> None:
        """What all the controllers of a cluster do in a moment."""
        now = time.monotonic()
        for pod in list(self.pods):
            self._look_at(pod, now)
        for workload in self.workloads:
            self._reconcile(workload)
        if now - self._probed >= PROBE_S:
            self._probed = now
            self._serve()
        if now - self._synced >= SYNC_S:
            self._synced = now
            self._scale()

    # ---- pods ---------------------------------------------------------------------------------------------

    def _look_at(self, pod: Pod, now: float) -> None:
        lost = self._lost.get(pod.node)
        if lost is not None:
            if now - lost >= EVICTION_S:
                self._forget(pod)
            return
        code = pod.process.poll()
        if code is None:
            if pod.leaving is not None and now >= pod.leaving:
                self.say(f"{pod.name} is killed at the end of its grace")
                pod.signal(signal.SIGKILL)
            return
        if pod.leaving is not None:
            self.say(f"{pod.name} has left with code {code}")
            self._forget(pod)
            return
        workload = self.workload(pod.component)
        if workload.kind == "JobSet":
            self._job_ended(workload, pod, code)
        elif now - pod.born >= BACKOFF_S:
            self.say(f"{pod.name} ended with code {code} ({pod.message.strip()[:200]}), and is started again")
            pod.born = now
            pod.start()

    def _job_ended(self, workload: Workload, pod: Pod, code: int) -> None:
        self._forget(pod)
        if code == 0:
            self.say(f"{pod.name} is complete: {pod.message}")
            workload.complete = True
            return
        assert code not in workload.final, f"{pod.name} failed for good: {pod.message}"
        workload.attempt += 1
        assert workload.attempt <= workload.most, f"{pod.name} failed {workload.attempt} times: {pod.message}"
        self.say(f"{pod.name} failed with code {code} ({pod.message.strip()[:200]}): all of its Job are made anew")
        for other in self.of_component(workload.component):
            other.leave(float(workload.template["spec"]["terminationGracePeriodSeconds"]))

    def _forget(self, pod: Pod) -> None:
        pod.process.kill()
        pod.process.wait()
        self.pods.remove(pod)
        self.gone.append(pod)
        for name, serving in self._serving.items():
            if serving is pod:
                self._serving[name] = None
        self.network.leave(pod.namespace)

    def delete(self, pod: Pod, grace: float | None = None) -> None:
        """As `kubectl delete pod` does it."""
        pod.leave(float(pod.spec["terminationGracePeriodSeconds"]) if grace is None else grace)

    def lose(self, node: str) -> list[Pod]:
        """A node is gone: cut off and dead at once. Its pods."""
        lost = [pod for pod in self.pods if pod.node == node]
        for pod in lost:
            self.network.cut(pod.namespace)
        for pod in lost:
            pod.signal(signal.SIGKILL)
        self._lost[node] = time.monotonic()
        self.nodes.remove(node)
        return lost

    def _reconcile(self, workload: Workload) -> None:
        if workload.complete:
            return
        known = [pod for pod in self.pods if pod.component == workload.component]
        present = [pod for pod in known if pod.leaving is None and pod.node not in self._lost]
        replaced = workload.kind == "Deployment"  # others wait for the end of what was there
        if len(present) < workload.replicas and (replaced or len(known) == len(present)):
            self._make(workload, present)
        for pod in sorted(present, key=lambda pod: -pod.born)[: max(0, len(present) - workload.replicas)]:
            self.say(f"{pod.name} is one too many")
            self.delete(pod)

    def _make(self, workload: Workload, present: list[Pod]) -> None:
        """Another pod, on the node that has the fewest of this workload, then of all."""
        name = f"{workload.name}-{next(workload.numbers)}"
        number = len(present)
        if workload.kind == "StatefulSet":
            name = f"{workload.name}-{number}"
        node = min(
            self.nodes, key=lambda one: (sum(p.node == one for p in present), sum(p.node == one for p in self.pods))
        )
        folder = self.work / "pods" / f"{name}-{len(self.gone) + len(self.pods)}"
        folder.mkdir(parents=True)
        address = self.network.new_address(workload.component)
        fields = {
            "metadata.name": name,
            "status.podIP": address,
            "metadata.labels['jobset.sigs.k8s.io/job-index']": "0",
            "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(workload.attempt),
            "metadata.labels['batch.kubernetes.io/controller-uid']": f"{workload.name}-{workload.attempt}",
        }
        spec = workload.template["spec"]
        environment = {one["name"]: self._value(one, fields) for one in spec["containers"][0].get("env", [])}
        if workload.kind == "JobSet":
            environment["JOB_COMPLETION_INDEX"] = str(number)
        pod = Pod(
            name=name,
            component=workload.component,
            node=node,
            address=address,
            namespace=self.network.join(address, self._ingress(workload.component)),
            spec=spec,
            environment=environment,
            volumes=self._volumes(workload, spec, name, folder),
            hosts=self._hosts(),
            folder=folder,
            image=self._image(workload.component),
        )
        pod.start()
        self.pods.append(pod)
        self.say(f"{name} starts on {node}")

    def _image(self, component: str) -> Path:
        built = None if self.images is None else self.images / component
        return built if built is not None and built.exists() else MACHINE

    def _value(self, entry: Object, fields: dict[str, str]) -> str:
        if "value" in entry:
            return str(entry["value"])
        source = entry["valueFrom"]
        if "secretKeyRef" in source:
            return self.secret(source["secretKeyRef"]["name"], source["secretKeyRef"]["key"])
        return fields[source["fieldRef"]["fieldPath"]]

    def _volumes(self, workload: Workload, spec: Object, pod: str, folder: Path) -> dict[str, Path]:
        found = {name: self.claim(f"{name}-{pod}") for name in workload.claims}
        for volume in spec["volumes"]:
            name = volume["name"]
            if "persistentVolumeClaim" in volume:
                found[name] = self.claim(volume["persistentVolumeClaim"]["claimName"])
                continue
            found[name] = folder / "volumes" / name
            found[name].mkdir(parents=True)
            found[name].chmod(0o777)
            if "configMap" in volume:
                (source,) = (
                    one for one in self.of("ConfigMap") if one["metadata"]["name"] == volume["configMap"]["name"]
                )
                for file, text in source["data"].items():
                    (found[name] / file).write_text(text)
            if "secret" in volume:
                for item in volume["secret"]["items"]:
                    text = self.secret(volume["secret"]["secretName"], item["key"])
                    (found[name] / item["path"]).write_text(text)
        return found

    def _hosts(self) -> str:
        lines = ["127.0.0.1 localhost"]
        for name, address in self.services.items():
            lines.append(f"{address} {name} {name}.{self.namespace} {name}.{self.namespace}.svc")
        return "\n".join(lines) + "\n"

    def _ingress(self, component: str) -> str:
        """The rules of the NetworkPolicies that select a component; none where no policy does."""
        chosen = [one["spec"] for one in self.of("NetworkPolicy") if component in _components(one["spec"])]
        allowed = [
            ([subnet for peer in rule["from"] for subnet in self._subnets(peer)], port)
            for spec in chosen
            for rule in spec["ingress"]
            for port in [one["port"] for one in rule.get("ports", [])] or [None]
        ]
        return rules(self.network.host, allowed) if chosen else ""

    def _subnets(self, peer: Object) -> list[str]:
        if "namespaceSelector" in peer:
            return [self.network.subnet("keda")]
        return [self.network.subnet(component) for component in _components(peer)]

    # ---- Services and the scaler --------------------------------------------------------------------------

    def _serve(self) -> None:
        """Each Service is where a ready pod is."""
        for service in self.of("Service"):
            name, component = service["metadata"]["name"], service["spec"]["selector"][LABEL]
            if service["spec"].get("clusterIP") == "None":
                continue
            port = service["spec"]["ports"][0]["port"]
            pods = [pod for pod in self.pods if pod.component == component and pod.node not in self._lost]
            for pod in pods:
                pod.ready = pod.process.poll() is None and _is_ready(pod, port)
            now, ready = self._serving[name], [pod for pod in pods if pod.ready]
            new = now if now in ready else (ready[0] if ready else None)
            if new is not now:
                self.network.move(self.services[name], now and now.namespace, new and new.namespace)
                self._serving[name] = new
                self.say(f"{name} is {f'{new.name} on {new.node}' if new else 'nowhere'}")

    def _scale(self) -> None:
        """What KEDA and its HorizontalPodAutoscaler do."""
        for scaled in self.of("ScaledObject"):
            spec = scaled["spec"]
            (trigger,) = spec["triggers"]
            (workload,) = (one for one in self.workloads if one.name == spec["scaleTargetRef"]["name"])
            metric = self._metric(trigger)
            self.missed += metric is None
            behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            tolerance = {float(behavior[way]["tolerance"]) for way in ("scaleUp", "scaleDown")}
            hpa = Hpa(spec["minReplicaCount"], spec["maxReplicaCount"], *tolerance)
            target = float(trigger["metadata"]["targetValue"])
            wanted = hpa.replicas(workload.replicas, None if metric is None else metric / target)
            if wanted != workload.replicas:
                self.say(f"the scaler: {workload.replicas} → {wanted} replicas")
                workload.replicas = wanted

    def _metric(self, trigger: Object) -> float | None:
        asked = trigger["metadata"]
        (authentication,) = (
            one
            for one in self.of("TriggerAuthentication")
            if one["metadata"]["name"] == trigger["authenticationRef"]["name"]
        )
        (parameter,) = authentication["spec"]["secretTargetRef"]
        assert (asked["authMode"], parameter["parameter"]) == ("bearer", "token")
        token = self.secret(parameter["name"], parameter["key"])
        url = httpx.URL(asked["url"])
        at = url.copy_with(host=self.services[url.host.split(".")[0]])
        try:
            with httpx.Client(transport=httpx.HTTPTransport(local_address=self.network.keda), timeout=2.0) as http:
                answer = http.get(at, headers={"authorization": f"Bearer {token}", "host": url.netloc.decode()})
        except httpx.HTTPError:
            return None
        if answer.is_error:
            assert answer.status_code in (502, 503), answer.text
            return None
        found: Any = answer.json()
        for part in asked["valueLocation"].split("."):
            found = found[part]
        return float(found)

    # ---- the end ------------------------------------------------------------------------------------------

    def clear(self) -> dict[str, int | None]:
        """Tell all pods to leave, as `kubectl delete` does; the codes with which they ended, by name."""
        for workload in self.workloads:
            workload.complete = True
        last = ["controller", "redis"]
        codes: dict[str, int | None] = {}
        for component in [*sorted({pod.component for pod in self.pods} - set(last)), *last]:
            pods = [pod for pod in self.pods if pod.component == component and pod.node not in self._lost]
            for pod in pods:
                self.delete(pod)
            self.until(f"the end of {component}", lambda pods=pods: not any(pod in self.pods for pod in pods))  # type: ignore[misc]
            codes |= {pod.name: pod.process.returncode for pod in pods}
        return codes

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.signal(signal.SIGKILL)
            pod.process.kill()
            pod.process.wait()


def _workload(one: Object) -> Workload | None:
    kind, name = one["kind"], one["metadata"]["name"]
    if kind not in ("Deployment", "StatefulSet", "JobSet"):
        return None
    component, spec = one["metadata"]["labels"][LABEL], one["spec"]
    if kind != "JobSet":
        claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
        return Workload(name, kind, component, spec["template"], spec.get("replicas", 1), claims)
    (job,) = spec["replicatedJobs"]
    assert job["replicas"] == 1
    work = job["template"]["spec"]
    (rule,) = work["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    final = rule["onExitCodes"]["values"]
    most = spec["failurePolicy"]["maxRestarts"]
    return Workload(name, kind, component, work["template"], work["parallelism"], [], most, final)


def _components(spec: Object) -> list[str]:
    chosen = spec["podSelector"]
    (among,) = chosen["matchExpressions"]
    assert (among["key"], among["operator"]) == (LABEL, "In")
    return list(among["values"])


def _is_ready(pod: Pod, port: int) -> bool:
    probe = pod.container["readinessProbe"]
    try:
        if "httpGet" in probe:
            return httpx.get(f"http://{pod.address}:{port}{probe['httpGet']['path']}", timeout=1.0).is_success
        socket.create_connection((pod.address, port), 1.0).close()
        return True
    except (httpx.HTTPError, OSError):
        return False
