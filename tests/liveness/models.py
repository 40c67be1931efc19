"""Probes of the models that are trained: how they are loaded, what of them trains, adapters, and precision."""

from __future__ import annotations

import json
import random
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers import dynamic_module_utils

from policy_worker.model.load import load_critic, load_model
from policy_worker.model.model import Backbone
from policy_worker.parallel.fsdp import apply_fsdp
from policy_worker.trained.critic import Critic
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config import Config
from tests.liveness.probe import UNSET, Made, Place, changed, grpo, under, watch
from tests.liveness.trained import EXPERTS, SECTIONS, grpo_of, policy, sharded_modules, trained_models, with_critic
from tests.policy_worker.material import random_samples, tiny_critic, tiny_model, train_step, with_experts

USER_MODULE = "tabnanny"  # of the standard library, and imported by nobody
ADAPTERS = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}


def _facts(model: Backbone) -> tuple[str, bool, float, float]:
    lm = model.read_weights(torch.device("cpu")).lm
    weight = next(iter(lm.parameters()))
    value = weight.detach().flatten()[0].item()
    return str(weight.dtype), lm.is_gradient_checkpointing, value, lm.config.rms_norm_eps


def loaded_model(config: Config, place: Place) -> tuple[str, bool, float, float]:
    """Type, recomputation, a weight and an entry of the configuration of the model that is trained."""
    return _facts(load_model(config))


def loaded_critic(config: Config, place: Place) -> tuple[object, ...]:
    """Class, type, recomputation, a weight and an entry of the configuration of the critic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(place.root / "modules"))
        patch.setattr(sys, "path", list(sys.path))
        critic = load_critic(config, load_model(config))
    return type(critic.lm).__name__, *_facts(critic)


def modules_of_users(config: Config, place: Place) -> list[bool]:
    """Whether loading the policy, and its critic after that, has imported a user's module."""
    found, model = [], None
    for load in (load_model, load_critic) if config.has_critic else (load_model,):
        sys.modules.pop(USER_MODULE, None)
        model = load(config) if model is None else load(config, model)
        found.append(USER_MODULE in sys.modules)
    return found


def _with_code(place: Place) -> str:
    """A model whose class is in a file of its own directory."""
    path = place.tiny_model("own-critic", 3)
    code = "from transformers import Qwen3Model\n\nclass OwnModel(Qwen3Model):\n    pass\n"
    (path / "own_critic.py").write_text(code)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModel": "own_critic.OwnModel"}}))
    return str(path)


OTHER_MODEL = Made(lambda place: str(place.other_model))
watch(
    loaded_model,
    grpo,
    under("policy", model_gradient_checkpointing=(False, True), override_config=({}, {"rms_norm_eps": 0.1}))
    | {
        "train.master_dtype": ("float32", "bfloat16"),
        "policy.model_name_or_path": (Made(lambda place: str(place.model)), OTHER_MODEL),
    },
)
watch(
    loaded_critic,
    with_critic,
    under(
        "critic",
        master_dtype=("float32", "bfloat16"),
        override_config=({}, {"rms_norm_eps": 0.1}),
        model_gradient_checkpointing=(False, True),
        model_name_or_path=(UNSET, OTHER_MODEL),
    ),
)
own = changed(with_critic, under("critic", model_name_or_path=Made(_with_code)))
watch(loaded_critic, own, under("critic", trust_remote_code=(False, True)))
watch(modules_of_users, grpo, under("policy", external_modules=([], [USER_MODULE])))
watch(modules_of_users, with_critic, under("critic", external_modules=([], [USER_MODULE])))

# ---- what trains ----------------------------------------------------------------------------------------------


def _loaded_trainer(config: Config, place: Place) -> Trainer:
    """Return a trainer with the models as the configuration loads them."""
    random.seed(0)
    torch.manual_seed(0)
    model, critic = load_model(config), None
    if config.has_critic:
        values = load_critic(config, model)
        torch.nn.init.normal_(values.value_head)
        critic = Critic(values, config, place.group, Schedule.of_config(config.critic, 40))
    return Trainer(model, config, place.group, Schedule(10), critic=critic)


def weights_that_move(config: Config, place: Place) -> list[str]:
    """Which weights of the policy and of the critic, as they are loaded, two steps change."""
    trainer = _loaded_trainer(config, place)
    models = [trained.model for trained in trained_models(trainer)]
    before = [{name: p.detach().clone() for name, p in one.named_parameters()} for one in models]
    algorithm, _ = grpo_of(config, place, trainer=trainer)
    for step in range(2):
        train_step(algorithm, step)
    return [
        f"{type(one).__name__}.{name}"
        for one, old in zip(models, before, strict=True)
        for name, p in one.named_parameters()
        if not torch.equal(p, old[name])
    ]


def gradient_of_routed(config: Config, place: Place) -> dict[str, np.ndarray]:
    """The gradient of a mixture where samples bring the experts that their engine chose."""
    samples = with_experts(random_samples(12), 2, 4)
    algorithm, found = grpo_of(config, place, samples=samples, trainer=_loaded_trainer(config, place))
    metrics = train_step(algorithm, 0)
    return found | {"differs": np.array(metrics.get("routing/differs", -1.0))}


def adapters(config: Config, place: Place) -> dict[str, tuple[float, ...]]:
    """What trains in the policy, the critic and what their adapters add; by name, its size, sum and scale."""
    random.seed(0)
    torch.manual_seed(0)
    model, found = load_model(config), {}
    for one in [model, load_critic(config, model)] if config.has_critic else [model]:
        one.read_weights(torch.device("cpu"))
        for name, parameter in one.named_parameters():
            if parameter.requires_grad:
                total = float(parameter.detach().double().abs().sum())
                found[f"{type(one).__name__}.{name}"] = (*parameter.shape, total)
        for name, module in one.named_modules():
            if hasattr(module, "lora_A"):
                found[f"{type(one).__name__}.{name}"] = (module.scaling["default"],)
    return found


def loss_with_adapters(config: Config, place: Place) -> list[float]:
    """The loss of a step of the policy, or of its critic, whose adapters begin at random."""
    metrics = train_step(grpo_of(config, place, trainer=_loaded_trainer(config, place))[0], 0)
    return [metrics["loss"], metrics.get("critic/loss", 0.0)]


of_experts = changed(grpo, under("policy", model_name_or_path=EXPERTS))
watch(weights_that_move, grpo, under("policy", trainable_map=(UNSET, {"model.layers.0.mlp": False})))
watch(weights_that_move, of_experts, under("policy", freeze_moe_router=(False, True)))
critic_of_experts = changed(with_critic, under("policy", model_name_or_path=EXPERTS))
watch(weights_that_move, critic_of_experts, under("critic", freeze_moe_router=(False, True)))
for pair in (("none", "ids"), ("ids", "weights")):
    watch(gradient_of_routed, of_experts, policy(routing_replay=pair))
for section, job in (("policy", grpo), ("critic", with_critic)):
    with_adapters = changed(job, {f"{section}.lora": ADAPTERS})
    watch(
        adapters,
        with_adapters,
        under(
            f"{section}.lora",
            r=(4, 2),
            lora_alpha=(8.0, 4.0),
            target_modules=(["q_proj"], "all-linear"),
            use_rslora=(False, True),
            use_dora=(False, True),
            modules_to_save=(UNSET, ["norm"]),
            alpha_pattern=(UNSET, {".*q_proj": 2.0}),
            r_pattern=(UNSET, {r"layers\.0.*": 2}),
            init_lora_weights=(False, "pissa"),
        ),
    )
    watch(loss_with_adapters, with_adapters, under(f"{section}.lora", lora_dropout=(0.0, 0.5)))

# ---- what is refused ------------------------------------------------------------------------------------------


def nothing(config: Config, place: Place) -> dict[str, Any]:
    """What is refused before anybody reads it."""
    return config.critic.model_dump()


def _renamed_tokenizer(place: Place) -> str:
    """A tokenizer one of whose tokens is another than the policy's."""
    path = place.root / "renamed-tokenizer"
    if not path.exists():
        shutil.copytree(place.model, path)
        file = path / "tokenizer.json"
        file.write_text(file.read_text().replace("<|im_start|>", "<|begin|>"))
    return str(path)


renamed = under("critic", tokenizer_name_or_path=(UNSET, Made(_renamed_tokenizer)))
watch(nothing, with_critic, renamed, refused=True)
named = changed(with_critic, under("critic", model_name_or_path=OTHER_MODEL))
watch(nothing, named, under("critic", model_revision=(UNSET, "v2")), refused=True)

# ---- precision ------------------------------------------------------------------------------------------------


def sharding(config: Config, place: Place) -> list[tuple[str, str, bool]]:
    """How FSDP treats each module of the critic, or of the policy without one: type of parameters, type of the
    reduction, sharded after forward."""
    of_critic = config.has_critic
    model, keys = (tiny_critic(), config.critic) if of_critic else (tiny_model(), config.train)
    sharded = sharded_modules(apply_fsdp(model, place.group.mesh(), keys))
    return [
        (str(kept.mp_policy.param_dtype), str(kept.mp_policy.reduce_dtype), kept.post_forward_mesh_info is not None)
        for _, kept in sharded
    ]


for section, job in SECTIONS:
    types = under(section, param_dtype=("bfloat16", "float16"), fsdp_reduce_dtype=("float32", "bfloat16"))
    watch(sharding, job, types | under(section, fsdp_reshard_after_forward=("default", "never")))
