"""Whichever way a model is cut, loss, gradients and weights are those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from policy_worker.checkpoints.layout import look, state_files
from policy_worker.checkpoints.storage import StateFiles
from policy_worker.model.model import PolicyModel
from policy_worker.parallel.experts import apply_ep
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.parallel.rank_group import RankGroup
from tests.policy_worker.material import tiny_family, write_model
from tests.policy_worker.parallel.test_ranks import (
    EVERYTHING,
    GRPO,
    SAMPLES,
    TEACHERS,
    assert_equal,
    gradients,
    run_each,
    with_critic,
    with_penalties,
)
from tests.policy_worker.rank_program import Result, train
from tests.support.devices import rounding

FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3", "qwen3_moe")

GRADIENTS, EXACT = 5e-6, 1e-10
"""Largest difference, as a part of the largest entry: in float32, and in float64 after three steps."""


IN_STEPS: dict[str, Any] = {"exact": True, "steps": 3, "grpo": GRPO}
TWELVE = {"samples": {"n": 12}}


def model(family: str, *, tie: bool = True) -> dict[str, Any]:
    return {"model": {"family": family, "tie": tie}}


def everything() -> list[dict[str, Any]]:
    """Each thing that a step may do, with another family each; with the answers that ranks of a unit may get.

    In float64 where rounding would add up over steps.
    """
    several = {"steps": 2, "grpo": GRPO | EVERYTHING | {"mu_iterations": 2}}
    taught = {"grpo": GRPO | EVERYTHING, "sections": {"teacher": TEACHERS}, "train": {"sequence_packing": True}}
    few = {"samples": {"n": 2}, "grpo": {"batch_size_per_optimize": 1, "entropy_coeff": 0.1}}
    return [
        model("phi3", tie=False) | several | {"exact": True, "answers": {"0": ["gone", "anew"]}},
        model("gemma3_text") | with_critic()[1] | {"exact": True},
        model("qwen3_moe") | taught | {"grpo": taught["grpo"] | {"routing_replay": "ids"}, "exact": True},
        model("qwen3", tie=False) | with_penalties()[1],
        model("qwen3") | few | {"exact": True},
    ]


def assert_one(
    directory: Path, group: RankGroup, world: int, mesh: dict[str, int], cases: list[dict[str, Any]]
) -> None:
    """Ranks of a mesh come to what one process does: gradients, or weights of cases that are exact; and metrics."""
    cases = [{"samples": SAMPLES} | case for case in cases]
    found = run_each(directory, world, [{"mesh": mesh} | case for case in cases])
    for case, (tensors, metrics) in zip(cases, found, strict=True):
        alone, expected = train(group, {**case, "answers": {}})
        if case.get("exact"):
            assert_equal(tensors, alone, EXACT)
        else:
            assert_equal(gradients(tensors), gradients(alone), GRADIENTS)
        critic = [name for name in expected[0] if name.startswith("critic/")]
        for name in ("loss", "grad_norm", "entropy", *critic):
            assert metrics[0][name] == pytest.approx(expected[0][name], rel=rounding(2e-5), abs=1e-6), name
        differs = "routing/differs"  # prompts that are there once count once, and another mesh shares others
        assert metrics[0].get(differs, 0.0) == pytest.approx(expected[0].get(differs, 0.0), rel=0.1)


@pytest.mark.slow
def test_two_ranks_that_share_layers_equal_one(tmp_path: Path, group: RankGroup):
    exact = model("llama") | IN_STEPS
    unplanned = exact | model("glm4_moe")  # norms of queries and keys that its plan does not name
    assert_one(tmp_path / "2", group, 2, {"tp": 2}, [*everything(), exact, unplanned])


def overlapped(family: str, *, again: bool) -> dict[str, Any]:
    """A mixture whose shared experts compute while tokens travel. again: its layers are computed again."""
    keys = {"moe_shared_expert_overlap": True, "model_gradient_checkpointing": again}
    return model(family) | {"sections": {"policy": keys}}


SPLIT: dict[str, Any] = {"tp": 2, "sequence": True}
"""Positions between layers are, too."""


REPLAYED = {"routing_replay": "weights"}
"""Tokens go to the experts that the engine chose."""


def split() -> list[dict[str, Any]]:
    """Each family; both ways to reach experts, without and with shared ones; layers that are computed again, adapters
    and a critic, and copies in the middle of a layer (OLMo 2)."""
    again = {"model_gradient_checkpointing": True, "moe_token_dispatcher": "allgather"}
    lora = {"policy": {"lora": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}}}
    taught = {"grpo": GRPO | EVERYTHING, "train": {"sequence_packing": True}}
    return [
        model("llama") | IN_STEPS | {"train": {"sequence_packing": True}},
        model("olmo2", tie=False) | IN_STEPS | {"sections": {"policy": again}},
        model("gemma3_text") | with_critic()[1] | {"exact": True},
        model("phi3", tie=False) | IN_STEPS | {"sections": lora},
        model("qwen3_moe") | IN_STEPS | {"sections": {"policy": again}, "grpo": GRPO | REPLAYED},
        model("ernie4_5_moe", tie=False) | IN_STEPS,
        model("glm4_moe") | {"sections": {"teacher": TEACHERS}} | taught,
        IN_STEPS | overlapped("glm4_moe", again=True),
        IN_STEPS | model("qwen3") | {"samples": {"n": 2}, "grpo": {"batch_size_per_optimize": 1}},
    ]


@pytest.mark.slow
def test_two_ranks_that_share_positions_between_layers_equal_one(tmp_path: Path, group: RankGroup):
    assert_one(tmp_path / "2", group, 2, SPLIT, split())


def experts() -> list[dict[str, Any]]:
    """Both ways to reach experts, a rank without a sample, and a dense critic next to the mixture; shared experts
    which compute while tokens travel, of models that call them before the others or behind them.
    """
    exact = model("qwen3_moe") | IN_STEPS
    gathered = {
        "sections": {"policy": {"moe_token_dispatcher": "allgather"}},
        "model": {"family": "qwen3_moe", "tie": False},
    }
    few = {"samples": {"n": 2}, "grpo": {"batch_size_per_optimize": 1, "entropy_coeff": 0.1}}
    critic = {"grpo": GRPO | {"advantage_estimator": "gae", "kl_beta": 0.1}}
    before, behind = overlapped("ernie4_5_moe", again=False), overlapped("glm4_moe", again=True)
    shared = [exact | before, exact | behind, exact | overlapped("glm4_moe", again=False) | few]
    return [exact, exact | gathered | {"grpo": GRPO | REPLAYED}, exact | few, exact | critic, *shared]


@pytest.mark.slow
def test_two_ranks_that_share_experts_equal_one(tmp_path: Path, group: RankGroup):
    assert_one(tmp_path / "2", group, 2, {"dp_shard": 2, "ep": 2}, experts())


@pytest.mark.parametrize("family", ["ernie4_5_moe", "glm4_moe"])
def test_a_shared_expert_computes_and_learns_while_tokens_travel(
    group: RankGroup, family: str, monkeypatch: pytest.MonkeyPatch
):
    lm, events, exchange = tiny_family(family), [], dist.all_to_all_single

    def recorded(*inputs: Any, async_op: bool = False, **named: Any) -> Any:
        work = exchange(*inputs, async_op=async_op, **named)
        if not async_op:
            return work
        events.append("leave")
        return SimpleNamespace(wait=lambda: (events.append("arrive"), work.wait()))

    monkeypatch.setattr(dist, "all_to_all_single", recorded)
    mesh = init_device_mesh(group.device.type, (1,), mesh_dim_names=("ep",))
    apply_ep(PolicyModel(lm), mesh, "overlapped")
    shared = lm.to(group.device).model.layers[1].mlp.shared_experts
    shared.register_forward_hook(lambda *_: events.append("compute"))
    shared.gate_proj.weight.register_hook(lambda _: events.append("learn"))
    found = lm.model(torch.arange(8, device=group.device)[None]).last_hidden_state
    assert events == ["leave", "compute", "arrive", "leave", "arrive"]
    events.clear()
    found.square().sum().backward()
    assert events == ["leave", "arrive", "leave", "learn", "arrive"]


def staged(case: dict[str, Any], **pipe: Any) -> dict[str, Any]:
    """The same with models of four layers. pipe: keys of the pipeline."""
    four = {"layers": 4, "pipe": pipe}
    return {**case, **four, **({"model": {**case["model"], "layers": 4}} if "model" in case else {})}


@pytest.mark.slow
def test_two_ranks_that_have_stages_equal_one(tmp_path: Path, group: RankGroup):
    several, critic, *others = everything()
    exact = model("llama", tie=False) | IN_STEPS
    again = {"sections": {"policy": {"model_gradient_checkpointing": True}}}
    replayed = staged(model("qwen3_moe") | {"grpo": GRPO | REPLAYED, "exact": True} | again)
    uneven = {"layers": 3, "model": {"family": "llama", "layers": 3}}
    interleaved = [staged(several, virtual_pp_size=2), staged(critic, virtual_pp_size=2)]
    cases = [*interleaved, *others, exact | {"pipe": {"pp_schedule": "GPipe"}}, exact | uneven, replayed]
    assert_one(tmp_path / "2", group, 2, {"pp": 2}, cases)


Mesh = dict[str, int]


def of_families(mesh: Mesh) -> list[dict[str, Any]]:
    """Each family, with an output layer of its own and without, and each thing that a step may do."""
    cases = [model(family, tie=tie) | IN_STEPS for family, tie in itertools.product(FAMILIES, (True, False))]
    # the reference of the others has two heads of keys and values
    cases += [] if mesh.get("tp") == 4 else everything()
    pipe = {} if mesh.get("pp") == 4 else {"virtual_pp_size": 2}
    return [staged(case, **pipe) for case in cases] if "pp" in mesh else cases


def of_some_families(mesh: Mesh) -> list[dict[str, Any]]:
    cases = [
        model(family, tie=family == "qwen3") | IN_STEPS | TWELVE for family in ("qwen3", "gemma3_text", "qwen3_moe")
    ]
    return [staged(case) for case in cases] if "pp" in mesh else cases


def of_experts(mesh: Mesh) -> list[dict[str, Any]]:
    return [staged(case) for case in experts()] if "pp" in mesh else experts()


def of_positions(mesh: Mesh) -> list[dict[str, Any]]:
    """Where ranks share positions between layers."""
    families = FAMILIES if mesh["tp"] > 2 else ("gemma3_text", "qwen3_moe")
    cases = [model(family, tie="qwen" in family) | IN_STEPS | TWELVE for family in families]
    cases += split() if mesh["tp"] == 2 and ParallelDims(**mesh).ranks == 4 else []
    return [staged(case) for case in cases] if "pp" in mesh else cases


MESHES: dict[Callable[[Mesh], list[dict[str, Any]]], list[Mesh]] = {
    of_families: [
        {"tp": 2, "dp_shard": 2}, {"tp": 2, "dp_replicate": 2}, {"tp": 2, "cp": 2}, {"tp": 4}, {"pp": 4},
        {"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2},
    ],
    of_some_families: [
        {"tp": 2, "cp": 2, "dp_shard": 2}, {"tp": 2, "cp": 2, "dp_replicate": 2},
        {"tp": 2, "dp_replicate": 2, "dp_shard": 2}, {"cp": 2, "dp_replicate": 2, "dp_shard": 2},
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, {"pp": 2, "tp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2, "cp": 2},
        {"pp": 2, "cp": 2, "dp_shard": 2},
    ],
    of_experts: [
        {"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 4, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2},
        {"pp": 2, "dp_shard": 4, "ep": 2}, {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2},
    ],
    of_positions: [
        SPLIT | more for more in (
            {"tp": 4}, {"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}, {"pp": 2}, {"cp": 2, "dp_shard": 2},
            {"pp": 2, "dp_shard": 2}, {"pp": 2, "cp": 2},
        )
    ],
}  # fmt: skip


@pytest.mark.slow
def test_copies_of_several_stages_of_a_rank_are_added_up(tmp_path: Path, group: RankGroup):
    """The last backward of one stage of a rank comes before that of another."""
    case = staged(model("qwen3") | IN_STEPS, virtual_pp_size=2)
    assert_one(tmp_path / "4", group, 4, {"pp": 2, "dp_replicate": 2}, [case])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("cases", "mesh"),
    [pytest.param(of, mesh, id=f"{of.__name__}-{mesh}") for of, meshes in MESHES.items() for mesh in meshes],
)
def test_more_ranks_equal_one(tmp_path: Path, group: RankGroup, cases: Any, mesh: Mesh):
    world = ParallelDims(**mesh).ranks
    assert_one(tmp_path / str(world), group, world, mesh, cases(mesh))


@pytest.mark.slow
def test_a_state_goes_on_on_any_mesh(tmp_path: Path, group: RankGroup):
    options = {"samples": SAMPLES, "grpo": GRPO | {"advantage_estimator": "gae"}, "train": {"optm_lr": 1e-2}}
    expected, _ = train(group, options | {"steps": 3})
    saved = {"mesh": {"tp": 2, "dp_shard": 2}, "steps": 2, "save": str(tmp_path / "4"), "save_step": 2}
    ((before, _),) = run_each(tmp_path / "ranks", 4, [options | saved])
    restored = options | {"restore": str(tmp_path / "4" / "step-00000002"), "first_step": 2}
    here, _ = train(group, restored | {"steps": 2, "save": str(tmp_path / "1"), "save_step": 2})
    assert_equal(here, hub_only(before), 0.0)
    assert_same_state(tmp_path / "1" / "step-00000002", tmp_path / "4" / "step-00000002")
    later, _ = train(group, restored | {"steps": 3})
    assert_equal(later, expected, 1e-4)
    back = restored | {"mesh": {"tp": 2}, "restore": str(tmp_path / "1" / "step-00000002")}
    (there, _), (later, _) = run_each(tmp_path / "2", 2, [back | {"steps": 2}, back | {"steps": 3}])
    assert_equal(there, here, 0.0)
    assert_equal(later, expected, 1e-4)


@pytest.mark.slow
def test_a_state_goes_on_in_stages_and_back(tmp_path: Path, group: RankGroup):
    grpo = GRPO | {"advantage_estimator": "gae", "kl_beta": 0.1, "reference_reset_interval": 1}
    write_model(tmp_path / "model")
    policy = {"model_name_or_path": str(tmp_path / "model")}
    options = {
        "samples": SAMPLES,
        "exact": True,
        "grpo": grpo,
        "train": {"ema_decay": 0.5},
        "sections": {"policy": policy},
    }
    expected, _ = train(group, options | {"steps": 3})
    saved = {"steps": 2, "save": str(tmp_path / "2"), "save_step": 2, "export": str(tmp_path / "of 2")}
    ((before, _),) = run_each(tmp_path / "ranks", 2, [options | saved | {"mesh": {"pp": 2}}])
    restored = options | {"restore": str(tmp_path / "2" / "step-00000002"), "first_step": 2}
    kept = {"steps": 2, "save": str(tmp_path / "1"), "save_step": 2, "export": str(tmp_path / "of 1")}
    here, _ = train(group, restored | kept)
    assert_equal(here, hub_only(before), 0.0)
    assert_same_state(tmp_path / "1" / "step-00000002", tmp_path / "2" / "step-00000002")
    later, _ = train(group, restored | {"steps": 3})
    assert_equal(later, expected, EXACT)
    back = restored | {"restore": str(tmp_path / "1" / "step-00000002"), "mesh": {"pp": 2}}
    (there, _), (later, _) = run_each(tmp_path / "back", 2, [back | {"steps": 2}, back | {"steps": 3}])
    assert_equal(there, here, 0.0)
    assert_equal(later, expected, EXACT)
    one, two = ((tmp_path / f"of {n}" / "model.safetensors").read_bytes() for n in (1, 2))
    assert one == two


FIRST = {"tp": 2, "dp_shard": 2}
CHAIN = [{"pp": 2}, {"dp_shard": 3}, {"dp_shard": 2, "ep": 2}, {}, FIRST]
"""Meshes on which a state is taken up, one after the other, each from what the one before has saved; {}: one rank."""


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_state_wanders_over_meshes_and_comes_back(tmp_path: Path, group: RankGroup, family: str):
    """Weights, optimizer, critic, reference and average are what they were, bit for bit, and so is the export; the
    step that follows is the same up to rounding."""
    write_model(tmp_path / "model")
    grpo = GRPO | {"advantage_estimator": "gae", "kl_beta": 0.1}
    options = model(family) | {
        "samples": SAMPLES,
        "exact": True,
        "grpo": grpo,
        "train": {},
        "sections": {"policy": {"model_name_or_path": str(tmp_path / "model")}},
    }
    if family == "qwen3":  # the reference that the tests make is dense; the export is the average
        options["grpo"] = grpo | {"reference_reset_interval": 1}
        options["train"] = {"ema_decay": 0.5}
        options["model"] |= {"kv_heads": 2}
    expected, _ = train(group, options | {"steps": 3})
    place = tmp_path / "0"
    first = {"steps": 2, "save": str(place / "saved"), "save_step": 2, "export": str(place / "export")}
    ((before, _),) = on(FIRST, group, place, [options | first])
    state, exported = place / "saved" / "step-00000002", files_of(place / "export")
    assert "model.safetensors" in exported
    dense = [mesh for mesh in CHAIN if "ep" not in mesh]
    for number, mesh in enumerate(CHAIN if family == "qwen3_moe" else dense, 1):
        place = tmp_path / str(number)
        restored = options | {"restore": str(state), "first_step": 2}
        again = {"steps": 2, "save": str(place / "saved"), "save_step": 2, "export": str(place / "export")}
        (there, _), (later, _) = on(mesh, group, place, [restored | again, restored | {"steps": 3}])
        assert_equal(there, hub_only(before), 0.0)
        assert_equal(later, expected, EXACT)
        assert_same_state(place / "saved" / "step-00000002", state)
        assert files_of(place / "export") == exported, mesh
        state = place / "saved" / "step-00000002"


def on(mesh: dict[str, int], group: RankGroup, directory: Path, cases: list[dict[str, Any]]) -> list[Result]:
    """The cases on the ranks of a mesh; of one rank here."""
    if not mesh:
        return [train(group, case) for case in cases]
    return run_each(directory, ParallelDims(**mesh).ranks, [{"mesh": mesh} | case for case in cases])


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def assert_same_state(found: Path, expected: Path) -> None:
    """Two checkpoints hold the same tensors, bit for bit, however they are cut."""
    kinds = {path.name.rpartition("-")[0] for path in expected.glob("*-[0-9]*.safetensors")} - {"rng"}
    assert {"model", "optimizer"} <= kinds
    assert look(found).manifest.kl_coefficient == look(expected).manifest.kl_coefficient
    for kind in sorted(kinds):
        with StateFiles(state_files(found, kind)) as one, StateFiles(state_files(expected, kind)) as other:
            assert one.tensors.keys() == other.tensors.keys()
            assert other.tensors
            for key in other.tensors:
                assert torch.equal(one.whole(key), other.whole(key)), key


@pytest.mark.slow
def test_a_critic_goes_on_in_another_mesh(tmp_path: Path, group: RankGroup):
    gae = {"samples": SAMPLES, "exact": True, "grpo": GRPO | {"advantage_estimator": "gae"}}
    adapters = {"critic": {"lora": {"r": 2, "target_modules": "all-linear"}}}
    layers, stages = {"roles": {"critic": {"tp_size": 2}}}, {"roles": {"critic": {"pp_size": 2}}}
    plain = {"whole": gae, "adapters": gae | {"sections": adapters}}
    cases = []
    for (name, options), (first, then) in zip(plain.items(), ((layers, stages), (stages, layers)), strict=True):
        saved, again = str(tmp_path / name), {"first_step": 2, "steps": 3}
        begun = options | first | {"steps": 2, "save": saved, "save_step": 2, "mesh": {"dp_shard": 2}}
        state = {"restore": f"{saved}/step-00000002"}
        cases += [begun, options | then | again | state, options | again | state]
    found = run_each(tmp_path / "2", 2, cases)
    for number, (name, options) in enumerate(plain.items()):
        expected, _ = train(group, options | {"steps": 3})
        (_, _), (in_another, _), (like_the_policy, _) = found[3 * number : 3 * number + 3]
        state = {"restore": str(tmp_path / name / "step-00000002")}
        alone, _ = train(group, options | state | {"first_step": 2, "steps": 3})
        for later in (in_another, like_the_policy, alone):
            assert_equal(later, expected, EXACT)


def hub_only(tensors: dict[str, Any]) -> dict[str, Any]:
    """Without gradients."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("grad.")}


def with_roles(**roles: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps with a reference model and a critic in meshes of their own: KLs in loss and reward, mini-batches of a
    larger critic's own, shares without samples, packed rows."""
    exact = {"exact": True, "steps": 3, "roles": roles}
    gae = {"advantage_estimator": "gae", "gae_lambda": 0.9, "kl_beta": 0.1}
    both = {"kl_beta": 0.1, "kl_in_reward": {"beta": 0.1}, "mini_batch_shuffle": True}
    parted = {"critic": {"batch_size_per_optimize": 3, "mini_batch_shuffle": True, "mu_iterations": 2}}
    larger = model("llama") | {"layers": 3, "sections": parted}
    return [
        exact | {"grpo": GRPO | gae | both | {"batch_size_per_optimize": 4}},
        exact | {"grpo": GRPO | gae | {"min_filter_prefix_tokens": 2}, "ahead": "partly"} | larger,
        exact | {"grpo": gae, "samples": {"n": 1}},
        exact | {"grpo": GRPO | both | {"balance_dp_token": True}, "train": {"sequence_packing": True}},
    ]


@pytest.mark.slow
def test_roles_with_meshes_of_their_own_equal_one(tmp_path: Path, group: RankGroup):
    shards, layers, stages = {"dp_shard_size": 2}, {"tp_size": 2}, {"pp_size": 2}
    split = layers | {"sequence_parallel": True}
    cases = with_roles(reference=layers, critic=stages) + with_roles(reference=split, critic=split)[:1]
    assert_one(tmp_path / "shards", group, 2, {"dp_shard": 2}, cases)
    cases = with_roles(reference=shards, critic=shards)[:2]
    assert_one(tmp_path / "layers", group, 2, {"tp": 2}, cases)


OF_ROLES: list[dict[str, Any]] = [
    {"dp_shard_size": 4},
    {"tp_size": 2, "dp_shard_size": 2},
    {"pp_size": 2, "dp_shard_size": 2, "pp_micro_batch_size": 2},
    {"cp_size": 2, "dp_shard_size": 2},
    {"dp_replicate_size": 2, "dp_shard_size": 2},
    {"tp_size": 2, "cp_size": 2, "sequence_parallel": True},
    {"tp_size": 2, "pp_size": 2, "pp_schedule": "GPipe"},
]


@pytest.mark.soak
@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}, {"cp": 2, "dp_replicate": 2}]
)
def test_roles_on_four_ranks_equal_one(tmp_path: Path, group: RankGroup, mesh: dict[str, int]):
    cases = [
        with_roles(reference=one, critic=OF_ROLES[number - 3])[number % 2] for number, one in enumerate(OF_ROLES)
    ]
    assert_one(tmp_path / "4", group, 4, mesh, cases)
