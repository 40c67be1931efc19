"""Deltas reach the right elements of whatever a loader made of the weights: against doing the load again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollout_worker.engines.scatter import (
    PublishedTensor,
    UnmappedError,
    WeightMap,
    WeightSlot,
    merge,
    region_of,
    storage_of,
    whole,
)
from rollout_worker.engines.vllm.proof import LoadTrace, unread
from tests.support.devices import DEVICE
from tests.support.effort import examples
from weight_sync.delta.delta import TensorChange

View = Callable[[torch.Tensor], torch.Tensor]


@st.composite
def views(draw: st.DrawFn, shape: Sequence[int]) -> View:
    """Some steps of narrow, transpose, select, stride and reshape that a tensor of this shape allows."""
    probe = torch.empty(tuple(shape))
    steps: list[View] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "transpose", "select", "step", "flatten", "unsqueeze"]))
        step: View | None = None
        if probe.dim() and kind in ("narrow", "select", "step"):
            axis = draw(st.integers(0, probe.dim() - 1))
            start = draw(st.integers(0, probe.shape[axis] - 1))
            if kind == "narrow":
                length = draw(st.integers(1, probe.shape[axis] - start))
                step = lambda t, a=axis, s=start, n=length: t.narrow(a, s, n)  # noqa: E731
            elif kind == "select":
                step = lambda t, a=axis, s=start: t.select(a, s)  # noqa: E731
            else:
                step = lambda t, a=axis: t[(slice(None),) * a + (slice(None, None, 2),)]  # noqa: E731
        elif kind == "transpose" and probe.dim() >= 2:
            step = lambda t: t.transpose(0, -1)  # noqa: E731
        elif kind == "flatten" and probe.is_contiguous():
            step = lambda t: t.view(-1)  # noqa: E731
        elif kind == "unsqueeze" and probe.dim() < 4:
            step = lambda t: t.unsqueeze(0)  # noqa: E731
        if step is not None:
            steps.append(step)
            probe = step(probe)

    def view(tensor: torch.Tensor) -> torch.Tensor:
        for one in steps:
            tensor = one(tensor)
        return tensor

    return view


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[tuple[str, View, View]], list[int]]:
    """Published tensors, copies (tensor, part of it, part of a parameter), and sizes of the parameters.

    Each copy has a parameter of its own, larger than its part and cut in a way of its own; one parameter may be a
    fused one that several parts fill one after the other.
    """
    tensors = {}
    for i in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
        tensors[f"t{i}"] = torch.randn(shape)
    copies: list[tuple[str, View, View]] = []
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(tensors)))
        source = draw(views(tensors[name].shape))
        part = source(tensors[name])
        repeats = draw(st.integers(1, 3))
        shape = (repeats, *part.shape) if repeats > 1 else tuple(part.shape)
        order = draw(st.permutations(range(len(shape))))
        before, after, gap = (draw(st.integers(0, 3)) for _ in range(3))
        strides, step = [0] * len(shape), draw(st.integers(1, 2))
        for axis in order:
            strides[axis] = step
            step = step * shape[axis] + gap

        def place(
            storage: torch.Tensor, shape: tuple[int, ...] = shape, strides: list[int] = strides, before: int = before
        ) -> torch.Tensor:
            return storage.as_strided(shape, strides, storage.storage_offset() + before)

        copies.append((name, source, place))
        sizes.append(before + step + after)
    return tensors, copies, sizes


class Parameters(torch.nn.Module):
    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((size,), -1.0, dtype=dtype, device=DEVICE)) for size in sizes
        )


def load(model: Parameters, tensors: dict[str, torch.Tensor], copies: Sequence[tuple[str, View, View]]) -> WeightMap:
    trace = LoadTrace(model)
    with torch.no_grad(), trace:
        for name, tensor in trace.given(tensors.items()):
            for i, (other, source, place) in enumerate(copies):
                if other == name:
                    place(model.all[i].data).copy_(source(tensor))
    return trace.weight_map()


def bits(tensor: torch.Tensor) -> list[int]:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(kinds[tensor.itemsize]).tolist()


def changes_to(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> list[TensorChange]:
    found = []
    for name, tensor in new.items():
        positions = (tensor != old[name]).reshape(-1).nonzero().reshape(-1)
        found.append(TensorChange(name, tensor.dtype, tuple(tensor.shape), positions, tensor.reshape(-1)[positions]))
    return found


@pytest.mark.scaled
@settings(deadline=None, max_examples=examples(60))
@given(loads(), st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 1.0]), st.booleans(), st.booleans())
def test_a_patch_equals_loading_again(
    made: tuple[dict[str, torch.Tensor], list[tuple[str, View, View]], list[int]],
    seed: int,
    density: float,
    dense: bool,
    half: bool,
) -> None:
    """Any layout, sparse or dense changes, same or other type, prepared on the device or some of it on the host."""
    tensors, copies, sizes = made
    dtype = torch.bfloat16 if half else torch.float32
    model, again = Parameters(sizes, dtype), Parameters(sizes, dtype)
    found = load(model, tensors, copies)
    generator = torch.Generator().manual_seed(seed)
    new = {
        name: torch.where(torch.rand(t.shape, generator=generator) < density, t + 1.0, t)
        for name, t in tensors.items()
    }
    changes = changes_to(new, tensors)
    if dense:
        changes = [TensorChange(c.name, c.dtype, c.shape, None, new[c.name].reshape(-1)) for c in changes]
    patch = found.patch(changes, device_bytes=32.0 if seed % 2 else math.inf)
    untouched = [bits(parameter) for parameter in model.all]
    load(again, tensors, copies)
    assert [bits(parameter) for parameter in again.all] == untouched, "preparing changes nothing"
    assert patch.apply() == []
    load(again, new, copies)
    assert [bits(one) for one in model.all] == [bits(one) for one in again.all]


def test_a_parameter_that_does_not_take_what_is_written_is_named() -> None:
    """Two values for one element: one of them is not there afterwards."""
    targets = {name: torch.zeros(20_000, dtype=torch.bfloat16, device=DEVICE) for name in ("good", "bad")}
    published = {name: PublishedTensor(torch.bfloat16, (20_000,)) for name in targets}
    places = {name: [WeightSlot(name, t, whole(t.shape), whole(t.shape))] for name, t in targets.items()}
    changes = []
    for name, last in (("good", 19_999), ("bad", 19_998)):
        positions = torch.arange(20_000)
        positions[-1] = last
        values = torch.randn(20_000).bfloat16()
        values[-1] = values[-2] + 1.0  # another one, which two drawn ones may not be
        changes.append(TensorChange(name, torch.bfloat16, (20_000,), positions, values))
    patch = WeightMap(published, places).patch(changes)
    assert patch.apply() == ["bad does not hold the elements that were written"]
    assert bits(targets["good"]) == bits(changes[0].values)


@pytest.mark.scaled
@settings(deadline=None, max_examples=examples(30))
@given(loads())
def test_published_tensors_are_put_together_again(
    made: tuple[dict[str, torch.Tensor], list[tuple[str, View, View]], list[int]],
) -> None:
    tensors, copies, sizes = made
    model = Parameters(sizes, torch.float32)
    found = load(model, tensors, copies)
    for name, tensor in tensors.items():
        out = torch.full((tensor.numel(),), 7.0)
        assert found.read(name, out)
        covered = torch.zeros(tensor.shape, dtype=torch.bool)
        for other, source, _ in copies:
            if other == name:
                source(covered).fill_(True)
        flat = covered.reshape(-1)
        assert torch.equal(out[flat], tensor.reshape(-1)[flat])
        assert (out[~flat] == 7.0).all()


def test_copies_of_one_element_that_disagree_are_seen() -> None:
    model = Parameters([4, 4], torch.float32)
    tensors = {"w": torch.randn(4)}
    copies = [("w", lambda t: t, lambda p: p)] * 2
    found = load(model, tensors, copies)
    assert found.read("w", torch.empty(4))
    model.all[1].data[2] += 1
    assert not found.read("w", torch.empty(4))


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 19), st.integers(0, 9)) | st.none(), min_size=1, max_size=5))
def test_deltas_are_merged_in_order(deltas: list[dict[int, int] | None]) -> None:
    """None: a dense change. The last writer of each element wins."""
    expected = torch.zeros(20, dtype=torch.int16)
    changes = []
    for i, delta in enumerate(deltas):
        positions = None if delta is None else torch.tensor(sorted(delta), dtype=torch.int64)
        values = torch.full((20,), 100 + i) if delta is None else torch.tensor([delta[k] for k in sorted(delta)])
        values = values.to(torch.int16)
        changes.append([TensorChange("w", torch.int16, (4, 5), positions, values)])
        expected[slice(None) if positions is None else positions] = values
    target = torch.zeros(20, dtype=torch.int16, device=DEVICE)
    place = WeightSlot("p", target, whole((4, 5)), whole((4, 5)))
    patch = WeightMap({"w": PublishedTensor(torch.int16, (4, 5))}, {"w": [place]}).patch(merge(changes))
    assert patch.apply() == []
    assert target.tolist() == expected.tolist()


def test_other_types_and_bits() -> None:
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.float64, torch.bfloat16, torch.complex64, torch.int8):
        target = torch.zeros(6).to(dtype).to(DEVICE)
        place = WeightSlot("p", storage_of(target), whole((6,)), region_of(target))
        values = torch.tensor([1.0, 0.0]).to(dtype)
        change = TensorChange("w", dtype, (6,), torch.tensor([1, 4]), values)
        patch = WeightMap({"w": PublishedTensor(dtype, (6,))}, {"w": [place]}).patch([change])
        assert patch.apply() == []
        assert target.tolist() == torch.tensor([0.0, 1.0, 0, 0, 0, 0]).to(dtype).tolist()
    nan = torch.tensor([0x7FC1, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    target = torch.zeros(2, dtype=torch.bfloat16, device=DEVICE)
    place = WeightSlot("p", target, whole((2,)), whole((2,)))
    change = TensorChange("w", torch.bfloat16, (2,), torch.tensor([0, 1]), nan)
    WeightMap({"w": PublishedTensor(torch.bfloat16, (2,))}, {"w": [place]}).patch([change]).apply()
    assert bits(target) == [0x7FC1, -0x8000]


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    target = torch.zeros(6, device=DEVICE)
    place = WeightSlot("p", target, whole((6,)), whole((6,)))
    known = WeightMap({"w": PublishedTensor(torch.float32, (6,))}, {"w": [place]})
    one = torch.ones(1)

    def refused(error: type[Exception], words: str, *change: object) -> None:
        good = TensorChange("w", torch.float32, (6,), torch.tensor([0]), one)
        with pytest.raises(error, match=words):
            known.patch([good, TensorChange(*change)])  # type: ignore[arg-type]
        assert not target.any()

    refused(UnmappedError, "not one of the tensors", "v", torch.float32, (6,), torch.tensor([0]), one)
    refused(UnmappedError, "loaded was", "w", torch.float32, (2, 3), torch.tensor([0]), one)
    refused(UnmappedError, "loaded was", "w", torch.bfloat16, (6,), torch.tensor([0]), one.bfloat16())
    refused(ValueError, "positions", "w", torch.float32, (6,), torch.tensor([6]), one)
    refused(ValueError, "positions", "w", torch.float32, (6,), torch.tensor([-1]), one)
    refused(ValueError, "values", "w", torch.float32, (6,), torch.tensor([0, 1]), one)
    refused(ValueError, "values", "w", torch.float32, (6,), None, one)


def test_overlapping_parts_have_no_map() -> None:
    place = WeightSlot("p", torch.zeros(6), (0, (3, 2), (1, 1)), whole((3, 2)))
    with pytest.raises(UnmappedError, match="overlapping"):
        WeightMap({"w": PublishedTensor(torch.float32, (4,))}, {"w": [place]})


def test_a_fused_padded_sharded_and_tied_model() -> None:
    """As engines load: rows fused, vocabulary padded, columns and rows sharded over two ranks, head tied."""
    torch.manual_seed(0)
    tensors = {
        "embed": torch.randn(7, 4), "q": torch.randn(4, 4), "k": torch.randn(2, 4), "o": torch.randn(4, 8)
    }  # fmt: skip
    new = {name: t + (torch.rand(t.shape) < 0.4) for name, t in tensors.items()}

    class Rank(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Parameter(torch.full((8, 4), -1.0, device=DEVICE))
            self.fused = torch.nn.Parameter(torch.full((3, 4), -1.0, device=DEVICE))
            self.o = torch.nn.Parameter(torch.full((4, 4), -1.0, device=DEVICE))
            self.head = self.embed

    def fill(model: Rank, rank: int, pairs: object) -> None:
        for name, tensor in pairs:  # type: ignore[attr-defined]
            if name == "embed":
                model.embed.data[:7].copy_(tensor)
                model.embed.data[7:].fill_(0)
            elif name == "q":
                model.fused.data.narrow(0, 0, 2).copy_(tensor.narrow(0, 2 * rank, 2))
            elif name == "k":
                model.fused.data.narrow(0, 2, 1).copy_(tensor.narrow(0, rank, 1))
            else:
                model.o.data.copy_(tensor.narrow(1, 4 * rank, 4))

    reports, ranks, maps = [], [], []
    for rank in range(2):
        model = Rank()
        trace = LoadTrace(model)
        with torch.no_grad(), trace:
            fill(model, rank, trace.given(tensors.items()))
        reports.append(trace.report())
        ranks.append(model)
        maps.append(trace.weight_map())
    assert [report.problems for report in reports] == [[], []]
    assert unread(reports) == []
    for rank, (model, known) in enumerate(zip(ranks, maps, strict=True)):
        patch = known.patch(changes_to(new, tensors))
        assert patch.apply() == []
        expected = Rank()
        with torch.no_grad():
            fill(expected, rank, new.items())
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, other)
    for name, tensor in new.items():
        out = torch.empty(tensor.numel())
        assert all(known.read(name, out) for known in maps)
        assert torch.equal(out, tensor.reshape(-1))


def test_a_parameter_that_has_moved_is_noticed() -> None:
    model = Parameters([4], torch.float32)
    found = load(model, {"w": torch.randn(4)}, [("w", lambda t: t, lambda p: p)])
    found.check(model)
    model.all[0].data = model.all[0].data.clone()
    with pytest.raises(UnmappedError, match=r"all\.0 has moved in memory"):
        found.check(model)


@pytest.mark.parametrize(
    ("other", "problems"), [(1.0, []), (2.0, ["p does not hold the elements that were written"])]
)
def test_tensors_that_share_an_element_must_agree(other: float, problems: list[str]) -> None:
    """Tied weights that were published apart: whoever is written last would be right, and the other one wrong."""
    target = torch.zeros(6, dtype=torch.bfloat16, device=DEVICE)
    places = {name: [WeightSlot("p", target, whole((6,)), whole((6,)))] for name in ("a", "b")}
    published = {name: PublishedTensor(torch.bfloat16, (6,)) for name in places}
    changes = [
        TensorChange(name, torch.bfloat16, (6,), torch.tensor([2]), torch.tensor([value]).bfloat16())
        for name, value in (("a", 1.0), ("b", other))
    ]
    assert WeightMap(published, places).patch(changes).apply() == problems
