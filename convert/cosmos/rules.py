"""cosmos-rl's keys that are not ours by name: older spellings, newer switches, and what needs no key here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from convert.cosmos.unsupported import COSMOS
from convert.engine import to, values
from convert.engine.model import Outcome, Result, implicit, no_counterpart
from convert.engine.rules import ConversionContext, Converter, KeyPath, computed
from convert.engine.table import Table
from convert.engine.values import BadValue, shown


def plain(value: Any) -> Any:
    """A value exactly as it is. Raises BadValue for what a configuration cannot hold: dates, NaN, infinity."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise BadValue(f"{value} cannot be a value of a configuration")
    if isinstance(value, bool | int | float | str):
        return value
    if value is None:
        raise BadValue("null cannot be written in TOML: leave the key out")
    raise BadValue(f"a {type(value).__name__} cannot be a value of a configuration: write it as a string")


_reason = COSMOS.known_reason


def _as_written(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to(plain(leaf.value))


def _lost(context: ConversionContext, leaf: KeyPath) -> Result:
    return no_counterpart(_reason(leaf.key))


def _gone(*neutral: Any) -> Converter:
    """A key without counterpart that may ask for nothing: by null, false or one of these."""
    return to.unless((None, False, *neutral), "asks for nothing", computed(words="no counterpart")(_lost))


def _renamed(ours: str) -> Converter:
    @computed(ours, words="renamed")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        written = context.values.get(ours)
        if written is None:
            return leaf.to(plain(leaf.value), note="renamed")
        if plain(leaf.value) != written:
            context.warn(f"`{leaf.key}` and `{ours}` say different things; `{ours}` is taken")
        return implicit(f"an older name of `{ours}`, which is written too")

    return convert


def _schedule(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.integer("policy.parallelism.pp_size", 1) == 1:
        return implicit("it has one stage")
    value = plain(leaf.value)
    return leaf.to("1F1B" if value == "Interleaved1F1B" else value)


def _redis(context: ConversionContext, leaf: KeyPath) -> Result:
    value = leaf.value
    if value in ("", None):
        return implicit("the embedded server, as here by default")
    text = str(value)
    if text.isdigit():
        return implicit("the port on which cosmos-rl starts its own server; the embedded one has a socket")
    if text.startswith(("redis://", "rediss://", "unix://")):
        return leaf.to(text)
    host, _, port = text.rpartition(":")
    if host and port.isdigit() and ";" not in text:
        return leaf.to(f"redis://{text}")
    raise BadValue(f"expected a port, host:port or an address, got {shown(value)}")


def _mode(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value == "disaggregated":
        return implicit("policy and rollout have their own devices, as here by default")
    shares = {"colocated": "time", "colocated_separated": "memory"}
    if not isinstance(leaf.value, str) or leaf.value not in shares:
        raise BadValue(f"expected disaggregated, colocated or colocated_separated, got {shown(leaf.value)}")
    return leaf.to(shares[leaf.value])


def _backend(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value == "vllm_async":
        return leaf.to("vllm", note="the engine always runs asynchronously")
    if leaf.value == "vla":
        return no_counterpart(_reason("rollout.backend=vla"))
    return leaf.to(plain(leaf.value))


def _concurrent(context: ConversionContext, leaf: KeyPath) -> Result:
    requests, group = values.integer(leaf.value), context.integer("rollout.n_generation", 16) or 16
    if context.get("rollout.mode", "sync") != "async" and context.get("rollout.backend", "") != "vllm_async":
        return implicit("no effect in cosmos-rl's sync mode")
    return leaf.to(requests * group, note=f"{requests} requests · {group} samples")


def _test_split(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.values.get("validation.dataset.split") is not None:
        return implicit("validation.dataset.split is written too")
    return leaf.to(plain(leaf.value), note="the split to validate on")


def _own_log_probs(context: ConversionContext, leaf: KeyPath) -> Result:
    values.flag(leaf.value)
    return implicit("samples always carry the engine's log-probs, and they are π_old")


def _distillation(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.get("distillation.enable", None) in (None, False, "false", "False", ""):
        return implicit("distillation is off")
    return no_counterpart(_reason("distillation.*"))


def _average(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("false: no average")
    note = "cosmos-rl begins with a decay of 0.1 and raises it; here it is the same from the first step on"
    return leaf.to(context.number("train.ema_decay", 0.9999), note=note)


def _average_decay(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.get("train.ema_enable", None) is False:
        return implicit("no effect while ema_enable = false")
    return leaf.to(plain(leaf.value))


def _average_interval(context: ConversionContext, leaf: KeyPath) -> Result:
    if values.integer(leaf.value) in (0, 1) or not context.flag("train.ema_enable"):
        return implicit("the average is updated after each optimizer step, or there is none")
    return no_counterpart(_reason(leaf.key))


def _unsupported(context: ConversionContext, leaf: KeyPath) -> Result:
    note = "the source of this converted file asks for it, and nothing here does the same"
    return Result(Outcome.UNSUPPORTED, ((leaf.key, plain(leaf.value)),), note)


_TEMPERATURE = "train.train_policy.temperature"


def trained_temperature(context: ConversionContext) -> float:
    """The number that cosmos-rl's trainer divides its logits by: 1 at a temperature of 1e-6 and below."""
    written = context.number(_TEMPERATURE, 1.0)
    return 1.0 if written is None or written <= 1e-6 else written


def sampled_temperature(context: ConversionContext) -> float:
    """The temperature of cosmos-rl's rollouts."""
    written = context.number("rollout.sampling_config.temperature", 1.0)
    return 1.0 if written is None else written


def _trained(context: ConversionContext, leaf: KeyPath) -> Result:
    values.number(leaf.value)
    if trained_temperature(context) == sampled_temperature(context):
        return leaf.to(sampled_temperature(context))
    return no_counterpart(_reason(_TEMPERATURE))


def _optimize(context: ConversionContext, leaf: KeyPath) -> Result:
    samples = values.integer(leaf.value)
    if context.source.is_ours:
        return leaf.to(samples, note=OURS)
    names = ("dp_shard_size", "dp_replicate_size")
    shards, copies = (context.integer(f"policy.parallelism.{name}", 1) or 1 for name in names)
    if min(shards, copies) < 1:
        context.warn(
            f"{leaf.key} = {samples} counts the samples of one data-parallel rank in cosmos-rl, of all ranks here, "
            "and dp_shard_size = -1 leaves open how many there are: multiply it by their number"
        )
        return leaf.to(samples, note="per data-parallel rank there; their number is open")
    ranks = shards * copies
    return leaf.to(samples * ranks, note=f"{samples} samples × {ranks} data-parallel ranks")


OURS = "a conversion wrote this file: its values are ours already"
KEYS = Table(Path(__file__).with_name("keys.txt"), globals())
RENAMED_RULES = KEYS.rules("keys")
