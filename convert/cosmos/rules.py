"""cosmos-rl's keys that are not ours by name: older spellings, newer switches, and what needs no key here."""

from __future__ import annotations

import math
from typing import Any

from convert.cosmos.unsupported import COSMOS
from convert.engine import to, values
from convert.engine.keys import words
from convert.engine.model import Outcome, Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed
from convert.engine.values import BadValue, shown
from schema.config.sections.unsupported import TABLE

_POLICY = "train.train_policy"
_MESH = "policy.parallelism"
_OFF = (None, False)


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


def _gone(key: str, *neutral: Any) -> Rule:
    """A key without counterpart that may ask for nothing."""
    why = _reason(key)
    lost = Converter(lambda context, leaf: no_counterpart(why), (), "no counterpart")
    return Rule(key, to.unless((*_OFF, *neutral), "asks for nothing", lost))


def _renamed(theirs: str, ours: str, *more: str) -> Rule:
    @computed(ours, words="renamed")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        written = context.values.get(ours)
        if written is None:
            return mapped((ours, plain(leaf.value)), note="renamed")
        if plain(leaf.value) != written:
            context.warn(f"`{leaf.key}` and `{ours}` say different things; `{ours}` is taken")
        return implicit(f"an older name of `{ours}`, which is written too")

    return Rule(theirs, convert, also=more)


@computed(f"{_MESH}.pp_schedule", words="interleaved ones follow from virtual_pp_size")
def _schedule(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.integer(f"{_MESH}.pp_size", 1) == 1:
        return implicit("it has one stage")
    value = plain(leaf.value)
    return mapped((leaf.key, "1F1B" if value == "Interleaved1F1B" else value))


@computed("redis.url", words="a port: the embedded server needs none; host:port or an address: that server")
def _redis(context: ConversionContext, leaf: KeyPath) -> Result:
    value = leaf.value
    if value in ("", None):
        return implicit("the embedded server, as here by default")
    text = str(value)
    if text.isdigit():
        return implicit("the port on which cosmos-rl starts its own server; the embedded one has a socket")
    if text.startswith(("redis://", "rediss://", "unix://")):
        return mapped(("redis.url", text))
    host, _, port = text.rpartition(":")
    if host and port.isdigit() and ";" not in text:
        return mapped(("redis.url", f"redis://{text}"))
    raise BadValue(f"expected a port, host:port or an address, got {shown(value)}")


@computed("placement.share", words="`colocated` → `time`, `colocated_separated` → `memory`")
def _mode(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value == "disaggregated":
        return implicit("policy and rollout have their own devices, as here by default")
    shares = {"colocated": "time", "colocated_separated": "memory"}
    if not isinstance(leaf.value, str) or leaf.value not in shares:
        raise BadValue(f"expected disaggregated, colocated or colocated_separated, got {shown(leaf.value)}")
    return mapped(("placement.share", shares[leaf.value]))


@computed(f"{_POLICY}.outdated_rollout_fetch_batch_size", words="true → 0")
def _no_outdated(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("replicas may lease while their weights are outdated, as by default")
    return mapped((f"{_POLICY}.outdated_rollout_fetch_batch_size", 0))


@computed("rollout.backend", words="`vllm_async` → `vllm`; others as they are")
def _backend(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value == "vllm_async":
        return mapped(("rollout.backend", "vllm"), note="the engine always runs asynchronously")
    if leaf.value == "vla":
        return no_counterpart(_reason("rollout.backend=vla"))
    return mapped(("rollout.backend", plain(leaf.value)))


@computed("rollout.max_concurrent_samples", words="requests · n_generation samples")
def _concurrent(context: ConversionContext, leaf: KeyPath) -> Result:
    requests, group = values.integer(leaf.value), context.integer("rollout.n_generation", 16) or 16
    is_async = (
        context.get("rollout.mode", "sync") == "async" or context.get("rollout.backend", "") == "vllm_async"
    )
    if not is_async:
        return implicit("no effect in cosmos-rl's sync mode")
    return mapped(
        ("rollout.max_concurrent_samples", requests * group), note=f"{requests} requests · {group} samples"
    )


@computed("train.transfer_dtype", words="`None` and empty → unset")
def _transfer(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in ("None", "none", ""):
        return implicit("unset: the weights travel in train.param_dtype")
    return mapped(("train.transfer_dtype", plain(leaf.value)))


@computed("validation.dataset.split", words="renamed")
def _test_split(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.values.get("validation.dataset.split") is not None:
        return implicit("validation.dataset.split is written too")
    return mapped(("validation.dataset.split", plain(leaf.value)), note="the split to validate on")


@computed(words="how π_old is found")
def _own_log_probs(context: ConversionContext, leaf: KeyPath) -> Result:
    values.flag(leaf.value)
    return implicit("samples always carry the engine's log-probs, and they are π_old")


@computed(words="distillation, if enabled")
def _distillation(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.get("distillation.enable", None) in (None, False, "false", "False", ""):
        return implicit("distillation is off")
    return no_counterpart(_reason("distillation.*"))


@computed(words="the datatype of log-probs")
def _logprob_dtype(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value == "float32":
        return implicit("always float32")
    return no_counterpart(_reason("train.logprob_dtype"))


_EMA, _EMA_DECAY = "train.ema_enable", "train.ema_decay"


@computed(_EMA_DECAY, words="true → ema_decay, cosmos-rl's default where none is written")
def _average(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("false: no average")
    note = "cosmos-rl begins with a decay of 0.1 and raises it; here it is the same from the first step on"
    return mapped((_EMA_DECAY, context.number(_EMA_DECAY, 0.9999)), note=note)


@computed(_EMA_DECAY, words="as it is, unless ema_enable is false")
def _average_decay(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.get(_EMA, None) is False:
        return implicit("no effect while ema_enable = false")
    return mapped((_EMA_DECAY, plain(leaf.value)))


@computed(words="0 or 1: after each optimizer step")
def _average_interval(context: ConversionContext, leaf: KeyPath) -> Result:
    if values.integer(leaf.value) in (0, 1) or not context.flag(_EMA):
        return implicit("the average is updated after each optimizer step, or there is none")
    return no_counterpart(_reason(leaf.key))


@computed(words="stays there: a file that was converted before")
def _unsupported(context: ConversionContext, leaf: KeyPath) -> Result:
    note = "the source of this converted file asks for it, and nothing here does the same"
    return Result(Outcome.UNSUPPORTED, ((leaf.key, plain(leaf.value)),), note)


_TEMPERATURE, _SAMPLED = f"{_POLICY}.temperature", "rollout.sampling_config.temperature"


def trained_temperature(context: ConversionContext) -> float:
    """What cosmos-rl's trainer divides its logits by: nothing, at a temperature of 1e-6 and below."""
    written = context.number(_TEMPERATURE, 1.0)
    return 1.0 if written is None or written <= 1e-6 else written


def sampled_temperature(context: ConversionContext) -> float:
    """The temperature of cosmos-rl's rollouts."""
    written = context.number(_SAMPLED, 1.0)
    return 1.0 if written is None else written


@computed(_TEMPERATURE, words="as it is, where rollouts have the same; else left out, loudly")
def _trained(context: ConversionContext, leaf: KeyPath) -> Result:
    values.number(leaf.value)
    if trained_temperature(context) == sampled_temperature(context):
        return mapped((_TEMPERATURE, sampled_temperature(context)))
    return no_counterpart(_reason(_TEMPERATURE))


def data_ranks(context: ConversionContext) -> int | None:
    """Ranks of a replica with data of their own; None where the file leaves them to the launcher (-1)."""
    sizes = [
        context.integer(f"policy.parallelism.{name}", 1) or 1
        for name in ("dp_shard_size", "dp_replicate_size")
    ]
    return None if min(sizes) < 1 else sizes[0] * sizes[1]


@computed(f"{_POLICY}.batch_size_per_optimize", words="times the data-parallel ranks of a replica")
def _optimize(context: ConversionContext, leaf: KeyPath) -> Result:
    key, samples = f"{_POLICY}.batch_size_per_optimize", values.integer(leaf.value)
    if context.source.is_ours:
        return mapped((key, samples), note=OURS)
    ranks = data_ranks(context)
    if ranks is None:
        context.warn(
            f"{key} = {samples} counts the samples of one data-parallel rank in cosmos-rl, of all ranks here, and "
            "dp_shard_size = -1 leaves open how many there are: multiply it by their number"
        )
        return mapped((key, samples), note="per data-parallel rank there; their number is open")
    return mapped((key, samples * ranks), note=f"{samples} samples × {ranks} data-parallel ranks")


OURS = "a conversion wrote this file: its values are ours already"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "train.p2r_sync_groups_per_round": (0,),
    f"{_POLICY}.trainer_type": ("grpo", "sft"),
    f"{_POLICY}.algo": ("grpo",),
    "policy.aux_loss_coeff": (0, 0.0),
    "rollout.async_r2r_sync": ("disabled",),
}
"""Keys without counterpart -> values that ask for nothing, as well as null and false."""

_GONE = words(
    "train.non_text train.prefetch_payloads train.p2p_sync_pack_tensors "
    "train.p2r_sync_groups_per_round train.coalesce_weight_sync train.train_policy.trainer_type "
    "train.train_policy.algo train.train_policy.use_remote_reward train.train_policy.bypass_reward "
    "train.train_policy.group_reward_calculation train.train_policy.dpo_reference_policy "
    "train.train_policy.uncentralized_training "
    "train.train_policy.max_inflight_steps train.train_policy.data_dispatch_as_rank_in_mesh "
    "train.train_policy.enable_dp_load_balancing policy.is_diffusers policy.aux_loss_coeff "
    "policy.enable_liger_cross_entropy policy.enable_liger_fused_cross_entropy rollout.completion_admission "
    "rollout.async_r2r_sync rollout.r2r_sync_pack_tensors rollout.prefetch_rollout "
    "rollout.broadcast_all_params validation.use_remote_reward logging.report_mfu"
)

RENAMED_RULES: tuple[Rule, ...] = (
    Rule(f"{TABLE}.*", _unsupported),
    Rule(_EMA, _average),
    Rule(_EMA_DECAY, _average_decay),
    Rule("train.ema_update_step_interval", _average_interval),
    Rule(_TEMPERATURE, _trained),
    Rule(f"{_POLICY}.batch_size_per_optimize", _optimize),
    Rule(f"{_MESH}.pp_schedule", _schedule),
    Rule("rollout.parallelism.pp_schedule", to.always("an engine has its own schedule")),
    Rule("redis", _redis),
    Rule("mode", _mode),
    _renamed("train.enable_validation", "validation.enable"),
    _renamed(f"{_POLICY}.off_policy_masking_delta", f"{_POLICY}.rollout_correction.off_policy_mask"),
    _renamed("train.validation_freq", "validation.freq", "train.validation_step"),
    _renamed("train.validation_batch_per_replica", "validation.batch_size"),
    _renamed("validation.val_before_train", "validation.before"),
    _renamed(f"{_POLICY}.dataset.train_split", f"{_POLICY}.dataset.split"),
    _renamed("validation.dataset.test_split", "validation.dataset.split"),
    Rule(f"{_POLICY}.dataset.test_split", _test_split),
    Rule(f"{_POLICY}.no_outdated_rollout", _no_outdated),
    Rule("rollout.backend", _backend),
    Rule(
        "rollout.mode",
        to.always("rollouts are always asynchronous; the staleness bound makes them on-policy"),
    ),
    Rule("rollout.async_config.enable", to.always("rollouts are always asynchronous")),
    Rule("rollout.async_config.max_concurrent_requests", _concurrent),
    Rule("train.transfer_dtype", _transfer),
    Rule(f"{_POLICY}.collect_rollout_logprobs", _own_log_probs),
    Rule(f"{_POLICY}.use_rollout_logprobs_for_loss", _own_log_probs),
    Rule("train.force_use_hf", to.always("models are always those of transformers")),
    Rule("train.logprob_dtype", _logprob_dtype),
    Rule("distillation.*", _distillation),
    *(_gone(key, *_NEUTRAL.get(key, ())) for key in _GONE),
)
