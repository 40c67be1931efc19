"""How long a fresh process takes to its first kernel, and what this card reaches of its peaks.

The run itself has imported torch before, in a process of its own: `torch_import_s` in the first line of gpu.jsonl is
the coldest one. transformers and the policy worker are imported here for the first time, and once more from the page
cache. `card` has the peaks that later sections compare with, and what a large product and a large copy reach of them.
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.gpu.bench import Bench

PROGRAM = """
import json, sys, time
took, last = {}, time.monotonic()
def lap(name):
    global last
    took[name], last = time.monotonic() - last, time.monotonic()
import torch
lap("torch_s")
import transformers
lap("transformers_s")
import policy_worker.worker
lap("policy_worker_s")
if sys.argv[1] == "cuda":
    torch.cuda.init()
    torch.cuda.synchronize()
lap("open_s")
a = torch.ones(256, 256, device=sys.argv[1])
float((a @ a).sum())
lap("first_kernel_s")
print(json.dumps(took))
"""
LONGEST = 120.0


def run(bench: Bench) -> None:
    for case in ("fresh process", *["fresh process, again"] * (not bench.tiny)):
        command = [sys.executable, "-c", PROGRAM, bench.device.type]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LONGEST)
        took: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        bench.row(case, **took, whole_s=sum(took.values()))
    flops, bytes_s, bus_s = bench.card
    bench.row(
        "card: peaks that roofs are computed from, and what is reached",
        peak_tflop_s=flops / 1e12,
        product_tflop_s=bench.product_flops() / 1e12,
        peak_gb_s=bytes_s / 1e9,
        copy_gb_s=bench.copy_bytes_s() / 1e9,
        bus_gb_s=bus_s / 1e9,
        peaks="of its data sheet" if bench.known else "measured",
    )
