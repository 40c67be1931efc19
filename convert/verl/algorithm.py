"""verl's `algorithm` and `critic`."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped, unsupported
from convert.engine.rules import ConversionContext, KeyPath, Rule, computed, needs, rules_below
from convert.engine.unsupported import below
from convert.engine.values import BadValue, shown
from convert.verl.actor import KL_TYPES
from convert.verl.facts import (
    ACTOR,
    POLICY,
    group_size,
    has_critic,
    lacking,
    no_critic,
    no_discount,
    not_gae,
    prompts_per_step,
    without_counterpart,
)
from convert.verl.mesh import Mesh
from convert.verl.model import Model
from convert.verl.optim import Optim
from convert.verl.reward import reward_name
from convert.verl.shared import INFERENCE_BATCHES, INFERENCE_REASON, Budget, checkpoint_rules, profiler_rules
from convert.verl.unsupported import VERL

_ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "pass_at_k",
}
_CORRECTION, _THEIRS = f"{POLICY}.rollout_correction", "algorithm.rollout_correction"


def algorithm_rules() -> tuple[Rule, ...]:
    """All rules of `algorithm`."""
    kl = f"{POLICY}.kl_in_reward"
    controllers = {"fixed": "fixed", "adaptive": "adaptive"}
    divergence = {
        "kl_penalty": to.choice(f"{kl}.type", KL_TYPES),
        "kl_ctrl.kl_coef": to.number(f"{kl}.beta"),
        "kl_ctrl.type": to.choice(f"{kl}.controller", controllers),
    }
    penalties = {"kl_penalty": "kl", "kl_ctrl.kl_coef": 0.001, "kl_ctrl.type": "fixed"}
    adaptive = {"horizon": to.integer(f"{kl}.horizon"), "target_kl": to.number(f"{kl}.target")}
    filters = {
        "metric": _filter_groups,
        "max_num_gen_batches": _refills,
        "max_inflight_gen_batches": to.always("groups in flight are bounded by allowed_outdated_steps"),
    }
    weights = {"token": "token", "sequence": "sequence"}
    ratios = {
        "rollout_is": to.given(
            lambda context: not _is_bypassed(context),
            "null: no weights; with bypass_mode the clipped ratio is all that verl weighs by",
            to.choice(f"{_CORRECTION}.weights", weights, "null → `none`", "null: no weights"),
        ),
        "rollout_is_threshold": _cap,
        "rollout_rs": _reject,
        "rollout_rs_threshold": _bounds,
        "bypass_mode use_policy_gradient": _bypass,
        "loss_type": to.given(_has_bypass, "no effect without bypass_mode", lacking("ppo_clip")),
        "rollout_is_batch_normalize": lacking(False),
        "debug_rollout_actor_probs": to.always("the mismatch is always a metric"),
        "rollout_rs_threshold_lower": _LOWER_BOUND,
        "rollout_token_veto_threshold": lacking(),
    }
    older = {
        "rollout_is_threshold": ("rollout_is_threshold",),
        "rollout_rs": ("rollout_rs",),
        "rollout_rs_threshold": ("rollout_rs_threshold",),
    }
    new = "rollout_correction"
    return (
        Rule("algorithm.adv_estimator", _estimator, default="gae"),
        Rule("algorithm.gamma", to.number(f"{POLICY}.gamma"), 1.0, ("algorithm.gemma",), no_discount),
        Rule("algorithm.lam", to.number(f"{POLICY}.gae_lambda"), default=1.0, when=not_gae),
        Rule("algorithm.norm_adv_by_std_in_grpo", _norm_by_std),
        Rule("algorithm.use_kl_in_reward", _use_kl, default=False),
        *rules_below("algorithm", divergence, _no_kl, penalties),
        *rules_below("algorithm.kl_ctrl", adaptive, _fixed_kl, {"horizon": 10000, "target_kl": 0.1}),
        Rule("algorithm.filter_groups.enable", _filter_groups),
        *rules_below("algorithm.filter_groups", filters, _no_filter),
        *rules_below("algorithm", below(new, ratios), also=below(new, older)),
        Rule("algorithm.rollout_is", to.always("rollout_is_level says which weights")),
        Rule(
            "algorithm.rollout_is_level", to.choice(f"{_CORRECTION}.weights", weights), when=_no_older_weights
        ),
        Rule("algorithm.rollout_is_mode", lacking("truncate"), when=_no_older_ratios),
        Rule("algorithm.rollout_is_veto_threshold", lacking(), when=_no_older_ratios),
        Rule("algorithm.rollout_is_threshold_lower", to.always("bounds with rollout_is_mode = mask alone")),
        Rule("algorithm.use_pf_ppo", lacking(False)),
        Rule("algorithm.pf_ppo.*", to.always("no effect while use_pf_ppo = false")),
    )


def critic_rules() -> tuple[Rule, ...]:
    """All rules of `critic`: the actor's keys once more, for [critic]."""
    train = Budget(
        per_gpu="critic.ppo_micro_batch_size_per_gpu",
        ours=("critic.mini_batch", "critic.max_token_len_per_mini_batch"),
        whole="critic.ppo_micro_batch_size",
        switch="critic.use_dynamic_bsz",
        tokens="critic.ppo_max_token_len_per_gpu",
        role="critic",
        default_tokens=32768,
        when=no_critic,
    )
    forward = Budget(
        per_gpu="critic.forward_micro_batch_size_per_gpu",
        ours=("critic.forward_mini_batch", "critic.max_token_len_per_mini_batch"),
        whole="critic.forward_micro_batch_size",
        role="critic",
        when=no_critic,
    )
    loss = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
    table = {
        "forward_max_token_len_per_gpu": to.always(
            "the budget of training counts for the pass for values too"
        ),
        "ppo_mini_batch_size": _critic_mini_batch,
        "ppo_epochs": to.integer("critic.mu_iterations"),
        "shuffle": to.flag("critic.mini_batch_shuffle"),
        "data_loader_seed": to.always("shuffles of all models follow the policy's seed"),
        "cliprange_value": to.number("critic.value_clip"),
        "loss_agg_mode": to.choice("critic.loss_type", loss),
        "loss_scale_factor": lacking(),
    }
    follows = {
        name: f"{ACTOR}.{name}"
        for name in ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")
    }
    unread = {
        "strategy": to.always("how a model is sharded follows from its parallelism"),
        "rollout_n": to.always("repeats actor_rollout_ref.rollout.n"),
        "nccl_timeout": to.always("collectives end with the process that is missing"),
        "load_weight": to.always("weights are always loaded"),
        INFERENCE_BATCHES: to.always(INFERENCE_REASON),
        "kl_ctrl.*": to.always("verl reads algorithm.kl_ctrl"),
    }
    return (
        Rule(
            "critic.enable",
            to.flag("critic.enable", "null: as the estimator needs it", "null: the estimator decides"),
        ),
        *Model("critic.model", "critic", no_critic).rules(),
        *Optim("critic", "critic", 1e-5, no_critic).rules(),
        *Mesh("critic", "critic", "critic", no_critic).rules(),
        *checkpoint_rules("critic", no_critic),
        *train.rules(),
        *forward.rules(),
        *rules_below("critic", table, no_critic, {"cliprange_value": 0.5}, follows=follows),
        *rules_below("critic", unread),
        *profiler_rules("critic"),
    )


# --- algorithm ----------------------------------------------------------------------------------------------


_ALONE = {
    **dict.fromkeys(("grpo", "grpo_vectorized", "rloo", "opo"), False),
    "reinforce_plus_plus_baseline": True,
}
"""Estimators that take the score itself where a prompt has one sample -> whether it is then whitened."""
_NOT_ALONE = {
    "rloo_vectorized": "verl's advantage of a prompt's only sample is always 0, from which nothing is learnt",
    "gpg": "verl's advantage of a prompt's only sample is its score times a factor of its batch, as nothing is here",
    "grpo_passk": "verl refuses a prompt with one sample",
}


@computed(
    f"{POLICY}.advantage_estimator",
    f"{POLICY}.whiten_advantages",
    f"{POLICY}.gamma",
    words=", ".join(f"`{theirs}` → `{ours}`" for theirs, ours in _ESTIMATORS.items() if theirs != ours)
    + "; with `rollout.n: 1` the score itself",
)
def _estimator(context: ConversionContext, leaf: KeyPath) -> Result:
    if not isinstance(leaf.value, str) or leaf.value not in _ESTIMATORS:
        known = ", ".join(_ESTIMATORS)
        raise BadValue(
            f"no estimator of this name has a counterpart, only {known}; one of your own is named by "
            f'{POLICY}.advantage_estimator = "path/to/file.py:function"'
        )
    if group_size(context) == 1 and (leaf.value in _ALONE or leaf.value in _NOT_ALONE):
        return _of_one(context, leaf.value)
    return mapped((f"{POLICY}.advantage_estimator", _ESTIMATORS[leaf.value]))


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
    return mapped(
        *targets, note=f"with rollout.n = 1 verl's {name} is the score itself{whitened}; so is this"
    )


@computed(f"{POLICY}.unbiased_advantage", words="the other way round; with grpo only")
def _norm_by_std(context: ConversionContext, leaf: KeyPath) -> Result:
    divides = leaf.value is None or values.flag(leaf.value)
    if group_size(context) == 1:
        return implicit("no effect with rollout.n = 1: the mean is 0 and the deviation 1")
    return mapped((f"{POLICY}.unbiased_advantage", not divides), note="Dr. GRPO" if not divides else "")


_no_kl = needs("algorithm.use_kl_in_reward", "no effect while use_kl_in_reward is not true")


def _fixed_kl(context: ConversionContext) -> str:
    fixed = context.text("algorithm.kl_ctrl.type", "fixed") == "fixed"
    return _no_kl(context) or ("no effect with kl_ctrl.type = fixed" if fixed else "")


@computed(f"{POLICY}.kl_in_reward.beta", words="false: beta stays 0")
def _use_kl(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or not values.flag(leaf.value):
        return implicit("false: no KL in the reward, kl_in_reward.beta stays 0")
    coefficient = context.number("algorithm.kl_ctrl.kl_coef", 0.001) or 0.0
    return mapped((f"{POLICY}.kl_in_reward.beta", coefficient), note="kl_ctrl.kl_coef")


_no_filter = needs("algorithm.filter_groups.enable", "no effect while filter_groups.enable = false")


@computed(
    f"{POLICY}.filter_reward_metric",
    words="true: the reward function of the job, whatever verl calls the metric",
)
def _filter_groups(context: ConversionContext, leaf: KeyPath) -> Result:
    if not context.flag("algorithm.filter_groups.enable"):
        return implicit("false: no groups are filtered")
    if group_size(context) == 1:
        return implicit("no effect with rollout.n = 1: verl keeps a prompt with one sample")
    return mapped(
        (f"{POLICY}.filter_reward_metric", [reward_name(context)]), note="groups whose rewards are all equal"
    )


@computed(f"{POLICY}.max_retry_for_on_policy", words="0 or less: no limit")
def _refills(context: ConversionContext, leaf: KeyPath) -> Result:
    batches = values.integer(0 if leaf.value is None else leaf.value)
    return mapped((f"{POLICY}.max_retry_for_on_policy", max(batches, 0)))


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


@computed(words="false, or true without rejection: π_old is the rollout's own policy")
def _bypass(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or not values.flag(leaf.value):
        return implicit(
            "false: π_old is the rollout's own policy, unless weights or rejection need the trainer's"
        )
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


def _weighs(context: ConversionContext) -> bool:
    newer = context.get(f"{_THEIRS}.rollout_is", None) is not None and not _is_bypassed(context)
    return newer or (context.has("algorithm.rollout_is_level") and not _no_older_weights(context))


@computed(f"{_CORRECTION}.cap", words="one number: the cap; a pair: rejection by bounds")
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
    return mapped(
        cap, (f"{_CORRECTION}.reject", level), *bounds, note="ratios outside of the bounds count as 0"
    )


_REJECT = {
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
    "token": "token",
    "sequence": "sequence",
    "geometric": "geometric",
}


@computed(
    f"{_CORRECTION}.reject",
    words="`token_k1` → token, `seq_sum_k1` → sequence, `seq_mean_k1` → geometric",
    null="null: nothing is rejected",
)
def _reject(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name in _REJECT:
        return mapped((f"{_CORRECTION}.reject", _REJECT[name]))
    return without_counterpart(f"{_THEIRS}.rollout_rs=k2,k3")


@computed(
    f"{_CORRECTION}.reject_below",
    f"{_CORRECTION}.reject_above",
    words="`low_high`, of k1 1/high and 1/low; one number: 1/number to number",
)
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
    return mapped((f"{_CORRECTION}.reject_below", low), (f"{_CORRECTION}.reject_above", high))


_LOWER_BOUND = to.given(
    lambda context: context.text(f"{_THEIRS}.rollout_rs") in _REJECT,
    "null, or no effect without rollout_rs by ratios",
    to.number(f"{_CORRECTION}.reject_below", "null: 1 / rollout_rs_threshold"),
)


def _pair(value: object) -> tuple[float | None, float]:
    """verl's thresholds: a number, or two in a text with `_` between them."""
    parts = value.split("_") if isinstance(value, str) else [value]
    if len(parts) > 2:
        raise BadValue(f"expected a number or low_high, got {shown(value)}")
    numbers = [values.number(part) for part in parts]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, numbers[0])


# --- critic -------------------------------------------------------------------------------------------------


@computed("critic.batch_size_per_optimize", words="prompts × rollout.n; unset where it is the whole batch")
def _critic_mini_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, n = values.integer(leaf.value), group_size(context)
    batch = prompts_per_step(context)
    if prompts >= batch:
        return mapped(("critic.batch_size_per_optimize", None), note="one optimizer step for the whole batch")
    return mapped(
        ("critic.batch_size_per_optimize", max(prompts, 1) * n), note=f"{prompts} prompts × {n} samples"
    )


def needs_critic(context: ConversionContext) -> bool:
    """Whether [critic] is on although no key says so."""
    return has_critic(context) and not isinstance(context.get("critic.enable", None), bool)
