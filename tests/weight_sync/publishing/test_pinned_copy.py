"""The two host copies of what a process publishes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.devices import DEVICE
from tests.weight_sync import helpers
from tests.weight_sync.helpers import all_bits, bits
from weight_sync.publishing.pinned_copy import PinnedCopy


def small(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors where a model has them."""
    return {name: tensor.to(DEVICE) for name, tensor in helpers.small(seed).items()}


def test_a_snapshot_does_not_follow_the_model() -> None:
    model, copy = small(), PinnedCopy(keeps=True)
    before = all_bits(model)
    copy.take(model.items())
    for tensor in model.values():
        tensor.add_(1)
    assert all_bits(copy.taken) == before


def test_announced_moves_only_when_it_is_said() -> None:
    copy, versions = PinnedCopy(keeps=True), [small(seed) for seed in range(4)]
    assert copy.announced is None
    copy.take(versions[0].items())
    copy.announce()
    copy.take(versions[1].items())  # this one is never announced
    assert all_bits(copy.announced) == all_bits(versions[0])
    copy.take(versions[2].items())
    pairs = {name: (bits(old), bits(new)) for name, old, new in copy.pairs()}
    assert pairs == {name: (bits(versions[0][name]), bits(versions[2][name])) for name in versions[0]}
    copy.announce()
    assert all_bits(copy.announced) == all_bits(versions[2])


def test_a_snapshot_that_breaks_off_leaves_what_was_announced() -> None:
    copy, model = PinnedCopy(keeps=True), small(1)
    copy.take(small(0).items())
    copy.announce()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", model["embed.weight"]
        raise RuntimeError("a rank is gone")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            copy.take(broken())
        assert all_bits(copy.announced) == all_bits(small(0))


def test_memory_is_taken_once() -> None:
    copy = PinnedCopy(keeps=True)
    places: set[int] = set()
    for seed in range(6):
        copy.take(small(seed).items())
        places.add(copy.taken["embed.weight"].data_ptr())
        copy.announce()
    assert len(places) == 2


def test_without_deltas_nothing_is_kept() -> None:
    copy = PinnedCopy(keeps=False)
    for seed in range(2):
        copy.take(small(seed).items())
        copy.announce()
        assert copy.announced is None
