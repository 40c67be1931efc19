"""How long one call takes with very many replicas, and what the ledger keeps in memory. Real time, not virtual."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import count
from statistics import median

from benchmarks.harness import timed
from controller.autoscale.autoscaler import Limits, PastDecisions
from controller.autoscale.scaling import ReplicaScaling, Sight
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.values import LedgerParams
from schema.wire.sample import SampleHeader

SLOTS = 8
SAMPLES = 8


def decision_times(replicas: int) -> dict[str, float]:
    """Milliseconds of a call, and MiB of a ledger in which each replica holds `SLOTS` groups."""
    per_step = replicas * SLOTS // 2
    params = LedgerParams(per_step, SAMPLES, 4, 10**9, lease_timeout=600.0)
    numbers = count()
    tracemalloc.start()
    ledger = Ledger(GroupTable(params), lambda: f"lease-{next(numbers)}")
    names = [f"replica-{k}" for k in range(replicas)]
    for name in names:
        ledger.lease(name, f"{name}-0", 0, 0, SLOTS, 0.0)
    _fill(ledger, per_step - 1)
    for name in names:
        ledger.lease(name, f"{name}-1", 0, 0, SLOTS // 2, 0.0)
    mib = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    held = len(ledger.table.held)
    scaling = ReplicaScaling(
        Limits(1, 2 * replicas, 0.02, 300.0, 5 * per_step, 4), 15.0, PastDecisions(replicas), 0.0
    )
    clock = count(1)

    def look() -> None:
        now = 2.0 * next(clock)
        scaling.look(now, Sight(names, held, 0, 0, ledger.became_ready, ledger.ready_tokens))

    def lease() -> None:
        ledger.lease(names[0], f"again-{next(clock)}", 0, 0, 1, 1.0)

    found = {
        "replicas": replicas,
        "held_groups": held,
        "ledger_mib": round(mib, 1),
        "look_ms": _ms(look),
        "lease_ms": _ms(lease),
        "assemble_that_waits_ms": _ms(lambda: ledger.assemble(1.0)),
        "prefetch_ms": _ms(ledger.prefetch),
    }
    _fill(ledger, 1)
    return {**found, "assemble_ms": _ms(lambda: ledger.assemble(1.0), 1)}


def _fill(ledger: Ledger, groups: int) -> None:
    """So many groups become ready."""
    for group in ledger.table.held[:groups]:
        for index in range(SAMPLES):
            header = SampleHeader(
                index=index, prompt_tokens=100, response_tokens=500, total_tokens=600, oldest_version=0,
                newest_version=0, finish_reason="stop", rewards={"r": 1.0}, score=1.0,
            )  # fmt: skip
            ledger.push(group.id, group.lease_id or "", index, header, 5000)


def _ms(call: Callable[[], object], times: int = 25) -> float:
    return 1000.0 * median(timed(call) for _ in range(times))
