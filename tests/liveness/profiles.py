"""Probes of profiles: who may ask for one, what is due at which step, and what a trace holds."""

from __future__ import annotations

import gzip
import json
from typing import Any

from controller.client import Refused
from controller.client import calls as api
from policy_worker.process import ShutdownRequest
from policy_worker.trained.trainer import Trainer
from policy_worker.training.profiles import Profiles
from schema.config import Config
from schema.wire import messages as m
from tests.liveness.probe import Place, changed, grpo, under, watch
from tests.liveness.trained import grpo_of, registered, trainer_of
from tests.policy_worker.material import random_samples, train_step

SUB = "profiler.sub_profiler_config"


def answer_to_a_profile(config: Config, place: Place) -> str:
    """What the controller answers to who asks for one."""
    with registered(config, place) as (served, session), served.client("user") as user:
        try:
            return user.send(api.profile(session.reply.replica_id, m.ProfileRequest())).state
        except Refused as error:
            return str(error.code)


def _profiles(config: Config, place: Place, trainer: Trainer) -> Profiles:
    profiles = Profiles(config.profiler, trainer, place.directory(), None, ShutdownRequest())
    profiles.begin(0)
    return profiles


def steps_that_are_recorded(config: Config, place: Place) -> tuple[Any, ...]:
    """What is due at each of eight steps of the profile that begins with the trainer, and on which ranks."""
    window = _profiles(config, place, trainer_of(config, place))._window
    return () if window is None else (window.ranks, [window.phase(step) for step in range(8)])


def kinds_in_a_trace(config: Config, place: Place) -> dict[str, bool]:
    """What a trace of a step has, of all that it may have."""
    algorithm, _ = grpo_of(config, place, samples=random_samples(4))
    profiles = _profiles(config, place, algorithm._trainer)
    profiles.reach(0, profiles.signals())
    train_step(algorithm, 0)
    profiles.stop(1)
    profiles.settle(0.0)
    (path,) = profiles._directory.glob("*.gz")
    with gzip.open(path) as file:
        found = json.load(file)["traceEvents"]
    return {
        "shapes": any("Input Dims" in event.get("args", {}) for event in found),
        "memory": any(event["name"] == "[memory]" for event in found),
        "stacks": any(event.get("cat") == "python_function" for event in found),
        "modules": any(event["name"] == "lm.model.layers.0.mlp" for event in found),
    }


enabled = changed(grpo, {"profiler.enable_profiler": True, f"{SUB}.do_profile": True})
watch(answer_to_a_profile, grpo, under("profiler", enable_profiler=(False, True)))
steps = under(SUB, wait_steps=(1, 3), warmup_steps=(1, 3), active_steps=(1, 3))
sharded = changed(enabled, under("policy.parallelism", dp_shard_size=-1))
watch(steps_that_are_recorded, sharded, steps | under(SUB, do_profile=(True, False), rank_filter=([0], [1])))
kinds = dict.fromkeys(("record_shape", "profile_memory", "with_stack", "with_modules"), (False, True))
watch(kinds_in_a_trace, changed(enabled, under(SUB, wait_steps=0, warmup_steps=0)), under(SUB, **kinds))
