"""A small random model of the same architecture, on which is proved what a trainer assumes of one without weights.

It has one layer of each kind that the model has, of the same hidden size, heads and attention, and few tokens,
experts and hidden units of its multilayer perceptrons, since those act on single positions. It computes in float32,
so that rounding is far below any difference; biases and norms, which begin as 0 and 1, get noise. Where no such copy
can be made, one of all experts and tokens is tried, then one of the full size: by the rank that proves, alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY, WIDTH = 1024, 32
"""Most of a small copy: token ids, and hidden units of a multilayer perceptron or expert."""
LARGE = 100.0
"""Logits of a copy reach this, so that what an architecture does to large ones shows."""
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

Shrink = Callable[[PretrainedConfig, int], None]
"""Makes a configuration smaller in place, with only the first so many layers."""


def random_copy(lm: PreTrainedModel, layers: list[nn.Module], shrink: Shrink, least: int = 1) -> PreTrainedModel:
    """A model of this one's class with random weights, in float32 on the CPU. Random states are left alone.

    layers: its repeated blocks, for which it may be on the meta device. least: how many the copy has, if there are.
    """
    kinds = [_kind(layer) for layer in layers]
    config = deepcopy(lm.config)
    shrink(config, max(max(map(kinds.index, kinds), default=0) + 1, min(least, len(layers))))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        copy: PreTrainedModel = type(lm)._from_config(config, dtype=torch.float32)
        for parameter in copy.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    names = {type(layer).__name__ for layer in layers}
    kept = {_kind(module) for module in copy.modules() if type(module).__name__ in names}
    if kept != set(kinds):
        raise ValueError("a copy of its first layers has not all kinds of them")
    return copy


def small(config: PretrainedConfig, layers: int) -> None:
    """See the module's docstring."""
    few_layers(config, layers)
    text = config.get_text_config()
    groups, chosen = (getattr(text, name, None) or 1 for name in ("n_group", "topk_group"))
    each = max(math.ceil((getattr(text, "num_experts_per_tok", None) or 8) / chosen), 2)
    _limit(text, dict.fromkeys(WIDTHS, WIDTH) | dict.fromkeys(EXPERTS, groups * each))
    for name in TOKENS:
        if isinstance(getattr(text, name, None), int) and getattr(text, name) >= VOCABULARY:
            setattr(text, name, None)
    _limit(text, {"vocab_size": VOCABULARY})


def few_layers(config: PretrainedConfig, layers: int) -> None:
    """Only the first layers, and one of each other tower."""
    text = config.get_text_config()
    for name in config.sub_configs:
        other = getattr(config, name, None)
        if other is not None and other is not text:
            _limit(other, {"num_hidden_layers": 1, "depth": 1})
    everything = text.num_hidden_layers
    for name, value in text.to_dict().items():
        if isinstance(value, list | tuple) and len(value) == everything:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


def as_it_is(config: PretrainedConfig, layers: int) -> None:
    """The full size."""


def enlarge_logits(head: Any, logits: torch.Tensor) -> None:
    """Make the output layer of a copy one whose logits, now these, are large."""
    with torch.no_grad():
        head.weight.mul_(LARGE / logits.abs().max())
        if getattr(head, "bias", None) is not None:
            head.bias.copy_(torch.linspace(-LARGE, LARGE, len(head.bias)))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Describe what layers that compute alike share: their modules, and what those say of themselves in words.

    Modules that adapters were put around count as they were without."""
    return tuple(
        (name, type(module).__name__, *((key, _word(value)) for key, value in sorted(_facts(module).items())))
        for name, module in _without_adapters(layer)
    )


def _without_adapters(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and those in it, by name."""
    for around in ("base_layer", "original_module"):
        inner = module._modules.get(around)
        if inner is not None:
            yield from _without_adapters(inner, name)
            return
    yield name, module
    for last, child in module.named_children():
        yield from _without_adapters(child, f"{name}.{last}" if name else last)


def _facts(module: nn.Module) -> dict[str, Any]:
    states = ("training", "gradient_checkpointing")  # it is used, which a copy need not know
    return {key: value for key, value in vars(module).items() if not key.startswith("_") and key not in states}


def _word(value: Any) -> str:
    """Numbers differ between layers that compute alike: their own number, say."""
    return repr(value) if isinstance(value, str | bool | None) else type(value).__name__


def _limit(config: PretrainedConfig, sizes: dict[str, int]) -> None:
    for name, most in sizes.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), most))
