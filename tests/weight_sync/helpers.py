"""A publication as the controller would hand it out, without a controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from schema.wire.weights import Publication
from weight_sync import DirectoryStore, PublishedVersion, publish


def publication_of(published: PublishedVersion, version: int = 0, timeline: int = 0) -> Publication:
    return Publication(
        id=version + 1, version=version, timeline=timeline, uri=published.uri, n_bytes=published.n_bytes,
        manifest_hash=published.manifest_hash, content_hash=published.content_hash, kind=published.kind,
    )  # fmt: skip


def put(
    store: DirectoryStore,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    version: int = 0,
    **options: Any,
) -> Publication:
    """Publish and wrap."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return publication_of(publish(store, version=version, timeline=0, tensors=pairs, **options), version)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order: equality that knows −0.0 and NaN payloads."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return b"" if flat.numel() == 0 else flat.view(torch.uint8).numpy().tobytes()


def all_bits(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """Name -> `bits`."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: bits(tensor) for name, tensor in pairs}


def small(seed: int = 0) -> dict[str, torch.Tensor]:
    """A few tensors of different kinds."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(50, 8, generator=generator).to(torch.bfloat16),
        "layer.0.weight": torch.randn(8, 8, generator=generator),
        "layer.0.scale": torch.tensor(0.5),
        "empty": torch.empty(0, 4),
    }
