"""verl's rewards: `reward_model`, `custom_reward_function`, the newer `reward` that holds both, and evaluation.yaml,
where answers of a file are scored by the same functions."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath, Rule, computed, rules_below
from convert.verl.data import files
from convert.verl.facts import POLICY, lacking, no_reward_model, response_length, without_counterpart
from convert.verl.shared import Budget
from convert.verl.unsupported import REWARD_MODEL_OPTIONS


def reward_rules() -> tuple[Rule, ...]:
    """All rules of `reward_model`, `custom_reward_function` and the newer `reward`."""
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
    least = "fsdp_config.wrap_policy.min_num_params"
    table = {
        "input_tokenizer": to.always("answers are decoded and templated again where tokenizers differ"),
        "external_lib": _modules,
        "trust_remote_code": to.flag("reward_model.trust_remote_code"),
        "fsdp_config.param_offload": to.flag("reward_model.offload"),
        "fsdp_config.min_num_params": to.integer("reward_model.fsdp_wrap_min_params"),
        "*": lacking(-1, 1, False, True),
    }
    name = to.path("reward_model.model_name_or_path")
    newer = ("reward.reward_model.model_path", "reward_model.model_path")
    return (
        Rule(
            "reward_model.enable",
            to.unless([False], "false: rewards are functions", to.flag("reward_model.enable")),
            False,
            ("reward.reward_model.enable",),
        ),
        Rule(f"{model}.path", name, also=newer, when=when),
        *rules_below(model, table, when, also={"fsdp_config.min_num_params": (least,)}),
        *micro.rules(),
        Rule("reward_model.max_length", to.integer("reward_model.max_length"), when=when),
        *rules_below("reward_model", {" ".join(REWARD_MODEL_OPTIONS): lacking(False)}, when),
        *rules_below("reward.reward_model", {" ".join(REWARD_MODEL_OPTIONS): lacking(False)}, when),
        *_function_rules(),
    )


def _function_rules() -> tuple[Rule, ...]:
    """Rules of rewards that are functions, and of the penalty for long answers."""
    overlong, older = "reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"
    metrics = to.always("rewards and penalties are always metrics")
    table = {
        "launch_reward_fn_async": to.always("rewards are always computed in parallel with generation"),
        "strategy": to.always("how a model is sharded follows from its parallelism"),
        "load_weight": to.always("weights are always loaded"),
        "reward_kwargs.max_resp_len": to.always("the penalty counts from rollout.max_response_length"),
        "reward_kwargs.*": _reward_kwargs,
    }
    sandbox = ("reward.sandbox_fusion", "reward_model.sandbox_fusion")
    unused = to.always("no effect without sandbox_fusion.url")
    managers = lacking("register", "custom_reward_manager", "naive")
    return (
        *rules_below("reward_model", table),
        Rule("reward_model.reward_manager", _manager, also=("reward.reward_manager.name",)),
        Rule("reward_model.num_workers", to.integer("reward.num_workers"), also=("reward.num_workers",)),
        *(
            Rule(f"{overlong}.{name}", metrics if name == "log" else _overlong, also=(f"{older}.{name}",))
            for name in ("enable", "len", "penalty_factor", "log")
        ),
        *(
            Rule(
                f"custom_reward_function.{name}",
                _custom_reward,
                also=(f"reward.custom_reward_function.{name}",),
            )
            for name in ("path", "name")
        ),
        Rule("custom_reward_function.reward_kwargs.*", _reward_kwargs),
        Rule("reward_manager.name", _manager),
        *rules_below(
            "reward_model", {"reward_loop_source reward_loop_module_path reward_loop_class_name": managers}
        ),
        *rules_below("reward_manager", {"source module.path module.name": managers}),
        *rules_below("reward.reward_manager", {"source module.path module.name": managers}),
        Rule("sandbox_fusion.url", lacking(), also=tuple(f"{table}.url" for table in sandbox)),
        *(
            Rule(f"{table}.{name}", unused)
            for table in ("sandbox_fusion", *sandbox)
            for name in ("max_concurrent", "memory_limit_mb")
        ),
    )


def reward_name(context: ConversionContext) -> str:
    """The reward function of the job: the user's, or the scorer that goes by the row's data source."""
    file = context.get("custom_reward_function.path", None)
    if not isinstance(file, str) or not file:
        return "by_source"
    name = context.get("custom_reward_function.name", None)
    return f"{values.path(file)}:{name if isinstance(name, str) and name else 'compute_score'}"


@computed(f"{POLICY}.reward_function", words="`path:name`; null: `by_source`")
def _custom_reward(context: ConversionContext, leaf: KeyPath) -> Result:
    name = reward_name(context)
    if name == "by_source":
        return implicit("null: the built-in scorer of each row's data source (by_source)")
    context.warn(
        f"{name} is called with verl's arguments (data_source, solution_str, ground_truth, extra_info) there; "
        "here a reward function takes the answer and the row: adapt it, see docs/migrate.md"
    )
    return mapped((f"{POLICY}.reward_function", name), note="path:name")


@computed(
    "reward.num_workers",
    words="`naive`, `prime`, `batch`: rewards always run in processes; `dapo`: see overlong_buffer_cfg",
)
def _manager(context: ConversionContext, leaf: KeyPath) -> Result:
    name = "naive" if leaf.value is None else values.text(leaf.value)
    if name in ("naive", "batch", "prime", "dapo"):
        return implicit("rewards always run in processes of their own, in parallel with generation")
    return without_counterpart(leaf.key)


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
        return mapped((f"{ours}.buffer_length", values.integer(leaf.value)), note=note)
    return mapped((f"{ours}.penalty_factor", values.number(leaf.value)))


@computed("custom", words="under [custom], which hands them to your functions")
def _reward_kwargs(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == {}:
        return implicit("null: none")
    return mapped((f"custom.{leaf.rest}", leaf.value), note="[custom] hands it to your functions")


@computed("reward_model.external_modules", words="one name becomes a list")
def _modules(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, "", []):
        return implicit("null: none")
    return mapped(("reward_model.external_modules", [values.text(leaf.value)]))


# --- evaluation -------------------------------------------------------------------------------------------


def evaluation_rules() -> tuple[Rule, ...]:
    """All rules of an evaluation file."""
    ours = "evaluation"
    return (
        Rule("data.path", computed(f"{ours}.dataset.files", words="one file becomes a list")(files)),
        Rule("data.prompt_key", to.text(f"{ours}.prompt_column_name"), default="prompt"),
        Rule("data.response_key", to.text(f"{ours}.responses_column_name"), default="responses"),
        Rule("data.data_source_key", to.text(f"{ours}.data_source_column_name"), default="data_source"),
        Rule("data.reward_model_key", _reference_column, default="reward_model"),
        Rule("data.last_user_msg_template", lacking()),
        Rule("custom_reward_function.path", _scored_by),
        Rule("custom_reward_function.name", _scored_by),
    )


@computed(
    "evaluation.reference_column_name",
    words="`.ground_truth` inside this column, where verl looks",
    null="null: none",
)
def _reference_column(context: ConversionContext, leaf: KeyPath) -> Result:
    column = values.text(leaf.value)
    return mapped(("evaluation.reference_column_name", f"{column}.ground_truth"), note="its `ground_truth`")


@computed("evaluation.reward_function", words="`path:name`; null: `by_source`")
def _scored_by(context: ConversionContext, leaf: KeyPath) -> Result:
    name = reward_name(context)
    if name == "by_source":
        return implicit("null: the built-in scorer of each row's data source (by_source)")
    return mapped(("evaluation.reward_function", name), note="path:name")
