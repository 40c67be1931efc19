"""A real job on this machine whose need of rollout replicas changes: what is decided, and who is there.

    python -m benchmarks.fleet.elastic [--phase 90] [--out docs/images/elastic.png]

`cosmos-launch` with [autoscale] (at most four replicas, a decision every three seconds, down after thirty) trains a
tiny model. A reward takes a fiftieth of a second, then a third, then a fiftieth again, one at a time in each
replica, and the trainer goes over each batch twelve times. For each phase: the numbers
that were decided, the trainer's waiting in its second half, and the seconds until the last change.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import options, report, say
from examples.quickstart.make_model import make_model, make_tokenizer
from schema.wire import event_file
from schema.wire.messages import Event, EventKind
from tests.e2e.loaded import loaded, put_load
from tests.e2e.program import Program, command, write_config

LOADS = (0.02, 0.33, 0.02)


@dataclass(frozen=True)
class Phase:
    """Unix times, and seconds that a reward takes."""

    began: float
    ended: float
    load: float


def run(folder: Path, seconds: float) -> tuple[list[Phase], list[Event]]:
    make_tokenizer(folder / "model")
    make_model(folder / "model", seed=0)
    config = write_config(folder, folder / "model", steps=100_000, rows=400_000, validation=False)
    loaded(config, max_replicas=4, interval=3.0, scale_down_delay=30.0)
    put_load(config, LOADS[0])
    phases = []
    with Program(config) as program:
        program.until_step(2)
        for load in LOADS:
            put_load(config, load)
            began = time.time()
            time.sleep(seconds)
            phases.append(Phase(began, time.time(), load))
            for event in changes(phases[-1], events_of(program)):
                after = event.at - phases[0].began
                say(f"{after:4.0f} s, reward of {load} s: {event.text}")
        command("stop", program.run_dir, "--wait", "60")
        program.wait()
        found = events_of(program)
    ledger = json.loads((program.run_dir / "summary.json").read_text())["ledger"]
    assert sum(ledger["states"].values()) == ledger["created"]
    assert ledger["over_bound"] == 0
    return phases, found


def events_of(program: Program) -> list[Event]:
    return list(event_file.read(event_file.path_of(program.run_dir)))


def changes(phase: Phase, events: list[Event]) -> list[Event]:
    """Other numbers that were decided in a phase."""
    return [
        event
        for event in events
        if event.kind is EventKind.SCALE
        and phase.began <= event.at < phase.ended
        and event.data["desired"] != event.data["before"]
    ]


def summary(phase: Phase, events: list[Event]) -> dict[str, Any]:
    middle, changed = (phase.began + phase.ended) / 2, changes(phase, events)
    steps = [e.data["metrics"] for e in events if e.kind is EventKind.STEP and middle <= e.at < phase.ended]
    waited = sum(step["wait_seconds"] for step in steps) / sum(step["step_seconds"] for step in steps)
    return {
        "reward_s": phase.load,
        "decided": [event.data["desired"] for event in changed],
        "settled_s": round(changed[-1].at - phase.began, 1) if changed else 0.0,
        "wait": round(waited, 3),
        "steps_per_s": round(len(steps) / (phase.ended - middle), 3),
        "reward": round(fmean(step["reward_mean"] for step in steps), 3),
    }


def draw(path: Path, phases: list[Phase], events: list[Event]) -> None:
    """Load, decided number and replicas that are there, over time."""
    import matplotlib.pyplot as plt

    zero, end = phases[0].began, phases[-1].ended
    present: set[str] = set()
    there, wanted = [(0.0, 0)], [(0.0, 1)]
    for event in events:
        at, data = max(0.0, event.at - zero), event.data
        if event.kind is EventKind.REPLICA and data["role"] == "rollout":
            (present.add if data["state"] in ("live", "draining") else present.discard)(data["name"])
            there.append((at, len(present)))
        elif event.kind is EventKind.SCALE:
            wanted.append((at, data["desired"]))
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for line, name, style in ((wanted, "needed", "-"), (there, "there", "--")):
        shown = [*((at, n) for at, n in line if at <= end - zero), (end - zero, line[-1][1])]
        axes.step(*zip(*shown, strict=True), style, where="post", label=name, linewidth=2)
    for phase in phases:
        label = f"a reward takes {phase.load:g} s"
        axes.axvline(phase.began - zero, color="0.8", linewidth=1)
        axes.text(phase.began - zero + 2, 4.45, label, fontsize=8, color="0.35")
    axes.set(xlabel="seconds", ylabel="rollout replicas", ylim=(0, 4.9), xlim=(0, end - zero))
    axes.legend(loc="center right", frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    given = options(__doc__, phase=(90.0, "seconds of each load"), out=(Path, "a picture"))
    with tempfile.TemporaryDirectory() as folder:
        phases, events = run(Path(folder), given.phase)
    if given.out:
        draw(given.out, phases, events)
    rows = {f"phase {n}": summary(phase, events) for n, phase in enumerate(phases, 1)}
    report(given, {"phases": list(rows.values())}, rows)


if __name__ == "__main__":
    main()
