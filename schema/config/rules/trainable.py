"""Rules of which parameters train: chosen by name, or adapters next to a frozen model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

from schema.config.layout import mesh_of, reference_is_within, reference_layout
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Refusal, Rule
from schema.config.sections.policy import LoraConfig

_MAP = "policy.trainable_map"
_MERGED = "an export has the adapters of policy.lora merged in: training could not go on with the same base"
_WITHIN = "{} has no effect: with policy.lora the reference is the policy without what it has learned"


def _adapters(config: Config) -> Iterator[tuple[str, LoraConfig]]:
    if config.policy.lora is not None:
        yield "policy.lora", config.policy.lora
    if config.is_grpo and config.critic.enable and config.critic.lora is not None:
        yield "critic.lora", config.critic.lora


def map_freezes_something(config: Config) -> Iterator[Problem]:
    """A parameter that no name matches trains, so a map without a false one changes nothing."""
    chosen = config.policy.trainable_map
    if chosen is None or config.policy.lora is not None or not all(chosen.values()):
        return
    message = (
        "no name is false in it, and what no name matches trains as well: it has no effect"
        if chosen
        else "is empty: what does it freeze?"
    )
    hint = 'leave it out to train all, or name what stays: policy.trainable_map."model.embed_tokens" = false'
    yield Problem(_MAP, message, chosen, hint)


def initialisers_have_what_they_need(config: Config) -> Iterator[Problem]:
    """EVA needs activations; LoftQ makes up for the error of a quantised base, and this one is not quantised."""
    for section, lora in _adapters(config):
        if lora.init_lora_weights == "eva":
            key = f"{section}.init_lora_weights"
            message = (
                f'"eva" starts the adapter at the principal components of activations, and before its first step '
                f"[{section}] has seen no data"
            )
            hint = f'write {key} = true, or "pissa", which starts at those of the weights'
            yield Problem(key, message, "eva", hint)
        if lora.init_lora_weights == "loftq":
            key = f"{section}.init_lora_weights"
            message = (
                '"loftq" starts the adapter at the error of a quantised base model, and '
                f"{section.partition('.')[0]}.model_name_or_path is held in full precision"
            )
            hint = f'write {key} = true, or "pissa", which also starts at the singular vectors'
            yield Problem(key, message, "loftq", hint)


def decomposed_rows_are_whole(config: Config) -> Iterator[Problem]:
    """DoRA takes the length of whole rows of a weight, of which tensor parallelism has a part in some layers."""
    for section, lora in _adapters(config):
        role = section.partition(".")[0]
        mesh = mesh_of(config, role)
        if lora.use_dora and mesh.tp_size > 1:
            own = mesh is not config.policy.parallelism
            key, size = f"{section}.use_dora", f"{role if own else 'policy'}.parallelism.tp_size"
            message = f"true needs whole rows of each weight, and {size} = {mesh.tp_size} cuts some"
            yield Problem(key, message, True, f"write {key} = false, or {size} = 1", related=(size,))


def modules_are_named_once(config: Config) -> Iterator[Problem]:
    """A module is trained whole or gets an adapter, and an adapter has somewhere to be."""
    for section, lora in _adapters(config):
        key, targets = f"{section}.target_modules", lora.target_modules
        if targets in ([], ""):
            hint = "leave it out for the model's own choice"
            yield Problem(key, "names no module: there would be no adapter", targets, hint)
        both = sorted(set(lora.modules_to_save or ()) & set(targets)) if isinstance(targets, list) else []
        if both:
            saved = f"{section}.modules_to_save"
            message = f"{', '.join(both)} stands in {key} = {targets} too: trained whole and by an adapter"
            hint, related = "name each module in one of the two lists", (key,)
            yield Problem(saved, message, lora.modules_to_save, hint, related=related)


def patterns_are_sound(config: Config) -> Iterator[Problem]:
    """Keys of r_pattern and alpha_pattern are regular expressions, their values positive."""
    for section, lora in _adapters(config):
        named: list[tuple[str, str, float | None]] = [
            (f"{section}.{name}", text, value)
            for name, table in (("r_pattern", lora.r_pattern), ("alpha_pattern", lora.alpha_pattern))
            for text, value in (table or {}).items()
        ]
        if isinstance(lora.target_modules, str) and lora.target_modules != "all-linear":
            named.append((f"{section}.target_modules", lora.target_modules, None))
        for key, text, value in named:
            fault = _fault(text)
            if fault:
                message = f"`{text}` is not a regular expression: {fault}"
                hint = (
                    "write the end of a module's name, with a backslash before what should be taken literally"
                )
                yield Problem(key, message, text, hint)
            elif value is not None and value <= 0:
                hint = f"give `{text}` a value of at least 1, or leave it out of the table"
                yield Problem(key, f"`{text}` = {value} is not an adapter", value, hint)


def _fault(pattern: str) -> str:
    try:
        with warnings.catch_warnings():  # a pattern may be sound and still odd to Python
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error) or type(error).__name__
    return ""


def reference_of_adapters_is_the_base(config: Config) -> Iterator[Problem]:
    """A whole reference model next to adapters has no adapters: it cannot become a copy of the policy."""
    lora, interval = config.policy.lora, config.grpo.reference_reset_interval if config.is_grpo else None
    if lora is None or not config.has_reference or reference_is_within(config):
        return
    name, place = "reference.model_name_or_path", "placement.reference"
    apart = reference_layout(config) is not None
    other = (
        f"{place} = {config.placement.reference}"
        if apart
        else f"{name} = {config.reference.model_name_or_path!r}"
    )
    related, key = (place if apart else name, "policy.lora"), "train.train_policy.reference_reset_interval"
    if interval:
        message = (
            f"{interval} would copy the adapters of policy.lora into the reference, and {other} has none"
        )
        hint = f"leave it out, or leave {place if apart else name} out"
        yield Problem(key, message, interval, hint, related=related)
    if apart and lora.init_lora_weights is False:
        key = "policy.lora.init_lora_weights"
        message = f"false begins away from the base, and {other} keeps the base alone as the policy's initial weights"
        yield Problem(key, message, False, f"write {key} = true, or {place} = []", related=(place,))


def adapters_can_be_published_alone(config: Config) -> Iterator[Problem]:
    """An adapter alone needs an engine that takes it, next to the base that it was trained with."""
    key, lora = "weight_sync.lora", config.policy.lora
    if config.weight_sync.lora != "adapter" or not config.is_grpo:
        return
    message, related, hint = "", "policy.lora", f'write {key} = "merged"'
    if lora is None:
        message = '"adapter" publishes adapters alone, and without [policy.lora] all weights are trained'
    elif lora.alters_base:
        related = "policy.lora.init_lora_weights"
        message = f'"adapter" leaves the base as it is, and {related} = "{lora.init_lora_weights}" takes a part of it'
        hint = f"{hint}, or {related} = true"
    elif config.rollout.backend == "vllm" and lora.modules_to_save:
        related = "policy.lora.modules_to_save"
        message = (
            f'"adapter" is low-rank in vLLM, and {related} = {toml_value(lora.modules_to_save)} are whole'
        )
    elif config.rollout.backend == "vllm" and lora.use_dora:
        related = "policy.lora.use_dora"
        message = f'"adapter" is the product of two matrices in vLLM, and {related} = true is more'
    elif config.rollout.load_format == "dummy":
        related = "rollout.load_format"
        message = f'"adapter" never publishes the base, and {related} = "dummy" does not load it'
        hint = f'{hint}, or {related} = "auto"'
    if message:
        yield Problem(key, message, "adapter", hint, related=(related,))


def _without_export(config: Config) -> list[str]:
    loaded = config.train.ckpt.load_contents or ()
    return ["model", *(name for name in loaded if name not in ("hf_model", "model"))]


TRAINABLE_RULES: tuple[Rule, ...] = (
    Refusal(_MAP, lambda c: c.policy.lora is not None and c.policy.trainable_map is not None,
        "policy.lora freezes all parameters of the model, and this map chooses among them",
        "leave it out, or name the modules in policy.lora.modules_to_save", (".lora",)),
    Refusal("policy.freeze_moe_router", lambda c: c.policy.lora is not None and c.policy.freeze_moe_router,
        "true has no effect: {.lora!} freezes the routers with the rest of the model",
        "write {.freeze_moe_router!} = false", (".lora",)),
    Refusal("critic.freeze_moe_router",
        lambda c: c.has_critic and c.critic.lora is not None and c.critic.freeze_moe_router,
        "true has no effect: {.lora!} freezes the routers with the rest of the model",
        "write {.freeze_moe_router!} = false", (".lora",)),
    map_freezes_something,
    Refusal("train.fp8.enable_fp8", lambda c: c.train.fp8.enable_fp8 and c.policy.lora is not None,
        "true replaces the linear layers that policy.lora (r = {policy.lora.r}) wraps",
        "write {.enable_fp8!} = false, or train without LoRA", ("policy.lora",)),
    initialisers_have_what_they_need,
    decomposed_rows_are_whole,
    modules_are_named_once,
    patterns_are_sound,
    Refusal("train.ckpt.save_contents",
        lambda c: c.policy.lora is not None and c.train.ckpt.enable_checkpoint
        and "model" not in c.train.ckpt.save_contents,
        f"{{}} keeps no weights but those of an export, and {_MERGED}",
        lambda c: f"write {{!}} = {toml_value(['model', *c.train.ckpt.save_contents])}", ("policy.lora",)),
    Refusal("train.ckpt.load_contents",
        lambda c: c.policy.lora is not None and "hf_model" in (c.train.ckpt.load_contents or ()),
        f"{{}} begins with an export, and {_MERGED}",
        lambda c: f"write {{!}} = {toml_value(_without_export(c))}, or name the export with "
        "policy.model_name_or_path", ("policy.lora",)),
    reference_of_adapters_is_the_base,
    adapters_can_be_published_alone,
)  # fmt: skip
TRAINABLE_WARNINGS: tuple[Rule, ...] = (
    Refusal("policy.lora.lora_dropout",
        lambda c: c.is_grpo and c.policy.lora is not None and c.policy.lora.lora_dropout != 0.0,
        "{} drops parts of the adapter in training that generation has: ratios begin off 1",
        "write {.lora_dropout!} = 0.0"),
    Refusal(("reference.offload",), reference_is_within, _WITHIN, "write {.offload!} = false", ("policy.lora",)),
    Refusal(("reference.fsdp_wrap_layers", "reference.fsdp_wrap_min_params"), reference_is_within, _WITHIN,
        related=("policy.lora",)),
)  # fmt: skip
