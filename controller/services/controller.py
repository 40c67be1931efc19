"""The controller as one object: a job and those who act on it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from controller.services.auth import Caller, Tokens
from controller.services.errors import ProblemError
from controller.services.job import Operations
from controller.services.leases import Leasing
from controller.services.publications import Publishing
from controller.services.reaper import Upkeep
from controller.services.recovery import Declaring
from controller.services.replicas import Membership
from controller.services.steps import Training
from controller.state.job import Job
from schema.wire.messages import ErrorCode
from schema.wire.secret import REPLICA_HEADER


@dataclass(frozen=True, slots=True)
class Controller:
    """What the routes call."""

    job: Job
    tokens: Tokens
    membership: Membership
    leasing: Leasing
    training: Training
    publishing: Publishing
    declaring: Declaring
    operations: Operations
    upkeep: Upkeep

    @classmethod
    def of(cls, job: Job, tokens: Tokens) -> Controller:
        membership = Membership(job)
        leasing, training, upkeep = Leasing(job), Training(job), Upkeep(job, membership)
        publishing, declaring, operations = Publishing(job, training), Declaring(job), Operations(job)
        return cls(job, tokens, membership, leasing, training, publishing, declaring, operations, upkeep)

    def require_own(self, request: Request, caller: Caller, replica_id: str) -> None:
        """A replica's token, with the secret of its registration, speaks for that replica alone.

        Raises `ProblemError`, `ReplicaError`.
        """
        if caller == "user":
            return
        role = self.job.registry.find(replica_id).role
        if role != caller:
            detail = f"replica {replica_id} is a {role} replica, this is the token of {caller}"
            raise ProblemError(ErrorCode.FORBIDDEN, detail)
        self.job.registry.prove(replica_id, request.headers.get(REPLICA_HEADER, ""))
