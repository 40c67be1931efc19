"""Rules of the loss."""

from __future__ import annotations

from schema.config.root import Config


def has_kl(config: Config) -> bool:
    """Whether a KL term needs the reference model."""
    return config.is_grpo and (config.grpo.kl_beta > 0.0 or config.grpo.kl_in_reward.beta > 0.0)
