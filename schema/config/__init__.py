"""The configuration of a job: one module per TOML section, all re-exported here."""

from __future__ import annotations

from schema.config.availability import UNAVAILABLE, check_available
from schema.config.loading.load import check_config, load_config
from schema.config.paths import local_path
from schema.config.problem import ConfigError, Problem
from schema.config.root import Config
from schema.config.rules import check_rules, check_warnings
from schema.config.sections.dataset import DatasetConfig
from schema.config.sections.evaluation import EvaluationConfig
from schema.config.sections.logging import LoggingConfig
from schema.config.sections.policy import LoraConfig, ParallelismConfig, PolicyConfig
from schema.config.sections.profiler import ProfilerConfig, SubProfilerConfig
from schema.config.sections.redis import RedisConfig
from schema.config.sections.reward import BUILTIN_REWARDS, SOURCE_SCORERS
from schema.config.sections.rollout import (
    MultiTurnRolloutConfig,
    RolloutConfig,
    RolloutParallelismConfig,
    SamplingConfig,
)
from schema.config.sections.train import CheckpointConfig, FP4Config, FP8Config, TrainingConfig
from schema.config.sections.train_policy import (
    GrpoConfig,
    OverlongRewardConfig,
    SFTDataConfig,
)
from schema.config.sections.validation import ValidationConfig

__all__ = [
    "BUILTIN_REWARDS",
    "SOURCE_SCORERS",
    "UNAVAILABLE",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DatasetConfig",
    "EvaluationConfig",
    "FP4Config",
    "FP8Config",
    "GrpoConfig",
    "LoggingConfig",
    "LoraConfig",
    "MultiTurnRolloutConfig",
    "OverlongRewardConfig",
    "ParallelismConfig",
    "PolicyConfig",
    "Problem",
    "ProfilerConfig",
    "RedisConfig",
    "RolloutConfig",
    "RolloutParallelismConfig",
    "SFTDataConfig",
    "SamplingConfig",
    "SubProfilerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "check_available",
    "check_config",
    "check_rules",
    "check_warnings",
    "load_config",
    "local_path",
]
