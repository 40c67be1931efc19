"""`rewards` of ROLL and the environments of its agents: rules become our functions of the same rule."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.model import Outcome, Result, implicit, mapped, no_counterpart, unsupported
from convert.engine.rules import ConversionContext, KeyPath, Rule, computed
from convert.engine.values import BadValue, shown
from convert.roll.converters import POLICY, lost, named_devices, reason
from convert.roll.unsupported import ROLL

_WORKERS = {
    "MathRuleRewardWorker": "boxed_math",
    "MultipleChoiceBoxedRuleRewardWorker": "single_choice",
    "CrossThinkQARuleRewardWorker": "single_choice",
}


def domains(context: ConversionContext) -> list[str]:
    """The names of the rewards, in the order of the file."""
    return list(dict.fromkeys(key.split(".")[0] for key in context.below("rewards") if "." in key))


def scorers(context: ConversionContext) -> dict[str, str | None]:
    """Domain -> our reward function for its worker; None where there is none."""
    found: dict[str, str | None] = {}
    for domain in domains(context):
        worker = context.values.get(f"rewards.{domain}.worker_cls")
        found[domain] = _WORKERS.get(str(worker).rpartition(".")[2])
    return found


@computed(
    f"{POLICY}.reward_function",
    f"{POLICY}.filter_reward_metric",
    words="a rule of ROLL's → our function of the same rule",
)
def _reward(context: ConversionContext, leaf: KeyPath) -> Result:
    domain, _, key = leaf.rest.partition(".")
    if not key and leaf.value in (None, {}):
        return implicit("an empty table: nothing is set")
    if not key:
        return _unknown_reward(leaf)
    if key == "worker_cls":
        return _worker(context, leaf, domain)
    if key == "tag_included":
        values.texts(leaf.value)
        return _tags(context)
    if key.startswith(("query_filter_config.", "response_filter_config.")):
        return _filter(context, leaf, domain, key)
    if key == "judge_api_key" and leaf.value not in (None, ""):
        return no_counterpart(reason("rewards.<domain>.judge_api_key"))
    if key in ("world_size", "num_gpus_per_worker", "infer_batch_size", "name"):
        return implicit("reward functions run in reward.num_workers processes of each rollout replica")
    head = key.split(".")[0]
    if head == "device_mapping":
        named_devices(context, leaf)
    if head in ("model_args", "generating_args", "strategy_args", "data_args", "device_mapping"):
        return _model_of_reward(context, leaf, domain)
    if head == "system_envs":
        return no_counterpart(reason("rewards.<domain>.system_envs"))
    if ROLL.reason(f"rewards.<domain>.{head}") is None:
        return _unknown_reward(leaf)
    result = lost(f"rewards.<domain>.{head}").run(context, leaf)
    shapes = scorers(context)[domain] is not None and ROLL.decides_method(
        f"rewards.<domain>.{head}", leaf.value
    )
    return unsupported(result.note) if shapes and result.outcome is Outcome.NONE else result


def _unknown_reward(leaf: KeyPath) -> Result:
    raise BadValue(f"not a key of a reward of ROLL that this converter knows: {leaf.rest}")


def _worker(context: ConversionContext, leaf: KeyPath, domain: str) -> Result:
    found = scorers(context)
    ours = found[domain]
    if ours is None:
        context.warn(
            f"the reward {domain} ({shown(leaf.value)}) has no function here: write one and name it in "
            f'{POLICY}.reward_function = "path/to/file.py:function"'
        )
        # With no function at all a placeholder stands in the result; else this domain would get another's.
        lost_here = unsupported if any(found.values()) else no_counterpart
        return lost_here(reason("rewards.<domain>.worker_cls"))
    if len({name for name in found.values() if name}) > 1:
        return mapped((f"{POLICY}.reward_function", "by_source"), note=f"{ours} for this domain's rows")
    return mapped((f"{POLICY}.reward_function", ours))


def _tags(context: ConversionContext) -> Result:
    if len({name for name in scorers(context).values() if name}) <= 1:
        return implicit("one reward function scores every row, whatever its tag")
    column = context.text("actor_train.data_args.tag", "tag")
    context.warn(
        f"by_source scores a row by its value in the column {column!r}; a value that it does not know is an error "
        "at load, and a function of your own can choose by it instead"
    )
    return mapped((f"{POLICY}.data_source_column_name", values.text(column)))


def _filter(context: ConversionContext, leaf: KeyPath, domain: str, key: str) -> Result:
    """A filter of groups: by a deviation of 0 it is dynamic sampling."""
    table, _, name = key.partition(".")
    prefix = f"rewards.{domain}.{table}"
    kind = context.values.get(f"{prefix}.type", "no_filter")
    if kind in ("no_filter", None):
        return implicit("no filter")
    threshold = context.values.get(f"{prefix}.filter_args.std_threshold", 0)
    ours = scorers(context)[domain]
    if table == "query_filter_config" and kind == "std_filter" and threshold == 0 and ours is not None:
        if name != "type":
            return implicit("0: groups without any difference are dropped")
        several = len({found for found in scorers(context).values() if found}) > 1
        return mapped((f"{POLICY}.filter_reward_metric", ["by_source" if several else ours]))
    why = reason(f"rewards.<domain>.{table}")
    return unsupported(why) if name == "type" else no_counterpart(why)


def _model_of_reward(context: ConversionContext, leaf: KeyPath, domain: str) -> Result:
    if scorers(context)[domain] is not None:
        return implicit("the reward is a rule and needs no model")
    return no_counterpart(reason("rewards.<domain>.model"))


# --- agents -------------------------------------------------------------------------------------------------


@computed(
    "rollout.multi_turn_config.enable",
    "rollout.multi_turn_config.max_assistant_turns",
    words="turns of a trajectory",
)
def _turns(context: ConversionContext, leaf: KeyPath) -> Result:
    enable = ("rollout.multi_turn_config.enable", True)
    return mapped(
        enable, *to.integer("rollout.multi_turn_config.max_assistant_turns").run(context, leaf).targets
    )


@computed("rollout.max_response_length", words="where max_new_tokens is silent")
def _turn_tokens(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.has("actor_infer.generating_args.max_new_tokens"):
        return implicit("max_new_tokens bounds a turn")
    return to.integer("rollout.max_response_length").run(context, leaf)


REWARD_RULES: tuple[Rule, ...] = (
    Rule("rewards.*", _reward),
    Rule(
        "train_env_manager.group_size",
        to.integer("rollout.n_generation", "environments that share a seed: the size of a group"),
    ),
    Rule("max_actions_per_traj", _turns),
    Rule("max_tokens_per_step", _turn_tokens),
)
