"""The autoscaler with simulated fleets of up to 10,000 rollout replicas, compared with fixed ones.

    python -m benchmarks.fleet.autoscale [--quick] [--only NAMES] [--jobs 2] [--out DIR]

Ledger, admission and autoscaler are the real ones; engines, a trainer of 64 ranks and the platform are events on a
virtual clock (`benchmarks/fleet`). Of each scenario: how long the trainer waits in steady phases and in between, how
soon the number settles, how often it changes its direction, and what a trained group costs in replica-seconds,
those of replicas that start included, over the cheapest fixed fleet that trains as many groups in that time.

`--out` writes a picture (`autoscale.png`) and the tables (`autoscale.md`) there. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fleet.hpa import TOLERANCE
from benchmarks.fleet.judge import Verdict, cheapest, judge
from benchmarks.fleet.scenario import Ramp, Scenario, Square, edges
from benchmarks.fleet.simulator import Result, Simulator
from benchmarks.fleet.speed import decision_times

HOUR = 3600.0
DRAWN = ("square 100", "ramp 100", "noise 100")
SIZES: dict[int, dict[str, float]] = {
    8: {},
    100: {"slots": 4, "half": 4.0, "group_s": 90.0, "step_s": 90.0},
    1000: {"slots": 2, "half": 2.0, "group_s": 240.0, "step_s": 240.0, "bound": 6},
    9000: {"slots": 1, "half": 1.0, "group_s": 240.0, "step_s": 240.0, "bound": 6},
}


def loads(need: int) -> list[Scenario]:
    """Constant, noisy, in steps, and slowly rising and falling."""
    base = Scenario("", need, 3 * HOUR, **SIZES[need])  # type: ignore[arg-type]
    period, third = 2 * HOUR, 1 / 3
    return [
        replace(base, name=f"constant {need}", cost_goal=1.05),
        replace(base, name=f"noise {need}", cost_goal=1.05, jitter=0.2, drift=0.1),
        replace(
            base, name=f"square {need}", seconds=4.5 * HOUR, cost_goal=0.8, warm_up=HOUR / 2,
            length=Square(third, period), changes=edges(period, 4.5 * HOUR),
        ),
        replace(
            base, name=f"ramp {need}", seconds=4 * HOUR, cost_goal=0.8, initial=max(1, round(need / 4)),
            climbs=((0.75 * HOUR, 1.375 * HOUR),), step=Ramp(0.25, 0.75 * HOUR, 3.5 * HOUR),
        ),
    ]  # fmt: skip


def large() -> Scenario:
    """9,000 replicas, then a third of them. Costs are not compared: each fixed fleet takes minutes."""
    return Scenario(
        "step 9000", 9000, 2.5 * HOUR, **SIZES[9000], length=Square(1 / 3, 2.5 * HOUR),  # type: ignore[arg-type]
        changes=(1.25 * HOUR,), lost_per_hour=0.05,
    )  # fmt: skip


def faults() -> list[Scenario]:
    """What goes wrong, and small or limited jobs. Costs are not compared."""
    base = Scenario("", 100, 2.5 * HOUR, **SIZES[100])  # type: ignore[arg-type]
    small = replace(base, **SIZES[8])  # type: ignore[arg-type]
    noon = 1.25 * HOUR
    return [
        replace(base, name="outages", outages=((HOUR, 90.0), (1.5 * HOUR, 120.0), (2 * HOUR, 60.0))),
        replace(base, name="spot, 2 losses per hour", lost_per_hour=2.0),
        replace(base, name="slow starts of 10 minutes", start_s=600.0, seconds=4 * HOUR),
        replace(base, name="trainer away for 10 minutes", away=((noon, 600.0),)),
        replace(base, name="starts with 5", initial=5),
        replace(base, name="platform delivers 70", delivers=70, settles=False),
        *by_hpa(replace(base, length=Square(1 / 3, 2 * HOUR), seconds=4 * HOUR, changes=edges(2 * HOUR, 4 * HOUR))),
        replace(base, name="maximum 70", maximum=70, initial=50, settles=False),
        replace(base, name="long tail: steps wait for stragglers", tail=0.8, bound=2, settles=False),
        replace(base, name="on-policy (bound 0)", bound=0, settles=False),
        replace(base, name="bound 1", bound=1, settles=False),
        replace(small, name="need 1", need=1, minimum=0, seconds=4 * HOUR),
        replace(small, name="need 2", need=2),
        replace(small, name="need 3", need=3, minimum=0),
        replace(small, name="need 3, square", need=3, length=Square(1 / 3, 2 * HOUR), seconds=4 * HOUR,
                changes=edges(2 * HOUR, 4 * HOUR)),
    ]  # fmt: skip


def by_hpa(square: Scenario) -> list[Scenario]:
    """A HorizontalPodAutoscaler obeys, as KEDA makes it, with a controller that is away now and then."""
    away = replace(square, outages=((0.6 * HOUR, 90.0), (1.5 * HOUR, 120.0), (2.6 * HOUR, 60.0)))
    return [
        replace(away, name="square by KEDA, tolerance 10 %", tolerance=TOLERANCE),
        replace(away, name="square by KEDA, tolerance 0", tolerance=0.0),
        replace(away, name="square, the launcher obeys"),
    ]


def examine(scenario: Scenario) -> tuple[Verdict, Result, float]:
    """And the CPU seconds that it took."""
    began = time.process_time()
    result = Simulator(scenario).run()
    fixed = None if scenario.cost_goal is None else cheapest(scenario, result)
    return judge(scenario, result, fixed), result, time.process_time() - began


def table(verdicts: list[Verdict]) -> str:
    rows = [
        "| scenario | waits, steady | in between | settles after | turns/h | cost | over fixed | misses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for v in verdicts:
        fixed = "" if v.ratio is None else f"{v.ratio:.2f} (of {v.fixed})"
        settled = "" if v.settled is None else f"{v.settled:.1f} ×"
        rows.append(
            f"| {v.name} | {v.idle:.1%} | {v.idle_between:.1%} | {settled} | {v.flips:.1f} | {v.cost:.1f} "
            f"| {fixed} | {', '.join(v.faults)} |"
        )
    return "\n".join(rows)


def draw(results: dict[str, Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4.6 * len(results), 3.4), squeeze=False)
    for axis, (name, result) in zip(axes[0], results.items(), strict=True):
        hours = [point.at / HOUR for point in result.points]
        axis.plot(hours, [p.need for p in result.points], color="black", lw=1, ls="--", label="needed")
        axis.step(hours, [p.desired for p in result.points], color="tab:blue", where="post", label="desired")
        axis.plot(hours, [p.working for p in result.points], color="tab:orange", lw=1, label="working")
        axis.set(title=name, xlabel="hours", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("rollout replicas")
    axes[0][0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the scenarios of 8 replicas and the faults")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="directory for a picture and the tables")
    options = parser.parse_args()
    scenarios = (
        [*loads(8), *faults()]
        if options.quick
        else [*loads(8), *loads(100), *loads(1000), large(), *faults()]
    )
    scenarios = [scenario for scenario in scenarios if options.only in scenario.name]
    verdicts, results, seconds = [], {}, 0.0
    with ProcessPoolExecutor(options.jobs) as pool:
        running = [pool.submit(examine, scenario) for scenario in scenarios]
        for future in running:
            verdict, results[verdict.name], took = future.result()
            verdicts.append(verdict)
            seconds += took
            print(table([verdict]).splitlines()[-1], f"{took:.0f} s", file=sys.stderr, flush=True)
    speed = decision_times(1000 if options.quick else 10_000)
    print(table(verdicts))
    print(f"\n{json.dumps(speed)}\n")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "autoscale.md").write_text(table(verdicts) + "\n", encoding="utf-8")
        drawn = {name: results[name] for name in DRAWN if name in results}
        if drawn:
            draw(drawn, options.out / "autoscale.png")
    found: dict[str, Any] = {
        "missed": {v.name: v.faults for v in verdicts if v.faults},
        "speed": speed,
        "cpu_s": round(seconds),
        "scenarios": {v.name: v.to_record() for v in verdicts},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
