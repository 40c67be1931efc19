"""The same batch on one, two and three real ranks: equal loss, gradients and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from policy_worker.errors import SettingsError
from policy_worker.model.model import PolicyModel
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from tests.policy_worker.checkpoint_material import load_state
from tests.policy_worker.material import make_config, tiny_lm
from tests.policy_worker.rank_program import Result, train
from tests.policy_worker.ranks import start_ranks, wait_ranks
from tests.policy_worker.training.cases import algorithm, cut
from tests.support.devices import rounding
from tests.support.effort import examples
from tests.support.teacher_server import SERVED, teacher_server

SAMPLES = {"n": 9, "n_masked": 1}
GRPO = {"mini_batch": 2, "entropy_coeff": 0.02, "positive_nll_coef": 0.1}
EVERYTHING = {
    "advantage_estimator": "reinforce_plus_plus",
    "gamma": 0.9,
    "kl_beta": 0.1,
    "kl_type": "full",
    "kl_in_reward": {"beta": 0.1},
    "use_decoupled_loss": True,
    "rollout_correction": {"reject": "sequence", "reject_above": 1.2, "off_policy_mask": 0.05},
    "min_filter_prefix_tokens": 2,
}
"""Passes over all samples before training, sums over all ranks for advantages, and masks by groups."""

TEACHERS = [
    {"name": "a", "model": "unused", "loss": "reverse_kl_full", "source": ["math"], "offload": True},
    {"name": "b", "model": "unused", "loss": "top_k_jsd", "top_k": 5},
    {"name": "c", "model": "unused", "source": ["code"], "mini_batch": 1},
]
"""One for each way to teach: states and a head, likeliest tokens, log-probs; sharded like the policy."""


def run(directory: Path, world: int, **options: Any) -> Result:
    _start(directory, world, {"samples": SAMPLES, **options})
    return _result(directory)


def run_each(directory: Path, world: int, cases: list[dict[str, Any]]) -> list[Result]:
    """The same of several batches, one after the other in the same processes."""
    _start(directory, world, cases)
    return [_result(directory / str(number)) for number in range(len(cases))]


def _start(directory: Path, world: int, options: Any) -> None:
    directory.mkdir()
    arguments = ["tests.policy_worker.rank_program", str(directory), json.dumps(options)]
    for code, output in wait_ranks(start_ranks(world, arguments)):
        assert code == 0, output


def _result(directory: Path) -> Result:
    """Of all stages; what two of them have is bit for bit the same."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("tensors-*.safetensors")):
        for name, tensor in load_file(path).items():
            assert torch.equal(tensors.setdefault(name, tensor), tensor), name
    return tensors, json.loads((directory / "metrics.json").read_text())


def run_here(group: RankGroup, **options: Any) -> Result:
    return train(group, {"samples": SAMPLES, **options})


def gradients(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("grad.")}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = tensor.abs().max().item()
        assert (found[name] - tensor).abs().max().item() <= rounding(tolerance) * scale, name


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path, group: RankGroup):
    # samples of versions 0 to 3 in turn, at step 3
    old: dict[str, Any] = {"samples": {**SAMPLES, "version": [0, 1, 2, 3] * 2 + [0]}, "first_step": 3, "steps": 4}
    grpo = {**GRPO, "allowed_outdated_steps": 3}
    # the store loses payloads, and then a batch, under the ranks: they ask again, all of them
    answers = {"0": ["whole", "anew"], "1": ["gone"]}
    parted = {"grpo": grpo | {"balance_dp_token": True}, "answers": answers, **old}
    # one layer stays whole, the other in part; the embeddings are of the rest of the model
    chosen = {"model.layers.0": False, "model.layers.1.mlp": False, "model.embed_tokens": False}
    frozen: dict[str, Any] = {"samples": SAMPLES, "sections": {"policy": {"trainable_map": chosen}}, "steps": 2}
    (tensors, metrics), (some, later) = run_each(tmp_path / "2", 2, [parted, frozen])
    alone, expected = train(group, {"grpo": grpo, **old})
    assert_equal(gradients(tensors), gradients(alone), 2e-6)
    assert_equal(tensors, alone, 2e-5)
    for name in ("loss", "grad_norm", "entropy", "behaviour_kl", "ratio_max", "clip_fraction"):
        assert metrics[0][name] == pytest.approx(expected[0][name], rel=rounding(2e-5)), name
    ages = {name: value for name, value in expected[0].items() if name.startswith("staleness")}
    assert all(ages[f"staleness_tokens/{age}"] > 0 for age in range(4))
    assert ages.items() <= metrics[0].items()

    alone, expected = train(group, frozen)
    names = [name for name in gradients(alone) if ".layers." in name]
    assert names
    assert all(".layers.1." in name and ".mlp." not in name for name in names)
    assert_equal(gradients(some), gradients(alone), 2e-5)
    assert_equal(some, alone, 2e-5)
    stays = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(some[stays], tiny_lm().state_dict()[stays])
    assert later[1]["grad_norm"] == pytest.approx(expected[1]["grad_norm"], rel=rounding(2e-5))


def drawn(random: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """An algorithm with samples, computed in one piece, and the same in another cut."""
    grpo, (size, train) = algorithm(random), cut(random)
    samples = {"n": 12, "seed": random.randrange(99), "n_masked": random.choice([0, 1, 3])}
    whole = {"grpo": grpo | {"mini_batch": 12}, "train": {"metrics_of_all_samples": True}, "samples": samples}
    return whole, {"grpo": grpo | size, "train": train, "samples": samples}


def with_penalties() -> tuple[dict[str, Any], dict[str, Any]]:
    """A step whose samples were drawn under penalties, with a reference model, and the same in another cut."""
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.1}
    rollout = {"n_generation": 4, "parallelism": {"tp_size": 1}, "sampling_config": penalties}
    grpo = {"kl_beta": 0.1, "kl_type": "full", "entropy_coeff": 0.02}
    whole = {"grpo": grpo, "samples": SAMPLES, "sections": {"rollout": rollout}}
    return whole, whole | {"grpo": grpo | {"mini_batch": 1}, "train": {"sequence_packing": True}}


def with_critic() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two steps with a critic whose mini-batches are others than the policy's, and the same in another cut.

    Shuffled passes deal rows to several ranks, and advantages are whitened over all."""
    grpo = {"advantage_estimator": "gae", "gae_lambda": 0.9, "batch_size_per_optimize": 4, "mu_iterations": 2}
    grpo |= {"mini_batch_shuffle": True, "kl_in_reward": {"beta": 0.1}, "min_filter_prefix_tokens": 2}
    critic = {"batch_size_per_optimize": 3, "mini_batch_shuffle": True}
    whole = {"grpo": grpo, "steps": 2, "samples": SAMPLES, "sections": {"critic": critic}}
    size = {"mini_batch": 1, "balance_dp_token": True}
    return whole, whole | {"grpo": grpo | size, "sections": {"critic": critic | {"mini_batch": 1}}}


def more_ranks_than_samples() -> tuple[dict[str, Any], dict[str, Any]]:
    """Some of which train on nothing, over several steps of two optimizer steps each."""
    whole = {"samples": {"n": 2}, "grpo": {"batch_size_per_optimize": 1}, "steps": 3}
    return whole, whole | {"train": {"optm_impl": "fused", "fsdp_reshard_after_forward": "always"}}


@pytest.fixture
def far() -> Iterator[dict[str, Any]]:
    """A teacher on a server, which each rank asks for its own samples."""
    with teacher_server(tiny_lm(seed=9)) as server:
        yield {"name": "d", "url": server.url, "served_model": SERVED, "loss": "reverse_kl_k2"}


@pytest.mark.slow
@pytest.mark.scaled
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_several_ranks_equal_one_whatever_the_algorithm(
    tmp_path: Path, group: RankGroup, world: int, far: dict[str, Any]
):
    # the first with passes over all samples, empty micro-batches, packed, and guessed ahead
    random, size = Random(world), {"max_token_len_per_mini_batch": 25}
    whole = {"grpo": GRPO | EVERYTHING, "samples": SAMPLES, "steps": 2}
    parted = whole | {"grpo": GRPO | EVERYTHING | size, "train": {"sequence_packing": True}, "ahead": "partly"}
    taught = whole | {"sections": {"teacher": [*TEACHERS, far]}, "steps": 1}
    pairs = [
        (whole, parted),
        (taught, parted | {"sections": taught["sections"], "steps": 1}),
        with_critic(),
        with_penalties(),
        more_ranks_than_samples(),
        *(drawn(random) for _ in range(examples(6))),
    ]
    found = run_each(tmp_path / "ranks", world, [parted for _, parted in pairs])
    for (whole, parted), (tensors, metrics) in zip(pairs, found, strict=True):
        alone, expected = train(group, whole)
        assert gradients(tensors).keys() == gradients(alone).keys(), parted
        for name, gradient in gradients(alone).items():
            scale = max(gradient.abs().max().item(), 0.05)
            assert (tensors[name] - gradient).abs().max().item() <= rounding(3e-5) * scale, (name, parted)
        assert ("loss" in metrics[-1]) == ("loss" in expected[-1]), parted
        if "loss" in expected[-1]:  # else no token counts, and a critic alone has learned
            loss = pytest.approx(expected[-1]["loss"], rel=rounding(1e-4), abs=1e-6)
            assert metrics[-1]["loss"] == loss, parted
        else:
            assert all(name.startswith("grad.critic.") for name in gradients(alone)), parted
    assert 0.0 < found[0][1][1]["ahead_fraction"] < 1.0


@pytest.mark.usefixtures("deterministic")
def test_whatever_is_guessed_of_the_next_batch_the_step_is_the_same(group: RankGroup):
    expected, metrics = run_here(group, grpo=GRPO, steps=3)
    assert [step["ahead_fraction"] for step in metrics] == [0.0, 0.0, 0.0]
    taken = {}
    for guess in ("right", "partly", "wrong"):
        found, metrics = run_here(group, grpo=GRPO, steps=3, ahead=guess)
        assert_equal(found, expected, 0.0)
        taken[guess] = [step["ahead_fraction"] for step in metrics]
    assert (taken["right"], taken["wrong"]) == ([0.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    assert all(0.0 < part < 1.0 for part in taken["partly"][1:])


@pytest.mark.slow
def test_two_copies_of_units_of_two_ranks_equal_one_rank(tmp_path: Path, group: RankGroup):
    # ranks 0 and 2 lead
    alone, expected = run_here(group, grpo=GRPO | EVERYTHING)
    mesh, answers = {"dp_replicate": 2, "cp": 2}, {"0": ["whole", "anew"], "2": ["gone"]}
    tensors, metrics = run(tmp_path / "4", 4, mesh=mesh, grpo=GRPO | EVERYTHING, answers=answers)
    assert_equal(gradients(tensors), gradients(alone), 2e-6)
    del expected[0]["shared_fraction"]  # the samples of a group may be on different ranks
    for name, value in expected[0].items():
        assert metrics[0][name] == pytest.approx(value, rel=rounding(2e-5), abs=1e-7), name


@pytest.mark.slow
def test_two_copies_of_two_shards_are_saved_once_and_go_on_anywhere(tmp_path: Path, group: RankGroup):
    train = {"optm_lr": 1e-2, "optm_warmup_steps": 0}
    options: dict[str, Any] = {"grpo": GRPO | {"advantage_estimator": "gae"}, "train": train}
    expected, _ = run_here(group, steps=3, **options)
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    saved = {"save": str(tmp_path / "s"), "save_step": 2, "staged": True}
    run(tmp_path / "4", 4, mesh=mesh, steps=2, **saved, **options)
    state = tmp_path / "s" / "step-00000002"
    of_model = [load_file(path) for path in sorted(state.glob("model-*.safetensors"))]
    assert [bool(pieces) for pieces in of_model] == [True, True, False, False]
    assert not of_model[0].keys() & of_model[1].keys()
    found, _ = run_here(group, first_step=2, steps=3, restore=str(state), **options)
    assert_equal(found, expected, 1e-4)
    found, _ = run(tmp_path / "3", 3, first_step=2, steps=3, restore=str(state), **options)
    assert_equal(found, expected, 1e-4)


def test_bfloat16_parameters_and_float32_masters(group: RankGroup):
    alone, expected = run_here(group, grpo=GRPO)
    tensors, metrics = run_here(group, grpo=GRPO, train={"param_dtype": "bfloat16"})
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert metrics[0]["loss"] == pytest.approx(expected[0]["loss"], rel=0.1, abs=0.02)
    assert metrics[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.1)
    assert any(not torch.equal(tensors[name], alone[name]) for name in tensors)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "train",
    [{"optm_impl": "fused"}, *({"optm_impl": "foreach", "param_dtype": dtype} for dtype in ("bfloat16", "float16"))],
    ids=str,
)
def test_state_restores_bit_for_bit(tmp_path: Path, group: RankGroup, train: dict[str, Any]):
    straight, _ = run_here(group, train=train, steps=4)
    run_here(group, train=train, steps=2, save=str(tmp_path / "s"))
    again, _ = run_here(group, train=train, first_step=2, steps=4, restore=str(tmp_path / "s" / "step-00000000"))
    assert_equal(again, straight, 0.0)


@pytest.mark.usefixtures("deterministic")
def test_a_critic_is_restored_bit_for_bit(tmp_path: Path, group: RankGroup):
    options: dict[str, Any] = {"grpo": {"advantage_estimator": "gae"}}
    straight, metrics = run_here(group, steps=4, **options)
    assert any(name.startswith("critic.") for name in straight)
    run_here(group, steps=2, save=str(tmp_path / "s"), save_step=2, **options)
    state = str(tmp_path / "s" / "step-00000002")
    again, later = run_here(group, first_step=2, steps=4, restore=state, **options)
    assert later == metrics[2:]
    assert_equal(again, straight, 0.0)
    # a checkpoint without a critic: it begins anew, the policy goes on
    run_here(group, steps=2, save=str(tmp_path / "plain"), save_step=2)
    run_here(group, first_step=2, steps=3, restore=str(tmp_path / "plain" / "step-00000002"), **options)


@pytest.mark.usefixtures("deterministic")
def test_a_reference_that_was_reset_and_a_kl_that_adapted_are_restored(tmp_path: Path, group: RankGroup):
    term = {"beta": 0.1, "controller": "adaptive", "target": 1e-3, "horizon": 50}
    options: dict[str, Any] = {
        "grpo": {"kl_beta": 0.1, "kl_in_reward": term, "reference_reset_interval": 3},
        "train": {"optm_lr": 1e-2, "optm_warmup_steps": 0},
    }
    straight, metrics = run_here(group, steps=5, **options)
    assert len({step["kl_coefficient"] for step in metrics}) == 5
    assert metrics[3]["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics[2]["reference_kl"] > 1e-3
    run_here(group, steps=4, save=str(tmp_path / "s"), save_step=4, **options)
    state = str(tmp_path / "s" / "step-00000004")
    again, later = run_here(group, first_step=4, steps=5, restore=state, **options)
    assert later == metrics[4:]
    assert_equal(again, straight, 0.0)


def test_an_offloaded_reference_gives_the_same(group: RankGroup):
    expected, _ = run_here(group, grpo=GRPO | {"kl_beta": 0.1})
    found, _ = run_here(group, grpo=GRPO | {"kl_beta": 0.1}, sections={"reference": {"offload": True}})
    assert_equal(found, expected, 1e-7)


@pytest.mark.slow
def test_roles_on_devices_of_their_own_equal_those_on_the_policys(tmp_path: Path, group: RankGroup):
    """The reference is whole there; what was saved by two ranks goes on here, with devices of its own and without."""
    policy = {"parallelism": {"dp_shard_size": 2}}
    of_critic = {"policy": [0, 1], "reference": [2, 3], "critic": [4, 5]}
    cases: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (
            3,
            {
                "grpo": GRPO | {"kl_beta": 0.1, "kl_type": "full", "reference_reset_interval": 2},
                "train": {"optm_lr": 1e-2, "optm_warmup_steps": 0},
            },
            {"placement": {"policy": [0, 1], "reference": [2, 3]}, "policy": policy},
        ),
        (2, {"grpo": {"advantage_estimator": "gae", "kl_beta": 0.1}}, {"placement": of_critic, "policy": policy}),
    ]
    saves = [
        {"samples": SAMPLES, "steps": at, "sections": apart, "save": str(tmp_path / f"s{at}"), "save_step": at}
        for at, _, apart in cases
    ]
    saves = [save | options for save, (_, options, _) in zip(saves, cases, strict=True)]
    run_each(tmp_path / "2", 2, saves)
    for at, options, apart in cases:
        expected, metrics = run_here(group, steps=at + 1, **options)
        state = str(tmp_path / f"s{at}" / f"step-0000000{at}")
        for sections in (apart, {}):
            found, later = run_here(group, first_step=at, steps=at + 1, restore=state, sections=sections, **options)
            assert later[0]["reference_kl"] == pytest.approx(metrics[at]["reference_kl"], rel=1e-3)
            assert_equal(found, expected, 1e-4)


def test_state_of_another_model_is_refused(tmp_path: Path, group: RankGroup):
    run_here(group, steps=1, save=str(tmp_path / "s"))
    lm = tiny_lm(layers=3)
    trainer = Trainer(PolicyModel(lm), make_config(), group, Schedule(10))
    with pytest.raises(SettingsError, match="cannot be resumed: its model is another one"):
        load_state(trainer, tmp_path / "s" / "step-00000000", make_config())
