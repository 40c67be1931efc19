"""What this build cannot do yet: one table, and the check that refuses what stands in it.

    UNAVAILABLE[dotted key] = values that need nothing of the missing part, and the name of that part

A key of the table must have one of its neutral values; anything else is refused by name, never ignored. When
a part is built its rows are deleted, and nothing else changes. Defaults of the schema that are not neutral
(`tp_size = 2`, `compile = true`) are refused too, with the line to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from schema.config.base import Section
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.sections.autoscale import AutoscaleConfig
from schema.config.sections.critic import CriticConfig
from schema.config.sections.reference import ReferenceConfig
from schema.config.sections.reward_model import RewardModelConfig
from schema.config.sections.train_policy import KlInRewardConfig, LogProbPassConfig, RolloutCorrectionConfig


def _always(_: Config) -> bool:
    return True


@dataclass(frozen=True)
class Unavailable:
    """One row.

    neutral: accepted values, the first is the one to recommend. missing: the part that is not built.
    when: whether the key means anything in this job; where it does not, its value is not looked at.
    warns: whether the part changes neither what is trained nor how, so that the job runs without it, and says so.
    section: of which nothing is built; what asks for it there is one refusal.
    """

    neutral: tuple[Any, ...]
    missing: str
    when: Callable[[Config], bool] = _always
    warns: bool = False
    section: str = ""


def _is_grpo(config: Config) -> bool:
    return config.is_grpo


def _is_sft(config: Config) -> bool:
    return not config.is_grpo


def _off(missing: str) -> Unavailable:
    return Unavailable((False,), missing)


def _unset(missing: str) -> Unavailable:
    return Unavailable((None,), missing)


def _whole(prefix: str, section: type[Section], missing: str, top: str = "") -> dict[str, Unavailable]:
    """A row for every key of a section of which nothing is built: its default is what needs nothing."""
    rows: dict[str, Unavailable] = {}
    top = top or prefix
    for name, info in section.model_fields.items():
        key, kind = f"{prefix}.{name}", info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            rows |= _whole(key, kind, missing, top)
        else:
            default = info.get_default(call_default_factory=True)
            rows[key] = Unavailable((default,), missing, section=top)
    return rows


def _mesh(section: str, dimensions: dict[str, str], when: Callable[[Config], bool]) -> dict[str, Unavailable]:
    rows = {
        key: Unavailable((1,), f"{words} of a {section} replica", when) for key, words in dimensions.items()
    }
    rows["pp_dynamic_shape"] = Unavailable((False,), f"pipeline parallelism of a {section} replica", when)
    rows["virtual_pp_size"] = Unavailable((1,), f"pipeline parallelism of a {section} replica", when)
    rows["sequence_parallel"] = Unavailable((False,), f"sequence parallelism of a {section} replica", when)
    return {f"{section}.parallelism.{key}": row for key, row in rows.items()}


_DIMENSIONS = {
    "cp_size": "context parallelism",
    "ep_size": "expert parallelism",
    "pp_size": "pipeline parallelism",
    "pp_micro_batch_size": "pipeline parallelism",
    "dp_replicate_size": "replicated data parallelism",
}

_KL = "a KL term against a reference model"
_ESTIMATORS = "advantage estimators other than grpo's"
_CORRECTION = "correction of the mismatch between engine and trainer"

_TRAIN_POLICY = {
    "variant": Unavailable(("grpo", "dapo", "gspo"), "that policy loss"),
    "advantage_estimator": Unavailable(("grpo",), _ESTIMATORS),
    "gamma": Unavailable((1.0,), _ESTIMATORS),
    "gae_lambda": Unavailable((1.0,), _ESTIMATORS),
    "kl_type": Unavailable(("k3",), _KL),
    "unbiased_kl_estimate": _off(_KL),
    "mini_batch_shuffle": _off("shuffling before each pass over a batch"),
    "mini_batch_shuffle_seed": _unset("shuffling before each pass over a batch"),
    "domain_column_name": Unavailable(("",), "shares of prompts by domain"),
    "domain_shares": Unavailable(({},), "shares of prompts by domain"),
    "dataset.image_column_name": Unavailable(("",), "prompts with images"),
    "dataset.custom_class": Unavailable(("",), "dataset classes of your own"),
    "enable_dataset_cache": _off("a cache of processed rows"),
    "dataloader_num_workers": Unavailable((0,), "data preparation in several processes"),
    "dataloader_prefetch_factor": _unset("data preparation in several processes"),
    "dataloader_batch_size": Unavailable((1, None), "data preparation in several processes"),
    "kl_beta": Unavailable((0,), "a reference model"),
    "reference_reset_interval": Unavailable((None, 0), "a reference model"),
    "reset_optimizer_with_reference": Unavailable((True,), "a reference model"),
    "aipo_rho": _unset("AIPO's truncated importance weights"),
    "use_decoupled_loss": _off("the decoupled loss"),
    "behav_imp_weight_cap": _unset("the decoupled loss"),
    "min_filter_prefix_tokens": _unset("the filter of shared prefixes"),
    "max_retry_for_on_policy": Unavailable((10, 0, -1), "a limit on the refills of dynamic sampling"),
}

_SCHEDULES = "learning-rate schedules beyond linear, cosine, sqrt and wsd with a cosine"
_WRAPPING = "a choice of what FSDP shards"
_RECOMPUTE = "a choice of what is recomputed"

_TRAIN = {
    "optm_name": Unavailable(("AdamW",), "an optimizer other than AdamW"),
    "optm_weight_decay_ramp": Unavailable(("constant",), "a weight decay that changes"),
    "optm_weight_decay_start": _unset("a weight decay that changes"),
    "optm_decay_type": Unavailable(
        (None, "none", "linear", "cosine", "sqrt", "wsd"), "the inverse square root schedule"
    ),
    "optm_decay_steps": _unset(_SCHEDULES),
    "optm_num_cycles": Unavailable((0.5,), _SCHEDULES),
    "optm_wsd_decay_type": Unavailable(("cosine",), _SCHEDULES),
    "fsdp_gradient_offload": _off("gradient offload"),
    "optimizer_offload": _off("optimizer offload"),
    "fsdp_wrap_layers": Unavailable(([],), _WRAPPING),
    "fsdp_wrap_min_params": Unavailable((0,), _WRAPPING),
    "overlap_grad_reduce": Unavailable((True,), "gradient reduction after backward"),
    "recompute_granularity": Unavailable(("full",), _RECOMPUTE),
    "recompute_moe_layers": _off(_RECOMPUTE),
    "master_dtype": Unavailable(("float32", "bfloat16"), "loss scaling, which float16 needs"),
    "param_dtype": Unavailable(("bfloat16", "float32"), "loss scaling, which float16 needs"),
    "fsdp_offload": _off("parameter offload"),
    "activation_offload": _off("activation offload"),
    "async_tp_enabled": _off("asynchronous tensor parallelism"),
    "local_dataset": Unavailable((True, None), "a choice of who reads the rows (they come with each lease)"),
    "compile": _off("torch.compile"),
    "fa_version": _unset("a choice of the FlashAttention version"),
    "fp8.enable_fp8": _off("fp8 training"),
    "fp8.fp8_recipe": Unavailable(("dynamic_scaling",), "fp8 training"),
    "fp8.quant_recipe": Unavailable(("rowwise",), "fp8 training"),
    "fp4.enable_fp4": _off("fp4 training"),
    "fp4.fp4_recipe": Unavailable(("dynamic_scaling",), "fp4 training"),
    "fp4.quant_recipe": Unavailable(("rowwise",), "fp4 training"),
}

_MULTI_TURN = {
    "enable": _off("rollouts of several turns"),
    "enable_tools": _off("rollouts of several turns"),
    "enable_thinking": _off("rollouts of several turns"),
    "custom_chat_template_path": _unset("rollouts of several turns"),
    "max_assistant_turns": Unavailable((5,), "rollouts of several turns"),
    "add_generation_prompt": Unavailable((True,), "rollouts of several turns"),
    "continue_final_message": _off("rollouts of several turns"),
}

_PROFILER = {
    "enable_profiler": _off("profiling"),
    "enable_nsys": _off("profiling"),
    "sub_profiler_config.do_profile": _off("profiling"),
    "sub_profiler_config.active_steps": Unavailable((1,), "profiling"),
    "sub_profiler_config.warmup_steps": Unavailable((1,), "profiling"),
    "sub_profiler_config.wait_steps": Unavailable((1,), "profiling"),
    "sub_profiler_config.rank_filter": Unavailable(([],), "profiling"),
    "sub_profiler_config.record_shape": _off("profiling"),
    "sub_profiler_config.profile_memory": _off("profiling"),
    "sub_profiler_config.with_stack": _off("profiling"),
    "sub_profiler_config.with_modules": _off("profiling"),
}

UNAVAILABLE: dict[str, Unavailable] = {
    **{f"train.train_policy.{key}": row for key, row in _TRAIN_POLICY.items()},
    **{f"train.{key}": row for key, row in _TRAIN.items()},
    "policy.parallelism.n_init_replicas": Unavailable((1,), "several policy replicas"),
    "policy.parallelism.tp_size": Unavailable((1,), "tensor parallelism of a policy replica"),
    **_mesh("policy", _DIMENSIONS, _always),
    "policy.override_config": Unavailable(({},), "changes to a model's own configuration"),
    "policy.freeze_moe_router": _off("options of mixtures of experts"),
    "policy.moe_token_dispatcher": Unavailable(("alltoall",), "options of mixtures of experts"),
    "policy.moe_grouped_gemm": _off("options of mixtures of experts"),
    "policy.moe_shared_expert_overlap": _off("options of mixtures of experts"),
    "policy.lora": _unset("LoRA"),
    "policy.trainable_map": _unset("training of chosen parameters"),
    "policy.enable_liger_kernel": _off("Liger kernels"),
    **_mesh("rollout", _DIMENSIONS, _is_grpo),
    "rollout.parallelism.dp_shard_size": Unavailable(
        (-1, 1), "data parallelism of a rollout replica", _is_grpo
    ),
    "rollout.quantization": Unavailable(("none",), "a quantised rollout engine"),
    "rollout.vllm_use_flashinfer": _off("flashinfer"),
    "rollout.sampling_config.use_flashinfer": _off("flashinfer"),
    **{
        f"rollout.multi_turn_config.{key}": replace(row, section="rollout.multi_turn_config")
        for key, row in _MULTI_TURN.items()
    },
    "rollout.engine_class": Unavailable(("",), "inference engines of your own"),
    "rollout.custom_server": Unavailable(("",), "generation servers of your own"),
    "validation.enable": Unavailable((False,), "validation of supervised training", _is_sft),
    "validation.dataset.image_column_name": Unavailable(("",), "prompts with images"),
    "evaluation.dataset.image_column_name": Unavailable(("",), "prompts with images"),
    "evaluation.dataset.custom_class": Unavailable(("",), "dataset classes of your own"),
    "validation.dataset.custom_class": Unavailable(("",), "dataset classes of your own"),
    "controller.on_stale": Unavailable(("wait", "drop"), "masking of tokens that are too old"),
    "placement.nodes": Unavailable((1,), "jobs on several machines"),
    "placement.share": Unavailable(("none", "memory"), "sharing a GPU in turns"),
    "placement.reference": Unavailable(([],), _KL),
    "placement.critic": Unavailable(([],), "a critic"),
    "placement.reward_model": Unavailable(([],), "a reward model"),
    "weight_sync.lora": Unavailable(("merged",), "LoRA"),
    "logging.logger": Unavailable((["console"],), "a tracker other than the console", warns=True),
    "logging.log_validation_samples": Unavailable((0,), "a tracker other than the console"),
    **{f"profiler.{key}": replace(row, section="profiler") for key, row in _PROFILER.items()},
    **_whole("train.train_policy.kl_in_reward", KlInRewardConfig, _KL),
    **_whole("train.train_policy.rollout_correction", RolloutCorrectionConfig, _CORRECTION),
    **_whole("train.train_policy.old_log_prob", LogProbPassConfig, "a pass for the old policy's log-probs"),
    **_whole("reference", ReferenceConfig, _KL),
    **_whole("critic", CriticConfig, "a critic"),
    **_whole("reward_model", RewardModelConfig, "a reward model"),
    **_whole("autoscale", AutoscaleConfig, "autoscaling"),
}


_NAMED = 3  # keys of an absent section that its refusal names


def check_available(config: Config) -> list[Problem]:
    """Every key that is refused, as it asks for a part which this build does not have.

    Several of one absent section are one refusal.
    """
    return _lacking(config, warns=False)


def check_left_out(config: Config) -> list[Problem]:
    """Every key whose part this build does not have, and without which the job runs all the same."""
    return _lacking(config, warns=True)


def _lacking(config: Config, warns: bool) -> list[Problem]:
    problems: list[Problem] = []
    absent: dict[str, list[Problem]] = {}
    for key, row in UNAVAILABLE.items():
        if row.warns is not warns:
            continue
        if config.is_evaluation and not key.startswith("evaluation."):
            continue  # nothing else is used
        section, name = _owner(config, key)
        if section is None or not row.when(config):
            continue
        value = getattr(section, name)
        if not any(_same(value, neutral) for neutral in row.neutral):
            default = type(section).model_fields[name].get_default(call_default_factory=True)
            refusal = _refusal(key, value, row, default, is_written=name in section.model_fields_set)
            (absent.setdefault(row.section, []) if row.section else problems).append(refusal)
    return problems + [_together(section, found) for section, found in absent.items()]


def _together(section: str, found: list[Problem]) -> Problem:
    """One refusal for all keys of a section of which nothing is built."""
    if len(found) == 1:
        return found[0]
    names = [problem.key.removeprefix(f"{section}.") for problem in found]
    names.sort(key=lambda name: name != "enable")
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    missing = UNAVAILABLE[found[0].key].missing
    message = f"this build cannot do {missing} yet, which {', '.join(names[:_NAMED])}{more} ask for"
    related = tuple(problem.key for problem in found)
    return Problem(section, message, None, f"leave [{section}] out", related=related)


def _owner(config: Config, key: str) -> tuple[Any, str]:
    """The section that holds a key, and the key's name in it; None where this job has no such key."""
    *parents, name = key.split(".")
    section: Any = config
    for part in parents:
        section = getattr(section, part, None)
    return (section, name) if hasattr(section, name) else (None, name)


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _refusal(key: str, value: Any, row: Unavailable, default: Any, is_written: bool) -> Problem:
    shown = f"the default, {_toml(value)},"
    if is_written:
        shown = _toml(value) if _is_short(value) else "this"
    helps = is_written and any(_same(default, neutral) for neutral in row.neutral)
    hint = "leave it out" if helps else f"write {key} = {_toml(row.neutral[0])}"
    message = f"this build cannot do {row.missing} yet, which {shown} asks for"
    if row.warns:
        message += ": the job runs without it"
    return Problem(key, message, value, hint)


def _is_short(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
