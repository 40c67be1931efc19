"""What a device encodes is what the host encodes, bit for bit. On a GPU too, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weight_sync import codec, device
from weight_sync.codec import bits_of
from weight_sync.layout import BLOCK, tensor_bytes

DTYPES = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.float32, torch.complex64]
PLACES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def pair(dtype: torch.dtype, size: int, density: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bits, and the same with some changed."""
    generator = torch.Generator().manual_seed(size)
    top = 2 if dtype is torch.bool else 256
    old = torch.randint(0, top, (size, dtype.itemsize), dtype=torch.uint8, generator=generator)
    new = old.clone()
    new[torch.rand(size, generator=generator) < density, 0] ^= 1
    return old.reshape(-1).view(dtype), new.reshape(-1).view(dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 1000, BLOCK + 3])
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_the_same_as_on_the_host(
    pool: ThreadPoolExecutor, place: str, dtype: torch.dtype, size: int, density: float
) -> None:
    old, new = pair(dtype, size, density)
    size = dtype.itemsize
    want = codec.encode(bits_of(tensor_bytes("a", old), size), bits_of(tensor_bytes("a", new), size))
    assert want is not None
    there = new.to(place)
    assert device.encode(old, there) == want
    assert device.encode(old.to(place), there, pool=pool) == want
    assert (device.encode(old, there, most_bytes=want.n_bytes - 1) is None) == (want.changed > 0)


@pytest.mark.parametrize("place", PLACES)
def test_scalars_and_strides(place: str) -> None:
    old, new = pair(torch.bfloat16, 600, 0.1)
    expected = device.encode(old.reshape(20, 30).T.contiguous(), new.reshape(20, 30).T.contiguous())
    assert device.encode(old.reshape(20, 30).T, new.to(place).reshape(20, 30).T) == expected
    scalar = device.encode(torch.tensor(0.0), torch.tensor(-0.0, device=place))
    assert scalar is not None
    assert scalar.changed == 1
