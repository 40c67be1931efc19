"""A GRPO training step compared with TRL's, on the same batch of the same model.

    python -m benchmarks.trl.step [--rounds 5] [--threads 1] [--prompt 32] [--answer 96]

8 groups of 8 samples with answers of half to all of `--answer` tokens, micro-batches of 16 samples, float32; a model
of random weights with 20M parameters. One step is log-probs, loss and gradients of the whole batch, clipping and
AdamW. Ours decodes the batch and computes advantages and metrics as well, as it always does; TRL (1.16, in
`.venv-trl`, with the torch of that) gets its samples and advantages ready. The two take turns, so that only one works
at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.harness import ROOT, in_turns, medians, options, ratio, report, timed
from benchmarks.trainer.material import ANSWER, GROUP, PROMPT, config_of, language_model, samples, step_of
from benchmarks.trl.venv import trl_python
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import prepare_model
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from schema.wire.sample import Sample

Times = dict[str, float]
"""Seconds of one step, and its seconds of CPU time."""


def ours(lm: Any, made: list[list[Sample]]) -> Callable[[], Times]:
    model = prepare_model(PolicyModel(lm), packed=True, recompute=False)
    step = step_of(RankGroup(RankEnvironment()), config_of({"train": {"sequence_packing": True}}), model, made)

    def measured() -> Times:
        spent = time.process_time()
        seconds = timed(step)
        return {"seconds": seconds, "cpu_seconds": time.process_time() - spent}

    return measured


def step_of_trl(trl: subprocess.Popen[str]) -> Times:
    """Raises `RuntimeError` if it has ended."""
    to, back = trl.stdin, trl.stdout
    assert to is not None
    assert back is not None
    to.write("\n")
    to.flush()
    return dict(zip(("seconds", "cpu_seconds"), json.loads(_line(back)), strict=True))


def _line(stream: IO[str]) -> str:
    line = stream.readline()
    if not line:
        raise RuntimeError("TRL has ended: its errors are above")
    return line


def write_samples(path: Path, groups: list[list[Sample]], prompt: int) -> None:
    """The samples as TRL takes them, with their advantages."""
    made = [sample for group in groups for sample in group]
    scores = torch.tensor([sample.header.score for sample in made]).view(-1, GROUP)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
    rows = [
        {
            "prompt": sample.token_ids[:prompt].tolist(),
            "response": sample.token_ids[prompt:].tolist(),
            "logprobs": sample.logprobs[prompt:].tolist(),
            "advantage": advantage,
        }
        for sample, advantage in zip(made, advantages.tolist(), strict=True)
    ]
    path.write_text(json.dumps(rows))


def main() -> None:
    given = options(
        __doc__, rounds=5, prompt=(PROMPT, "tokens of a prompt"), answer=(ANSWER, "tokens of the longest answer"),
        venv=(ROOT / ".venv-trl", "TRL's environment"),
    )  # fmt: skip
    lm, made = language_model("20M"), samples(given.prompt, given.answer)
    with tempfile.TemporaryDirectory() as place:
        lm.save_pretrained(Path(place) / "policy")
        write_samples(Path(place) / "samples.json", made, given.prompt)
        script = str(ROOT / "benchmarks/trl/step_of_trl.py")
        trl = subprocess.Popen(
            [str(trl_python(given.venv)), script, place, str(given.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(given.threads), "TRL_EXPERIMENTAL_SILENCE": "1"},
        )  # fmt: skip
        try:
            assert trl.stdout is not None
            while _line(trl.stdout).strip() != "ready":
                pass
            turns = in_turns({"ours": ours(lm, made), "TRL": lambda: step_of_trl(trl)}, given.rounds)
        finally:
            trl.kill()
            trl.wait(timeout=60)
    rows = {name: medians(taken) for name, taken in turns.items()}
    rows["TRL over ours"] = {
        name: ratio(*([turn[name] for turn in turns[who]] for who in ("TRL", "ours")))
        for name in ("seconds", "cpu_seconds")
    }
    report(given, {"rounds": turns, **rows}, rows)


if __name__ == "__main__":
    main()
