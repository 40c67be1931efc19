"""The embedded engine keeps the contract of all engines, in both ways of updating running requests."""

from __future__ import annotations

from dataclasses import replace

from rollout_worker.engines.base import Engine
from rollout_worker.engines.transformers import TransformersEngine
from rollout_worker.engines.transformers.settings import settings_of
from schema.config import Config
from tests.rollout_worker.engine_contract import EOS, EngineContract
from tests.rollout_worker.tiny import tokenizer


class TestTransformers(EngineContract):
    backend = "transformers"

    @classmethod
    def make(cls, config: Config) -> Engine:
        """Without patience: an update never waits for running samples, so it always meets some."""
        return TransformersEngine(replace(settings_of(config), patience=0.0), tokenizer(), frozenset({EOS}))
