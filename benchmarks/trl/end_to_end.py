"""Our asynchronous GRPO next to TRL's synchronous GRPOTrainer: same model, data, rewards and batch, in turns.

    python -m benchmarks.trl.end_to_end [--rounds 3] [--steps 60] [--engine transformers|vllm] [--trl-threads 2]

Both start from the same warm-started model and take 16 prompts x 8 samples a step. The rounds alternate (ours,
TRL, ours, TRL, …), so that whatever else the machine does hits both. Speed is the steady state's: samples
trained between the first and the last commit (TRL: the ends of the first and of the last step). Validation is
off in both. TRL runs in an environment of its own, `.venv-trl`, made on demand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import QUICKSTART, ROOT, in_turns, medians, options, report
from benchmarks.jobs import launch, run_command, warm_model
from benchmarks.trl.venv import trl_python
from controller.data.reading.synthetic import AdditionOptions, AdditionSource
from schema.config import Config, load_config

sys.path.append(str(QUICKSTART))

from report import Phase


class Bench:
    """One benchmark: a working directory with a warm-started model, and a run of each trainer on demand."""

    def __init__(self, given: argparse.Namespace, work: Path) -> None:
        self.given, self.work, self.steps = given, work, int(given.steps)
        self.trl = trl_python(given.trl_venv.absolute())
        self.warm_model = given.model or warm_model(work, given.seed)
        self.runs = 0

    def ours(self) -> dict[str, float]:
        """One asynchronous run."""
        self.runs += 1
        name, settings = (f"ours-{self.runs}", {"train.seed": self.given.seed, "train.max_num_steps": self.steps})
        settings |= {"validation.enable": False}
        config = "grpo_plain.toml" if self.given.engine == "transformers" else "grpo_vllm.toml"
        if self.given.engine == "vllm":
            settings["train.train_policy.dataset.options.phrasings"] = 1
        started = time.time()
        run = launch(config, self.warm_model, self.work, name, settings, *self.given.set)
        phase = Phase.read(run, started, time.time())
        return {
            "samples_s": phase.samples_s,
            "policy_idle": phase.idle("policy"),
            "rollout_idle": phase.idle("rollout"),
            "reward": statistics.fmean(phase.metric("reward_mean")[1][-10:]),
            "max_staleness": phase.summary["ledger"]["max_staleness"],
        }

    def theirs(self) -> dict[str, float]:
        """One synchronous run, with the numbers of our own configuration."""
        self.runs += 1
        config, prompts = self._config(), self.work / "prompts.jsonl"
        wanted = AdditionOptions(n=config.groups_per_step * self.steps)
        rows = AdditionSource(wanted, "train", self.given.seed).rows()
        lines = (json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n" for row in rows)
        prompts.write_text("".join(lines))
        job, log = self.work / f"trl-{self.runs}.json", self.work / f"trl-{self.runs}.log"
        job.write_text(json.dumps(self._trl_job(config, prompts)))
        env = {**os.environ, "OMP_NUM_THREADS": str(self.given.trl_threads), "PYTHONPATH": ""}
        run_command([self.trl, ROOT / "benchmarks" / "trl" / "job_of_trl.py", job], log, self.work, env)
        return dict(json.loads(log.read_text().splitlines()[-1]))

    def _config(self) -> Config:
        settings = [f'policy.model_name_or_path="{self.warm_model}"', f"train.seed={self.given.seed}"]
        return load_config(QUICKSTART / "grpo_plain.toml", settings)

    def _trl_job(self, config: Config, prompts: Path) -> dict[str, Any]:
        return {
            "threads": self.given.trl_threads,
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
            "seed": self.given.seed,
            "output_dir": str(self.work / f"trl-{self.runs}"),
        }


def main() -> None:
    given = options(
        __doc__, rounds=3, steps=(60, "training steps of each run"), engine=("transformers", "or vllm"),
        trl_threads=(2, "torch threads of TRL"), trl_venv=(ROOT / ".venv-trl", "TRL's environment"), seed=1,
        set=((), "KEY=VALUE that changes our job"), model=(Path, "a warm-started model; made if not named"),
        keep=(Path, "keep everything in this directory"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as temporary:
        work = (given.keep or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(given, work)
        turns = in_turns({"ours": bench.ours, "TRL": bench.theirs}, given.rounds, warm_up=0)
    rows = {name: medians(taken) for name, taken in turns.items()}
    ratios = [a["samples_s"] / b["samples_s"] for a, b in zip(*turns.values(), strict=True)]
    ours, theirs = rows["ours"]["samples_s"], rows["TRL"]["samples_s"]
    found = {"ours_samples_s": ours, "trl_samples_s": theirs, "ratio": ours / theirs}
    idle = {name: rows["ours"][name] for name in ("policy_idle", "rollout_idle")}
    report(given, {**found, "ratios": ratios, **idle}, rows)


if __name__ == "__main__":
    main()
