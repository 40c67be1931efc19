"""`[launcher]`: how cosmos-launch runs the processes of a job. All times are seconds."""

from __future__ import annotations

from schema.config.base import MOST_PROCESSES, Delay, Natural, Seconds, Section
from schema.config.key import key


# fmt: off
class LauncherConfig(Section):
    """`[launcher]`: how the processes of a job are run."""

    max_restarts: Natural = key(3, "Restarts of one replica before the job ends with an error.",
        acts="process: How often a process is started again.")
    restart_backoff: Delay = key(1.0, "Seconds before the first restart; doubled for each further one.",
        acts="process: When a process is started again.")
    restart_backoff_max: Delay = key(60.0, "Longest wait before a restart in seconds.",
        acts="process: When a process is started again.")
    shutdown_timeout: Seconds = key(30.0, "Seconds in which processes may end in order before they are killed.",
        acts="process: When a process that does not end is killed.")
    cpu_threads: int | None = key(None,
        "Torch threads of each worker process. Unset: cores divided by worker processes, at least 1.", ge=1,
        le=MOST_PROCESSES, acts="process: `COSMOS_CPU_THREADS` and `OMP_NUM_THREADS`.", example=4)
    export_final: bool = key(True, "Whether the trained model is exported for transformers at the end.",
        acts="file: `final` in the run's directory.")
