"""The configuration of a job: one module per TOML section, all re-exported here."""

from __future__ import annotations

from schema.config.autoscale import AutoscaleConfig
from schema.config.availability import UNAVAILABLE, check_available
from schema.config.controller import ControllerConfig
from schema.config.critic import CriticConfig
from schema.config.dataset import DatasetConfig
from schema.config.evaluation import EvaluationConfig
from schema.config.launcher import LauncherConfig
from schema.config.logging import LoggingConfig
from schema.config.paths import local_path
from schema.config.placement import PlacementConfig
from schema.config.policy import LoraConfig, ParallelismConfig, PolicyConfig
from schema.config.problem import ConfigError, Problem
from schema.config.profiler import ProfilerConfig, SubProfilerConfig
from schema.config.reading.load import check_config, load_config
from schema.config.redis import RedisConfig
from schema.config.reference import ReferenceConfig
from schema.config.reward import BUILTIN_REWARDS, SOURCE_SCORERS, RewardConfig
from schema.config.reward_model import RewardModelConfig
from schema.config.rollout import (
    MultiTurnRolloutConfig,
    RolloutConfig,
    RolloutParallelismConfig,
    SamplingConfig,
)
from schema.config.root import Config
from schema.config.rules import check_rules, check_warnings
from schema.config.train import CheckpointConfig, FP4Config, FP8Config, TrainingConfig
from schema.config.train_policy import (
    GrpoConfig,
    KlInRewardConfig,
    LogProbPassConfig,
    OverlongRewardConfig,
    RolloutCorrectionConfig,
    SFTDataConfig,
)
from schema.config.validation import ValidationConfig
from schema.config.weight_sync import WeightSyncConfig

__all__ = [
    "BUILTIN_REWARDS",
    "SOURCE_SCORERS",
    "UNAVAILABLE",
    "AutoscaleConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "ControllerConfig",
    "CriticConfig",
    "DatasetConfig",
    "EvaluationConfig",
    "FP4Config",
    "FP8Config",
    "GrpoConfig",
    "KlInRewardConfig",
    "LauncherConfig",
    "LogProbPassConfig",
    "LoggingConfig",
    "LoraConfig",
    "MultiTurnRolloutConfig",
    "OverlongRewardConfig",
    "ParallelismConfig",
    "PlacementConfig",
    "PolicyConfig",
    "Problem",
    "ProfilerConfig",
    "RedisConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
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
