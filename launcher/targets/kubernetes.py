"""A job as manifests for Kubernetes: plain YAML and kustomizations, rendered from the configuration.

kustomization.yaml is an overlay: written once, then its owner's. Below `base` is what each rendering writes:

    config.yaml      the resolved configuration, as all pods read it    controller.yaml   Deployment, Service, budget
    secrets.yaml     tokens and passwords, for the owner's eyes         redis.yaml        Valkey, unless one is named
    storage.yaml     the claim of the run directory                     policy.yaml       JobSet or StatefulSet
    accounts.yaml    pods ask nothing of the cluster                    rollout.yaml      Deployment, LeaderWorkerSet
    network.yaml     who may reach whom                                 scaler.yaml       KEDA's objects, or a pod

The run directory is <train.output_dir>/<name of the job> on the claim, so what is applied again goes on. Tokens are
made once for a folder of manifests, and kept when they are rendered again.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import typer
import yaml

from launcher.errors import LaunchError
from launcher.paths import absolute, resolved
from launcher.plan.pods import pods
from launcher.plan.rundir import RunTokens
from launcher.restarts import EXIT_OK
from launcher.targets.manifests import scaling, services, workers
from launcher.targets.manifests.base import ClusterJob, Manifest, manifest
from schema.config import Config
from schema.config.loading.load import LoadedConfig
from schema.config.rules.named import unread_models
from schema.util.atomic_file import write_text
from schema.util.text import visible
from schema.wire.secret import fault

PORT = 8000
"""The port of the controller, where controller.port leaves it open."""
LONGEST_NAME = 40
"""Characters of a job's name: names of its pods add a component and numbers, and end at 63."""
MOST_CONFIG = 1_000_000
"""Bytes of a ConfigMap: etcd takes no larger object."""
CHECK_SECONDS = 60
CRDS = {
    "JobSet": ("JobSet", "jobsets.jobset.x-k8s.io", 'kubernetes.policy_kind = "statefulset"'),
    "ScaledObject": ("KEDA", "scaledobjects.keda.sh", 'kubernetes.scaler = "command"'),
    "LeaderWorkerSet": (
        "LeaderWorkerSet",
        "leaderworkersets.leaderworkerset.x-k8s.io",
        "sizes in [rollout.parallelism] that fit one node",
    ),
}
"""Kinds that a cluster must have first: the project that brings each, its definition, and what needs none."""
BASE, OVERLAY, SECRETS = "base", "kustomization.yaml", "secrets.yaml"
KUSTOMIZE = "kustomize.config.k8s.io/v1beta1"
_TEXT = "tag:yaml.org,2002:str"
OWN = """\
# What `kubectl apply -k` reads. This file is yours: it is written once, and stays when the manifests in base/ are
# rendered again. What cosmos-launch has no key for is changed here, for example:
#
# commonAnnotations:
#   team: reasoning
# patches:
#   - target: {{kind: Deployment, name: {name}-controller}}
#     patch: |-
#       - op: add
#         path: /spec/template/spec/priorityClassName
#         value: important
apiVersion: {version}
kind: Kustomization
resources:
  - {base}
"""


def render(job: ClusterJob) -> dict[str, list[Manifest]]:
    """The manifests by file."""
    kubernetes = job.config.kubernetes
    chosen = kubernetes.scaler if job.config.autoscale.enable and job.pods.rollouts else "none"
    scaler = {"keda": scaling.keda, "hpa": scaling.hpa}.get(chosen, lambda _: [])(job)
    if chosen == "command" or (kubernetes.deletion_cost and job.pods.rollouts):
        scaler += scaling.command(job, obeys=chosen == "command")
    callers = ["keda"] if chosen == "keda" else []
    callers += [kubernetes.metrics_namespace] if kubernetes.metrics_namespace else []
    files = {
        "config.yaml": [manifest("v1", "ConfigMap", job, "", "config", data={"config.json": job.config_json})],
        SECRETS: services.secrets(job),
        "storage.yaml": services.storage(job),
        "accounts.yaml": [manifest("v1", "ServiceAccount", job, "", automountServiceAccountToken=False)],
        "network.yaml": services.network(job, callers),
        "redis.yaml": services.redis(job),
        "controller.yaml": services.controller(job),
        "policy.yaml": workers.policy(job),
        "rollout.yaml": workers.rollout(job, scaled=chosen != "none"),
        "scaler.yaml": scaler,
    }
    return {name: objects for name, objects in files.items() if objects}


def cluster_job(config: Config, earlier: Mapping[str, Any], password: str = "") -> ClusterJob:
    """Prepare a job for rendering. Raises LaunchError.

    earlier: data of the Secrets of this folder, by the ends of their names. password: of a named Redis.
    """
    if config.is_evaluation:
        raise LaunchError("an evaluation needs no cluster", "run it here: leave --target out")
    kubernetes = config.kubernetes
    each_role = (kubernetes.controller_image, kubernetes.policy_image, kubernetes.rollout_image)
    if not kubernetes.image and not all(each_role):
        raise LaunchError(
            "kubernetes.image is unset: it names what the pods run",
            'write kubernetes.image = "registry.example.com/cosmos-launch:0.1.0", your own, or one for each role',
        )
    if kubernetes.scaler == "hpa" and config.autoscale.enable:
        _check_hpa(config)
    if config.redis.url.startswith("unix:"):
        raise LaunchError(
            f"redis.url = {config.redis.url!r} is a socket of this machine, which pods do not reach",
            'write redis.url = "redis://host:6379/0", or leave it out: the job has a server of its own then',
        )
    if config.kubernetes.policy_kind == "statefulset" and (each := pods(config).each) > 1:
        raise LaunchError(
            f"a policy replica takes {each} pods, and a StatefulSet does not start them again together",
            'write kubernetes.policy_kind = "jobset", or a policy.parallelism that fits one node',
        )
    name = _name(config)
    data = _as_pods_read(config, name)
    ours = Config.model_validate(data)
    text = json.dumps(data, indent=1, ensure_ascii=False)
    if len(text.encode()) > MOST_CONFIG:
        raise LaunchError(f"the configuration has {len(text)} characters, and a ConfigMap at most {MOST_CONFIG}")
    url = config.redis.address(config.redis.url) if config.redis.url else ""
    password_ = earlier.get("redis", {}).get("password") or secrets.token_urlsafe(32)
    return ClusterJob(
        name=name,
        config=ours,
        config_json=text + "\n",
        pods=pods(config),
        port=ours.controller.port,
        tokens=_tokens(earlier.get("tokens", {})),
        redis_password=password if url else password_,
        redis_url=url,
    )


def _check_hpa(config: Config) -> None:
    if not config.autoscale.min_replicas:
        raise LaunchError(
            'autoscale.min_replicas = 0 with kubernetes.scaler = "hpa": a HorizontalPodAutoscaler has 1 at least',
            'write autoscale.min_replicas = 1, or kubernetes.scaler = "keda"',
        )
    if not config.kubernetes.metrics_namespace:
        raise LaunchError(
            'kubernetes.scaler = "hpa" reads the number from Prometheus, which may not reach the controller: '
            "kubernetes.metrics_namespace is unset",
            'write kubernetes.metrics_namespace = "monitoring", the namespace of Prometheus',
        )


def _name(config: Config) -> str:
    """Return the name of the job, and of its run directory."""
    title = config.train.timestamp or config.logging.experiment_name or "cosmos"
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return name if name and name[0].isalpha() else f"run-{name}"[:LONGEST_NAME].strip("-")


def _as_pods_read(config: Config, name: str) -> dict[str, Any]:
    """The configuration with paths of the pods. Raises LaunchError where the run directory is not on the claim."""
    mount = config.kubernetes.volume_path
    data = resolved(config, mount)
    output = PurePosixPath(data["train"]["output_dir"])
    if not output.is_relative_to(mount):
        raise LaunchError(
            f"train.output_dir = {str(output)!r} is not below kubernetes.volume_path = {mount!r}, which is all that "
            "outlives a pod",
            'write train.output_dir = "outputs", which is below it',
        )
    data["train"]["timestamp"] = name
    data["controller"]["port"] = config.controller.port or PORT
    return data


def _tokens(earlier: Mapping[str, Any]) -> RunTokens:
    tokens = [str(earlier.get(name, "")) for name in ("user", "rollout", "policy")]
    return RunTokens.fresh() if any(fault(token) for token in tokens) else RunTokens(*tokens)


def write(loaded: LoadedConfig, directory: Path | None, env: Mapping[str, str], *, applies: bool) -> int:
    """Write the manifests; the exit code. Raises ConfigError, LaunchError.

    directory: None is kubernetes/<name of the job>. applies: whether they are given to the cluster.
    """
    config = loaded.config
    target = directory or Path("kubernetes") / _name(config)
    job = cluster_job(config, _earlier(target), env.get("COSMOS_REDIS_PASSWORD", ""))
    files = render(job)
    _write_files(target, job, files)
    unread = {problem.key: problem for problem in loaded.placed(unread_models(config))}
    for warning in loaded.warnings:
        also = unread.pop(warning.key, None)  # a directory that is missing here is one warning
        text = warning.render() if also is None else f"{warning.render()}\n    {also.message}"
        typer.echo(f"warning: {visible(text)}", err=True)
    for warning in unread.values():
        typer.echo(f"warning: {visible(warning.render())}", err=True)
    if set(config.logging.logger) - {"console"}:
        typer.echo(
            "warning: logging.logger: trackers follow jobs that are run from here; pods report /metrics", err=True
        )
    if not applies:
        typer.echo(f"give it to the cluster with kubectl apply -k {target}")
        return EXIT_OK
    return apply(target, [problem["kind"] for objects in files.values() for problem in objects])


def _write_files(target: Path, job: ClusterJob, files: Mapping[str, Sequence[Manifest]]) -> None:
    base, overlay = target / BASE, target / OVERLAY
    base.mkdir(parents=True, exist_ok=True)
    texts = {name: _text(objects) for name, objects in files.items()}
    listed = {"namespace": job.config.kubernetes.namespace, "resources": list(files)}
    texts[OVERLAY] = _text([{"apiVersion": KUSTOMIZE, "kind": "Kustomization", **listed}])
    for name, text in texts.items():
        write_text(base / name, text, mode=0o600 if name == SECRETS else 0o666)
        typer.echo(str(base / name))
    for gone in set(_FILES) - files.keys():  # of an earlier rendering
        (base / gone).unlink(missing_ok=True)
    if overlay.exists():
        typer.echo(f"{overlay} (as it was)")
        if not re.search(rf"^\s*- [\"']?(\./)?{BASE}/?[\"']?\s*(#.*)?$", overlay.read_text(), re.MULTILINE):
            typer.echo(f"warning: {overlay} does not list {BASE}, so what is rendered is not applied", err=True)
    else:
        write_text(overlay, OWN.format(name=job.name, version=KUSTOMIZE, base=BASE), mode=0o666)
        typer.echo(str(overlay))


class _Plain(yaml.SafeDumper):  # type: ignore[misc]
    """Write no anchors: what two pods have in common is written twice. Texts of several lines stay readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Plain.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, style="|" if "\n" in text else None)
)


def _text(objects: Sequence[Manifest]) -> str:
    return str(yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=110))


_FILES = ("storage.yaml", "redis.yaml", "rollout.yaml", "scaler.yaml")
"""Files that not every job has."""


def _earlier(target: Path) -> dict[str, Any]:
    """Read the Secrets of an earlier rendering, by the ends of their names. Raises LaunchError."""
    path = target / BASE / SECRETS
    try:
        objects = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
        return {str(secret["metadata"]["name"]).rpartition("-")[2]: dict(secret["stringData"]) for secret in objects}
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"{path} cannot be read ({type(error).__name__}), and it holds the tokens of the job",
            f"remove it to make new ones, and render again: rm {path}",
        ) from None


def apply(directory: Path, kinds: Sequence[str]) -> int:
    """Give the manifests to the cluster of the current context; kubectl's exit code. Raises LaunchError."""
    if shutil.which("kubectl") is None:
        raise LaunchError(
            f"--apply needs kubectl, and none is on the PATH; the manifests are in {directory}",
            f"install it, or apply them elsewhere: kubectl apply -k {absolute(str(directory))}",
        )
    for kind, (owner, crd, instead) in CRDS.items():
        if kind in kinds:
            _check_known(owner, crd, instead)
    return subprocess.run(["kubectl", "apply", "-k", str(directory)], check=False).returncode


def _check_known(owner: str, crd: str, instead: str) -> None:
    """Check that the cluster has a kind. Raises LaunchError."""
    command = ["kubectl", "get", "crd", crd, "--output=name"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"the cluster does not answer within {CHECK_SECONDS} s: {' '.join(command)}") from None
    if answer.returncode == 0:
        return
    if "NotFound" in answer.stderr:
        raise LaunchError(f"the cluster does not have {owner} ({crd})", f"install it there, or write {instead}")
    raise LaunchError(f"kubectl cannot ask the cluster: {answer.stderr.strip()[-500:]}", "look at its context")
