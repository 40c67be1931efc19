"""The two host copies of what a process publishes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.weight_sync.helpers import bits, small
from weight_sync.publishing.pinned_copy import Shadow


def copy_of(tensors: dict[str, torch.Tensor] | None) -> dict[str, bytes]:
    assert tensors is not None
    return {name: bits(tensor) for name, tensor in tensors.items()}


def test_a_snapshot_does_not_follow_the_model() -> None:
    model, shadow = small(), Shadow(keeps=True)
    before = copy_of(model)
    shadow.take(model.items())
    for tensor in model.values():
        tensor.add_(1)
    assert copy_of(shadow.taken) == before


def test_announced_moves_only_when_it_is_said() -> None:
    shadow, versions = Shadow(keeps=True), [small(seed) for seed in range(4)]
    assert shadow.announced is None
    shadow.take(versions[0].items())
    shadow.announce()
    shadow.take(versions[1].items())  # this one is never announced
    assert copy_of(shadow.announced) == copy_of(versions[0])
    shadow.take(versions[2].items())
    pairs = {name: (bits(old), bits(new)) for name, old, new in shadow.pairs()}
    assert pairs == {name: (bits(versions[0][name]), bits(versions[2][name])) for name in versions[0]}
    shadow.announce()
    assert copy_of(shadow.announced) == copy_of(versions[2])


def test_a_snapshot_that_breaks_off_leaves_what_was_announced() -> None:
    shadow, model = Shadow(keeps=True), small(1)
    shadow.take(small(0).items())
    shadow.announce()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", model["embed.weight"]
        raise RuntimeError("a rank is gone")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            shadow.take(broken())
        assert copy_of(shadow.announced) == copy_of(small(0))


def test_memory_is_taken_once() -> None:
    shadow = Shadow(keeps=True)
    places: set[int] = set()
    for seed in range(6):
        shadow.take(small(seed).items())
        places.add(shadow.taken["embed.weight"].data_ptr())
        shadow.announce()
    assert len(places) == 2


def test_without_deltas_nothing_is_kept() -> None:
    shadow = Shadow(keeps=False)
    for seed in range(2):
        shadow.take(small(seed).items())
        shadow.announce()
        assert shadow.announced is None
