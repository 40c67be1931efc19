"""A model's weights under the names and shapes of its hub checkpoint, one unit at a time.

Left out: aliases of tied tensors (`lm_head.weight` of a model that ties it to its embedding) and what the
model class itself does not save. Turned back: weights that transformers fuses or renames in memory (experts,
say). A *unit* is what must be together for that: a layer where transformers fuses anything, else one tensor; so
no more than one unit is in memory next to the model.

Where gathering a shard is a collective, every rank must run through the same units in the same order: that of the
module tree.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.errors import WeightError
from weight_sync.lora import Publishes, TensorSource, base_of, has_adapters, sources

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

    model: a transformers model; other modules give their own names. FSDP2 and TP models are welcome. gather: called
    once for each stored tensor, in the same order on every rank. dtype: floating-point. tensors of 16 bits or more
    are cast to it (`weight_sync.transfer_dtype`); None: as they are.

    Yields:
        Detached tensors on the device of the model; whole ones on every rank."""
    yield from HubNames(model).tensors(gather, dtype=dtype)


@dataclass(frozen=True)
class Unit:
    """Stored tensors that become hub tensors together.

    names: of the stored tensors. n_bytes: of all of them, whole. exact: whether they only move and are cast, so that
    they may be cast before they are gathered."""

    names: tuple[str, ...]
    n_bytes: int
    exact: bool


class HubNames:
    """Which tensors a model is stored as, found out at once: the model is not asked again.

    So a copy of its weights can be named later, and by another thread, while the model itself trains on.

    model: see `hub_tensors`; one with adapters of peft's too. lora: what is published of such a one: its weights with
    the active adapters merged in, or the active adapter alone. without: names that are left out.

    Raises `WeightError`: adapters that cannot be published so."""

    def __init__(self, model: torch.nn.Module, *, lora: Publishes = "merged", without: Collection[str] = ()) -> None:
        self.stored: dict[str, torch.Tensor] = {n: t for n, t in _stored(model) if n not in without}
        self._convert = None
        if not has_adapters(model):
            made = [TensorSource(name, name) for name in self.stored]
            self._convert = _reverse_conversion(model)
        else:
            made = list(sources(model, self.stored, lora))
            _check_ties(model, made)
            if lora == "merged":
                self._convert = _reverse_conversion(base_of(model))
        self._made: dict[Unit, list[TensorSource]] = {}
        together = (lambda source: source.name) if self._convert is None else lambda source: _layer_of(source.name)
        for _, group in itertools.groupby(made, key=together):
            members = list(group)
            names = tuple(dict.fromkeys(name for source in members for name in source.names))
            n_bytes = sum(_n_bytes(self.stored[name]) for name in names)
            self._made[Unit(names, n_bytes, not any(source.factors for source in members))] = members

    @property
    def units(self) -> list[Unit]:
        """All units, in the order of the module tree."""
        return list(self._made)

    @property
    def plain(self) -> dict[str, str]:
        """Stored names by hub name, of what is published as it is stored; of all that where nothing is converted."""
        return {source.name: source.stored for made in self._made.values() for source in made if not source.factors}

    def hub(
        self, unit: Unit, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hub names and tensors of one unit, cast to `dtype`, from the stored tensors of its names, whole."""
        named = {s.name: cast(s.value(tensors, dtype), dtype) for s in self._made[unit]}
        yield from (named if self._convert is None else self._convert(named)).items()

    def tensors(
        self, gather: Gather = gather_full, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield as `hub_tensors` does. A `gather` that looks only at the name never touches the model's tensors."""
        for unit in self._made:
            whole = {name: gather(name, self.stored[name]) for name in unit.names}
            yield from self.hub(unit, whole, dtype=dtype)


def _check_ties(model: torch.nn.Module, made: list[TensorSource]) -> None:
    """Merging into one of two tied tensors would change the other as well. Raises `WeightError`."""
    everything: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for source in made:
        if source.factors:
            weight = everything[source.stored]
            tied = [name for name, other in everything.items() if other is weight and name != source.stored]
            if tied:
                raise WeightError(
                    f"{source.stored!r} has an adapter and is tied to {tied[0]!r}, which has not: merged, both would "
                    f"change; leave it out of the adapter's target modules, or untie them"
                )


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


def _n_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of the whole tensor, also where this rank has a part of it."""
    return int(tensor.numel() * tensor.dtype.itemsize)


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Cast a tensor as it is published: floating-point numbers of 16 bits or more to `dtype`, unless that is None."""
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
