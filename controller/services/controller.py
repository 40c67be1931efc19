"""The controller as one object: a job and those who act on it."""

from __future__ import annotations

from dataclasses import dataclass

from controller.services.answers import AnswerService
from controller.services.autoscale import AutoscaleService
from controller.services.dashboard import DashboardService
from controller.services.events import EventService
from controller.services.job import JobService
from controller.services.leases import LeaseService
from controller.services.publications import PublicationService
from controller.services.reaper import Reaper
from controller.services.recovery import RecoveryService
from controller.services.replicas import ReplicaService
from controller.services.samples import SampleService
from controller.services.trainers.members import MemberService
from controller.services.trainers.steps import StepService
from controller.state.job import JobState


@dataclass(frozen=True, slots=True)
class Controller:
    """The routes call its services."""

    job: JobState
    replicas: ReplicaService
    leases: LeaseService
    samples: SampleService
    steps: StepService
    members: MemberService
    publications: PublicationService
    recovery: RecoveryService
    job_service: JobService
    events: EventService
    dashboard: DashboardService
    autoscale: AutoscaleService
    reaper: Reaper

    @classmethod
    def of(cls, job: JobState) -> Controller:
        samples, status = SampleService(job), JobService(job)
        answers = AnswerService(job, samples)
        steps, members = StepService(job, answers), MemberService(job)
        replicas, leases = ReplicaService(job, samples), LeaseService(job)
        autoscale = AutoscaleService(job, leases)
        return cls(
            job,
            replicas,
            leases,
            samples,
            steps,
            members,
            PublicationService(job, steps),
            RecoveryService(job, samples),
            status,
            EventService(job, answers),
            DashboardService(job, status, replicas),
            autoscale,
            Reaper(job, replicas, members, autoscale),
        )
