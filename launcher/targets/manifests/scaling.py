"""Who obeys the controller's number of rollout replicas: KEDA, or a pod that runs `cosmos-launch autoscale`."""

from __future__ import annotations

import math

from launcher.targets.manifests.base import (
    ClusterJob,
    Manifest,
    Pod,
    from_secret,
    manifest,
    selector,
    template,
    value,
)

FAILURES = 3
"""Answers in a row that KEDA misses before it keeps the number that there is."""
MOST_POLLING = 30
COOLDOWN = 30
"""Seconds from the end of the job to no replica."""


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
    # The controller has waited long enough before it asks for fewer.
    at_once = {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}
    spec = {
        "scaleTargetRef": {"name": f"{job.name}-rollout"},
        "minReplicaCount": scale.min_replicas,
        "maxReplicaCount": scale.max_replicas,
        "pollingInterval": min(MOST_POLLING, max(1, math.ceil(scale.interval))),
        "cooldownPeriod": COOLDOWN,
        "advanced": {"horizontalPodAutoscalerConfig": at_once},
        "fallback": {
            "failureThreshold": FAILURES,
            "replicas": job.pods.rollouts,
            "behavior": "currentReplicas",
        },
        "triggers": [trigger],
    }
    token = {"parameter": "token", "name": f"{job.name}-tokens", "key": "rollout"}
    api = "keda.sh/v1alpha1"
    return [
        manifest(api, "TriggerAuthentication", job, "rollout", spec={"secretTargetRef": [token]}),
        manifest(api, "ScaledObject", job, "rollout", spec=spec),
    ]


def command(job: ClusterJob) -> list[Manifest]:
    """A pod that may read and change the number of this one Deployment, and nothing else."""
    namespace = job.config.kubernetes.namespace
    name, subject = f"{job.name}-scaler", {"kind": "ServiceAccount", "name": f"{job.name}-scaler"}
    rule = {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": [f"{job.name}-rollout"],
        "verbs": ["get", "patch"],
    }
    argv = [
        "autoscale",
        "--deployment",
        f"{job.name}-rollout",
        "--namespace",
        namespace,
        "--controller",
        job.url,
    ]
    env = [from_secret("COSMOS_TOKEN", job, "tokens", "rollout")]
    if job.config.controller.tls_ca:
        env.append(value("COSMOS_TLS_CA", job.config.controller.tls_ca))
    pod = Pod("scaler", argv, env, memory="256Mi", grace=10, account=name)
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": selector(job, "scaler"),
        "template": template(job, pod),
    }
    rbac = "rbac.authorization.k8s.io"
    return [
        manifest("v1", "ServiceAccount", job, "scaler", automountServiceAccountToken=False),
        manifest(f"{rbac}/v1", "Role", job, "scaler", rules=[rule]),
        manifest(
            f"{rbac}/v1",
            "RoleBinding",
            job,
            "scaler",
            roleRef={"apiGroup": rbac, "kind": "Role", "name": name},
            subjects=[{**subject, "namespace": namespace}],
        ),
        manifest("apps/v1", "Deployment", job, "scaler", spec=spec),
    ]
