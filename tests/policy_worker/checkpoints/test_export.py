from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from policy_worker.checkpoints.export import write_shards
from policy_worker.model.load import load_model
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config import Config
from tests.policy_worker.material import export_whole, make_config, tiny_lm


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with dropout in its config, a tokenizer with a chat template, and its own generation config."""
    lm = tiny_lm()
    lm.config.attention_dropout = 0.1
    lm.generation_config.eos_token_id = [2, 7]
    lm.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trainer_of(model: Path, group: RankGroup, **train: object) -> tuple[Trainer, Config]:
    config = make_config(policy={"model_name_or_path": str(model)}, train=dict(train))
    return Trainer(load_model(config), config, group, Schedule(1)), config


def test_transformers_loads_it_with_equal_logits(tmp_path: Path, model: Path, group: RankGroup):
    trainer, config = trainer_of(model, group)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.01)
    export_whole(trainer, config, tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").to(group.device)
    ids = torch.arange(3, 20, device=group.device)[None]
    trainer.model.lm.eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model.lm(ids).logits)
    assert loaded.dtype == torch.float32
    assert loaded.config.attention_dropout == 0.1
    assert loaded.generation_config.eos_token_id == [2, 7]
    assert type(loaded).__name__ == loaded.config.architectures[0] == "Qwen3ForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert tokenizer.eos_token_id == 2


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_sharded_or_not_it_is_exported_in_the_transfer_type(
    tmp_path: Path, model: Path, group: RankGroup, param_dtype: str
):
    trainer, config = trainer_of(model, group, param_dtype=param_dtype, transfer_dtype="bfloat16")
    export_whole(trainer, config, tmp_path / "final")
    tensors = load_file(tmp_path / "final" / "model.safetensors")
    original = load_file(model / "model.safetensors")
    assert tensors.keys() == original.keys()  # hub names, tied aliases left out
    for name, tensor in tensors.items():
        assert torch.equal(tensor, original[name].to(torch.bfloat16))
    assert json.loads((tmp_path / "final" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_older_export_is_replaced_whole(tmp_path: Path, model: Path, group: RankGroup):
    trainer, config = trainer_of(model, group)
    target = tmp_path / "out" / "final"
    target.mkdir(parents=True)
    (target / "left-over").touch()
    export_whole(trainer, config, target)
    assert "left-over" not in {path.name for path in target.iterdir()}
    assert [path.name for path in target.parent.iterdir()] == ["final"]


def test_a_failed_export_leaves_the_older_one(tmp_path: Path, model: Path, group: RankGroup):
    trainer, config = trainer_of(model, group)
    target = tmp_path / "out" / "final"
    export_whole(trainer, config, target)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    trainer.model.dropout = {"a_key": object()}  # type: ignore[dict-item]  (cannot be written as JSON)
    with pytest.raises(TypeError):
        export_whole(trainer, config, target)
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before
    assert [path.name for path in target.parent.iterdir()] == ["final"]


def test_shards_and_their_index(tmp_path: Path, model: Path):
    tensors = load_file(model / "model.safetensors")
    write_shards(tensors.items(), tmp_path, shard_bytes=4000)
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(loaded.state_dict()[name], tensor)
