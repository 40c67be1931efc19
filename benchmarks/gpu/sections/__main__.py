"""One section of the GPU run: `python -m benchmarks.gpu.sections SECTION --device cuda --out FILE [--tiny]`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from policy_worker.process import set_up_torch
from schema.util.gpus import VARIABLE, variable_for
from schema.util.imports import without_collections

TRAINERS = ("mixed_precision", "training", "logprobs", "publication", "memory", "kernels")
"""Sections that compute in their own process what a trainer does, with its settings of PyTorch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    parser.add_argument("--kept", type=Path, default=Path(), help="directory for traces")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files go
    if options.section in TRAINERS:
        settings = os.environ | variable_for(int(options.device == "cuda"))
        set_up_torch(1, environment=settings)
        os.environ.update({name: value for name, value in settings.items() if name != VARIABLE})
    with without_collections():
        import torch

        section = importlib.import_module(f"benchmarks.gpu.sections.{options.section}")
        from benchmarks.gpu.bench import Bench
    if options.device == "cpu":
        torch.set_num_threads(1)
    section.run(Bench(options.device, options.tiny, options.out, options.kept, options.section))


if __name__ == "__main__":
    main()
