"""Log-probs of tokens from hidden states with their loss, forward and backward, for 16,384 tokens over 151,936 words.

    plain            all logits at once and a bare float32 log-softmax, kept by autograd
    blocks           ours, operation after operation, as without `train.compile`
    fused            ours, in passes that a compiler made, as with `train.compile`
    Liger            its fused linear cross-entropy (Triton): the mean loss alone

Ours computes entropies as well. Goal for `fused` at the chunk of the device: at most 1.35 times the time of the plain
way, at 1/8 of its memory. Larger chunks take more memory, and add the gradient of the output matrix less often.
The results of ours are compared with the plain way's first, with an entropy in the loss, for fewer tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.roofline import Work
from benchmarks.gpu.steps import report_failure
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import TokenOutputs, chunk_of, token_logprobs
from policy_worker.model.logits.softmax import Fused
from policy_worker.parallel import kernels

VOCABULARY, WIDTHS, TOKENS, CHECKED = 151936, (1536, 3584), 16384, 2048
TINY_VOCABULARY, TINY_WIDTHS, TINY_TOKENS, TINY_CHECKED = 512, (32, 64), 96, 64
CHUNKS = (25, 27, 28)
"""Powers of two of the logits in memory at once that are measured, next to those of the device."""
LIGER = "liger_kernel"
OURS = "log-probs, entropies"
RETURNS = {"plain": "log-probs", "Liger": "mean loss: no log-probs, no entropies"}


class Case(NamedTuple):
    """Leaves in bf16, and labels."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    @staticmethod
    def of(bench: Bench, width: int, tokens: int) -> Case:
        vocabulary = TINY_VOCABULARY if bench.tiny else VOCABULARY
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=bench.device, dtype=torch.bfloat16)
        weight = torch.randn(vocabulary, width, device=bench.device, dtype=torch.bfloat16) * 0.02
        labels = torch.randint(vocabulary, (tokens,), device=bench.device)
        return Case(hidden.requires_grad_(), weight.requires_grad_(), labels)

    def gradients_of(self, loss: Callable[[Case], Tensor]) -> None:
        self.hidden.grad = self.weight.grad = None
        loss(self).backward()

    @property
    def work(self) -> Work:
        """Three products, and each operand and gradient once."""
        product = 2.0 * len(self.hidden) * self.weight.numel()
        return Work(flops=3 * product, moved=2.0 * (self.hidden.nbytes + self.weight.nbytes))


def plain(case: Case) -> Tensor:
    """The mean loss by all logits at once."""
    log_p = torch.log_softmax((case.hidden @ case.weight.T).float(), dim=-1)
    return -log_p.gather(1, case.labels[:, None]).mean()


def ours(case: Case, chunk: int | None = None, fused: Fused | None = None) -> Tensor:
    """The same as a job computes it."""
    return -token_logprobs(
        case.hidden, Head(case.weight), case.labels, chunk_elements=chunk, fused=fused
    ).logprobs.mean()


def liger(case: Case) -> Tensor:
    """The same by Liger's kernels."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss()(case.weight, case.hidden, case.labels)
    return loss


def run(bench: Bench) -> None:
    if bench.tiny:
        kernels.BACKEND = "aot_eager"
    fused = Fused.by(partial(torch.compile, dynamic=True, backend=kernels.BACKEND))
    for width in TINY_WIDTHS if bench.tiny else WIDTHS:
        name = f"width {width}"
        try:
            check(bench, name, Case.of(bench, width, TINY_CHECKED if bench.tiny else CHECKED), fused)
        except Exception as error:
            report_failure(bench, f"{name}: compared with plain", error)
        bench.free()
        measure(bench, name, Case.of(bench, width, TINY_TOKENS if bench.tiny else TOKENS), fused)
        bench.free()


def check(bench: Bench, name: str, case: Case, fused: Fused) -> None:
    """Compare log-probs and gradients of ours with the plain way's, of a loss with an entropy."""

    def by_plain() -> TokenOutputs:
        log_p = torch.log_softmax((case.hidden @ case.weight.T).float(), dim=-1)
        picked = log_p.gather(1, case.labels[:, None])[:, 0]
        return TokenOutputs(picked, -(log_p.exp() * log_p).sum(-1), picked >= log_p.amax(1))

    def found(of: Callable[[], TokenOutputs]) -> tuple[Tensor, Tensor]:
        case.hidden.grad = case.weight.grad = None
        out = of()
        (-out.logprobs.mean() - 0.01 * out.entropy.mean()).backward()
        assert case.hidden.grad is not None
        return out.logprobs.detach(), case.hidden.grad.float().norm()

    expected, norm = found(by_plain)
    for way, by in {"blocks": None, "fused": fused}.items():
        logprobs, own = found(lambda by=by: token_logprobs(case.hidden, Head(case.weight), case.labels, fused=by))
        error, ratio = float((logprobs - expected).abs().max()), float(own / norm)
        right = error < 0.05 and abs(ratio - 1) < 0.02
        bench.check(f"{name}, {way}: equal to plain", right, largest_error=error, gradient_norm_ratio=ratio)


def measure(bench: Bench, name: str, case: Case, fused: Fused) -> None:
    """Report each way next to plain, the goal's first."""
    device = chunk_of(bench.device)
    ways: dict[str, tuple[Callable[[Case], Tensor], str]] = {"plain": (plain, "")}
    ways |= {"fused": (partial(ours, fused=fused), _power(device)), "blocks": (ours, _power(device))}
    if importlib.util.find_spec(LIGER) is not None and bench.on_gpu:
        ways["Liger"] = liger, ""
    elif bench.on_gpu:
        bench.skip(f"{name}, Liger", 'liger-kernel is not installed: pip install liger-kernel, or the extra "liger"')
    for chunk in (2**n for n in CHUNKS if 2**n != device):
        words = _power(chunk)
        ways[f"fused, chunks of {words}"] = partial(ours, chunk=chunk, fused=fused), words
        ways[f"blocks, chunks of {words}"] = partial(ours, chunk=chunk), words
    of_plain: tuple[float, float] | None = None
    for way, (loss, words) in ways.items():
        bench.free()
        try:
            seconds = bench.seconds(partial(case.gradients_of, loss))
            case.hidden.grad = case.weight.grad = None
            peak = bench.peak_gb(partial(case.gradients_of, loss))
        except Exception as error:
            report_failure(bench, f"{name}, {way}", error)
            continue
        of_plain = (seconds, peak) if way == "plain" else of_plain
        ratios = {}
        if of_plain is not None:
            ratios = {"time_ratio": seconds / of_plain[0]}
            ratios |= {"memory_ratio": peak / of_plain[1]} if of_plain[1] else {}
        returns = RETURNS.get(way, OURS)
        bench.timed(f"{name}, {way}", seconds, case.work, gb=peak, **ratios, chunk=words, returns=returns)


def _power(chunk: int) -> str:
    return f"2^{chunk.bit_length() - 1}"
