"""`[autoscale]`: how many rollout replicas there are while the job runs. All times are seconds."""

from __future__ import annotations

from schema.config.base import MOST_RANKS, Delay, Ranks, Seconds, Section, UnitFloat
from schema.config.key import key


# fmt: off
class AutoscaleConfig(Section):
    """`[autoscale]`: rollout replicas that come and go with the need."""

    enable: bool = key(False,
        "Whether the number of rollout replicas follows the need. The launcher applies it; scalers of clusters read "
        "it from GET /v1/autoscale.",
        acts="request or reply: Whether the controller changes the number of rollout replicas that it asks for.")
    min_replicas: int = key(1,
        "Fewest rollout replicas. While the job runs there is one at least.", ge=0, le=MOST_RANKS,
        acts="request or reply: The least number of rollout replicas that the controller asks for.")
    max_replicas: Ranks = key(8, "Most rollout replicas.",
        acts="request or reply: The largest number of rollout replicas that the controller asks for.")
    interval: Seconds = key(30.0, "Seconds between two decisions.",
        acts="request or reply: When the number of rollout replicas is decided anew.")
    target_wait: UnitFloat = key(0.1,
        "Share of its time that the trainer may wait for samples before replicas are added.",
        acts="request or reply: Whether replicas are requested for a trainer that waits this much.")
    scale_down_delay: Delay = key(300.0, "Seconds of too little work before a replica is drained.",
        acts="request or reply: When the number of rollout replicas falls.")
