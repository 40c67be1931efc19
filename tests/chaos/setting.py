"""The job that is struck: a small asynchronous GRPO run with everything on that can be lost.

Several rollout replicas with reward processes of their own, checkpoints (written beside the training) with an export,
validation rounds, two epochs, two policy ranks or replicas in some jobs. Its work is cheap but not instant: the
reward function sleeps, so that kills find processes at work.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.judge import Shape
from tests.e2e.program import VLLM

ROOT = Path(__file__).resolve().parents[2]

REWARD = '''
"""Cheap, deterministic, and not instant; slower for as long as a file is there."""

import os
import time
import zlib


def careful(completion, row, pause, slow):
    time.sleep(pause)
    give_up = time.monotonic() + 0.5
    while os.path.exists(slow) and time.monotonic() < give_up:
        time.sleep(0.05)
    return zlib.crc32(completion.encode()) % 5 / 4
'''

CONFIG = """
[policy]
model_name_or_path = "{model}"
model_max_length = 128
model_gradient_checkpointing = false

[policy.parallelism]
tp_size = 1
dp_shard_size = {ranks}
n_init_replicas = {policies}

[rollout]
backend = "{engine}"
dtype = "float32"
n_generation = {samples}
batch_size = 4
max_response_length = 16
max_concurrent_samples = 32
{rollout}

[rollout.parallelism]
tp_size = 1
n_init_replicas = {replicas}

[rollout.sampling_config]
temperature = 1.0

[reward]
num_workers = 2

[custom]
pause = {pause}
slow = "{out}/slow"

[train]
output_dir = "{out}"
timestamp = "run"
seed = {seed}
epoch = {epochs}
train_batch_per_replica = {batch}
param_dtype = "float32"
compile = false
optm_lr = 1e-3

[train.train_policy]
type = "grpo"
prompt_column_name = "prompt"
response_column_name = "answer"
reward_function = {{ "{out}/reward.py:careful" = 1.0, format = 0.2 }}
allowed_outdated_steps = {bound}

[train.train_policy.dataset]
name = "synthetic:addition"
options = {{ n = {rows}, digits = 2, phrasings = 1 }}

[train.ckpt]
enable_checkpoint = true
save_freq = {save_freq}
save_mode = "{save_mode}"
max_keep = 3
{upload}

[logging]
logger = ["console", "tensorboard"]
samples_dir = "{out}/answers"
log_validation_samples = 2

[validation]
enable = true
freq = {validation_freq}
temperature = 1.0
top_k = -1
reward_function = {{ boxed_math = 1.0 }}

[validation.dataset]
name = "synthetic:addition"
options = {{ n = 8, digits = 2, phrasings = 1, seed = 7 }}

[controller]
heartbeat_interval = 0.5
heartbeat_timeout = 10.0
max_attempts = 1000

[launcher]
cpu_threads = 1
restart_backoff = 0.2
restart_backoff_max = 1.0
max_restarts = 1000
shutdown_timeout = 20.0
{redis}
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all jobs of one run of the script have in common. `pause`: seconds that a reward takes."""

    engine: str = "transformers"
    rows: int = 160
    epochs: int = 2
    replicas: int = 2
    bound: int = 2
    groups_per_step: int = 4
    samples: int = 4
    save_freq: int = 5
    save_mode: str = "async"
    validation_freq: int = 10
    pause: float = 0.08

    @property
    def shape(self) -> Shape:
        return Shape(self.rows, self.epochs, self.groups_per_step, self.samples, self.bound)

    def write(self, folder: Path, model: Path, *, seed: int, ranks: int, policies: int = 1, **servers: str) -> Path:
        """Write the job's configuration, with the keys of `redis` and `upload`, and its reward below `folder`.

        Returns the configuration's path.
        """
        (folder / "reward.py").write_text(REWARD)
        path = folder / "job.toml"
        values = asdict(self) | {"model": model, "out": folder, "seed": seed, "ranks": ranks, "policies": policies}
        values |= {"redis": "", "upload": ""} | servers
        values["rollout"] = VLLM if self.engine == "vllm" else ""
        values["batch"] = self.groups_per_step * self.samples // policies
        path.write_text(CONFIG.format(**values))
        return path
