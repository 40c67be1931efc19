"""Probes of memory and kernels: what is sharded, recomputed, kept on the host or compiled, and by which package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from policy_worker.errors import SettingsError
from policy_worker.memory import offload
from policy_worker.memory.activations import is_kept_on_host, is_recomputed
from policy_worker.model.load import load_critic, load_model
from policy_worker.parallel.distribute import distribute
from policy_worker.trained.model import TrainedModel
from schema.config import Config
from schema.config.rules.training import TRAINING_RULES
from tests.liveness.probe import Place, changed, grpo, under, watch
from tests.liveness.trained import EXPERTS, SECTIONS, grpo_of, sharded_modules, trained_models, trainer_of
from tests.policy_worker.material import tiny_critic, tiny_model, train_step


def units(config: Config, place: Place) -> list[tuple[str, str]]:
    """What FSDP shards one by one of the critic, or of the policy without one, and where it keeps the weights."""
    model, keys = (tiny_critic(), config.critic) if config.has_critic else (tiny_model(), config.train)
    sharded = sharded_modules(distribute(model, place.group, keys))
    return [(name, type(kept.offload_policy).__name__) for name, kept in sharded]


def after_backward(config: Config, place: Place) -> list[tuple[int, list[int]]]:
    """Count, for policy and critic, the parameters with a gradient where they are after backward, and those that
    step at a time."""
    algorithm, found = grpo_of(config, place)[0], []
    for trained in trained_models(algorithm._trainer):
        steps: list[int] = []
        found.append((0, steps))

        def end_part(one: TrainedModel = trained, at: int = len(found) - 1) -> None:
            found[at] = sum(p.grad is not None for p in one.model.parameters()), found[at][1]
            type(one).end_part(one)

        def count(optimizer: Any, *_: Any, steps: list[int] = steps) -> None:
            steps.append(sum(len(group["params"]) for group in optimizer.param_groups))

        trained.end_part = end_part
        trained.optimizer.optimizers[0].register_step_pre_hook(count)
    with patch.object(offload, "NUMBERS", 3000):
        train_step(algorithm, 0)
    return found


def reduced_by_then(config: Config, place: Place) -> list[int]:
    """How many parameters of policy and critic have a gradient as each micro-batch begins."""
    algorithm, counts = grpo_of(config, place)[0], list[int]()
    for trained in trained_models(algorithm._trainer):

        def micro_batches(*given: Any, one: TrainedModel = trained) -> Iterator[Any]:
            for batch in type(one).micro_batches(one, *given):
                counts.append(sum(p.grad is not None for p in one.model.parameters()))
                yield batch

        trained.micro_batches = micro_batches
    train_step(algorithm, 0)
    return counts


def kept_activations(config: Config, place: Place) -> list[tuple[str, bool, bool]]:
    """The modules of policy and critic that are recomputed, or have activations in host memory."""
    model = load_model(config)
    models = [model, *([load_critic(config, model)] if config.has_critic else [])]
    facts = (
        (name, is_recomputed(m) or getattr(m, "gradient_checkpointing", False) is True, is_kept_on_host(m))
        for one in models
        for name, m in one.named_modules()
    )
    return [fact for fact in facts if fact[1] or fact[2]]


def compiled(config: Config, place: Place) -> list[bool]:
    """Whether the layers of each trained model are compiled."""
    models = trained_models(trainer_of(config, place))
    layers = [layer for trained in models for layer in trained.model.decoder_layers()]
    return [hasattr(layer.forward, "_torchdynamo_orig_callable") for layer in layers]


for section, job in SECTIONS:
    cast = changed(job, under(section, param_dtype="bfloat16"))
    wrapped = under(section, fsdp_wrap_layers=([], ["Qwen3MLP"]), fsdp_wrap_min_params=(0, 3000))
    watch(units, cast, under(section, fsdp_offload=(False, True)) | wrapped)
    offloads = under(section, fsdp_gradient_offload=(False, True), optimizer_offload=(False, True))
    watch(after_backward, cast, offloads)
    once = changed(cast, under(section, fsdp_accumulation="whole"))
    watch(after_backward, once, under(section, overlap_grad_reduce=(True, False)))
    watch(reduced_by_then, cast, under(section, fsdp_accumulation=("sharded", "whole")))
    owner = "policy" if section == "train" else section
    again = under(owner, model_gradient_checkpointing=True) | under("policy", model_name_or_path=EXPERTS)
    recomputed = under(section, recompute_granularity=("full", "selective"), recompute_moe_layers=(False, True))
    watch(kept_activations, changed(job, again), recomputed | under(section, activation_offload=(False, True)))
    watch(compiled, job, under(section, compile=(False, True)))

# ---- kernels --------------------------------------------------------------------------------------------------


def kernel_of_the_attention(config: Config, place: Place) -> str:
    """Which package loading the model asks for, where none is installed."""
    try:
        load_model(config)
    except SettingsError as refusal:
        return str(refusal)
    return "torch"


def kernels_of_the_layers(config: Config, place: Place) -> str:
    """Which package the trainer asks for, where none is installed."""
    try:
        with patch.dict(sys.modules, {"liger_kernel": None, "torchao": None}):
            trainer_of(config, place)
    except SettingsError as refusal:
        return str(refusal)
    return "torch"


@dataclass(frozen=True)
class Recipe:
    """What is asked of torchao's configuration of fp8."""

    name: str = ""
    pad_inner_dim: bool = False
    emulate: bool = False

    from_recipe_name = classmethod(lambda cls, name: cls(name))


def fp8_recipe(config: Config, place: Place) -> set[str]:
    """Which recipe torchao is handed, for layers that fit."""
    asked = set()

    def convert(layer: Any, *, config: Recipe, module_filter_fn: Any) -> None:
        asked.add(config.name)
        assert any(module_filter_fn(module, name) for name, module in layer.named_modules())

    library = SimpleNamespace(Float8LinearConfig=Recipe, convert_to_float8_training=convert)
    with patch.dict(sys.modules, {"torchao": SimpleNamespace(float8=library), "torchao.float8": library}):
        trainer_of(config, place)
    return asked


def refusals_of_training(config: Config, place: Place) -> list[str]:
    """What the rules of training have against it."""
    return [problem.render() for rule in TRAINING_RULES for problem in rule(config)]


narrow = changed(grpo, under("train", param_dtype="bfloat16"))
watch(kernel_of_the_attention, narrow, under("train", fa_version=(2, 3)))
watch(kernels_of_the_layers, narrow, under("policy", enable_liger_kernel=(False, True)))
watch(kernels_of_the_layers, narrow, under("train.fp8", enable_fp8=(False, True)))
in_fp8 = changed(narrow, under("train.fp8", enable_fp8=True))
watch(fp8_recipe, in_fp8, under("train.fp8", quant_recipe=("rowwise", "tensorwise")))
scaling = ("dynamic_scaling", "delayed_scaling")
watch(refusals_of_training, in_fp8, under("train.fp8", fp8_recipe=scaling), refused=True)
watch(refusals_of_training, grpo, under("train", async_tp_enabled=(False, True)), refused=True)
in_fp4 = under("train.fp4", enable_fp4=(False, True), fp4_recipe=scaling, quant_recipe=("rowwise", "tensorwise"))
watch(refusals_of_training, grpo, in_fp4, refused=True)
