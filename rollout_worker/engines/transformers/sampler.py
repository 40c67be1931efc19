"""From logits to tokens: penalties, temperature, min-p, top-k, top-p, then inversion of the distribution. And when
a sample ends: end-of-text and stop tokens, stop strings, and the minimal length before any of them (`StopRules`).

The randomness is counter-based: the uniform number that draws a token is a hash of (seed of the sample, number
of the token). No generator state exists, so a token depends on its sample's seed and logits alone, never on
who else is in the batch, and thousands of samples cost a few numpy operations per step.

Everything here is a pure function over tensors of one `SamplingSettings`: shapes are N samples, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout_worker.engines.base import SamplingSettings

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
"""Constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def uniforms(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), [N], one for each (seed, counter); 53 random bits each."""
    z = _mix((seeds + np.uint64(1)) * _GAMMA)
    z = _mix(z + (counters.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """Penalties look at this. Token ids, padded at the left; masks are 1 where a token counts."""

    tokens: torch.Tensor
    """int64 [N, L], prompt and response"""
    any_mask: torch.Tensor
    """bool [N, L], prompt and response tokens"""
    response_mask: torch.Tensor
    """bool [N, L], response tokens"""


def needs_history(settings: SamplingSettings) -> bool:
    return settings.repetition_penalty != 1.0 or settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0


def penalise(logits: torch.Tensor, settings: SamplingSettings, history: TokenHistory) -> torch.Tensor:
    """Logits with repetition, frequency and presence penalties, [N, V].

    Repetition divides positive and multiplies negative logits of tokens in prompt or response (Keskar et al.,
    CTRL, 2019); the others subtract from response tokens, once or per occurrence (OpenAI's definition).
    """
    zeros = torch.zeros_like(logits)
    if settings.repetition_penalty != 1.0:
        seen = zeros.scatter_add(1, history.tokens, history.any_mask.to(logits.dtype)) > 0
        factor = settings.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    if settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0:
        counts = zeros.scatter_add(1, history.tokens, history.response_mask.to(logits.dtype))
        logits = logits - settings.frequency_penalty * counts - settings.presence_penalty * (counts > 0)
    return logits


def restrict(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Logits, already divided by the temperature, with −inf on tokens that min-p, top-k or top-p exclude."""
    excluded = -torch.inf
    if settings.min_p > 0.0:
        probabilities = torch.softmax(logits, -1)
        floor = settings.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < floor, excluded)
    if 0 < settings.top_k < logits.shape[-1]:
        smallest = torch.topk(logits, settings.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, excluded)
    if settings.top_p < 1.0:
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        probabilities = torch.softmax(ordered, -1)
        before = probabilities.cumsum(-1) - probabilities
        before[:, 0] = 0.0  # the likeliest token always stays
        kept = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before < settings.top_p)
        logits = logits.masked_fill(~kept, excluded)
    return logits


def draw(
    logits: torch.Tensor,
    settings: SamplingSettings,
    uniform: npt.NDArray[np.float64],
    history: TokenHistory | None,
    forbidden: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Next token ids (int64 [N]) and their log-probs (float32 [N]) from float32 logits [N, V].

    Third, where the settings want it, which ids filters have left (bool [N, V]). `history` is required when
    `needs_history(settings)`. `forbidden` (bool [N, V]) marks tokens that end a sample too early (min_tokens).
    """
    plain = logits
    if forbidden is not None:
        logits = logits.masked_fill(forbidden, -torch.inf)
    if history is not None:
        logits = penalise(logits, settings, history)
    if settings.greedy:
        logprobs = torch.log_softmax(plain if settings.correction == "raw" else logits, -1)
        return (tokens := logits.argmax(-1)), logprobs.gather(1, tokens[:, None])[:, 0], None
    if settings.temperature != 1.0:
        logits = logits / settings.temperature
    logprobs = torch.log_softmax(restrict(logits, settings), -1)
    tokens = _invert(logprobs, uniform)
    kept = logprobs > -torch.inf if settings.wants_kept_sets else None
    if settings.correction == "raw":
        logprobs = torch.log_softmax(plain / settings.temperature, -1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], kept


def kept_ids(kept: torch.Tensor) -> list[npt.NDArray[np.int32]]:
    """The ids in each row of bool [N, V]; none in a row that holds them all."""
    rows, ids = (index.cpu().numpy() for index in kept.nonzero(as_tuple=True))
    counts = np.bincount(rows, minlength=len(kept))
    sets = np.split(ids.astype(np.int32), np.cumsum(counts)[:-1])
    return [row_ids if len(row_ids) < kept.shape[1] else row_ids[:0] for row_ids in sets]


def _invert(logprobs: torch.Tensor, uniform: npt.NDArray[np.float64]) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform number; never one of probability 0.

    Cumulated in float64: over a large vocabulary float32 would shift the distribution by about 1e-3.
    """
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(uniform).to(logprobs.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs.shape[-1] - 1)


TOKENS_PER_CHARACTER = 4
"""A byte-level tokenizer needs at most one token per byte, UTF-8 at most four bytes per character."""


class StopRules:
    """The rules of one `SamplingSettings`, ready to be applied to many rows at once."""

    def __init__(
        self,
        settings: SamplingSettings,
        eos_token_ids: frozenset[int],
        vocabulary: int,
        tokenizer: Any,
        device: torch.device,
    ) -> None:
        self.settings, self.strings, self._tokenizer = settings, settings.stop, tokenizer
        ids = settings.ends(eos_token_ids)
        self.held_ids = settings.held_ids(eos_token_ids)
        self._ends = np.zeros(vocabulary, np.bool_)
        self._ends[[token for token in ids if 0 <= token < vocabulary]] = True
        self._ends_on_device = torch.from_numpy(self._ends).to(device)
        longest = max((len(string) for string in self.strings), default=0)
        self._reach = TOKENS_PER_CHARACTER * (longest + 1)

    def ends(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these newest tokens end their samples, [N]."""
        ends: npt.NDArray[np.bool_] = self._ends[tokens]
        return ends

    def forbidden(self, generated: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """bool [N, V]: tokens that would end a sample of `generated` tokens too early; None if there are none."""
        early = generated < self.settings.min_tokens
        if not early.any() or not self._ends.any():
            return None
        return torch.from_numpy(early).to(self._ends_on_device.device)[:, None] & self._ends_on_device

    def find(self, response: npt.NDArray[np.int32]) -> str | None:
        """The stop string that this response's newest token completes, if any.

        Only the tail that can hold the string is decoded. A string that ends before `min_tokens` is not looked
        for, and what stands in the text since then was looked at when it was new.
        """
        if len(response) <= self.settings.min_tokens:
            return None
        tail = response[-self._reach :].tolist()
        text = self._tokenizer.decode(tail, skip_special_tokens=True)
        before = self._tokenizer.decode(tail[:-1], skip_special_tokens=True)
        for string in self.strings:
            if text.count(string) > before.count(string):
                return string
        return None
