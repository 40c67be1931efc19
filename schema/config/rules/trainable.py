"""Rules of which parameters train: chosen by name, or adapters next to a frozen model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

from schema.config.layout import mesh_of, reference_is_within, reference_layout
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import FirstOf, Refusal, Rule, refused, value_at
from schema.config.sections.policy import LoraConfig

_MAP, _PUBLISHED = "policy.trainable_map", "weight_sync.lora"
_NAME_IT = 'leave it out to train all, or name what stays: policy.trainable_map."model.embed_tokens" = false'
_MERGED_IN = 'write {!} = "merged"'
_MERGED = "an export has the adapters of policy.lora merged in: training could not go on with the same base"
_WITHIN = "{} has no effect: with policy.lora the reference is the policy without what it has learned"


def _adapters(config: Config) -> Iterator[tuple[str, LoraConfig]]:
    if config.policy.lora is not None:
        yield "policy.lora", config.policy.lora
    if config.is_grpo and config.critic.enable and config.critic.lora is not None:
        yield "critic.lora", config.critic.lora


def initialisers_have_what_they_need(config: Config) -> Iterator[Problem]:
    """EVA needs activations; LoftQ makes up for the error of a quantised base, and this one is not quantised."""
    for section, lora in _adapters(config):
        key, role = f"{section}.init_lora_weights", section.partition(".")[0]
        if lora.init_lora_weights == "eva":
            says = "{} starts the adapter at the principal components of activations, and before its first step "
            hint = 'write {!} = true, or "pissa", which starts at those of the weights'
            yield refused(config, key, says + f"[{section}] has seen no data", hint)
        if lora.init_lora_weights == "loftq":
            says = "{} starts the adapter at the error of a quantised base model, and "
            hint = 'write {!} = true, or "pissa", which also starts at the singular vectors'
            yield refused(config, key, says + f"{role}.model_name_or_path is held in full precision", hint)


def decomposed_rows_are_whole(config: Config) -> Iterator[Problem]:
    """DoRA takes the length of whole rows of a weight, of which tensor parallelism has a part in some layers."""
    for section, lora in _adapters(config):
        role = section.partition(".")[0]
        mesh = mesh_of(config, role)
        if lora.use_dora and mesh.tp_size > 1:
            size = f"{'policy' if mesh is config.policy.parallelism else role}.parallelism.tp_size"
            says, hint = (
                f"true needs whole rows of each weight, and {{{size}=}} cuts some",
                "write {!} = false, or ",
            )
            yield refused(config, f"{section}.use_dora", says, f"{hint}{size} = 1")


def modules_are_named_once(config: Config) -> Iterator[Problem]:
    """A module is trained whole or gets an adapter, and an adapter has somewhere to be."""
    for section, lora in _adapters(config):
        targets = lora.target_modules
        if targets in ([], ""):
            says, hint = ("names no module: there would be no adapter", "leave it out for the model's own choice")
            yield refused(config, f"{section}.target_modules", says, hint)
        overlap = sorted(set(lora.modules_to_save or ()) & set(targets)) if isinstance(targets, list) else []
        if overlap:
            key = f"{section}.target_modules"
            message = f"{', '.join(overlap)} stands in {key} = {targets} too: trained whole and by an adapter"
            hint, related = "name each module in one of the two lists", (key,)
            yield Problem(f"{section}.modules_to_save", message, lora.modules_to_save, hint, related=related)


def patterns_are_sound(config: Config) -> Iterator[Problem]:
    """Keys of r_pattern and alpha_pattern are regular expressions, their values positive."""
    for section, lora in _adapters(config):
        tables = {"r_pattern": lora.r_pattern, "alpha_pattern": lora.alpha_pattern}
        if isinstance(lora.target_modules, str) and lora.target_modules != "all-linear":
            tables["target_modules"] = {lora.target_modules: 1}
        for name, table in tables.items():
            for text, value in (table or {}).items():
                if fault := _fault(text):
                    message = f"`{text}` is not a regular expression: {fault}"
                    hint = "write the end of a module's name, with a backslash before what should be taken literally"
                    yield Problem(f"{section}.{name}", message, text, hint)
                elif value <= 0:
                    hint = f"give `{text}` a value of at least 1, or leave it out of the table"
                    yield Problem(f"{section}.{name}", f"`{text}` = {value} is not an adapter", value, hint)


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
    lora = config.policy.lora
    if lora is None or not config.has_reference or reference_is_within(config):
        return
    apart = reference_layout(config) is not None
    other = "placement.reference" if apart else "reference.model_name_or_path"
    shown, interval = f"{other} = {value_at(config, other)!r}", config.grpo.reference_reset_interval
    if interval:
        key, related = "train.train_policy.reference_reset_interval", (other, "policy.lora")
        message = f"{interval} would copy the adapters of policy.lora into the reference, and {shown} has none"
        yield Problem(key, message, interval, f"leave it out, or leave {other} out", related=related)
    if apart and lora.init_lora_weights is False:
        key, hint = ("policy.lora.init_lora_weights", f"write policy.lora.init_lora_weights = true, or {other} = []")
        message = f"false begins away from the base, and {shown} keeps the base alone as the policy's initial weights"
        yield Problem(key, message, False, hint, related=(other,))


def _alone(config: Config, backend: str = "") -> LoraConfig | None:
    """The adapters that are published alone, if any. backend: to replicas of this engine."""
    sent = config.generates and config.weight_sync.lora == "adapter" and backend in ("", config.rollout.backend)
    return config.policy.lora if sent else None


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
    Refusal(_MAP, lambda c: c.policy.lora is None and all((c.policy.trainable_map or {"": False}).values()),
        "no name is false in it, and what no name matches trains as well: it has no effect", _NAME_IT),
    Refusal(_MAP, lambda c: c.policy.lora is None and c.policy.trainable_map == {}, "is empty: what does it freeze?",
        _NAME_IT),
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
    FirstOf(
        Refusal(_PUBLISHED, lambda c: c.generates and c.weight_sync.lora == "adapter" and c.policy.lora is None,
            "{} publishes adapters alone, and without [policy.lora] all weights are trained", _MERGED_IN,
            ("policy.lora",)),
        Refusal(_PUBLISHED, lambda c: bool((lora := _alone(c)) and lora.alters_base),
            "{} leaves the base as it is, and {policy.lora.init_lora_weights=} takes a part of it",
            _MERGED_IN + ", or {policy.lora.init_lora_weights!} = true"),
        Refusal(_PUBLISHED, lambda c: bool((lora := _alone(c, "vllm")) and lora.modules_to_save),
            "{} is low-rank in vLLM, and {policy.lora.modules_to_save=} are whole", _MERGED_IN),
        Refusal(_PUBLISHED, lambda c: bool((lora := _alone(c, "vllm")) and lora.use_dora),
            "{} is the product of two matrices in vLLM, and {policy.lora.use_dora=} is more", _MERGED_IN),
        Refusal(_PUBLISHED, lambda c: _alone(c) is not None and c.rollout.load_format == "dummy",
            "{} never publishes the base, and {rollout.load_format=} does not load it",
            _MERGED_IN + ', or {rollout.load_format!} = "auto"'),
    ),
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
