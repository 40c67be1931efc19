"""`[autoscale]`: how many rollout replicas there are while the job runs. All times are seconds."""

from __future__ import annotations

from schema.config.base import MOST_RANKS, Delay, Ranks, Seconds, Section, UnitFloat
from schema.config.key import key


class AutoscaleConfig(Section):
    """`[autoscale]`: rollout replicas that come and go with the need."""

    enable: bool = key(False, "Whether the number of rollout replicas follows the need.")
    min_replicas: int = key(1, "Fewest rollout replicas.", ge=0, le=MOST_RANKS)
    max_replicas: Ranks = key(8, "Most rollout replicas.")
    interval: Seconds = key(30.0, "Seconds between two decisions.")
    target_wait: UnitFloat = key(
        0.1, "Share of its time that the trainer may wait for samples before replicas are added."
    )
    scale_down_delay: Delay = key(300.0, "Seconds of too little work before a replica is drained.")
