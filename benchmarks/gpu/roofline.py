"""What a card could do at most: the time below which a piece of work cannot be done, and what part keeps from less.

    roof = the largest of  FLOPs / peak of products in bf16,  bytes / bandwidth of memory,  bytes / rate of the bus

A figure far above its roof is lost to launches, waits, or kernels that move more than they have to. The roof counts
what the work itself needs: operations of products, and bytes that are read or written at least once.
"""

from __future__ import annotations

import re
from typing import NamedTuple

Roof = dict[str, float | str]


class Card(NamedTuple):
    """flops: per second, dense products in bf16. bytes_s: of its memory. bus_s: bytes per second from and to the
    host."""

    flops: float
    bytes_s: float
    bus_s: float


class Work(NamedTuple):
    """flops: operations of products. moved: bytes read or written in the card's memory. bus: bytes over the bus."""

    flops: float = 0.0
    moved: float = 0.0
    bus: float = 0.0


KNOWN = (
    ("H200 NVL", 835e12, 4.8e12),
    ("H200", 989e12, 4.8e12),
    ("H100 PCIe", 756e12, 2.0e12),
    ("H100 NVL", 835e12, 3.9e12),
    ("H100 HBM3", 989e12, 3.35e12),
    ("A100 SXM4 80GB", 312e12, 2.04e12),
    ("A100 80GB PCIe", 312e12, 1.94e12),
    ("A100", 312e12, 1.55e12),
    ("L40S", 362e12, 0.864e12),
)
"""Words of a card's name, FLOP/s without sparsity, and bytes per second, by NVIDIA's data sheets."""


def known(name: str) -> tuple[float, float] | None:
    """FLOP/s and bytes per second of a card by the name that its driver reports; None: measure them.

    A part of a card (MIG) has less than its name says."""
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return None
    fitting = ((flops, bytes_s) for text, flops, bytes_s in KNOWN if words >= set(text.split()))
    return next(fitting, None)


def roof(card: Card, work: Work, seconds: float) -> Roof:
    """The least milliseconds of the work, which part of the measured seconds that is, and what binds it."""
    parts = {"arithmetic": work.flops / card.flops, "memory": work.moved / card.bytes_s, "bus": work.bus / card.bus_s}
    bound = max(parts, key=parts.__getitem__)
    return {"roof_ms": parts[bound] * 1e3, "of_roof": parts[bound] / seconds, "bound": bound}


class StepShape(NamedTuple):
    """What the arithmetic of an optimizer step is counted from.

    parameters, head: numbers in all of the model, and in its output matrix. positions: that layers compute. learned:
    positions that the head computes. width: of all heads of queries together. layers: with attention. pairs: of a
    query and a key that it sees, in one layer."""

    parameters: float
    head: float
    positions: float
    learned: float
    width: float
    layers: int
    pairs: float

    @property
    def attention(self) -> float:
        """FLOPs of the attention's forward: two products of `width` for each pair."""
        return 4 * self.width * self.layers * self.pairs

    @property
    def logits(self) -> float:
        """FLOPs of the head's forward."""
        return 2 * self.head * self.learned

    @property
    def others(self) -> float:
        """FLOPs of the forward of the layers' matrices."""
        return 2 * (self.parameters - self.head) * self.positions

    @property
    def forward(self) -> float:
        return self.attention + self.logits + self.others

    def parts(self, optimizer_bytes: float = 28.0) -> dict[str, Work]:
        """The work of each part of a step. Backward is two products for each one of forward.

        optimizer_bytes: that AdamW reads and writes of a parameter: master weight, gradient and two moments in
        float32, of which it writes all but the gradient."""
        return {
            "attention": Work(self.attention),
            "log-probs": Work(self.logits),
            "other forward": Work(self.others),
            "backward": Work(2 * self.forward),
            "optimizer": Work(moved=optimizer_bytes * self.parameters),
        }


def causal_pairs(shared: int, own: tuple[int, ...]) -> float:
    """Pairs of a query and a key in sequences of `own` lengths behind `shared` positions that are computed once."""
    return shared**2 / 2 + sum(shared * length + length**2 / 2 for length in own)
