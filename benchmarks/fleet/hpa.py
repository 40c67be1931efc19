"""A HorizontalPodAutoscaler that reads the controller's number, as KEDA makes one: its published formula.

    ceil(metric / target), unless metric / (target · present replicas) is within the tolerance of 1

with a target of 1 for each replica (`AverageValue`), at most max(4, 100 %) more replicas in 15 s, and any number
fewer: the default policies, without the stabilisation that the controller has done already. Source: the Kubernetes
documentation, "Horizontal Pod Autoscaling", algorithm and scaling policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SYNC_S = 15.0
"""Between two looks, and the period of its policies."""
TOLERANCE = 0.1
"""By default. A ScaledObject can set another one where the cluster knows the field."""
MORE_PODS, MORE_SHARE = 4, 1.0


@dataclass(frozen=True)
class Hpa:
    """minimum, maximum: replicas. tolerance: share by which metric and replicas may differ."""

    minimum: int
    maximum: int
    tolerance: float = TOLERANCE

    def replicas(self, present: int, metric: float | None) -> int:
        """What it wants next. metric: None where nobody answers; the number stays then. At 0 only KEDA, which
        starts the first replica, looks at the metric."""
        if metric is None:
            return present
        if present == 0:
            return max(1, self.minimum) if metric > 0 else 0
        within = abs(metric / present - 1.0) <= self.tolerance
        wanted = present if within else min(max(math.ceil(metric), self.minimum), self.maximum)
        return min(wanted, max(present + MORE_PODS, math.ceil(present * (1.0 + MORE_SHARE))))
