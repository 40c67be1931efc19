"""Faults of published weights, as one exception that names the file or tensor."""

from __future__ import annotations


class WeightError(RuntimeError):
    """A version cannot be published or used: the message names what is wrong and where.

    No weight of a version that raised it has been handed out."""


class NotReadableError(WeightError):
    """Missing, short or different from its hash: on a shared file system it may still be on its way."""


class StoreError(WeightError):
    """A store refuses for good, or has failed for longer than it is tried again: says what, why and what to do."""


class StoppedError(WeightError):
    """The process leaves: what it waited for was given up."""
