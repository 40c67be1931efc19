"""Objects that exist once: configuration, secrets, accounts, the volume, network policies, Valkey, the controller."""

from __future__ import annotations

from launcher.plan.redis_server import TIMER_HZ
from launcher.targets.manifests import base
from launcher.targets.manifests.base import ClusterJob, Manifest, Pod

REDIS_PORT = 6379
REDIS_MEMORY, REDIS_DISK = "8Gi", "20Gi"
CONTROLLER_MEMORY = 2 * 1024**3
"""Bytes of a controller, besides the request bodies that it may hold."""
PREPARATION = 6 * 3600
"""Seconds that the data may take to be prepared, before the first start of the controller counts as failed."""
WORKERS = ["policy", "rollout"]


def secrets(job: ClusterJob) -> list[Manifest]:
    """The tokens of the roles, and what only controller and Valkey share."""
    tokens = {name: getattr(job.tokens, name) for name in ("user", "rollout", "policy")}
    redis = {"url": job.redis_url or f"redis://{job.name}-redis:{REDIS_PORT}/0", "password": job.redis_password}
    if job.own_redis:
        redis["valkey.conf"] = (
            f'port {REDIS_PORT}\ndir /data\nappendonly yes\nappendfsync everysec\nhz {TIMER_HZ}\nsave ""\n'
            f"maxmemory-policy noeviction\nrequirepass {job.redis_password}\n"
        )
    return [
        base.manifest("v1", "Secret", job, "", name, type="Opaque", stringData=data)
        for name, data in (("tokens", tokens), ("redis", redis))
    ]


def storage(job: ClusterJob) -> list[Manifest]:
    """The claim of the run directory, unless one is named."""
    kubernetes = job.config.kubernetes
    if kubernetes.claim:
        return []
    spec: Manifest = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": kubernetes.storage_size}},
    }
    if kubernetes.storage_class:
        spec["storageClassName"] = kubernetes.storage_class
    return [base.manifest("v1", "PersistentVolumeClaim", job, "", "runs", spec=spec)]


def network(job: ClusterJob, namespaces: list[str]) -> list[Manifest]:
    """Allow controller to Valkey, workers and scaler to the controller, and workers to each other.

    namespaces: whose pods may reach the controller, too.
    """
    callers = [_pods(job, [*WORKERS, "scaler"])]
    for name in namespaces:
        callers.append({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}})
    rules = [
        ("controller", ["controller"], [{"from": callers, "ports": [{"port": job.port, "protocol": "TCP"}]}]),
        ("workers", WORKERS, [{"from": [_pods(job, WORKERS)]}]),
    ]
    if job.own_redis:
        from_controller = [_pods(job, ["controller"])]
        ports = [{"port": REDIS_PORT, "protocol": "TCP"}]
        rules.append(("redis", ["redis"], [{"from": from_controller, "ports": ports}]))
    return [
        base.manifest(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            job,
            "",
            name,
            spec={**_pods(job, components), "policyTypes": ["Ingress"], "ingress": ingress},
        )
        for name, components, ingress in rules
    ]


def _pods(job: ClusterJob, components: list[str]) -> Manifest:
    key = "app.kubernetes.io/component"
    among = [{"key": key, "operator": "In", "values": components}]
    return {"podSelector": {"matchLabels": base.labels(job), "matchExpressions": among}}


def redis(job: ClusterJob) -> list[Manifest]:
    """A Valkey with an append-only file on a volume of its own."""
    if not job.own_redis:
        return []
    probe = {"tcpSocket": {"port": "redis"}, "periodSeconds": 5, "failureThreshold": 6}
    container = {
        "name": "redis",
        "image": job.config.kubernetes.redis_image,
        "command": ["valkey-server", "/etc/valkey/valkey.conf"],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "startupProbe": {**probe, "failureThreshold": 120},
        "readinessProbe": probe,
        "livenessProbe": probe,
        "resources": {"requests": {"cpu": "500m", "memory": REDIS_MEMORY}, "limits": {"memory": REDIS_MEMORY}},
        "securityContext": base.confined(),
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "config", "mountPath": "/etc/valkey", "readOnly": True},
        ],
    }
    conf = {"secretName": f"{job.name}-redis", "items": [{"key": "valkey.conf", "path": "valkey.conf"}]}
    pod = {
        "serviceAccountName": job.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 60,
        "securityContext": base.unprivileged(base.VALKEY_USER),
        "containers": [container],
        "volumes": [{"name": "config", "secret": conf}],
        **base.pulls(job),
    }
    disk = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": REDIS_DISK}}}
    spec = {
        "serviceName": f"{job.name}-redis",
        "replicas": 1,
        "selector": base.selector(job, "redis"),
        "template": {"metadata": {"labels": base.labels(job, "redis")}, "spec": pod},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": disk}],
    }
    return [_service(job, "redis", REDIS_PORT), base.manifest("apps/v1", "StatefulSet", job, "redis", spec=spec)]


def controller(job: ClusterJob) -> list[Manifest]:
    """The controller, reached by its Service when it is in charge; a stand-by is not ready until then."""
    config = job.config
    scheme = config.controller.scheme.upper()
    alive = {"httpGet": {"path": "/healthz", "port": "http", "scheme": scheme}, "periodSeconds": 10}
    ready = {"httpGet": {"path": "/readyz", "port": "http", "scheme": scheme}, "periodSeconds": 2}
    memory = CONTROLLER_MEMORY + config.controller.max_buffered_bytes
    env = [
        base.from_secret(f"COSMOS_TOKEN_{role.upper()}", job, "tokens", role)
        for role in ("user", "rollout", "policy")
    ]
    env += [base.from_secret("COSMOS_REDIS_URL", job, "redis", "url")]
    env += [base.from_secret("COSMOS_REDIS_PASSWORD", job, "redis", "password")]
    pod = Pod(
        "controller",
        ["pod", "controller", "--config", f"{base.CONFIG_FOLDER}/config.json"],
        env,
        memory=f"{-(-memory // 1024**2)}Mi",
        annotations={"cosmos-launch/config": job.checksum},
        inside={
            "ports": [{"name": "http", "containerPort": job.port}],
            "startupProbe": {**alive, "failureThreshold": PREPARATION // 10},
            "livenessProbe": {**alive, "timeoutSeconds": 5, "failureThreshold": 6},
            "readinessProbe": {**ready, "timeoutSeconds": 2},
        },
    )
    spec = {
        "replicas": 2 if config.kubernetes.standby else 1,
        "strategy": {"type": "Recreate"},
        "selector": base.selector(job, "controller"),
        "template": base.template(job, pod),
    }
    budget = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": base.selector(job, "controller"),
    }
    return [
        _service(job, "controller", job.port, "http"),
        base.manifest("apps/v1", "Deployment", job, "controller", spec=spec),
        base.manifest("policy/v1", "PodDisruptionBudget", job, "controller", spec=budget),
    ]


def _service(job: ClusterJob, component: str, port: int, name: str = "redis") -> Manifest:
    ports = [{"name": name, "port": port, "targetPort": name}]
    return base.manifest(
        "v1", "Service", job, component, spec={"selector": base.labels(job, component), "ports": ports}
    )
