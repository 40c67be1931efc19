"""The quickstart, as `make run` starts it: a model is made, warmed up, and learns to add by reinforcement.

    make_model.py ──▶ cosmos-launch --config sft.toml ──▶ cosmos-launch --config grpo.toml ──▶ table, curve, answers

Both jobs are started as a user would start them, from the files next to this one; only paths and the seed are
set on the command line. Everything lands in one directory (default: outputs/quickstart-<time>).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from report import Phase, Story, draw_curve, print_story
from try_model import compare

HERE = Path(__file__).resolve().parent
LEAVE_TIMEOUT = 60.0  # seconds in which cosmos-launch ends in order after a signal


@dataclass(frozen=True)
class Job:
    """One call of cosmos-launch."""

    config: str
    name: str
    model: Path
    overrides: tuple[str, ...] = ()

    def settings(self, out: Path, seed: int) -> list[str]:
        """What is set on the command line: where things are, the seed, and what the user asked for."""
        return [
            f"policy.model_name_or_path={json.dumps(str(self.model))}",
            f"train.output_dir={json.dumps(str(out))}",
            f"train.timestamp={json.dumps(self.name)}",
            f"train.seed={seed}",
            *self.overrides,
        ]


def jobs(options: argparse.Namespace, out: Path) -> tuple[Job, Job]:
    """The warm start and the reinforcement that the options ask for."""
    kind = "_plain" if options.plain else ""
    warm = Job(f"sft{kind}.toml", "sft", out / "model")
    config, plain = f"grpo{kind}.toml", ()
    if options.engine == "vllm":
        config = "grpo_vllm.toml"
        if options.plain:
            plain = (
                "train.max_num_steps=60",
                "train.train_policy.dataset.options.phrasings=1",
                "validation.dataset.options.phrasings=1",
            )
    return warm, Job(config, "grpo", out / "sft" / "final", (*plain, *options.set))


def launch(job: Job, out: Path, seed: int) -> Phase:
    """Run one job in the foreground with its own display; leaves with its exit code if it fails."""
    command = [sys.executable, "-P", "-m", "cosmos_launch", "--config", str(HERE / job.config)]
    command += [part for setting in job.settings(out, seed) for part in ("--set", setting)]
    print(f"\n$ cosmos-launch --config {job.config} …", flush=True)
    started = time.time()
    code = foreground(command)
    if code:
        sys.exit(code)
    return Phase.read(out / job.name, started, time.time())


def foreground(command: Sequence[str]) -> int:
    """Run a command to its end, whatever ends it: a signal reaches it, and it gets time to leave in order."""
    with subprocess.Popen(command) as child:
        try:
            return child.wait()
        except (KeyboardInterrupt, SystemExit) as interruption:
            if isinstance(interruption, SystemExit):  # Ctrl-C has reached the child by itself
                child.terminate()
            try:
                return child.wait(LEAVE_TIMEOUT) or 130
            except subprocess.TimeoutExpired:
                child.kill()
                return 130


def on_sigterm(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch a small model learn to add, by asynchronous GRPO.")
    parser.add_argument("--seed", type=int, default=1, help="seed of model, data and sampling (default: 1)")
    parser.add_argument("--plain", action="store_true", help="one phrasing of the question, fewer steps")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument(
        "--experts", type=int, default=0, help="experts in each layer of the model, two of which see a token"
    )
    parser.add_argument("--out", type=Path, help="directory of everything that is made")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the GRPO job"
    )
    options = parser.parse_args()
    out = (options.out or Path("outputs") / time.strftime("quickstart-%Y%m%d-%H%M%S")).absolute()
    if any((out / name).exists() for name in ("model", "sft", "grpo")):
        parser.error(f"--out {out} holds a quickstart already: name another directory")
    if any(setting.replace(" ", "") == "validation.enable=false" for setting in options.set):
        parser.error("--set validation.enable=false: the answers shown at the end are those of the validation")
    signal.signal(signal.SIGTERM, on_sigterm)

    began = time.time()
    out.mkdir(parents=True, exist_ok=True)
    make = [sys.executable, str(HERE / "make_model.py"), "--out", str(out / "model")]
    if code := foreground([*make, "--seed", str(options.seed), "--experts", str(options.experts)]):
        sys.exit(code)
    made = time.time()
    warm_job, grpo_job = jobs(options, out)
    warm = launch(warm_job, out, options.seed)
    grpo = launch(grpo_job, out, options.seed)
    answers = compare(out / "model", out / "sft" / "final", out / "grpo" / "final", grpo.run_dir)
    story = Story(made - began, warm, grpo, answers.base_accuracy, time.time() - began)
    curve = draw_curve(grpo, out / "learning_curve.png")
    print_story(story, answers, curve)


if __name__ == "__main__":
    main()
