"""The public contract suite of inference engines: what `rollout_worker.engines.base` promises, checked.

A test module of an engine subclasses `EngineContract` and names the backend:

    class TestTransformers(EngineContract):
        backend = "transformers"

The engine runs in float32 on a tiny random model, so that log-probs can be compared with a plain forward of the
same model, restricted by an implementation of penalties and filters that is independent of any engine's.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import threading
from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch

from policy_worker.model.logits.drawn import Reshaping
from policy_worker.model.micro_batch import BatchLayout, TrainSample, collate
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import prepare_model
from rollout_worker.engines import create_engine
from rollout_worker.engines.base import (
    Checksum,
    Engine,
    EngineFailed,
    Generation,
    GenerationRequest,
    LoadReport,
    SamplingSettings,
    WeightMismatch,
)
from rollout_worker.groups.leasing import training_settings
from rollout_worker.groups.pushing import to_sample
from schema.config import Config
from schema.wire.messages import LeasedGroup
from schema.wire.sample import decode_sample, encode_sample
from schema.wire.weights import Publication
from tests.rollout_worker.tiny import publish_model, random_model, save_model, tokenizer
from tests.rollout_worker.versions import Versions, nudged
from tests.support.devices import rounding
from tests.support.fetched import Weights, fetch
from tests.support.waiting import PATIENCE

T = TypeVar("T")
EOS = 256
MAX_LEN = 96
TOLERANCE = rounding(1e-4)
BOOT_S = 600.0
"""An engine of several processes needs a minute and more where others work, too."""
ATTEMPTS = 10
"""At meeting an engine in the midst of its work: on a busy machine it may be done before anybody looks."""
PROMPTS = ["What is 1+1?", "Hello", "x", "A much longer prompt, to be padded: 0123456789."]
_PATIENCE = PATIENCE * (4 if os.environ.get("TRITON_INTERPRET") else 1)
"""Where Triton's kernels are interpreted, an engine needs half a minute for what else is done in two seconds."""
_ids = itertools.count()


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text)["input_ids"]
    return ids


def request(prompt: str | list[int], settings: SamplingSettings, seeds: Sequence[int] = (11,)) -> GenerationRequest:
    ids = encode(prompt) if isinstance(prompt, str) else prompt
    return GenerationRequest(f"r{next(_ids)}", ids, tuple(seeds), settings)


@dataclass
class Subject:
    """An engine under test, on an event loop of its own thread, with the models whose weights it is given."""

    engine: Engine
    models: list[Any]
    weights: list[Weights]
    loop: asyncio.AbstractEventLoop
    version: int = 0

    def run(self, work: Coroutine[Any, Any, T], seconds: float = _PATIENCE) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self.loop)
        return future.result(seconds + _PATIENCE)

    def load(self, which: int, version: int) -> None:
        self.run(self.engine.load_weights(self.weights[which], version))
        self.version = version

    def follow(self, versions: Versions, publication: Publication) -> LoadReport:
        """Bring the engine to a publication of a line of versions, by way of the host's copy."""
        return self.run(self._follow(versions, publication))

    async def _follow(self, versions: Versions, publication: Publication) -> LoadReport:
        self.version = -1
        weights = await asyncio.to_thread(versions.fetched, publication)
        report = await self.engine.load_weights(weights, publication.version)
        self.version = publication.version
        assert self.engine.version == publication.version
        assert report.publication == publication
        return report

    def checksum(self) -> Checksum:
        return self.run(self.engine.checksum())

    async def _collect(self, wanted: int) -> list[Generation]:
        found: list[Generation] = []
        while len(found) < wanted:
            found += await self.engine.collect()
        return found

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        self.engine.submit(requests)
        return await self._collect(sum(len(one.seeds) for one in requests))

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[tuple[str, int], Generation]:
        """All samples of these requests, each exactly once."""
        found = self.run(self._generate(requests))
        keyed = {(sample.request_id, sample.index): sample for sample in found}
        assert len(keyed) == len(found)
        assert set(keyed) == {(one.request_id, i) for one in requests for i in range(len(one.seeds))}
        for sample in found:
            check_shape(sample)
        return keyed

    def one(self, wanted: GenerationRequest) -> Generation:
        return self.generate([wanted])[(wanted.request_id, 0)]


def check_shape(sample: Generation) -> None:
    n = len(sample.token_ids)
    assert n >= 1
    assert sample.token_ids.dtype == np.int32
    assert sample.logprobs.dtype == np.float32
    assert sample.logprobs.shape == (n,)
    assert np.isfinite(sample.logprobs).all()
    assert (sample.logprobs <= 1e-4).all()
    assert sample.version_starts.dtype == sample.version_values.dtype == np.int32
    assert sample.version_starts[0] == 0
    assert (np.diff(sample.version_starts) > 0).all()
    assert sample.version_starts[-1] < n
    assert len(sample.version_starts) == len(sample.version_values)
    assert (sample.stop_reason is None) == (sample.finish_reason == "length")


def token_versions(sample: Generation) -> list[int]:
    lengths = np.diff(np.append(sample.version_starts, len(sample.token_ids)))
    return np.repeat(sample.version_values, lengths).tolist()  # type: ignore[no-any-return]


@torch.no_grad()
def plain_logits(model: Any, prompt: Sequence[int], response: Sequence[int]) -> np.ndarray:
    """[R, V] float64: the model's logits before each response token, by one forward without any cache."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double().numpy()  # type: ignore[no-any-return]


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())  # type: ignore[no-any-return]


def distribution(
    logits: np.ndarray, prompt: Sequence[int], before: Sequence[int], settings: SamplingSettings
) -> np.ndarray:
    """Log-probs [V] of the distribution that the next token is drawn from, token by token and in plain numpy."""
    scores = logits.copy()
    ends = {*settings.stop_token_ids, *(() if settings.ignore_eos else (EOS,))}
    if len(before) < settings.min_tokens:
        scores[list(ends)] = -np.inf
    for token in {*prompt, *before}:
        penalty = settings.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(before):
        scores[token] -= settings.frequency_penalty * list(before).count(token) + settings.presence_penalty
    if settings.greedy:
        return log_softmax(scores)
    scores = scores / settings.temperature
    probabilities = np.exp(log_softmax(scores))
    scores[probabilities < settings.min_p * probabilities.max()] = -np.inf
    if settings.top_k > 0:
        scores[scores < np.sort(scores)[-settings.top_k]] = -np.inf
    if settings.top_p < 1.0:
        probabilities = np.exp(log_softmax(scores))
        total = 0.0
        for token in np.argsort(-probabilities, kind="stable"):
            if total >= settings.top_p:
                scores[token] = -np.inf
            total += probabilities[token]
    return log_softmax(scores)


def check_logprobs(model: Any, wanted: GenerationRequest, sample: Generation) -> None:
    """Every log-prob is that of the distribution sampled from, according to a plain forward of `model`."""
    response = sample.token_ids.tolist()
    prompt = list(wanted.prompt_token_ids)
    for i, logits in enumerate(plain_logits(model, prompt, response)):
        expected = distribution(logits, prompt, response[:i], wanted.settings)
        if wanted.settings.correction == "raw" and wanted.settings.greedy:
            assert expected.max() - expected[response[i]] <= TOLERANCE, f"token {i} is not the likeliest"
            expected = log_softmax(logits)
        assert np.isfinite(expected[response[i]]), f"token {i} was excluded by the settings"
        assert abs(expected[response[i]] - sample.logprobs[i]) <= TOLERANCE, f"log-prob of token {i}"
        if wanted.settings.greedy and wanted.settings.correction != "raw":
            assert expected.max() - expected[response[i]] <= TOLERANCE, f"token {i} is not the likeliest"


def check_sets(model: Any, wanted: GenerationRequest, sample: Generation) -> None:
    """Its kept sets are the ids with a finite log-prob, up to those at the edge that rounding may have moved."""
    prompt, response, settings = list(wanted.prompt_token_ids), sample.token_ids.tolist(), wanted.settings
    ends = sorted({*settings.stop_token_ids, *(() if settings.ignore_eos else (EOS,))})
    assert sample.held_ids.tolist() == (ends if settings.min_tokens else [])
    filtered = settings.top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0
    if not filtered or settings.greedy:
        assert not len(sample.kept_counts) + len(sample.kept_ids)
        return
    assert sample.kept_counts.shape == sample.token_ids.shape
    sets = np.split(sample.kept_ids, np.cumsum(sample.kept_counts)[:-1])
    moved = 0
    for i, logits in enumerate(plain_logits(model, prompt, response)):
        expected = distribution(logits, prompt, response[:i], settings)
        kept = set(sets[i].tolist()) or set(range(len(expected)))
        assert response[i] in kept
        assert len(sets[i]) == len(set(sets[i].tolist()))
        moved += kept != set(np.flatnonzero(np.isfinite(expected)).tolist())
    assert moved <= len(response) // 12


RESHAPED: dict[str, dict[str, Any]] = {
    "filters": {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "top_p alone": {"top_p": 0.6},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(32, 64))},
    "all": {
        "temperature": 1.2, "top_k": 30, "top_p": 0.9, "repetition_penalty": 0.9, "presence_penalty": 0.3,
        "frequency_penalty": -0.2, "min_tokens": 5, "stop_token_ids": list(range(60, 90)),
    },
}  # fmt: skip
"""Sampling of training rollouts that is not the plain softmax."""
RAW = {"top_k": 20, "repetition_penalty": 1.3, "min_tokens": 4, "sampling_correction": "raw"}
"""The same with log-probs that say nothing of it."""


def on_the_wire(wanted: GenerationRequest, index: int, generated: Generation) -> TrainSample:
    """A sample as a trainer gets it."""
    lease = LeasedGroup(
        group_id="g", lease_id="l", kind="train", epoch=0, position=0, attempt=1, row={}, deadline=3,
        prompt_token_ids=list(wanted.prompt_token_ids), seeds=list(wanted.seeds),
    )  # fmt: skip
    sample = to_sample(lease, index, generated, generated.finish_reason, error=None, score=1.0)
    return TrainSample.of_wire(decode_sample(encode_sample(sample)))


SETTINGS = {
    "plain": SamplingSettings(max_tokens=24),
    "greedy": SamplingSettings(max_tokens=24, temperature=0.0),
    "do_sample": SamplingSettings(max_tokens=24, do_sample=False, temperature=0.7, top_p=0.5),
    "temperature": SamplingSettings(max_tokens=24, temperature=0.6),
    "top_k": SamplingSettings(max_tokens=24, top_k=3),
    "top_p": SamplingSettings(max_tokens=24, top_p=0.6),
    "min_p": SamplingSettings(max_tokens=24, min_p=0.2),
    "repetition": SamplingSettings(max_tokens=24, repetition_penalty=1.3),
    "presence": SamplingSettings(max_tokens=24, presence_penalty=1.5),
    "frequency": SamplingSettings(max_tokens=24, frequency_penalty=0.9),
    "greedy with penalty": SamplingSettings(max_tokens=24, temperature=0.0, repetition_penalty=1.5),
    "all": SamplingSettings(
        max_tokens=24,
        temperature=1.4,
        top_k=20,
        top_p=0.8,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        min_tokens=4,
        ignore_eos=True,
    ),
}


@contextmanager
def running(
    contract: type[EngineContract], root: Path, models: Sequence[Any] = (), *, loaded: bool = True, **sections: Any
) -> Iterator[Subject]:
    """The engine of a contract, booted and, if it is to be loaded, with its first weights. models: by default two."""
    torch.set_num_threads(1)
    models = list(models) or [random_model(seed) for seed in (1, 2)]
    folder = save_model(root / "model", models[0])
    publications = [publish_model(root / "store", model, i) for i, model in enumerate(models)]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engine = contract.make(contract.config(folder, **sections))
    subject = Subject(engine, models, [fetch(root / "store", one) for one in publications], loop)
    try:
        subject.run(engine.start(), BOOT_S)
        if loaded:
            subject.load(0, 0)
        yield subject
    finally:
        subject.run(engine.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


class EngineContract:
    """Subclass it; see the module's docstring."""

    backend: ClassVar[str]
    rollout: ClassVar[dict[str, Any]] = {}
    """Further keys of `[rollout]` for this engine."""
    raw_at: ClassVar[Container[float]] = (0.6, 1.0, 1.5)
    """Of these temperatures those at which it gives raw log-probs."""
    sleeps: ClassVar[bool] = True
    """Whether it can release its memory on this machine."""

    @classmethod
    def config(cls, model: Path, **sections: Any) -> Config:
        changes = {
            "policy": {"model_name_or_path": str(model), "model_max_length": MAX_LEN, **sections.pop("policy", {})},
            "train": {"param_dtype": "float32", "train_policy": {"type": "grpo"}},
            "rollout": {
                "backend": cls.backend,
                "dtype": "float32",
                "load_format": "dummy",
                "max_num_seqs": 16,
                "max_concurrent_samples": 16,
                "parallelism": {"tp_size": 1},
                # Engines may have to know beforehand that kept sets are wanted.
                "sampling_config": {"top_p": 0.9},
                **cls.rollout,
            },
            **sections,
        }
        return Config.model_validate(changes)

    @classmethod
    def make(cls, config: Config) -> Engine:
        """The engine under test, not started."""
        return create_engine(config, tokenizer(), frozenset({EOS}))

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        with running(cls, tmp_path_factory.mktemp("contract")) as subject:
            yield subject

    @pytest.fixture(autouse=True)
    def at_first_weights(self, subject: Subject) -> None:
        if subject.version != 0:
            subject.load(0, 0)

    # ---- distributions --------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", RESHAPED)
    def test_the_first_ratio_on_policy_is_one(self, subject: Subject, tmp_path: Path, name: str) -> None:
        self._check_ratio(subject, tmp_path, RESHAPED[name])

    def test_raw_log_probs_are_those_of_the_softmax_or_refused(self, subject: Subject, tmp_path: Path) -> None:
        greedy = SamplingSettings(24, temperature=0.0, repetition_penalty=1.3, correction="raw")
        for temperature in (0.6, 1.0, 1.5):
            sampling = RAW | {"temperature": temperature}
            if temperature in self.raw_at:
                self._check_ratio(subject, tmp_path, sampling)
            else:
                settings = SamplingSettings(24, temperature=temperature, top_k=20, correction="raw")
                with pytest.raises(ValueError, match=f'correction = "raw" at temperature {temperature}'):
                    subject.one(request(PROMPTS[0], settings, (1,)))
        if 1.0 in self.raw_at:
            wanted = request(PROMPTS[0], greedy, (1,))
            check_logprobs(subject.models[0], wanted, subject.one(wanted))

    def _check_ratio(self, subject: Subject, tmp_path: Path, sampling: dict[str, Any]) -> None:
        """A trainer with the same weights finds the log-probs that come with the samples, over the wire."""
        rollout = {"sampling_config": sampling, "max_response_length": 24, "backend": self.backend}
        config = self.config(tmp_path, rollout=rollout)
        requests = [request(prompt, training_settings(config), (1, 2, 3)) for prompt in PROMPTS]
        found = subject.generate(requests)
        samples = [on_the_wire(one, i, found[one.request_id, i]) for one in requests for i in range(3)]
        model = prepare_model(PolicyModel(copy.deepcopy(subject.models[0])), packed=True, recompute=False)
        how = Reshaping.of_config(config)
        for layout in (
            BatchLayout(True, model.vocabulary, least_spared=0.0, reshaping=how),
            BatchLayout(False, 258, reshaping=how),
        ):
            batch = collate(samples, range(len(samples)), layout)
            with torch.no_grad():
                ours = model(batch, config.sampling_temperature)
            ratio = (ours.logprobs - batch.old_logprobs).exp()
            assert (ratio - 1).abs().max() <= TOLERANCE, sampling
            assert torch.isfinite(ours.entropy).all()

    @pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all", "repetition", "greedy"])
    def test_samples_bring_the_sets_they_were_drawn_from(self, subject: Subject, name: str) -> None:
        settings = replace(SETTINGS[name], correction="exact", ignore_eos=False)
        requests = [request(prompt, settings, (1, 2)) for prompt in PROMPTS[:2]]
        # Neighbours that want no sets, and more, or other ones.
        others = [SETTINGS["plain"], replace(SETTINGS["top_k"], top_k=40, correction="exact")]
        neighbours = [request(PROMPTS[2], one, (3,)) for one in others]
        found = subject.generate(requests + neighbours)
        for one in requests:
            for i in range(2):
                check_logprobs(subject.models[0], one, found[one.request_id, i])
                check_sets(subject.models[0], one, found[one.request_id, i])
        assert not len(found[neighbours[0].request_id, 0].kept_counts)
        check_sets(subject.models[0], neighbours[1], found[neighbours[1].request_id, 0])

    def test_logprobs_are_of_the_distribution_sampled_from_among_any_neighbours(self, subject: Subject) -> None:
        settings = SETTINGS.values()
        requests = [request(prompt, one, (1, 2, 3)) for prompt in PROMPTS for one in settings]
        found = subject.generate(requests)
        for one in requests:
            for i in range(3):
                check_logprobs(subject.models[0], one, found[one.request_id, i])

    def test_samples_follow_the_distribution(self, subject: Subject) -> None:
        """First tokens of many seeds against their probabilities: a chi-square statistic far below luck."""
        settings = SamplingSettings(max_tokens=1, temperature=0.8)
        n = 2048
        one = request(PROMPTS[0], settings, range(n))
        found = subject.generate([one])
        counts = np.bincount([int(sample.token_ids[0]) for sample in found.values()], minlength=258)
        logits = plain_logits(subject.models[0], one.prompt_token_ids, [0])[0]
        expected = n * np.exp(distribution(logits, one.prompt_token_ids, [], settings))
        often = expected >= 5
        observed = np.append(counts[often], counts[~often].sum())
        wanted = np.append(expected[often], max(expected[~often].sum(), 1e-9))
        statistic = float(((observed - wanted) ** 2 / wanted)[wanted > 1].sum())
        freedom = int((wanted > 1).sum()) - 1
        assert freedom >= 5
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5

    # ---- seeds ----------------------------------------------------------------------------------------

    def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(self, subject: Subject) -> None:
        """Nor on whether other samples of its prompt are asked for by the same request."""
        settings = SamplingSettings(max_tokens=20, ignore_eos=True)
        alone = [[request(prompt, settings, (70 + i + n,)) for n in (0, 830)] for i, prompt in enumerate(PROMPTS)]
        expected = [[subject.one(one) for one in pair] for pair in alone]
        crowd = [request(prompt, settings, (70 + i, 900 + i)) for i, prompt in enumerate(PROMPTS)]
        filler = [request("filler", settings, range(9)), request("and more of it", settings, range(4))]
        found = subject.generate([*filler, *reversed(crowd)])
        for one, pair in zip(crowd, expected, strict=True):
            for index, sample in enumerate(pair):
                again = found[one.request_id, index]
                assert again.token_ids.tolist() == sample.token_ids.tolist()
                np.testing.assert_allclose(again.logprobs, sample.logprobs, atol=TOLERANCE)
            assert pair[0].token_ids.tolist() != pair[1].token_ids.tolist()

    def test_the_last_sample_of_a_request_is_greedy_if_asked_for(self, subject: Subject) -> None:
        """It equals a generation at temperature 0, and the others are what they are without it."""
        settings = SamplingSettings(max_tokens=16, temperature=1.3, top_k=30)
        wanted = [replace(request(prompt, settings, (3, 1, 2)), greedy_last=True) for prompt in PROMPTS]
        plain = [request(prompt, settings, (3, 1)) for prompt in PROMPTS]
        greedy = [request(prompt, replace(settings, temperature=0.0), (7,)) for prompt in PROMPTS]
        found, sampled = subject.generate(wanted), subject.generate(plain)
        expected = subject.generate(greedy)
        for together, two, one in zip(wanted, plain, greedy, strict=True):
            tokens = [found[together.request_id, index].token_ids.tolist() for index in range(3)]
            assert tokens[:2] == [sampled[two.request_id, index].token_ids.tolist() for index in range(2)]
            assert tokens[2] == expected[one.request_id, 0].token_ids.tolist()
            assert tokens[2] not in tokens[:2]
            check_logprobs(subject.models[0], one, found[together.request_id, 2])

    def test_more_requests_than_capacity(self, subject: Subject) -> None:
        settings = SamplingSettings(max_tokens=6)
        requests = [request(PROMPTS[i % 4], settings, (i, i + 100)) for i in range(40)]
        assert len(subject.generate(requests)) == 80
        stats = subject.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    # ---- ends -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("prompt", "most", "length"), [("x", 1, 1), ("x", 7, 7), ("y" * (MAX_LEN - 5), 50, 5)])
    def test_a_sample_is_bounded_by_its_settings_and_by_the_longest_sequence(
        self, subject: Subject, prompt: str, most: int, length: int
    ) -> None:
        sample = subject.one(request(prompt, SamplingSettings(max_tokens=most, ignore_eos=True)))
        assert (len(sample.token_ids), sample.finish_reason) == (length, "length")

    def test_end_of_text_ends_a_sample_and_stays_in_it(self, subject: Subject) -> None:
        """Found by search: a seed whose sample contains the end-of-text token when it is ignored."""
        ignoring = SamplingSettings(max_tokens=60, ignore_eos=True, temperature=1.5)
        one = request(PROMPTS[0], ignoring, range(64))
        long = subject.generate([one])
        seed = next(i for i in range(64) if EOS in long[one.request_id, i].token_ids[:-1])
        tokens = long[one.request_id, seed].token_ids.tolist()
        assert len(tokens) == 60
        short = subject.one(request(PROMPTS[0], SamplingSettings(max_tokens=60, temperature=1.5), (seed,)))
        assert short.token_ids.tolist() == tokens[: tokens.index(EOS) + 1]
        assert (short.finish_reason, short.stop_reason) == ("stop", EOS)

    def test_stop_tokens(self, subject: Subject) -> None:
        free = SamplingSettings(max_tokens=30, ignore_eos=True)
        tokens = subject.one(request(PROMPTS[1], free, (4,))).token_ids.tolist()
        stop = tokens[12]
        stopped = SamplingSettings(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
        sample = subject.one(request(PROMPTS[1], stopped, (4,)))
        assert sample.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)

    def test_min_tokens_postpones_every_end(self, subject: Subject) -> None:
        stops = tuple(range(0, 256, 3))
        settings = SamplingSettings(max_tokens=20, min_tokens=9, stop_token_ids=stops)
        one = request(PROMPTS[0], settings, range(8))
        for sample in subject.generate([one]).values():
            assert len(sample.token_ids) >= 10 or sample.finish_reason == "length"
            assert not set(sample.token_ids[:9].tolist()) & {EOS, *stops}
            check_logprobs(subject.models[0], one, sample)

    @pytest.mark.parametrize("include", [False, True])
    def test_stop_strings(self, subject: Subject, include: bool) -> None:
        """Token ids are kept whole either way: `include` is about the text, which the worker makes."""
        free = SamplingSettings(max_tokens=40, ignore_eos=True)
        ascii_only = [i for i in range(256) if tokenizer().decode([i]).isascii()]
        for seed in range(200):
            tokens = subject.one(request(PROMPTS[2], free, (seed,))).token_ids.tolist()
            places = [i for i in range(8, 30) if {tokens[i], tokens[i + 1]} <= set(ascii_only)]
            if places:
                break
        string = tokenizer().decode(tokens[places[0] : places[0] + 2])
        assert len(string) == 2
        settings = SamplingSettings(
            max_tokens=40, ignore_eos=True, stop=("never!", string), include_stop_str_in_output=include
        )
        sample = subject.one(request(PROMPTS[2], settings, (seed,)))
        first = next(n for n in range(1, 41) if string in tokenizer().decode(tokens[:n], skip_special_tokens=True))
        assert sample.token_ids.tolist() == tokens[:first]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", string)

    # ---- weights --------------------------------------------------------------------------------------

    def test_weights_change_under_running_requests(self, subject: Subject) -> None:
        """Each token's log-prob is that of the weights its version names, over the whole sequence before it."""
        settings = SamplingSettings(max_tokens=MAX_LEN, ignore_eos=True)

        async def swap(requests: list[GenerationRequest]) -> list[Generation]:
            before = subject.engine.stats().tokens
            subject.engine.submit(requests)
            await _until(lambda: subject.engine.stats().tokens >= before + 75)
            await subject.engine.load_weights(subject.weights[1], 3)
            return await subject._collect(sum(len(one.seeds) for one in requests))

        for _ in range(ATTEMPTS):
            subject.load(0, 0)
            requests = [request(prompt, settings, range(4)) for prompt in PROMPTS]
            found = subject.run(swap(requests))
            subject.version = 3
            if self._check_versions(subject, requests, found):
                return
        pytest.fail("no update met a running sample")

    def _check_versions(self, subject: Subject, requests: list[GenerationRequest], found: list[Generation]) -> int:
        """How many samples are of both weights; the log-probs of all are right."""
        by_id = {one.request_id: one for one in requests}
        mixed = 0
        for sample in found:
            check_shape(sample)
            versions = token_versions(sample)
            assert versions == sorted(versions)
            assert set(versions) <= {0, 3}
            mixed += len(set(versions)) == 2
            prompt, response = by_id[sample.request_id].prompt_token_ids, sample.token_ids.tolist()
            logits = {0: subject.models[0], 3: subject.models[1]}
            plain = {v: plain_logits(model, prompt, response) for v, model in logits.items()}
            for i, version in enumerate(versions):
                expected = log_softmax(plain[version][i])[response[i]]
                assert abs(expected - sample.logprobs[i]) <= TOLERANCE, f"token {i} of version {version}"
        return mixed

    def test_weights_of_another_model_are_refused(self, subject: Subject, tmp_path: Path) -> None:
        wrong = {
            "shape": random_model(1, hidden_size=32, intermediate_size=64),
            "missing": random_model(1, num_hidden_layers=1),
            "unknown": random_model(1, num_hidden_layers=3),
        }
        for i, (name, model) in enumerate(wrong.items()):
            weights = fetch(tmp_path, publish_model(tmp_path, model, i))
            with pytest.raises(WeightMismatch):
                subject.run(subject.engine.load_weights(weights, 50 + i))
            assert subject.engine.version == -1, name
            subject.version = -1
        waiting = request(PROMPTS[0], SamplingSettings(max_tokens=4))
        subject.run(_submit(subject.engine, [waiting]))
        with pytest.raises(TimeoutError):
            subject.run(asyncio.wait_for(subject.engine.collect(), 0.3))
        subject.load(0, 0)
        (sample,) = subject.run(subject._collect(1))
        check_logprobs(subject.models[0], waiting, sample)

    # ---- weights that change in place ----------------------------------------------------------------

    @pytest.fixture
    def versions(self, tmp_path: Path) -> Iterator[Versions]:
        versions = Versions(tmp_path)
        yield versions
        versions.close()

    def test_changes_are_written_in_place_and_the_weights_read_back(
        self, subject: Subject, versions: Versions
    ) -> None:
        model = copy.deepcopy(subject.models[0])
        nudged(model, 4)
        publication = versions.publish(model, 4)
        assert subject.follow(versions, publication).mode == "full"
        checksum = subject.checksum()
        assert (checksum.content_hash, checksum.exact) == (publication.content_hash, True)
        for version in (5, 6):
            nudged(model, version)
            publication = versions.publish(model, version)
            report = subject.follow(versions, publication)
            assert (report.mode, report.detail) == ("in_place", "")
            checksum = subject.checksum()
            assert (checksum.content_hash, checksum.exact) == (publication.content_hash, True)
            wanted = request(PROMPTS[0], SamplingSettings(max_tokens=12), (1, 2))
            found = subject.generate([wanted])
            for i in range(2):
                check_logprobs(model, wanted, found[wanted.request_id, i])
                assert set(token_versions(found[wanted.request_id, i])) == {version}

    def test_weights_published_in_half_precision(self, subject: Subject, versions: Versions) -> None:
        """The engine computes in float32, which holds every value: the published hash comes back."""
        model = copy.deepcopy(subject.models[0]).to(torch.bfloat16)
        subject.follow(versions, versions.publish(model, 4))
        nudged(model, 5)
        publication = versions.publish(model, 5)
        assert subject.follow(versions, publication).mode == "in_place"
        checksum = subject.checksum()
        assert (checksum.content_hash, checksum.exact) == (publication.content_hash, True)
        plain = copy.deepcopy(subject.models[0])  # casting the model would round its rotary frequencies, too
        plain.load_state_dict(model.state_dict())
        wanted = request(PROMPTS[0], SamplingSettings(max_tokens=12))
        check_logprobs(plain, wanted, subject.one(wanted))

    def test_several_deltas_at_once_and_a_full_version_between(self, subject: Subject, versions: Versions) -> None:
        model = copy.deepcopy(subject.models[0])
        subject.follow(versions, versions.publish(model, 1))
        modes = []
        for version, full in ((4, False), (6, False), (7, True), (8, False)):
            for step in range(2):
                nudged(model, 10 * version + step)
                publication = versions.publish(model, version, full=full)
            modes.append(subject.follow(versions, publication).mode)
            assert subject.checksum().content_hash == publication.content_hash
        assert modes == ["in_place", "in_place", "full", "in_place"]
        wanted = request(PROMPTS[0], SamplingSettings(max_tokens=12))
        check_logprobs(model, wanted, subject.one(wanted))

    def test_ten_updates_under_running_requests(self, subject: Subject, versions: Versions) -> None:
        """Every token's log-prob is that of the weights its version names, and every request survives."""
        settings = SamplingSettings(max_tokens=MAX_LEN, ignore_eos=True)
        model = copy.deepcopy(subject.models[0])
        states = {0: copy.deepcopy(model)}
        line = [versions.publish(model, 0)]
        for version in range(1, 11):
            nudged(model, version)
            states[version] = copy.deepcopy(model)
            line.append(versions.publish(model, version))

        async def updates(requests: list[GenerationRequest]) -> tuple[list[LoadReport], list[Generation]]:
            subject.engine.submit(requests)
            reports = []
            for publication in line[1:]:
                before = subject.engine.stats().tokens

                def moved(before: int = before) -> bool:
                    now = subject.engine.stats()
                    return now.tokens >= before + 40 or not now.running + now.waiting

                await _until(moved)
                reports.append(await subject._follow(versions, publication))
            return reports, await subject._collect(32)

        subject.follow(versions, line[0])
        requests = [request(prompt, settings, range(8)) for prompt in PROMPTS]
        reports, found = subject.run(updates(requests))
        assert [report.mode for report in reports] == ["in_place"] * 10
        assert subject.checksum().content_hash == line[-1].content_hash
        by_id = {one.request_id: one for one in requests}
        most = 0
        for sample in found:
            check_shape(sample)
            versions_of = token_versions(sample)
            assert versions_of == sorted(versions_of)
            most = max(most, len(set(versions_of)))
            prompt, response = by_id[sample.request_id].prompt_token_ids, sample.token_ids.tolist()
            plain = {v: plain_logits(states[v], prompt, response) for v in set(versions_of)}
            for i, version in enumerate(versions_of):
                expected = log_softmax(plain[version][i])[response[i]]
                assert abs(expected - sample.logprobs[i]) <= TOLERANCE, f"token {i} of version {version}"
        assert most >= 3, "samples lived through several updates"

    def test_a_version_that_two_timelines_have(self, subject: Subject, versions: Versions) -> None:
        """After a rewind a version comes again with other weights: nothing cached of the first is used."""
        model = copy.deepcopy(subject.models[0])
        subject.follow(versions, versions.publish(model, 4))
        wanted = request("a prompt of several blocks: " + "0123456789" * 4, SamplingSettings(max_tokens=8))
        for seed in (1, 2, 3):
            nudged(model, seed)
            subject.follow(versions, versions.publish(model, 5))
            again = request(list(wanted.prompt_token_ids), wanted.settings, (1, 2))
            found = subject.generate([again])
            for i in range(2):
                check_logprobs(model, again, found[again.request_id, i])

    def test_changes_that_cannot_be_read_are_loaded_whole(self, subject: Subject, versions: Versions) -> None:
        model = copy.deepcopy(subject.models[0])
        subject.follow(versions, versions.publish(model, 4))
        nudged(model, 5)
        publication = versions.publish(model, 5)
        weights = versions.fetched(publication)
        (data,) = (versions.store.root / publication.uri).parent.glob("*.safetensors")
        data.write_bytes(data.read_bytes()[:-1])
        report = subject.run(subject.engine.load_weights(weights, 5))
        subject.version = 5
        assert report.mode == "full"
        assert data.name in report.detail
        assert subject.checksum().content_hash == publication.content_hash
        wanted = request(PROMPTS[0], SamplingSettings(max_tokens=12))
        check_logprobs(model, wanted, subject.one(wanted))

    def test_a_full_load_takes_what_the_copy_holds(self, subject: Subject, versions: Versions) -> None:
        """Another replica has brought the host's copy further meanwhile."""
        model = copy.deepcopy(subject.models[0])
        nudged(model, 4)
        weights = versions.fetched(versions.publish(model, 4))
        nudged(model, 5)
        newer = versions.publish(model, 5)
        versions.fetched(newer)
        report = subject.run(subject.engine.load_weights(weights, 4))
        subject.version = 5
        assert (report.mode, report.publication) == ("full", newer)
        assert subject.engine.version == 5
        wanted = request(PROMPTS[0], SamplingSettings(max_tokens=12))
        sample = subject.one(wanted)
        assert set(token_versions(sample)) == {5}
        check_logprobs(model, wanted, sample)

    def test_after_a_failure_everything_is_loaded(self, subject: Subject, versions: Versions, tmp_path: Path) -> None:
        model = copy.deepcopy(subject.models[0])
        subject.follow(versions, versions.publish(model, 4))
        wrong = fetch(tmp_path / "wrong", publish_model(tmp_path / "wrong", random_model(1, num_hidden_layers=1), 9))
        with pytest.raises(WeightMismatch):
            subject.run(subject.engine.load_weights(wrong, 9))
        subject.version = -1
        assert subject.checksum().content_hash is None
        nudged(model, 5)
        publication = versions.publish(model, 5)
        assert subject.follow(versions, publication).mode == "full"
        assert subject.checksum().content_hash == publication.content_hash

    # ---- bookkeeping ----------------------------------------------------------------------------------

    def test_abort_forgets_a_request_and_nothing_else(self, subject: Subject) -> None:
        settings = SamplingSettings(max_tokens=60, ignore_eos=True)
        kept, gone = request(PROMPTS[0], settings, range(4)), request(PROMPTS[1], settings, range(20))

        async def work() -> list[Generation]:
            subject.engine.submit([gone, kept])
            await asyncio.sleep(0.01)
            subject.engine.abort({gone.request_id, "never heard of"})
            return await subject._collect(4)

        found = subject.run(work())
        assert {sample.request_id for sample in found} == {kept.request_id}
        after = subject.one(request(PROMPTS[1], SamplingSettings(max_tokens=3)))
        assert after.request_id not in (kept.request_id, gone.request_id)

    def test_requests_and_weights_outlive_a_sleep(self, subject: Subject) -> None:
        if not self.sleeps:
            pytest.skip("its memory is released on GPUs alone")
        settings = SamplingSettings(max_tokens=MAX_LEN, ignore_eos=True)
        requests = [request(prompt, settings, range(8)) for prompt in PROMPTS]
        again = [request(prompt, settings, range(8)) for prompt in PROMPTS]
        undisturbed = subject.generate(requests)

        async def disturbed() -> tuple[bool, list[Generation]]:
            engine, gone = subject.engine, request("x", settings, range(4))
            before = engine.stats().tokens
            engine.submit(again)
            await _until(lambda: engine.stats().tokens >= before + 150)
            await engine.sleep()
            asleep = engine.stats()
            engine.submit([gone])
            engine.abort([gone.request_id])
            await asyncio.sleep(0.05)
            assert engine.stats().tokens == asleep.tokens, "nothing is generated"
            await engine.wake()
            return asleep.running > 0, await subject._collect(32)

        for _ in range(ATTEMPTS):
            met, found = subject.run(disturbed())
            if met:
                break
            again = [request(prompt, settings, range(8)) for prompt in PROMPTS]
        assert met, "no sleep met a running sample"
        first = dict(zip((one.request_id for one in again), requests, strict=True))
        for sample in found:
            same = undisturbed[first[sample.request_id].request_id, sample.index]
            assert sample.token_ids.tolist() == same.token_ids.tolist()
            assert np.abs(sample.logprobs - same.logprobs).max() <= TOLERANCE
            assert token_versions(sample) == token_versions(same)

    def test_an_update_waits_for_the_end_of_a_sleep(self, subject: Subject) -> None:
        if not self.sleeps:
            pytest.skip("its memory is released on GPUs alone")

        async def work() -> None:
            await subject.engine.sleep()
            loading = asyncio.create_task(subject.engine.load_weights(subject.weights[1], 5))
            await asyncio.sleep(0.05)
            assert not loading.done()
            assert subject.engine.version == 0
            await subject.engine.wake()
            await loading

        subject.run(work())
        subject.version = 5
        after = request(PROMPTS[0], SamplingSettings(max_tokens=12))
        sample = subject.one(after)
        check_logprobs(subject.models[1], after, sample)
        assert token_versions(sample) == [5] * len(sample.token_ids)

    def test_idle_time_grows_only_without_work(self, subject: Subject) -> None:
        settings = SamplingSettings(max_tokens=80, ignore_eos=True)
        subject.one(request(PROMPTS[0], SamplingSettings(max_tokens=2)))
        before = subject.engine.stats()
        subject.run(asyncio.sleep(0.2))
        rested = subject.engine.stats()
        assert rested.idle_s - before.idle_s > 0.1
        assert rested.tokens == before.tokens

        async def busy() -> list[float]:
            """Idle time up to each of some moments at which something ran for certain."""
            subject.engine.submit([request(PROMPTS[0], settings, range(64))])
            seen, left = [], 64
            await _until(lambda: subject.engine.stats().tokens > rested.tokens)
            while left:
                for _ in range(2):  # on a busy machine all may end before the first is collected
                    now = subject.engine.stats()
                    seen += [now.idle_s] if now.running else []
                    await asyncio.sleep(0.001)
                left -= len(await subject.engine.collect())
            return seen

        for _ in range(ATTEMPTS):
            seen = subject.run(busy())
            if len(seen) > 1:
                break
        assert len(seen) > 1
        assert len(set(seen)) == 1

    def test_counts(self, subject: Subject) -> None:
        before = subject.engine.stats()
        subject.generate([request(PROMPTS[0], SamplingSettings(max_tokens=5, ignore_eos=True), range(6))])
        after = subject.engine.stats()
        assert after.samples - before.samples == 6
        assert after.tokens - before.tokens == 30

    def test_requests_that_cannot_be_served(self, subject: Subject) -> None:
        settings = SamplingSettings(max_tokens=4)
        for prompt in ([], [1] * MAX_LEN, [258], [-1]):
            with pytest.raises(ValueError):
                subject.run(_submit(subject.engine, [request(prompt, settings)]))
        assert subject.one(request(PROMPTS[0], settings)).finish_reason in ("stop", "length")

    def test_capacity_and_name(self, subject: Subject) -> None:
        assert subject.engine.capacity == 16
        assert subject.engine.max_model_len == MAX_LEN
        assert subject.engine.name.startswith(self.backend)

    def test_closing_ends_those_who_wait(self, subject: Subject, tmp_path: Path) -> None:
        """On an engine of its own."""
        folder = save_model(tmp_path / "model", random_model(1))
        engine = self.make(self.config(folder))

        async def work() -> None:
            await engine.start()
            assert engine.version == -1
            waiting = asyncio.create_task(engine.collect())
            await asyncio.sleep(0)
            await engine.close()
            await engine.close()
            with pytest.raises(EngineFailed):
                await waiting

        subject.run(work(), BOOT_S)


class KeepKvContract:
    """Requests go on with the cache that they have. An `EngineContract` besides gives it an engine."""

    def test_tokens_are_as_old_as_the_oldest_in_their_cache(self, subject: Subject, tmp_path: Path) -> None:
        """Samples begun before one of five updates keep the version of before it; later ones have theirs."""
        settings = SamplingSettings(max_tokens=MAX_LEN, ignore_eos=True)
        versions = Versions(tmp_path)
        model = copy.deepcopy(subject.models[0])
        line = [versions.publish(model, 10)]
        for version in range(11, 16):
            nudged(model, version)
            line.append(versions.publish(model, version))

        async def updates() -> tuple[list[LoadReport], dict[str, int], list[Generation]]:
            reports, begun = [], {}
            for publication in line[1:]:
                one = request("x", settings, range(3))
                before = subject.engine.stats().tokens
                subject.engine.submit([one])
                begun[one.request_id] = publication.version - 1

                def moved(before: int = before) -> bool:
                    return subject.engine.stats().tokens >= before + 30

                await _until(moved)
                reports.append(await subject._follow(versions, publication))
            return reports, begun, await subject._collect(15)

        try:
            subject.follow(versions, line[0])
            reports, begun, found = subject.run(updates())
            assert [report.mode for report in reports] == ["in_place"] * 5
            for sample in found:
                check_shape(sample)
                assert set(token_versions(sample)) == {begun[sample.request_id]}
            after = request("x", SamplingSettings(max_tokens=8), (1, 2))
            fresh = subject.generate([after])
            for i in range(2):
                check_logprobs(model, after, fresh[after.request_id, i])
                assert set(token_versions(fresh[after.request_id, i])) == {15}
        finally:
            versions.close()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.001)


async def _submit(engine: Engine, requests: Sequence[GenerationRequest]) -> None:
    engine.submit(requests)
