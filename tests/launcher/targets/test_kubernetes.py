"""The manifests: that Kubernetes knows every field, what the house asks of them, and that they follow the config."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launcher.plan import nsight
from schema.config import Config
from tests.launcher.cli import cosmos
from tests.launcher.samples import write_job

VERSION = "1.36"
CORE = (
    "v1",
    "apps/v1",
    "autoscaling/v2",
    "batch/v1",
    "networking.k8s.io/v1",
    "policy/v1",
    "rbac.authorization.k8s.io/v1",
)
SMALL = {
    "train.output_dir": "outputs",
    "kubernetes.image": "registry.example.com/cosmos-launch:0.1.0",
    "placement.gpus_per_node": 8,
}
ELASTIC = SMALL | {"autoscale.enable": True, "autoscale.max_replicas": 6, "autoscale.min_replicas": 0}
ENGINE = {
    "placement.nodes": 6,
    "rollout.backend": "vllm",
    "rollout.parallelism.tp_size": 8,
    "rollout.parallelism.pp_size": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "cpu": SMALL | {"placement.gpus_per_node": 0, "kubernetes.policy_kind": "statefulset"},
    "keda": ELASTIC
    | {
        "policy.parallelism.dp_shard_size": 16,
        "policy.parallelism.n_init_replicas": 2,
        "placement.nodes": 5,
        "train.ckpt.enable_checkpoint": True,
    },
    "hpa": ELASTIC
    | {
        "autoscale.min_replicas": 1,
        "kubernetes.scaler": "hpa",
        "kubernetes.metrics_namespace": "monitoring",
        "kubernetes.deletion_cost": True,
        "kubernetes.image": "",
        "kubernetes.controller_image": "registry.example.com/controller:1",
        "kubernetes.policy_image": "registry.example.com/policy:2",
        "kubernetes.rollout_image": "registry.example.com/rollout@sha256:0123",
    },
    "engines": ELASTIC | ENGINE | {"kubernetes.topology_key": "cloud.example.com/rack"},
    "command": ELASTIC
    | {
        "kubernetes.scaler": "command",
        "kubernetes.standby": True,
        "kubernetes.claim": "shared-disk",
        "kubernetes.namespace": "training",
        "kubernetes.rollout_tolerations": ["spot=true:NoSchedule", "gpu:NoExecute"],
        "kubernetes.rollout_selector": {"spot": "true"},
        "kubernetes.topology_key": "topology.kubernetes.io/zone",
        "kubernetes.environment_secret": "hub",
        "kubernetes.pull_secrets": ["registry"],
        "kubernetes.deletion_cost": True,
        "launcher.shutdown_timeout": 100.5,
        "redis.url": "redis://me:hidden-word@redis.example.com:6379/0",
    },
}


class Rendered:
    """The objects of one configuration."""

    def __init__(self, folder: Path, values: dict[str, Any], name: str = "out") -> None:
        self.folder = folder / name
        cosmos(*job_of(folder, values), "--target", "kubernetes", "-o", self.folder).says(0)
        self.base = self.folder / "base"
        self.files = {
            path.name: list(yaml.safe_load_all(path.read_text()))
            for path in self.base.glob("*.yaml")
            if path.name != "kustomization.yaml"
        }
        self.objects = [one for objects in self.files.values() for one in objects]

    def one(self, kind: str, name: str = "") -> Any:
        (found,) = (o for o in self.objects if o["kind"] == kind and o["metadata"]["name"].endswith(name))
        return found

    def config(self) -> Config:
        return Config.model_validate_json(self.one("ConfigMap")["data"]["config.json"])

    def templates(self) -> dict[str, Any]:
        """Component -> its pod template."""
        found = {}
        for one in self.objects:
            if one["kind"] in ("Deployment", "StatefulSet"):
                found[one["metadata"]["labels"]["app.kubernetes.io/component"]] = one["spec"]["template"]
            elif one["kind"] == "JobSet":
                (job,) = one["spec"]["replicatedJobs"]
                found["policy"] = job["template"]["spec"]["template"]
            elif one["kind"] == "LeaderWorkerSet":
                found["rollout"] = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        return found

    def container(self, component: str) -> Any:
        (container,) = self.templates()[component]["spec"]["containers"]
        return container


def job_of(folder: Path, values: dict[str, Any]) -> list[object]:
    """The arguments that name a job with these values."""
    return ["--config", write_job(folder), *(f"--set={key}={_toml(value)}" for key, value in values.items())]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {_toml(item)}' for key, item in value.items()) + "}"
    return json.dumps(value)


Case = Callable[[str], Rendered]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The objects of a case, rendered once."""
    return cache(lambda name: Rendered(tmp_path_factory.mktemp(name), CASES[name]))


@pytest.fixture(params=CASES)
def rendered(request: pytest.FixtureRequest, case: Case) -> Rendered:
    return case(request.param)


def test_kubernetes_knows_every_field(rendered: Rendered) -> None:
    for one in rendered.objects:
        if one["apiVersion"] in CORE:
            kubernetes_validate.validate(one, VERSION, strict=True)
        elif one["kind"] == "JobSet":
            (job,) = one["spec"]["replicatedJobs"]
            as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
            kubernetes_validate.validate(as_job, VERSION, strict=True)
        elif one["kind"] == "LeaderWorkerSet":
            pod = {"apiVersion": "v1", "kind": "Pod", **one["spec"]["leaderWorkerTemplate"]["workerTemplate"]}
            kubernetes_validate.validate(pod, VERSION, strict=True)
        else:
            assert one["kind"] in ("ScaledObject", "TriggerAuthentication")
    listed = yaml.safe_load((rendered.base / "kustomization.yaml").read_text())
    assert sorted(listed["resources"]) == sorted(rendered.files)


def test_pods_have_no_privilege_and_a_limit(rendered: Rendered) -> None:
    pulled = [{"name": name} for name in rendered.config().kubernetes.pull_secrets]
    for component, template in rendered.templates().items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is (component == "scaler")
        for container in spec["containers"]:
            confined = container["securityContext"]
            assert not confined["allowPrivilegeEscalation"]
            assert confined["readOnlyRootFilesystem"]
            assert "privileged" not in confined
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            image = container["image"].rpartition("/")[2]
            assert "@" in image or image.partition(":")[2] not in ("", "latest")
            assert template["spec"].get("imagePullSecrets", []) == pulled
            if component in ("controller", "redis"):
                assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()


def test_no_secret_leaves_the_secrets(rendered: Rendered) -> None:
    held = [text for one in rendered.files["secrets.yaml"] for text in one["stringData"].values()]
    words = {text for text in held if len(text) > 20 and "\n" not in text} | {"hidden-word"}
    assert len(words) >= 4
    for name in rendered.files.keys() - {"secrets.yaml"}:
        text = (rendered.base / name).read_text()
        assert not [word for word in words if word in text], name
    assert stat.S_IMODE(os.stat(rendered.base / "secrets.yaml").st_mode) == 0o600


def test_replicas_have_the_time_to_drain(rendered: Rendered) -> None:
    needed = nsight.grace(rendered.config())
    for component in ("policy", "rollout"):
        assert rendered.templates()[component]["spec"]["terminationGracePeriodSeconds"] > needed


def test_every_selector_finds_its_pods(rendered: Rendered) -> None:
    templates = rendered.templates()
    for one in rendered.objects:
        component = one["metadata"]["labels"].get("app.kubernetes.io/component")
        if one["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            wanted = one["spec"]["selector"]["matchLabels"]
        elif one["kind"] == "Service":
            wanted = one["spec"]["selector"]
        else:
            continue
        assert wanted.items() <= templates[component]["metadata"]["labels"].items()


def test_gpus_and_pods_follow_the_mesh(case: Case) -> None:
    rendered = case("keda")
    jobs = rendered.one("JobSet")["spec"]
    (job,) = jobs["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (2, 2)
    assert [rule["action"] for rule in jobs["failurePolicy"]["rules"]] == ["FailJobSet", "RestartJob"]
    assert rendered.container("policy")["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert rendered.container("rollout")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "replicas" not in rendered.one("Deployment", "rollout")["spec"]
    scaled = rendered.one("ScaledObject")["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 6)
    assert scaled["fallback"]["behavior"] == "currentReplicas"
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"] == {
        "url": "http://cosmos-controller.default.svc:8000/v1/autoscale",
        "valueLocation": "desired",
        "targetValue": "1",
        "authMode": "bearer",
    }


def test_an_engine_that_no_node_holds_is_a_group_of_pods(case: Case, tmp_path: Path) -> None:
    rendered = case("engines")
    groups = rendered.one("LeaderWorkerSet")
    assert "replicas" not in groups["spec"]
    template = groups["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert groups["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "cloud.example.com/rack"
    }
    assert rendered.container("rollout")["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "topologySpreadConstraints" not in template["workerTemplate"]["spec"]
    target = {"apiVersion": groups["apiVersion"], "kind": "LeaderWorkerSet", "name": "cosmos-rollout"}
    assert rendered.one("ScaledObject")["spec"]["scaleTargetRef"] == target
    followed = Rendered(tmp_path, CASES["engines"] | {"kubernetes.scaler": "command"}, "command")
    (rule,) = followed.one("Role")["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["leaderworkerset.x-k8s.io"], ["leaderworkersets/scale"])
    argv = followed.container("scaler")["command"]
    assert argv[argv.index("--leader-worker-set") + 1] == "cosmos-rollout"


def test_who_scales_may_do_no_more(case: Case) -> None:
    scale = {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": ["cosmos-rollout"],
        "verbs": ["get", "patch"],
    }
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}
    followed = case("command")
    assert followed.one("Role")["rules"] == [scale, pods]
    alone = case("hpa")
    assert alone.one("Role")["rules"] == [pods]
    argv = alone.container("scaler")["command"]
    assert "--deployment" not in argv
    chosen = dict(pair.split("=") for pair in argv[argv.index("--costs") + 1].split(","))
    assert chosen == alone.one("Deployment", "rollout")["spec"]["selector"]["matchLabels"]
    images = {name: alone.container(name)["image"] for name in ("controller", "scaler", "policy", "rollout")}
    assert [image.rpartition("/")[2] for image in images.values()] == [
        "controller:1", "controller:1", "policy:2", "rollout@sha256:0123"
    ]  # fmt: skip
    (controller,) = (one for one in alone.files["network.yaml"] if one["metadata"]["name"].endswith("-controller"))
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in (
        controller["spec"]["ingress"][0]["from"]
    )


def test_the_overlay_is_its_owners(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path, SMALL)
    overlay = rendered.folder / "kustomization.yaml"
    assert yaml.safe_load(overlay.read_text())["resources"] == ["base"]
    overlay.write_text(overlay.read_text() + "namePrefix: mine-\n")
    again = Rendered(tmp_path, SMALL | {"kubernetes.namespace": "training"})
    assert overlay.read_text().endswith("namePrefix: mine-\n")
    assert yaml.safe_load((again.base / "kustomization.yaml").read_text())["namespace"] == "training"
    overlay.write_text("resources: [mine.yaml]\n")
    answer = cosmos(*job_of(tmp_path, SMALL), "--target", "kubernetes", "-o", rendered.folder).says(0)
    assert f"{overlay} does not list base" in answer.stderr
    overlay.write_text("namePrefix: mine-\nresources:\n  - base\n")
    if kubectl := shutil.which("kubectl"):
        built = subprocess.run([kubectl, "kustomize", rendered.folder], capture_output=True, text=True, check=True)
        assert "name: mine-cosmos-rollout" in built.stdout


def test_tokens_are_kept_when_it_is_rendered_again(tmp_path: Path) -> None:
    first = Rendered(tmp_path, ELASTIC)
    again = Rendered(tmp_path, SMALL)
    assert again.files["secrets.yaml"] == first.files["secrets.yaml"]
    assert "scaler.yaml" not in again.files
    assert Rendered(tmp_path, SMALL, "other").files["secrets.yaml"] != first.files["secrets.yaml"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kubernetes.image": ""}, ["kubernetes.image is unset"]),
        (
            {"autoscale.enable": True, "autoscale.min_replicas": 0, "kubernetes.scaler": "hpa"},
            ["autoscale.min_replicas = 0", 'kubernetes.scaler = "keda"'],
        ),
        ({"autoscale.enable": True, "kubernetes.scaler": "hpa"}, ["kubernetes.metrics_namespace is unset"]),
        ({"kubernetes.image": "image:latest"}, ["kubernetes.image", "another image with each pull"]),
        ({"train.output_dir": "/elsewhere"}, ["train.output_dir", "kubernetes.volume_path = '/cosmos'"]),
        (
            {"kubernetes.policy_kind": "statefulset", "policy.parallelism.dp_shard_size": 16, "placement.nodes": 3},
            ["2 pods", 'kubernetes.policy_kind = "jobset"'],
        ),
        ({"placement.policy": [0]}, ["placement.policy names devices"]),
        (ENGINE | {"placement.gpus_per_node": 6}, ["16 GPUs takes 3 pods of at most 6", "fill nodes evenly"]),
        (ENGINE | {"rollout.parallelism.dp_shard_size": 2}, ["4 pods", "dp_shard_size = 2", "n_init_replicas"]),
        (ENGINE | {"weight_sync.host_cache": "/tmp"}, ["2 pods", "weight_sync.host_cache = '/tmp'"]),
        (ENGINE | {"kubernetes.deletion_cost": True}, ["2 pods", "kubernetes.deletion_cost = true"]),
        ({"redis.url": "unix:///run/redis"}, ["redis.url = 'unix:///run/redis'"]),
        ({"placement.share": "memory"}, ['placement.share = "memory"']),
    ],
)
def test_what_pods_cannot_do_is_refused(tmp_path: Path, values: dict[str, Any], words: list[str]) -> None:
    answer = cosmos(*job_of(tmp_path, SMALL | values), "--target", "kubernetes", "-o", tmp_path / "out")
    answer.complains(2, *words)
    assert not (tmp_path / "out").exists()


def test_files_of_the_volume_need_not_be_here(tmp_path: Path) -> None:
    far = {
        "policy.model_name_or_path": "./models/mine",
        "train.train_policy.dataset.name": "/cosmos/data/train.jsonl",
        "train.train_policy.reward_function": "rewards.py:score",
    }
    job = job_of(tmp_path, SMALL | far)
    answer = cosmos(*job, "--target", "kubernetes", "-o", tmp_path / "out").says(0)
    assert answer.stderr.count("warning: ") == 3
    assert "./models/mine is not on this machine: meshes, lengths and options are not checked" in answer.stderr
    found = json.loads(yaml.safe_load((tmp_path / "out" / "base" / "config.yaml").read_text())["data"]["config.json"])
    assert found["policy"]["model_name_or_path"] == "/cosmos/models/mine"
    assert found["train"]["train_policy"]["dataset"]["name"] == "/cosmos/data/train.jsonl"
    assert found["train"]["train_policy"]["reward_function"] == "/cosmos/rewards.py:score"
    cosmos(*job, "--dry-run").complains(2, "./models/mine does not exist", "rewards.py cannot be read")


KUBECTL = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
*{missing}*) echo 'Error from server (NotFound): customresourcedefinitions "x" not found' >&2; exit 1 ;;
esac
"""


def applied(folder: Path, values: dict[str, Any], missing: str) -> tuple[Any, list[str]]:
    """--apply with a kubectl of a cluster that does not have `missing`: what was said, and what kubectl was asked."""
    tool = folder / "bin" / "kubectl"
    tool.parent.mkdir()
    tool.write_text(KUBECTL.format(folder=folder, missing=missing))
    tool.chmod(0o755)
    job = [*job_of(folder, values), "--target", "kubernetes", "--apply", "-o", folder / "out"]
    answer = cosmos(*job, PATH=f"{tool.parent}:/usr/bin:/bin")
    calls = folder / "calls"
    return answer, calls.read_text().splitlines() if calls.exists() else []


def test_apply_asks_first_for_what_the_cluster_must_know(tmp_path: Path) -> None:
    answer, calls = applied(tmp_path, ELASTIC, "nothing")
    answer.says(0)
    assert calls == [
        "get crd jobsets.jobset.x-k8s.io --output=name",
        "get crd scaledobjects.keda.sh --output=name",
        f"apply -k {tmp_path / 'out'}",
    ]


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("jobsets", 'kubernetes.policy_kind = "statefulset"'), ("scaledobjects", 'kubernetes.scaler = "command"')],
)
def test_nothing_is_applied_to_a_cluster_that_lacks_a_kind(tmp_path: Path, missing: str, remedy: str) -> None:
    answer, calls = applied(tmp_path, ELASTIC, missing)
    answer.complains(2, "the cluster does not have", remedy)
    assert not [call for call in calls if call.startswith("apply")]


def test_apply_without_kubectl_names_it(tmp_path: Path) -> None:
    job = [*job_of(tmp_path, SMALL), "--target", "kubernetes", "--apply", "-o", tmp_path / "out"]
    cosmos(*job, PATH=str(tmp_path)).complains(2, "--apply needs kubectl", str(tmp_path / "out"))
