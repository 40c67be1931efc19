"""The step time of two policy replicas, compared with one replica of two ranks and with a single rank.

    python -m benchmarks.trainer.peers [--steps 30] [--rounds 3] [--width 512] [--layers 6]

Supervised jobs on the same batches of 64 conversations, in micro-batches of 8, of a model of random weights (19M
parameters by default, float32), one thread for each rank. A figure is the median over rounds of a job's median step,
its first five left out; each round runs all kinds of jobs, one after the other. Next to the seconds of a step stand
those of its exchange, and the bytes that a rank gets in it. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import QUICKSTART, ROOT  # isort: skip

from transformers import AutoConfig, AutoModelForCausalLM

P, B = "policy.parallelism", "train.train_batch_per_replica"
KINDS = {
    "one rank": {B: 64},
    "one replica, dp_shard 2": {B: 64, f"{P}.dp_shard_size": 2},
    "one replica, dp_replicate 2": {B: 64, f"{P}.dp_replicate_size": 2},
    "two replicas, collective": {B: 32, f"{P}.n_init_replicas": 2},
    "two replicas, store": {B: 32, f"{P}.n_init_replicas": 2, "policy.exchange": '"store"'},
}
LEFT_OUT = 5


def make_model(folder: Path, width: int, layers: int) -> int:
    """A model of this shape with the tokenizer of the quickstart's; its number of parameters."""
    make = [sys.executable, QUICKSTART / "make_model.py", "--out", folder, "--seed", "1"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    config = AutoConfig.from_pretrained(folder)
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = width, layers, 3 * width
    config.num_attention_heads, config.num_key_value_heads, config.layer_types = 8, 4, None
    config = type(config)(**{key: value for key, value in config.to_dict().items() if key != "layer_types"})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run(folder: Path, model: Path, steps: int, settings: dict[str, object]) -> dict[str, float]:
    """One job; medians of its steps."""
    shutil.rmtree(folder, ignore_errors=True)
    values = {
        "policy.model_name_or_path": json.dumps(str(model)), "train.output_dir": json.dumps(str(folder.parent)),
        "train.timestamp": json.dumps(folder.name), "train.max_num_steps": steps, "train.seed": 1,
        "train.train_policy.mini_batch": 8, "train.ckpt.save_freq": 1000, "launcher.cpu_threads": 1,
        "launcher.export_final": "false", "validation.enable": "false", **settings,
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "cosmos_launch", "--config", QUICKSTART / "sft.toml"]
    command += [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    metrics = [event["data"]["metrics"] for event in events if event["kind"] == "step"][LEFT_OUT:]
    names = ("step_seconds", "exchange_seconds", "exchange_bytes")
    return {name: statistics.median(one.get(name, 0.0) for one in metrics) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        parameters = make_model(model, options.width, options.layers)
        for number in range(options.rounds):
            for kind, settings in KINDS.items():
                found[kind].append(run(Path(directory) / "run", model, options.steps, settings))
                print(f"round {number}: {kind}: {found[kind][-1]}", file=sys.stderr, flush=True)
    medians = {
        kind: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for kind, rounds in found.items()
    }
    one = medians["one rank"]["step_seconds"]
    print(f"{parameters / 1e6:.1f}M parameters")
    for kind, median in medians.items():
        print(
            f"{kind:30} {median['step_seconds']:.3f} s a step, {median['step_seconds'] / one:.2f} of one rank's; "
            f"exchange {median['exchange_seconds']:.3f} s, {median['exchange_bytes'] / 2**20:.1f} MiB"
        )
    print(json.dumps({"parameters": parameters, "medians": medians}))


if __name__ == "__main__":
    main()
