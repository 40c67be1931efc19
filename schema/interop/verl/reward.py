"""verl's rewards: `reward_model`, `custom_reward_function`, and the newer `reward` that holds both."""

from __future__ import annotations

from schema.interop.engine.rules import (
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    always,
    as_integer,
    as_number,
    as_path,
    as_text,
    computed,
    flag,
    implicit,
    integer,
    mapped,
    path,
    unless,
)
from schema.interop.verl.budget import Budget
from schema.interop.verl.facts import POLICY, lacking, no_reward_model, response_length, without_counterpart


def reward_rules() -> tuple[Rule, ...]:
    """All rows of `reward_model`, `custom_reward_function` and the newer `reward`."""
    model, when = "reward_model.model", no_reward_model
    micro = Budget(
        per_gpu="reward_model.micro_batch_size_per_gpu",
        ours=("reward_model.mini_batch", "reward_model.max_token_len_per_mini_batch"),
        whole="reward_model.micro_batch_size",
        switch="reward_model.use_dynamic_bsz",
        tokens="reward_model.forward_max_token_len_per_gpu",
        role="reward_model",
        when=when,
    )
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    return (
        Rule(
            "reward_model.enable",
            unless([False], "false: rewards are functions", flag("reward_model.enable")),
            False,
            ("reward.reward_model.enable",),
        ),
        Rule(
            f"{model}.path",
            path("reward_model.model_name_or_path"),
            also=("reward.reward_model.model_path",),
            when=when,
        ),
        Rule(
            f"{model}.input_tokenizer",
            always("answers are decoded and templated again where tokenizers differ"),
            when=when,
        ),
        Rule(
            f"{model}.external_lib",
            Converter(_modules, ("reward_model.external_modules",), "one name becomes a list"),
            when=when,
        ),
        Rule(f"{model}.trust_remote_code", flag("reward_model.trust_remote_code"), when=when),
        Rule(f"{model}.fsdp_config.param_offload", flag("reward_model.offload"), when=when),
        Rule(
            f"{model}.fsdp_config.min_num_params",
            integer("reward_model.fsdp_wrap_min_params"),
            also=(f"{model}.fsdp_config.wrap_policy.min_num_params",),
            when=when,
        ),
        Rule(f"{model}.*", lacking(-1, 1, False, True), when=when),
        *micro.rules(),
        Rule("reward_model.max_length", integer("reward_model.max_length"), when=when),
        Rule("reward_model.reward_manager", _manager, also=("reward.reward_manager.name",)),
        Rule("reward_model.launch_reward_fn_async", always("rewards are always computed beside generation")),
        Rule("reward_model.num_workers", integer("reward.num_workers"), also=("reward.num_workers",)),
        Rule("reward_model.strategy", always("how a model is sharded follows from its parallelism")),
        Rule("reward_model.load_weight", always("weights are always loaded")),
        Rule("reward_model.*", lacking(False), when=when),
        Rule(f"{overlong}.enable", _overlong, also=("reward_model.overlong_buffer.enable",)),
        Rule(f"{overlong}.len", _overlong, also=("reward_model.overlong_buffer.len",)),
        Rule(f"{overlong}.penalty_factor", _overlong, also=("reward_model.overlong_buffer.penalty_factor",)),
        Rule(
            f"{overlong}.log",
            always("rewards and penalties are always metrics"),
            also=("reward_model.overlong_buffer.log",),
        ),
        Rule(
            "reward_model.reward_kwargs.max_resp_len",
            always("the penalty counts from rollout.max_response_length"),
        ),
        Rule(
            "reward_model.reward_kwargs.*",
            Converter(_reward_kwargs, ("custom",), "under [custom], which hands them to your functions"),
        ),
        Rule("custom_reward_function.path", REWARD, also=("reward.custom_reward_function.path",)),
        Rule("custom_reward_function.name", REWARD, also=("reward.custom_reward_function.name",)),
        Rule(
            "custom_reward_function.reward_kwargs.*",
            Converter(_reward_kwargs, ("custom",), "under [custom], which hands them to your functions"),
        ),
        Rule("reward_manager.name", _manager),
        Rule("reward_manager.*", lacking("register", "custom_reward_manager", "naive")),
        Rule("reward.reward_manager.*", lacking("register", "custom_reward_manager", "naive")),
        Rule("reward.reward_model.*", lacking(False), when=when),
        Rule(
            "sandbox_fusion.url",
            lacking(),
            also=("reward.sandbox_fusion.url", "reward_model.sandbox_fusion.url"),
        ),
        Rule("sandbox_fusion.*", always("no effect without sandbox_fusion.url")),
        Rule("reward.sandbox_fusion.*", always("no effect without sandbox_fusion.url")),
        Rule("reward_model.sandbox_fusion.*", always("no effect without sandbox_fusion.url")),
    )


def reward_name(context: ConversionContext) -> str:
    """The reward function of the job: the user's, or the scorer that goes by the row's data source."""
    file = context.get("custom_reward_function.path", None)
    if not isinstance(file, str) or not file:
        return "by_source"
    name = context.get("custom_reward_function.name", None)
    return f"{as_path(file)}:{name if isinstance(name, str) and name else 'compute_score'}"


def _custom_reward(context: ConversionContext, leaf: KeyPath) -> Result:
    name = reward_name(context)
    if name == "by_source":
        return implicit("null: the built-in scorer of each row's data source (by_source)")
    context.warn(
        f"{name} is called with verl's arguments (data_source, solution_str, ground_truth, extra_info) there; "
        "here a reward function takes the answer and the row: adapt it, see docs/migrate.md"
    )
    return mapped((f"{POLICY}.reward_function", name), note="path:name")


REWARD = Converter(_custom_reward, (f"{POLICY}.reward_function",), "`path:name`; null: `by_source`")


@computed(
    "reward.num_workers",
    words="`naive`, `prime`, `batch`: rewards always run in processes; `dapo`: see overlong_buffer_cfg",
)
def _manager(context: ConversionContext, leaf: KeyPath) -> Result:
    name = "naive" if leaf.value is None else as_text(leaf.value)
    if name in ("naive", "batch", "prime", "dapo"):
        return implicit("rewards always run in processes of their own, beside generation")
    return without_counterpart(context.system, leaf.key)


@computed(f"{POLICY}.overlong_reward", words="enable, len → buffer_length, penalty_factor")
def _overlong(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix, ours = "reward_model.reward_kwargs.overlong_buffer_cfg", f"{POLICY}.overlong_reward"
    if not context.flag(f"{prefix}.enable"):
        return implicit("false: answers are not penalised for their length")
    name = leaf.key.rpartition(".")[2]
    if name == "enable":
        return mapped((f"{ours}.enable_overlong_penalty", True))
    if name == "len":
        longest = response_length(context)
        note = f"the penalty begins at {longest} - {leaf.value} tokens"
        return mapped((f"{ours}.buffer_length", as_integer(leaf.value)), note=note)
    return mapped((f"{ours}.penalty_factor", as_number(leaf.value)))


def _reward_kwargs(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == {}:
        return implicit("null: none")
    return mapped((f"custom.{leaf.rest}", leaf.value), note="[custom] hands it to your functions")


def _modules(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, "", []):
        return implicit("null: none")
    return mapped(("reward_model.external_modules", [as_text(leaf.value)]))
