"""One rank of a replica that trains a fixed batch: `python -m tests.policy_worker.rank_program OUT OPTIONS`.

OPTIONS is JSON: {mesh, pipe, roles, model, layers, exact, grpo, train, sections, samples, steps, first_step, save,
save_step, staged, export, restore, answers, ahead, scales, parks, greedy, kept_sets, record}, or a list of such,
whose results are in OUT/0, OUT/1 and so on.
`mesh` are `ParallelDims`, by default all ranks shard; of a list that of the first holds. `pipe` are further keys of
the mesh, of its pipeline. `roles` are meshes of "reference" and "critic", where there is more than one rank.
`model` are arguments of `tiny_family`; other models have as many `layers`. `exact`: float64 stands in the place of
float32. `answers` says for a rank what becomes of its first fetches of payloads: "whole", "gone" (the step is not
assembled any more), "anew" (it is another batch by now). `ahead` says what the controller guesses of the next batch:
"right", "partly" (but for one group), "wrong". `scales` are the first loss scales of the policy and the critic.
`parks`: before each step all tensors leave their devices and come back. `greedy` are scores of greedy samples behind
each group. `kept_sets`: samples bring the sets that their tokens were drawn from. `record`: a folder for a file of
each rank with a hash of all that it keeps between two steps, and the samples that it shows.

Each rank writes its gradients of the last step and its weights to OUT as safetensors, rank 0 the metrics as JSON; all
ranks of a stage come to the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch.distributed.fsdp import FSDPModule

from policy_worker.memory.offload import local_of
from policy_worker.model.load import kept_activations
from policy_worker.model.model import DTYPES, PolicyModel
from policy_worker.model.prepare import prepare_model, replay_routing
from policy_worker.parallel import distribute
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.parallel.pipeline_stages import names_here, names_of_all
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from schema.wire.batch import encode_batch
from schema.wire.sample import encode_sample
from tests.policy_worker.checkpoint_material import load_state, save_state
from tests.policy_worker.material import (
    cut_short,
    export_whole,
    from_sources,
    make_config,
    make_table,
    make_trainer,
    random_samples,
    tiny_family,
    train_step,
    with_baselines,
    with_common_prompts,
    with_experts,
    with_kept_sets,
    with_shared_prefixes,
)
from tests.policy_worker.ranks import joined
from weight_sync import hub_tensors
from weight_sync.parking import Parked

Result = tuple[dict[str, torch.Tensor], list[dict[str, float]]]
"""Gradients of the last step and weights, on the CPU; metrics of each step."""


def train(group: RankGroup, options: dict[str, Any]) -> Result:
    """What the steps of these options come to."""
    if not options.get("exact"):
        return _train(group, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DTYPES, "float32", torch.float64)
        for place, name in ((torch.Tensor, "to"), (torch.Tensor, "type"), (torch.nn.functional, "softmax")):
            patch.setattr(place, name, _widened(getattr(place, name)))  # norms and routers compute in float32
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            return _train(group, options)
        finally:
            torch.set_default_dtype(torch.float32)


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the bits of this rank's parts of these tensors, in their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(local_of(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _widened(function: Callable[..., Any]) -> Callable[..., Any]:
    def widened(*inputs: Any, **named: Any) -> Any:
        wide = (torch.float64 if one is torch.float32 else one for one in inputs)
        return function(
            *wide, **{name: torch.float64 if one is torch.float32 else one for name, one in named.items()}
        )

    return widened


def _train(group: RankGroup, options: dict[str, Any]) -> Result:
    mesh = {"tp_size": 1, "dp_shard_size": -1, "pp_size": group.sizes.pp, **options.get("pipe", {})}
    sections = options.get("sections", {})
    for role, own in (options.get("roles", {}) if group.world > 1 else {}).items():
        sections = {**sections, role: {**sections.get(role, {}), "parallelism": {"tp_size": 1, **own}}}
    config = make_config(
        options.get("grpo"),
        {"optm_grad_norm_clip": 0.5, **options.get("train", {})},
        **{**sections, "policy": {"parallelism": mesh, **sections.get("policy", {})}},
    )
    model = None
    if "model" in options:
        model = prepare_model(
            PolicyModel(tiny_family(**options["model"])),
            packed=config.train.sequence_packing,
            **kept_activations(config.policy, config.train),
            pieces=group.sizes.cp,
            parted=group.sizes.sequence,
        )
    if config.grpo.routing_replay != "none":
        assert model is not None
        replay_routing(model, config.grpo.routing_replay)
    trainer = make_trainer(config, group, model, layers=options.get("layers", 2))
    keys = config.train
    assert isinstance(trainer.model, FSDPModule) == (
        keys.fsdp_offload or group.sizes.fsdp_ranks > 1 or keys.param_dtype != keys.master_dtype
    )
    held = sum(local_of(parameter).numel() for parameter in trainer.model.parameters())
    total = sum(parameter.numel() for parameter in trainer.model.parameters())
    parts = group.sizes.dp_shard * group.sizes.cp * group.sizes.tp
    uneven = 1.3 if parts <= 4 else 2.5  # few experts, or rows of an adapter, over many ranks
    assert held <= uneven * total / parts, "the model is not cut"

    gradients: dict[str, torch.Tensor] = {}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    def keep(of: str, model: torch.nn.Module) -> None:
        named = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
        gradients.update({f"grad.{of}{name}": whole(gradient) for name, gradient in named})

    samples = with_common_prompts(random_samples(**options["samples"]))
    if config.teacher:
        samples = from_sources(samples, ["math", "code"])
    if config.grpo.sample_masks.truncated:
        samples = cut_short(samples)
    if config.grpo.min_filter_prefix_tokens:
        samples = with_shared_prefixes(samples)
    if model is not None and model.routing_replay is not None:
        samples = with_experts(samples, *model.routing_replay.mixtures)
    if options.get("kept_sets"):
        samples = with_kept_sets(samples)
    greedy = options.get("greedy", ())
    samples = with_baselines(samples, greedy) if greedy else samples
    group_size = 5 if greedy else 4
    answers = options.get("answers", {}).get(str(group.rank), [])

    def answer(call: Any) -> bytes | None:
        """What the controller sends: the table, and the payloads that were asked for."""
        table = make_table(samples, group_size, step=int(call.path.split("/")[3]))
        wanted = call.params["samples"]
        assert group.leads_unit
        fate = answers.pop(0) if answers and wanted != "none" else "whole"
        if fate == "gone":
            return None
        if fate == "anew":
            table = table.model_copy(update={"group_ids": [f"e1-p{i}" for i in range(len(table.group_ids))]})
        named = {"all": list(range(len(samples))), "none": []}
        rows = named[wanted] if wanted in named else [int(row) for row in wanted.split(",")]
        return encode_batch(table, [encode_sample(samples[row]) for row in rows])

    def guess(call: Any) -> bytes:
        """What the controller sends of the batch after the next one."""
        assert call.params["ahead"]
        others = {"right": 0, "partly": 1, "wrong": len(samples)}[options["ahead"]]
        table = make_table(samples, step=int(call.path.split("/")[3]))
        names = [f"e9-{name}" if g < others else name for g, name in enumerate(table.group_ids)]
        wanted = call.params["samples"]
        rows = [] if wanted == "none" else [int(row) for row in wanted.split(",")]
        frames = [encode_sample(samples[row]) for row in rows]
        return encode_batch(table.model_copy(update={"group_ids": names}), frames)

    source = BatchSource(group, answer, 1, 8)
    algorithm = Grpo(config, trainer, source)
    if "ahead" in options:
        source.prefetch(guess, algorithm.rows_needed)
    if "restore" in options:
        load_state(trainer, Path(options["restore"]), config)
    trainer.optimizer.optimizers[0].register_step_pre_hook(lambda *_: keep("", trainer.model))
    if trainer.critic is not None:
        critic = trainer.critic
        critic.optimizer.optimizers[0].register_step_pre_hook(lambda *_: keep("critic.", critic.model))
    for trained, scale in zip((trainer, trainer.critic), options.get("scales", ()), strict=False):
        if trained is not None and trained.scaler is not None:
            trained.scaler.state = scale, 0
    first, last = options.get("first_step", 0), options.get("steps", 1)
    metrics, kept = [], list[list[dict[str, Any]]]()
    for step in range(first, last):
        if step > first and source.prefetcher is not None:
            assert source.prefetcher.guessed(10.0)
        if options.get("parks"):
            parked = Parked(trainer.resident(), stays="nowhere")
            assert {local_of(one).untyped_storage().nbytes() for one in trainer.model.parameters()} == {0}
            parked.restore()
        metrics.append(train_step(algorithm, step))
        kept.append([one.model_dump() for one in algorithm.kept])
    if "record" in options:
        facts = {"state": digest_of(trainer.resident()), "kept": kept}
        Path(options["record"]).mkdir(exist_ok=True)
        (Path(options["record"]) / f"{group.rank}.json").write_text(json.dumps(facts))
    assert not answers
    assert group.gather(metrics) == [metrics] * group.world
    if "save" in options:
        save_state(trainer, Path(options["save"]), options.get("save_step", 0), staged=options.get("staged", False))
    if "export" in options:
        export_whole(trainer, config, Path(options["export"]), average="ema_decay" in options.get("train", {}))
    weights = dict(hub_tensors(trainer.model.lm))
    published = dict(group.gathering(names_here(trainer.model)).tensors())
    assert all(torch.equal(weights[name], tensor) for name, tensor in published.items())
    everything = [name for name, _ in names_of_all(trainer.model).tensors(lambda _, tensor: tensor)]
    assert sorted(chain(*group.gather([*published]))) == sorted(everything)
    tensors = {**gradients, **weights}
    if trainer.critic is not None:
        tensors |= {f"critic.{name}": whole(p) for name, p in trainer.critic.model.named_parameters()}
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    critics = {name for name in tensors if "critic." in name}
    for of, names in (
        (group, tensors.keys() - critics),
        (trainer.critic.group if trainer.critic else group, critics),
    ):
        digests = group.gather(hashlib.sha256(save({name: tensors[name] for name in names})).hexdigest())
        assert {digests[rank] for rank in of.sizes.stage_ranks(group.rank)} == {digests[group.rank]}
    return tensors, metrics


def main(out: Path, options: Any) -> None:
    distribute.BACKEND = "aot_eager"  # as compiled, without a C++ compiler
    several = isinstance(options, list)
    with joined() as group:
        cases = options if several else [options]
        if "mesh" in cases[0]:
            group.arrange(ParallelDims(**cases[0]["mesh"]))
        for number, case in enumerate(cases):
            tensors, metrics = train(group, case)
            folder = out / str(number) if several else out
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / f"tensors-{group.rank}.safetensors")
            if group.leads:
                (folder / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
