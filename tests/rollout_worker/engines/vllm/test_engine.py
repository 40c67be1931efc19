"""What vLLM promises beyond the common contract: real engines, each booted once for its group of tests."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch

from rollout_worker.engines import create_engine
from rollout_worker.engines.base import EngineConfigError, EngineFailed, Generation, SamplingSettings, WeightMismatch
from rollout_worker.engines.vllm.arguments import engine_arguments, sampling_arguments
from schema.config import Config
from schema.config.sections.policy import LoraConfig
from tests.rollout_worker.engines.engine_contract import (
    EOS,
    MAX_LEN,
    EngineContract,
    Subject,
    check_logprobs,
    encode,
    log_softmax,
    plain_logits,
    request,
    running,
    token_versions,
)
from tests.rollout_worker.tiny import publish_model, random_model, save_model, tokenizer
from tests.rollout_worker.versions import Versions, nudged
from tests.support.fetched import fetch
from tests.support.waiting import PATIENCE, until
from weight_sync import DirectoryStore, collect, hub_tensors, lora

pytestmark = pytest.mark.slow

FREE = SamplingSettings(max_tokens=MAX_LEN, ignore_eos=True)


class Vllm(EngineContract):
    backend = "vllm"


def config_of(root: Path, **sections: Any) -> Config:
    return Vllm.config(save_model(root / "model", random_model(1)), **sections)


def keys_of(rollout: dict[str, Any]) -> dict[str, Any]:
    """Keys of `[rollout]` of a small engine."""
    small = {"backend": "vllm", "dtype": "float32", "max_num_seqs": 16, "max_concurrent_samples": 16}
    return {**small, "parallelism": {"tp_size": 1}, **rollout}


def settings_of(root: Path, model: Any, rollout: dict[str, Any]) -> Config:
    """The configuration of a small engine of this model."""
    return Vllm.config(save_model(root / "model", model), rollout=keys_of(rollout))


def subject_of(
    root: Path, models: list[Any], rollout: dict[str, Any], *, loaded: bool = True, **sections: Any
) -> AbstractContextManager[Subject]:
    return running(Vllm, root, models, loaded=loaded, rollout=keys_of(rollout), **sections)


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [child for child in found if child.name().startswith("VLLM")]


def unused_segments() -> set[Path]:
    """Shared memory between vLLM's processes that no other process uses: other engines may run on this machine."""
    found = set(Path("/dev/shm").glob("vllm_dist_*"))
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = "" if maps.parent.name == str(os.getpid()) else maps.read_text()
            used |= {path for path in found if str(path) in text}
    return found - used


class TestAdapters:
    """Adapters that are published alone, in vLLM's own low-rank layers."""

    KEYS: ClassVar[dict[str, Any]] = {
        "r": 4, "lora_alpha": 6.0, "target_modules": "all-linear", "use_rslora": True,
        "r_pattern": {"down_proj": 8}, "alpha_pattern": {r"layers\.0.*": 3.0},
    }  # fmt: skip

    @pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
    def test_each_version_is_what_is_served(self, tmp_path: Path, ranks: int) -> None:
        plain, model = random_model(1), random_model(1)
        lora.inject(model, LoraConfig(**self.KEYS | {"init_lora_weights": False}))
        versions, others = Versions(tmp_path, "adapter"), Versions(tmp_path / "others", "adapter")
        rollout = {"load_format": "auto", "parallelism": {"tp_size": ranks}}
        sections = {"policy": {"lora": self.KEYS}, "weight_sync": {"lora": "adapter"}}
        with subject_of(tmp_path, [plain], rollout, loaded=False, **sections) as subject:
            engine: Any = subject.engine
            for version in (4, 5, 6):
                nudged(model, version)
                publication = versions.publish(model, version)
                report = subject.follow(versions, publication)
                assert (report.mode, report.detail) == ("full", "")
                checksum = subject.checksum()
                assert (checksum.content_hash, checksum.problems) == (publication.content_hash, [])
                wanted = request([1, 2, 3], SamplingSettings(max_tokens=12, ignore_eos=True), (5, 6))
                for sample in subject.generate([wanted]).values():
                    check_logprobs(model, wanted, sample)
                    with pytest.raises(AssertionError):
                        check_logprobs(plain, wanted, sample)
            nudged(model, 7)
            other = others.fetched(others.publish(model, 7))
            place = {"copy": str(other.copy_directory), "content_hash": other.publication.content_hash}
            problems = subject.run(engine._adapter.compare(place | engine._settings))
            assert len(problems) == 2 * 2 * (3 + 1 + 2 + 1), "A and B of each slice, in each layer"
            assert all("is not what was published" in problem for problem in problems)
            whole = Versions(tmp_path / "whole")
            with pytest.raises(WeightMismatch, match="the adapter cannot be loaded"):
                subject.follow(whole, whole.publish(plain, 7))
        for line in (versions, others, whole):
            line.close()


class TestUntied:
    """An output layer of its own, and engine settings other than the defaults."""

    ROLLOUT: ClassVar[dict[str, Any]] = {
        "max_num_batched_tokens": 512,
        "block_size": 32,
        "seed": 5,
        "load_format": "auto",
        "engine_kwargs": {"enable_prefix_caching": True, "scheduling_policy": "priority"},
    }

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        models = [random_model(seed, tie_word_embeddings=False) for seed in (1, 2, 3)]
        output_layer_only = random_model(1, tie_word_embeddings=False)
        output_layer_only.lm_head.weight.data.copy_(models[1].lm_head.weight.data)
        with subject_of(tmp_path_factory.mktemp("untied"), [*models, output_layer_only], cls.ROLLOUT) as subject:
            yield subject

    def test_engine_settings_arrive(self, subject: Subject) -> None:
        found = subject.engine._adapter._llm.vllm_config  # type: ignore[attr-defined]
        assert found.scheduler_config.max_num_seqs == 16
        assert found.scheduler_config.max_num_batched_tokens == 512
        assert found.scheduler_config.enable_chunked_prefill is False
        assert found.scheduler_config.policy == "priority"
        assert found.cache_config.block_size == 32
        assert found.cache_config.enable_prefix_caching is True
        assert found.model_config.seed == 5
        assert found.model_config.enforce_eager is True
        assert found.model_config.max_model_len == MAX_LEN
        assert found.model_config.dtype is torch.float32
        assert found.model_config.logprobs_mode == "processed_logprobs"
        assert found.cache_config.kv_cache_memory_bytes < 2**28, "not a share of the whole machine"

    def test_every_version_is_exact(self, subject: Subject) -> None:
        """The output layer alone, then everything, then back: nothing is ever left over."""
        for version, which in enumerate([0, 3, 1, 2, 0]):
            subject.load(which, version)
            wanted = request("What is 1+1?", SamplingSettings(max_tokens=20), (1, 2))
            found = subject.generate([wanted])
            for i in range(2):
                check_logprobs(subject.models[which], wanted, found[wanted.request_id, i])

    def test_cached_prompts_of_older_versions_are_not_used(self, subject: Subject) -> None:
        """The same prompt, longer than two blocks of the cache, before and after an update."""
        prompt = encode("0123456789" * 7)
        for version, which in ((10, 0), (11, 1), (12, 0)):
            subject.load(which, version)
            for _ in range(2):
                wanted = request(prompt, SamplingSettings(max_tokens=6, ignore_eos=True))
                check_logprobs(subject.models[which], wanted, subject.one(wanted))

    def test_weights_without_a_store(self, subject: Subject) -> None:
        class InMemory:
            def tensors(self) -> Any:
                return hub_tensors(subject.models[2])

        subject.run(subject.engine.load_weights(InMemory(), 30))
        subject.version = 30
        wanted = request("Hello", SamplingSettings(max_tokens=10))
        check_logprobs(subject.models[2], wanted, subject.one(wanted))

    @pytest.mark.parametrize(
        ("extra", "allowed"),
        [
            ({"allowed_token_ids": [65, 66, 67]}, {65, 66, 67}),
            ({"logit_bias": {70: 100.0}}, {70}),
            ({"bad_words": ["A"]}, set(range(258)) - {encode("A")[0]}),
        ],
    )
    def test_passed_through_sampling_fields_act(
        self, subject: Subject, extra: dict[str, Any], allowed: set[int]
    ) -> None:
        settings = SamplingSettings(max_tokens=40, ignore_eos=True, extra=extra)
        wanted = request("x", settings, range(8))
        drawn = {t for sample in subject.generate([wanted]).values() for t in sample.token_ids.tolist()}
        assert drawn <= allowed
        if len(allowed) < 10:
            assert drawn == allowed

    def test_a_version_that_was_collected_after_it_was_fetched(self, subject: Subject, tmp_path: Path) -> None:
        weights = fetch(tmp_path, publish_model(tmp_path, subject.models[2], 39))
        assert len(collect(DirectoryStore(tmp_path), [], name="test-39")) == 1
        subject.run(subject.engine.load_weights(weights, 39))
        subject.version = 39
        wanted = request("Hello", SamplingSettings(max_tokens=5))
        check_logprobs(subject.models[2], wanted, subject.one(wanted))

    def test_files_that_changed_are_refused_and_the_next_version_helps(
        self, subject: Subject, tmp_path: Path
    ) -> None:
        weights = fetch(tmp_path, publish_model(tmp_path, subject.models[1], 40))
        file = next(tmp_path.rglob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(WeightMismatch, match="its files have changed since they were fetched"):
            subject.run(subject.engine.load_weights(weights, 40))
        assert subject.engine.version == -1
        subject.load(1, 41)
        wanted = request("Hello", SamplingSettings(max_tokens=5))
        check_logprobs(subject.models[1], wanted, subject.one(wanted))

    def test_no_secrets_in_its_processes(self, subject: Subject) -> None:
        assert children()
        for child in children():
            variables = Path(f"/proc/{child.pid}/environ").read_bytes()
            assert b"COSMOS_TOKEN" not in variables


class TestKeepKv:
    """Requests go on with the cache they have; computed in bfloat16 from float32 weights."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        models = [random_model(seed) for seed in (1, 2)]
        root, rollout = tmp_path_factory.mktemp("keep"), {"dtype": "bfloat16", "load_format": "dummy"}
        with subject_of(root, models, rollout, weight_sync={"update_mode": "keep_kv"}) as subject:
            yield subject

    def test_the_cache_outlives_an_update_and_versions_say_so(self, subject: Subject) -> None:
        wanted = request("x", FREE, range(16))

        async def swap() -> list[Generation]:
            subject.engine.submit([wanted])
            while subject.engine.stats().tokens < 400:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await subject.engine.load_weights(subject.weights[1], 1)
            return await subject._collect(16)

        found = subject.run(swap())
        subject.version = 1
        errors = []
        for sample in found:
            assert token_versions(sample) == [0] * len(sample.token_ids), "as old as its cache"
            tokens = sample.token_ids.tolist()
            plain = plain_logits(subject.models[1], encode("x"), tokens)
            late = [log_softmax(plain[i])[tokens[i]] - sample.logprobs[i] for i in range(60, len(tokens))]
            errors.append(np.abs(late).max(initial=0.0))
        assert max(errors) > 0.5, "under the new weights alone the log-probs would be others"
        after = subject.one(request("x", SamplingSettings(max_tokens=8)))
        assert token_versions(after) == [1] * len(after.token_ids)

    def test_the_published_weights_are_cast(self, subject: Subject) -> None:
        model = random_model(2).to(torch.bfloat16).float()
        wanted = request("Hello", SamplingSettings(max_tokens=12), range(4))
        found = subject.generate([wanted])
        for i in range(4):
            sample = found[wanted.request_id, i]
            tokens = sample.token_ids.tolist()
            logits = plain_logits(model, encode("Hello"), tokens)
            expected = [log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True)]
            np.testing.assert_allclose(sample.logprobs, expected, atol=0.3)

    def test_changes_are_cast_and_compared_with_the_copy(self, subject: Subject, tmp_path: Path) -> None:
        versions, model = Versions(tmp_path), copy.deepcopy(subject.models[0])
        modes = []
        for version in (4, 5):
            nudged(model, version)
            publication = versions.publish(model, version)
            modes.append(subject.follow(versions, publication).mode)
            checksum = subject.checksum()
            assert (checksum.content_hash, checksum.exact) == (publication.content_hash, False)
        assert modes == ["full", "in_place"]
        nudged(model, 6)
        versions.fetched(versions.publish(model, 6))  # the copy moves on: nothing to compare with
        checksum = subject.checksum()
        assert (checksum.content_hash, checksum.problems) == (None, [])
        versions.close()

    def test_a_prompt_cached_under_another_timeline_is_computed_anew(self, subject: Subject, tmp_path: Path) -> None:
        """The same version number, other weights: kept caches of the first must not serve the second."""
        versions, prompt = Versions(tmp_path), encode("blocks of sixteen: " + "0123456789" * 4)
        for which in (0, 1, 0):
            subject.follow(versions, versions.publish(subject.models[which], 7, full=True))
            model = copy.deepcopy(subject.models[which]).to(torch.bfloat16).float()
            wanted = request(prompt, SamplingSettings(max_tokens=4), (1, 2))
            found = subject.generate([wanted])
            for i in range(2):
                tokens = found[wanted.request_id, i].token_ids.tolist()
                logits = plain_logits(model, prompt, tokens)
                expected = [log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True)]
                np.testing.assert_allclose(found[wanted.request_id, i].logprobs, expected, atol=0.3)
        versions.close()

    def test_a_killed_engine_is_an_error_with_a_name(self, subject: Subject) -> None:
        """The last test of this engine."""
        (engine,) = children()

        async def kill() -> None:
            subject.engine.submit([request("x", FREE, range(4))])
            await asyncio.sleep(0.05)
            engine.send_signal(signal.SIGKILL)
            while True:
                await subject.engine.collect()

        with pytest.raises(EngineFailed, match="vLLM"):
            subject.run(kill())
        with pytest.raises(EngineFailed, match="vLLM"):
            subject.run(subject.engine.load_weights(subject.weights[0], 2))
        with pytest.raises(EngineFailed, match="vLLM"):
            subject.run(subject.engine.collect())


class TestTensorParallel:
    def test_two_ranks_load_and_prove_their_shards(self, tmp_path: Path) -> None:
        models = [random_model(seed) for seed in (1, 2)]
        before = unused_segments()
        with subject_of(tmp_path, models, {"parallelism": {"tp_size": 2}}) as subject:
            for version, which in enumerate((0, 1, 0)):
                subject.load(which, version)
                wanted = request("What is 1+1?", SamplingSettings(max_tokens=16), (1, 2))
                found = subject.generate([wanted])
                for i in range(2):
                    check_logprobs(subject.models[which], wanted, found[wanted.request_id, i])
            self.check_changes_in_place(subject, tmp_path / "line")
            wrong = fetch(tmp_path, publish_model(tmp_path, random_model(1, num_hidden_layers=1), 9))
            with pytest.raises(WeightMismatch, match=r"layers\.1\."):
                subject.run(subject.engine.load_weights(wrong, 9))
        until(lambda: not children(), "the end of all processes")
        until(lambda: not unused_segments() - before, "the end of all shared memory")

    def check_changes_in_place(self, subject: Subject, root: Path) -> None:
        """Each rank writes its rows and columns; put together they are the published tensors."""
        versions, model = Versions(root), copy.deepcopy(subject.models[0])
        modes = []
        for version in range(4, 7):
            nudged(model, version)
            publication = versions.publish(model, version)
            modes.append(subject.follow(versions, publication).mode)
            checksum = subject.checksum()
            assert (checksum.content_hash, checksum.exact) == (publication.content_hash, True)
            wanted = request("What is 1+1?", SamplingSettings(max_tokens=16))
            check_logprobs(model, wanted, subject.one(wanted))
        assert modes == ["full", "in_place", "in_place"]
        versions.close()


class TestRefusals:
    """Settings that vLLM cannot work with end the start, and no process is left."""

    @pytest.mark.parametrize(
        ("rollout", "message"),
        [
            ({"engine_kwargs": {"max_num_batchd": 1}}, r"engine_kwargs\.max_num_batchd: vLLM has no such"),
            (
                {"sampling_config": {"extra": {"allowed_tokens": [1]}}},
                r"allowed_tokens: .*did you mean allowed_token_ids\?",
            ),
            ({"max_num_batched_tokens": 16}, "^vLLM refuses these settings: max_num_batched_tokens"),
            (
                {"quantization": "no_such_method"},
                "^vLLM refuses these settings: Unknown quantization method: no_such_method",
            ),
        ],
    )
    def test_settings_that_vllm_cannot_work_with(self, tmp_path: Path, rollout: dict[str, Any], message: str) -> None:
        rollout = {"backend": "vllm", "parallelism": {"tp_size": 1}, **rollout}
        engine = create_engine(config_of(tmp_path, rollout=rollout), tokenizer(), frozenset({EOS}))

        async def start() -> None:
            try:
                await engine.start()
            finally:
                await engine.close()

        with pytest.raises(EngineConfigError, match=message):
            asyncio.run(start())
        until(lambda: not children(), "the end of all processes")


def test_our_names_are_those_of_the_installed_vllm() -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    rollout = {
        "parallelism": {"tp_size": 1},
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "block_size": 1,
        "quantization": "fp8",
        "vllm_use_flashinfer": True,
    }
    policy = {"model_name_or_path": "/m", "model_revision": "r", "tokenizer_name_or_path": "/t"}
    config = Config.model_validate({"rollout": rollout, "policy": policy})
    for on_cpu in (False, True):
        assert set(engine_arguments(config, known=known, on_cpu=on_cpu)) <= known
    sampling = sampling_arguments(
        SamplingSettings(max_tokens=4), seed=1, eos_token_ids={1}, prompt_tokens=1, max_model_len=9, vocabulary=9
    )
    assert set(sampling) <= set(SamplingParams.__struct_fields__)


def test_closing_while_it_boots(tmp_path: Path) -> None:
    engine = create_engine(config_of(tmp_path), tokenizer(), frozenset({EOS}))

    async def work() -> None:
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(1.0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await engine.close()

    asyncio.run(work())
    until(lambda: not children(), "the end of all processes")


INSTALLED = """
import inspect
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory as factory
from vllm.distributed.weight_transfer.base import WeightTransferEngine as Base
from vllm.model_executor.layers import utils
from vllm.plugins import load_general_plugins
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker.gpu_worker import Worker

layer = torch.nn.Linear(64, 32, bias=False).requires_grad_(False)
utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
assert layer.weight.numel() == 0, "vLLM keeps the weights of its layers now: our replacement can go"

before = utils.dispatch_cpu_unquantized_gemm
load_general_plugins()
from rollout_worker.engines.vllm.plugin import register
register()
assert utils.dispatch_cpu_unquantized_gemm is before, "others who run vLLM keep its function"
Ours = factory._registry["cosmos_store"]()

from rollout_worker.engines.vllm import transfer
assert Ours is transfer.StoreWeightTransferEngine and issubclass(Ours, Base) and not inspect.isabstract(Ours)
for name in ("init_transfer_engine", "start_weight_update", "update_weights", "receive_weights",
             "finish_weight_update", "shutdown"):
    ours, theirs = (list(inspect.signature(getattr(c, name)).parameters) for c in (Ours, Base))
    assert ours == theirs, (name, ours, theirs)
assert Ours.defers_processing and Base.defers_processing is False
for name in ("start_weight_update", "update_weights", "finish_weight_update"):
    assert callable(getattr(Worker, name))
own = {name for name in vars(transfer.WorkerExtension) if not name.startswith("__")}
assert own and all(name.startswith("cosmos_") for name in own), own
for name in ("collective_rpc", "update_weight_version", "resume_generation"):
    assert inspect.iscoroutinefunction(getattr(AsyncLLM, name))
"""


class TestPlugin:
    """vLLM's entry point: its one replacement, for CPUs, and its silence where somebody else runs vLLM."""

    def test_the_installed_vllm_takes_our_parts_and_still_needs_them(self) -> None:
        """Everything that vLLM calls is there with its arguments, and our extension hides nothing of its worker.

        In a process of its own: an engine that ran in this one may have replaced the function already.
        """
        subprocess.run([sys.executable, "-c", INSTALLED], check=True, timeout=PATIENCE)

    @pytest.fixture
    def layer(self) -> torch.nn.Module:
        return torch.nn.Linear(64, 32, bias=False).requires_grad_(False)

    def test_layers_compute_from_their_weights(self, layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.layers import utils

        from rollout_worker.engines.vllm.plugin import keep_cpu_weights_replaceable

        original = utils.dispatch_cpu_unquantized_gemm
        monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", original)
        keep_cpu_weights_replaceable()
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        layer.weight.data.fill_(2.0)
        found = utils.cpu_unquantized_gemm(layer, torch.ones(1, 64), layer.weight)
        assert found.tolist() == [[128.0] * 32]
