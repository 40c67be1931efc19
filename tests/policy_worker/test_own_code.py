"""Models, tokenizers and modules with code of their own: loaded where the configuration says so, and exported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from policy_worker.errors import SettingsError
from policy_worker.model.load import load_model
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config import Config
from tests.policy_worker.material import export_whole, make_config, tiny_lm
from tests.rollout_worker.tiny import tokenizer
from tests.support.own_code import bring_own_code, code_kept_in, importable, need_module

TRUSTED = {"trust_remote_code": True}


@pytest.fixture(autouse=True)
def _code_of_this_test(tmp_path: Path) -> Iterator[None]:
    with code_kept_in(tmp_path / "modules"):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_lm().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config(model: Path, **policy: object) -> Config:
    return make_config(policy={"model_name_or_path": str(model), **policy})


def export(config: Config, group: RankGroup, target: Path) -> Trainer:
    trainer = Trainer(load_model(config), config, group, Schedule(1))
    export_whole(trainer, config, target)
    return trainer


def test_code_of_a_model_runs_only_where_it_is_trusted(model: Path, caplog: pytest.LogCaptureFixture):
    bring_own_code(model)
    with pytest.raises(SettingsError, match=r"if you trust that code, write policy\.trust_remote_code = true"):
        load_model(config(model))
    with caplog.at_level(logging.WARNING):
        lm = load_model(config(model, **TRUSTED)).lm
    assert type(lm).__name__ == "OwnForCausalLM"
    assert "policy.trust_remote_code = true" in caplog.text


def test_a_faulty_model_of_its_own_is_a_fault_of_the_settings(model: Path):
    bring_own_code(model)
    (model / "own_model.py").write_text("import cosmos_test_missing\n")
    with pytest.raises(SettingsError, match="cosmos_test_missing"):
        load_model(config(model, **TRUSTED))


def test_code_of_a_model_is_exported_with_it(model: Path, tmp_path: Path, group: RankGroup):
    bring_own_code(model)
    trainer = export(config(model, **TRUSTED), group, tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", trust_remote_code=True).to(group.device)
    assert type(loaded).__name__ == "OwnForCausalLM"
    ids = torch.arange(3, 20, device=group.device)[None]
    trainer.model.lm.eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model.lm(ids).logits)
    assert {path.name for path in (tmp_path / "final").glob("*.py")} == {"own_config.py", "own_model.py"}


def test_external_modules_are_imported_before_the_model_is_loaded(model: Path, tmp_path: Path):
    need_module(model, tmp_path, "cosmos_test_registers")
    with pytest.raises(SettingsError, match=r"model_name_or_path.*cosmos-test-registers"):
        load_model(config(model))
    with pytest.raises(SettingsError, match=r"policy\.external_modules: `cosmos_test_registers` cannot be"):
        load_model(config(model, external_modules=["cosmos_test_registers"]))
    with importable(tmp_path):
        lm = load_model(config(model, external_modules=["cosmos_test_registers"])).lm
    assert type(lm).__module__ == "cosmos_test_registers"


def test_the_tokenizer_beside_the_final_model_is_the_one_that_was_named(
    model: Path, tmp_path: Path, group: RankGroup
):
    own = tokenizer()
    own.save_pretrained(tmp_path / "tokenizer")
    export(config(model, tokenizer_name_or_path=str(tmp_path / "tokenizer")), group, tmp_path / "final")
    found = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert found("Hello")["input_ids"] == own("Hello")["input_ids"]
