"""`cosmos-launch` with less patience for what hangs, so that a job whose process was stopped ends in minutes.

python -m tests.chaos.launch …      as cosmos-launch …
"""

from __future__ import annotations

from controller.client import http as client
from launcher import cli, restarts
from launcher.job import redis_pulse, watch

if __name__ == "__main__":
    client.CALL_TIMEOUT = 5.0
    restarts.ROLLOUT_PATIENCE, restarts.POLICY_PATIENCE = 5.0, 20.0
    watch.HUNG_AFTER, watch.LOOK_AT_REPLICAS = 10.0, 2.0
    redis_pulse.LOOK_EVERY = 1.0
    cli.main()
