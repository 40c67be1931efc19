"""When a process that lives counts as hung: a pure decision, so that no silent replica holds a job up for ever.

A replica that misses its heartbeats is `lost` for the controller, which gives its work to others; the process may be
stopped, or stuck in a call that never returns, and nobody would start it again. One that stays silent for much longer
is killed and restarted like one that crashed.
"""

from __future__ import annotations

from schema.wire.messages import ReplicaInfo

ROLLOUT_PATIENCE, POLICY_PATIENCE = 60.0, 300.0
"""Seconds of silence beyond `controller.heartbeat_timeout`. Both beat while they load or compute, so a minute means
trouble; a trainer gets more, since its restart costs the steps since the newest checkpoint."""


def is_hung(info: ReplicaInfo, up_for: float, heartbeat_timeout: float) -> bool:
    """Whether a replica's process must be killed.

    info: what the controller knows of the newest incarnation. up_for: seconds since its present process was started;
    a silence that began before is not its own.
    """
    patience = ROLLOUT_PATIENCE if info.role == "rollout" else POLICY_PATIENCE
    silent = info.last_seen_s
    return info.state == "lost" and silent < up_for and silent > heartbeat_timeout + patience
