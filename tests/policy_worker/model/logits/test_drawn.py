"""Log-probs, entropy, KL and gradients of what tokens were drawn from, against naive float64 autograd; bad input."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from policy_worker.errors import BadBatchError, SettingsError
from policy_worker.model.logits.drawn import DrawnContext, KeptSets, Reshaping, drawn_of
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import Beside, token_kl, token_logprobs

V, D = 23, 6


def make_contexts(seed: int, reshaping: Reshaping) -> list[DrawnContext]:
    """Three segments; the second has two answers, the first token of the third's has no set."""
    rng = np.random.default_rng(seed)
    found = []
    for row, mask in enumerate(([0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1])):
        learned = np.flatnonzero(mask)
        # Few different ids, so that penalties meet repetitions; 0 is held back and never drawn.
        ids = rng.integers(1, 8, len(mask)).astype(np.int32)
        sets = [
            np.union1d(rng.choice(V, rng.integers(1, 9), replace=False), [ids[i]]).astype(np.int32) for i in learned
        ]
        if row == 2:
            sets[0] = np.zeros(0, np.int32)
        kept = KeptSets(np.array([len(one) for one in sets], np.int32), np.concatenate(sets))
        held = np.array([0, 19], np.int32) if reshaping.min_tokens else None
        found.append(DrawnContext(row, ids, learned, kept if reshaping.filters else None, held))
    return found


def naive(logits: Tensor, contexts: list[DrawnContext], how: Reshaping, temperature: float) -> Tensor:
    """[K, V]: token by token as the definitions read. Ids that could not be drawn have −∞."""
    rows, k = [], 0
    for context in contexts:
        sets = iter([])
        if context.kept is not None:
            sets = iter(np.split(context.kept.ids, np.cumsum(context.kept.counts)[:-1]))
        for at in context.learned:
            start = at
            while start - 1 in context.learned:
                start -= 1
            before, answer = context.token_ids[:at].tolist(), Counter(context.token_ids[start:at].tolist())
            allowed = set(range(V))
            if context.held is not None and at - start < how.min_tokens:
                allowed -= set(context.held.tolist())
            if len(kept := next(sets, [])):
                allowed &= set(kept.tolist())
            z = []
            for token in range(V):
                x = logits[k, token]
                if token in before:
                    x = x / how.repetition if x > 0 else x * how.repetition
                x = x - how.frequency * answer[token] - how.presence * (answer[token] > 0)
                z.append(x / temperature if token in allowed else x.new_tensor(-torch.inf))
            rows.append(torch.log_softmax(torch.stack(z), 0))
            k += 1
    return torch.stack(rows)


CASES = {
    "filters": Reshaping(filters=True),
    "repetition": Reshaping(repetition=1.4),
    "presence and frequency": Reshaping(presence=0.7, frequency=-0.3),
    "min_tokens": Reshaping(min_tokens=3),
    "all": Reshaping(0.8, 0.5, 0.4, 2, filters=True),
}


def sum_p(log_p: Tensor, values: Tensor) -> Tensor:
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * values).sum(1)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), chunk=st.sampled_from([1, 3 * V, 10**6]), capped=st.booleans())
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_naive_distribution(case: str, seed: int, chunk: int, capped: bool) -> None:
    how = CASES[case]
    contexts = make_contexts(seed, how)
    drawn = drawn_of(contexts, how, V)
    labels = torch.from_numpy(np.concatenate([c.token_ids[c.learned] for c in contexts]).astype(np.int64))
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, states = (
        torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (len(labels), V, len(labels))
    )
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    head = Head(weight, None, 1.3, 2.0) if capped else Head(weight)

    def logits(of: Tensor, matrix: Tensor) -> Tensor:
        return 2 * torch.tanh(1.3 * of @ matrix.T / 2) if capped else of @ matrix.T

    log_p = naive(logits(hidden, weight), contexts, how, 0.8)
    log_q = naive(logits(states, weight.detach()), contexts, how, 0.8)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    expected = [
        log_p.gather(1, labels[:, None])[:, 0],
        -sum_p(log_p, finite),
        sum_p(log_p, finite - log_q.masked_fill(log_q == -torch.inf, 0.0)),
    ]
    ours = token_logprobs(hidden, head, labels, 0.8, chunk, drawn)
    beside = Beside(states, head._replace(weight=weight.detach()))
    found = [ours.logprobs, ours.entropy, token_kl(hidden, head, beside, 0.8, chunk, drawn)]
    scale = torch.randn(3, len(labels), generator=generator, dtype=torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    for parts in ([0], [1], [0, 1], [2]):
        grads = [
            torch.autograd.grad(sum((scale[i] * side[i]).sum() for i in parts), inputs, retain_graph=True)
            for side in (found, expected)
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_nothing_changes_where_nothing_is_asked_for() -> None:
    assert drawn_of(make_contexts(0, CASES["filters"]), Reshaping(), V) is None


def test_a_sample_without_sets_is_refused() -> None:
    contexts = [replace(one, kept=None) for one in make_contexts(0, CASES["filters"])]
    with pytest.raises(SettingsError, match="sample 0 does not say which ids"):
        drawn_of(contexts, CASES["filters"], V)


def test_a_token_that_was_held_back_is_refused() -> None:
    contexts = make_contexts(0, CASES["min_tokens"])
    contexts[1].token_ids[2] = 19
    with pytest.raises(BadBatchError, match=r"sample 1 has the token 19 at place 1 .*min_tokens = 3"):
        drawn_of(contexts, CASES["min_tokens"], V)


def test_an_id_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(SettingsError, match="with the id 21, and the model has embeddings for 0 to 19"):
        drawn_of(make_contexts(0, CASES["filters"]), CASES["filters"], 20)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 5), min_size=8, max_size=8))
@pytest.mark.parametrize("case", CASES)
def test_some_of_the_tokens_are_drawn_as_among_all(case: str, seed: int, cuts: list[int]) -> None:
    how = CASES[case]
    contexts = make_contexts(seed, how)
    drawn = drawn_of(contexts, how, V)
    assert drawn is not None
    tokens, first, bounds = [], 0, iter(cuts)  # an uninterrupted part of each answer, maybe none
    for context in contexts:
        for run in np.split(context.learned, np.flatnonzero(np.diff(context.learned) > 1) + 1):
            begin, end = sorted((next(bounds) % (len(run) + 1), next(bounds) % (len(run) + 1)))
            tokens += range(first + begin, first + end)
            first += len(run)
    chosen = np.array(tokens, np.int64)
    logits = torch.randn(first, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole, part = logits.clone(), logits[chosen]
    drawn.apply(whole, 0, 0.8, with_slope=False)
    some = drawn.of_tokens(chosen)
    for start in range(0, len(chosen), 2):
        some.apply(part[start : start + 2], start, 0.8, with_slope=False)
    assert torch.equal(part, whole[chosen])
