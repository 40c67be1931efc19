"""Errors of a replica that `__main__` gives exit codes to, and that need nothing heavy to import."""

from __future__ import annotations


class StoreSettingsError(Exception):
    """The weight store cannot be read with these settings, a restart would not help: names key, value and remedy."""


class WeightsUnreadableError(Exception):
    """Published weights could not be had for as long as they are tried: says why, and how often it was tried."""
