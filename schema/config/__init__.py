"""The configuration of a job: one module per TOML section, all re-exported here."""

from __future__ import annotations

from schema.config.availability import UNAVAILABLE, check_available
from schema.config.controller import ControllerConfig
from schema.config.launcher import LauncherConfig
from schema.config.load import check_config, load_config
from schema.config.logging import LoggingConfig
from schema.config.paths import local_path
from schema.config.policy import LoraConfig, ParallelismConfig, PolicyConfig
from schema.config.problem import ConfigError, Problem
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
from schema.config.rules import check_rules, check_warnings
from schema.config.train import CheckpointConfig, FP4Config, FP8Config, TrainingConfig
from schema.config.train_policy import DatasetConfig, GrpoConfig, OverlongRewardConfig, SFTDataConfig
from schema.config.validation import ValidationConfig
from schema.config.weight_sync import WeightSyncConfig

__all__ = [
    "BUILTIN_REWARDS",
    "UNAVAILABLE",
    "CheckpointConfig",
    "Config",
    "ConfigError",
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
    "Problem",
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
    "check_available",
    "check_config",
    "check_rules",
    "check_warnings",
    "load_config",
    "local_path",
]
