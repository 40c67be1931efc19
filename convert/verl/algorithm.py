"""verl's `algorithm`, `critic` and rewards, and evaluation.yaml, whose answers are scored by the same functions."""

from __future__ import annotations

from convert.engine import values
from convert.engine.keys import renamed
from convert.engine.model import Result, implicit, mapped, unsupported
from convert.engine.rules import ConversionContext, KeyPath, needs
from convert.engine.values import BadValue, shown
from convert.verl.facts import (
    ACTOR,
    POLICY,
    group_size,
    has_critic,
    prompts_per_step,
    response_length,
    without_counterpart,
)
from convert.verl.unsupported import VERL

_ESTIMATORS = renamed(
    "gae grpo grpo_vectorized=grpo reinforce_plus_plus reinforce_plus_plus_baseline rloo rloo_vectorized=rloo "
    "remax opo gpg grpo_passk=pass_at_k"
)
_ESTIMATOR_WORDS = ", ".join(f"`{name}` → `{ours}`" for name, ours in _ESTIMATORS.items() if name != ours)
_LEVELS = renamed("token sequence")
_CRITIC_LOSSES = renamed("token-mean seq-mean-token-sum seq-mean-token-mean")
_CORRECTION, _THEIRS = f"{POLICY}.rollout_correction", "algorithm.rollout_correction"


_ALONE = {**dict.fromkeys(("grpo", "grpo_vectorized", "rloo", "opo"), False), "reinforce_plus_plus_baseline": True}
"""Estimators that take the score itself where a prompt has one sample -> whether it is then whitened."""
_NOT_ALONE = {
    "rloo_vectorized": "verl's advantage of a prompt's only sample is always 0, from which nothing is learnt",
    "gpg": "verl's advantage of a prompt's only sample is its score times a factor of its batch, as nothing is here",
    "grpo_passk": "verl refuses a prompt with one sample",
}


def _converted_estimator(context: ConversionContext, leaf: KeyPath) -> Result:
    if not isinstance(leaf.value, str) or leaf.value not in _ESTIMATORS:
        names = ", ".join(_ESTIMATORS)
        raise BadValue(
            f"no estimator of this name has a counterpart, only {names}; one of your own is named by "
            f'{POLICY}.advantage_estimator = "path/to/file.py:function"'
        )
    if group_size(context) == 1 and (leaf.value in _ALONE or leaf.value in _NOT_ALONE):
        return _of_one(context, leaf.value)
    return leaf.to(_ESTIMATORS[leaf.value])


def _of_one(context: ConversionContext, name: str) -> Result:
    """Convert an estimator that compares the samples of a prompt, where each prompt has one, as verl does."""
    if name in _NOT_ALONE:
        raise BadValue(f"{_NOT_ALONE[name]}; write a larger rollout.n")
    if context.flag("algorithm.use_kl_in_reward"):
        raise BadValue(
            f"of a prompt's only sample verl's {name} takes the score less the KL of the whole answer, which no "
            "estimator here does; write a larger rollout.n, or use_kl_loss"
        )
    targets = [(f"{POLICY}.advantage_estimator", "reinforce_plus_plus"), (f"{POLICY}.gamma", 1.0)]
    if not _ALONE[name]:
        targets.append((f"{POLICY}.whiten_advantages", False))
    whitened = ", whitened" if _ALONE[name] else ""
    return mapped(*targets, note=f"with rollout.n = 1 verl's {name} is the score itself{whitened}; so is this")


def _norm_by_std(context: ConversionContext, leaf: KeyPath) -> Result:
    divides = leaf.value is None or values.flag(leaf.value)
    if group_size(context) == 1:
        return implicit("no effect with rollout.n = 1: the mean is 0 and the deviation 1")
    return leaf.to(not divides, note="Dr. GRPO" if not divides else "")


_no_kl = needs("algorithm.use_kl_in_reward", "no effect while use_kl_in_reward is not true")


def _fixed_kl(context: ConversionContext) -> str:
    fixed = context.text("algorithm.kl_ctrl.type", "fixed") == "fixed"
    return _no_kl(context) or ("no effect with kl_ctrl.type = fixed" if fixed else "")


def _use_kl(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or not values.flag(leaf.value):
        return implicit("false: no KL in the reward, kl_in_reward.beta stays 0")
    coefficient = context.number("algorithm.kl_ctrl.kl_coef", 0.001) or 0.0
    return leaf.to(coefficient, note="kl_ctrl.kl_coef")


_no_filter = needs("algorithm.filter_groups.enable", "no effect while filter_groups.enable = false")


def _filter_groups(context: ConversionContext, leaf: KeyPath) -> Result:
    if not context.flag("algorithm.filter_groups.enable"):
        return implicit("false: no groups are filtered")
    if group_size(context) == 1:
        return implicit("no effect with rollout.n = 1: verl keeps a prompt with one sample")
    return leaf.to([reward_name(context)], note="groups whose rewards are all equal")


def _refills(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to(max(values.integer(0 if leaf.value is None else leaf.value), 0))


def _no_older_ratios(context: ConversionContext) -> str:
    """verl 0.6 looks at ratios only where a threshold is written."""
    has_threshold = context.get(f"{_THEIRS}.rollout_is_threshold", None) is not None
    return "" if has_threshold else "no effect without rollout_is_threshold"


def _no_older_weights(context: ConversionContext) -> str:
    """verl 0.6 weighs the loss only where `algorithm.rollout_is` is true."""
    off = "" if context.flag("algorithm.rollout_is") else "no effect without algorithm.rollout_is"
    return _no_older_ratios(context) or off


def _has_bypass(context: ConversionContext) -> bool:
    return context.flag(f"{_THEIRS}.bypass_mode")


def _is_bypassed(context: ConversionContext) -> bool:
    """Whether verl's weights have no effect: in bypass_mode the ratio that PPO clips corrects already."""
    return _has_bypass(context) and context.text(f"{_THEIRS}.loss_type", "ppo_clip") == "ppo_clip"


def _bypass(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or not values.flag(leaf.value):
        return implicit("false: π_old is the rollout's own policy, unless weights or rejection need the trainer's")
    if leaf.key.endswith("use_policy_gradient"):
        return unsupported(VERL.known_reason(f"{_THEIRS}.loss_type"))
    if (loss := context.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla")) != "vanilla":
        context.warn(
            f"{leaf.key} = true with policy_loss.loss_mode = {loss}: some versions of verl then train PPO's clipped "
            f"loss whatever loss_mode says; here it is {loss}"
        )
    if context.get(f"{_THEIRS}.rollout_rs", None) is not None:
        return unsupported(
            "in verl's bypass_mode the policy of each optimizer step decides what is rejected, and its ratio to "
            "the rollout is clipped; here the policy at the begin of the step is taken for both: write "
            "bypass_mode = false"
        )
    return implicit("π_old is the rollout's own policy")


def _not_bypassed(context: ConversionContext) -> bool:
    return not _is_bypassed(context)


def _weighs(context: ConversionContext) -> bool:
    newer = context.get(f"{_THEIRS}.rollout_is", None) is not None and not _is_bypassed(context)
    return newer or (context.has("algorithm.rollout_is_level") and not _no_older_weights(context))


def _cap(context: ConversionContext, leaf: KeyPath) -> Result:
    if not _weighs(context) or leaf.value is None:
        return implicit("no effect without rollout_is")
    low, high = _pair(leaf.value)
    cap = (f"{_CORRECTION}.cap", high)
    if low is None:
        return mapped(cap)
    if context.get(f"{_THEIRS}.rollout_rs", None) is not None:
        raise BadValue("weights with two bounds next to rollout_rs: one rule rejects here")
    level = context.text(f"{_THEIRS}.rollout_is", "token")
    context.warn(
        f"`{leaf.key}` = {shown(leaf.value)}: verl gives ratios outside of these bounds a weight of 0, and counts "
        "their tokens in the mean and in the KL; here they leave the loss altogether"
    )
    bounds = ((f"{_CORRECTION}.reject_below", low), (f"{_CORRECTION}.reject_above", high))
    return mapped(cap, (f"{_CORRECTION}.reject", level), *bounds, note="ratios outside of the bounds count as 0")


_REJECT = renamed("token_k1=token seq_sum_k1=sequence seq_mean_k1=geometric token sequence geometric")


def _reject(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name in _REJECT:
        return leaf.to(_REJECT[name])
    return without_counterpart(f"{_THEIRS}.rollout_rs=k2,k3")


def _bounds(context: ConversionContext, leaf: KeyPath) -> Result:
    mode = context.text(f"{_THEIRS}.rollout_rs")
    if leaf.value is None or mode not in _REJECT:
        return implicit("no effect without rollout_rs by ratios")
    low, high = _pair(leaf.value)
    if low is None:
        written = context.number(f"{_THEIRS}.rollout_rs_threshold_lower", None)
        low = written if written is not None else round(1.0 / high, 12) if high else 0.0
    elif mode.endswith("_k1"):  # whose k1 is log π_rollout − log π_old, the other way round
        if not 0 < low < high:
            raise BadValue(f"expected bounds above 0 in their order, got {shown(leaf.value)}")
        low, high = round(1.0 / high, 12), round(1.0 / low, 12)
    return leaf.to(low, high)


def _rejects_by_ratios(context: ConversionContext) -> bool:
    return context.text(f"{_THEIRS}.rollout_rs") in _REJECT


def _pair(value: object) -> tuple[float | None, float]:
    """verl's thresholds: a number, or two in a text with `_` between them."""
    parts = value.split("_") if isinstance(value, str) else [value]
    if len(parts) > 2:
        raise BadValue(f"expected a number or low_high, got {shown(value)}")
    numbers = [values.number(part) for part in parts]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, numbers[0])


# --- critic -------------------------------------------------------------------------------------------------


def _critic_mini_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, n = values.integer(leaf.value), group_size(context)
    batch = prompts_per_step(context)
    if prompts >= batch:
        return leaf.to(None, note="one optimizer step for the whole batch")
    return leaf.to(max(prompts, 1) * n, note=f"{prompts} prompts × {n} samples")


def needs_critic(context: ConversionContext) -> bool:
    """Whether [critic] is on although no key says so."""
    return has_critic(context) and not isinstance(context.get("critic.enable", None), bool)


def reward_name(context: ConversionContext) -> str:
    """The reward function of the job: the user's, or the scorer that goes by the row's data source."""
    file = context.get("custom_reward_function.path", None)
    if not isinstance(file, str) or not file:
        return "by_source"
    name = context.get("custom_reward_function.name", None)
    return f"{values.path(file)}:{name if isinstance(name, str) and name else 'compute_score'}"


def _custom_reward(context: ConversionContext, leaf: KeyPath) -> Result:
    name = reward_name(context)
    if name == "by_source":
        return implicit("null: the built-in scorer of each row's data source (by_source)")
    if context.kind == "evaluation":
        return leaf.to(name, note="path:name")
    context.warn(
        f"{name} is called with verl's arguments (data_source, solution_str, ground_truth, extra_info) there; "
        "here a reward function takes the answer and the row: adapt it, see docs/migrate.md"
    )
    return leaf.to(name, note="path:name")


def _manager(context: ConversionContext, leaf: KeyPath) -> Result:
    name = "naive" if leaf.value is None else values.text(leaf.value)
    if name in ("naive", "batch", "prime", "dapo"):
        return implicit("rewards always run in processes of their own, in parallel with generation")
    return without_counterpart(leaf.key)


def _overlong_penalty(context: ConversionContext, leaf: KeyPath) -> Result:
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


def _reward_kwargs(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == {}:
        return implicit("null: none")
    return mapped((f"custom.{leaf.rest}", leaf.value), note="[custom] hands it to your functions")


def _one_module(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, "", []):
        return implicit("null: none")
    return leaf.to([values.text(leaf.value)])


def _reference_column(context: ConversionContext, leaf: KeyPath) -> Result:
    column = values.text(leaf.value)
    return leaf.to(f"{column}.ground_truth", note="its `ground_truth`")
