"""Log-probs over a large vocabulary with their loss and its gradients, next to a bare log-softmax of all logits.

    python -m benchmarks.trainer.logprobs --threads 1
    torchrun --nproc-per-node 2 -m benchmarks.trainer.logprobs --threads 2

Both in turns, from hidden states and an output head in float32. Ours computes entropies as well, which the bare one
does with `--entropy` only (then both have their gradient). Under torchrun each rank has its rows of the head, and so
many threads as are its share of those that the bare one has on the first rank meanwhile.

Memory is the largest resident set of a call above that before it, without the gradients of the inputs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from policy_worker.model.logprobs import CHUNK_ELEMENTS, Head, VocabularyShard, token_logprobs

LIBC = ctypes.CDLL(None)


class Case(NamedTuple):
    """Leaves, and what to compute of them."""

    hidden: Tensor
    head: Head
    labels: Tensor
    with_entropy: bool
    chunk_elements: int

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.head.weight


def bare(case: Case, before_gradients: Callable[[Tensor], None]) -> Tensor:
    logits = case.hidden @ case.head.weight.T
    logits.register_hook(before_gradients)
    log_p = torch.log_softmax(logits, dim=-1)
    del logits
    loss = -log_p.gather(1, case.labels[:, None]).mean()
    return loss + 0.01 * (log_p.exp() * log_p).sum(-1).mean() if case.with_entropy else loss


def ours(case: Case, before_gradients: Callable[[Tensor], None]) -> Tensor:
    found = token_logprobs(case.hidden, case.head, case.labels, chunk_elements=case.chunk_elements)
    found.logprobs.register_hook(before_gradients)
    loss = -found.logprobs.mean()
    return loss - 0.01 * found.entropy.mean() if case.with_entropy else loss


Way = Callable[[Case, Callable[[Tensor], None]], Tensor]


def gradients(way: Way, case: Case) -> tuple[Tensor, ...]:
    return torch.autograd.grad(way(case, lambda _: None), case.inputs)


def seconds(way: Way, case: Case, clock: Callable[[], float]) -> float:
    began = clock()
    gradients(way, case)
    return clock() - began


def peak_mib(way: Way, case: Case) -> float:
    """The most that is there before gradients of the inputs come to be, and after that without them."""
    LIBC.malloc_trim(0)
    before, peaks = _status("VmRSS"), []
    _reset_peak()

    def mark(_: Tensor) -> None:
        peaks.append(_status("VmHWM") - before)
        _reset_peak()

    found = torch.autograd.grad(way(case, mark), case.inputs)
    peaks.append(_status("VmHWM") - before - sum(one.nbytes for one in found) / 2**20)
    return max(peaks)


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, on a machine busy otherwise")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each after one that warms up")
    parser.add_argument("--entropy", action="store_true", help="an entropy bonus in the loss of both")
    parser.add_argument("--chunk-elements", type=int, default=CHUNK_ELEMENTS)
    options = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, generator=generator)
    weight = torch.randn(options.vocabulary, options.width, generator=generator).mul_(0.02)
    labels = torch.randint(0, options.vocabulary, (options.tokens,), generator=generator)
    how = labels, options.entropy, options.chunk_elements
    whole = Case(hidden.requires_grad_(), Head(weight.requires_grad_()), *how)
    mine, first = whole, 0
    if ranks > 1:
        share = -(-options.vocabulary // ranks)
        first = rank * share
        rows = weight.detach()[first : first + share].clone().requires_grad_()
        mine = Case(hidden, Head(rows, vocabulary=VocabularyShard(dist.group.WORLD, first)), *how)

    def turn(measure: Callable[[Way, Case], float]) -> tuple[float, float]:
        """Of the bare one, 0 but on the first rank, and of ours."""
        found = []
        for way, case, threads in ((bare, whole, options.threads), (ours, mine, options.threads // ranks)):
            torch.set_num_threads(max(1, threads))
            if ranks > 1:
                dist.barrier()
            found.append(measure(way, case) if case is mine or rank == 0 else 0.0)
        return found[0], found[1]

    if rank == 0 or ranks == 1:
        expected = gradients(bare, whole)
    found = gradients(ours, mine)
    if rank == 0:
        pairs = ((found[0], expected[0]), (found[1], expected[1][: len(found[1])]))
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        del expected, pairs
    del found
    clock = time.process_time if options.cpu_time else time.perf_counter
    times = [turn(partial(seconds, clock=clock)) for _ in range(options.rounds)]
    peaks = [turn(peak_mib) for _ in range(options.rounds)]
    if rank == 0:
        columns = [
            statistics.median(column) for column in (*zip(*times, strict=True), *zip(*peaks, strict=True))
        ]
        result = {
            "bare_s": round(columns[0], 2),
            "ours_s": round(columns[1], 2),
            "time_ratio": round(statistics.median(b / a for a, b in times), 3),
            "bare_mib": round(columns[2]),
            "ours_mib": round(columns[3]),
            "memory_ratio": round(columns[3] / columns[2], 3),
            "largest_relative_error": float(f"{error:.1e}"),
        }
        print("seconds, bare and ours:", ", ".join(f"{a:.2f} {b:.2f}" for a, b in times))
        print(json.dumps(result))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
