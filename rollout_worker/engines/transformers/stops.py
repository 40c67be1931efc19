"""When a sample ends: end-of-text and stop tokens, stop strings, and the minimal length before any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout_worker.engines.base import SamplingSettings

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
        ids = set(settings.stop_token_ids) | (set() if settings.ignore_eos else eos_token_ids)
        self._ends = np.zeros(vocabulary, np.bool_)
        self._ends[[token for token in ids if 0 <= token < vocabulary]] = True
        self._ends_on_device = torch.from_numpy(self._ends).to(device)
        longest = max((len(string) for string in self.strings), default=0)
        self._reach = TOKENS_PER_CHARACTER * (longest + 1)

    def ends(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these newest tokens end their samples, [N]."""
        found: npt.NDArray[np.bool_] = self._ends[tokens]
        return found

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
