"""One section of the GPU run: `python -m benchmarks.gpu.sections SECTION --device cuda --out FILE [--tiny]`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from schema.util.imports import without_collections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    parser.add_argument("--kept", type=Path, default=Path(), help="directory for traces")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files go
    with without_collections():
        import torch

        section = importlib.import_module(f"benchmarks.gpu.sections.{options.section}")
        from benchmarks.gpu.bench import Bench
    if options.device == "cpu":
        torch.set_num_threads(1)
    section.run(Bench(options.device, options.tiny, options.out, options.kept))


if __name__ == "__main__":
    main()
