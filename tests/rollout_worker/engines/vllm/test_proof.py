"""The proof of an update accepts right loaders and finds wrong ones, whatever layout they make. Only torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
import torch

from rollout_worker.engines.vllm.proof import LoadTrace, ProofReport, report_from_dict, unread
from tests.support.devices import DEVICE

Pairs = Iterable[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """A fused projection, a padded embedding, a norm; the output layer is tied to the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.full((8, 4), -1.0, dtype=dtype, device=DEVICE))
        self.fused = torch.nn.Parameter(torch.full((6, 4), -1.0, dtype=dtype, device=DEVICE))
        self.norm = torch.nn.Parameter(torch.full((4,), -1.0, dtype=dtype, device=DEVICE))
        self.head = self.embed


def published() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(7, 4), "q": torch.randn(4, 4), "k": torch.randn(2, 4), "norm": torch.randn(4)
    }  # fmt: skip


def right(model: Model, pairs: Pairs) -> None:
    for name, tensor in pairs:
        if name == "embed":
            model.embed[:7].data.copy_(tensor)
            model.embed[7:].data.fill_(0)
        elif name == "q":
            model.fused.data.narrow(0, 0, 4).copy_(tensor)
        elif name == "k":
            model.fused.data.narrow(0, 4, 2).copy_(tensor)
        else:
            model.norm.data.copy_(tensor)


def prove(
    load: Callable[[Model, Pairs], None], model: Model | None = None, tensors: dict[str, torch.Tensor] | None = None
) -> ProofReport:
    model = model or Model()
    trace = LoadTrace(model)
    with trace, torch.no_grad():
        load(model, trace.given((tensors or published()).items()))
    return trace.report()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_right_loader(dtype: torch.dtype) -> None:
    model = Model(dtype)
    report = prove(right, model)
    assert report.problems == []
    assert unread([report]) == []
    assert model.fused[4:].tolist() == published()["k"].to(dtype).tolist()


def test_bits_are_compared_and_not_values() -> None:
    tensors = published() | {"norm": torch.tensor([float("nan"), -0.0, 0.0, float("inf")])}
    assert prove(right, tensors=tensors).problems == []

    def signs(model: Model, pairs: Pairs) -> None:
        right(model, pairs)
        model.norm.data[1] = 0.0

    assert prove(signs, tensors=tensors).problems == ["norm differs from the published norm"]


def changed(change: Callable[[Model], None]) -> Callable[[Model, Pairs], None]:
    def load(model: Model, pairs: Pairs) -> None:
        right(model, pairs)
        change(model)

    return load


def test_a_part_that_was_not_written() -> None:
    def partial(model: Model, pairs: Pairs) -> None:
        right(model, [(name, tensor) for name, tensor in pairs if name != "k"])

    report = prove(partial)
    assert report.problems == ["8 of 24 elements of fused were not part of the published weights"]
    assert unread([report]) == ["k"]


def test_a_tensor_that_was_ignored() -> None:
    def ignore(model: Model, pairs: Pairs) -> None:
        right(model, [(n, t) for n, t in pairs if n != "extra"])

    report = prove(ignore, tensors={**published(), "extra": torch.ones(3)})
    assert report.problems == []
    assert unread([report]) == ["extra"]


def test_a_parameter_that_was_overwritten_afterwards() -> None:
    report = prove(changed(lambda model: model.fused.data[5].mul_(2.0)))
    assert report.problems == ["fused differs from the published k"]


def test_an_update_in_the_wrong_place() -> None:
    def swapped(model: Model, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name == "q":
                model.fused.data[:4].copy_(tensor.flip(0))
            elif name != "embed":
                right(model, [(name, tensor)])
            else:
                model.embed.data[:7].copy_(tensor)
                model.embed.data[7:].zero_()

    assert prove(swapped).problems == ["fused was loaded from something other than the published tensors"]


def test_a_parameter_that_was_replaced() -> None:
    """A loader that puts a new tensor in place of the old one: graphs and ties would keep the old."""

    def replace(model: Model, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name == "norm":
                model.norm.data = tensor.clone()
            else:
                right(model, [(name, tensor)])

    assert prove(replace).problems == ["4 of 4 elements of norm were not part of the published weights"]


def test_padding_that_was_left_over() -> None:
    def unpadded(model: Model, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name == "embed":
                model.embed.data[:7].copy_(tensor)
            else:
                right(model, [(name, tensor)])

    assert prove(unpadded).problems == ["4 of 32 elements of embed were not part of the published weights"]


def test_columns_over_ranks() -> None:
    """Row-parallel layers: each rank copies a block of columns, together they have read everything."""
    tensors = {"w": torch.randn(6, 8)}
    reports = []
    for rank in range(2):
        model = torch.nn.Linear(4, 6, bias=False, device=DEVICE)
        trace = LoadTrace(model)
        with trace, torch.no_grad():
            for _, tensor in trace.given(tensors.items()):
                model.weight.data.copy_(tensor.narrow(1, 4 * rank, 4))
        reports.append(trace.report())
    assert [report.problems for report in reports] == [[], []]
    assert unread(reports) == []
    assert unread(reports[:1]) == ["w"]
    assert unread([reports[0], reports[0]]) == ["w"]


def test_columns_of_one_parameter() -> None:
    """Parts that are not contiguous: all of them written, or one column forgotten."""
    tensors = {"a": torch.randn(6, 3), "b": torch.randn(6, 5)}

    def prove_columns(last: int) -> list[str]:
        model = torch.nn.Linear(8, 6, bias=False, device=DEVICE)
        trace = LoadTrace(model)
        with trace, torch.no_grad():
            for name, tensor in trace.given(tensors.items()):
                place = model.weight.data[:, :3] if name == "a" else model.weight.data[:, 3:last]
                place.copy_(tensor[:, : place.shape[1]])
        return trace.report().problems

    assert prove_columns(8) == []
    assert prove_columns(7) == ["6 of 48 elements of weight were not part of the published weights"]


@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("length", [1, 3, 4, 8, 11])
def test_any_alignment(start: int, length: int) -> None:
    """Sources that begin anywhere in a file, and are compared in words of eight bytes where that is possible."""
    stored = torch.arange(32, dtype=torch.bfloat16)[3:]
    for flipped in (False, True):
        model = torch.nn.Linear(length, 1, bias=False, dtype=torch.bfloat16, device=DEVICE)
        trace = LoadTrace(model)
        with trace, torch.no_grad():
            for _, tensor in trace.given([("w", stored)]):
                model.weight.data.copy_(tensor[start : start + length])
        model.weight.data[0, -1] += 64.0 * flipped
        assert bool(trace.report().problems) == flipped


def test_scalars_and_empty_tensors() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(1, device=DEVICE))
            self.none = torch.nn.Parameter(torch.zeros(0, 4, device=DEVICE))

    model = Odd()
    trace = LoadTrace(model)
    tensors = {"scale": torch.tensor(2.0), "none": torch.empty(0, 4)}
    with trace, torch.no_grad():
        for name, tensor in trace.given(tensors.items()):
            if name == "scale":
                model.scale.data.copy_(tensor)
    report = trace.report()
    assert report.problems == []
    assert unread([report]) == []


def test_a_report_travels_as_json() -> None:
    report = prove(right)
    assert report_from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("left over", "8 of 16 elements of made.weight were not part of the published weights"),
        ("overwritten", "made.weight differs from the published w"),
        ("ignored", "16 of 16 elements"),
    ],
)
def test_what_a_parameter_is_made_of_is_proven_before_it_is_made(fault: str, words: str) -> None:
    """A loader fills memory of its own; what is made of it replaces the parameter."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    published = torch.randn(4, 4)
    trace = LoadTrace(model, settled=["weight"])
    with trace, torch.no_grad():
        for _, tensor in trace.given([("w", published)]):
            staged = torch.full((4, 4), 7.0)
            if fault != "ignored":
                staged[2:].copy_(tensor[2:])
            if fault not in ("ignored", "left over"):
                staged[:2].copy_(tensor[:2])
            if fault == "overwritten":
                staged[0, 0] += 1
            trace.settle({"made.weight": staged})
            model.weight.data.copy_(staged.sum(1)[:2])
            staged.zero_()
    report = trace.report()
    assert [words in problem for problem in report.problems] == [True] * bool(fault)
    assert unread([report]) == ([] if fault in ("", "overwritten") else ["w"])
