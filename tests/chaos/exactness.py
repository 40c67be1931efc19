"""The same bits, whoever is killed: `python -m tests.chaos.exactness --seeds N`.

    one run that nobody disturbs ─▶ sha256 of final/model.safetensors ─┐
    N runs with kill -9 at random moments ─▶ the same ─────────────────┴─▶ equal, or the first step that differs

What is killed and when is a function of the seed (the moment within a step is the machine's, and that is the point):
the trainer, a rollout replica, the controller, Redis, or the launcher, alone or with all processes of the job at once
as in a power cut; the job is then started with --resume.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from examples.quickstart.make_model import make_model
from tests.e2e.program import Program, write_config
from tests.support.waiting import until

VICTIMS = ("policy_worker", "rollout_worker", "controller", "redis", "launcher", "everything")
RESUMED = ("launcher", "everything")
"""Victims after which a job goes on only when it is started again."""
EXACT = "seed = 3\ndeterministic = true\noptm_warmup_steps = 0"
CHECKPOINTS = """
[train.ckpt]
enable_checkpoint = true
save_freq = {freq}
save_mode = "{mode}"
export_safetensors = false
"""
REWARD = """
def luck(completion, row):
    return float(sum(map(ord, completion)) % 5 == 0)
"""
"""Hangs on every character, and leaves about two groups of four samples in five without signal."""
LOSS = """
import os
import signal
from pathlib import Path

from policy_worker.algorithms.losses import grpo

calls = 0


def loss(tokens, clip):
    global calls
    calls += 1
    order = Path(__file__).with_name("die")
    if calls == 6 and order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return grpo(tokens, clip)
"""
"""Where the trainer crashes on request: the critic has made its optimizer step by then, the policy has not."""
CRITIC = """
[critic]
enable = true
param_dtype = "float32"
model_gradient_checkpointing = false
optm_lr = 1e-3
optm_warmup_steps = 0
"""
SUPERVISED = """
[policy]
model_name_or_path = "{model}"
model_max_length = 128
model_gradient_checkpointing = false

[policy.parallelism]
tp_size = 1

[train]
output_dir = "{out}"
timestamp = "run"
{exact}
max_num_steps = {steps}
train_batch_per_replica = 16
param_dtype = "float32"
compile = false
optm_lr = 1e-3

[train.train_policy]
type = "sft"
mini_batch = 4

[train.train_policy.dataset]
name = "synthetic:addition"
options = {{ n = 2000, digits = 2, demonstrations = true }}

[validation]
enable = true
freq = 5

[validation.dataset]
name = "synthetic:addition"
options = {{ n = 16, digits = 2, demonstrations = true }}

[controller]
heartbeat_interval = 0.5
heartbeat_timeout = 60.0

[launcher]
cpu_threads = 1
restart_backoff = 0.2
shutdown_timeout = 20.0
"""


ROWS = """
class Rows:
    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 30

    def __getitem__(self, i):
        return {"prompt": f"What is {i} + {self.seed}?", "answer": str(i + self.seed)}
"""
MIXTURE = """
[[train.train_policy.dataset.part]]
source = "file"
name = "rows.jsonl"
share = 0.5

[[train.train_policy.dataset.part]]
source = "class"
custom_class = "rows.py:Rows"
share = 0.25

[[train.train_policy.dataset.part]]
source = "other"
name = "{other}"
share = 0.25

[[train.train_policy.curriculum.stage]]
from_step = 4
shares = {{ file = 0.25, class = 0.75 }}

[train.train_policy.curriculum]
order_by_results = "uncertain_first"
leave_out_failed = 1
"""
"""Three sources, of which the first is gone through several times, in an order that follows results."""


@dataclass(frozen=True)
class Kill:
    """Who dies when that many steps are committed, so many seconds later."""

    victim: str
    step: int
    after: float


@dataclass
class Outcome:
    """What is left of a run: the hash of its weights, and what each step reported."""

    digest: str
    steps: list[dict[str, Any]]
    ledger: dict[str, Any]
    validations: list[dict[str, Any]]
    best: dict[str, Any]
    kills: list[str] = field(default_factory=list)

    def first_difference(self, other: Outcome) -> str:
        """The first step whose numbers differ; times and counts of waiting are not compared."""
        for mine, theirs in zip(self.steps, other.steps, strict=False):
            a, b = (_reproducible(step["metrics"]) for step in (mine, theirs))
            if a != b:
                names = [name for name in a if a[name] != b.get(name)]
                return f"step {mine['step']}: " + ", ".join(f"{n} {a[n]!r} {b.get(n)!r}" for n in names)
        return "no step's numbers differ"


def _reproducible(metrics: dict[str, float]) -> dict[str, float]:
    return {
        name.rpartition("/")[2]: value
        for name, value in metrics.items()
        if not name.endswith(("_seconds", "idle_fraction"))
    }


def plan_kills(seed: int, steps: int, victims: Sequence[str] = VICTIMS, n: int = 2) -> list[Kill]:
    """Who is killed when, by the seed; the first victim goes round with it, so that each has its turn."""
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(max(steps - 1, n)), n))
    chosen = [victims[seed % len(victims)], *(chance.choice(victims) for _ in range(n - 1))]
    return [Kill(victim, step, chance.uniform(0.0, 0.5)) for victim, step in zip(chosen, moments, strict=True)]


def exact_grpo(folder: Path, model: Path, *, steps: int, freq: int = 2, mode: str = "sync") -> Path:
    """On-policy, one policy replica, the embedded engine; groups without signal are dropped and replaced."""
    config = write_config(folder, model, bound=0, steps=steps, rows=2000)
    text = config.read_text().replace("seed = 3", EXACT, 1).replace("freq = 4", "freq = 2")
    (folder / "rewards.py").write_text(REWARD)
    text = text.replace(
        "{ boxed_math = 1.0, format = 0.2 }", '{ "rewards.py:luck" = 1.0 }\nfilter_reward_metric = "rewards.py:luck"'
    )
    config.write_text(text + CHECKPOINTS.format(freq=freq, mode=mode))
    return config


def exact_ppo(folder: Path, model: Path, *, steps: int, dies: bool = False, **rest: Any) -> Path:
    """The same with a critic. dies: once, the trainer does so between the critic's step and the policy's."""
    config = exact_grpo(folder, model, steps=steps, **rest)
    (folder / "loss.py").write_text(LOSS)
    if dies:
        (folder / "die").touch()
    chosen = 'type = "grpo"\nadvantage_estimator = "gae"\ngae_lambda = 0.9\nvariant = "loss.py:loss"'
    config.write_text(config.read_text().replace('type = "grpo"', chosen, 1) + CRITIC)
    return config


def exact_mixture(folder: Path, model: Path, *, steps: int, other: str = "other.csv", **rest: Any) -> Path:
    """PPO on three sources with shares and a curriculum. other: path or address of the third, which `CSV` fills."""
    return mixed(folder, exact_ppo(folder, model, steps=steps, **rest), other)


CSV = "prompt,answer\n" + "".join(f'"What is {i}, and 1 more?",{i + 1}\n' for i in range(12))


def mixed(folder: Path, config: Path, other: str) -> Path:
    """Make the data of a job a mixture. other: path or address of its third source."""
    rows = ({"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(6))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.py").write_text(ROWS)
    (folder / "other.csv").write_text(CSV)
    before, _, after = config.read_text().partition("[train.train_policy.dataset]")
    config.write_text(before + MIXTURE.format(other=other) + after[after.index("[validation]") :])
    return config


def exact_sft(folder: Path, model: Path, *, steps: int, freq: int = 10, mode: str = "sync") -> Path:
    """Supervised training of the same model."""
    text = SUPERVISED.format(model=model, out=folder, exact=EXACT, steps=steps)
    config = folder / "job.toml"
    config.write_text(text + CHECKPOINTS.format(freq=freq, mode=mode))
    return config


def run(config: Path, kills: Sequence[Kill] = ()) -> Outcome:
    """One run to its end, disturbed by these kills. Fails when it does not end well."""
    done: list[str] = []
    pending = list(kills)
    arguments: tuple[str, ...] = ()
    while True:
        with Program(config, arguments) as program:
            if _survives(program, pending, done):
                return _outcome(program.finish(), program.run_dir, done)
        arguments = ("--resume",)


def _survives(program: Program, pending: list[Kill], done: list[str]) -> bool:
    """Move kills from `pending` to `done`, as far as the job goes on by itself: False where it must be resumed."""
    while pending:
        kill = pending.pop(0)
        if not _reached(program, kill):
            pending.clear()
            break
        _strike(program, kill.victim)
        done.append(f"{kill.victim} {kill.after:.2f} s after step {kill.step}")
        if kill.victim in RESUMED:
            return False
    return True


def _reached(program: Program, kill: Kill) -> bool:
    """Wait for the moment of a kill; False when the job is over before."""
    try:
        program.until_step(kill.step)
    except AssertionError:
        if program.process.poll() == 0:
            return False
        raise
    time.sleep(kill.after)
    return program.process.poll() is None


def _strike(program: Program, victim: str) -> None:
    processes = program.processes()
    if victim in RESUMED:
        program.process.kill()
        for process in processes if victim == "everything" else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        program.wait()
        program.wait_no_orphans()
    elif victim == "redis":
        os.kill(_redis(program), signal.SIGKILL)
    else:
        program.kill(victim)


def _redis(program: Program) -> int:
    def found() -> int | None:
        for process in program.processes():
            try:
                if "valkey-server" in process.name():
                    return process.pid
            except psutil.Error:
                continue
        return None

    return until(found, "an embedded Redis")


def _outcome(summary: dict[str, Any], run_dir: Path, kills: list[str]) -> Outcome:
    digest = hashlib.sha256((run_dir / "final" / "model.safetensors").read_bytes()).hexdigest()
    validations = [
        {name: value for name, value in record.items() if name != "at"} for record in summary["validations"]
    ]
    best = run_dir / "checkpoints" / "best.json"
    named = json.loads(best.read_text()) if best.exists() else {}
    return Outcome(digest, summary["steps"], summary["ledger"], validations, named, kills)


def check_same(calm: Outcome, disturbed: Outcome) -> None:
    """The weights are equal bit for bit. Raises AssertionError with the first step that differs."""
    where = f"after {disturbed.kills}: {calm.first_difference(disturbed)}"
    assert disturbed.digest == calm.digest, f"the final weights differ {where}"


MAKERS = {"grpo": exact_grpo, "ppo": exact_ppo, "mixture": exact_mixture, "sft": exact_sft}


def main() -> int:
    """Run the comparison and print what was killed; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--kind", choices=tuple(MAKERS), default="grpo")
    arguments = parser.parse_args()
    make = MAKERS[arguments.kind]
    victims = [v for v in VICTIMS if arguments.kind != "sft" or v != "rollout_worker"]
    differing = []
    with tempfile.TemporaryDirectory(prefix="cosmos-exactness-") as name:
        root = Path(name)
        make_model(root / "model", 1)

        def once(label: str, kills: Sequence[Kill]) -> Outcome:
            folder = root / label
            folder.mkdir()
            return run(make(folder, root / "model", steps=arguments.steps, mode=arguments.mode), kills)

        calm = once("calm", ())
        sys.stdout.write(f"calm: {calm.digest}\n")
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            found = once(f"seed-{seed}", plan_kills(seed, arguments.steps, victims, arguments.kills))
            same = found.digest == calm.digest
            if not same:
                differing.append(seed)
            sys.stdout.write(f"seed {seed}: {'equal' if same else 'DIFFERENT'}; {'; '.join(found.kills)}\n")
            if not same:
                sys.stdout.write(f"    {calm.first_difference(found)}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps({"runs": arguments.seeds, "different_seeds": differing}) + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
