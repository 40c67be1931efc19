"""How the layers of a model are computed: compiled, with linear layers in fp8, with Liger's kernels.

    linear layers in fp8 ─▶ layers compiled ─▶ [ FSDP2 hooks on to them ] ─▶ Liger's kernels, on the device

All of it replaces what modules compute and leaves parameters and their names as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from policy_worker.errors import SettingsError
from policy_worker.model import attention
from policy_worker.model.logits.softmax import Fused
from policy_worker.model.model import Backbone, PolicyModel
from policy_worker.model.trainable import routers_of
from schema.config.sections.train import FP8Config

log = logging.getLogger(__name__)

BACKEND = "inductor"
VARIANTS = 16
"""Kept variants of one layer's code: with and without gradient, shared prompts and several rows, of each model."""
MULTIPLE = 16
"""Divisor of a matrix's sides, which products in fp8 take (torch._scaled_mm)."""
LIGER_TOLERANCE = 0.1
"""Largest difference of a log-prob or value, of the largest: far above bfloat16, far below another formula."""


def compile_layers(model: Backbone) -> None:
    """Compile each decoder layer, for rows of any length, and what is computed of logits.

    One layer at a time, since hooks of FSDP2 are between them, and since layers that are alike then share one
    compiled code; those that tensor parallelism has cut have code of their own."""
    attention.hide_from_compiler()
    layers, config = model.decoder_layers(), torch._dynamo.config
    # Layers of one class share them, whatever model they are of.
    limits = [config.recompile_limit + VARIANTS * len(layers)]
    limits += [config.accumulated_recompile_limit + VARIANTS * len(layers)]

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        inner = torch.compile(function, dynamic=True, backend=BACKEND)

        @wraps(inner)
        def call(*args: Any, **named: Any) -> Any:
            # Limits are each thread's own, and autograd's computes gradients, and layers again.
            if config.recompile_limit < limits[0]:
                config.recompile_limit, config.accumulated_recompile_limit = limits
            return inner(*args, **named)

        return call

    if isinstance(model, PolicyModel):
        model.fused = Fused.by(compiled)
    for layer in layers:
        layer.forward = compiled(layer.forward)


def convert_to_fp8(model: Backbone, keys: FP8Config, *, emulate: bool = False) -> int:
    """Let linear layers of the decoder layers compute in fp8 (torchao); how many do.

    Inputs, weights and gradients of outputs are scaled anew at each product; weights stay in the type that they
    are trained in. The output head, routers and experts that are not such layers are left. emulate: the same
    roundings, in products of the wide type.

    Raises `SettingsError`: torchao cannot be imported, or no layer has sides that are multiples of `MULTIPLE`."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise SettingsError(
            f"train.fp8.enable_fp8 = true needs the package torchao, which cannot be imported ({error}): install the "
            f'extra `8bit` (pip install ".[8bit]" in the checkout), or write false'
        ) from error
    # The number of tokens is the inner side of the product for a weight's gradient, and any number.
    recipe = replace(Float8LinearConfig.from_recipe_name(keys.quant_recipe), pad_inner_dim=True, emulate=emulate)
    converted, routers = 0, {part for _, router in routers_of(model.lm) for part in router.modules()}

    def fits(layer: nn.Module, _: str) -> bool:
        nonlocal converted
        chosen = type(layer) is nn.Linear and layer not in routers and _sides_fit(layer)
        converted += chosen
        return chosen

    for layer in model.decoder_layers():
        convert_to_float8_training(layer, config=recipe, module_filter_fn=fits)
    if not converted:
        raise SettingsError(
            f"train.fp8.enable_fp8 = true: the decoder layers of {type(model.lm).__name__} have no linear layers "
            f"whose sides are multiples of {MULTIPLE}: write false"
        )
    log.info("%d linear layers compute in fp8, %s scales", converted, keys.quant_recipe)
    return converted


def _sides_fit(layer: nn.Linear) -> bool:
    return layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0


@torch.no_grad()
def use_liger(model: Backbone, compute: Callable[[], Tensor]) -> None:
    """Let a model that is on its devices compute norms, rotary embeddings and MLPs by Liger's kernels. A collective.

    compute: log-probs or values of some tokens. Its losses are not used: log-probs come from hidden states here.
    Liger replaces functions of the model's module for all models of its kind in this process, so that this comes when
    all of them are made and proven.

    Raises `SettingsError`: it has no kernels for this kind of model, or they compute something else."""
    key = "policy.enable_liger_kernel = true"
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise SettingsError(
            f"{key} needs the package liger-kernel, which cannot be imported ({error}): install the extra `liger` "
            f'(pip install ".[liger]" in the checkout), or write false'
        ) from error
    kind, name = model.lm.config.model_type, type(model.lm).__name__
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise SettingsError(f"{key}: Liger has no kernels for {name} ({kind}): write false")
    before = compute()
    chosen = dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu"), True)
    left = dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), False)
    _apply_liger_kernel_to_instance(model=model.lm, **chosen, **left)
    deviation = float((compute() - before).abs().max() / before.abs().max().clamp(min=1.0))
    if not deviation <= LIGER_TOLERANCE:
        raise SettingsError(
            f"{key}: Liger's kernels compute something else for {name} (off by {deviation:.3g}): write false"
        )
    log.info("norms, rotary embeddings and MLPs of %s are computed by Liger's kernels", name)
