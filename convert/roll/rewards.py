"""`rewards` of ROLL and the environments of its agents: rules become our functions of the same rule."""

from __future__ import annotations

from dataclasses import replace

from convert.engine import values
from convert.engine.model import Outcome, Result, implicit, mapped, no_counterpart, unsupported
from convert.engine.rules import ConversionContext, KeyPath
from convert.engine.values import BadValue, shown
from convert.roll.converters import KEYS, POLICY, lost, named_devices, reason
from convert.roll.unsupported import ROLL

_WORKERS = {
    "MathRuleRewardWorker": "boxed_math",
    "MultipleChoiceBoxedRuleRewardWorker": "single_choice",
    "CrossThinkQARuleRewardWorker": "single_choice",
}


def scorers(context: ConversionContext) -> dict[str, str | None]:
    """Domain, in the order of the file -> our reward function for its worker; None where there is none."""
    rewards = context.below("rewards")
    domains = dict.fromkeys(key.split(".")[0] for key in rewards if "." in key)
    workers = {domain: str(rewards.get(f"{domain}.worker_cls")).rpartition(".")[2] for domain in domains}
    return {domain: _WORKERS.get(worker) for domain, worker in workers.items()}


def _functions(context: ConversionContext) -> set[str]:
    return {name for name in scorers(context).values() if name}


def _reward(context: ConversionContext, leaf: KeyPath) -> Result:
    domain, _, key = leaf.rest.partition(".")
    if not key and leaf.value in (None, {}):
        return implicit("an empty table: nothing is set")
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
    is_rule, listed = scorers(context).get(domain) is not None, f"rewards.<domain>.{head}"
    if head in ("model_args", "generating_args", "strategy_args", "data_args", "device_mapping"):
        needless = implicit("the reward is a rule and needs no model")
        return needless if is_rule else no_counterpart(reason("rewards.<domain>.model"))
    if head == "system_envs":
        return no_counterpart(reason(listed))
    if ROLL.reason(listed) is None:
        raise BadValue(f"not a key of a reward of ROLL that this converter knows: {leaf.rest}")
    result = lost().run(context, replace(leaf, key=listed))
    shapes = is_rule and result.outcome is Outcome.NONE and ROLL.decides_method(listed, leaf.value)
    return unsupported(result.note) if shapes else result


def _worker(context: ConversionContext, leaf: KeyPath, domain: str) -> Result:
    ours, functions = scorers(context)[domain], _functions(context)
    if ours is None:
        context.warn(
            f"the reward {domain} ({shown(leaf.value)}) has no function here: write one and name it in "
            f'{POLICY}.reward_function = "path/to/file.py:function"'
        )
        # With no function at all a placeholder stands in the result; else this domain would get another's.
        lost_here = unsupported if functions else no_counterpart
        return lost_here(reason("rewards.<domain>.worker_cls"))
    return leaf.to("by_source", note=f"{ours} for this domain's rows") if len(functions) > 1 else leaf.to(ours)


def _tags(context: ConversionContext) -> Result:
    if len(_functions(context)) <= 1:
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
        several = len(_functions(context)) > 1
        return mapped((f"{POLICY}.filter_reward_metric", ["by_source" if several else ours]))
    why = reason(f"rewards.<domain>.{table}")
    return unsupported(why) if name == "type" else no_counterpart(why)


# --- agents -------------------------------------------------------------------------------------------------


def _turns(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to(True, *([] if leaf.value is None else [values.integer(leaf.value)]))


def _turn_tokens(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.has("actor_infer.generating_args.max_new_tokens"):
        return implicit("max_new_tokens bounds a turn")
    return implicit("null: the default") if leaf.value is None else leaf.to(values.integer(leaf.value))


REWARD_RULES = KEYS.rules("rewards", globals())
