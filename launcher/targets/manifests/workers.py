"""Policy and rollout pods.

Policy: all pods of a replica are one Indexed Job of a JobSet. When a rank fails its Job fails, and the JobSet makes
all of them anew; so the uid of the Job is that of one start, in which the ranks meet. Exit codes 2 and 4, of faults
that another start repeats, end it. A StatefulSet restarts containers, not pods, and so holds replicas of one pod.

Rollout: a pod is a replica, and all are one Deployment. An engine that no node can hold is a group of a
LeaderWorkerSet, which makes all pods of a group anew when one has failed; so `engines.vllm.follower` leaves when the
first pod of its group does, and the other way round.
"""

from __future__ import annotations

import math
import re

from launcher.plan import nsight
from launcher.restarts import EXIT_CONFIG, EXIT_NO_CHECKPOINT
from launcher.targets.manifests import base
from launcher.targets.manifests.base import ClusterJob, Manifest, Pod

LEAVING = 30
"""Seconds that a pod has for its end, besides what its worker takes to leave."""
FINAL = [EXIT_CONFIG, EXIT_NO_CHECKPOINT]


def policy(job: ClusterJob) -> list[Manifest]:
    """The trainers."""
    if job.config.kubernetes.policy_kind == "jobset":
        return [_job_set(job)]
    headless = {"clusterIP": "None", "selector": base.labels(job, "policy")}
    return [base.manifest("v1", "Service", job, "policy", spec=headless), _stateful(job)]


def _job_set(job: ClusterJob) -> Manifest:
    env = [
        base.from_label("COSMOS_POLICY", "jobset.sigs.k8s.io/job-index"),
        base.from_label("COSMOS_START", "batch.kubernetes.io/controller-uid"),
        base.from_label("COSMOS_ATTEMPT", "jobset.sigs.k8s.io/restart-attempt"),
    ]
    pod = base.template(job, _policy(job, env, {"restartPolicy": "Never"}))
    work = {
        "completionMode": "Indexed",
        "completions": job.pods.each,
        "parallelism": job.pods.each,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": "policy", "operator": "In", "values": FINAL}}
            ]
        },
        "template": pod,
    }
    rules: list[Manifest] = [{"name": "useless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    if job.pods.replicas > 1:
        rules.append({"name": "alone", "action": "RestartJob"})  # the other replicas go on
    spec = {
        "failurePolicy": {"maxRestarts": job.config.launcher.max_restarts, "rules": rules},
        "replicatedJobs": [{"name": "rank", "replicas": job.pods.replicas, "template": {"spec": work}}],
    }
    return base.manifest("jobset.x-k8s.io/v1alpha2", "JobSet", job, "policy", spec=spec)


def _stateful(job: ClusterJob) -> Manifest:
    pod = _policy(job, [base.from_field("COSMOS_POD", "metadata.name")], {}, "--stay")
    spec = {
        "serviceName": f"{job.name}-policy",
        "replicas": job.pods.replicas,
        "podManagementPolicy": "Parallel",
        "selector": base.selector(job, "policy"),
        "template": base.template(job, pod),
    }
    return base.manifest("apps/v1", "StatefulSet", job, "policy", spec=spec)


def _policy(job: ClusterJob, env: list[Manifest], rest: Manifest, *flags: str) -> Pod:
    changes = {"cosmos-launch/config": job.checksum} if flags else {}  # a JobSet's pods cannot change
    return Pod(
        "policy",
        ["pod", "policy", "--config", f"{base.CONFIG_FOLDER}/config.json", *flags],
        [*_common(job, "policy"), base.from_field("COSMOS_NODE_ADDRESS", "status.podIP"), *env],
        worker=True,
        gpus=job.pods.gpus,
        grace=grace(job),
        annotations=changes,
        rest={**_nodes(job), **rest},
    )


def rollout(job: ClusterJob, scaled: bool) -> list[Manifest]:
    """The rollout replicas, one a pod or a group of pods. scaled: somebody else sets their number."""
    if not job.pods.rollouts:
        return []
    kubernetes, rest = job.config.kubernetes, _nodes(job)
    if chosen := kubernetes.node_selector | kubernetes.rollout_selector:
        rest["nodeSelector"] = chosen
    if kubernetes.rollout_tolerations:
        rest["tolerations"] = [_toleration(taint) for taint in kubernetes.rollout_tolerations]
    if kubernetes.topology_key and job.pods.rollout_pods == 1:
        rest["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": kubernetes.topology_key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": base.selector(job, "rollout"),
            }
        ]
    address = [base.from_field("COSMOS_NODE_ADDRESS", "status.podIP")] if job.pods.rollout_pods > 1 else []
    pod = Pod(
        "rollout",
        ["pod", "rollout", "--config", f"{base.CONFIG_FOLDER}/config.json", "--keep", base.SECRET_FOLDER, "--stay"],
        [*_common(job, "rollout"), base.from_field("COSMOS_POD", "metadata.name"), *address],
        worker=True,
        gpus=job.pods.rollout_gpus,
        grace=grace(job),
        annotations={"cosmos-launch/config": job.checksum},
        rest=rest,
    )
    number = {} if scaled else {"replicas": job.pods.rollouts}
    if job.pods.rollout_pods > 1:
        return [_groups(job, number, base.template(job, pod))]
    spec = {
        **number,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "selector": base.selector(job, "rollout"),
        "template": base.template(job, pod),
    }
    return [base.manifest("apps/v1", "Deployment", job, "rollout", spec=spec)]


def _groups(job: ClusterJob, number: Manifest, pod: Manifest) -> Manifest:
    """A group of pods for each engine: they start, fail and leave together."""
    spec = {
        **number,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "leaderWorkerTemplate": {
            "size": job.pods.rollout_pods,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "workerTemplate": pod,
        },
    }
    groups = base.manifest(base.GROUPS.api, base.GROUPS.kind, job, "rollout", spec=spec)
    if topology := job.config.kubernetes.topology_key:
        groups["metadata"]["annotations"] = {"leaderworkerset.sigs.k8s.io/exclusive-topology": topology}
    return groups


def grace(job: ClusterJob) -> int:
    """Seconds from SIGTERM to the kill: more than a worker takes to finish, push or give back what it has."""
    return math.ceil(nsight.grace(job.config)) + LEAVING


def _common(job: ClusterJob, role: str) -> list[Manifest]:
    return [base.value("COSMOS_CONTROLLER_URL", job.url), base.from_secret("COSMOS_TOKEN", job, "tokens", role)]


def _nodes(job: ClusterJob) -> Manifest:
    chosen = job.config.kubernetes.node_selector
    return {"nodeSelector": dict(chosen)} if chosen else {}


def _toleration(taint: str) -> Manifest:
    """`key=value:effect` or `key:effect`, as `kubectl taint` writes them."""
    parts = re.fullmatch(r"([^=:]+)(?:=([^:]*))?:(\w+)", taint)
    assert parts is not None  # the pattern of the key
    name, text, effect = parts.groups()
    matched = {"operator": "Exists"} if text is None else {"operator": "Equal", "value": text}
    return {"key": name, **matched, "effect": effect}
