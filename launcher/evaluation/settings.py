"""The configuration of one model's job: that of the user, of which everything about training is taken away.

What stays is the engine, the validation data, the rewards, and how answers are drawn. Tokenizer and chat template are
the model's own; a tokenizer that the configuration names is for the configuration's model, and a chat template that
it names (`rollout.multi_turn_config`) for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import LaunchError
from launcher.evaluation.models import EvaluatedModel
from launcher.paths import resolved
from schema.config import Config
from schema.config.loading.load import load
from schema.config.loading.tomlwrite import toml_value

MODEL = "policy.model_name_or_path"
SAMPLE_BYTES = 1 << 40
"""The answers of an evaluation are all kept."""
_DEFAULTS = {
    "train": ("resume", "ckpt"),
    "policy": ("parallelism", "lora"),
    "placement": ("share", "policy", "reference", "critic", "nodes"),
    "weight_sync": ("transport", "lora", "store"),
    "controller": ("host", "port", "payload_store"),
}
"""Keys that become what they are by default: those of training, and of services that the user's jobs have."""
_SECTIONS = ("autoscale", "kubernetes", "profiler", "redis")
"""Sections that become what they are by default."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn, as far as the command line says; None: as `[validation]` says."""

    n_generation: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_length: int | None = None
    pass_score: float | None = None

    def changes(self, validation: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of `[validation]` that change. A temperature takes effect, whatever top_k was before."""
        given = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        if self.top_k is None and self.temperature == 0.0:
            given["top_k"] = 1
        elif self.top_k is None and self.temperature is not None and validation.get("top_k") == 1:
            given["top_k"] = -1
        return given


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that all models of an evaluation have in common."""

    configs: Sequence[Path]
    overrides: Sequence[str]
    sampling: Sampling
    engine: str = ""
    replicas: int | None = None

    def of_model(self, model: EvaluatedModel, directory: Path, env: Mapping[str, str]) -> dict[str, Any]:
        """The configuration of one model's job, below the directory of the evaluation.

        Raises ConfigError; LaunchError: it has no rewards, or nothing to validate on.
        """
        model_override = [f"{MODEL}={toml_value(model.path)}"] if model.given else []
        engine = [f"rollout.backend={toml_value(self.engine)}"] if self.engine else []
        config = load(self.configs, [*self.overrides, *model_override, *engine], env).config
        _refuse(config, self.configs)
        data, defaults = resolved(config), Config().to_dict()
        for section, names in _DEFAULTS.items():
            data[section] |= {name: defaults[section][name] for name in names}
        data |= {section: defaults[section] for section in _SECTIONS}
        if model.given:
            data["policy"] |= {"model_revision": None, "tokenizer_name_or_path": None}
        data["train"] |= {"output_dir": str(directory), "timestamp": model.label}
        data["logging"] |= {"logger": [], "sample_bytes": SAMPLE_BYTES}
        mesh = data["rollout"]["parallelism"]
        mesh["n_init_replicas"] = self.replicas or mesh["n_init_replicas"]
        validation = data["validation"]
        validation |= {"enable": True, "before": True, "only": True, "max_replicas": mesh["n_init_replicas"]}
        changed = self.sampling.changes(validation)
        validation |= changed
        for part in validation["dataset"]["part"]:  # the command line counts for all sets
            changes = self.sampling.changes(part)
            part |= {name: changes[name] if name == "top_k" else None for name in changes}
        return data


def _refuse(config: Config, files: Sequence[Path]) -> None:
    named = " ".join(map(str, files))
    if config.is_evaluation:
        raise LaunchError(f"{named} scores answers of a file", "cosmos-launch eval --answers FILE --config run.toml")
    if not config.is_grpo:
        has = "its prompts are parts of conversations" if config.generates else "it has no rewards"
        raise LaunchError(
            f"{named} trains on conversations: {has}, and an evaluation asks prompts and scores answers",
            "name a configuration of reinforcement learning with --config: its data, rewards and engine are used",
        )
    if not config.validation.dataset.is_named and not config.train.train_policy.dataset.holds_out:
        raise LaunchError(
            f"{named} names no prompts to evaluate on",
            "--set validation.dataset.name=owner/name, or files in validation.dataset.files",
        )
