"""Layers in fp8 and plain ones: `python -m tests.policy_worker.parallel.fp8_program`, with torchao on the path."""

from __future__ import annotations

import torch
from torch import nn

from policy_worker.errors import SettingsError
from policy_worker.model.model import PolicyModel
from policy_worker.parallel.kernels import convert_to_fp8
from schema.config.sections.train import FP8Config
from tests.policy_worker.material import tiny_experts, tiny_lm

LARGEST = 448.0
"""Of float8_e4m3fn."""


def rounded(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """To fp8 and back, with the scale of each row along `dim`, or of all; a power of 2 for rows."""
    most = x.abs().amax(dim, keepdim=True) if dim is not None else x.abs().amax()
    scale = LARGEST / most.double().clamp(min=1e-12)
    if dim is not None:
        scale = scale.log2().floor().exp2()
    return ((x * scale.float()).to(torch.float8_e4m3fn).float() / scale.float()).to(x)


def main() -> None:
    torch.manual_seed(0)
    for recipe, dim in (("rowwise", -1), ("tensorwise", None)):
        keys = FP8Config(enable_fp8=True, quant_recipe=recipe)
        model = PolicyModel(tiny_lm())
        plain = {n: m for n, m in PolicyModel(tiny_lm()).named_modules() if isinstance(m, nn.Linear)}
        names = [name for name, _ in model.named_parameters()]
        assert convert_to_fp8(model, keys, emulate=True) == 14
        assert [name for name, _ in model.named_parameters()] == names
        assert type(model.lm.lm_head) is nn.Linear
        name = "lm.model.layers.0.mlp.up_proj"
        x = torch.randn(5, 32)  # five tokens: not a multiple of 16
        found = model.get_submodule(name)(x)
        expected = rounded(x, dim) @ rounded(plain[name].weight, dim).T
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert not torch.equal(found, plain[name](x))
        ids, positions = torch.arange(1, 12)[None], torch.arange(11)[None]
        model._hidden(ids, positions).square().sum().backward()
        gradient = model.get_parameter(f"{name}.weight").grad
        assert gradient is not None
        assert bool(gradient.isfinite().all())
        assert gradient.count_nonzero()
    mixture = PolicyModel(tiny_experts())
    assert convert_to_fp8(mixture, keys, emulate=True) == 8, "attention; neither routers nor experts"
    for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
        layer.in_features = 24
    try:
        convert_to_fp8(model, keys)
    except SettingsError as refusal:
        assert "multiples of 16" in str(refusal)  # noqa: PT017
    else:
        raise AssertionError("no layer fits")


if __name__ == "__main__":
    main()
