"""The content hash of weights as an engine keeps them: of what was published, wherever that can be told."""

from __future__ import annotations

import itertools

import pytest
import torch

from rollout_worker.engines.checksum import Tally, loses_bits
from rollout_worker.engines.scatter import PublishedTensor
from schema.wire.weights import TensorEntry
from weight_sync.layout import content_hash, dtype_name, tensor_bytes, tensor_digest


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    return content_hash(
        {
            name: TensorEntry(
                dtype=dtype_name(t.dtype, name),
                shape=list(t.shape),
                file="x",
                hash=tensor_digest(tensor_bytes(name, t), t.itemsize).hex(),
            )
            for name, t in tensors.items()
        }
    )


def tally_of(
    tensors: dict[str, torch.Tensor], kept: dict[str, torch.Tensor], copy: dict[str, torch.Tensor] | None = None
) -> Tally:
    tally = Tally(copy)
    for name, tensor in tensors.items():
        tally.add(name, PublishedTensor(tensor.dtype, tuple(tensor.shape)), kept[name])
    return tally


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(3, 5), "b": torch.randn(()), "c": torch.empty(0, 4)}


KEPT = [
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.float8_e4m3fn, torch.bfloat16), (torch.float32, torch.float64), (torch.int64, torch.int64),
]  # fmt: skip


@pytest.mark.parametrize(("published", "kept"), KEPT)
def test_what_is_kept_without_loss_tells_the_published_hash(
    tensors: dict[str, torch.Tensor], published: torch.dtype, kept: torch.dtype
) -> None:
    wanted = {name: tensor.to(published) for name, tensor in tensors.items()}
    tally = tally_of(wanted, {name: tensor.to(kept).reshape(-1) for name, tensor in wanted.items()})
    assert (tally.content_hash, tally.exact, tally.problems) == (hash_of(wanted), True, [])


@pytest.mark.parametrize(("published", "kept"), KEPT)
def test_one_wrong_bit_is_seen(tensors: dict[str, torch.Tensor], published: torch.dtype, kept: torch.dtype) -> None:
    wanted = {name: tensor.to(published) for name, tensor in tensors.items()}
    held = {name: tensor.to(kept, copy=True) for name, tensor in wanted.items()}
    held["a"].view(torch.uint8).view(-1)[0] ^= 1
    tally = tally_of(wanted, held)
    assert tally.content_hash != hash_of(wanted)
    assert bool(tally.problems) == (published is not kept)


def test_bits_of_nan_and_zero_survive() -> None:
    wanted = {"a": torch.tensor([0x7FC1, -0x8000, -1, 0x7F80], dtype=torch.int16).view(torch.bfloat16)}
    for kept in (torch.bfloat16, torch.float32):
        tally = tally_of(wanted, {"a": wanted["a"].to(kept)})
        assert (tally.content_hash, tally.exact) == (hash_of(wanted), True)


def test_what_has_lost_bits_is_compared_with_the_copy(tensors: dict[str, torch.Tensor]) -> None:
    held = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    without = tally_of(tensors, held)
    assert (without.content_hash, without.exact, without.problems) == (None, False, [])
    tally = tally_of(tensors, held, tensors)
    assert (tally.content_hash, tally.exact, tally.problems) == (hash_of(tensors), False, [])
    held["a"][0, 0] += 1
    tally = tally_of(tensors, held, tensors)
    assert (tally.content_hash, tally.problems) == (None, ["a differs from the host's copy"])


def test_which_types_lose_bits() -> None:
    kinds = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for published, kept in itertools.product(kinds, kinds):
        every = torch.arange(2**16 if published.itemsize == 2 else 2**8, dtype=torch.int64)
        if published.itemsize > 2:
            continue
        bits = torch.uint8 if published.itemsize == 1 else torch.uint16
        values = every.to(bits).view(published)
        back = values.to(kept).to(published).double()
        same = bool((back == values.double())[~values.double().isnan()].all())
        assert loses_bits(published, kept) != same, (published, kept)
    assert loses_bits(torch.float32, torch.bfloat16)
    assert not loses_bits(torch.float32, torch.float64)
    assert loses_bits(torch.int32, torch.float64)
