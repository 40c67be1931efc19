"""Changes that are found on a device: the same version as one that is compared on the host, from fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.preflight.serving_memory import KEPT_SHARE
from tests.support.devices import DEVICE
from tests.support.effort import examples
from tests.weight_sync.helpers import all_bits
from weight_sync import DirectoryStore
from weight_sync.layout import BLOCK
from weight_sync.publishing import device_copy
from weight_sync.publishing.device_copy import DeviceCopy
from weight_sync.publishing.pinned_copy import PinnedCopy
from weight_sync.publishing.writer import write_delta

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8, torch.int64,
    torch.bool, torch.complex64,
]  # fmt: skip
DENSITIES = [0.0, 0.002, 0.1, 0.16, 0.6]


def on_device(room: int = 2**40) -> PinnedCopy:
    """Compare on the device of the tensors, whichever it is and however small they are; without room on the host."""
    return PinnedCopy(keeps=True, on_device=DeviceCopy(lambda _: room, smallest=0))


def raw(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bits: NaN payloads, -0.0, denormals."""
    count = torch.Size(shape).numel() * dtype.itemsize
    most = 2 if dtype == torch.bool else 256
    found = torch.randint(most, (count,), dtype=torch.uint8, generator=generator)
    return found.view(dtype).view(shape).to(DEVICE)


def changed(tensor: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    """About this share of the elements gets other bits."""
    new, other = tensor.clone(), raw(tensor.shape, tensor.dtype, generator)
    rows, others = (t.view(-1).view(torch.uint8).view(t.numel(), t.dtype.itemsize) for t in (new, other))
    where = (torch.rand(len(rows), generator=generator) < density).to(DEVICE)
    rows[where] = others[where]
    return new


def files(folder: Path, copy: PinnedCopy, pool: ThreadPoolExecutor | None = None) -> tuple[Any, dict[str, bytes]]:
    """Write a delta; its tensors and its files."""
    copy.complete(pool)
    with DirectoryStore(folder).stage("version") as stage:
        part = write_delta(stage, copy.pairs(), positions=copy.positions, pool=pool)
        stage.commit()
    found = {path.name: path.read_bytes() for path in (folder / "version").iterdir()}
    DirectoryStore(folder).delete("version")
    return part.tensors, found


@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=5),
    st.lists(st.sampled_from(DENSITIES), min_size=1, max_size=4),
    st.integers(0, 2**20),
    st.integers(0, 2**31),
)
def test_versions_are_those_of_the_host(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[torch.dtype, list[int]]],
    steps: list[float],
    room: int,
    seed: int,
) -> None:
    folder, generator = tmp_path_factory.mktemp("versions"), torch.Generator().manual_seed(seed)
    here, there = on_device(0), on_device(room)
    model = {str(i): raw(shape, dtype, generator) for i, (dtype, shape) in enumerate(kinds)}
    for number, density in enumerate([0.0, *steps]):
        model = {name: changed(tensor, density, generator) for name, tensor in model.items()}
        for copy in (here, there):
            copy.take(model.items())
        if number:
            assert files(folder, there) == files(folder, here)
        assert all_bits(there.taken) == all_bits(model)
        if number % 3 < 2:  # else it is never announced
            here.announce()
            there.announce()


def test_a_tensor_of_several_blocks_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "CHUNK", BLOCK // 3)
    generator, copies = torch.Generator().manual_seed(0), (on_device(0), on_device())
    tensor = raw([2 * BLOCK + 12_345], torch.bfloat16, generator)
    for density in (0.0, 0.01, 0.01):
        tensor = changed(tensor, density, generator)
        for copy in copies:
            copy.take([("weight", tensor)])
        if copies[0].announced is not None:
            with ThreadPoolExecutor(2) as pool:
                here, there = (files(tmp_path, copy, pool) for copy in copies)
            assert here == there
        for copy in copies:
            copy.announce()


class Crossing(TorchDispatchMode):
    """Counts the bytes that are copied into the memory of a snapshot."""

    def __init__(self, copy: PinnedCopy) -> None:
        super().__init__()
        self._copy, self.n_bytes = copy, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            held = {tensor.untyped_storage().data_ptr() for tensor in self._copy.taken.values()}
            if args[0].untyped_storage().data_ptr() in held:
                self.n_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def crossed(copy: PinnedCopy, model: dict[str, torch.Tensor], *, announced: bool = True) -> int:
    """Take a version; the bytes of it that were copied, which are those that are reported."""
    with Crossing(copy) as crossing:
        copy.take(model.items())
    assert crossing.n_bytes == copy.copied_bytes
    copy.complete()
    assert all_bits(copy.taken) == all_bits(model)
    if announced:
        copy.announce()
    return copy.copied_bytes


def versions(copy: PinnedCopy) -> list[int]:
    """Bytes that cross by version, of 1000 and 60 bfloat16 numbers."""
    generator = torch.Generator().manual_seed(0)
    model = {"large": raw([10, 100], torch.bfloat16, generator), "small": raw([60], torch.bfloat16, generator)}
    found = [crossed(copy, model)]
    for count in (0, 3, 166, 167):
        model["large"].view(-1).view(torch.int16)[100 : 100 + count] ^= 1
        found.append(crossed(copy, model))
    return [*found, crossed(copy, model, announced=False), crossed(copy, model), crossed(copy, model)]


def test_bytes_that_cross() -> None:
    whole, small = 2120, 120  # what is below 128 bytes always crosses whole
    after_a_lost_one = [small, whole, small]
    few = [small, small + 3 * 6, small + 166 * 6]
    assert versions(on_device()) == [whole, *few, whole, *after_a_lost_one]
    assert versions(on_device(room=1999)) == [whole] * 8, "no room for the large one"
    assert versions(PinnedCopy(keeps=True)) == [whole] * 8, "too small to be compared on a device"


def test_what_is_kept_stays_within_its_room() -> None:
    copy = DeviceCopy(lambda _: 1000, smallest=0)
    for name, size in (("a", 600), ("b", 600), ("c", 400), ("a", 600), ("d", 128)):
        copy.exchange(name, torch.zeros(size, dtype=torch.int8, device=DEVICE), compares=False)
    assert copy.n_bytes == 1000
    copy.exchange("a", torch.zeros(300, dtype=torch.int16, device=DEVICE), compares=True)
    assert copy.n_bytes == 1000
    copy.exchange("a", torch.zeros(700, dtype=torch.int8, device=DEVICE), compares=True)
    assert copy.n_bytes == 400, "a tensor that has grown loses its room"
    assert KEPT_SHARE == device_copy.SHARE


def test_a_snapshot_that_breaks_off_is_followed_by_a_whole_one() -> None:
    copy, generator = on_device(), torch.Generator().manual_seed(0)
    model = {name: raw([200], torch.float32, generator) for name in "ab"}
    for _ in range(2):
        crossed(copy, model)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", changed(model["a"], 0.1, generator)
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError):
        copy.take(broken())
    assert all_bits(copy.announced or {}) == all_bits(model)
    assert crossed(copy, model) == 1600
    assert crossed(copy, model) == 0
