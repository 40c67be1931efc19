"""Training in float16: the scale of the loss, steps that overflow, and every way to cut a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policy_worker.checkpoints.layout import look
from policy_worker.errors import NonFiniteGradientError
from policy_worker.model.micro_batch import Segment, TrainSample
from policy_worker.parallel import loss_scale
from policy_worker.parallel.loss_scale import FIRST, LossScaler
from policy_worker.parallel.rank_group import RankGroup
from tests.policy_worker.material import make_trainer, sft_config, tiny_lm, train_step
from tests.policy_worker.parallel.test_ranks import GRPO, assert_equal, gradients, run_each, run_here
from tests.policy_worker.ranks import start_ranks, wait_ranks
from tests.policy_worker.training.test_sft import make_sft, write_rows

FLOAT16 = {"param_dtype": "float16"}
CLOSE = 0.02
"""Float16 has 11 bits; largest difference of a gradient from that in float32, as a part of its largest entry."""
OVERFLOWING = 2.0**40
"""A scale at which gradients of the tiny models are beyond 65504."""


def test_the_scale_follows_the_rule_of_torch(group: RankGroup, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss_scale, "STEADY", 3)
    ours, theirs = LossScaler(group, "train.param_dtype"), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for gradient in (1.0, 1.0, 1.0, 1.0, math.inf, 1.0, math.nan, -math.inf, *[1.0] * 7):
        weight.grad = torch.tensor([gradient])
        before = weight.item()
        theirs.scale(torch.zeros(1))
        theirs.step(optimizer)
        theirs.update()
        assert ours.skips(abs(gradient)) == (weight.item() == before)
        assert ours.scale == theirs.get_scale()
    assert ours.metrics() == {"loss_scale": ours.scale, "skipped_steps": 3.0}
    assert ours.metrics()["skipped_steps"] == 0.0, "since it was asked last"


def test_gradients_are_divided_exactly_before_they_are_clipped(group: RankGroup):
    found = [run_here(group, grpo=GRPO, train=FLOAT16, scales=[scale]) for scale in (2.0**10, 2.0**14)]
    (small, once), (large, again) = found
    assert once[0]["grad_norm"] > 0.5, "it is clipped"
    assert once[0]["grad_norm"] == pytest.approx(again[0]["grad_norm"], rel=1e-3)
    assert_equal(gradients(large), gradients(small), CLOSE)
    total = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(small).values()))
    assert total == pytest.approx(0.5, rel=1e-3)


def test_a_stage_in_which_nothing_trains_has_nothing_to_divide(group: RankGroup):
    LossScaler(group, "train.param_dtype").unscale([torch.nn.Parameter(torch.ones(2))])


def test_what_is_kept_in_host_memory_is_scaled_and_skipped_alike(group: RankGroup):
    """A step that is made and one that overflows, with gradients and state elsewhere in between."""
    away = {"fsdp_gradient_offload": True, "optimizer_offload": True, "overlap_grad_reduce": False}
    for scale, keys in ((2.0**10, away), (OVERFLOWING, away), (2.0**10, {"fsdp_offload": True})):
        expected, there = run_here(group, scales=[scale], grpo=GRPO, train=FLOAT16, steps=2)
        found, metrics = run_here(group, scales=[scale], grpo=GRPO, train=FLOAT16 | keys, steps=2)
        assert_equal(found, expected, 0.0)
        assert [one["skipped_steps"] for one in metrics] == [one["skipped_steps"] for one in there]


def test_a_step_that_overflows_changes_nothing_but_the_scale(group: RankGroup):
    options: dict[str, Any] = {"grpo": GRPO | {"mu_iterations": 3}, "train": FLOAT16 | {"ema_decay": 0.5}}
    tensors, metrics = run_here(group, scales=[OVERFLOWING], steps=1, **options)
    start = tiny_lm().state_dict()
    assert all(torch.equal(tensors[name].to(start[name]), start[name]) for name in tensors)
    assert metrics[0]["loss_scale"] == OVERFLOWING / 8
    assert (metrics[0]["skipped_steps"], metrics[0]["optimizer_steps"]) == (3.0, 0.0)
    assert "grad_norm" not in metrics[0]


def test_some_of_a_steps_optimizer_steps_may_overflow(group: RankGroup):
    """With the scale that the first of them leaves, the others are those of a run that begins with it."""
    fitting = OVERFLOWING
    options: dict[str, Any] = {"grpo": GRPO | {"mu_iterations": 3}, "train": FLOAT16}
    while run_here(group, scales=[fitting], **options)[1][0]["skipped_steps"]:
        fitting /= 2
    _, (metrics,) = run_here(group, scales=[fitting * 2], **options)
    assert metrics["loss_scale"] == fitting
    assert (metrics["skipped_steps"], metrics["optimizer_steps"]) == (1.0, 2.0)
    assert math.isfinite(metrics["grad_norm"])


def test_a_model_that_is_beyond_float16_is_an_error(group: RankGroup):
    scaler = LossScaler(group, "critic.param_dtype")
    scaler.state = 2.0, 0
    assert scaler.skips(math.nan)
    with pytest.raises(NonFiniteGradientError, match=r'loss scale of 1.*critic.param_dtype = "bfloat16"'):
        scaler.skips(math.inf)


def test_policy_and_critic_have_scales_of_their_own(group: RankGroup):
    options: dict[str, Any] = {"grpo": {"advantage_estimator": "gae"}, "train": FLOAT16}
    before, _ = run_here(group, grpo={"advantage_estimator": "gae", "mu_iterations": 1}, train={"optm_lr": 0.0})
    tensors, (metrics,) = run_here(group, scales=[1024.0, OVERFLOWING], **options)
    assert (metrics["loss_scale"], metrics["critic/loss_scale"]) == (1024.0, OVERFLOWING / 2)
    assert (metrics["skipped_steps"], metrics["critic/skipped_steps"]) == (0.0, 1.0)
    names = [name for name in tensors if not name.startswith("grad.")]
    moved = {name for name in names if not torch.equal(tensors[name], before[name])}
    assert moved == {name for name in names if not name.startswith("critic.")}


@pytest.mark.usefixtures("deterministic")
def test_the_scale_is_restored(tmp_path: Path, group: RankGroup):
    options: dict[str, Any] = {"grpo": {"advantage_estimator": "gae"}, "train": FLOAT16}
    scales = [OVERFLOWING, OVERFLOWING / 4]
    straight, metrics = run_here(group, scales=scales, steps=4, **options)
    assert [one["skipped_steps"] for one in metrics] == [1.0] * 4
    run_here(group, scales=scales, steps=2, save=str(tmp_path), save_step=2, **options)
    state = tmp_path / "step-00000002"
    saved = {"policy": (OVERFLOWING / 4, 0), "critic": (OVERFLOWING / 16, 0)}
    assert look(state).manifest.loss_scales == saved
    again, later = run_here(group, first_step=2, steps=4, restore=str(state), **options)
    assert later == metrics[2:]
    assert_equal(again, straight, 0.0)
    _, anew = run_here(group, first_step=2, steps=3, restore=str(state), grpo=options["grpo"])
    assert "loss_scale" not in anew[0], "without float16 there is none"


def test_supervised_training_in_float16(tmp_path: Path, group: RankGroup):
    write_rows(tmp_path / "data")
    exact, found = (
        train_step(make_sft(group, tmp_path / "data", param_dtype=dtype), 0) for dtype in ("float32", "float16")
    )
    assert found["loss"] == pytest.approx(exact["loss"], rel=1e-3)
    assert found["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.01)
    assert (found["loss_scale"], found["skipped_steps"]) == (FIRST, 0.0)


def test_small_gradients_live_on_with_a_scale_and_vanish_without(group: RankGroup):
    """A loss of 1e-6 has gradients that float16 does not have."""
    found = {}
    for scale in (1.0, FIRST):
        trainer = make_trainer(sft_config(train=FLOAT16), group)
        trainer.scaler.state = scale, 0
        sample = TrainSample([Segment(np.arange(3, 11), np.ones(8, np.uint8), None)])
        trainer.learn({0: sample}, [[0]], lambda _, out: 1e-6 * out.logprobs.mean())
        trainer.scaler.unscale(trainer.optimizer.parameters)
        gradient = trainer.model.lm.model.layers[0].mlp.up_proj.weight.grad.full_tensor()
        found[scale] = float((gradient != 0).float().mean())
    assert found[1.0] < 0.5
    assert found[FIRST] > 0.95


LORA: dict[str, Any] = {"policy": {"lora": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}}}
MESHES = [
    ({"dp_shard": 2}, [{"sections": LORA}, {"train": FLOAT16 | {"fsdp_reduce_dtype": "float16"}}]),
    ({"tp": 2}, [{"grpo": GRPO | {"advantage_estimator": "gae"}}, {"sections": LORA}]),
    pytest.param({"tp": 2, "sequence": True}, [{}], marks=pytest.mark.soak),
    pytest.param({"cp": 2}, [{"grpo": GRPO | {"kl_beta": 0.1}}], marks=pytest.mark.soak),
    ({"pp": 2}, [{"grpo": GRPO | {"advantage_estimator": "gae"}}]),
    pytest.param({"dp_shard": 2, "ep": 2}, [{"model": {"family": "qwen3_moe"}}], marks=pytest.mark.soak),
]


@pytest.mark.slow
def test_a_rank_skips_what_another_one_cannot_make(tmp_path: Path):
    program = "tests.policy_worker.parallel.skip_program"
    for code, output in wait_ranks(start_ranks(2, [program, str(tmp_path)])):
        assert code == 0, output
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "cases"), MESHES, ids=str)
def test_ranks_compute_in_float16_and_skip_alike(
    tmp_path: Path, group: RankGroup, mesh: dict[str, Any], cases: list[dict[str, Any]]
):
    """Gradients are those of float32 up to rounding; from a scale that overflows, all ranks find the same one."""
    plain: dict[str, Any] = {
        "samples": {"n": 9, "n_masked": 1},
        "grpo": GRPO,
        "train": FLOAT16,
        "scales": [1024.0] * 2,
    }
    finds = {"scales": [OVERFLOWING] * 2, "grpo": GRPO | {"mu_iterations": 30}}
    runs = [plain | case for case in cases]
    cases = [{"mesh": mesh} | run for run in [*runs, plain | cases[-1] | finds]]
    *found, (_, (metrics,)) = run_each(tmp_path / "2", 2, cases)
    for run, (tensors, _) in zip(runs, found, strict=True):
        exact, _ = run_here(group, **run | {"train": {}})
        assert_equal(gradients(tensors), gradients(exact), CLOSE)
    assert 0 < metrics["skipped_steps"] < 30
    assert metrics["loss_scale"] == OVERFLOWING / 2 ** metrics["skipped_steps"]
