"""Profiles of real steps: which are recorded, what a trace says, and that a disk which fails ends nothing."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.training.profiles import ModuleRanges, Profiles, ProfileWindow, write
from policy_worker.training.sft import Sft
from schema.config.sections.profiler import ProfilerConfig
from schema.wire.messages import ProfileOrder
from tests.policy_worker.material import train_step
from tests.policy_worker.training.test_sft import make_sft, write_rows


def profiling(**settings: Any) -> ProfilerConfig:
    """Profiles that begin with the trainer."""
    sub = {"do_profile": True, "wait_steps": 0, "warmup_steps": 0, **settings}
    return ProfilerConfig.model_validate({"enable_profiler": True, "sub_profiler_config": sub})


def train(config: ProfilerConfig, algorithm: Sft, directory: Path, steps: int, first: int = 0) -> Profiles:
    """The loop's part: each step begins at a boundary, and training ends after the last one."""
    profiles = Profiles(config, algorithm._trainer, directory, None, ShutdownRequest())
    profiles.begin(first)
    for step in range(first, first + steps):
        profiles.reach(step, profiles.signals())
        train_step(algorithm, step)
    profiles.stop(first + steps)
    profiles.settle(0.0)
    return profiles


def events(path: Path) -> list[dict[str, Any]]:
    """What a trace has."""
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def named(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in found if event["name"] == name and event.get("cat") == "user_annotation"]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    """Whether a range lies in another one of the same thread."""
    ends = inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01
    return inner["tid"] == outer["tid"] and outer["ts"] <= inner["ts"] and ends


@pytest.fixture
def algorithm(tmp_path: Path, group: RankGroup) -> Sft:
    write_rows(tmp_path / "rows", 80)
    return make_sft(group, tmp_path / "rows", {"mini_batch": 4}, train_batch_per_replica=8)


ORDER = ProfileOrder(profile_id="profile-1", first_step=None, steps=2, warmup=3, ranks=[0, 1])


def test_a_window_goes_from_its_warm_up_to_its_last_step() -> None:
    window = ProfileWindow.of_order(ORDER, 4)
    phases = [window.phase(step) for step in range(4, 10)]
    assert phases == ["warm-up"] * 3 + ["recording"] * 2 + ["over"]
    assert window.name(1) == "steps-00000007-00000008-rank1.json.gz"
    later = ProfileWindow.of_order(ORDER.model_copy(update={"first_step": 9, "steps": 1}), 4)
    assert [later.phase(step) for step in (5, 6, 8, 9, 10)] == [
        "waiting", "warm-up", "warm-up", "recording", "over",
    ]  # fmt: skip
    assert later.name(0) == "step-00000009-rank0.json.gz"


def test_a_step_that_comes_too_soon_for_its_warm_up_has_a_shorter_one_and_one_that_has_begun_is_refused() -> None:
    soon = ProfileWindow.of_order(ORDER.model_copy(update={"first_step": 5}), 4)
    assert (soon.first, soon.warmup, soon.phase(4)) == (5, 1, "warm-up")
    with pytest.raises(ValueError, match="step 3 had begun"):
        ProfileWindow.of_order(ORDER.model_copy(update={"first_step": 3}), 4)


def test_the_steps_that_are_asked_for_are_in_the_trace_and_its_table(tmp_path: Path, algorithm: Sft) -> None:
    config = profiling(wait_steps=1, warmup_steps=1, active_steps=2)
    profiles = train(config, algorithm, tmp_path / "profiles", 6, first=3)
    assert profiles.trouble() == ""
    files = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert files == ["steps-00000005-00000006-rank0.json.gz", "steps-00000005-00000006-rank0.txt"]
    trace = events(tmp_path / "profiles" / files[0])
    counts = {name: len(named(trace, name)) for name in ("fetch", "decode", "forward", "loss", "backward")}
    assert counts == {"fetch": 2, "decode": 16, "forward": 4, "loss": 4, "backward": 4}, "two steps of two"
    assert len(named(trace, "optimizer")) == 2
    for decode in named(trace, "decode"):
        assert any(inside(decode, fetch) for fetch in named(trace, "fetch"))
    assert any(event["name"] == "aten::mm" for event in trace)
    table = (tmp_path / "profiles" / files[1]).read_text()
    assert "Self CPU" in table
    assert "forward" in table


def test_training_that_ends_early_leaves_what_was_recorded(tmp_path: Path, algorithm: Sft) -> None:
    train(profiling(active_steps=5), algorithm, tmp_path, 2)
    assert (tmp_path / "steps-00000000-00000001-rank0.json.gz").exists()
    late = train(profiling(wait_steps=9), algorithm, tmp_path / "late", 2)
    assert not (tmp_path / "late").exists()
    assert late.trouble() == ""


def test_a_rank_that_is_not_named_records_nothing(tmp_path: Path, algorithm: Sft) -> None:
    train(profiling(rank_filter=[1]), algorithm, tmp_path / "profiles", 2)
    assert not (tmp_path / "profiles").exists()


def test_modules_are_named_even_where_a_forward_is_computed_again(tmp_path: Path, algorithm: Sft) -> None:
    algorithm._trainer.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    algorithm._trainer.model.lm.train()
    hooks = [len(module._forward_hooks) for module in algorithm._trainer.model.modules()]
    train(profiling(with_modules=True), algorithm, tmp_path, 2)
    (path,) = tmp_path.glob("*.json.gz")
    trace = events(path)
    assert len(named(trace, "lm.model.layers.1.mlp")) == 4, "forward and backward of two micro-batches"
    assert named(trace, "lm.model.layers.0.self_attn")
    assert [len(module._forward_hooks) for module in algorithm._trainer.model.modules()] == hooks


def test_a_directory_that_takes_nothing_is_a_trouble_and_no_end(tmp_path: Path, algorithm: Sft) -> None:
    (tmp_path / "profiles").write_text("in the way")
    profiles = train(profiling(), algorithm, tmp_path / "profiles", 3)
    assert "File exists" in profiles.trouble() or "Not a directory" in profiles.trouble()


@contextmanager
def files_of(size: int) -> Iterator[None]:
    """No file grows beyond this: as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("size", "fault", "there"),
    [(512, "too large", []), (1500, "disk full", [".txt"]), (1 << 20, "", [".json.gz", ".txt"])],
)
def test_a_disk_that_is_full_leaves_no_half_trace(tmp_path: Path, size: int, fault: str, there: list[str]) -> None:
    """In between it takes the table, and not what torch writes, which says nothing of it."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        torch.ones(3).sum()
    with files_of(size), pytest.raises(OSError, match=fault) if fault else nullcontext():
        write(trace, tmp_path / "trace.json.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"trace{end}" for end in there]


def test_a_profiler_that_fails_while_it_records_is_ended_and_the_next_profile_works(
    tmp_path: Path, algorithm: Sft, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(ranges: ModuleRanges, model: torch.nn.Module) -> None:
        raise RuntimeError("no more hooks")

    with monkeypatch.context() as broken:
        broken.setattr(ModuleRanges, "watch", watch)
        failed = train(profiling(with_modules=True), algorithm, tmp_path / "first", 2)
    assert failed.trouble() == "profile: RuntimeError: no more hooks"
    assert not (tmp_path / "first").exists()
    assert train(profiling(with_modules=True), algorithm, tmp_path / "second", 2).trouble() == ""
    assert len(list((tmp_path / "second").iterdir())) == 2
