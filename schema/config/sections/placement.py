"""`[placement]`: which devices of which machines each role gets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import MOST_PROCESSES, MOST_RANKS, Ranks, Section
from schema.config.key import key

Device = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Devices = list[Device] | list[list[Device]]


def flat(devices: Devices) -> list[int]:
    """The devices of all replicas, in order."""
    return [device for item in devices for device in (item if isinstance(item, list) else [item])]


# fmt: off
class PlacementConfig(Section):
    """`[placement]`: devices by role. Device i is GPU i % gpus_per_node of node i // gpus_per_node.

    A list of numbers is dealt to the role's replicas in order; a list of lists names the devices of each.
    """

    nodes: Ranks = key(1, "Machines of the job: the same command is run on each, with --head ADDRESS.",
        acts="process: How many machines are waited for, and which processes each runs.", example=2)
    gpus_per_node: int | None = key(None, "GPUs of each machine; 0: none is used. Unset: those that are found.",
        ge=0, le=MOST_PROCESSES, acts="process: `CUDA_VISIBLE_DEVICES` of the processes.", example=8)
    share: Literal["none", "memory", "time"] = key("none",
        "Whether policy and rollout may have the same GPU: `memory`, both resident, each with its part of the "
        "memory; `time`, in turns: replicas generate until a batch is complete, and sleep while it is trained.",
        acts="process: Whether two roles may have one GPU; and whether they take turns.")
    policy: Devices = key([], "Devices of the policy replicas. Empty: dealt automatically.",
        acts="process: `CUDA_VISIBLE_DEVICES` of policy processes.", example=[0, 1])
    rollout: Devices = key([], "Devices of the rollout replicas. Empty: dealt automatically.",
        acts="process: `CUDA_VISIBLE_DEVICES` of rollout processes.", example=[2, 3])
    reference: Devices = key([],
        "Devices of the reference model, one for each data rank of the policy (dp_replicate_size * dp_shard_size): "
        "it is whole on each. Empty, or the policy's: sharded like the policy, on its devices.",
        acts="process: `CUDA_VISIBLE_DEVICES` of policy processes; log: `reference model: on`.", example=[2, 3])
    critic: Devices = key([],
        "Devices of the critic, one for each data rank of the policy: it is sharded over them. Empty, or the "
        "policy's: sharded like the policy, on its devices.",
        acts="process: `CUDA_VISIBLE_DEVICES` of policy processes; log: `critic: on`.", example=[2, 3])
    reward_model: Devices = key([], "Devices of the reward model. Empty: dealt automatically.",
        example=[2, 3], unbuilt="a reward model")
