"""The aligned window against plain lists: whatever is appended, removed and moved, each row keeps its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.engines.transformers.views import DecodeView
from rollout_worker.engines.transformers.window import Window
from tests.support.effort import examples

PROMPTS = st.lists(st.integers(1, 40), min_size=1, max_size=4)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), PROMPTS),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 30), min_size=1, max_size=4)),
        st.tuples(st.just("step"), st.integers(1, 30)),
    ),
    max_size=25,
)


class Reference:
    """Rows as lists of tokens; every token but the newest has keys: its own value, twice for the values."""

    def __init__(self) -> None:
        self.window = Window(torch.device("cpu"), torch.float32)
        self.rows: list[list[int]] = []
        self.next = 1

    def _tokens(self, n: int) -> list[int]:
        self.next += n
        return list(range(self.next - n, self.next))

    def append(self, lengths: list[int]) -> None:
        window, prompts = self.window, [self._tokens(n) for n in lengths]
        window.make_room(window.n + len(lengths), max(lengths))
        rows = window.append([np.array(prompt, np.int64) for prompt in prompts])
        for row, prompt in zip(range(rows.start, rows.stop), prompts, strict=True):
            known = torch.tensor(prompt[:-1], dtype=torch.float32)
            place = slice(window.column - len(known), window.column)
            layer = window.layer(0, torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
            layer.keys[row, :, place] = known[:, None]
            layer.values[row, :, place] = 2 * known[:, None]
        self.rows += prompts

    def remove(self, picks: list[int]) -> None:
        if not self.rows:
            return
        gone = {pick % len(self.rows) for pick in picks}
        for source, target in self.window.remove(sorted(gone)):
            self.rows[target] = self.rows[source]
        del self.rows[self.window.n :]

    def step(self) -> None:
        window = self.window
        window.make_room(window.n, 0)
        newest = window.tokens[: window.n, window.column].float()
        keys = newest[:, None, None, None].expand(-1, 2, 1, 3)
        seen = DecodeView(window).update(keys, 2 * keys, 0)
        self.check_view(*seen)
        tokens = self._tokens(window.n)
        window.tokens[: window.n, window.column + 1] = torch.tensor(tokens)
        window.column += 1
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)

    def check_view(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Row i's last columns hold its tokens; what stands before is finite and masked."""
        bias = self.window.bias[: self.window.n, self.window.low : self.window.column + 1]
        assert torch.isfinite(keys).all()
        assert torch.isfinite(values).all()
        for i, row in enumerate(self.rows):
            expected = torch.tensor(row, dtype=torch.float32)
            assert torch.equal(keys[i, 1, -len(row) :, 2], expected)
            assert torch.equal(values[i, 0, -len(row) :, 0], 2 * expected)
            assert not bias[i, -len(row) :].any()
            assert torch.isinf(bias[i, : bias.shape[1] - len(row)]).all()

    def check(self) -> None:
        window = self.window
        assert window.n == len(self.rows) == len(window.start)
        for i, row in enumerate(self.rows):
            assert window.tokens[i, int(window.start[i]) : window.column + 1].tolist() == row


@pytest.mark.scaled
@settings(max_examples=examples(25), deadline=None)
@given(EVENTS)
def test_rows_keep_their_own(events: list[tuple[str, list[int] | int]]) -> None:
    reference = Reference()
    for kind, value in events:
        if kind == "append":
            assert isinstance(value, list)
            reference.append(value)
        elif kind == "remove":
            assert isinstance(value, list)
            reference.remove(value)
        else:
            assert isinstance(value, int)
            for _ in range(value if reference.rows else 0):
                reference.step()
        reference.check()


def test_columns_are_used_again() -> None:
    """However long it runs, short rows need a small window."""
    reference = Reference()
    for _ in range(25):
        reference.append([5, 9])
        for _ in range(10):
            reference.step()
        reference.remove([0, 1])
    rows, columns = reference.window.shape
    assert rows == 2
    assert columns <= 100


def test_a_long_row_does_not_stay_in_memory() -> None:
    reference = Reference()
    reference.append([1000])
    reference.step()
    reference.remove([0])
    for _ in range(16):
        reference.append([4])
        for _ in range(80):
            reference.step()
        reference.remove([0])
    assert reference.window.shape[1] < 500
