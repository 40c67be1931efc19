"""The window as the caches that a transformers model reads and writes while it computes.

Three ways to look at the same buffers, each for one forward:

    DecodeView    one new column of all rows, reading everything before it
    PromptView    prompts computed once each, copied to every row that begins with them
    ResponseView  the last columns of some rows, given what stands before them

Next to keys and values they write, where it is wanted, which experts were chosen: what is recorded of a position is
always what its keys and values were made with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache

from rollout_worker.engines.transformers.window import Layer, Window

IntArray = npt.NDArray[np.int64]
Pair = tuple[torch.Tensor, torch.Tensor]


class WindowView(Cache, ABC):
    """Columns that a forward computes, `width` of each of its rows."""

    def __init__(self, window: Window, width: int) -> None:
        super().__init__(layers=[])
        self.window, self.width = window, width

    @abstractmethod
    def _write(self, layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put what a forward made, [rows, groups, width, …], at its places."""

    def record(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Write the experts that the tokens of a forward were sent to, [rows · width, mixtures, k]."""
        ids, weights = (column.unflatten(0, (-1, self.width)).transpose(1, 2) for column in (ids, weights))
        self._write(self.window.choice(ids, weights), ids, weights)


class DecodeView(WindowView):
    """One decoding step: writes at the column, reads low … column. [n, G, 1, D] in, [n, G, K, D] out."""

    def __init__(self, window: Window) -> None:
        super().__init__(window, 1)
        self.low = window.low

    def _write(self, layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        n, column = self.window.n, self.window.column
        layer.keys[:n, :, column] = keys[:, :, 0]
        layer.values[:n, :, column] = values[:, :, 0]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> Pair:
        window = self.window
        layer = window.layer(layer_idx, key_states, value_states)
        self._write(layer, key_states, value_states)
        live = slice(self.low, window.column + 1)
        return layer.keys[: window.n, :, live], layer.values[: window.n, :, live]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.window.column - self.low


class PromptView(WindowView):
    """Prompts of a forward [M, L] (left-padded), copied into window rows.

    `prompt_of_row[j]` is the row of the forward that window row `rows[j]` begins with; its first `lengths[j]`
    columns are filled.
    """

    def __init__(
        self, window: Window, width: int, rows: IntArray, prompt_of_row: IntArray, lengths: IntArray
    ) -> None:
        super().__init__(window, width)
        within = np.concatenate([np.arange(length) for length in lengths])

        def index(array: IntArray) -> torch.Tensor:
            return torch.from_numpy(array).to(window.device)

        self.to_row = index(np.repeat(rows, lengths))
        self.to_column = index(np.repeat(window.start[rows], lengths) + within)
        self.from_row = index(np.repeat(prompt_of_row, lengths))
        self.from_column = index(np.repeat(width - lengths, lengths) + within)

    def _write(self, layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        layer.keys[self.to_row, :, self.to_column] = keys[self.from_row, :, self.from_column]
        layer.values[self.to_row, :, self.to_column] = values[self.from_row, :, self.from_column]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> Pair:
        self._write(self.window.layer(layer_idx, key_states, value_states), key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class ResponseView(WindowView):
    """Columns [first, column) of window rows `rows`, reading [low, first) too."""

    def __init__(self, window: Window, rows: IntArray, first: int, low: int) -> None:
        super().__init__(window, window.column - first)
        self.first, self.low = first, low
        self.rows = torch.from_numpy(rows).to(window.device)

    def _write(self, layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        written = slice(self.first, self.window.column)
        layer.keys[self.rows, :, written] = keys
        layer.values[self.rows, :, written] = values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> Pair:
        layer = self.window.layer(layer_idx, key_states, value_states)
        self._write(layer, key_states, value_states)
        read = slice(self.low, self.window.column)
        return layer.keys[self.rows, :, read], layer.values[self.rows, :, read]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.first - self.low
