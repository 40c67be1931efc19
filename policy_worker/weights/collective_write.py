"""One version written by all ranks: every rank learns of a failure of one, and what to do about it is agreed on.

    rank 0 opens the stage ─▶ all write their files ─▶ rank 0 writes the manifest and commits

Invariant: after each arrow all ranks go on or all raise errors of one kind, so none waits for another in vain; and a
version is visible only when every rank has written its part. What leaves here by an error has left nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from policy_worker.errors import PolicyError
from policy_worker.parallel.rank_group import RankGroup
from schema.wire.weights import WeightManifest
from weight_sync.publishing.writer import DenseError, PublishedVersion, WrittenPart, finish
from weight_sync.stores import Stage, Store


class StoreTroubleError(PolicyError):
    """The store failed on some rank; it may work when it is tried again."""


@dataclass(frozen=True)
class Stored:
    """A version in the store, for rank 0. seconds: of the slowest rank, by stage."""

    published: PublishedVersion
    manifest: WeightManifest
    seconds: dict[str, float]


def store_version(
    group: RankGroup,
    store: Store,
    target: str,
    write: Callable[[Stage], WrittenPart],
    make: Callable[[Sequence[WrittenPart]], WeightManifest],
) -> Stored | None:
    """Write one version. A collective of the background's group.

    target: the version's name, the same on all ranks. write: this rank's tensors. make: the manifest, on rank 0.

    Returns:
        What was stored on rank 0, None on the others.

    Raises, on all ranks alike:
        StoreTroubleError: a file system refused on one of them. DenseError: `write` or `make` raised it.
        WeightError, PolicyError, …: something else went wrong; the ranks where nothing did get a `PolicyError`."""
    began = time.monotonic()
    with ExitStack() as stack:
        stages: list[Stage] = []

        def enter() -> None:
            stages.append(stack.enter_context(store.stage(target, leads=group.leads)))

        def write_part() -> Any:
            if not group.leads:
                enter()
            return write(stages[0]).model_dump(mode="json")

        _together(group, enter if group.leads else None)
        written = _together(group, write_part)
        parts = [WrittenPart.model_validate(part) for part in written]
        stored: list[Stored] = []

        def commit() -> None:
            manifest = make(parts)
            published = finish(stages[0], target, manifest)
            encode = max(part.seconds.get("encode", 0.0) for part in parts)
            seconds = {"encode": encode, "write": max(0.0, time.monotonic() - began - encode)}
            stored.append(Stored(published, manifest, seconds))

        _together(group, commit if group.leads else None)
    return stored[0] if stored else None


_FINE, _DENSE, _TROUBLE, _FATAL = range(4)


def _together(group: RankGroup, work: Callable[[], Any] | None) -> list[Any]:
    """Do this rank's work, if it has any; the JSON results of all ranks. Raises as `store_version`."""
    value: Any = None
    error: Exception | None = None
    try:
        value = None if work is None else work()
    except Exception as raised:
        error = raised
    outcomes = group.gather([_kind(error), "" if error is None else f"{type(error).__name__}: {error}", value])
    rank = max(range(len(outcomes)), key=lambda rank: outcomes[rank][0])
    worst, text, _ = outcomes[rank]
    if worst == _FINE:
        return [value for _, _, value in outcomes]
    if worst == _DENSE:
        raise DenseError(text)
    if worst == _TROUBLE:
        raise StoreTroubleError(f"on rank {rank}, {text}") from error
    if _kind(error) == _FATAL and error is not None:
        raise error
    raise PolicyError(f"rank {rank} could not publish: {text}")


def _kind(error: Exception | None) -> int:
    if error is None:
        return _FINE
    if isinstance(error, DenseError):
        return _DENSE
    return _TROUBLE if isinstance(error, OSError) else _FATAL
