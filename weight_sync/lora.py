"""Low-rank adapters on a model (as the `peft` library puts them there): merged into its weights, or alone.

    merged    W + Σ over active adapters of scaling · B A, in float32, rounded once     under the model's own names
    adapter   A and B as they are, and whole modules that are trained with them       under peft's saved names

With DoRA each row of that sum is divided by its length, and multiplied by a trained one.

To publish them the model is only read: what it consists of follows from its modules' attributes. Other variants
(biases of adapters, convolutions, DoRA of several adapters or of other than linear layers) are refused instead of
merged wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from schema.config.sections.policy import LoraConfig
from weight_sync.errors import WeightError

Publishes = Literal["merged", "adapter"]
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.*)\.lora_(?:embedding_)?(?P<side>[AB])\.(?P<adapter>[^.]+)(?:\.weight)?")
_LENGTHS = re.compile(r"(?P<module>.*)\.lora_magnitude_vector\.(?P<adapter>[^.]+)\.weight")
_SAVED = re.compile(r"(?P<module>.*)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")


@dataclass
class TensorSource:
    """One tensor to publish, and the stored ones that it is made of."""

    name: str
    stored: str
    factors: list[tuple[str, str, float, bool]] = field(default_factory=list)
    """Stored names of A and B, their scaling, and whether the product is transposed."""
    lengths: str | None = None
    """Stored name of the lengths that rows get."""

    @property
    def names(self) -> list[str]:
        factors = [name for a, b, _, _ in self.factors for name in (a, b)]
        return [self.stored, *factors, *([] if self.lengths is None else [self.lengths])]

    def value(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
        """The tensor; where adapters are merged in `dtype`, else as it is stored."""
        weight = tensors[self.stored]
        if not self.factors:
            return weight
        total = weight.float()
        for a, b, scaling, transposed in self.factors:
            product = tensors[b].float() @ tensors[a].float()
            total = total + (product.T if transposed else product) * scaling
        if self.lengths is not None:
            total = total * (tensors[self.lengths].float() / torch.linalg.norm(total, dim=1))[:, None]
        return total.to(dtype or weight.dtype)


def inject(model: Any, keys: LoraConfig) -> None:
    """Put adapters into a transformers model in place, as `peft` does; all else of it is frozen.

    Raises `ValueError`, `TypeError`, `NotImplementedError`: peft cannot do this."""
    import peft  # takes seconds, and only jobs with adapters need it

    arguments: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "r": keys.r,
        "lora_alpha": keys.lora_alpha,
        "lora_dropout": keys.lora_dropout,
        "target_modules": _linear_layers(model) if keys.target_modules == "all-linear" else keys.target_modules,
        "use_rslora": keys.use_rslora,
        "use_dora": keys.use_dora,
        "modules_to_save": keys.modules_to_save,
        "rank_pattern": keys.r_pattern or {},
        "alpha_pattern": keys.alpha_pattern or {},
        "init_lora_weights": keys.init_lora_weights,
    }
    peft.inject_adapter_in_model(peft.LoraConfig(**arguments), model)


def _linear_layers(model: Any) -> list[str]:
    """All but the output layer. (By `all-linear` peft means the fused experts of a mixture as well.)"""
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    layers = (n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not output)
    return list(layers)


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether this is a model of peft's, or one into which peft has injected adapters."""
    return bool(getattr(model, "peft_config", None))


def base_of(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model inside."""
    base: torch.nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def sources(
    model: torch.nn.Module, stored: Mapping[str, torch.Tensor], publishes: Publishes
) -> Iterator[TensorSource]:
    """Yield what to publish of a model with adapters, in the order of its modules.

    model: of peft's, or with adapters injected. stored: its state dict's tensors, aliases left out.

    Raises `WeightError`: adapters that cannot be published so; the message names the module."""
    if publishes == "adapter":
        yield from _adapter(model, stored)
    else:
        yield from _merged(model, stored)


def _adapter(model: Any, stored: Mapping[str, torch.Tensor]) -> Iterator[TensorSource]:
    active = sorted({name for m in model.modules() if hasattr(m, "lora_A") for name in m.active_adapters})
    if len(active) != 1:
        raise WeightError(f"the adapters {active} are active at once: only one can be published alone")
    front = "" if hasattr(model, "get_base_model") else _PREFIX
    for name in stored:
        saved, factor, lengths = (kind.fullmatch(name) for kind in (_SAVED, _FACTOR, _LENGTHS))
        if saved is not None and saved["adapter"] == active[0]:
            yield TensorSource(f"{front}{saved['module']}.{saved['rest']}", name)
        elif factor is not None and factor["adapter"] == active[0]:
            yield TensorSource(front + re.sub(rf"\.{re.escape(active[0])}(?=$|\.weight$)", "", name), name)
        elif lengths is not None and lengths["adapter"] == active[0]:
            yield TensorSource(f"{front}{lengths['module']}.lora_magnitude_vector", name)


def _merged(model: Any, stored: Mapping[str, torch.Tensor]) -> Iterator[TensorSource]:
    modules = dict(model.named_modules())
    factors, lengths = _factors(modules, stored), _lengths(modules, stored)
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        saved = _SAVED.fullmatch(name)
        if saved is not None:
            if saved["adapter"] in modules[saved["module"]].active_adapters:
                yield TensorSource(f"{saved['module']}.{saved['rest']}".removeprefix(_PREFIX), name)
        elif _is_inside(name, "original_module") or ".lora_" in name:
            continue
        elif module.endswith(".base_layer"):
            outer = module.removesuffix(".base_layer")
            source = TensorSource(f"{outer}.{last}".removeprefix(_PREFIX), name)
            if last == "weight":
                if tensor.ndim != 2 and factors.get(outer):
                    raise WeightError(
                        f"the adapter of {outer!r}, a weight of {tensor.ndim} dimensions, cannot be merged"
                    )
                source.factors, source.lengths = factors.get(outer, []), lengths.get(outer)
            yield source
        else:
            yield TensorSource(name.removeprefix(_PREFIX), name)


def _factors(
    modules: Mapping[str, Any], stored: Mapping[str, torch.Tensor]
) -> dict[str, list[tuple[str, str, float, bool]]]:
    """By module: the products that its active adapters add."""
    sides: dict[tuple[str, str], dict[str, str]] = {}
    for name in stored:
        match = _FACTOR.fullmatch(name)
        if match is not None:
            sides.setdefault((match["module"], match["adapter"]), {})[match["side"]] = name
        elif ".lora_" in name and not _LENGTHS.fullmatch(name):
            raise WeightError(
                f"{name!r} is of an adapter that is more than the product B A (a bias of it): it cannot be merged "
                f"here; publish the adapter itself"
            )
    products: dict[str, list[tuple[str, str, float, bool]]] = {}
    for (module, adapter), names in sides.items():
        layer = modules[module]
        if layer.merged:
            raise WeightError(f"the adapters of {module!r} are merged in memory: unmerge them, they are merged here")
        if adapter in layer.active_adapters and not layer.disable_adapters:
            turned = "lora_embedding_" in names["A"] or bool(getattr(layer, "fan_in_fan_out", False))
            products.setdefault(module, []).append((names["A"], names["B"], float(layer.scaling[adapter]), turned))
    return products


def _lengths(modules: Mapping[str, Any], stored: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """By module: where the lengths of its rows are stored, if its active adapter has some."""
    lengths = {}
    for name in stored:
        match = _LENGTHS.fullmatch(name)
        if match is None:
            continue
        layer = modules[match["module"]]
        if not isinstance(layer.get_base_layer(), torch.nn.Linear) or len(layer.active_adapters) > 1:
            raise WeightError(
                f"{name!r} are lengths (DoRA) of something else than one adapter of a linear layer: they cannot be "
                f"merged here; publish the adapter itself"
            )
        if match["adapter"] in layer.active_adapters and not layer.disable_adapters:
            lengths[match["module"]] = name
    return lengths


def _is_inside(name: str, part: str) -> bool:
    return part in name.split(".")
