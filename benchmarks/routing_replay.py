"""What a trainer's and an engine's choice of experts do to log-probs, and what replaying the engine's does about it.

    python benchmarks/routing_replay.py [--steps 20] [--experts 16] [--model DIR]

A small mixture is trained on the quickstart's plain task with samples of its own weights, in one process with the
embedded engine. The engine computes in bfloat16 and the trainer in float32 (or in bfloat16, too), which is more than
kernels differ by and less than a quantised engine does. Each line is a run from the same warm-started model; the
mismatch is that of on-policy tokens (`mismatch/engine_*`), medians over the steps. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
if sys.path[0] == str(Path(__file__).parent):
    sys.path[0] = str(ROOT)  # this folder's `controller` would hide the package

import torch

from benchmarks.in_process import QUICKSTART, learn, warm_model
from schema.config import load_config


def measured(model: Path, replayed: str, dtype: str, steps: int) -> dict[str, float]:
    """Medians over the steps of a run, and its share of right answers on held-out prompts at the end."""
    overrides = [
        f'policy.model_name_or_path="{model}"',
        f'train.train_policy.routing_replay="{replayed}"',
        "train.train_policy.allowed_outdated_steps=0",
        'rollout.dtype="bfloat16"',
        f'train.param_dtype="{dtype}"',
    ]
    with tempfile.TemporaryDirectory() as out:
        learned = asyncio.run(learn(load_config(QUICKSTART / "grpo_plain.toml", overrides), Path(out), steps))
    names = [name for name in learned.metrics[-1] if name.startswith(("mismatch/engine", "routing/"))]
    found = {name: median(step[name] for step in learned.metrics) for name in names}
    found |= {
        name: value for name, value in learned.metrics[0].items() if name.startswith("mismatch/unreplayed")
    }
    return found | {"accuracy": learned.accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description="Mismatch of a mixture without and with routing replay.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--model", type=Path, help="a warm-started mixture; made if not named")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    print("trainer    replay    differs        k3       ess  ratio max    cut  right answers")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or warm_model(Path(folder), experts=options.experts)
        for dtype, replayed in product(("float32", "bfloat16"), ("none", "ids", "weights")):
            one = found[f"{dtype} {replayed}"] = measured(model, replayed, dtype, options.steps)
            k3, ess, most, cut = (
                one[f"mismatch/engine_{name}"] for name in ("k3", "ess", "ratio_max", "cut")
            )
            differs = f"{one['routing/differs']:8.2%}" if replayed != "none" else "       –"
            right = f"{cut:6.2%} {one['accuracy']:14.3f}"
            print(f"{dtype:10} {replayed:8} {differs} {k3:9.2e} {ess:9.6f} {most:10.3f} {right}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
