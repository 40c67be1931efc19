"""Low-rank adapters, by peft: injected into a model whose own weights then stay as they are.

    y = W x + s B A x    W [out, in] of the base: frozen, in `param_dtype`
                         A [r, in], B [out, r]: trained, in `master_dtype`
                         s = lora_alpha / r (arXiv 2106.09685), or / √r (arXiv 2312.03732)

With DoRA (arXiv 2402.09353) the rows of W + s B A have trained lengths m [out], which begin as those of W.

The model keeps its class and its modules their names: what was `q_proj.weight` is `q_proj.base_layer.weight`, next to
`q_proj.lora_A.default.weight`, and `weight_sync.HubNames` turns these names back. Of a module that is trained whole
the base's weights stay as `lm_head.original_module.weight`, next to `lm_head.modules_to_save.default.weight`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from policy_worker.errors import SettingsError
from schema.config.sections.policy import LoraConfig
from weight_sync import lora as injecting

log = logging.getLogger(__name__)

_AROUND = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
ADAPTABLE = (nn.Linear, Conv1D, nn.Embedding)
"""Kinds of layers that an adapter can be merged into: its weight is one matrix."""


def inject(lm: PreTrainedModel, keys: LoraConfig, section: str) -> None:
    """Freeze the model, and put trainable adapters of its type into it, in place; before anything is sharded.

    section: `policy.lora` or `critic.lora`, for messages.

    Raises `SettingsError`: a name is of nothing in the model, or of what cannot have an adapter."""
    import peft  # takes seconds, and only these jobs need it

    _check_names(lm, keys, section)
    kind = lm.config.model_type
    if keys.target_modules is None and kind not in peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        raise SettingsError(
            f"{section}.target_modules is unset, and peft knows no choice of modules for models of type {kind}: "
            f'write {section}.target_modules = "all-linear", or their names'
        )
    try:
        with _on_the_cpu(lm, keys.modules_to_save or ()):
            injecting.inject(lm, keys)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise SettingsError(f"{section}: {type(lm).__name__} cannot have these adapters: {error}") from error
    layers = {name: module for name, module in lm.named_modules() if adapted(module)}
    _check_adapted(lm, layers, keys, section)
    numbers = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    total = sum(p.numel() for p in lm.parameters())
    log.info("%s: adapters on %d modules; %d of %d numbers train", section, len(layers), numbers, total)


@contextmanager
def _on_the_cpu(lm: PreTrainedModel, saved: Sequence[str]) -> Iterator[None]:
    """Let what is on the meta device be on the CPU meanwhile, without taking memory, so that peft begins its adapters
    there as it does next to weights. Not of modules that are trained whole: peft copies these."""
    ends = tuple(saved)
    copied = {
        id(parameter)
        for name, module in lm.named_modules()
        if ends and name.endswith(ends)  # also "layernorm" for "norm", as peft has it
        for parameter in module.parameters()
    }
    replaced = [p for p in lm.parameters() if p.is_meta and id(p) not in copied]
    for parameter in replaced:
        nothing = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        torch.utils.swap_tensors(parameter, nn.Parameter(nothing, parameter.requires_grad))
    try:
        yield
    finally:
        for parameter in replaced:
            nothing = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            torch.utils.swap_tensors(parameter, nn.Parameter(nothing, parameter.requires_grad))


def widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Give what trains its master type. From here on sharding alone makes the types of base and adapters one."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def adapters_of(lm: nn.Module) -> Any | None:
    """The settings of peft's with which adapters were injected into a model, if there are any."""
    settings: Mapping[str, Any] = getattr(lm, "peft_config", None) or {}
    return next(iter(settings.values()), None)


def plain_name(name: str) -> str:
    """Return the name that a tensor of the model had before adapters were put around it."""
    return _AROUND.sub("", name)


def adapted(layer: nn.Module) -> bool:
    """Whether a layer is one of peft's around a layer of the model."""
    return hasattr(layer, "lora_A")


def _check_names(lm: PreTrainedModel, keys: LoraConfig, section: str) -> None:
    """Raises `SettingsError` unless each name is that of a module that can be adapted, or trained whole."""
    modules = {name: module for name, module in lm.named_modules() if name}
    adaptable = [name for name, module in modules.items() if isinstance(module, ADAPTABLE)]
    targets, saved = keys.target_modules, keys.modules_to_save or ()
    if isinstance(targets, list):
        _check_known(lm, targets, adaptable, f"{section}.target_modules", "linear layer or embedding")
        chosen = _named(modules, targets)
    elif targets not in (None, "all-linear"):
        chosen = [name for name in modules if re.fullmatch(targets, name)]
        if not set(chosen) & set(adaptable):
            raise SettingsError(
                f"{section}.target_modules = {targets!r} matches the whole name of no linear layer of "
                f"{type(lm).__name__}; the first of them is {adaptable[0]!r}"
            )
    else:
        chosen = []
    _check_known(lm, saved, list(modules), f"{section}.modules_to_save", "module")
    output = lm.get_output_embeddings()
    if any(modules[name] is output for name in chosen):
        raise SettingsError(
            f"{section}.target_modules names the output layer of {type(lm).__name__}, whose log-probs are computed "
            f"from its weight alone: leave it out, or train it whole with {section}.modules_to_save"
        )
    names: dict[int, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for key, some in (("target_modules", chosen), ("modules_to_save", _named(modules, saved))):
        for name in some:
            parameters = (parameter for parameter in modules[name].parameters())
            tied = next((names[id(p)] for p in parameters if len(names[id(p)]) > 1), None)
            if tied:
                raise SettingsError(
                    f"{section}.{key}: {name} of {type(lm).__name__} has a weight that is tied ({' and '.join(tied)} "
                    f"are one): trained under one name it would no longer be; leave it out"
                )


def _check_known(lm: PreTrainedModel, wanted: Iterable[str], known: Sequence[str], key: str, kind: str) -> None:
    for entry in wanted:
        if not _named(known, [entry]):
            last = dict.fromkeys(name.rpartition(".")[2] for name in known)
            near = get_close_matches(entry, [*last, *known], n=3, cutoff=0.4)
            raise SettingsError(
                f"{key}: {type(lm).__name__} has no {kind} named {entry!r}; nearest: "
                f"{', '.join(near) or ', '.join(list(last)[:5])}"
            )


def _named(modules: Iterable[str], entries: Iterable[str]) -> list[str]:
    """The modules of which an entry is the name, or the end of it."""
    wanted = tuple(entries)
    ends = tuple(f".{entry}" for entry in wanted)
    return [name for name in modules if name in wanted or name.endswith(ends)]


def _check_adapted(lm: PreTrainedModel, layers: Mapping[str, Any], keys: LoraConfig, section: str) -> None:
    """Raises `SettingsError`: an adapter could not be merged, or a pattern is of none of them."""
    for name, layer in layers.items():
        if keys.use_dora and not isinstance(layer.get_base_layer(), nn.Linear):
            raise SettingsError(
                f"{section}.use_dora is for linear layers, and {name} of {type(lm).__name__} is a "
                f"{type(layer.get_base_layer()).__name__}: leave it out of {section}.target_modules, or write "
                f"{section}.use_dora = false"
            )
        if not isinstance(layer.get_base_layer(), ADAPTABLE):
            raise SettingsError(
                f"{section}.target_modules names {name} of {type(lm).__name__}, a "
                f"{type(layer.get_base_layer()).__name__}: adapters are for linear layers and embeddings"
            )
    for key, table in (("r_pattern", keys.r_pattern), ("alpha_pattern", keys.alpha_pattern)):
        for pattern in table or {}:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in layers):
                raise SettingsError(
                    f"{section}.{key}: `{pattern}` matches the end of no adapted module's name; the first of them "
                    f"is {next(iter(layers))!r}"
                )
