"""Faults of a trainer, by what the launcher should do about it.

exit code 0   JobFinishedError: there is nothing left to train
1             PolicyError and its kinds without a code of their own: a crash; restarting may help
2             SettingsError and its kinds: these settings cannot work, restarting will not help
4             NoCheckpointError: steps were committed, and there is nothing to resume from
6             UnlikeError: other policy replicas cannot train with this one
"""

from __future__ import annotations


class PolicyError(Exception):
    """Base of everything that a trainer raises on purpose."""

    exit_code = 1


class NonFiniteGradientError(PolicyError):
    """A gradient is NaN or infinite: applying it would destroy the weights."""


class OwnCodeFailedError(PolicyError):
    """A user's estimator or loss raised, or returned what cannot be used: nothing of the step counts."""


class BadBatchError(PolicyError):
    """A batch whose payloads contradict its table or the staleness bound."""


class ReplacedError(PolicyError):
    """The controller knows a newer incarnation of this replica, or does not know it any more."""


class LeftBehindError(PolicyError):
    """The other policy replicas went on without this one, or are gone: it has to begin anew."""


class DiffersError(PolicyError):
    """This replica's weights are not those of the other policy replicas: it has to load theirs."""


class ExchangeFailedError(PolicyError):
    """Policy replicas live, and cannot exchange gradients."""


class UnlikeError(PolicyError):
    """This replica is of another code, model or mesh than the policy replicas that train already, or cannot load
    their weights."""

    exit_code = 6


class RendezvousError(PolicyError):
    """Ranks of this replica did not come, or cannot reach each other."""


class CheckpointSaveError(PolicyError):
    """A checkpoint could not be written. Nothing was deleted: older checkpoints are as they were."""


class ExportError(PolicyError):
    """The trained model could not be written. Nothing was deleted."""


class UploadError(Exception):
    """An upload failed for good, and the run goes on: says what, why and what to do. Nothing was deleted."""


class UploadStoppedError(Exception):
    """The process leaves; the upload goes on at its next start."""


class UploadFailedError(PolicyError):
    """The final upload failed, or did not end in time. Nothing was deleted."""


class PublishError(PolicyError):
    """A version could not be written to the weight store for as long as this is tried again."""


class JobFinishedError(PolicyError):
    """A trainer that was started again after the job had finished."""

    exit_code = 0


class SettingsError(PolicyError):
    """The configuration asks for something that this machine, model or build cannot do."""

    exit_code = 2


class SampleTooLongError(SettingsError):
    """A sample does not fit into a micro-batch."""


class TeacherError(SettingsError):
    """A teacher's server refuses, or answers of other tokens. One that is away is waited for."""


class CheckpointError(SettingsError):
    """A checkpoint that cannot be resumed from: of another model or format, or without what is asked for."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, short, or not what was written."""


class NoCheckpointError(PolicyError):
    """The run has committed steps, and no checkpoint holds their weights."""

    exit_code = 4
