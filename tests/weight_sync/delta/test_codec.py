"""The sparse payload: what comes out is the new tensor, bit by bit, or a CodecError."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import combinations, examples
from weight_sync.delta import codec
from weight_sync.delta.codec import (
    QUEUED_BLOCKS,
    CodecError,
    Encoded,
    Pair,
    apply,
    bits_of,
    decode,
    encode,
    encode_each,
)
from weight_sync.layout import BLOCK, tensor_digest

Array = npt.NDArray[Any]
SIZES = [0, 1, 2, 7, 8, 9, 63, 1000, 65_537]
LARGE = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 12_345]
ITEMSIZES = [1, 2, 4, 8]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def random_bits(generator: np.random.Generator, size: int, itemsize: int) -> Array:
    return np.frombuffer(generator.bytes(size * itemsize), f"<u{itemsize}").copy()


def changed_at(generator: np.random.Generator, old: Array, density: float) -> Array:
    """A copy that differs in about this share of its elements; some only in their lowest or highest bit."""
    new = old.copy()
    where = np.flatnonzero(generator.random(len(old)) < density)
    new[where] = random_bits(generator, len(where), old.itemsize)
    new[where[::3]] = old[where[::3]] ^ old.dtype.type(1)
    new[where[1::3]] = old[where[1::3]] ^ old.dtype.type(1 << (8 * old.itemsize - 1))
    return new


def joined(encoded: Encoded | None) -> memoryview:
    assert encoded is not None
    assert encoded.n_bytes == sum(map(len, encoded.parts))
    return memoryview(b"".join(encoded.parts))


def check(old: Array, new: Array, pool: ThreadPoolExecutor) -> None:
    """Everything that a pair of tensors must satisfy."""
    want = tensor_digest(new.tobytes(), new.itemsize)
    encoded = encode(old, new)
    assert encoded is not None
    assert encoded == encode(old, new, pool=pool)
    assert encoded.changed == int((old != new).sum())
    assert encoded.digest == want
    if encoded.changed == 0:
        assert encoded.parts == []
        return
    payload = joined(encoded)

    target = old.copy()
    assert apply(payload, target) == want
    assert target.tobytes() == new.tobytes()
    assert apply(payload, target, pool) == want, "twice is once"
    other = old.copy()
    assert apply(payload, other, pool) == want
    assert other.tobytes() == new.tobytes()

    found = list(decode(payload, old.dtype, len(old)))
    positions = np.concatenate([p for p, _ in found])
    values = np.concatenate([v for _, v in found])
    assert positions.dtype == np.int64
    assert values.dtype == old.dtype
    assert positions.tolist() == np.flatnonzero(old != new).tolist()
    assert values.tolist() == new[positions].tolist()


@pytest.mark.scaled
@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from(SIZES),
    itemsize=st.sampled_from(ITEMSIZES),
    density=st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
)
def test_any_bits(pool: ThreadPoolExecutor, seed: int, size: int, itemsize: int, density: float) -> None:
    generator = np.random.default_rng(seed)
    old = random_bits(generator, size, itemsize)
    check(old, changed_at(generator, old, density), pool)


@pytest.mark.parametrize(("size", "itemsize", "density"), combinations(LARGE, ITEMSIZES, [1e-6, 0.01, 0.6]))
def test_several_blocks(pool: ThreadPoolExecutor, size: int, itemsize: int, density: float) -> None:
    generator = np.random.default_rng(size + itemsize)
    old = random_bits(generator, size, itemsize)
    check(old, changed_at(generator, old, density), pool)


@pytest.mark.scaled
@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_arbitrary_pairs(pool: ThreadPoolExecutor, data: st.DataObject) -> None:
    itemsize = data.draw(st.sampled_from(ITEMSIZES))
    old = np.array(data.draw(st.lists(st.integers(0, 256**itemsize - 1), max_size=40)), f"<u{itemsize}")
    new = old.copy()
    for place in data.draw(st.sets(st.sampled_from(range(len(old))))) if len(old) else ():
        new[place] = data.draw(st.integers(0, 256**itemsize - 1))
    check(old, new, pool)


@pytest.mark.parametrize("place", [0, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 4])
def test_a_single_element(pool: ThreadPoolExecutor, place: int) -> None:
    old = np.zeros(2 * BLOCK + 5, "<u2")
    new = old.copy()
    new[place] = 0x8000  # −0.0
    check(old, new, pool)
    assert joined(encode(old, new)).nbytes <= 40


def test_values_are_bits_and_not_numbers(pool: ThreadPoolExecutor) -> None:
    """+0.0 and −0.0 differ, a NaN equals itself, and each payload of a NaN is kept."""
    old = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0x3F80], "<u2")
    new = np.array([0x8000, 0x8000, 0x7FC1, 0x7FC1, 0xFFC5, 0x0000], "<u2")
    check(old, new, pool)
    assert [p.tolist() for p, _ in decode(joined(encode(old, new)), "<u2", 6)] == [[0, 2, 4, 5]]


def test_blocks_without_changes_cost_four_bytes() -> None:
    old = np.zeros(50 * BLOCK, "u1")
    new = old.copy()
    new[25 * BLOCK] = 1
    assert joined(encode(old, new)).nbytes == 50 * 4 + 2 * 4 + 1


def test_one_percent_of_bf16_costs_little() -> None:
    generator = np.random.default_rng(0)
    weights = (generator.standard_normal(BLOCK) * 0.02).astype("<f4")
    old = (weights.view("<u4") >> 16).astype("<u2")
    new = old.copy()
    where = generator.random(BLOCK) < 0.01
    new[where] ^= 1
    assert joined(encode(old, new)).nbytes < 0.013 * old.nbytes


def test_unaligned_and_read_only_bytes(pool: ThreadPoolExecutor) -> None:
    generator = np.random.default_rng(3)
    raw = bytearray(generator.bytes(4 * 999 + 1))
    new = bits_of(memoryview(raw)[1:].toreadonly(), 4)
    assert not new.flags.aligned
    encoded = encode(np.zeros(999, "<u4"), new)
    target = bytearray(4 * 999 + 1)
    assert apply(joined(encoded), bits_of(memoryview(target)[1:], 4)) == tensor_digest(bytes(raw[1:]), 4)
    assert target[1:] == raw[1:]


def test_a_limit_is_kept(pool: ThreadPoolExecutor) -> None:
    generator = np.random.default_rng(1)
    old = random_bits(generator, 3 * BLOCK, 2)
    new = changed_at(generator, old, 0.02)
    size = joined(encode(old, new)).nbytes
    for threads in (None, pool):
        assert encode(old, new, most_bytes=size - 1, pool=threads) is None
        assert encode(old, new, most_bytes=size, pool=threads) is not None
        assert encode(old, new, most_bytes=0, pool=threads) is None
        same = encode(old, old, most_bytes=0, pool=threads)
        assert same is not None
        assert same.changed == 0


@cache
def example(itemsize: int = 2, size: int = BLOCK + 70) -> tuple[Array, Array, memoryview]:
    """Two blocks, the first with compressed planes, plain ones and one of zeros."""
    generator = np.random.default_rng(5)
    old = np.zeros(size, f"<u{itemsize}")
    new = old.copy()
    new[generator.integers(0, size, 500)] = generator.integers(1, 100, 500)
    new[-1] = 7
    return old, new, joined(encode(old, new))


def used(payload: memoryview, target: Array) -> tuple[list[Any], bytes] | None:
    """What reading it gives by both ways; None when both refuse it."""
    try:
        found = [(p.tolist(), v.tolist()) for p, v in decode(payload, target.dtype, len(target))]
    except CodecError:
        with pytest.raises(CodecError):
            apply(payload, target)
        return None
    for positions, values in found:
        assert positions == sorted(set(positions))
        assert len(positions) == len(values)
        assert positions[0] >= 0
        assert positions[-1] < len(target)
    return found, apply(payload, target)


@pytest.mark.scaled
@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_damage_is_an_error_or_other_values(data: st.DataObject) -> None:
    """Never another exception, a position outside of the tensor, or a payload read beyond its end."""
    old, _, payload = example(data.draw(st.sampled_from([1, 2, 8])))
    spoiled = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, 40), st.integers(0, len(spoiled) - 1)))
        spoiled[place] = data.draw(st.integers(0, 255))
    used(memoryview(spoiled), old.copy())


@pytest.mark.scaled
@settings(max_examples=examples(40), deadline=None)
@given(st.binary(max_size=200), st.sampled_from([0, 1, 100, BLOCK, BLOCK + 1]), st.sampled_from(ITEMSIZES))
def test_noise_is_survived(noise: bytes, size: int, itemsize: int) -> None:
    used(memoryview(noise), np.zeros(size, f"<u{itemsize}"))


def test_every_truncation_and_extension_is_an_error() -> None:
    old, _, payload = example()
    for cut in {0, 1, 3, *range(4, len(payload), 7), len(payload) - 1}:
        assert used(payload[:cut], old.copy()) is None
    assert used(memoryview(bytes(payload) + b"\0"), old.copy()) is None
    assert used(memoryview(bytes(payload) + b"\0\0\0\0"), old.copy()) is None


def test_a_payload_for_another_size_is_an_error() -> None:
    old, _, payload = example()
    for size in (0, 1, len(old) - 1, BLOCK, 2 * BLOCK + 1):
        assert used(payload, np.zeros(size, old.dtype)) is None


def block(count: int, width: int, *planes: bytes, lengths: list[int] | None = None) -> memoryview:
    sizes = [len(plane) for plane in planes] if lengths is None else lengths
    return memoryview(struct.pack(f"<I{len(sizes)}I", count | width << 24, *sizes) + b"".join(planes))


def frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


BAD = {
    "more changes than elements": block(101, 1, b"", bytes(101)),
    "changes of no width": block(3, 0, b"abc"),
    "width without changes": block(0, 1),
    "a width that no block needs": block(3, 4, b"", b"", b"", b"", b"abc"),
    "a plane longer than its changes": block(3, 1, b"\0\0\0\0", b"abc"),
    "a plane that is no frame": block(3, 1, b"", b"ab"),
    "a plane beyond the end": block(3, 1, b"", b"ab", lengths=[0, 3]),
    "positions beyond the end": block(3, 1, b"\x20\x20\x40", b"abc"),
    "positions far beyond the end": block(3, 3, b"", b"", b"\xff\xff\xff", b"abc"),
    "a frame of too much": block(100, 1, b"", frame(bytes(1 << 21))),
    "a frame of too little": block(100, 1, b"", frame(bytes(99))),
    "a frame that hides its size": block(100, 1, b"", frame(bytes(100), write_content_size=False)),
    "a frame and more": block(100, 1, b"", frame(bytes(100)) + b"\0"),
    "two frames": block(100, 1, b"", frame(bytes(100)) + frame(bytes(100))),
    "a torn frame": block(100, 1, b"", frame(bytes(100))[:-1]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be(case: str) -> None:
    """Frames here are shorter than the hundred bytes of their plane, so it is not their length that is refused."""
    assert used(BAD[case], np.zeros(100, "u1")) is None


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_last_position_is_in_reach_and_a_wider_skip_than_needed_is_read(width: int) -> None:
    target = np.zeros(100, "u1")
    assert used(block(3, width, b"\x20\x20\x21", *[b""] * (width - 1), b"abc"), target) is not None
    assert np.flatnonzero(target).tolist() == [32, 65, 99]


def test_no_changes_at_all_are_read() -> None:
    """As a manifest with `changed: 0` announces."""
    target = np.arange(100, dtype="u1")
    assert used(memoryview(bytes(4)), target) == ([], tensor_digest(target.data, 1))
    assert target.tolist() == list(range(100))


def test_a_size_that_nothing_holds_is_refused_before_it_is_believed() -> None:
    with pytest.raises(CodecError, match="too few"):
        next(decode(memoryview(bytes(400)), "<u2", 1 << 60))


def test_threads_keep_their_own_tools() -> None:
    """Many at once, more than there are cores, on one tensor and on several."""
    generator = np.random.default_rng(9)
    pairs = []
    for _ in range(4):
        old = random_bits(generator, BLOCK + 9, 2)
        pairs.append((old, changed_at(generator, old, 0.05)))

    def round_trip(pair: tuple[Array, Array]) -> bool:
        target = pair[0].copy()
        apply(joined(codec.encode(*pair)), target)
        return target.tobytes() == pair[1].tobytes()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(round_trip, pairs * 4))


# ---- one tensor after the other ---------------------------------------------------------------------------------


@pytest.mark.scaled
@settings(max_examples=examples(5), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.sampled_from([1, 100, BLOCK + 1, 34 * BLOCK]), max_size=6),
    densities=st.lists(st.sampled_from([0.0, 0.01, 0.9]), min_size=6, max_size=6),
)
def test_threads_that_are_ahead_change_nothing(
    pool: ThreadPoolExecutor, seed: int, sizes: list[int], densities: list[float]
) -> None:
    """Order and contents, whichever tensors are given up; and whatever is drawn early is little."""
    generator = np.random.default_rng(seed)
    pairs = []
    for size, density in zip(sizes, densities, strict=False):
        old = np.zeros(size, "u1")
        new = old.copy()
        new[: int(size * density)] = generator.integers(1, 256, int(size * density), "u1")
        pairs.append(Pair(old, new, size // 2))
    want = [encode(pair.old, pair.new, most_bytes=pair.most_bytes) for pair in pairs]
    assert list(encode_each(pairs)) == want
    assert list(encode_each(pairs, pool)) == want


def test_few_tensors_are_drawn_ahead(pool: ThreadPoolExecutor) -> None:
    drawn: list[int] = []

    def source() -> Iterator[Pair]:
        for i in range(10 * QUEUED_BLOCKS):
            drawn.append(i)
            yield Pair(np.zeros(8, "<u2"), np.full(8, i + 1, "<u2"))

    for i, encoded in enumerate(encode_each(source(), pool)):
        assert encoded == encode(np.zeros(8, "<u2"), np.full(8, i + 1, "<u2"))
        assert len(drawn) <= i + 1 + QUEUED_BLOCKS


def test_what_goes_wrong_ahead_comes_out_and_nothing_is_read_afterwards() -> None:
    def broken() -> Iterator[Pair]:
        yield Pair(np.zeros(8, "<u2"), np.ones(8, "<u2"))
        raise OSError("no such tensor")

    with Remembering(2) as pool:
        with pytest.raises(OSError, match="no such tensor"):
            list(encode_each(broken(), pool))
        zeros, ones = np.zeros(4 * BLOCK, "u1"), np.ones(4 * BLOCK, "u1")
        pairs = [Pair(zeros, ones) for _ in range(50)]
        results = encode_each(pairs, pool)
        assert next(results) is not None
        results.close()
        assert len(pool.futures) >= QUEUED_BLOCKS
        assert all(future.done() for future in pool.futures)


class Remembering(ThreadPoolExecutor):
    """Knows all work that it was given."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.futures: list[Future[Any]] = []

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.futures.append(super().submit(*args, **kwargs))
        return self.futures[-1]
