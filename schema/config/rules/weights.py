"""Rules of `[weight_sync]`: where versions lie, who can reach them, and what must go with a cache that is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from schema.config.loading.tomlwrite import toml_value
from schema.config.paths import home_hint, is_file
from schema.config.problem import Problem
from schema.config.root import Config
from schema.wire.store_url import is_url, parse_url

_SYNC, _POLICY = "weight_sync", "train.train_policy"
OF_ONE_HOST = ("/dev", "/proc", "/run", "/tmp", "/var/tmp")  # noqa: S108
"""Directories that each machine has for itself, wherever jobs run."""

_HALF_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def store_is_a_place(config: Config) -> Iterator[Problem]:
    """The store is a directory or a bucket."""
    store, key = config.weight_sync.store, f"{_SYNC}.store"
    if is_url(store):
        try:
            parse_url(store)
        except ValueError as error:
            hint = 'write weight_sync.store = "s3://bucket/prefix", or the path of a directory'
            yield Problem(key, str(error), store, hint)
    elif store.startswith("~"):
        yield Problem(key, f"{store} is not a path", store, home_hint(store))
    elif _HALF_A_URL.match(store):
        yield Problem(key, f"{store} is neither a path nor a URL", store, "write s3://bucket/prefix")
    elif store:
        places = (Path(store), *Path(store).parents)
        if place := next(filter(is_file, places), None):
            yield Problem(key, f"{place} is a file, not a directory", store, "name a directory")


def store_is_reached_from_all_hosts(config: Config) -> Iterator[Problem]:
    """A directory of one machine is not a store for a job on several."""
    nodes, store = config.placement.nodes, config.weight_sync.store
    if nodes == 1 or is_url(store):
        return
    place, key = (store, f"{_SYNC}.store") if store else (config.train.output_dir, "train.output_dir")
    if not any(PurePosixPath(place).is_relative_to(own) for own in OF_ONE_HOST):
        return
    message = f"{place} is on each machine another directory, and the job runs on placement.nodes = {nodes}"
    hint = "name a directory on a file system that all machines share, or a bucket: s3://bucket/prefix"
    yield Problem(f"{_SYNC}.store", message, store, hint, related=(key, "placement.nodes"))


def host_cache_is_absolute(config: Config) -> Iterator[Problem]:
    """Whatever the directory in which a replica starts, the copy of a host lies in one place."""
    cache, key = config.weight_sync.host_cache, f"{_SYNC}.host_cache"
    if not cache:
        return
    if is_url(cache):
        message = f"{cache} is not a directory: the copy is mapped into the memory of the replicas of a host"
        yield Problem(key, message, cache, "write an absolute path, or leave it out")
    elif not PurePosixPath(cache).is_absolute():
        message = f"{cache} is not absolute: it would be another directory for each machine's processes"
        yield Problem(key, message, cache, home_hint(cache) or "write an absolute path, or leave it out")
    elif is_file(Path(cache)):
        yield Problem(key, f"{cache} is a file, not a directory", cache, "name a directory")


def a_kept_cache_has_engine_probabilities(config: Config) -> Iterator[Problem]:
    """Tokens computed over a cache of several versions have the engine's log-probs alone: π_old must be those."""
    if config.weight_sync.update_mode != "keep_kv" or not config.is_grpo:
        return
    policy, key = config.grpo, f"{_SYNC}.update_mode"
    asked = {
        "use_decoupled_loss": (policy.use_decoupled_loss, False),
        "rollout_correction.weights": (policy.rollout_correction.weights, "none"),
        "rollout_correction.reject": (policy.rollout_correction.reject, "none"),
        "rollout_correction.off_policy_mask": (policy.rollout_correction.off_policy_mask, None),
    }
    for name, (value, off) in asked.items():
        if value != off:
            other = f"{_POLICY}.{name}"
            message = (
                f'"keep_kv" goes on with a cache of several weight versions, of which only the engine knows the '
                f"log-probs, and {other} = {toml_value(value)} computes those of the old policy again"
            )
            hint = f'write {key} = "recompute"' + (
                "" if name.endswith(("reject", "mask")) else f", or {other} = {toml_value(off)}"
            )
            yield Problem(key, message, "keep_kv", hint, related=(other,))


WEIGHT_RULES = (
    store_is_a_place,
    store_is_reached_from_all_hosts,
    host_cache_is_absolute,
    a_kept_cache_has_engine_probabilities,
)
