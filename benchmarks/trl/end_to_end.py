"""Our asynchronous GRPO next to TRL's synchronous GRPOTrainer: same model, data, rewards and batch, in turns.

    python -m benchmarks.trl.end_to_end [--rounds 3] [--steps 60] [--engine transformers|vllm] [--trl-threads 2]

Both start from the same warm-started model and take 16 prompts x 8 samples a step. The rounds alternate (ours,
TRL, ours, TRL, …), so that whatever else the machine does hits both. Speed is the steady state's: samples
trained between the first and the last commit (TRL: the ends of the first and of the last step). Validation is
off in both. TRL runs in an environment of its own, `.venv-trl`, made on demand.

The last line is JSON: ours_samples_s, trl_samples_s, ratio, policy_idle, rollout_idle (medians of the rounds).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import QUICKSTART, ROOT

sys.path.append(str(QUICKSTART))

from report import Phase

from benchmarks.trl.venv import trl_python
from controller.data.synthetic import AdditionOptions, AdditionSource
from schema.config import Config, load_config

JOB_TIMEOUT = 1200.0  # seconds that one job may take: ten times what it takes on two cores


def run(command: list[str], log: Path, env: dict[str, str] | None = None) -> str:
    """Run a command to its end; answers its stdout. Shows the end of the log if it fails."""
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                timeout=JOB_TIMEOUT,
                env=env,
                check=False,
            )
        except subprocess.TimeoutExpired:
            sys.exit(f"{' '.join(command[:3])} took more than {JOB_TIMEOUT:.0f} s; see {log}")
        file.write(done.stdout)
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        sys.exit(f"{' '.join(command[:3])} ended with code {done.returncode}:\n{tail}")
    return done.stdout


class Bench:
    """One benchmark: a working directory with a warm-started model, and a run of each trainer on demand."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.warm_model = work / "sft" / "final"
        self.trl = trl_python(options.trl_venv.absolute())

    def cosmos(self, config: str, name: str, model: Path, *settings: str) -> Phase:
        """One job of cosmos-launch."""
        wanted = (
            f'policy.model_name_or_path="{model}"',
            f'train.output_dir="{self.work}"',
            f'train.timestamp="{name}"',
            f"train.seed={self.options.seed}",
            *settings,
        )
        command = [str(Path(sys.executable).with_name("cosmos-launch")), "--config", str(QUICKSTART / config)]
        started = time.time()
        run([*command, *(part for item in wanted for part in ("--set", item))], self.work / f"{name}.log")
        return Phase.read(self.work / name, started, time.time())

    def warm_start(self) -> None:
        make = [sys.executable, str(QUICKSTART / "make_model.py"), "--out", str(self.work / "model")]
        run([*make, "--seed", str(self.options.seed)], self.work / "model.log")
        self.cosmos("sft_plain.toml", "sft", self.work / "model")

    def ours(self, index: int) -> dict[str, float]:
        """One asynchronous run."""
        config, settings = "grpo_plain.toml", ["validation.enable=false", f"train.max_num_steps={self.steps}"]
        if self.options.engine == "vllm":
            config = "grpo_vllm.toml"
            settings.append("train.train_policy.dataset.options.phrasings=1")
        settings += self.options.set
        phase = self.cosmos(config, f"ours-{index}", self.warm_model, *settings)
        rewards = phase.metric("reward_mean")[1]
        return {
            "samples_s": phase.samples_s,
            "policy_idle": phase.idle("policy"),
            "rollout_idle": phase.idle("rollout"),
            "reward": statistics.fmean(rewards[-10:]),
            "max_staleness": phase.summary["ledger"]["max_staleness"],
        }

    @property
    def steps(self) -> int:
        return int(self.options.steps)

    def theirs(self, index: int) -> dict[str, float]:
        """One synchronous run, with the numbers of our own configuration."""
        config = self._config()
        prompts = self.work / "prompts.jsonl"
        source = AdditionSource(
            AdditionOptions(n=config.groups_per_step * self.steps), "train", self.options.seed
        )
        rows = ({"prompt": row["prompt"], "answer": row["answer"]} for row in source.rows())
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        job = self.work / f"trl-{index}.json"
        job.write_text(json.dumps(self._trl_job(config, prompts, index)))
        env = {**os.environ, "OMP_NUM_THREADS": str(self.options.trl_threads), "PYTHONPATH": ""}
        script = str(ROOT / "benchmarks" / "trl" / "job_of_trl.py")
        out = run([str(self.trl), script, str(job)], self.work / f"trl-{index}.log", env)
        return dict(json.loads(out.splitlines()[-1]))

    def _config(self) -> Config:
        settings = [f'policy.model_name_or_path="{self.warm_model}"', f"train.seed={self.options.seed}"]
        return load_config(QUICKSTART / "grpo_plain.toml", settings)

    def _trl_job(self, config: Config, prompts: Path, index: int) -> dict[str, Any]:
        return {
            "threads": self.options.trl_threads,
            "repository": str(ROOT),
            "rewards": config.grpo.reward_weights,
            "prompts": str(prompts),
            "model": str(self.warm_model),
            "groups": config.groups_per_step,
            "n_generation": config.rollout.n_generation,
            "max_response_length": config.rollout.max_response_length,
            "steps": self.steps,
            "lr": config.train.optm_lr,
            "betas": config.train.optm_betas,
            "warmup_steps": config.train.optm_warmup_steps,
            "epsilon_low": config.grpo.epsilon_low,
            "epsilon_high": config.grpo.epsilon_high,
            "seed": self.options.seed,
            "output_dir": str(self.work / f"trl-{index}"),
        }


def show(ours: list[dict[str, float]], theirs: list[dict[str, float]], threads: int) -> None:
    """The rounds side by side."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"GRPO, 16 prompts x 8 samples a step; TRL with {threads} threads")
    for header in ("round", "samples/s\nours", "samples/s\nTRL", "ratio", "idle\ntrainer", "idle\ngenerator",
                   "reward\nours", "reward\nTRL"):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        table.add_row(
            str(i), f"{a['samples_s']:.0f}", f"{b['samples_s']:.0f}", f"{a['samples_s'] / b['samples_s']:.2f}",
            f"{a['policy_idle']:.1%}", f"{a['rollout_idle']:.1%}", f"{a['reward']:.2f}", f"{b['reward']:.2f}",
        )  # fmt: skip
    Console().print(table)


def result(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the rounds."""
    ours_samples = statistics.median(run["samples_s"] for run in ours)
    trl_samples = statistics.median(run["samples_s"] for run in theirs)
    return {
        "ours_samples_s": round(ours_samples, 1),
        "trl_samples_s": round(trl_samples, 1),
        "ratio": round(ours_samples / trl_samples, 3),
        "policy_idle": round(statistics.median(run["policy_idle"] for run in ours), 4),
        "rollout_idle": round(statistics.median(run["rollout_idle"] for run in ours), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO end to end: ours next to TRL's.")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run (default: 60)")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument(
        "--trl-threads", type=int, default=2, help="torch threads of TRL (default: 2, its best)"
    )
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl", help="TRL's environment")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change our job")
    parser.add_argument(
        "--keep", type=Path, help="keep everything in this directory (default: a temporary one)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as temporary:
        work = (options.keep or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, work)
        print("warm start …", flush=True)
        bench.warm_start()
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for index in range(1, options.rounds + 1):
            ours.append(bench.ours(index))
            print(f"round {index}: ours {ours[-1]['samples_s']:.0f} samples/s", flush=True)
            theirs.append(bench.theirs(index))
            print(f"round {index}: TRL {theirs[-1]['samples_s']:.0f} samples/s", flush=True)
        show(ours, theirs, options.trl_threads)
        print(json.dumps(result(ours, theirs)))


if __name__ == "__main__":
    main()
