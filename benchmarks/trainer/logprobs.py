"""Log-probs over a large vocabulary with their loss and its gradients, next to a bare log-softmax of all logits.

    python -m benchmarks.trainer.logprobs --threads 2 [--entropy] [--cpu-time]

Both in turns, from hidden states and an output head in float32. Ours computes entropies as well, which the bare one
does with `--entropy` only (then both have their gradient). Memory is the largest resident set of a call above that
before it, without the gradients of the inputs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import in_turns, medians, options, ratio, report, reset_peak, resident_mib, timed
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import token_logprobs

LIBC = ctypes.CDLL(None)


class Case(NamedTuple):
    """Leaves, and what to compute of them."""

    hidden: Tensor
    head: Head
    labels: Tensor
    with_entropy: bool


def bare(case: Case, before_gradients: Callable[[Tensor], None]) -> Tensor:
    logits = case.hidden @ case.head.weight.T
    logits.register_hook(before_gradients)
    log_p = torch.log_softmax(logits, dim=-1)
    del logits
    loss = -log_p.gather(1, case.labels[:, None]).mean()
    return loss + 0.01 * (log_p.exp() * log_p).sum(-1).mean() if case.with_entropy else loss


def ours(case: Case, before_gradients: Callable[[Tensor], None]) -> Tensor:
    outputs = token_logprobs(case.hidden, case.head, case.labels)
    outputs.logprobs.register_hook(before_gradients)
    loss = -outputs.logprobs.mean()
    return loss - 0.01 * outputs.entropy.mean() if case.with_entropy else loss


Way = Callable[[Case, Callable[[Tensor], None]], Tensor]
WAYS: dict[str, Way] = {"bare": bare, "ours": ours}


def gradients(way: Way, case: Case, before: Callable[[Tensor], None] = lambda _: None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(way(case, before), (case.hidden, case.head.weight))


def measured(way: Way, case: Case, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds, and the most that is there before gradients of the inputs come to be, and after that without them."""
    seconds = timed(lambda: gradients(way, case), clock)
    LIBC.malloc_trim(0)
    before, peaks = resident_mib(), []
    reset_peak()

    def mark(_: Tensor) -> None:
        peaks.append(resident_mib("VmHWM") - before)
        reset_peak()

    made = gradients(way, case, mark)
    peaks.append(resident_mib("VmHWM") - before - sum(gradient.nbytes for gradient in made) / 2**20)
    return {"seconds": seconds, "MiB": max(peaks)}


def main() -> None:
    given = options(
        __doc__, rounds=5, tokens=1024, vocabulary=150_000, width=1024,
        cpu_time=(False, "CPU time of one thread, on a machine busy otherwise"),
        entropy=(False, "an entropy bonus in the loss of both"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(given.tokens, given.width, generator=generator).requires_grad_()
    weight = torch.randn(given.vocabulary, given.width, generator=generator).mul_(0.02).requires_grad_()
    labels = torch.randint(0, given.vocabulary, (given.tokens,), generator=generator)
    case = Case(hidden, Head(weight), labels, given.entropy)
    pairs = zip(gradients(ours, case), gradients(bare, case), strict=True)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    clock = time.process_time if given.cpu_time else time.perf_counter
    turns = in_turns({name: partial(measured, way, case, clock) for name, way in WAYS.items()}, given.rounds)
    rows = {name: medians(taken) for name, taken in turns.items()}
    figures = {
        "time_ratio": ratio(*([turn["seconds"] for turn in turns[name]] for name in ("ours", "bare"))),
        "memory_ratio": rows["ours"]["MiB"] / rows["bare"]["MiB"],
        "largest_relative_error": error,
    }
    report(
        given, {**figures, **rows}, rows | {"ratio": dict(zip(("seconds", "MiB"), figures.values(), strict=False))}
    )


if __name__ == "__main__":
    main()
