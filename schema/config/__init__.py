"""The configuration of a job: one module per TOML section, all re-exported here."""

from __future__ import annotations

from schema.config.availability import UNAVAILABLE, check_available
from schema.config.loading.load import check_config, load_config
from schema.config.paths import local_path
from schema.config.problem import ConfigError, Problem
from schema.config.root import Config
from schema.config.rules import check_rules, check_warnings
from schema.config.sections.autoscale import AutoscaleConfig
from schema.config.sections.controller import ControllerConfig
from schema.config.sections.critic import CriticConfig
from schema.config.sections.dataset import DatasetConfig
from schema.config.sections.evaluation import EvaluationConfig
from schema.config.sections.launcher import LauncherConfig
from schema.config.sections.logging import LoggingConfig
from schema.config.sections.placement import PlacementConfig
from schema.config.sections.policy import LoraConfig, ParallelismConfig, PolicyConfig
from schema.config.sections.profiler import ProfilerConfig, SubProfilerConfig
from schema.config.sections.redis import RedisConfig
from schema.config.sections.reference import ReferenceConfig
from schema.config.sections.reward import BUILTIN_REWARDS, SOURCE_SCORERS, RewardConfig
from schema.config.sections.reward_model import RewardModelConfig
from schema.config.sections.rollout import (
    MultiTurnRolloutConfig,
    RolloutConfig,
    RolloutParallelismConfig,
    SamplingConfig,
)
from schema.config.sections.train import CheckpointConfig, FP4Config, FP8Config, TrainingConfig
from schema.config.sections.train_policy import (
    GrpoConfig,
    KlInRewardConfig,
    LogProbPassConfig,
    OverlongRewardConfig,
    RolloutCorrectionConfig,
    SFTDataConfig,
)
from schema.config.sections.validation import ValidationConfig
from schema.config.sections.weight_sync import WeightSyncConfig

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
