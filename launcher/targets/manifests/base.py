"""Parts that all objects share: names, labels, containers that need no privilege, the volumes of pods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.plan.pods import Pods
from launcher.plan.rundir import RunTokens
from schema.config import Config

Manifest = dict[str, Any]

CONFIG_FOLDER = "/etc/cosmos"
SECRET_FOLDER = "/run/cosmos"  # noqa: S105 - a folder in memory, that a container keeps its replica's secret in
USER, VALKEY_USER = 1000, 999
"""Numbers of the users in the containers: not root, whatever their images say."""
GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Kind:
    """The cluster's names of objects of a kind."""

    api: str
    kind: str
    plural: str


DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
GROUPS = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")


@dataclass(frozen=True)
class ClusterJob:
    """A job to render. config: as the pods read it, with `run_dir` in it and absolute paths; config_json: its text.

    port: of the controller. redis_url: of a named server, with what it holds of credentials; empty: the job's own.
    """

    name: str
    config: Config
    config_json: str
    pods: Pods
    port: int
    tokens: RunTokens
    redis_password: str
    redis_url: str = ""

    @property
    def own_redis(self) -> bool:
        """Whether the job has a server of its own."""
        return not self.redis_url

    @property
    def url(self) -> str:
        """The address of the controller, for pods of any namespace."""
        namespace = self.config.kubernetes.namespace
        return f"{self.config.controller.scheme}://{self.name}-controller.{namespace}.svc:{self.port}"

    @property
    def scaled(self) -> Kind:
        """The kind of object that holds the rollout replicas, and has their number."""
        return DEPLOYMENT if self.pods.rollout_pods == 1 else GROUPS

    @property
    def checksum(self) -> str:
        """The digest of the configuration: a Deployment starts its pods again when it changes."""
        return hashlib.blake2b(self.config_json.encode(), digest_size=8).hexdigest()


def labels(job: ClusterJob, component: str = "") -> dict[str, str]:
    """Return the labels of an object, by which its pods are found."""
    marks = {"app.kubernetes.io/name": "cosmos-launch", "app.kubernetes.io/instance": job.name}
    return marks | ({"app.kubernetes.io/component": component} if component else {})


def manifest(api: str, kind: str, job: ClusterJob, component: str, name: str = "", **rest: Any) -> Manifest:
    """An object; its name is that of the job and `name`, or the component."""
    ending = name or component
    meta = {"name": f"{job.name}-{ending}" if ending else job.name, "labels": labels(job, component)}
    return {"apiVersion": api, "kind": kind, "metadata": meta, **rest}


def selector(job: ClusterJob, component: str) -> dict[str, Any]:
    """The pods of a component."""
    return {"matchLabels": labels(job, component)}


def value(name: str, text: str) -> dict[str, Any]:
    """A variable of a container."""
    return {"name": name, "value": text}


def from_secret(name: str, job: ClusterJob, secret: str, key: str) -> dict[str, Any]:
    """A variable that is an entry of a Secret of the job."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{job.name}-{secret}", "key": key}}}


def from_field(name: str, path: str) -> dict[str, Any]:
    """A variable that is a field of the pod itself."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def from_label(name: str, label: str) -> dict[str, Any]:
    """A variable that is a label of the pod itself."""
    return from_field(name, f"metadata.labels['{label}']")


@dataclass(frozen=True)
class Pod:
    """A pod of ours with one container. command: behind `cosmos-launch`.

    gpus: of the container. worker: whether it trains or generates, so that it has shared memory, the variables of the
    user, and the resources of [kubernetes]. rest: further fields of the pod, of the container in `inside`.
    """

    component: str
    command: Sequence[str]
    env: Sequence[Manifest]
    worker: bool = False
    gpus: int = 0
    memory: str = ""
    grace: int = 60
    account: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    inside: Mapping[str, Any] = field(default_factory=dict)


def template(job: ClusterJob, pod: Pod) -> Manifest:
    """The pod template."""
    kubernetes = job.config.kubernetes
    # HOME is a folder of the pod, since the rest of its root cannot be written; some libraries ask who they are.
    env = [value("HOME", "/tmp"), value("USER", "cosmos")]  # noqa: S108 - of this pod alone
    if pod.component != "scaler":  # files of the hub are on the claim: once for all pods, and for their successors
        env.append(value("HF_HOME", f"{kubernetes.volume_path}/huggingface"))
    container: Manifest = {
        "name": pod.component,
        "image": image(job, pod.component),
        "command": ["cosmos-launch", *pod.command],
        "env": [*env, *pod.env],
        "resources": _resources(job, pod),
        "securityContext": confined(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": name, **mount} for name, (mount, _) in _volumes(job, pod).items()],
        **pod.inside,
    }
    reads_elsewhere = pod.component == "controller" and job.config.data_schemes  # it prepares the data
    if reads_elsewhere:  # copies of remote files lie on the claim: what else the pod may write is small
        container["env"].append(value("XDG_CACHE_HOME", f"{kubernetes.volume_path}/cache"))
    if (pod.worker or reads_elsewhere) and kubernetes.environment_secret:
        container["envFrom"] = [{"secretRef": {"name": kubernetes.environment_secret}}]
    spec: Manifest = {
        "serviceAccountName": pod.account or job.name,
        "automountServiceAccountToken": bool(pod.account),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pod.grace,
        "securityContext": unprivileged(USER),
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in _volumes(job, pod).items()],
        **pulls(job),
        **pod.rest,
    }
    meta: Manifest = {"labels": labels(job, pod.component)}
    if pod.annotations:
        meta["annotations"] = dict(pod.annotations)
    return {"metadata": meta, "spec": spec}


def image(job: ClusterJob, component: str) -> str:
    """Return the image of a component's pods."""
    kubernetes = job.config.kubernetes
    images = {"policy": kubernetes.policy_image, "rollout": kubernetes.rollout_image}
    return images.get(component, kubernetes.controller_image) or kubernetes.image


def pulls(job: ClusterJob) -> Manifest:
    """Fields of a pod that say how its image is pulled."""
    names = [{"name": name} for name in job.config.kubernetes.pull_secrets]
    return {"imagePullSecrets": names} if names else {}


def unprivileged(user: int) -> Manifest:
    """Return the security context of a pod that is not root, and owns the files of its volumes."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def confined() -> Manifest:
    """Return the security context of a container that cannot gain privileges, nor change its image."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def _resources(job: ClusterJob, pod: Pod) -> Manifest:
    kubernetes = job.config.kubernetes
    memory = pod.memory or kubernetes.pod_memory
    requests = {"cpu": str(kubernetes.pod_cpus) if pod.worker else "500m", "memory": memory}
    limits = {"memory": memory} | ({GPU: pod.gpus} if pod.gpus else {})
    return {"requests": requests, "limits": limits}


def _volumes(job: ClusterJob, pod: Pod) -> dict[str, tuple[Manifest, Manifest]]:
    """Name -> where it is mounted, what it is."""
    kubernetes = job.config.kubernetes
    scratch: dict[str, tuple[Manifest, Manifest]] = {"scratch": ({"mountPath": "/tmp"}, {"emptyDir": {}})}  # noqa: S108
    if pod.component == "scaler" and not job.config.controller.tls_ca:
        return scratch
    claim = kubernetes.claim or f"{job.name}-runs"
    volumes = scratch | {
        "config": ({"mountPath": CONFIG_FOLDER, "readOnly": True}, {"configMap": {"name": f"{job.name}-config"}}),
        "runs": ({"mountPath": kubernetes.volume_path}, {"persistentVolumeClaim": {"claimName": claim}}),
    }
    if pod.worker:
        memory = {"emptyDir": {"medium": "Memory"}}
        volumes |= {
            "shm": ({"mountPath": "/dev/shm"}, memory),  # noqa: S108 - of this pod alone
            "secret": ({"mountPath": SECRET_FOLDER}, memory),
        }
    return volumes
