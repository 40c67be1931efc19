"""Adapters train next to a base that stays bit by bit, whatever they begin with; the reference is that beginning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from policy_worker import export_command
from policy_worker.checkpoints.layout import look, state_files
from policy_worker.checkpoints.storage import StateFiles
from policy_worker.errors import CheckpointError, SettingsError
from policy_worker.model import lora
from policy_worker.model.load import load_model, load_reference
from policy_worker.model.micro_batch import TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.frozen import EarlierPolicy
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from schema.config import Config
from schema.config.layout import reference_is_within
from schema.config.sections.policy import LoraConfig
from tests.policy_worker.checkpoint_material import load_state, save_state
from tests.policy_worker.material import (
    encode_step,
    export_whole,
    make_config,
    make_trainer,
    random_samples,
    tiny_experts,
    tiny_lm,
    train_step,
    write_model,
)
from weight_sync import hub_tensors

ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
FAST = {"optm_lr": 1e-2}
KL = {"kl_beta": 0.1}


def trained(
    group: RankGroup, config: Config, steps: int = 2, restored: Path | None = None
) -> tuple[Trainer, list[dict[str, float]]]:
    """The trainer of the models that the configuration names, after some steps, and their metrics.

    restored: a checkpoint to begin with.
    """
    torch.manual_seed(3)
    model = load_model(config)
    within = not config.has_reference or reference_is_within(config)
    reference = None if within else load_reference(config, model)
    trainer = make_trainer(config, group, model)
    if reference is not None:
        trainer.reference = reference.read_weights(group.device).requires_grad_(False).eval()
    samples = random_samples()
    source = BatchSource(
        group, lambda call: encode_step(samples, step=int(call.path.split("/")[3])), 1, config.staleness_bound
    )
    algorithm = Grpo(config, trainer, source)
    first = 0
    if restored is not None:
        load_state(trainer, restored, config)
        first = look(restored).step
    return trainer, [train_step(algorithm, step) for step in range(first, steps)]


def config_of(
    path: Path,
    adapters: dict[str, Any],
    grpo: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **more: Any,
) -> Config:
    policy = {"model_name_or_path": str(path), "lora": adapters, **more.pop("policy", {})}
    return make_config(grpo, {**FAST, **(train or {})}, policy=policy, **more)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in hub_tensors(trainer.model.lm)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


CASES: dict[str, dict[str, Any]] = {
    "everything": ALL,
    "their own choice": {"r": 2},
    "patterns": ALL | {"r_pattern": {r"layers\.0.*": 2}, "alpha_pattern": {"mlp.*": 3.0, "down_proj": 9.0}},
    "rank-stabilised": ALL | {"use_rslora": True, "init_lora_weights": "gaussian"},
    "decomposed": ALL | {"use_dora": True},
    "random": ALL | {"init_lora_weights": False},
    "whole norm": {"r": 2, "target_modules": r".*\.1\..*q_proj", "modules_to_save": ["model.norm"]},
    "pissa": ALL | {"init_lora_weights": "pissa"},
    "pissa in steps": ALL | {"init_lora_weights": "pissa_niter_4"},
    "olora": ALL | {"init_lora_weights": "olora"},
}
BEGINS_AT_THE_BASE = set(CASES) - {"random"}


@pytest.mark.parametrize("case", CASES)
def test_adapters_move_and_the_base_stays(path: Path, group: RankGroup, case: str):
    base = {name: tensor.clone() for name, tensor in hub_tensors(tiny_lm())}
    trainer, _ = trained(group, config_of(path, CASES[case]), steps=0)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    begins = weights(trainer)
    assert begins.keys() == base.keys()
    close = [torch.allclose(begins[name].cpu(), base[name], atol=1e-6) for name in base]
    assert all(close) == (case in BEGINS_AT_THE_BASE)
    trainer, metrics = trained(group, config_of(path, CASES[case]), steps=2)
    for name, parameter in trainer.model.named_parameters():
        learns = "lora_" in name or "modules_to_save" in name
        assert parameter.requires_grad == learns
        assert torch.equal(parameter, before[name]) != learns, name
    assert all(step["grad_norm"] > 0 for step in metrics)
    assert {id(p) for p in trainer.optimizer.parameters} == {
        id(p) for p in trainer.model.parameters() if p.requires_grad
    }


@pytest.mark.parametrize("case", CASES)
def test_ranks_and_scales_are_those_of_peft(case: str):
    lm, keys = tiny_lm(), LoraConfig(**CASES[case])
    lora.inject(lm, keys, "policy.lora")
    expected = get_peft_model(
        tiny_lm(),
        PeftConfig(
            task_type="CAUSAL_LM", r=keys.r, lora_alpha=keys.lora_alpha, target_modules=keys.target_modules,
            use_rslora=keys.use_rslora, use_dora=keys.use_dora,
            rank_pattern=keys.r_pattern or {}, alpha_pattern=keys.alpha_pattern or {},
            modules_to_save=keys.modules_to_save,
        ),
    ).get_base_model()  # fmt: skip
    theirs = dict(expected.named_modules())
    layers = {name: m for name, m in lm.named_modules() if hasattr(m, "lora_A")}
    assert layers.keys() == {name for name, m in theirs.items() if hasattr(m, "lora_A")}
    for name, layer in layers.items():
        assert (layer.r, layer.scaling) == (theirs[name].r, theirs[name].scaling), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_modules": ["q_prj", "v_proj"]}, r"target_modules: .*named 'q_prj'; nearest: q_proj"),
        ({"target_modules": ["input_layernorm"]}, "no linear layer or embedding named 'input_layernorm'"),
        ({"target_modules": "q_proj"}, r"'q_proj' matches the whole name of no linear layer"),
        ({"target_modules": ["lm_head"]}, r"the output layer .* policy\.lora\.modules_to_save"),
        ({"target_modules": ["embed_tokens"]}, r"tied \(model\.embed_tokens\.weight and lm_head\.weight are one"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: lm_head .* is tied"),
        ({"modules_to_save": ["nrom"]}, r"modules_to_save: .* no module named 'nrom'; nearest: norm"),
        ({"r_pattern": {"q": 2}}, r"r_pattern: `q` matches the end of no adapted module's name"),
        ({"alpha_pattern": {"mlp": 2.0}}, r"alpha_pattern: `mlp` matches"),
    ],
)
def test_names_of_nothing_are_refused(keys: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        lora.inject(tiny_lm(), LoraConfig(**keys), "policy.lora")


def test_rows_of_embeddings_have_no_lengths():
    keys = LoraConfig(target_modules=["embed_tokens", "q_proj"], use_dora=True)
    with pytest.raises(
        SettingsError, match=r"use_dora is for linear layers, and model\.embed_tokens of .* Embedding"
    ):
        lora.inject(tiny_lm(tie=False), keys, "policy.lora")


def test_of_a_mixture_of_experts_all_linear_layers_but_the_experts():
    with pytest.raises(SettingsError, match=r'of type qwen3_moe: write .* = "all-linear"'):
        lora.inject(tiny_experts(), LoraConfig(), "policy.lora")
    lm = tiny_experts()
    lora.inject(lm, LoraConfig(target_modules="all-linear"), "policy.lora")
    adapted = {name.rpartition(".")[2] for name, m in lm.named_modules() if hasattr(m, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_the_base_is_kept_in_the_type_it_computes_in(tmp_path: Path, group: RankGroup):
    tiny_lm(tie=False).save_pretrained(tmp_path)
    keys = ALL | {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]}
    trainer, metrics = trained(group, config_of(tmp_path, keys, KL, {"param_dtype": "bfloat16"}))
    types = {(p.dtype, p.requires_grad) for p in trainer.model.parameters()}
    assert types == {(torch.bfloat16, False), (torch.float32, True)}
    _, expected = trained(group, config_of(tmp_path, keys, KL))
    for name in ("loss", "grad_norm", "reference_kl"):
        assert metrics[1][name] == pytest.approx(expected[1][name], rel=0.1, abs=0.02), name


def test_recomputed_layers_give_the_same(path: Path, group: RankGroup):
    random = ALL | {"init_lora_weights": False}
    expected, _ = trained(group, config_of(path, random))
    recomputing = {"model_gradient_checkpointing": True}
    found, _ = trained(group, config_of(path, random, policy=recomputing))
    for name, tensor in weights(expected).items():
        assert torch.equal(tensor, weights(found)[name])


# ---- the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grpo", [KL, KL | {"kl_type": "full"}, {"kl_in_reward": {"beta": 0.1, "type": "full"}}])
@pytest.mark.parametrize("case", ["everything", "whole head", "pissa"])
def test_the_reference_within_the_policy_is_the_base(
    tmp_path: Path, group: RankGroup, case: str, grpo: dict[str, Any]
):
    tiny_lm(tie=False).save_pretrained(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "same")
    adapters = CASES[case] if case in CASES else ALL | {"modules_to_save": ["lm_head"]}
    within, metrics = trained(group, config_of(tmp_path / "model", adapters, grpo), steps=3)
    assert isinstance(within.reference, EarlierPolicy)
    apart = config_of(tmp_path / "model", adapters, grpo, reference={"model_name_or_path": str(tmp_path / "same")})
    other, expected = trained(group, apart, steps=3)
    exact = case != "pissa"  # whose base and first adapters add up to the model within rounding
    name = "reference_kl" if "kl_beta" in grpo else "loss"
    assert metrics[2][name] == pytest.approx(expected[2][name], rel=0 if exact else 1e-3, abs=0)
    for name, tensor in weights(other).items():
        assert torch.allclose(weights(within)[name], tensor, rtol=0, atol=0 if exact else 1e-5)


def test_a_reference_that_is_reset_is_the_policy_of_then(path: Path, group: RankGroup):
    config = config_of(path, ALL, KL | {"kl_type": "full", "reference_reset_interval": 2})
    _, metrics = trained(group, config, steps=3)
    assert metrics[1]["reference_kl"] > 1e-4
    assert metrics[2]["reference_kl"] == pytest.approx(0.0, abs=1e-9)


def test_adapters_that_begin_at_random_are_the_reference_as_they_begin(path: Path, group: RankGroup):
    _, metrics = trained(group, config_of(path, ALL | {"init_lora_weights": False}, KL), steps=2)
    assert metrics[0]["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics[1]["reference_kl"] > 0.0


def test_what_drops_out_does_so_in_training_steps_alone(path: Path, group: RankGroup):
    random = ALL | {"init_lora_weights": False}
    _, expected = trained(group, config_of(path, random), steps=1)
    torch.manual_seed(5)
    trainer, metrics = trained(group, config_of(path, random | {"lora_dropout": 0.5}), steps=1)
    assert metrics[0]["loss"] != expected[0]["loss"]
    samples = {row: TrainSample.of_wire(sample) for row, sample in enumerate(random_samples(2))}
    first, second = (trainer.score(trainer.model, samples, [[0, 1]])[0][0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(module.training for module in trainer.model.modules())


# ---- checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", ["decomposed", "pissa", "random", "whole norm"])
def test_a_run_goes_on_bit_for_bit_from_its_adapters(tmp_path: Path, path: Path, group: RankGroup, case: str):
    grpo = KL | {"kl_type": "full", "advantage_estimator": "gae"}
    config = config_of(path, CASES[case], grpo, {"ema_decay": 0.5}, critic={"lora": ALL})
    straight, metrics = trained(group, config, steps=4)
    half, _ = trained(group, config, steps=2)
    found = save_state(half, tmp_path / "saved", 2)
    assert found is not None
    again, later = trained(group, config, steps=4, restored=found.path)
    assert later == metrics[2:]
    assert straight.critic is not None
    assert again.critic is not None
    for one, other in ((again.model, straight.model), (again.critic.model, straight.critic.model)):
        for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b), name
    with StateFiles(state_files(found.path, "model")) as files:
        held = {name.removeprefix("model.") for name in files.tensors}
    taken = {name for name, _ in half.model.named_parameters() if case == "pissa" and "base_layer" in name}
    assert held == {name for name, p in half.model.named_parameters() if p.requires_grad} | taken


def test_adapters_of_another_base_are_refused(tmp_path: Path, path: Path, group: RankGroup):
    grpo = {"advantage_estimator": "gae"}
    trainer, _ = trained(group, config_of(path, ALL, grpo, critic={"lora": ALL}), steps=1)
    found = save_state(trainer, tmp_path / "saved", 1)
    assert found is not None
    other = write_model(tmp_path / "other", seed=7)
    with pytest.raises(CheckpointError, match=rf"adapters are of another base than policy.*{other}"):
        trained(group, config_of(other, ALL), restored=found.path)
    with pytest.raises(CheckpointError, match=r'in the type that it had \(train.param_dtype = "torch.bfloat16"'):
        trained(group, config_of(path, ALL, train={"param_dtype": "bfloat16"}), restored=found.path)
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_A.* is \(4, 32\) there and \(2, 32\) here"):
        trained(group, config_of(path, ALL | {"r": 2}), restored=found.path)
    with pytest.raises(CheckpointError, match=r"adapters as they were with \[policy\.lora\]"):
        trained(group, make_config(policy={"model_name_or_path": str(path)}), restored=found.path)


# ---- exports --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["decomposed", "whole norm", "embeddings", "pissa"])
def test_all_exports_are_one_and_peft_loads_the_adapter(tmp_path: Path, group: RankGroup, case: str):
    embeddings = {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]}
    lm = tiny_lm(tie=False)
    lm.save_pretrained(tmp_path / "model")
    config = config_of(tmp_path / "model", CASES.get(case, embeddings))
    trainer, _ = trained(group, config)
    export_whole(trainer, config, tmp_path / "final")
    found = save_state(trainer, tmp_path / "saved", 2, exports=config)
    assert found is not None
    assert not list(found.path.glob("base-*"))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    command = [str(found.path), str(tmp_path / "offline"), "--config", str(tmp_path / "config.json")]
    assert export_command.main(command) == 0
    expected = {path.relative_to(tmp_path / "final"): path.read_bytes() for path in (tmp_path / "final").rglob("*.*")}
    for directory in (found.path / "export", tmp_path / "offline"):
        files = {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*.*")}
        assert files == expected
    ids = torch.arange(1, 20)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)(ids).logits
    assert torch.allclose(merged, trainer.model.lm(ids.to(group.device)).logits.cpu(), atol=1e-5)
    assert not torch.allclose(merged, lm(ids).logits, atol=1e-3)
    assert (tmp_path / "final" / "adapter").exists() == (case != "pissa")
    if case != "pissa":
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, tmp_path / "final" / "adapter")
        assert torch.allclose(merged, loaded(input_ids=ids).logits, atol=1e-5)
        facts = json.loads((tmp_path / "final" / "adapter" / "adapter_config.json").read_text())
        assert facts["base_model_name_or_path"] == str(tmp_path / "model")


def test_adapters_are_not_merged_into_another_base(
    tmp_path: Path, path: Path, group: RankGroup, capsys: pytest.CaptureFixture[str]
):
    config = config_of(path, ALL)
    trainer, _ = trained(group, config, steps=1)
    found = save_state(trainer, tmp_path / "saved", 1)
    assert found is not None
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    command = [str(found.path), str(tmp_path / "out"), "--config", str(tmp_path / "config.json")]
    other = write_model(tmp_path / "other", seed=7)
    assert export_command.main([*command, "--model", str(other)]) == 2
    assert f"of another base than policy.model_name_or_path = '{other}'" in capsys.readouterr().err
    tiny_lm(layers=1).save_pretrained(tmp_path / "short")
    assert export_command.main([*command, "--model", str(tmp_path / "short")]) == 2
    assert "adapters of another model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
