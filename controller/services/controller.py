"""The controller as one object: a job and those who act on it."""

from __future__ import annotations

from dataclasses import dataclass

from controller.services.job import Operations
from controller.services.leases import Leasing
from controller.services.publications import Publishing
from controller.services.reaper import Upkeep
from controller.services.recovery import Declaring
from controller.services.replicas import Membership
from controller.services.steps import Training
from controller.state.job import Job


@dataclass(frozen=True, slots=True)
class Controller:
    """What the routes call."""

    job: Job
    membership: Membership
    leasing: Leasing
    training: Training
    publishing: Publishing
    declaring: Declaring
    operations: Operations
    upkeep: Upkeep

    @classmethod
    def of(cls, job: Job) -> Controller:
        membership = Membership(job)
        leasing, training, upkeep = Leasing(job), Training(job), Upkeep(job, membership)
        publishing, declaring, operations = Publishing(job, training), Declaring(job), Operations(job)
        return cls(job, membership, leasing, training, publishing, declaring, operations, upkeep)
