"""One rank that loads models as a policy worker does: `python -m tests.policy_worker.load_program OUT OPTIONS`.

OPTIONS is JSON: {models, mesh, config, lora, limit}. Of each of `models`, directories, every tensor of the policy and
of what `config` asks for besides it must be the one that transformers reads, bit by bit, and adapters those that peft
puts next to such a model. lora: of the policy. limit: bytes that this process
may allocate for the last model above what it has after the others, which must be less than the model has; then
nothing is compared. Rank 0 writes what was measured to OUT.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from policy_worker.model import lora
from policy_worker.model.load import load_critic, load_model, load_reference
from policy_worker.model.model import DTYPES, PolicyModel
from policy_worker.model.stages import Stages
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.critic import Critic
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config import Config
from schema.config.layout import reference_is_within
from schema.config.sections.optimizer import PrecisionKeys
from schema.config.sections.policy import LoraConfig
from tests.policy_worker.material import make_config
from tests.policy_worker.ranks import joined
from weight_sync.stored import stored_tensors


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters under all their names, and buffers, stored or not; whole."""
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def ties_of(model: nn.Module) -> set[frozenset[str]]:
    """Names that are of one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {frozenset(each) for each in names.values()}


def assert_same(found: nn.Module, expected: nn.Module, stages: Stages | None = None) -> None:
    """Of a transformers model, sharded or not. A collective if it is. stages: those that are left of it."""
    loaded, reference = dict(tensors_of(found)), dict(tensors_of(expected))
    here = set(reference)
    if stages is not None:
        elsewhere = {name for name in here if stages.has_elsewhere(f"lm.{name}")}
        elsewhere |= here - expected.state_dict().keys() - loaded.keys()  # buffers that are not stored
        here -= elsewhere - {name.removeprefix("lm.") for name in stages.copies}
    assert loaded.keys() == here
    assert ties_of(found) == {names & here for names in ties_of(expected)} - {frozenset()}
    trains = {name for name, p in expected.named_parameters() if p.requires_grad}
    assert {name for name, p in found.named_parameters() if p.requires_grad} == trains & here
    for name in here:
        assert loaded[name].dtype == reference[name].dtype, name
        assert torch.equal(loaded[name], reference[name]), name


def trainer_of(config: Config, group: RankGroup) -> Trainer:
    """With the models that the configuration names, as a worker makes it."""
    torch.manual_seed(0)
    model = load_model(config, lead=group.lead)
    apart = config.has_reference and not reference_is_within(config)
    reference = load_reference(config, model, lead=group.lead) if apart else None
    critic = None
    if config.has_critic:
        critic = Critic(load_critic(config, model, lead=group.lead), config, group, Schedule(10))
    return Trainer(model, config, group, Schedule(10), reference, critic)


def compare(trainer: Trainer, config: Config) -> None:
    """Each model of the trainer with what transformers makes of the policy's directory."""
    torch.manual_seed(0)
    expected = read_whole(AutoModelForCausalLM, config, config.train, config.policy.lora)
    assert_same(trainer.model.lm, expected, trainer.model.stages)
    if isinstance(trainer.reference, PolicyModel):
        frozen = DTYPES[config.train.param_dtype]
        plain = AutoModelForCausalLM.from_pretrained(config.policy.model_name_or_path, dtype=frozen)
        assert_same(trainer.reference.lm, plain.requires_grad_(False), trainer.reference.stages)
    if trainer.critic is not None:
        expected = read_whole(AutoModel, config, config.critic, config.critic.lora)
        assert_same(trainer.critic.model.lm, expected, trainer.critic.model.stages)


def read_whole(
    auto: type[AutoModel | AutoModelForCausalLM], config: Config, keys: PrecisionKeys, adapters: LoraConfig | None
) -> PreTrainedModel:
    """What transformers and peft make of the policy's directory."""
    path, master = config.policy.model_name_or_path, DTYPES[keys.master_dtype]
    if adapters is None:
        plain: PreTrainedModel = auto.from_pretrained(path, dtype=master)
        return plain
    lm: PreTrainedModel = auto.from_pretrained(path, dtype=DTYPES[keys.param_dtype])
    lora.inject(lm, adapters, "policy.lora")
    lora.widen(lm, master)
    return lm


def memory() -> dict[str, int]:
    """Bytes of this process by the names of the kernel: private writable memory, most and present RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[name].split()[0]) * 1024 for name in ("VmData", "VmHWM", "VmRSS")}


def within(limit: int, config: Config, group: RankGroup) -> dict[str, Any]:
    """What loading a model took of the memory that may be allocated."""
    stored = stored_tensors(sorted(Path(config.policy.model_name_or_path).glob("*.safetensors")))
    size = 4 * sum(math.prod(tensor.shape) for tensor in stored.values())  # in float32, as it is trained
    Path("/proc/self/clear_refs").write_text("5")  # the most that was in memory is counted anew
    before = memory()
    resource.setrlimit(resource.RLIMIT_DATA, (before["VmData"] + limit,) * 2)
    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        refused = str(error)
    else:
        raise AssertionError("the whole model fits: the limit bounds nothing")
    trainer = trainer_of(config, group)
    after = memory()
    assert not any(tensor.is_meta for tensor in trainer.model.parameters())
    return {
        "model": size,
        "limit": limit,
        "allocated": after["VmData"] - before["VmData"],
        "peak": after["VmHWM"] - before["VmRSS"],
        "refused": refused,
    }


def main(out: Path, options: dict[str, Any]) -> None:

    def config_of(path: str) -> Config:
        mesh = {"tp_size": 1, "dp_shard_size": group.world, **options.get("mesh", {})}
        policy = {"model_name_or_path": path, "parallelism": mesh, "lora": options.get("lora")}
        return make_config(**options.get("config", {}), policy=policy)

    *compared, last = options["models"]
    if "limit" not in options:
        compared.append(last)
    with joined() as group:
        group.arrange(ParallelDims.of_config(config_of(last).policy.parallelism, group.world))
        for path in compared:
            config = config_of(path)
            compare(trainer_of(config, group), config)
        if "limit" in options:
            found = within(options["limit"], config_of(last), group)
            if group.leads:
                (out / "memory.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
