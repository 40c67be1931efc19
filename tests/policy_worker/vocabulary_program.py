"""One rank of an output head whose rows are spread: `python -m tests.policy_worker.vocabulary_program`.

Over all ranks, and over the first and the last half of them at once. Everything is compared with what one process
computes of the whole head, and that, in what is sampled from the softmax alone, with autograd of a log-softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from policy_worker.model.logits.drawn import Reshaping, drawn_of
from policy_worker.model.logits.head import Head, VocabularyShard
from policy_worker.model.logits.logprobs import Beside, logprobs_at, token_kl, token_logprobs, top_tokens
from tests.policy_worker.model.logits.test_drawn import CASES, V, make_contexts
from tests.policy_worker.model.logits.test_logprobs import naive_log_p
from tests.policy_worker.ranks import joined

UNEVEN = {2: [15, 8], 4: [7, 3, 12, 1]}
FORMS = [(False, 1.0, None), (True, 0.25, None), (True, 1.0, 1.5)]
TEMPERATURE = 0.7


class Shard(NamedTuple):
    """Rows `first` to `last` of V over the ranks of a group."""

    group: Any
    first: int
    last: int

    def of(self, head: Head) -> Head:
        """The rows of a head that are here, as leaves of their own."""
        rows = slice(self.first, self.last)
        weight, bias = (None if whole is None else leaf(whole[rows]) for whole in head[:2])
        return head._replace(weight=weight, bias=bias, vocabulary=VocabularyShard(self.group, self.first))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def shard(group: Any, rows: Sequence[int]) -> Shard:
    last = list(accumulate(rows))[dist.get_rank(group)]
    return Shard(group, last - rows[dist.get_rank(group)], last)


def outputs(
    hidden: Tensor, head: Head, labels: Tensor, ids: Tensor, beside: Beside, chunk: int, drawn: Any = None
) -> list[Tensor]:
    """Everything with a gradient; correctness is asserted to be whether a label is the likeliest."""
    found = token_logprobs(hidden, head, labels, TEMPERATURE, chunk, drawn, beside)
    alone = token_logprobs(hidden, head, labels, TEMPERATURE, chunk, drawn)
    assert torch.equal(found.correct, alone.correct)
    likeliest = [] if drawn else [top_tokens(hidden, head, 1, TEMPERATURE, chunk).ids[:, 0] == labels]
    assert all(torch.equal(found.correct, expected) for expected in likeliest)
    assert found.kl is not None
    return [
        found.logprobs,
        found.entropy,
        found.kl,
        token_kl(hidden, head, beside, TEMPERATURE, chunk, drawn),
        logprobs_at(hidden, head, ids, TEMPERATURE, chunk),
    ]


def plainly(hidden: Tensor, head: Head, labels: Tensor, ids: Tensor, beside: Beside) -> list[Tensor]:
    log_p, log_q = (naive_log_p(*of, TEMPERATURE) for of in ((hidden, head), beside))
    kl = (log_p.exp() * (log_p - log_q)).sum(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    return [log_p.gather(1, labels[:, None])[:, 0], entropy, kl, kl, log_p.gather(1, ids)]


def gradients(found: Sequence[Tensor], leaves: Sequence[Tensor | None]) -> list[list[Tensor]]:
    """Of each output alone, and of all of them together."""
    of = [leaf for leaf in leaves if leaf is not None]
    terms = [(torch.linspace(-1, 2, one.numel(), dtype=one.dtype).view_as(one) * one).sum() for one in found]
    return [list(torch.autograd.grad(loss, of, retain_graph=True)) for loss in (*terms, sum(terms))]


def check(
    here: Shard, head: Head, hidden: Tensor, states: Tensor, chunk: int, tolerance: float, drawn: Any = None
) -> None:
    k, whole_chunk = len(hidden), 10**6
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, V, (k,), generator=generator)
    labels[::2] = head.logits(hidden[::2]).argmax(1)
    ids = torch.stack([torch.randperm(V, generator=generator)[:5] for _ in range(k)] or [labels.new_empty(5)])
    ids = ids[:k]
    whole = [leaf(hidden), *(None if part is None else leaf(part) for part in head[:2])]
    head = head._replace(weight=whole[1], bias=whole[2])
    other = Head(head.weight.detach().flip(0), softcap=2.0)
    mine = here.of(head)
    local = [leaf(hidden), *mine[:2]]
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)

    alone = outputs(whole[0], head, labels, ids, Beside(states, other), whole_chunk, drawn)
    expected = [(alone, gradients(alone, whole))]
    if drawn is None and hidden.dtype == torch.float64:
        plain = plainly(whole[0], head, labels, ids, Beside(states, other))
        expected.append((plain, gradients(plain, whole)))
    for beside in (Beside(states, here.of(other)), Beside(states, other)):
        found = outputs(local[0], mine, labels, ids, beside, chunk, drawn)
        found_gradients = gradients(found, local)
        for values, slopes in expected:
            for a, b in zip(found, values, strict=True):
                close(a, b)
            for ours, theirs in zip(found_gradients, slopes, strict=True):
                close(ours[0], theirs[0])
                for a, b in zip(ours[1:], theirs[1:], strict=True):
                    close(a, b[here.first : here.last])
    for n in (1, 4, V):  # more than some ranks have
        found_top, expected_top = (
            top_tokens(h[0], of, n, TEMPERATURE, size)
            for h, of, size in ((local, mine, chunk), (whole, head, whole_chunk))
        )
        close(found_top.logprobs, expected_top.logprobs)
        assert hidden.dtype != torch.float64 or torch.equal(found_top.ids, expected_top.ids)


def main() -> None:
    with joined() as group:
        half = group.world // 2
        halves = [dist.new_group(ranks) for ranks in (list(range(half)), list(range(half, group.world)))]
        shards = [shard(dist.group.WORLD, UNEVEN[group.world]), shard(halves[group.rank // half], UNEVEN[half])]
        generator = torch.Generator().manual_seed(1)
        how = CASES["all"]
        contexts = make_contexts(0, how)
        k = sum(len(context.learned) for context in contexts)
        hidden, weight, states = (
            torch.randn(rows, 6, generator=generator, dtype=torch.float64) for rows in (k, V, k)
        )
        bias = torch.linspace(-1, 2, V, dtype=torch.float64)
        for here in shards:
            for number, (with_bias, scale, softcap) in enumerate(FORMS):
                head = Head(weight, bias if with_bias else None, scale, softcap)
                check(here, head, hidden, states, [10**6, 40, 1][number], 1e-10)
            check(here, Head(weight, bias), hidden[:0], states[:0], 40, 1e-10)
            low = [tensor.bfloat16() for tensor in (weight, hidden, states)]
            check(here, Head(low[0]), low[1], low[2], 40, 0.03)
            for reshaping in (how, CASES["filters"], Reshaping()):
                of = make_contexts(0, reshaping)
                drawn = drawn_of(of, reshaping, V)
                check(here, Head(weight, None, 1.3, 2.0), hidden, states, 40, 1e-10, drawn)


if __name__ == "__main__":
    main()
