"""`[placement]`: which devices of which machines each role gets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.config.base import MOST_PROCESSES, MOST_RANKS, Section

Device = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Devices = list[Device] | list[list[Device]]


class PlacementConfig(Section):
    """`[placement]`: devices by role. Device i is GPU i % gpus_per_node of node i // gpus_per_node.

    A list of numbers is dealt to the role's replicas in order; a list of lists names the devices of each.
    """

    nodes: int = Field(default=1, ge=1, le=MOST_RANKS, description="Machines of the job.")
    gpus_per_node: int | None = Field(
        default=None,
        ge=0,
        le=MOST_PROCESSES,
        description="GPUs of each machine; 0: none is used. Unset: those that are found.",
    )
    share: Literal["none", "memory", "time"] = Field(
        default="none",
        description="Whether policy and rollout may have the same GPU: `memory`, both resident, each with its "
        "part of the memory; `time`, in turns.",
    )
    policy: Devices = Field(
        default=[], description="Devices of the policy replicas. Empty: dealt automatically."
    )
    rollout: Devices = Field(
        default=[], description="Devices of the rollout replicas. Empty: dealt automatically."
    )
    reference: Devices = Field(default=[], description="Devices of the reference model. Empty: the policy's.")
    critic: Devices = Field(default=[], description="Devices of the critic. Empty: the policy's.")
    reward_model: Devices = Field(
        default=[], description="Devices of the reward model. Empty: dealt automatically."
    )
