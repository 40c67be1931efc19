"""Both sides of a version of the weights: a trainer whose weights change, and a model that is given them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rollout_worker.engines.scatter import PublishedTensor, WeightMap, WeightSlot, region_of, storage_of, whole
from schema.wire.weights import ChainLink, Publication, TensorEntry
from weight_sync.delta.delta import open_delta
from weight_sync.hf_names import hub_tensors
from weight_sync.publishing.writer import WrittenPart, assemble, finish
from weight_sync.stores import Stage, Store, version_name

Tensors = dict[str, torch.Tensor]
LR = 1e-6
WARM_UP = 16
"""Steps before the first round: AdamW's first steps are larger than those of its steady state."""
SHIFT = 1 << 20
"""Gradients are the same noise, shifted by another number of elements each time."""
CORES = os.cpu_count() or 1
SHAPES: dict[int, dict[str, Any]] = {
    1: {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2},
    100: {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 13, "head_dim": 64,
          "num_attention_heads": 12, "num_key_value_heads": 6},
    500: {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
          "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8},
}  # fmt: skip
"""By million parameters: those of Qwen3-0.6B with a smaller vocabulary, and a narrower one."""


def make_model(millions: int, dtype: torch.dtype, place: str) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = SHAPES[millions]
    with torch.device(place):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, tie_word_embeddings=True), dtype=dtype)
    return model.eval()


class Trainer:
    """Float32 masters; one optimizer for each parameter, so that one gradient is in memory at a time."""

    def __init__(self, millions: int, place: str) -> None:
        self.model = make_model(millions, torch.float32, place)
        self._steppers = [(p, torch.optim.AdamW([p], lr=LR, fused=True)) for p in self.model.parameters()]
        largest = max(p.numel() for p, _ in self._steppers)
        self._noise = torch.randn(largest + SHIFT, device=place)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        for parameter, optimizer in self._steppers:
            shift = int(torch.randint(SHIFT, ()))
            parameter.grad = self._noise[shift : shift + parameter.numel()].view_as(parameter)
            optimizer.step()
            parameter.grad = None

    def weights(self) -> Tensors:
        """What is published: a copy in bfloat16 under the names of the hub, on the host."""
        return {name: tensor.to("cpu") for name, tensor in hub_tensors(self.model, dtype=torch.bfloat16)}


class Replica:
    """A transformers model that is given new weights in place."""

    def __init__(self, millions: int, place: str) -> None:
        self.tensors: Tensors = dict(hub_tensors(make_model(millions, torch.bfloat16, place)))
        self._map = WeightMap(
            {name: PublishedTensor(t.dtype, tuple(t.shape)) for name, t in self.tensors.items()},
            {
                name: [WeightSlot(name, storage_of(t), whole(t.shape), region_of(t))]
                for name, t in self.tensors.items()
            },
        )

    def prepare(self, pieces: list[tuple[Path, Any]]) -> Any:
        [(root, piece)] = pieces
        return self._map.patch(open_delta(root, piece).changes())

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, target in self.tensors.items():
            target.copy_(tensors[name])
        synchronise(target)

    def check(self, tensors: Tensors) -> None:
        for name, target in self.tensors.items():
            assert torch.equal(target.cpu().view(torch.int16), tensors[name].view(torch.int16)), name


def synchronise(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


class Versions:
    """Versions one after the other, each the base of the next."""

    def __init__(self) -> None:
        self._number = 0
        self._table: dict[str, TensorEntry] = {}
        self._links: list[ChainLink] = []

    def publish(self, store: Store, write: Callable[[Stage], WrittenPart]) -> tuple[Publication, WrittenPart, float]:
        """Write, describe and commit one; what was written, and the seconds that it took."""
        began, target = time.perf_counter(), version_name(0, self._number, "")
        with store.stage(target) as stage:
            part = write(stage)
            manifest = assemble(
                [part], version=self._number, timeline=0, base=self._table or None, chain=self._links[-2:]
            )
            made = finish(stage, target, manifest)
            seconds = time.perf_counter() - began
        self._table |= manifest.tensors
        self._links.append(ChainLink(version=self._number, content_hash=made.content_hash, **{made.kind: made.piece}))
        self._number += 1
        publication = Publication(
            id=self._number, version=manifest.version, timeline=0, uri=made.uri, manifest_hash=made.manifest_hash,
            content_hash=made.content_hash, n_bytes=made.n_bytes, kind=made.kind,
        )  # fmt: skip
        return publication, part, seconds
