"""A model's weights under the names and shapes of its hub checkpoint, one tensor at a time.

Left out: aliases of tied tensors (`lm_head.weight` of a model that ties it to its embedding) and what the
model class itself does not save. Turned back: weights that transformers fuses or renames in memory (experts,
say), layer by layer, so no more than one layer is in memory beside the model.

On several ranks every rank must run through the whole iterator, because gathering a shard is a collective:
the order is that of the module tree, the same everywhere.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

Gather = Callable[[str, torch.Tensor], torch.Tensor]
"""Makes the full tensor out of this rank's part, by name; a collective on sharded models."""

_LAYER = re.compile(r"^.*?\.\d+\.")


def gather_full(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The default `Gather`: DTensors become full tensors (a collective), others stay."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def hub_tensors(
    model: torch.nn.Module, gather: Gather = gather_full, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (hub name, full tensor) of a transformers model.

    Args:
        model: a transformers model; other modules give their own names. FSDP2 and TP models are welcome.
        gather: called once for each stored tensor, in the same order on every rank. dtype: floating-point
        tensors of 16 bits or more are cast to it (`weight_sync.transfer_dtype`); None: as
            they are.

    Yields:
        Detached tensors on the device of the model; whole ones on every rank.
    """
    yield from HubNames(model).tensors(gather, dtype=dtype)


class HubNames:
    """Which tensors a model is stored as, found out at once: the model is not asked again.

    So a copy of its weights can be named later, and by another thread, while the model itself trains on.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._stored = list(_stored(model))
        self._convert = _reverse_conversion(model)

    def tensors(
        self, gather: Gather = gather_full, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As `hub_tensors`. A `gather` that looks only at the name never touches the model's tensors."""
        for _, group in itertools.groupby(self._stored, key=lambda item: _layer_of(item[0])):
            if self._convert is None:
                for name, tensor in group:
                    yield name, _cast(gather(name, tensor), dtype)
            else:
                whole = {name: gather(name, tensor) for name, tensor in group}
                for name, tensor in self._convert(whole).items():
                    yield name, _cast(tensor, dtype)


def _stored(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the state dict without aliases, in module order."""
    tied = _tied_names(model)
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tied or id(tensor) in seen or any(p.search(name) for p in ignored):
            continue
        if not isinstance(tensor, torch.Tensor):  # extra state of a module: never part of a checkpoint
            continue
        seen.add(id(tensor))
        yield name, tensor.detach()


def _tied_names(model: torch.nn.Module) -> set[str]:
    """Names that only repeat another tensor, as declared and as long as they are really tied."""
    declared: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    named = dict(model.named_parameters(remove_duplicate=False))
    return {
        alias
        for alias, source in declared.items()
        if alias in named and source in named and named[alias] is named[source]
    }


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return "" if match is None else match.group()


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return tensor
    return tensor.to(dtype)


def _reverse_conversion(
    model: torch.nn.Module,
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """How transformers turns weights in memory back into the checkpoint's; None: they are equal."""
    if not hasattr(model, "_weight_conversions") and getattr(model, "config", None) is None:
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    known: Any = getattr(model, "_weight_conversions", None)
    if not (known if known is not None else get_model_conversion_mapping(model, add_legacy=False)):
        return None
    return lambda tensors: dict(revert_weight_conversion(model, tensors))
