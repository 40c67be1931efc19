"""The key-value cache: rows of different lengths, right-aligned at one column.

            lo                     column
             ↓                        ↓
    row 0    │ p p p p p r r r r r r [x]      p  prompt     r  response tokens with keys and values
    row 1    │ · · · p p p p p p r r [x]      x  newest token: known, its keys and values not computed yet
    row 2    │ · · · · · · · · p p p [x]      ·  masked (−inf in `bias`)

All rows write their next keys and values at the same column, so a decoding step is one contiguous write and one
read-only view per layer, whatever the lengths. A finished row is overwritten by the last one; a new row starts
so far to the left that its prompt ends at the column. When the columns are used up, the live block moves back
to the left (its cost is shared by at least half as many steps as the block is wide).

Invariant: rows 0 … n−1 are live; row i's tokens occupy [start[i], column], `bias[i]` is 0 from start[i] on and
−inf before; every number in the buffers is finite, so that a masked column contributes exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

SLACK = 32
"""Fewest free columns after a move: small windows would otherwise move every few steps."""


@dataclass(slots=True)
class Layer:
    """Keys and values of one layer: [rows, groups, columns, width].

    Or, of all mixtures of experts, ids and weights of those that were chosen: [rows, mixtures, columns, k].
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class Window:
    """Buffers of all live rows; see the module's docstring for the picture."""

    device: torch.device
    dtype: torch.dtype
    n: int = 0
    column: int = 0
    start: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    layers: list[Layer] = field(default_factory=list)
    choices: list[Layer] = field(default_factory=list)
    """One entry at most, of models whose choice of experts is recorded; see `views.WindowView`."""
    tokens: torch.Tensor = field(init=False)
    logprobs: torch.Tensor = field(init=False)
    bias: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._new_buffers(0, 0)

    @property
    def low(self) -> int:
        """The leftmost column in use."""
        return int(self.start.min()) if self.n else self.column

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the buffers."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def _new_buffers(self, rows: int, columns: int) -> None:
        self.tokens = torch.zeros(rows, columns, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(rows, columns, dtype=torch.float32, device=self.device)
        self.bias = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

    def make_room(self, rows: int, before: int) -> None:
        """See to it that `rows` rows fit, with `before` columns left of the column and one free right of it."""
        have_rows, have_columns = self.shape
        if rows <= have_rows and before <= self.column and self.column + 1 < have_columns:
            return
        width = max(before, self.column - self.low)
        wanted = width + 2 + max(SLACK, width // 2)
        fits = rows <= have_rows and wanted <= have_columns <= 4 * wanted
        self._move(width, *(self.shape if fits else (rows, wanted)))

    def _move(self, column: int, rows: int, columns: int) -> None:
        """Put the live block so that it ends at `column`, into buffers of the given size."""
        low, n, shift = self.low, self.n, column - self.column
        source, target = slice(low, self.column + 1), slice(low + shift, column + 1)
        new = (rows, columns) != self.shape
        old = self.tokens, self.logprobs
        if new:
            self._new_buffers(rows, columns)
        if n:
            self.tokens[:n, target] = old[0][:n, source].clone()
            self.logprobs[:n, target] = old[1][:n, source].clone()
        for layer in (*self.layers, *self.choices):
            layer.keys = self._moved(layer.keys, source, target, new)
            layer.values = self._moved(layer.values, source, target, new)
        self.column = column
        self.start = self.start + shift
        self._write_bias(0, n)

    def _moved(self, buffer: torch.Tensor, source: slice, target: slice, new: bool) -> torch.Tensor:
        rows, columns = self.shape
        moved = buffer.new_zeros(rows, buffer.shape[1], columns, buffer.shape[3]) if new else buffer
        if self.n:
            moved[: self.n, :, target] = buffer[: self.n, :, source].clone()
        return moved

    def _write_bias(self, first: int, last: int) -> None:
        if last > first:
            columns = torch.arange(self.shape[1], device=self.device)
            starts = torch.from_numpy(self.start[first:last]).to(self.device)
            masked = columns < starts[:, None]
            self.bias[first:last] = torch.zeros((), dtype=self.dtype, device=self.device).masked_fill(
                masked, -torch.inf
            )

    def append(self, prompts: list[npt.NDArray[np.int64]]) -> slice:
        """Add one row per prompt, their last token at the column. The caller has made room."""
        first, last = self.n, self.n + len(prompts)
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        width = int(lengths.max())
        padded = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = prompt
        begin = self.column + 1 - width
        self.tokens[first:last, begin : self.column + 1] = torch.from_numpy(padded).to(self.device)
        self.start = np.concatenate([self.start, self.column + 1 - lengths])
        self.n = last
        self._write_bias(first, last)
        return slice(first, last)

    def release(self) -> None:
        """Drop keys and values; what is at the columns has to be computed again."""
        self.layers, self.choices = [], []

    def remove(self, rows: list[int]) -> list[tuple[int, int]]:
        """Take rows out; the last rows fill the holes. Returns the moves (from, to) for tables kept in parallel."""
        gone = set(rows)
        kept = self.n - len(gone)
        holes = sorted(row for row in gone if row < kept)
        movers = [row for row in range(kept, self.n) if row not in gone]
        if holes:
            to, low = torch.tensor(holes, device=self.device), self.low
            source = torch.tensor(movers, device=self.device)
            live = slice(low, self.column + 1)
            self.bias[to] = self.bias[source]
            for buffer in (self.tokens, self.logprobs):
                buffer[to, live] = buffer[source, live]
            for layer in (*self.layers, *self.choices):
                layer.keys[to, :, live] = layer.keys[source, :, live]
                layer.values[to, :, live] = layer.values[source, :, live]
            self.start[holes] = self.start[movers]
        self.start = self.start[:kept]
        self.n = kept
        return list(zip(movers, holes, strict=True))

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        """The buffers of a layer, made at its first use from the shapes that the model produces."""
        return self._made(self.layers, index, keys, values)

    def choice(self, ids: torch.Tensor, weights: torch.Tensor) -> Layer:
        """The buffers of the chosen experts, made likewise."""
        return self._made(self.choices, 0, ids, weights)

    def _made(self, layers: list[Layer], index: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        while len(layers) <= index:
            rows, columns = self.shape
            layers.append(
                Layer(
                    keys.new_zeros(rows, keys.shape[1], columns, keys.shape[3]),
                    values.new_zeros(rows, values.shape[1], columns, values.shape[3]),
                )
            )
        return layers[index]
