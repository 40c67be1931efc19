"""Numbers that say enough of z, logits over a temperature, of some tokens; and the gradient of z.

`policy_worker.model.logits.logprobs` has the formulas. The largest z, Σ exp z and the means over p of parts of a
vocabulary make those of the whole (`combined`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policy_worker.model.logits.head import Head

BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Logits that are turned into probabilities at once. On a CPU they fit its second-level cache with what is made of
them; on a GPU what is made of them is small next to a chunk, and what each costs to launch next to its work."""


def statistics_of(z: Tensor, other: Tensor | None = None) -> Tensor:
    """Take of z [chunk, V] max z, log Σ exp (z − max z), E (z − max z); with another model's z', which is lost, also
    max z', log Σ exp (z' − max z'), E (z − max z − z' + max z'); [3 or 6, chunk]."""
    statistics = z.new_empty(3 if other is None else 6, len(z))
    for rows, (d, p, *difference) in _blocks(z, len(statistics) // 3 + 1):
        largest = statistics[0, rows] = z[rows].amax(1)
        torch.exp(torch.sub(z[rows], largest[:, None], out=d), out=p)
        total = p.sum(1)
        statistics[1, rows] = total.log()
        if other is not None:
            largest = statistics[3, rows] = other[rows].amax(1)
            d_other = other[rows].sub_(largest[:, None])
            statistics[5, rows] = torch.sub(d, d_other, out=difference[0]).mul_(p).sum(1) / total
            statistics[4, rows] = d_other.exp_().sum(1).log()
        statistics[2, rows] = d.mul_(p).sum(1) / total
    return statistics


def combined(parts: Tensor) -> list[Tensor]:
    """Combine `statistics_of` of parts of a vocabulary, [ranks, 3 or 6, K], into those of the whole."""
    largest, shift, log_sum = _combined_sum(parts[:, 0], parts[:, 1])
    weights = (parts[:, 1] + shift - log_sum).exp()
    statistics = [largest, log_sum, (weights * (parts[:, 2] + shift)).sum(0)]
    if parts.shape[1] > 3:
        other, shift_other, log_sum_other = _combined_sum(parts[:, 3], parts[:, 4])
        statistics += [other, log_sum_other, (weights * (parts[:, 5] + shift - shift_other)).sum(0)]
    return statistics


def _combined_sum(largest: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest of all, by how much those of parts are less, and log Σ exp (z − the largest), of [ranks, K]."""
    of_all = largest.amax(0)
    shift = largest - of_all
    return of_all, shift, (log_sum + shift).logsumexp(0)


class Slopes(NamedTuple):
    """Gradients of z, but for what 1[y] adds: exp(z − m) (level + tilt (z − m) + lean (z − m − z' + m')).

    All [K], m and m' the largest z and z'."""

    largest: Tensor
    largest_other: Tensor | None
    level: Tensor
    tilt: Tensor | None
    lean: Tensor | None

    @staticmethod
    def of(
        of_logprobs: Tensor | None,
        of_entropy: Tensor | None,
        of_kl: Tensor | None,
        statistics: Sequence[Tensor],
        factor: float,
    ) -> Slopes:
        """From gradients and `combined` statistics; times a factor."""
        largest, log_sum, mean, *of_other = statistics
        share = log_sum.neg().exp_().mul_(factor)
        level, tilt, lean = torch.zeros_like(share), None, None
        if of_logprobs is not None:
            level -= of_logprobs.sum(1)
        if of_entropy is not None:
            level += of_entropy * mean
            tilt = -of_entropy * share
        if of_kl is not None:
            level -= of_kl * of_other[2]
            lean = of_kl * share
        return Slopes(largest, of_other[0] if of_other else None, level.mul_(share), tilt, lean)

    def of_part(self, part: slice) -> list[Any]:
        """Its columns for these tokens, [n, 1] each, or None."""
        return [None if column is None else column[part, None] for column in self]

    def take(self, part: slice, z: Tensor, z_other: Any) -> None:
        """Turn z of a part into its gradient; z' is lost too. z_other: a tensor where there is a KL, else None."""
        largest, largest_other, level, tilt, lean = self.of_part(part)
        for rows, room in _blocks(z, int(tilt is not None)):
            d = z[rows].sub_(largest[rows])
            by = level[rows]
            if tilt is not None:
                by = torch.mul(d, tilt[rows], out=room[0]).add_(by)
            if lean is not None:
                difference = z_other[rows].sub_(largest_other[rows]).sub_(d).neg_()
                by = difference.mul_(lean[rows]).add_(by)
            d.exp_().mul_(by)


def _blocks(z: Tensor, rooms: int) -> Iterator[tuple[slice, Sequence[Tensor]]]:
    """Rows of [chunk, V], so many as have `BLOCK_ELEMENTS` together; and so many matrices of their shape, the same
    ones each time, since new ones of this size would scatter over malloc's heap."""
    size = min(len(z), max(1, BLOCK_ELEMENTS.get(z.device.type, z.numel()) // z.shape[1]))
    room = z.new_empty(rooms, size, z.shape[1])
    for start in range(0, len(z), size):
        rows = slice(start, min(start + size, len(z)))
        yield rows, room[:, : rows.stop - start].unbind()


# ---- for a compiler ---------------------------------------------------------------------------------------------


class LogitForm(NamedTuple):
    """How z is made of the product h Wᵀ + b = y: z = a y, or c tanh(a y) with c the cap over the temperature."""

    factor: float
    cap: float | None

    @staticmethod
    def of(head: Head, temperature: float) -> LogitForm:
        """Read it from a head, at a temperature."""
        if head.softcap is None:
            return LogitForm(head.scale / temperature, None)
        return LogitForm(head.scale / head.softcap, head.softcap / temperature)

    def z(self, product: Tensor) -> Tensor:
        """Compute z of a product, float32, or float64 of float64."""
        scaled = product.to(torch.promote_types(product.dtype, torch.float32)) * self.factor
        return scaled if self.cap is None else scaled.tanh() * self.cap


def fused_statistics(product: Tensor, form: LogitForm) -> Tensor:
    """`statistics_of` z, from the product [chunk, V]."""
    z = form.z(product)
    largest = z.amax(1)
    d = z - largest[:, None]
    p = d.exp()
    total = p.sum(1)
    return torch.stack([largest, total.log(), (d * p).sum(1) / total])


def fused_gradient(
    product: Tensor, form: LogitForm, slopes: Sequence[Tensor | None], places: Tensor, of_labels: Tensor
) -> Tensor:
    """Gradient of the product [chunk, V], in its type: `Slopes`, its columns for these tokens, and of_labels [chunk]
    at places [chunk]."""
    largest, _, level, tilt, _ = slopes
    z = form.z(product)
    d = z - largest
    gradient = d.exp() * (level if tilt is None else level + tilt * d)
    ids = torch.arange(product.shape[1], device=product.device)
    gradient = gradient + torch.where(ids == places[:, None], of_labels[:, None], 0)
    if form.cap is not None:
        gradient = gradient * (1 - (z / form.cap) ** 2)
    return gradient.to(product.dtype)


class Fused(NamedTuple):
    """Functions of one pass each, which a compiler made of the two above.

    Of a product of 2^27 logits in bfloat16 they read 0.8 GB and write 0.3: a pass for the maximum, one for the sums,
    and one for the gradient. Operation after operation, as PyTorch has them, that is some 13 GB."""

    statistics: Callable[[Tensor, LogitForm], Tensor] = fused_statistics
    gradient: Callable[..., Tensor] = fused_gradient

    @staticmethod
    def by(compiler: Callable[[Any], Any]) -> Fused:
        """Make them by a compiler of functions."""
        return Fused(compiler(fused_statistics), compiler(fused_gradient))
