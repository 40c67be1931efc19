"""The autoscaler with simulated fleets of up to 10,000 rollout replicas, compared with fixed ones.

    python -m benchmarks.fleet.autoscale [--quick] [--only NAMES] [--jobs 2] [--out DIR]

Ledger, admission and autoscaler are the real ones; engines, a trainer of 64 ranks and the platform are events on a
virtual clock (`benchmarks/fleet`). Of each scenario: how long the trainer waits in steady phases and in between, how
soon the number settles, how often it changes its direction, and what a trained group costs in replica-seconds,
those of replicas that start included, over the cheapest fixed fleet that trains as many groups in that time.

`--out` writes a picture (`autoscale.png`) and the table (`autoscale.md`) there.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.fleet.hpa import TOLERANCE
from benchmarks.fleet.judge import Verdict, cheapest, judge
from benchmarks.fleet.scenario import Ramp, Scenario, Square, edges
from benchmarks.fleet.simulator import Result, Simulator
from benchmarks.fleet.speed import decision_times
from benchmarks.harness import options, report, say, table

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


def row_of(verdict: Verdict) -> dict[str, str]:
    """A line of the page's table."""
    v = verdict
    return {
        "waits, steady": f"{v.idle:.1%}", "in between": f"{v.idle_between:.1%}",
        "settles after": "" if v.settled is None else f"{v.settled:.1f} ×", "turns/h": f"{v.flips:.1f}",
        "cost": f"{v.cost:.1f}", "over fixed": "" if v.ratio is None else f"{v.ratio:.2f} (of {v.fixed})",
        "misses": ", ".join(v.faults),
    }  # fmt: skip


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
    given = options(
        __doc__, quick=(False, "the scenarios of 8 replicas and the faults"),
        only=("", "scenarios whose name contains this"), jobs=(1, "processes"),
        out=(Path, "directory for a picture and the tables"),
    )  # fmt: skip
    sizes = [] if given.quick else [*loads(100), *loads(1000), large()]
    scenarios = [scenario for scenario in (*loads(8), *sizes, *faults()) if given.only in scenario.name]
    verdicts: list[Verdict] = []
    results, seconds = {}, 0.0
    with ProcessPoolExecutor(given.jobs) as pool:
        for verdict, result, took in pool.map(examine, scenarios):
            verdicts.append(verdict)
            results[verdict.name] = result
            seconds += took
            say(f"{verdict.name}: {row_of(verdict)}, {took:.0f} s")
    speed = decision_times(1000 if given.quick else 10_000)
    rows = {verdict.name: row_of(verdict) for verdict in verdicts}
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "autoscale.md").write_text(table(rows) + "\n", encoding="utf-8")
        if drawn := {name: results[name] for name in DRAWN if name in results}:
            draw(drawn, given.out / "autoscale.png")
    print(table({"one call": speed}), end="\n\n")
    figures = {
        "missed": {v.name: v.faults for v in verdicts if v.faults}, "speed": speed, "cpu_s": seconds,
        "scenarios": {v.name: asdict(v) for v in verdicts},
    }  # fmt: skip
    report(given, figures, rows)


if __name__ == "__main__":
    main()
