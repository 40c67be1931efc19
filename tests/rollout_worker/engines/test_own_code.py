"""Tokenizers of their own, models that bring code, modules that register them: in the worker and in both engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rollout_worker.engines import create_engine
from rollout_worker.engines.base import EngineConfigError
from rollout_worker.groups.tokens import eos_token_ids, import_modules, load_tokenizer
from schema.config import Config, PolicyConfig
from tests.rollout_worker.engines.engine_contract import EngineContract
from tests.rollout_worker.tiny import random_model, save_model, tokenizer
from tests.support.own_code import bring_own_code, code_kept_in, importable, need_module

TRUST = r"if you trust that code, write policy\.trust_remote_code = true"


class Embedded(EngineContract):
    __test__ = False
    backend = "transformers"


class Vllm(EngineContract):
    __test__ = False
    backend = "vllm"


@pytest.fixture(autouse=True)
def _code_of_this_test(tmp_path: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    with code_kept_in(tmp_path / "modules"):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", random_model(1))


def config(kind: type[EngineContract], model: Path, **policy: Any) -> Config:
    return kind.config(model, policy={"model_name_or_path": str(model), "model_max_length": 64, **policy})


def boot(config: Config) -> str:
    """Start the engine of a configuration as the worker does, and end it; answers its model's class."""

    async def run() -> str:
        import_modules(config.policy)
        known = load_tokenizer(config.policy)
        engine = create_engine(config, known, eos_token_ids(config.policy, known))
        try:
            await engine.start()
            if config.rollout.backend == "transformers":
                return type(engine._booted.model).__name__  # type: ignore[attr-defined]
            return str(engine._adapter._llm.vllm_config.model_config.architecture)  # type: ignore[attr-defined]
        finally:
            await engine.close()

    return asyncio.run(run())


def test_a_tokenizer_of_its_own(model: Path, tmp_path: Path) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer()._tokenizer, eos_token="<|pad|>")
    other.save_pretrained(tmp_path / "other")
    policy = PolicyConfig(model_name_or_path=str(model), tokenizer_name_or_path=str(tmp_path / "other"))
    known = load_tokenizer(policy)
    assert known.eos_token == "<|pad|>"
    assert eos_token_ids(policy, known) == {256, 257}, "the model's own and the tokenizer's"
    missing = PolicyConfig(model_name_or_path=str(model), tokenizer_name_or_path=str(tmp_path / "nope"))
    with pytest.raises(EngineConfigError, match=r"policy\.tokenizer_name_or_path = .*nope"):
        load_tokenizer(missing)


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_the_embedded_engine_runs_a_models_code_where_it_is_trusted(
    model: Path, load_format: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_own_code(model)
    monkeypatch.setattr(Embedded, "rollout", {"load_format": load_format})
    with pytest.raises(EngineConfigError, match=TRUST):
        boot(config(Embedded, model))
    with caplog.at_level(logging.WARNING):
        assert boot(config(Embedded, model, trust_remote_code=True)) == "OwnForCausalLM"
    assert "policy.trust_remote_code = true" in caplog.text


def test_the_embedded_engine_knows_what_external_modules_register(model: Path, tmp_path: Path) -> None:
    need_module(model, tmp_path, "cosmos_test_embedded")
    with pytest.raises(EngineConfigError, match="cosmos-test-embedded"):
        boot(config(Embedded, model))
    named = config(Embedded, model, external_modules=["cosmos_test_embedded"])
    with pytest.raises(EngineConfigError, match=r"policy\.external_modules: `cosmos_test_embedded` cannot be"):
        boot(named)
    with importable(tmp_path):
        assert boot(named) == "OwnForCausalLM"


@pytest.mark.slow
def test_vllms_processes_import_external_modules(model: Path, tmp_path: Path) -> None:
    need_module(model, tmp_path, "cosmos_test_vllm")
    module = tmp_path / "cosmos_test_vllm.py"
    leaves_a_trace = (
        "import os, pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, f'imported-{{os.getpid()}}').touch()\n"
        "from vllm import ModelRegistry\n"
        "ModelRegistry.register_model('OwnForCausalLM', 'vllm.model_executor.models.qwen3:Qwen3ForCausalLM')\n"
    )
    module.write_text(module.read_text() + leaves_a_trace)
    tokenizer().save_pretrained(tmp_path / "words")
    with pytest.raises(EngineConfigError, match="cosmos-test-vllm"):
        boot(config(Vllm, model))
    with importable(tmp_path):
        named = config(
            Vllm, model, external_modules=["cosmos_test_vllm"], tokenizer_name_or_path=str(tmp_path / "words")
        )
        assert boot(named) == "OwnForCausalLM"
    assert len(list(tmp_path.glob("imported-*"))) >= 2, "in this process and in vLLM's"


@pytest.mark.slow
def test_vllm_runs_a_models_code_where_it_is_trusted(model: Path) -> None:
    bring_own_code(model)
    with pytest.raises(EngineConfigError, match="trust_remote_code"):
        boot(config(Vllm, model))
    assert boot(config(Vllm, model, trust_remote_code=True))
