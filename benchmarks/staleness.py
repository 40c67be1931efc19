"""What stale samples do to learning, and what a correction and a bound do about it.

    python benchmarks/staleness.py [--out docs/images/staleness.png] [--steps 60]

Trainer and engine are those of a job, driven in one process by a schedule that makes every sample exactly `lag`
steps old: the batch of step t is generated with the weights of version max(0, t − lag). Each case trains the
quickstart's plain task from the same warm-started model. "ignored" is a trainer that takes its own log-probs for
those of the policy that sampled (a ratio of 1, as if the data were fresh); "corrected" uses the behaviour
log-probs that came with the samples, which is what this project does.

Ends with one line of JSON: the share of right answers (sampled, last ten steps) of every case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:] = [
    p for p in sys.path if p != str(Path(__file__).parent)
]  # its `controller` would hide the package

import numpy as np
import torch
from transformers import AutoTokenizer

from controller.client import Answer, Call
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.micro_batch import TrainSample
from policy_worker.model.model import load_model
from policy_worker.parallel.group import Group, RankEnvironment
from policy_worker.trainer import Trainer
from policy_worker.training.batch_source import BatchSource
from policy_worker.training.grpo import Grpo
from rollout_worker.engines import create_engine
from rollout_worker.engines.base import Engine, GenerationRequest
from rollout_worker.groups.leasing import training_settings
from rollout_worker.groups.pushing import to_sample
from rollout_worker.rewards.functions import BUILTIN
from schema.config import Config, load_config
from schema.wire.batch import StepTable, encode_batch
from schema.wire.messages import LeasedGroup
from schema.wire.prompts import PromptFile
from schema.wire.sample import Sample, encode_sample, sample_seed
from weight_sync import hub_tensors

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
REWARDS = {"boxed_math": 1.0, "format": 0.2}


@dataclass(frozen=True)
class Case:
    """One training run: how old its samples are, and whether the trainer knows it."""

    lag: int
    lr: float
    corrected: bool = True

    @property
    def name(self) -> str:
        how = "corrected" if self.corrected else "ignored"
        return f"lag {self.lag}, lr {self.lr:g}" + (f", {how}" if self.lag else "")


@dataclass
class Snapshot:
    """The weights of one version, as an engine takes them."""

    weights: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, model: torch.nn.Module) -> Snapshot:
        return cls([(name, tensor.clone()) for name, tensor in hub_tensors(model)])

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.weights


class Served:
    """Answers the trainer's question for a batch from memory."""

    def __init__(self) -> None:
        self.batch = b""

    def call(self, call: Call[bytes | None]) -> bytes | None:
        return call.read(Answer(200, self.batch))


def warm_model(out: Path, seed: int = 1) -> Path:
    """The quickstart's model after its plain warm start, made by cosmos-launch as a user would."""
    python, command = sys.executable, str(Path(sys.executable).with_name("cosmos-launch"))
    model = out / "model"
    make = [python, str(QUICKSTART / "make_model.py"), "--out", str(model), "--seed", str(seed)]
    subprocess.run(make, check=True, timeout=120)
    settings = [f'policy.model_name_or_path="{model}"', f'train.output_dir="{out}"', 'train.timestamp="sft"']
    settings.append(f"train.seed={seed}")
    launch = [command, "--config", str(QUICKSTART / "sft_plain.toml")]
    launch += [part for setting in settings for part in ("--set", setting)]
    subprocess.run(launch, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return out / "sft" / "final"


def prepared(out: Path, model: Path, case: Case) -> tuple[Config, PromptFile]:
    """The configuration of a case and its prompts, prepared as in a job."""
    folder = out / case.name.replace(" ", "-").replace(",", "")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    overrides = [
        f'policy.model_name_or_path="{model}"',
        f"train.optm_lr={case.lr}",
        f"train.train_policy.allowed_outdated_steps={case.lag}",
        f'train.output_dir="{folder}"',
    ]
    config = load_config(QUICKSTART / "grpo_plain.toml", overrides)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "controller.data.prepare", "--run-dir", str(folder)]
    subprocess.run(command, check=True, timeout=120, capture_output=True, cwd=ROOT)
    return config, PromptFile(folder / "data" / "train.safetensors")


async def generate(
    engine: Engine, tokenizer: Any, config: Config, data: PromptFile, step: int
) -> list[list[Sample]]:
    """The groups of one step: prompts in order, samples scored."""
    settings, n = training_settings(config), config.rollout.n_generation
    groups: dict[str, LeasedGroup] = {}
    for position in range(step * config.groups_per_step, (step + 1) * config.groups_per_step):
        row = position % len(data)
        groups[str(position)] = LeasedGroup(
            group_id=f"e0-p{position}", lease_id="none", kind="train", epoch=0, position=position, attempt=1,
            prompt_token_ids=data.token_ids(row).tolist(), row=data.row(row), deadline=step,
            seeds=[sample_seed(config.effective_seed, "train", 0, position, i) for i in range(n)],
        )  # fmt: skip
    requests = [
        GenerationRequest(name, group.prompt_token_ids, tuple(group.seeds), settings)
        for name, group in groups.items()
    ]
    engine.submit(requests)
    done: dict[str, dict[int, Sample]] = {name: {} for name in groups}
    while any(len(samples) < n for samples in done.values()):
        for made in await engine.collect():
            group = groups[made.request_id]
            text = tokenizer.decode(made.token_ids, skip_special_tokens=True)
            rewards = {name: BUILTIN[name](text, group.row) for name in REWARDS}
            score = sum(REWARDS[name] * value for name, value in rewards.items())
            done[made.request_id][made.index] = to_sample(
                group, made.index, made, made.finish_reason, error=None, rewards=rewards, score=score
            )
    return [[samples[i] for i in range(n)] for samples in done.values()]


def as_if_fresh(trainer: Trainer, groups: list[list[Sample]], temperature: float) -> None:
    """Put the trainer's present log-probs in the place of those that the tokens were sampled with."""
    for samples in groups:
        rows = {row: TrainSample.of_wire(sample) for row, sample in enumerate(samples)}
        (batch,) = trainer.micro_batches(rows, [list(rows)])
        with torch.no_grad():
            logprobs = trainer.forward(batch, temperature).logprobs.numpy()
        start = 0
        for sample in samples:
            mask = sample.loss_mask == 1
            sample.logprobs[mask] = np.minimum(logprobs[start : start + mask.sum()], 0.0)
            start += int(mask.sum())


def as_batch(step: int, groups: list[list[Sample]]) -> bytes:
    headers = [sample.header for samples in groups for sample in samples]
    table = StepTable(
        step=step,
        timeline=0,
        policy_epoch=1,
        group_ids=[f"g{i}" for i in range(len(groups))],
        group=[i for i, samples in enumerate(groups) for _ in samples],
        index=[header.index for header in headers],
        score=[header.score for header in headers],
        rewards={name: [header.rewards[name] for header in headers] for name in REWARDS},
        prompt_tokens=[header.prompt_tokens for header in headers],
        response_tokens=[header.response_tokens for header in headers],
        total_tokens=[header.total_tokens for header in headers],
        oldest_version=[header.oldest_version for header in headers],
        newest_version=[header.newest_version for header in headers],
        finish_reason=[header.finish_reason for header in headers],
    )
    return encode_batch(table, [encode_sample(sample) for samples in groups for sample in samples])


async def _accuracies(case: Case, config: Config, data: PromptFile, steps: int) -> list[float]:
    torch.manual_seed(config.effective_seed)
    group = Group(RankEnvironment())
    try:
        schedule = Schedule(total_steps=steps, warmup_steps=config.train.optm_warmup_steps)
        trainer = Trainer(load_model(config), config, group, schedule)
        served = Served()
        source = BatchSource(group, served.call, 1, case.lag)
        algorithm = Grpo(config, trainer, source)
        tokenizer = AutoTokenizer.from_pretrained(config.policy.model_name_or_path)
        engine = create_engine(config, tokenizer, frozenset([tokenizer.eos_token_id]))
        await engine.start()
        try:
            versions = {0: Snapshot.of(trainer.model.lm)}
            found = []
            for step in range(steps):
                version = max(0, step - case.lag)
                if version != engine.version:
                    await engine.load_weights(versions[version], version)
                groups = await generate(engine, tokenizer, config, data, step)
                if not case.corrected:
                    as_if_fresh(trainer, groups, config.sampling_temperature)
                served.batch = as_batch(step, groups)
                table = algorithm.poll(step, 0.0)
                assert table is not None
                metrics = algorithm.train_on(table)
                assert metrics is not None
                found.append(metrics["reward/boxed_math"])
                versions[step + 1] = Snapshot.of(trainer.model.lm)
                versions = {v: w for v, w in versions.items() if v > version or v == engine.version}
            return found
        finally:
            await engine.close()
    finally:
        group.close()


def accuracies(case: Case, model: Path, steps: int = 60) -> list[float]:
    """Share of right answers among the samples of each step."""
    with tempfile.TemporaryDirectory() as out:
        config, data = prepared(Path(out), model, case)
        return asyncio.run(_accuracies(case, config, data, steps))


def end(curve: list[float]) -> float:
    """Mean of the last ten steps."""
    return float(np.mean(curve[-10:]))


CASES = (
    Case(0, 3e-4),
    Case(4, 3e-4),
    Case(8, 3e-4),
    Case(8, 3e-4, corrected=False),
    Case(0, 1e-3),
    Case(4, 1e-3),
    Case(4, 1e-3, corrected=False),
    Case(6, 1e-3),
    Case(6, 1e-3, corrected=False),
    Case(8, 1e-3),
)


def draw(curves: dict[Case, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted({case.lr for case in curves})
    figure, axes = plt.subplots(1, len(rates), figsize=(5.2 * len(rates), 3.6), sharey=True, squeeze=False)
    colours = {0: "black", 4: "tab:blue", 6: "tab:green", 8: "tab:orange"}
    for axis, rate in zip(axes[0], rates, strict=True):
        for case, curve in curves.items():
            if case.lr == rate:
                style = "-" if case.corrected else ":"
                axis.plot(smooth(curve), style, color=colours[case.lag], label=case.name)
        axis.set(title=f"learning rate {rate:g}", xlabel="step", ylim=(0, 1))
        axis.legend(fontsize=8, loc="lower right")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("right answers (sampled)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def smooth(curve: list[float], window: int = 5) -> Iterator[float]:
    return [float(np.mean(curve[max(0, i - window + 1) : i + 1])) for i in range(len(curve))]  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning curves at fixed staleness.")
    parser.add_argument("--out", type=Path, help="draw the curves into this PNG")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", type=Path, help="a warm-started model; made if not named")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or warm_model(Path(folder))
        curves = {}
        for case in CASES:
            curves[case] = accuracies(case, model, options.steps)
            print(f"{case.name:36} {end(curves[case]):.3f}", flush=True)
    if options.out:
        draw(curves, options.out)
    print(json.dumps({case.name: round(end(curve), 4) for case, curve in curves.items()}))


if __name__ == "__main__":
    main()
