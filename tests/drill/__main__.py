"""`python -m tests.drill`: the manifests of a job, run through load, pre-emption and the loss of a node.

Pods are namespaces of this machine: the manifests' own commands, users, volumes and network rules, with a small
control plane around them (`tests/drill/cluster.py`). Needs root, iproute2 and nftables, two cores, and ten minutes.
The last line of stdout is one JSON object; the exit code is 1 if anything was lost, trained twice, or over the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from examples.quickstart.make_model import make_model
from tests.drill.script import Drill, Outcome, Plan

PLACE = "/var/tmp"
"""Pods have a /tmp of their own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=Plan.positions, help="groups of the data")
    parser.add_argument("--most", type=int, default=Plan.most, help="rollout replicas at the peak")
    parser.add_argument("--seed", type=int, default=0, help="draws whom it hits")
    parser.add_argument("--standby", action="store_true", help="two controllers, of which one stands by")
    parser.add_argument("--images", type=Path, help="what `python -m tests.images --keep` has built: roots of pods")
    parser.add_argument("--keep", action="store_true", help="leave the folder of pods and volumes")
    parser.add_argument("--out", type=Path, help="a picture")
    options = parser.parse_args()
    missing = [tool for tool in ("ip", "nft", "unshare", "setpriv") if shutil.which(tool) is None]
    if os.geteuid() or missing:
        parser.error(f"needs root{''.join(f', {tool}' for tool in missing)}: make setup-cluster installs what lacks")
    folder = Path(tempfile.mkdtemp(prefix="cosmos-drill-", dir=PLACE))
    folder.chmod(0o755)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} {text}", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        make_model(folder / "model", seed=1)
        plan = Plan(options.positions, options.most, options.seed, options.images, options.standby)
        outcome = Drill(folder, folder / "model", plan, say).run()
    except AssertionError as error:
        print(f"{error}; the logs are in {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        return 128 + signal.SIGINT
    if options.out:
        draw(options.out, outcome)
    print(table(outcome))
    print(json.dumps({**outcome.totals, "struck": [asdict(one) for one in outcome.struck]}))
    for violation in outcome.violations:
        print(violation, file=sys.stderr)
    if options.keep or outcome.violations:
        print(f"the logs are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return 1 if outcome.violations else 0


def table(outcome: Outcome) -> str:
    """For the docs."""
    rows = ["| what happens | to | longest time without a step | all is there after |", "|---|---|---|---|"]
    for one in outcome.struck:
        rows.append(f"| {one.what} | {', '.join(one.pods)} | {one.gap:.1f} s | {one.whole:.0f} s |")
    return "\n".join(rows)


def draw(path: Path, outcome: Outcome) -> None:
    """Wanted and working replicas over time, and what happened."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    zero = outcome.scaled[0][0]
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    at = [one[0] - zero for one in outcome.scaled]
    axes.step(at, [one[1] for one in outcome.scaled], where="post", label="needed", linewidth=2)
    axes.step(at, [one[2] for one in outcome.scaled], "--", where="post", label="at work", linewidth=2)
    top = max(one[1] for one in outcome.scaled)
    for number, struck in enumerate(outcome.struck):
        axes.axvline(struck.began - zero, color="0.8", linewidth=1)
        height = top + 0.3 + 0.4 * (number % 4)
        axes.text(struck.began - zero + 1, height, struck.what, fontsize=8, color="0.35")
    axes.set(xlabel="seconds", ylabel="rollout replicas", ylim=(0, top + 2.0), xlim=(0, at[-1] + 20))
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.7), frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
