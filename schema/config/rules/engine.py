"""Rules of generation: what may be sampled for training, and what each engine can do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from schema.config.loading.tomlwrite import toml_value
from schema.config.model_facts import FindFile, local_file
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import InGrpo, Refusal, Rule, refused, value_at
from schema.config.sections.policy import PolicyConfig
from schema.config.vocabulary import hidden_tags, never_found, numbered, shares

_SAMPLING = "rollout.sampling_config"

_RESHAPES = "changes the distribution sampled from: log-probs of trainer and engine could not be compared"

_RESHAPING_EXTRA = frozenset({
    "allowed_token_ids", "bad_words", "guided_decoding", "logit_bias", "logits_processors", "structured_outputs",
})  # fmt: skip
LEAST_TEMPERATURE = 0.01
_KEYS_OF_EXTRA = frozenset({
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "seed", "ignore_eos", "stop", "stop_token_ids",
})  # fmt: skip
_SET_BY_WORKER = frozenset({
    "detokenize", "logprobs", "max_tokens", "n", "output_kind", "prompt_logprobs", "routed_experts_prompt_start",
})  # fmt: skip
ENGINE_ARGUMENTS = {
    "block_size": "rollout.block_size",
    "data_parallel_size": "rollout.parallelism.dp_shard_size",
    "dtype": "rollout.dtype",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "enable_expert_parallel": "rollout.parallelism.ep_size",
    "enable_return_routed_experts": "train.train_policy.routing_replay",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "load_format": "rollout.load_format",
    "max_model_len": "rollout.max_model_len",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "model": "policy.model_name_or_path",
    "pipeline_parallel_size": "rollout.parallelism.pp_size",
    "quantization": "rollout.quantization",
    "revision": "policy.model_revision",
    "seed": "rollout.seed",
    "tensor_parallel_size": "rollout.parallelism.tp_size",
    "tokenizer": "policy.tokenizer_name_or_path",
    "trust_remote_code": "policy.trust_remote_code",
}
"""Engine arguments that have a key of their own."""
_ENGINE_OWN = frozenset({
    "disable_log_stats", "enable_sleep_mode", "generation_config", "logprobs_mode", "max_logprobs",
    "tokenizer_revision", "weight_transfer_config", "worker_extension_cls",
})  # fmt: skip
_UNBUILT = (
    ("a model's configuration from another place", r"hf_config_path"),
    ("speculative decoding", r"speculative_config|spec_(method|model|tokens)"),
    ("kept sets by vLLM's sampling mask", r"return_sampling_mask"),
    ("quantisation layer by layer", r"quantization_config"),
    ("data parallelism over several machines", r"data_parallel_.*"),
    ("experts that move between ranks", r"enable_(eplb|elastic_ep)|eplb_config|elastic_ep_max_dp_size"),
    ("context parallelism of a rollout replica", r"(decode|prefill)_context_parallel_size"),
    ("a rollout replica on several machines", r"nnodes|node_rank|master_(addr|port)"),
)
"""Parts that this build lacks, and the engine arguments (whole names) that ask vLLM for them."""
_RESHAPING_ENGINE = frozenset({
    "logits_processors", "override_generation_config", "watermark", "watermark_config",
})  # fmt: skip


def temperatures_can_be_computed(config: Config) -> Iterator[Problem]:
    """Logits divided by almost nothing overflow: vLLM would take 0.01 in the place of anything below it."""
    says = f"{{}} is below {LEAST_TEMPERATURE}, where logits divided by it overflow"
    parts = [f"validation.dataset.part[{i}]" for i in range(len(config.validation.dataset.part))]
    trains = ("train.train_policy", _SAMPLING) if config.is_grpo else ()
    for section in (*trains, *(("validation", *parts) if config.generates else ())):
        if 0.0 < (value_at(config, f"{section}.temperature") or 0.0) < LEAST_TEMPERATURE:
            hint = f"write {{!}} = {LEAST_TEMPERATURE} or more"
            yield refused(config, f"{section}.temperature", says, hint)


def training_samples_the_policy(config: Config) -> Iterator[Problem]:
    """Training rollouts are drawn from a distribution that the trainer can compute."""
    if not config.is_grpo:
        return
    sampling = config.rollout.sampling_config
    if config.sampling_temperature <= 0.0:
        in_policy = "temperature" in config.grpo.model_fields_set
        key = "train.train_policy.temperature" if in_policy else f"{_SAMPLING}.temperature"
        message = "training needs samples that differ: the temperature must be more than 0"
        yield Problem(key, message, config.sampling_temperature, f"write {key} = 1.0")
    if not sampling.do_sample:
        says = "training needs samples that differ, not always the likeliest token"
        yield refused(config, f"{_SAMPLING}.do_sample", says, "write {!} = true")
    for name in sorted(_RESHAPING_EXTRA & sampling.extra.keys()):
        yield Problem(f"{_SAMPLING}.extra.{name}", _RESHAPES, sampling.extra[name], "leave it out")


def pass_through_is_not_a_detour(config: Config) -> Iterator[Problem]:
    """A setting that has a key of its own, or that the worker needs for itself, is not passed through."""
    for name, value in config.rollout.sampling_config.extra.items():
        if name in _KEYS_OF_EXTRA:
            hint = f"write it as {_SAMPLING}.{name}"
            yield Problem(f"{_SAMPLING}.extra.{name}", "has a key of its own", value, hint)
        elif name in _SET_BY_WORKER:
            message = "is set by the rollout worker"
            yield Problem(f"{_SAMPLING}.extra.{name}", message, value, "leave it out")
    for name, value in config.rollout.engine_kwargs.items():
        if refusal := why_not_passed(name, value):
            yield Problem(f"rollout.engine_kwargs.{name}", refusal[0], value, refusal[1])


def why_not_passed(name: str, value: Any) -> tuple[str, str] | None:
    """Why an engine argument is not the user's to set, and the remedy; None where it is passed on."""
    if name in ENGINE_ARGUMENTS:
        return "has a key of its own", f"write it as {ENGINE_ARGUMENTS[name]}"
    if name in _ENGINE_OWN:
        return "is set by the rollout worker", "leave it out"
    if not value or (value == 1 and name.endswith(("_size", "nnodes"))):
        return None  # asks for nothing
    if name in _RESHAPING_ENGINE:
        return _RESHAPES, "leave it out"
    if name.startswith("attention_") and "flashinfer" in str(value).lower():
        return "has a key of its own", "write rollout.vllm_use_flashinfer = true"
    if name == "hf_overrides":
        return "has a key of its own, which the trainer reads too", "write it as policy.override_config"
    if "lora" in name:
        return 'is set by policy.lora where weight_sync.lora = "adapter"', "leave it out"
    for missing, names in _UNBUILT:
        if re.fullmatch(names, name):
            return f"this build cannot do {missing} yet", "leave it out"
    return None


def engine_can_do_it(config: Config) -> Iterator[Problem]:
    """Options that the chosen engine does not have are refused, never ignored."""
    if not config.generates:
        return
    rollout, engine, related = config.rollout, config.rollout.engine, ("rollout.backend",)
    mesh, hint = rollout.parallelism, 'leave it out, or write rollout.backend = "vllm"'
    for name in ("tp_size", "pp_size", "dp_shard_size", "ep_size") if engine.one_device else ():
        if getattr(mesh, name) not in (1, -1):
            size = "{}" if name in mesh.model_fields_set else "the default of {}"
            says = f"{engine.title} runs on one device, not on {size}"
            yield refused(config, f"rollout.parallelism.{name}", says, "write {!} = 1", related)
    for name, neutral in engine.lacks.items():
        if getattr(rollout, name) != neutral:
            yield refused(config, f"rollout.{name}", f"{engine.title} has no such option", hint, related)
    for name, value in rollout.sampling_config.extra.items() if not engine.own_options else ():
        message = f"{engine.title} passes no further sampling fields"
        yield Problem(f"{_SAMPLING}.extra.{name}", message, value, hint, related=related)


_ROUTING = "train.train_policy.routing_replay"


def engine_has_gpus(config: Config) -> Iterator[Problem]:
    """Some of what an engine can do, it can do on GPUs alone."""
    if config.placement.gpus_per_node == 0:
        yield from impossible_without_gpus(config)


def impossible_without_gpus(config: Config) -> Iterator[Problem]:
    """The problems without GPUs of an engine that needs them: to sleep, and to say which experts it chose."""
    engine, related = config.rollout.engine, ("rollout.backend", "placement.gpus_per_node")
    if config.shares_time and engine.sleeps_on_gpus:
        says = f"is {{}}, but {engine.title} can only sleep on GPUs (its sleep mode needs CUDA's cuMem allocator), "
        hint = 'write {!} = "memory", or rollout.backend = "transformers"'
        yield refused(config, "placement.share", says + "and there are none", hint, related)
    if config.replays_routing and engine.routes_on_gpus:
        says = f"{{}}: {engine.title} returns the chosen experts on GPUs alone, and there are none"
        yield refused(config, _ROUTING, says, 'write {!} = "none", or rollout.backend = "transformers"', related)


_CALIBRATED = frozenset({"awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin"})


def engine_can_quantise(config: Config) -> Iterator[Problem]:
    """Weights change at each version, so they are quantised as they are loaded, into a type that kernels multiply."""
    rollout, key = config.rollout, "rollout.quantization"
    if not config.generates or rollout.quantization == "none":
        return
    methods = [*rollout.engine.quantisations]
    values = " or ".join(filter(None, [", ".join(map(toml_value, methods[:-1])), *map(toml_value, methods[-1:])]))
    if rollout.quantization not in methods:
        hint = f"write {{!}} = {values}" if methods else 'write {!} = "none", or rollout.backend = "vllm"'
        says = f"{rollout.engine.title} does not quantise published weights so"
        if rollout.quantization in _CALIBRATED and methods:
            says = "needs a checkpoint that was calibrated, and versions are published in full precision"
        yield refused(config, key, says, hint, ("rollout.backend",))
    elif config.engine_dtype not in ("bfloat16", "float16"):
        says = "vLLM's quantised layers compute in 16 bits, and the engine's type is {engine_dtype~}"
        yield refused(config, key, says, 'write {.dtype!} = "bfloat16"', (".dtype",))
    elif config.weight_sync.lora == "adapter" and config.policy.lora is not None:
        says = "this build cannot do it yet below an adapter that is published alone ({weight_sync.lora=})"
        yield refused(config, key, says, 'write {weight_sync.lora!} = "merged"')


def stop_strings_can_be_found(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Stop strings are looked for in the text of an answer, which has no special tokens: one that holds such a token
    and more is never found. Where the tokenizer is on this machine."""
    strings = config.rollout.sampling_config.stop
    for string, token in never_found(strings, _special(config, find) if strings else ()).items():
        yield never_stops(string, token)


def never_stops(string: str, token: str) -> Problem:
    """Report the fault of a stop string that holds a special token and more."""
    message = f"{token!r} is a special token, which the text of an answer leaves out: this is never found in it"
    hint = f"write {token!r} alone, at which an answer ends, or the text without it"
    return Problem(f"{_SAMPLING}.stop", message, string, hint)


def stop_strings_are_whole(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Warning: a stop string that is a part of a special token, at which no answer ends."""
    strings = config.rollout.sampling_config.stop
    for string, token in shares(strings, _special(config, find) if strings else ()).items():
        yield rarely_stops(string, token)


def rarely_stops(string: str, token: str) -> Problem:
    """Return the warning about a stop string that is a part of a special token, or overlaps one."""
    message = (
        f"it has a part of the special token {token!r}, which the text of an answer leaves out: this ends an answer "
        "only where other tokens spell it out, never at that token"
    )
    return Problem(f"{_SAMPLING}.stop", message, string, f"write {token!r} if the token is meant")


def rewards_read_tags(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Warning: tags that are special tokens, which the text of an answer leaves out."""
    if tags := hidden_tags(_special(config, find) if config.generates else ()):
        yield tags_are_hidden(config.policy, tags)


def _special(config: Config, find: FindFile) -> Collection[str]:
    """The special tokens of the policy's tokenizer, where it is on this machine."""
    vocabulary = numbered(*config.policy.tokenizer, find)
    return vocabulary.special if vocabulary else ()


def tags_are_hidden(policy: PolicyConfig, tags: Sequence[str]) -> Problem:
    """Return the warning about tags, such as `think`, that are special tokens of the policy's tokenizer."""
    named = ", ".join(f"<{tag}>…</{tag}>" for tag in tags)
    message = (
        f"its special tokens include {named}, and the text of an answer leaves special tokens out: reward functions "
        'and recorded samples never show these tags, and the reward "format" stays 0 without its <think>'
    )
    hint = 'write "special": false for them in tokenizer.json and tokenizer_config.json if rewards are to read them'
    return Problem(policy.tokenizer_key, message, policy.tokenizer[0], hint)


def _draws_by_flashinfer(config: Config) -> bool:
    return config.generates and config.rollout.sampling_config.use_flashinfer


def _ignores_filters(config: Config) -> bool:
    sampling = config.rollout.sampling_config
    return config.is_grpo and sampling.sampling_correction == "raw" and sampling.reshapes


routing_can_be_replayed = InGrpo(  # the engine says which experts it chose, and the trainer can choose them too
    Refusal(_ROUTING, lambda c: c.replays_routing and c.grpo.routing_replay not in c.rollout.engine.routing,
        lambda c: f"{{}}: {c.rollout.engine.title} returns the ids of the chosen experts alone, without their "
        "weights",
        'write {!} = "ids", or rollout.backend = "transformers"', ("rollout.backend",)),
    Refusal("rollout.parallelism.pp_size",
        lambda c: c.replays_routing and c.rollout.engine.routes_on_gpus and c.rollout.parallelism.pp_size > 1,
        lambda c: f"{{}}: {c.rollout.engine.title} returns the experts of one stage alone ({{{_ROUTING}=}})",
        "write {!} = 1"),
    Refusal("train.compile", lambda c: c.replays_routing and c.train.compile,
        f"true cannot be combined with {{{_ROUTING}=}}: compiled layers take no experts from outside",
        f'write train.compile = false, or {_ROUTING} = "none"'),
)  # fmt: skip
ENGINE_RULES: tuple[Rule, ...] = (
    Refusal(f"{_SAMPLING}.temperature",
        lambda c: c.is_grpo and c.grpo.temperature != c.rollout.sampling_config.temperature
        and "temperature" in c.grpo.model_fields_set & c.rollout.sampling_config.model_fields_set,
        "{} contradicts {train.train_policy.temperature=}, the same temperature", "leave one of the two out"),
    temperatures_can_be_computed,
    training_samples_the_policy,
    Refusal(f"{_SAMPLING}.sampling_correction",
        lambda c: _ignores_filters(c) and c.rollout.backend == "vllm" and c.sampling_temperature != 1.0,
        lambda c: "vLLM gives log-probs without filters at temperature 1 only, and the temperature is "
        f"{c.sampling_temperature}",
        'write {!} = "exact", a temperature of 1.0, or rollout.backend = "transformers"',
        ("train.train_policy.temperature",)),
    pass_through_is_not_a_detour,
    engine_can_do_it,
    engine_can_quantise,
    routing_can_be_replayed,
    engine_has_gpus,
    Refusal(f"{_SAMPLING}.use_flashinfer", lambda c: _draws_by_flashinfer(c) and c.rollout.backend != "vllm",
        "true lets flashinfer filter and draw, and {rollout.backend=} samples by itself",
        'write {!} = false, or {rollout.backend!} = "vllm"'),
    Refusal(f"{_SAMPLING}.use_flashinfer",
        lambda c: _draws_by_flashinfer(c) and c.rollout.sampling_config.sampling_correction != "raw",
        "true lets flashinfer filter and draw, and {.sampling_correction=} needs what filters left of the logits",
        'write {!} = false, or {.sampling_correction!} = "raw"'),
    Refusal(f"{_SAMPLING}.use_flashinfer",
        lambda c: _draws_by_flashinfer(c)
        and c.rollout.sampling_config.top_p == 1.0 and c.rollout.sampling_config.top_k <= 0,
        "true has no effect: neither {.top_p!} nor {.top_k!} filters anything", "write {!} = false", (".top_p",)),
    Refusal("rollout.max_concurrent_samples",
        lambda c: c.is_grpo and c.rollout.max_concurrent_samples < c.group_size,
        lambda c: "{} is less than one group of {.n_generation=}" + " and the greedy sample" * c.grpo.has_baseline,
        lambda c: f"write {{!}} = {c.group_size} or more"),
    stop_strings_can_be_found,
)  # fmt: skip
ENGINE_WARNINGS: tuple[Rule, ...] = (
    Refusal(f"{_SAMPLING}.sampling_correction", _ignores_filters,
        "filters, penalties and min_tokens are ignored in training: gradients are biased towards them",
        'write {!} = "exact" where the engine can give kept sets'),
    stop_strings_are_whole,
    rewards_read_tags,
)  # fmt: skip
