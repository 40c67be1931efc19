"""Scalers to the controller's number of rollout replicas: KEDA, a HorizontalPodAutoscaler, or a pod of the job.

The pod runs `cosmos-launch autoscale`; beside the others it keeps deletion costs alone.
"""

from __future__ import annotations

import math

from launcher.targets.manifests import base
from launcher.targets.manifests.base import ClusterJob, Manifest, Pod

FAILURES = 3
"""Answers in a row that KEDA misses before it keeps the number that there is."""
MOST_POLLING = 30
COOLDOWN = 30
"""Seconds from the end of the job to no replica."""
EXACTLY: Manifest = {"scaleUp": {"tolerance": "0"}, "scaleDown": {"tolerance": "0", "stabilizationWindowSeconds": 0}}
"""A HorizontalPodAutoscaler adds nothing to the controller's number, which has waited long enough."""
OPTIONS = {"Deployment": "--deployment", "LeaderWorkerSet": "--leader-worker-set"}
"""Options of `cosmos-launch autoscale`."""
METRIC = "cosmos_autoscale_desired"
"""A name of `controller.api.metrics`."""


def _target(job: ClusterJob) -> Manifest:
    return {"apiVersion": job.scaled.api, "kind": job.scaled.kind, "name": f"{job.name}-rollout"}


def keda(job: ClusterJob) -> list[Manifest]:
    """The controller's number by the metrics-api of KEDA: one replica for each 1 of it."""
    scale = job.config.autoscale
    trigger = {
        "type": "metrics-api",
        "metricType": "AverageValue",
        "metadata": {
            "url": f"{job.url}/v1/autoscale",
            "valueLocation": "desired",
            "targetValue": "1",
            "authMode": "bearer",
        },
        "authenticationRef": {"name": f"{job.name}-rollout"},
    }
    spec = {
        "scaleTargetRef": _target(job),
        "minReplicaCount": scale.min_replicas,
        "maxReplicaCount": scale.max_replicas,
        "pollingInterval": min(MOST_POLLING, max(1, math.ceil(scale.interval))),
        "cooldownPeriod": COOLDOWN,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": EXACTLY}},
        "fallback": {"failureThreshold": FAILURES, "replicas": job.pods.rollouts, "behavior": "currentReplicas"},
        "triggers": [trigger],
    }
    token = {"parameter": "token", "name": f"{job.name}-tokens", "key": "rollout"}
    api = "keda.sh/v1alpha1"
    return [
        base.manifest(api, "TriggerAuthentication", job, "rollout", spec={"secretTargetRef": [token]}),
        base.manifest(api, "ScaledObject", job, "rollout", spec=spec),
    ]


def hpa(job: ClusterJob) -> list[Manifest]:
    """A HorizontalPodAutoscaler of the controller's number, which an adapter has from Prometheus."""
    scale = job.config.autoscale
    metric = {"name": METRIC, "selector": {"matchLabels": {"service": f"{job.name}-controller"}}}
    spec = {
        "scaleTargetRef": _target(job),
        "minReplicas": scale.min_replicas,
        "maxReplicas": scale.max_replicas,
        "behavior": EXACTLY,
        "metrics": [
            {
                "type": "External",
                "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": "1"}},
            }
        ],
    }
    return [base.manifest("autoscaling/v2", "HorizontalPodAutoscaler", job, "rollout", spec=spec)]


def command(job: ClusterJob, obeys: bool) -> list[Manifest]:
    """A pod that may read and change the number of this job's rollout replicas, if it obeys, and nothing else.

    Where they are wanted it keeps the deletion costs of pods."""
    namespace = job.config.kubernetes.namespace
    name, subject = f"{job.name}-scaler", {"kind": "ServiceAccount", "name": f"{job.name}-scaler"}
    argv = ["autoscale", "--namespace", namespace, "--controller", job.url]
    rules: list[Manifest] = []
    if obeys:
        argv += [OPTIONS[job.scaled.kind], f"{job.name}-rollout"]
        rules.append(
            {
                "apiGroups": [job.scaled.api.partition("/")[0]],
                "resources": [f"{job.scaled.plural}/scale"],
                "resourceNames": [f"{job.name}-rollout"],
                "verbs": ["get", "patch"],
            }
        )
    if job.config.kubernetes.deletion_cost:
        argv += ["--costs", ",".join(f"{key}={text}" for key, text in base.labels(job, "rollout").items())]
        rules.append({"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]})
    env = [base.from_secret("COSMOS_TOKEN", job, "tokens", "rollout")]
    if job.config.controller.tls_ca:
        env.append(base.value("COSMOS_TLS_CA", job.config.controller.tls_ca))
    pod = Pod("scaler", argv, env, memory="256Mi", grace=10, account=name)
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": base.selector(job, "scaler"),
        "template": base.template(job, pod),
    }
    rbac = "rbac.authorization.k8s.io"
    return [
        base.manifest("v1", "ServiceAccount", job, "scaler", automountServiceAccountToken=False),
        base.manifest(f"{rbac}/v1", "Role", job, "scaler", rules=rules),
        base.manifest(
            f"{rbac}/v1",
            "RoleBinding",
            job,
            "scaler",
            roleRef={"apiGroup": rbac, "kind": "Role", "name": name},
            subjects=[{**subject, "namespace": namespace}],
        ),
        base.manifest("apps/v1", "Deployment", job, "scaler", spec=spec),
    ]
