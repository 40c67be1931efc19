"""`[kubernetes]`: what `--target kubernetes` writes into its manifests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import MOST_PROCESSES, Section
from schema.config.key import key

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_QUALIFIED = r"([A-Za-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
Name = Annotated[str, Field(pattern=rf"^{_LABEL}$")]
"""The name of a namespace or an object: a DNS label."""
ObjectName = Annotated[str, Field(pattern=rf"^({_LABEL}(\.{_LABEL})*)?$", max_length=253)]
Image = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@-]*$", max_length=512)]
Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti|M|G|T)$")]
"""Bytes as Kubernetes writes them."""
LabelKey = Annotated[str, Field(pattern=rf"^{_QUALIFIED}$")]
Selector = dict[LabelKey, Annotated[str, Field(pattern=rf"^{_VALUE}$")]]
Taint = Annotated[str, Field(pattern=rf"^{_QUALIFIED}(={_VALUE})?:(NoSchedule|PreferNoSchedule|NoExecute)$")]
"""A taint as `kubectl taint` writes it."""


# fmt: off
class KubernetesConfig(Section):
    """`[kubernetes]`: the job as manifests. Means nothing to a job that is run from here."""

    namespace: Name = key("default", "Namespace of the job, which has to be there.",
        acts="file: Namespace in the manifests, and in addresses.", example="training")
    image: Image = key("",
        "Image of the job's pods, with a tag or a digest; cosmos-launch is on its PATH. The manifests need it, or "
        "one for each role.", acts="file: Image of the pods.", example="registry.example.com/cosmos-launch:0.1.0")
    controller_image: Image = key("",
        "Image of the controller and of the pod that scales, which need no torch. Empty: kubernetes.image.",
        acts="file: Image of these pods.", example="registry.example.com/cosmos-controller:0.1.0")
    policy_image: Image = key("", "Image of the policy's pods. Empty: kubernetes.image.",
        acts="file: Image of these pods.", example="registry.example.com/cosmos-policy:0.1.0")
    rollout_image: Image = key("", "Image of the rollout pods. Empty: kubernetes.image.",
        acts="file: Image of these pods.", example="registry.example.com/cosmos-rollout:0.1.0")
    pull_secrets: list[Annotated[ObjectName, Field(min_length=1)]] = key([],
        "Secrets with which nodes pull the images from a registry that asks for them.",
        acts="file: Pull secrets of the pods.", example=["registry"])
    redis_image: Annotated[Image, Field(min_length=1)] = key("valkey/valkey:9.0",
        "Image of the Valkey or Redis server, where redis.url names none.", acts="file: Image of the server's pod.")
    claim: ObjectName = key("",
        "PersistentVolumeClaim that all pods can write (ReadWriteMany), for the run directory. Empty: one is made.",
        acts="file: Claim of the pods' volume.", example="shared-disk")
    storage_class: ObjectName = key("",
        "StorageClass of the claim that is made; it has ReadWriteMany. Empty: the cluster's default.",
        acts="file: StorageClass of the claim.", example="shared-files")
    storage_size: Quantity = key("100Gi", "Size of the claim that is made.", acts="file: Size of the claim.")
    volume_path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")] = key("/cosmos",
        "Where the pods see the claim. Relative paths of the configuration are below it.",
        acts="file: Mount of the claim, and paths of the configuration that pods read.")
    environment_secret: ObjectName = key("",
        "Secret whose entries policy and rollout pods get as variables, HF_TOKEN or AWS_ACCESS_KEY_ID for example.",
        acts="file: Environment of the pods.", example="hub-and-bucket")
    standby: bool = key(False,
        "Whether a second controller stands by, which takes the job over when the first one ends.",
        acts="file: Pods of the controller.")
    policy_kind: Literal["jobset", "statefulset"] = key("jobset",
        "What the policy is: a JobSet, which the cluster must know, or a StatefulSet for a replica of one pod.",
        acts="file: Kind of the policy's manifest.")
    scaler: Literal["keda", "hpa", "command", "none"] = key("keda",
        "Who obeys the controller's number of rollout replicas (autoscale.enable): KEDA, which the cluster has; a "
        "HorizontalPodAutoscaler, to which an adapter of metrics hands the controller's; a pod of the job that runs "
        "`cosmos-launch autoscale`; or nobody.", acts="file: Manifests of the scaler.")
    deletion_cost: bool = key(False,
        "Whether a pod of the job keeps the deletion cost of rollout pods at the work that they have in hand, so "
        "that those with the least go first when the number falls. Its account may read and change all pods of the "
        "namespace.", acts="file: Rights and command of the pod that scales.")
    metrics_namespace: Annotated[str, Field(pattern=rf"^({_LABEL})?$")] = key("",
        "Namespace of the Prometheus that reads the controller's /metrics. Empty: none may.",
        acts="file: Network policy of the controller.", example="monitoring")
    pod_cpus: int = key(8, "Processor cores of each policy or rollout pod.",
        ge=1, le=MOST_PROCESSES, acts="file: Requests and threads of the pods.")
    pod_memory: Quantity = key("64Gi", "Memory of each policy or rollout pod.",
        acts="file: Memory limit of the pods.")
    node_selector: Selector = key({}, "Labels of the nodes on which policy and rollout pods run.",
        acts="file: Node selector of the pods.", example={"gpu": "h100"})
    rollout_selector: Selector = key({}, "Further labels of the nodes of rollout pods: spot instances.",
        acts="file: Node selector of the rollout pods.", example={"cloud.google.com/gke-spot": "true"})
    rollout_tolerations: list[Taint] = key([], "Taints that rollout pods tolerate, as `kubectl taint` writes them.",
        acts="file: Tolerations of the rollout pods.", example=["cloud.google.com/gke-spot=true:NoSchedule"])
    topology_key: Annotated[str, Field(pattern=rf"^({_QUALIFIED})?$")] = key("",
        "Label of nodes over whose values rollout pods are spread, as evenly as there is room. Where an engine has "
        "several pods, they are all in one value, which no other engine has. Empty: anywhere.",
        acts="file: Topology spread of the rollout pods.", example="topology.kubernetes.io/zone")
