"""The configuration of a job: one module per TOML section, all re-exported here."""

from __future__ import annotations

from schema.config.controller import ControllerConfig
from schema.config.launcher import LauncherConfig
from schema.config.logging import LoggingConfig
from schema.config.policy import LoraConfig, ParallelismConfig, PolicyConfig
from schema.config.profiler import ProfilerConfig, SubProfilerConfig
from schema.config.redis import RedisConfig
from schema.config.reward import BUILTIN_REWARDS, RewardConfig
from schema.config.rollout import (
    MultiTurnRolloutConfig,
    RolloutConfig,
    RolloutParallelismConfig,
    SamplingConfig,
)
from schema.config.root import Config
from schema.config.train import CheckpointConfig, FP4Config, FP8Config, TrainingConfig
from schema.config.train_policy import DatasetConfig, GrpoConfig, OverlongRewardConfig, SFTDataConfig
from schema.config.validation import ValidationConfig
from schema.config.weight_sync import WeightSyncConfig

__all__ = [
    "BUILTIN_REWARDS",
    "CheckpointConfig",
    "Config",
    "ControllerConfig",
    "DatasetConfig",
    "FP4Config",
    "FP8Config",
    "GrpoConfig",
    "LauncherConfig",
    "LoggingConfig",
    "LoraConfig",
    "MultiTurnRolloutConfig",
    "OverlongRewardConfig",
    "ParallelismConfig",
    "PolicyConfig",
    "ProfilerConfig",
    "RedisConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutParallelismConfig",
    "SFTDataConfig",
    "SamplingConfig",
    "SubProfilerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "WeightSyncConfig",
]
