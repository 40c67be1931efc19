"""Seeded drawing: uniform numbers from a hash, and the inversion of a distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout_worker.engines.base import SamplingSettings
from rollout_worker.engines.transformers.sampler import TokenHistory, draw, kept_ids, restrict, uniforms
from tests.support.devices import DEVICE

PLAIN = SamplingSettings(max_tokens=1)


def numbers(seeds: range, counters: range) -> np.ndarray:
    grid = np.array([(seed, counter) for seed in seeds for counter in counters])
    return uniforms(grid[:, 0].astype(np.uint64), grid[:, 1].astype(np.int64))


def test_uniform_numbers_never_change() -> None:
    """A resumed or repeated run draws the same: these values are part of what a seed means."""
    found = uniforms(np.array([0, 1, 2**31 - 1], np.uint64), np.array([0, 5, 4095]))
    np.testing.assert_array_equal(found, GOLDEN)


GOLDEN = np.array([0.6524484863740322, 0.5123072383951763, 0.6910140510980645])


def test_uniform_numbers_are_uniform_and_independent() -> None:
    found = numbers(range(200), range(200)).reshape(200, 200)
    assert len(np.unique(found)) == found.size
    counts = np.histogram(found, bins=50, range=(0, 1))[0]
    expected = found.size / 50
    assert (((counts - expected) ** 2) / expected).sum() < 49 + 5 * 98**0.5
    centred = found - 0.5
    bound = 5 / 12 / 39_800**0.5
    for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        assert abs((a * b).mean()) < bound


@given(
    hnp.arrays(np.float32, (4, 9), elements=st.floats(-20, 20, width=32)),
    hnp.arrays(np.float64, 4, elements=st.floats(0, 1, exclude_max=True)),
    st.floats(0.05, 1.0),
    st.integers(0, 9),
    st.floats(0.0, 0.9),
)
def test_an_excluded_token_is_never_drawn(
    logits: np.ndarray, uniform: np.ndarray, top_p: float, top_k: int, min_p: float
) -> None:
    settings = SamplingSettings(max_tokens=1, top_p=top_p, top_k=top_k, min_p=min_p)
    given = torch.from_numpy(logits).to(DEVICE)
    tokens, logprobs, sets = draw(given, replace(settings, correction="exact"), uniform, None, None)
    kept = torch.isfinite(restrict(given, settings))
    assert kept.any(1).all()
    assert kept.gather(1, tokens[:, None]).all()
    assert torch.isfinite(logprobs).all()
    assert (logprobs <= 0).all()
    assert (sets is not None) == settings.filters
    assert sets is None or torch.equal(sets, kept)


def test_raw_log_probs_know_no_filter_and_no_penalty() -> None:
    settings = SamplingSettings(
        max_tokens=1, temperature=0.7, top_k=2, repetition_penalty=2.0, min_tokens=3, correction="raw"
    )
    logits = torch.tensor([[0.6, 2.0, 1.5, 1.0]], device=DEVICE)
    seen = torch.tensor([[True, False, True]], device=DEVICE)
    history = TokenHistory(torch.tensor([[1, 1, 3]], device=DEVICE), seen, seen)
    forbidden = torch.tensor([[False, False, True, False]], device=DEVICE)
    tokens, logprobs, sets = draw(logits, settings, np.array([0.0]), history, forbidden)
    assert tokens.tolist() == [0], "1 and 3 are halved, 2 is forbidden"
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / 0.7, 1)[:, 0])
    assert sets is None


def test_a_set_of_all_is_not_listed() -> None:
    kept = torch.tensor([[True, False, True], [True, True, True], [False, True, False]])
    assert [ids.tolist() for ids in kept_ids(kept)] == [[0, 2], [], [1]]


def test_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]], device=DEVICE).repeat(2, 1)
    tokens, logprobs, _ = draw(logits, PLAIN, np.array([0.0, 1.0 - 2**-53]), None, None)
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(logprobs.cpu(), torch.full((2,), 0.5).log())


def test_frequencies_follow_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], device=DEVICE)
    n = 20_000
    uniform = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
    tokens, *_ = draw(probabilities.log().repeat(n, 1), PLAIN, uniform, None, None)
    found = torch.bincount(tokens, minlength=5) / n
    torch.testing.assert_close(found, probabilities, atol=0.012, rtol=0)
