"""How layers are computed: compiled, in fp8, by Liger's kernels. Names and numbers are those of plain layers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policy_worker.errors import SettingsError
from policy_worker.model.model import PolicyModel
from policy_worker.parallel import kernels
from policy_worker.parallel.kernels import convert_to_fp8, use_liger
from policy_worker.parallel.rank_group import RankGroup
from schema.config.sections.train import FP8Config
from tests.policy_worker.material import make_config, make_trainer, tiny_lm, tiny_model
from tests.policy_worker.parallel.test_ranks import GRPO, SAMPLES, assert_equal, gradients, run_each, run_here

COMPILED = {"compile": True}
CLOSE = 2e-5
"""Compiled code adds in another order; largest difference of a gradient, as a part of its largest entry."""


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As compiled, up to the generation of code, which takes minutes."""
    monkeypatch.setattr(kernels, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("without_code")
def test_compiled_layers_compute_and_are_named_as_others(group: RankGroup):
    """Rows of other lengths and blocks are not compiled anew."""
    options: dict[str, Any] = {"grpo": GRPO, "train": {"sequence_packing": True}}
    expected, _ = run_here(group, **options)
    torch._dynamo.utils.counters.clear()
    found, _ = run_here(group, **options | {"train": {"sequence_packing": True, **COMPILED}})
    assert_equal(gradients(found), gradients(expected), CLOSE)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    longer = options | {"samples": {"n": 14, "longest": 30}, "train": {"sequence_packing": True, **COMPILED}}
    run_here(group, **longer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.soak
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(
    "train",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_moe_layers": True},
        {"activation_offload": True},
    ],
    ids=str,
)
def test_compiled_layers_recompute_and_offload_parts(group: RankGroup, train: dict[str, Any]):
    options: dict[str, Any] = {"grpo": GRPO, "sections": AGAIN, "steps": 2}
    if "recompute_moe_layers" in train:
        options["model"] = {"family": "qwen3_moe"}
    expected, _ = run_here(group, **options, train=train)
    found, _ = run_here(group, **options, train=train | COMPILED)
    assert_equal(gradients(found), gradients(expected), CLOSE)


LORA: dict[str, Any] = {"policy": {"lora": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}}}
AGAIN: dict[str, Any] = {"policy": {"model_gradient_checkpointing": True}}
MESHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dp_shard": 2}, {"sections": AGAIN}),
    ({"dp_shard": 2}, {"sections": LORA}),
    ({"dp_shard": 2}, {"grpo": GRPO | {"advantage_estimator": "gae"}}),
    ({"tp": 2}, {}),
    ({"tp": 2}, {"sections": AGAIN}),
    ({"tp": 2}, {"sections": LORA}),
    ({"tp": 2, "sequence": True}, {}),
    ({"tp": 2, "sequence": True}, {"sections": AGAIN}),
    ({"cp": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp_shard": 2, "ep": 2}, {"model": {"family": "qwen3_moe"}}),
]


@pytest.mark.soak
@pytest.mark.parametrize(("mesh", "case"), MESHES, ids=str)
def test_ranks_compile_their_part(tmp_path: Path, group: RankGroup, mesh: dict[str, Any], case: dict[str, Any]):
    """Each case has a test of its own: generating code for several takes longer than a test may wait."""
    options: dict[str, Any] = {"samples": SAMPLES, "grpo": GRPO, "steps": 2} | case
    ((found, _),) = run_each(tmp_path / "2", 2, [{"mesh": mesh, "train": COMPILED} | options])
    expected, _ = run_here(group, **options)
    assert_equal(gradients(found), gradients(expected), CLOSE)


@pytest.mark.soak
@pytest.mark.parametrize("train", [{}, {"sequence_packing": True}, {"param_dtype": "bfloat16"}], ids=str)
def test_generated_code_computes_the_same(group: RankGroup, train: dict[str, Any]):
    """With a C++ compiler on a CPU, Triton on a GPU."""
    tolerance = 0.1 if "param_dtype" in train else CLOSE
    expected, _ = run_here(group, grpo=GRPO, train=train)
    found, _ = run_here(group, grpo=GRPO, train=train | COMPILED)
    assert_equal(gradients(found), gradients(expected), tolerance)


@pytest.mark.slow
def test_fp8_rounds_what_linear_layers_of_decoder_layers_read():
    """In a process of its own, which finds torchao where `make setup-8bit` puts it."""
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), str(Path(sys.prefix) / "8bit")])
    command = [sys.executable, "-m", "tests.policy_worker.parallel.fp8_program"]
    ended = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(
    ("use", "package"),
    [
        (
            lambda model: use_liger(model, lambda: torch.zeros(1)),
            r"enable_liger_kernel = true .*liger-kernel.*\[liger\]",
        ),
        (lambda model: convert_to_fp8(model, FP8Config(enable_fp8=True)), r"enable_fp8 = true .*torchao.*\[8bit\]"),
    ],
)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, use: Any, package: str):
    for module in ("torchao", "liger_kernel"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match=package):
        use(tiny_model())


def library(change: Callable[[Any], None], *kinds: str) -> dict[str, Any]:
    """Liger's entry points, which do `change` to a model."""
    asked: list[dict[str, Any]] = []

    def apply(model: Any, **named: Any) -> None:
        asked.append(named)
        change(model)

    patching = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN=dict.fromkeys(kinds), _apply_liger_kernel_to_instance=apply, asked=asked
    )
    return {
        "liger_kernel": SimpleNamespace(),
        "liger_kernel.transformers": SimpleNamespace(),
        "liger_kernel.transformers.monkey_patch": patching,
    }


def other_norm(lm: Any) -> None:
    lm.base_model.norm.forward = lambda states: 10 * states


@pytest.mark.parametrize(
    ("change", "kinds", "refusal"),
    [
        (lambda lm: None, ("qwen3",), ""),
        (other_norm, ("qwen3",), "compute something else for .*Qwen3ForCausalLM"),
        (other_norm, ("llama",), r"no kernels for .*Qwen3ForCausalLM \(qwen3\)"),
    ],
    ids=["the same", "another norm", "another kind"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_with_ligers_kernels_are_compared_with_themselves(
    monkeypatch: pytest.MonkeyPatch, group: RankGroup, change: Any, kinds: Any, refusal: str, dtype: str
):
    """All that are on the devices, plain or sharded; and no loss is replaced."""
    modules = library(change, *kinds)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    liger = {"policy": {"enable_liger_kernel": True}}
    config = make_config({"advantage_estimator": "gae", "kl_beta": 0.1}, {"param_dtype": dtype}, **liger)
    if refusal:
        with pytest.raises(SettingsError, match=refusal):
            make_trainer(config, group)
        return
    make_trainer(config, group)
    asked = modules["liger_kernel.transformers.monkey_patch"].asked
    assert len(asked) == 3, "policy, critic and reference"
    for one in asked:
        assert not one.pop("cross_entropy")
        assert not one.pop("fused_linear_cross_entropy")
        assert all(one.values())


def test_compiled_layers_keep_their_names():
    model = PolicyModel(tiny_lm())
    names = [name for name, _ in model.named_parameters()]
    kernels.compile_layers(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert sorted(model.lm.state_dict()) == sorted(tiny_lm().state_dict())
