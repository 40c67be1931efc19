"""The embedded engine keeps the contract of all engines, in both ways of updating running requests."""

from __future__ import annotations

import copy
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rollout_worker.engines.base import Engine, EngineFailed, Generation, SamplingSettings, WeightMismatch
from rollout_worker.engines.transformers import TransformersEngine, engine
from rollout_worker.engines.transformers.settings import settings_of
from schema.config import Config
from schema.config.sections.policy import LoraConfig
from tests.rollout_worker.engines.engine_contract import (
    EOS,
    EngineContract,
    KeepKvContract,
    Subject,
    _until,
    check_logprobs,
    request,
    running,
)
from tests.rollout_worker.tiny import random_model, tokenizer
from tests.rollout_worker.versions import Versions, nudged
from weight_sync import lora
from weight_sync.parking import Parked


class TestTransformers(EngineContract):
    backend = "transformers"

    @classmethod
    def make(cls, config: Config) -> Engine:
        """Without patience: an update never waits for running samples, so it always meets some."""
        return TransformersEngine(replace(settings_of(config), patience=0.0), tokenizer(), frozenset({EOS}))


class TestKeepKv(KeepKvContract):
    """With a cache that outlives updates; the rest of the contract is the same engine's above."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        with running(
            TestTransformers, tmp_path_factory.mktemp("keep"), weight_sync={"update_mode": "keep_kv"}
        ) as subject:
            yield subject


class TestSleep:
    """What a sleeping engine holds; its parameters leave the device as they do on a GPU."""

    @pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
    def test_memory_is_released(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
        monkeypatch.setattr(engine, "Parked", partial(Parked, stays="nowhere"))
        settings = SamplingSettings(max_tokens=60, ignore_eos=True)
        with running(TestTransformers, tmp_path, weight_sync={"update_mode": mode}) as subject:
            subject.load(0, 0)
            before, after = request("x", settings, range(4)), request("x", settings, range(4))
            undisturbed = subject.generate([before])
            embedded = subject.engine
            assert isinstance(embedded, TransformersEngine)
            decoder = embedded._decoder

            async def nap() -> list[Generation]:
                tokens = embedded.stats().tokens
                embedded.submit([after])
                await _until(lambda: embedded.stats().tokens > tokens)
                await embedded.sleep()
                assert decoder.window.layers == []
                assert [alive for cache in caches if (alive := cache()) is not None] == []
                assert {p.untyped_storage().nbytes() for p in decoder.model.parameters()} == {0}
                await embedded.wake()
                return await subject._collect(4)

            caches = [weakref.ref(layer.keys) for layer in decoder.window.layers]
            assert caches
            found = subject.run(nap())
            for sample in found:
                same = undisturbed[before.request_id, sample.index]
                assert sample.token_ids.tolist() == same.token_ids.tolist()


class TestHalfPrecision:
    """An engine in bfloat16 of weights published in float32: bits are lost, the others compared."""

    def test_the_served_weights_are_compared_with_the_copy(self, tmp_path: Path) -> None:
        rollout = {**TestTransformers.config(tmp_path).rollout.model_dump(), "dtype": "bfloat16"}
        versions = Versions(tmp_path)
        with running(TestTransformers, tmp_path, rollout=rollout) as subject:
            model = copy.deepcopy(subject.models[0])
            subject.follow(versions, versions.publish(model, 4))
            nudged(model, 5)
            publication = versions.publish(model, 5)
            assert subject.follow(versions, publication).mode == "in_place"
            checksum = subject.checksum()
            assert (checksum.content_hash, checksum.exact) == (publication.content_hash, False)
            served = subject.engine._decoder.model  # type: ignore[attr-defined]
            served.model.norm.weight.data[3] += 1
            checksum = subject.checksum()
            assert checksum.content_hash is None
            assert checksum.problems == ["model.norm.weight differs from the host's copy"]
            nudged(model, 6)
            versions.fetched(versions.publish(model, 6))  # the copy moves on: nothing to compare with
            checksum = subject.checksum()
            assert (checksum.content_hash, checksum.problems) == (None, [])
        versions.close()


class TestAdapters:
    """Adapters that are published alone, next to the model that the engine has loaded."""

    def test_they_are_loaded_written_over_and_read_back(self, tmp_path: Path) -> None:
        keys = {
            "r": 16,
            "target_modules": "all-linear",
            "modules_to_save": ["model.norm"],
            "use_rslora": True,
            "use_dora": True,
        }
        versions = Versions(tmp_path, "adapter")
        rollout = {**TestTransformers.config(tmp_path).rollout.model_dump(), "load_format": "auto"}
        sections = {"policy": {"lora": keys}, "weight_sync": {"lora": "adapter"}, "rollout": rollout}
        with running(TestTransformers, tmp_path, loaded=False, **sections) as subject:
            plain, model = subject.models[0], copy.deepcopy(subject.models[0])
            lora.inject(model, LoraConfig(**keys | {"init_lora_weights": False}))
            wanted = request([1, 2, 3], SamplingSettings(max_tokens=12, ignore_eos=True), (5, 6))
            for version, mode in ((4, "full"), (5, "in_place"), (6, "in_place")):
                nudged(model, version, share=0.005)
                publication = versions.publish(model, version)
                assert publication.n_bytes < sum(p.nbytes for p in plain.parameters())
                report = subject.follow(versions, publication)
                assert report.mode == mode, report.detail
                checksum = subject.checksum()
                assert (checksum.content_hash, checksum.exact) == (publication.content_hash, True)
                again = replace(wanted, request_id=f"{version}")
                for sample in subject.generate([again]).values():
                    check_logprobs(model, again, sample)
                    with pytest.raises(AssertionError):
                        check_logprobs(plain, again, sample)
            served = subject.engine._decoder.model  # type: ignore[attr-defined]
            layer = served.model.layers[1].mlp.up_proj.lora_B["default"]
            layer.weight.data.view(torch.int32)[3] ^= 1
            assert subject.checksum().content_hash not in (None, publication.content_hash)
            whole = Versions(tmp_path / "whole")
            with pytest.raises(WeightMismatch, match="no such tensor"):
                subject.follow(whole, whole.publish(plain, 7))
        versions.close()
        whole.close()


class TestDamage:
    """Weights that change where nobody wrote them, in an engine of its own."""

    def test_a_flipped_bit_is_seen_and_the_next_full_load_mends_it(self, tmp_path: Path) -> None:
        versions = Versions(tmp_path)
        with running(TestTransformers, tmp_path) as subject:
            model = copy.deepcopy(subject.models[0])
            publication = versions.publish(model, 4)
            subject.follow(versions, publication)
            served = subject.engine._decoder.model  # type: ignore[attr-defined]
            served.model.norm.weight.data.view(torch.int32)[3] ^= 1
            assert subject.checksum().content_hash not in (None, publication.content_hash)
            nudged(model, 5)
            publication = versions.publish(model, 5, full=True)
            assert subject.follow(versions, publication).mode == "full"
            assert subject.checksum().content_hash == publication.content_hash

    def test_a_model_that_was_moved_is_loaded_whole(self, tmp_path: Path) -> None:
        versions = Versions(tmp_path)
        with running(TestTransformers, tmp_path) as subject:
            model = copy.deepcopy(subject.models[0])
            subject.follow(versions, versions.publish(model, 4))
            served = subject.engine._decoder.model  # type: ignore[attr-defined]
            served.model.norm.weight.data = served.model.norm.weight.data.clone()
            nudged(model, 5)
            publication = versions.publish(model, 5)
            report = subject.follow(versions, publication)
            assert report.mode == "full"
            assert "model.norm.weight has moved in memory" in report.detail
            assert subject.checksum().content_hash == publication.content_hash

    def test_a_copy_that_cannot_be_read_ends_generation(self, tmp_path: Path) -> None:
        """It was removed, and its replica leaves before it is there again."""
        versions = Versions(tmp_path)
        with running(TestTransformers, tmp_path) as subject:
            model = copy.deepcopy(subject.models[0])
            subject.follow(versions, versions.publish(model, 4))
            nudged(model, 5)
            weights = versions.fetched(versions.publish(model, 5, full=True))
            shutil.rmtree(versions.copy.directory)
            versions.copy._stop.set()
            with pytest.raises(EngineFailed, match="version 5 cannot be read from the host's copy"):
                subject.run(subject.engine.load_weights(weights, 5))
            assert subject.checksum().problems == ["no weights are served"]

    def test_changes_that_contradict_each_other_end_generation(self, tmp_path: Path) -> None:
        """The engine ties its output layer, the trainer does not any more: what was written is not what is there."""
        versions = Versions(tmp_path)
        with running(TestTransformers, tmp_path) as subject:
            trainer = random_model(1, tie_word_embeddings=False)
            trainer.lm_head.weight.data.copy_(trainer.model.embed_tokens.weight)
            assert subject.follow(versions, versions.publish(trainer, 4)).mode == "full"
            trainer.lm_head.weight.data[5] += 1
            trainer.model.embed_tokens.weight.data[5] -= 1
            weights = versions.fetched(versions.publish(trainer, 5))
            with pytest.raises(WeightMismatch, match="differ after loading"):
                subject.run(subject.engine.load_weights(weights, 5))
            assert subject.engine.version == -1
            assert subject.checksum().problems == ["no weights are served"]
            tied = versions.publish(subject.models[0], 6, full=True)
            assert subject.follow(versions, tied).mode == "full"
