from __future__ import annotations

import pytest
import torch

from policy_worker.model.logits.head import Head, VocabularyShard
from policy_worker.model.logits.logprobs import Beside, chunk_of, token_kl, token_logprobs
from policy_worker.model.logits.softmax import Fused
from schema.util.gpus import LEAST_LOGITS, MOST_LOGITS, logits_at_once
from tests.policy_worker.ranks import start_ranks, wait_ranks
from tests.support.devices import DEVICE, WITHOUT_GPU


@pytest.fixture(params=[False, True], ids=["in blocks", "fused"])
def fused(request: pytest.FixtureRequest) -> Fused | None:
    """Both ways of computing, the second by the functions that a compiler is given."""
    return Fused() if request.param else None


def plain(hidden, weight, labels, temperature):
    log_p = torch.log_softmax((hidden @ weight.T) / temperature, dim=1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    return logprobs, -(log_p.exp() * log_p).sum(1)


def material(k: int = 37, d: int = 16, v: int = 101, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(k, d, generator=generator, dtype=dtype)
    weight = torch.randn(v, d, generator=generator, dtype=dtype) * 0.3
    labels = torch.randint(0, v, (k,), generator=generator)
    return hidden.to(DEVICE), weight.to(DEVICE), labels.to(DEVICE)


def gradients(outputs, inputs, with_entropy: bool, with_logprobs: bool = True):
    generator = torch.Generator().manual_seed(2)
    logprobs, entropy = outputs[0], outputs[1]
    scale = torch.randn(2, len(logprobs), generator=generator, dtype=logprobs.dtype).to(DEVICE)
    loss = (scale[0] * logprobs).sum() * with_logprobs + (scale[1] * entropy).sum() * with_entropy
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("chunk_elements", [LEAST_LOGITS, 101 * 5, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("parts", [(True, False), (True, True), (False, True)])
def test_equal_to_plain_log_softmax(
    chunk_elements: int, temperature: float, parts: tuple[bool, bool], fused: Fused | None
):
    hidden, weight, labels = material()
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    ours = token_logprobs(hidden, Head(weight), labels, temperature, chunk_elements, fused=fused)
    theirs = plain(hidden, weight, labels, temperature)
    for found, expected in zip(ours[:2], theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with_logprobs, with_entropy = parts
    found = gradients(ours, inputs, with_entropy, with_logprobs)
    expected = gradients(theirs, inputs, with_entropy, with_logprobs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_only_the_log_probs_used(fused: Fused | None):
    hidden, weight, labels = material()
    hidden.requires_grad_()
    ours = token_logprobs(hidden, Head(weight), labels, fused=fused)
    (found,) = torch.autograd.grad(ours.logprobs.sum(), [hidden])
    (expected,) = torch.autograd.grad(plain(hidden, weight, labels, 1.0)[0].sum(), [hidden])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_only_the_entropy_used():
    hidden, weight, labels = material()
    hidden.requires_grad_()
    outputs = token_logprobs(hidden, Head(weight), labels, chunk_elements=101 * 10)
    (found,) = torch.autograd.grad(outputs.entropy.sum(), [hidden])
    (expected,) = torch.autograd.grad(plain(hidden, weight, labels, 1.0)[1].sum(), [hidden])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_correctness_is_whether_the_label_is_likeliest():
    hidden, weight, labels = material()
    best = (hidden @ weight.T).argmax(1)
    labels[::2] = best[::2]
    assert token_logprobs(hidden, Head(weight), labels).correct.tolist() == (labels == best).tolist()


def test_low_precision_is_computed_in_float32(fused: Fused | None):
    hidden, weight, labels = material(dtype=torch.bfloat16)
    hidden.requires_grad_()
    outputs = token_logprobs(hidden, Head(weight), labels, 0.5, fused=fused)
    assert outputs.logprobs.dtype == outputs.entropy.dtype == torch.float32
    exact = torch.log_softmax((hidden @ weight.T).float() / 0.5, dim=1)
    torch.testing.assert_close(outputs.logprobs, exact.gather(1, labels[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    outputs.logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_no_tokens_still_reach_every_input(fused: Fused | None):
    hidden, weight, labels = material(k=0)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    grads = torch.autograd.grad(token_logprobs(hidden, Head(weight), labels, fused=fused).logprobs.sum(), inputs)
    assert grads[0].shape == (0, 16)
    assert not grads[1].any()


@pytest.mark.parametrize("chunk_elements", [LEAST_LOGITS, 101 * 10, 1])
def test_kl_over_the_vocabulary_equals_the_plain_one(chunk_elements: int):
    hidden, weight, _ = material()
    states, matrix = ((hidden.flip(0) * 0.5)[:, :7].contiguous(), weight[:, :7].contiguous())  # of another width
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    found = token_kl(hidden, Head(weight), Beside(states.detach(), Head(matrix.detach())), 0.7, chunk_elements)
    log_p = torch.log_softmax(hidden @ weight.T / 0.7, dim=1)
    expected = (log_p.exp() * (log_p - torch.log_softmax(states @ matrix.T / 0.7, dim=1))).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    scale = torch.linspace(-1, 2, len(found), dtype=found.dtype, device=found.device)
    pairs = zip(*(torch.autograd.grad((scale * kl).sum(), inputs) for kl in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


FORMS = [
    pytest.param(bias, scale, softcap, id=f"{'bias' * bias or 'plain'}-{scale:g}-{softcap}")
    for bias in (False, True)
    for scale in (1.0, 0.25)
    for softcap in (None, 1.5)
]


def naive_log_p(hidden, head: Head, temperature: float):
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    capped = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    return torch.log_softmax(capped / temperature, dim=1)


def head_of(bias: bool, scale: float, softcap: float | None):
    hidden, weight, labels = material(k=7, d=3, v=11)
    hidden, weight = hidden * 2, weight * 3  # far into the cap
    shift = torch.linspace(-1, 2, 11, dtype=weight.dtype, device=DEVICE) if bias else None
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, shift) if tensor is not None]
    return leaves, Head(weight, shift, scale, softcap), labels


@pytest.mark.parametrize("chunk_elements", [LEAST_LOGITS, 11 * 3])
@pytest.mark.parametrize(("bias", "scale", "softcap"), FORMS)
def test_shifted_scaled_and_capped_logits(bias, scale, softcap, chunk_elements: int):
    leaves, head, labels = head_of(bias, scale, softcap)
    log_p = naive_log_p(leaves[0], head, 0.7)
    other = Beside(leaves[0].detach().flip(0), Head(*(p.detach() if torch.is_tensor(p) else p for p in head)))
    log_q = naive_log_p(other.hidden, other.head, 0.7)
    expected = [
        log_p.gather(1, labels[:, None])[:, 0],
        -(log_p.exp() * log_p).sum(1),
        (log_p.exp() * (log_p - log_q)).sum(1),
    ]
    found = [
        *token_logprobs(leaves[0], head, labels, 0.7, chunk_elements)[:2],
        token_kl(leaves[0], head, other, 0.7, chunk_elements),
    ]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        weights = torch.linspace(-1, 2, 7, dtype=ours.dtype, device=DEVICE)
        pairs = [torch.autograd.grad((weights * one).sum(), leaves, retain_graph=True) for one in (ours, theirs)]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("bias", "scale", "softcap"), FORMS)
def test_gradients_are_those_of_finite_differences(bias, scale, softcap, fused: Fused | None):
    leaves, head, labels = head_of(bias, scale, softcap)
    other = Beside(leaves[0].detach().flip(0), Head(head.weight.detach() * 0.5, softcap=2.0))

    def outputs(hidden, weight, shift=None):
        given = Head(weight, shift, scale, softcap)
        found = token_logprobs(hidden, given, labels, 0.7, 11 * 3, fused=fused)
        return found.logprobs, found.entropy, token_kl(hidden, given, other, 0.7, 11 * 6)

    assert torch.autograd.gradcheck(outputs, leaves)


@pytest.mark.parametrize("with_kl", [False, True])
def test_logits_are_never_whole_in_memory(with_kl: bool):
    """Peak memory of forward and backward, measured: far below [tokens, vocab] in float32."""
    k, v = 2048, 16384
    hidden, weight, labels = material(k, 8, v, torch.float32)
    hidden.requires_grad_()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        loss = token_logprobs(hidden, Head(weight), labels, chunk_elements=v * 64).logprobs.sum()
        if with_kl:
            other = Beside(torch.zeros(k, 8, device=DEVICE), Head(torch.ones(v, 8, device=DEVICE), softcap=2.0))
            head = Head(weight, softcap=3.0)
            loss = loss + token_kl(hidden, head, other, 1.0, v * 64).sum()
        loss.backward()
    assert largest == v * 64
    assert hidden.grad is not None


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts products of matrices, passes over the logits [k, v], and operations that change a whole [v, d]."""

    def __init__(self, k: int, v: int, d: int) -> None:
        super().__init__()
        self.products = self.additions = 0
        self.passes = 0.0
        self._whole, self._matrix = k * v, (v, d)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            self.products += 1
        elif isinstance(out, torch.Tensor) and not func.is_view and name not in ("empty", "new_empty", "zero_"):
            sizes = [a.numel() for a in args if isinstance(a, torch.Tensor)]
            if name != "index_put_":
                self.passes += max([*sizes, out.numel()]) / self._whole
        if name in ("add_", "addmm_", "copy_") and tuple(args[0].shape) == self._matrix:
            self.additions += 1
        return out


@pytest.mark.parametrize(("trained", "products", "additions"), [("both", 8 + 3 * 8, 0), ("hidden", 8 + 7 + 8, 0)])
def test_products_and_additions_by_chunks(trained: str, products: int, additions: int):
    """Chunks are of ids where the matrix learns: each of its rows gets its gradient once. Else of tokens: the last
    chunk of forward is the first of backward."""
    k, d, v = 64, 8, 128
    hidden, weight, labels = material(k, d, v)
    hidden.requires_grad_()
    weight.requires_grad_(trained == "both")
    with Products(k, v, d) as counted:
        loss = token_logprobs(hidden, Head(weight), labels, chunk_elements=k * v // 8).logprobs.sum()
        loss.backward()
    assert (counted.products, counted.additions) == (products, additions)
    assert counted.passes < 14


@pytest.mark.parametrize(
    ("gib", "exponent"), [(0, 25), (8, 25), (16, 25), (24, 25), (40, 26), (80, 27), (141, 28), (288, 28)]
)
def test_chunks_follow_the_memory_of_a_gpu(gib: int, exponent: int):
    assert logits_at_once(gib * 2**30) == 2**exponent
    assert LEAST_LOGITS == chunk_of(torch.device("cpu")) <= 2**exponent <= MOST_LOGITS


@pytest.mark.slow
def test_rows_of_the_head_over_ranks_equal_the_whole_head():
    """Two and four ranks at once, with unequal numbers of rows: every function, its gradients and its edges."""
    for code, output in wait_ranks(start_ranks(4, ["tests.policy_worker.vocabulary_program"], **WITHOUT_GPU)):
        assert code == 0, output


def test_heads_that_are_spread_unlike_each_other_are_refused():
    hidden, weight, _ = material()
    one, other = (Head(weight[:60], vocabulary=VocabularyShard(None, first)) for first in (0, 41))
    with pytest.raises(ValueError, match="rows 41 to 100 of one vocabulary next to rows 0 to 59 of another"):
        token_kl(hidden, one, Beside(hidden, other))
