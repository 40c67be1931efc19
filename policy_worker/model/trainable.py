"""Which parameters of a model train: chosen by name, and the routers of a mixture of experts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from torch import nn
from transformers import PreTrainedModel

from policy_worker.errors import SettingsError

log = logging.getLogger(__name__)

MAP = "policy.trainable_map"
_ROUTERS = re.compile(r"Router$|TopK?Gating$|Gate$")
"""How transformers ends the names of routers' classes; some record the router's output from a larger block."""
_NAMES = ("gate", "router", "gating")
"""Names of a router next to its experts where it has no class of its own."""


def freeze(
    lm: PreTrainedModel, trainable_map: Mapping[str, bool] | None, *, routers: bool = False, section: str = "policy"
) -> None:
    """Keep what `trainable_map` says, and with `routers` the routers, out of training; all else trains.

    The longest name that is the parameter's own or that of a module around it decides. section: whose key
    `freeze_moe_router` is, for messages.

    Raises `SettingsError`: a name is of nothing in the model, names of one tied parameter contradict each other,
    there are no routers, or nothing would train."""
    if trainable_map is not None:
        _choose(lm, trainable_map)
    if routers:
        key = f"{section}.freeze_moe_router"
        chosen = [module for _, module in routers_of(lm)]
        if not chosen:
            raise SettingsError(
                f"{key} = true: no router of a mixture of experts was found in {type(lm).__name__}; write "
                f"{key} = false"
            )
        for router in chosen:
            router.requires_grad_(False)
    if trainable_map is None and not routers:
        return
    parameters = list(lm.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    if len(frozen) == len(parameters):
        keys = MAP if not routers else f"{section}.freeze_moe_router"
        if routers and trainable_map is not None:
            keys = f"{MAP} and {keys}"
        raise SettingsError(
            f"{keys} freeze all parameters of {type(lm).__name__}: nothing would be trained; leave a name out"
        )
    total, still = (sum(p.numel() for p in some) for some in (parameters, frozen))
    log.info("%d of %d parameter tensors are frozen (%d of %d numbers)", len(frozen), len(parameters), still, total)


def _choose(lm: PreTrainedModel, trainable_map: Mapping[str, bool]) -> None:
    """Set `requires_grad` of the parameters that names of the map match."""
    named = list(lm.named_parameters(remove_duplicate=False))
    unused = set(trainable_map)
    decided: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in named:
        names = [key for key in _around(name) if key in trainable_map]
        unused -= set(names)
        if not names:
            continue
        earlier, key = decided.setdefault(parameter, (name, names[0]))
        if trainable_map[key] != trainable_map[names[0]]:
            raise SettingsError(
                f"{MAP}: {earlier} and {name} are one tied parameter of {type(lm).__name__}, and {key!r} says "
                f"{str(trainable_map[key]).lower()} of it, {names[0]!r} {str(trainable_map[names[0]]).lower()}: "
                f"give both one value, or name one of them"
            )
        parameter.requires_grad_(trainable_map[key])
    for key in trainable_map:
        if key in unused:
            known = dict.fromkeys(part for name, _ in named for part in _around(name))
            near = get_close_matches(key, known, n=3, cutoff=0.4)
            raise SettingsError(
                f"{MAP}: {type(lm).__name__} has no parameter and no module with parameters named {key!r}; nearest: "
                f"{', '.join(near) or ', '.join(list(known)[:3])}"
            )


def _around(name: str) -> Iterator[str]:
    """A parameter's name and those of the modules around it, the longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def routers_of(lm: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The modules that choose the experts of a token, with their names: as the model's classes record them, or by
    their names next to experts."""
    kinds: set[type[nn.Module]] = set()
    places: set[str] = set()
    for model in lm.modules():
        recorded = getattr(model, "_can_record_outputs", None) or {}
        recorders = recorded.get("router_logits") or []
        for recorder in recorders if isinstance(recorders, list | tuple) else [recorders]:
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type) and _ROUTERS.search(kind.__name__):
                kinds.add(kind)
            elif kind is nn.Linear and (place := getattr(recorder, "layer_name", None)):
                places.add(f".{place}")
    modules = dict(lm.named_modules())

    def routes(name: str, module: nn.Module) -> bool:
        if isinstance(module, tuple(kinds)) or f".{name}".endswith(tuple(places)):
            return True
        above, _, last = name.rpartition(".")
        return last in _NAMES and hasattr(modules[above], "experts")

    return [
        (name, module)
        for name, module in modules.items()
        if routes(name, module) and next(module.parameters(), None) is not None
    ]
