"""The step time of two policy replicas, compared with one replica of two ranks and with a single rank.

    python -m benchmarks.trainer.peers [--steps 30] [--rounds 3] [--width 512] [--layers 6]

Supervised jobs on the same batches of 64 conversations, in micro-batches of 8, of a model of random weights (19M
parameters by default, float32), one thread for each rank. A figure is the median over rounds of a job's median step,
its first five left out; each round runs all kinds of jobs, one after the other. Next to the seconds of a step stand
those of its exchange, and the bytes that a rank gets in it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import in_turns, medians, options, report
from benchmarks.jobs import launch, make_model

P, B = "policy.parallelism", "train.train_batch_per_replica"
KINDS: dict[str, dict[str, Any]] = {
    "one rank": {B: 64},
    "one replica, dp_shard 2": {B: 64, f"{P}.dp_shard_size": 2},
    "one replica, dp_replicate 2": {B: 64, f"{P}.dp_replicate_size": 2},
    "two replicas, collective": {B: 32, f"{P}.n_init_replicas": 2},
    "two replicas, store": {B: 32, f"{P}.n_init_replicas": 2, "policy.exchange": "store"},
}
LEFT_OUT = 5


def widen(model: Path, width: int, layers: int) -> int:
    """Replace the quickstart's model by one of this shape; its number of parameters."""
    config = AutoConfig.from_pretrained(model)
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = width, layers, 3 * width
    config.num_attention_heads, config.num_key_value_heads = 8, 4
    config = type(config)(**{key: value for key, value in config.to_dict().items() if key != "layer_types"})
    lm = AutoModelForCausalLM.from_config(config)
    lm.save_pretrained(model)
    return sum(parameter.numel() for parameter in lm.parameters())


def job(place: Path, model: Path, steps: int, settings: dict[str, Any]) -> dict[str, float]:
    """One job; medians of its steps."""
    shutil.rmtree(place / "run", ignore_errors=True)
    same = {
        "train.max_num_steps": steps, "train.seed": 1, "train.train_policy.mini_batch": 8,
        "train.ckpt.save_freq": 1000, "launcher.cpu_threads": 1, "launcher.export_final": False,
        "validation.enable": False,
    }  # fmt: skip
    run = launch("sft.toml", model, place, "run", same | settings)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    metrics = [event["data"]["metrics"] for event in events if event["kind"] == "step"][LEFT_OUT:]
    names = ("step_seconds", "exchange_seconds", "exchange_bytes")
    return medians([{name: step.get(name, 0.0) for name in names} for step in metrics])


def main() -> None:
    given = options(__doc__, rounds=3, steps=30, width=512, layers=6)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = make_model(place)
        parameters = widen(model, given.width, given.layers)
        ways = {kind: partial(job, place, model, given.steps, settings) for kind, settings in KINDS.items()}
        rows = {kind: medians(taken) for kind, taken in in_turns(ways, given.rounds, warm_up=0).items()}
    alone = rows["one rank"]["step_seconds"]
    for row in rows.values():
        row["over one rank's"] = row["step_seconds"] / alone
    report(given, {"parameters": parameters, "medians": rows}, rows)


if __name__ == "__main__":
    main()
