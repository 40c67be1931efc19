"""A GRPO training step compared with TRL's, on the same batch of the same model.

    python -m benchmarks.trl.step [--rounds 5] [--threads 1] [--prompt 32] [--answer 96]

8 groups of 8 samples with answers of half to all of `--answer` tokens, micro-batches of 16 samples, float32; a model
of random weights with 20M parameters. One step is log-probs, loss and gradients of the whole batch, clipping and
AdamW. Ours decodes the batch and computes advantages and metrics as well, as it always does; TRL (1.16, in
`.venv-trl`, with the torch of that) gets its samples and advantages ready. The two take turns, so that only one works
at a time. Ends with one line of JSON: medians, and the median of TRL's time over ours, of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.harness import ROOT
from benchmarks.trainer import algorithms
from benchmarks.trl.venv import trl_python
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.model import PolicyModel, prepare_model
from policy_worker.parallel.group import Group
from policy_worker.process import RankEnvironment
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo

Times = tuple[float, float]
"""Of one step: seconds, and seconds of CPU time."""


def step_of_ours(lm: Any, batch: bytes) -> Callable[[], Times]:
    group = Group(RankEnvironment())
    model = prepare_model(PolicyModel(lm), packed=True, recompute=False)
    config = algorithms.config_of({"train": {"sequence_packing": True}})
    trainer = Trainer(model, config, group, Schedule(1000))
    learner = Grpo(config, trainer, BatchSource(group, lambda _: batch, 1, 0))

    def step() -> Times:
        began, spent = time.perf_counter(), time.process_time()
        table = learner.poll(0, 0.0)
        assert table is not None
        assert learner.train_on(table) is not None
        return time.perf_counter() - began, time.process_time() - spent

    return step


def step_of_trl(trl: subprocess.Popen[str]) -> Times:
    """Raises `RuntimeError` if it has ended."""
    to, back = trl.stdin, trl.stdout
    assert to is not None
    assert back is not None
    to.write("\n")
    to.flush()
    seconds, cpu = json.loads(_line(back))
    return seconds, cpu


def _line(stream: IO[str]) -> str:
    line = stream.readline()
    if not line:
        raise RuntimeError("TRL has ended: its errors are above")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each after one that warms up")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for each")
    parser.add_argument("--prompt", type=int, default=algorithms.PROMPT, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=algorithms.ANSWER, help="tokens of the longest answer")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-trl")
    options = parser.parse_args()
    algorithms.PROMPT, algorithms.ANSWER = options.prompt, options.answer
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=algorithms.VOCABULARY, hidden_size=512, num_hidden_layers=6, intermediate_size=1536,
            num_attention_heads=8, num_key_value_heads=4,
        )
    )  # fmt: skip
    samples = algorithms.samples()
    scores = torch.tensor([sample.header.score for sample in samples]).view(-1, algorithms.GROUP)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
    with tempfile.TemporaryDirectory() as place:
        lm.save_pretrained(Path(place) / "policy")
        rows = [
            {
                "prompt": sample.token_ids[: options.prompt].tolist(),
                "response": sample.token_ids[options.prompt :].tolist(),
                "logprobs": sample.logprobs[options.prompt :].tolist(),
                "advantage": advantage,
            }
            for sample, advantage in zip(samples, advantages.tolist(), strict=True)
        ]
        (Path(place) / "samples.json").write_text(json.dumps(rows))
        ours = step_of_ours(lm, algorithms.batch_of(samples))
        trl = subprocess.Popen(
            [str(trl_python(options.venv)), str(ROOT / "benchmarks/trl/step_of_trl.py"), place, str(options.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads), "TRL_EXPERIMENTAL_SILENCE": "1"},
        )  # fmt: skip
        try:
            assert trl.stdout is not None
            while _line(trl.stdout).strip() != "ready":
                pass
            turns = [(ours(), step_of_trl(trl)) for _ in range(options.rounds + 1)][1:]
        finally:
            trl.kill()
            trl.wait(timeout=60)
    found = {}
    for place_of, name in enumerate(("seconds", "cpu_seconds")):
        mine, theirs = ([turn[who][place_of] for turn in turns] for who in (0, 1))
        found[f"ours_{name}"], found[f"trl_{name}"] = statistics.median(mine), statistics.median(theirs)
        found[f"{name}_ratio"] = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
        print(f"{name}, TRL over ours:", ", ".join(f"{b / a:.2f}" for a, b in zip(mine, theirs, strict=True)))
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
