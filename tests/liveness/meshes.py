"""Probes of meshes: how the policy, the reference model and the critic are cut over ranks, and who exchanges what."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

from policy_worker.model.load import load_critic, load_model, load_reference
from policy_worker.model.model import Backbone, PolicyModel
from policy_worker.parallel.experts import apply_ep
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.parallel.pipeline_schedule import Pipe, Tick
from policy_worker.parallel.pipeline_stages import cut
from policy_worker.parallel.tensor import apply_tp
from policy_worker.training.batches.cutting import Batching, micro_batches
from policy_worker.training.critic import batching_of
from schema.config import Config
from schema.config.layout import mesh_of, ranks_of
from schema.config.rules.mesh import roles_have_the_policys_ranks, stages_take_any_shape
from tests.liveness.probe import Place, changed, grpo, under, watch
from tests.liveness.trained import EXPERTS, FOUR_LAYERS, SHARED_EXPERTS, policy

MESH = "policy.parallelism"


def _role(config: Config) -> str:
    """The model next to the policy that this job has; the policy where there is none."""
    return "critic" if config.has_critic else "reference" if config.has_reference else "policy"


def layers_of_a_rank(config: Config, place: Place) -> list[str]:
    """What a rank has of a model of four layers."""
    model: Backbone = load_model(config)
    if _role(config) != "policy":
        model = (load_critic if config.has_critic else load_reference)(config, model)
    pipe = Pipe.of_config(mesh_of(config, _role(config)))
    cut(model, 0, pipe.ranks, pipe.chunks)
    return list(model.state_dict())


def order_of_work(config: Config, place: Place) -> list[Tick]:
    """Return the schedule of four micro-batches."""
    return Pipe.of_config(mesh_of(config, _role(config))).schedule(4)


staged = changed(grpo, {f"{MESH}.pp_size": 2, "policy.model_name_or_path": FOUR_LAYERS} | policy(mini_batch=4))
watch(layers_of_a_rank, staged, under(MESH, virtual_pp_size=(1, 2)))
watch(order_of_work, staged, under(MESH, pp_schedule=("1F1B", "GPipe")))

# ---- tensors and experts --------------------------------------------------------------------------------------


def implementation_of_experts(config: Config, place: Place) -> str:
    """How transformers computes the experts of the policy."""
    return str(load_model(config).lm.config._experts_implementation)


def held_experts(config: Config, place: Place) -> int:
    """By how many ranks the experts of a layer are shared where a replica has two."""
    return ParallelDims.of_config(config.policy.parallelism, 2).ep


def exchanges_of_layers(config: Config, place: Place) -> int:
    """How often sums are scattered over tensor-parallel ranks, of which a replica has two, in a forward of one."""
    model, sizes = load_model(config), ParallelDims.of_config(config.policy.parallelism, 2)
    mesh = init_device_mesh(place.group.device.type, (1,), mesh_dim_names=("tp",))
    apply_tp(model, mesh, config.policy.dispatcher if sizes.sequence else None)
    model.read_weights(place.group.device)
    exchange = torch.distributed.reduce_scatter_single
    with patch.object(torch.distributed, "reduce_scatter_single", wraps=exchange) as seen:
        model.lm.base_model(input_ids=torch.arange(3, 8)[None])
    return seen.call_count


def _spread(config: Config, place: Place) -> PolicyModel:
    """A model whose experts are spread."""
    model = load_model(config)
    apply_ep(model, init_device_mesh(place.group.device.type, (1,), mesh_dim_names=("ep",)), config.policy.dispatcher)
    model.read_weights(place.group.device)
    return model


def exchanges_of_experts(config: Config, place: Place) -> int:
    """How often tokens travel in a forward of a model whose experts are spread."""
    model, exchange = _spread(config, place), torch.distributed.all_to_all_single
    with patch.object(torch.distributed, "all_to_all_single", wraps=exchange) as seen:
        model.lm(input_ids=torch.arange(3, 8)[None])
    return seen.call_count


def order_of_experts(config: Config, place: Place) -> list[str]:
    """When a shared expert computes, and the layer of experts next to it."""
    model, order = _spread(config, place), list[str]()
    for name in ("experts", "shared_experts"):
        layer = model.lm.model.layers[1].mlp.get_submodule(name)
        layer.register_forward_hook(lambda *_, name=name: order.append(name))
    model.lm(input_ids=torch.arange(3, 8)[None])
    return order


two_tensors = changed(grpo, under(MESH, tp_size=2))
watch(exchanges_of_layers, two_tensors, under(MESH, sequence_parallel=(False, True)))
of_experts = changed(grpo, under("policy", model_name_or_path=EXPERTS))
watch(implementation_of_experts, of_experts, under("policy", moe_grouped_gemm=(False, True)))
two_shards = changed(of_experts, under(MESH, dp_shard_size=2))
watch(held_experts, two_shards, under(MESH, ep_size=(1, 2)))
spread = changed(two_shards, under(MESH, ep_size=2))
watch(exchanges_of_experts, spread, under("policy", moe_token_dispatcher=("alltoall", "allgather")))
shared = changed(spread, under("policy", model_name_or_path=SHARED_EXPERTS))
watch(order_of_experts, shared, under("policy", moe_shared_expert_overlap=(False, True)))

# ---- meshes of other models ------------------------------------------------------------------------------------


def ranks_of_a_role(config: Config, place: Place) -> ParallelDims:
    """Return the mesh of the reference model or the critic, as ranks by dimension."""
    mesh = mesh_of(config, _role(config))
    return ParallelDims.of_config(mesh, ranks_of(mesh) or 4, "its section")


def batches_of_a_role(config: Config, place: Place) -> list[list[int]]:
    """Return the micro-batches into which a role cuts twelve samples."""
    batching = Batching.of_config(config, config.reference.parallelism)
    if config.has_critic:
        batching = batching_of(config, Batching.of_config(config))
    return micro_batches(list(range(12)), [10] * 12, batching)


def faults_of_a_mesh(config: Config, place: Place) -> list[str]:
    """Keys that the mesh of a model next to the policy cannot have."""
    rules = (stages_take_any_shape, roles_have_the_policys_ranks)
    return [problem.key for rule in rules for problem in rule(config)]


with_gae = policy(advantage_estimator="gae") | under("critic", enable=True, mini_batch=4)
for role, on in (("reference", policy(kl_beta=0.1)), ("critic", with_gae)):
    mesh = f"{role}.parallelism"
    free = changed(grpo, on | under(MESH, dp_shard_size=-1) | {mesh: {"tp_size": 1, "dp_shard_size": -1}})
    sizes = dict.fromkeys(("tp_size", "cp_size", "ep_size", "pp_size", "dp_replicate_size"), (1, 2))
    experts = changed(free, under("policy", model_name_or_path=EXPERTS))
    watch(ranks_of_a_role, experts, under(mesh, **sizes, dp_shard_size=(2, 4)))
    watch(ranks_of_a_role, changed(free, under(mesh, tp_size=2)), under(mesh, sequence_parallel=(False, True)))
    two = under(MESH, dp_shard_size=2) | {mesh: {"tp_size": 1, "pp_size": 2}} | policy(mini_batch=4)
    in_stages = changed(grpo, on | two | under("policy", model_name_or_path=FOUR_LAYERS))
    watch(layers_of_a_rank, in_stages, under(mesh, virtual_pp_size=(1, 2)))
    watch(order_of_work, in_stages, under(mesh, pp_schedule=("1F1B", "GPipe")))
    watch(batches_of_a_role, in_stages, under(mesh, pp_micro_batch_size=(1, 2)))
    watch(
        faults_of_a_mesh, in_stages, under(mesh, pp_dynamic_shape=(True, False), n_init_replicas=(1, 2)), refused=True
    )
