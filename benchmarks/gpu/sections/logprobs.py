"""Log-probs of tokens from hidden states, forward and backward: in chunks that are computed twice, and plainly.

Plainly means all logits at once, in float32, kept by autograd. Goal: at most an eighth of the memory in at most 1.35
times the time. The plain way is also what the results are compared with. The trainer's chunks come last in each size;
larger ones take more memory, and add the gradient of the output matrix less often.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import TokenOutputs, token_logprobs

TOKENS = (4096, 16384)


def plain(hidden: Tensor, head: Head, labels: Tensor) -> TokenOutputs:
    """As `token_logprobs`, by autograd."""
    log_p = torch.log_softmax((hidden @ head.weight.T).float(), dim=-1)
    picked = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return TokenOutputs(picked, entropy, picked >= log_p.amax(1))


def run(bench: Bench) -> None:
    width, vocabulary = bench.shape["hidden_size"], bench.shape["vocab_size"]
    for tokens in (64, 96) if bench.tiny else TOKENS:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=bench.device, dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(vocabulary, width, device=bench.device, dtype=torch.bfloat16) * 0.02
        weight = weight.requires_grad_()
        labels = torch.randint(vocabulary, (tokens,), device=bench.device)

        def step(of: object, hidden: Tensor = hidden, weight: Tensor = weight, labels: Tensor = labels) -> Tensor:
            hidden.grad = weight.grad = None
            out: TokenOutputs = of(hidden, Head(weight), labels)  # type: ignore[operator]
            (-out.logprobs.mean() - 0.01 * out.entropy.mean()).backward()
            return out.logprobs.detach()

        ours, theirs = step(token_logprobs), step(plain)
        error = float((ours - theirs).abs().max())
        gradient = float((step(token_logprobs), hidden.grad.float())[1].norm())  # type: ignore[union-attr]
        expected = float((step(plain), hidden.grad.float())[1].norm())  # type: ignore[union-attr]
        bench.check(
            f"{tokens} tokens, {vocabulary} words: equal to the plain way",
            error < 0.05 and abs(gradient / expected - 1) < 0.02,
            largest_error=error,
            gradient_norm_ratio=gradient / expected,
        )
        ways = {"plain": plain, "chunked": token_logprobs}
        if not bench.tiny:
            ways |= {f"chunks of 2^{n}": partial(token_logprobs, chunk_elements=2**n) for n in (27, 28)}
        seconds, peaks = {}, {}
        for name, of in ways.items():
            seconds[name] = bench.seconds(lambda of=of: step(of))
            hidden.grad = weight.grad = None
            peaks[name] = bench.peak_gb(lambda of=of: step(of))
        for name in [name for name in ways if name not in ("plain", "chunked")] + ["chunked"]:
            bench.row(
                f"{tokens} tokens, {vocabulary} words, {name}",
                ms=seconds[name] * 1e3,
                plain_ms=seconds["plain"] * 1e3,
                time_ratio=seconds[name] / seconds["plain"],
                gb=peaks[name],
                plain_gb=peaks["plain"],
                **({"memory_ratio": peaks[name] / peaks["plain"]} if peaks["plain"] else {}),
            )
        del hidden, weight, ours, theirs
        bench.free()
