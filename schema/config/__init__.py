"""The configuration of a job: one module per TOML section; what other packages import is re-exported here."""

from __future__ import annotations

from schema.config.availability import UNAVAILABLE, check_available
from schema.config.base import short_names
from schema.config.loading.load import check_config, load_config
from schema.config.paths import local_path
from schema.config.problem import ConfigError, Problem
from schema.config.root import Config
from schema.config.rules import check_model_warnings, check_rules, check_warnings
from schema.config.sections.critic import CriticConfig
from schema.config.sections.dataset import DatasetConfig
from schema.config.sections.evaluation import EvaluationConfig
from schema.config.sections.policy import PolicyConfig
from schema.config.sections.redis import RedisConfig
from schema.config.sections.reward import BUILTIN_REWARDS, SOURCE_SCORERS, RewardConfig
from schema.config.sections.train import CheckpointConfig, TrainingConfig
from schema.config.sections.train_policy import GrpoConfig, OverlongRewardConfig, SFTDataConfig

__all__ = [
    "BUILTIN_REWARDS",
    "SOURCE_SCORERS",
    "UNAVAILABLE",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DatasetConfig",
    "EvaluationConfig",
    "GrpoConfig",
    "OverlongRewardConfig",
    "PolicyConfig",
    "Problem",
    "RedisConfig",
    "RewardConfig",
    "SFTDataConfig",
    "TrainingConfig",
    "check_available",
    "check_config",
    "check_model_warnings",
    "check_rules",
    "check_warnings",
    "load_config",
    "local_path",
    "short_names",
]
