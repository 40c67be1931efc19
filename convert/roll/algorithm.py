"""ROLL's algorithm: estimator, KL terms, clipping and the other parts of the loss.

ROLL normalises rewards and whitens advantages by separate switches. Where one of our estimators is just what they
come to, it is written:

    estimator, normalisation of rewards, whitened    ours
    grpo                            no               grpo
    reinforce, mean and std of the group, no         grpo
    reinforce, mean of the group,   no               grpo with unbiased_advantage
    reinforce, mean of the group,   yes              reinforce_plus_plus_baseline
    reinforce, none,                yes              reinforce_plus_plus
    gae                             yes              gae (its advantages are always whitened)

Anything else of grpo and reinforce, and whatever clips rewards, is reinforce_plus_plus with `reward_shaping` and
`whiten_advantages`, step by step as ROLL does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from convert.engine import to, values
from convert.engine.keys import words
from convert.engine.model import Result, implicit, mapped, no_counterpart, unsupported
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed, needs
from convert.engine.unsupported import EITHER_WAY
from convert.engine.values import BadValue, shown
from convert.roll.converters import POLICY, lost, reason
from convert.roll.facts import (
    group_size,
    has_advantages,
    has_critic,
    has_loss_kl,
    has_reference,
    has_reward_kl,
    no_critic,
    response_length,
)

_OFF = (None, False)
_NO_DUAL_CLIP = 1e9  # beyond exp(20), the largest ratio that the loss knows
_KL_TYPES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "k3": "k3", "full": "full"} | {
    "low_var_kl": "k3"
}
_ESTIMATORS = ("grpo", "gae", "reinforce")
_OWN_ESTIMATOR = f'one of your own can differ ({POLICY}.advantage_estimator = "path/to/file.py:function")'
_OTHER_ESTIMATORS = ("gigpo", "step_reinforce", "agentic_reinforce")


def _norm(context: ConversionContext) -> tuple[Any, Any]:
    """Over what rewards are centred and scaled: (mean, std), each batch, group, running or None."""
    old = context.get("reward_norm", None)
    mean, std = context.get("norm_mean_type", None), context.get("norm_std_type", None)
    if mean is None and std is None and old:
        shift, scale = context.flag("reward_shift", False), context.flag("reward_scale", False)
        mean, std = (None if scale and not shift else old), (None if shift and not scale else old)
    if context.get("adv_estimator", "gae") == "grpo":
        return "group", "group"  # whatever the other keys say
    return mean, std


def _choose(context: ConversionContext) -> dict[str, Any]:
    """Our keys of `train.train_policy` for estimator, shaping of rewards and whitening."""
    name, white = context.get("adv_estimator", "gae"), context.flag("whiten_advantages")
    if name == "gae":
        return {"advantage_estimator": "gae"} | ({} if white else {"whiten_advantages": False})
    norm, clip, discount = _norm(context), context.number("reward_clip", None), context.number("gamma", 1.0)
    if not clip and discount == 1.0:
        if norm == ("group", "group") and not white:
            return {"advantage_estimator": "grpo"}
        if norm == ("group", None):
            found = {"advantage_estimator": "reinforce_plus_plus_baseline"}
            return found if white else {"advantage_estimator": "grpo", "unbiased_advantage": True}
    found = {"advantage_estimator": "reinforce_plus_plus"}
    shaping = {
        key: over for key, over in zip(("center", "scale"), norm, strict=True) if over in ("group", "batch")
    }
    found |= {
        f"reward_shaping.{key}": value for key, value in (shaping | ({"clip": clip} if clip else {})).items()
    }
    return found if white else found | {"whiten_advantages": False}


@computed(
    f"{POLICY}.advantage_estimator",
    f"{POLICY}.unbiased_advantage",
    f"{POLICY}.whiten_advantages",
    f"{POLICY}.reward_shaping.center",
    f"{POLICY}.reward_shaping.scale",
    f"{POLICY}.reward_shaping.clip",
    "critic.enable",
    words="with whiten_advantages and the reward normalisation, see below",
)
def _estimator(context: ConversionContext, leaf: KeyPath) -> Result:
    name = leaf.value
    known = (*_ESTIMATORS, *_OTHER_ESTIMATORS)
    if name not in known:
        raise BadValue(f"expected one of {', '.join(known)}, got {shown(name)}")
    if name in _OTHER_ESTIMATORS:
        return no_counterpart(reason("adv_estimator"))
    chosen = _choose(context)
    ours = chosen["advantage_estimator"]
    targets = [(f"{POLICY}.{key}", value) for key, value in chosen.items()]
    if ours == "gae":
        targets.append(("critic.enable", True))
    note = "" if ours == name else "what it, its normalisation of rewards and its whitening come to"
    return mapped(*targets, note=note)


def _part_of_estimator(key: str, judge: Callable[[Any], Any] | None = None) -> Converter:
    """A switch that the choice of the estimator covers; where it cannot, it has no counterpart.

    judge: raises BadValue for a value that it cannot have.
    """

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        name = context.get("adv_estimator", "gae")
        if not isinstance(name, str) or name not in _ESTIMATORS:
            return no_counterpart(reason(key))
        if judge is not None:
            judge(leaf.value)
        if "running" in _norm(context) and key != "whiten_advantages":
            return unsupported(
                "running means of rewards are not kept: center and scale over the group or the batch"
            )
        if key == "reward_clip" and has_reward_kl(context):
            return unsupported(
                "with a KL in the reward ROLL clips the reward of each token again, after the KL"
            )
        if name == "gae" and key != "whiten_advantages":
            return unsupported(reason(key))
        return implicit(f"part of advantage_estimator = {_choose(context)['advantage_estimator']}")

    return Converter(run, (f"{POLICY}.advantage_estimator",), "decides the estimator")


def _no_estimator(context: ConversionContext) -> str:
    return "" if has_advantages(context) else f"a {context.kind} pipeline has no advantages"


def _no_reward_kl(context: ConversionContext) -> str:
    return "" if has_reward_kl(context) else "the reward has no KL term (add_token_level_kl)"


def _no_loss_kl(context: ConversionContext) -> str:
    return "" if has_loss_kl(context) else "the loss has no KL term (use_kl_loss)"


@computed(f"{POLICY}.gamma", words="gae and reinforce_plus_plus; the others have none")
def _gamma(context: ConversionContext, leaf: KeyPath) -> Result:
    discount = values.number(leaf.value)
    name = context.get("adv_estimator", "gae")
    if name in _ESTIMATORS and _choose(context)["advantage_estimator"] in ("gae", "reinforce_plus_plus"):
        return mapped((f"{POLICY}.gamma", discount))
    return implicit("1: nothing is discounted") if discount == 1 else unsupported(reason("gamma"))


@computed(f"{POLICY}.kl_in_reward.beta", words="true: with init_kl_coef")
def _token_kl(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("no KL in the reward")
    return mapped((f"{POLICY}.kl_in_reward.beta", context.number("init_kl_coef", 0.2)))


@computed(
    f"{POLICY}.kl_in_reward.controller",
    f"{POLICY}.kl_in_reward.target",
    words="set: the adaptive controller with this target; null: a fixed coefficient",
    null="null: a fixed coefficient",
)
def _target_kl(context: ConversionContext, leaf: KeyPath) -> Result:
    target = values.number(leaf.value)
    return mapped(
        (f"{POLICY}.kl_in_reward.controller", "adaptive"), (f"{POLICY}.kl_in_reward.target", target)
    )


@computed(f"{POLICY}.kl_beta", words="true: with kl_loss_coef")
def _kl_loss(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("no KL in the loss")
    return mapped(
        (f"{POLICY}.kl_beta", context.number("kl_loss_coef", 0.0)), (f"{POLICY}.kl_type", _loss_kl(context))
    )


def _loss_kl(context: ConversionContext) -> Any:
    return _KL_TYPES.get(context.text("kl_loss_type", "k3"), "k3")


@computed(f"{POLICY}.epsilon_low", f"{POLICY}.epsilon_high", words="both sides of the clip")
def _clip(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.flag("use_pg_clip_range"):
        return implicit("use_pg_clip_range takes pg_clip_low and pg_clip_high instead")
    if _our_variant(context) == "reinforce":
        return implicit("the plain policy gradient has no ratio to clip")
    if leaf.value is None:
        return implicit("null: the default, 0.2")
    return to.clip_sides(leaf.value, f"{POLICY}.epsilon_low", f"{POLICY}.epsilon_high")


@computed(f"{POLICY}.epsilon_low", words="as it is; from 1 on the side is open: −1", null="null: the default")
def _clip_low(context: ConversionContext, leaf: KeyPath) -> Result:
    return to.clip_sides(leaf.value, low=f"{POLICY}.epsilon_low")


def _without_range(context: ConversionContext) -> str:
    if context.get("use_policy_loss_type", "PPO") == "PG":
        return "the plain policy gradient has no ratio to clip"
    return "" if context.flag("use_pg_clip_range") else "use_pg_clip_range is off: pg_clip is taken"


@computed(f"{POLICY}.lower_bound_ratio", words="true → 1 + 2 · pg_clip, as ROLL bounds it; false → no bound")
def _dual_clip(context: ConversionContext, leaf: KeyPath) -> Result:
    if _our_variant(context) != "grpo":
        return implicit(f"{_our_variant(context)} has no dual clip")
    if not values.flag(leaf.value):
        return mapped((f"{POLICY}.lower_bound_ratio", _NO_DUAL_CLIP), note="so high that it never acts")
    clip = context.number("pg_clip", 0.2) or 0.0
    if clip <= 0:
        raise BadValue(f"pg_clip = {clip} leaves no dual clip")
    return mapped((f"{POLICY}.lower_bound_ratio", round(1 + 2 * clip, 6)), note="1 + 2 · pg_clip")


@computed(
    f"{POLICY}.variant", words="`seq` → `gspo`, `token` → `grpo`; use_policy_loss_type `PG` → `reinforce`"
)
def _variant(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped((f"{POLICY}.variant", _our_variant(context)))


def _our_variant(context: ConversionContext) -> str:
    sampling, loss = context.get("importance_sampling", "token"), context.get("use_policy_loss_type", "PPO")
    if sampling not in ("token", "seq"):
        raise BadValue(f"importance_sampling: expected token or seq, got {shown(sampling)}")
    if loss not in ("PPO", "PG"):
        raise BadValue(f"use_policy_loss_type: expected PPO or PG, got {shown(loss)}")
    if loss == "PG":
        return "reinforce"
    return "gspo" if sampling == "seq" else "grpo"


@computed(
    f"{POLICY}.loss_type",
    f"{POLICY}.unbiased_loss_max_tokens",
    words="`seq-mean-token-sum-norm` → `seq-mean-token-mean` with unbiased_loss_max_tokens",
)
def _loss_type(context: ConversionContext, leaf: KeyPath) -> Result:
    known = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    if leaf.value in known:
        return mapped((f"{POLICY}.loss_type", leaf.value))
    if leaf.value != "seq-mean-token-sum-norm":
        raise BadValue(
            f"expected one of {', '.join(known)}, seq-mean-token-sum-norm, got {shown(leaf.value)}"
        )
    context.warn(
        "loss_agg_mode = seq-mean-token-sum-norm: ROLL divides the sum by the longest answer alone, here it is also "
        "divided by the number of samples: gradients are smaller by that number, which counts where they are clipped "
        "(train.optm_grad_norm_clip)"
    )
    return mapped(
        (f"{POLICY}.loss_type", "seq-mean-token-mean"),
        (f"{POLICY}.unbiased_loss_max_tokens", response_length(context)),
        note="divided by the longest answer and the number of samples; ROLL's is larger by that number",
    )


@computed(f"{POLICY}.positive_nll_coef", words="0 → unset")
def _positive(context: ConversionContext, leaf: KeyPath) -> Result:
    value = values.number(leaf.value)
    if value == 0:
        return implicit("0: no such loss")
    return mapped((f"{POLICY}.positive_nll_coef", value))


_WEIGHTS = ("token", "sequence")
_REJECTS = ("token", "sequence", "geometric")
_CORRECTION = f"{POLICY}.rollout_correction"


@computed(f"{_CORRECTION}.weights", words="weight_type, if enabled")
def _is_weights(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("no weights")
    kind = context.get("train_infer_correction.is_weight.weight_type", "token")
    if kind not in _WEIGHTS:
        return implicit("see weight_type")
    return mapped((f"{_CORRECTION}.weights", kind))


_no_weights = needs("train_infer_correction.is_weight.enabled", "the weights are off")


@computed(f"{_CORRECTION}.weights", words="`token`, `sequence`")
def _weight_type(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value not in _WEIGHTS:
        return no_counterpart(reason("train_infer_correction.is_weight.weight_type"))
    return mapped((f"{_CORRECTION}.weights", leaf.value))


@computed(
    f"{_CORRECTION}.reject",
    f"{_CORRECTION}.reject_below",
    f"{_CORRECTION}.reject_above",
    words="the one enabled filter on the ratio: agg_type, ratio_low, ratio_high",
)
def _filters(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == []:
        return implicit("no filter")
    if not isinstance(leaf.value, list) or not all(isinstance(item, dict) for item in leaf.value):
        raise BadValue(f"expected a list of filters, got {shown(leaf.value)}")
    active = [item for item in leaf.value if values.flag(item.get("enabled", False))]
    if not active:
        return implicit("no filter is enabled")
    one = active[0]
    by_ratio = values.flag(one.get("ratio_enabled", True)) and not values.flag(one.get("diff_enabled", False))
    if len(active) > 1 or not by_ratio or one.get("agg_type", "token") not in _REJECTS:
        return no_counterpart(reason("train_infer_correction.filters"))
    return mapped(
        (f"{_CORRECTION}.reject", one.get("agg_type", "token")),
        (f"{_CORRECTION}.reject_below", values.number(one.get("ratio_low", 0.8))),
        (f"{_CORRECTION}.reject_above", values.number(one.get("ratio_high", 1.2))),
    )


_MASKS = f"{POLICY}.sample_masks"


def _no_difficulty(context: ConversionContext) -> str:
    if not context.flag("difficulty_mask"):
        return "difficulty_mask is off"
    return "a group of one sample has no difficulty" if group_size(context) == 1 else ""


@computed(
    f"{_MASKS}.mean_score_above",
    f"{_MASKS}.mean_score_below",
    words="true: with difficulty_low_threshold and difficulty_high_threshold, 0 and 1 by default",
)
def _difficulty(context: ConversionContext, leaf: KeyPath) -> Result:
    values.flag(leaf.value)
    if off := _no_difficulty(context):
        return implicit(off)
    low, high = (
        context.number(f"difficulty_{side}_threshold", default)
        for side, default in (("low", 0.0), ("high", 1.0))
    )
    return mapped((f"{_MASKS}.mean_score_above", low), (f"{_MASKS}.mean_score_below", high))


def _no_long_failures(context: ConversionContext) -> str:
    if not context.flag("error_max_len_clip"):
        return "error_max_len_clip is off"
    least, longest = context.integer("error_max_len_threshold", None), response_length(context)
    if least is None or (longest is not None and least > longest):
        return "no answer is as long as error_max_len_threshold"
    return ""


@computed(f"{_MASKS}.failed_from_tokens", words="true: with error_max_len_threshold")
def _long_failures(context: ConversionContext, leaf: KeyPath) -> Result:
    values.flag(leaf.value)
    if off := _no_long_failures(context):
        return implicit(off)
    context.warn(
        "error_max_len_clip: ROLL trains on answers that score 1, and on shorter ones that score 0; here answers of "
        "any score above 0 are trained, however long, and shorter ones of any score"
    )
    return mapped((f"{_MASKS}.failed_from_tokens", context.integer("error_max_len_threshold")))


@computed(words="on-policy: both are the same")
def _old_log_probs(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in _OFF:
        return implicit("π_old is the policy that sampled")
    return no_counterpart(reason("enable_old_logprobs_recompute"))


@computed(words="follows from the KL terms")
def _reference(context: ConversionContext, leaf: KeyPath) -> Result:
    if values.flag(leaf.value) and not has_reference(context):
        return implicit("no KL term reads a reference model: none is loaded")
    return implicit("a reference model is there when a KL term needs it")


@computed("train.optm_grad_norm_clip", "critic.optm_grad_norm_clip", words="of every role that trains")
def _clip_norm(context: ConversionContext, leaf: KeyPath) -> Result:
    norm = values.number(leaf.value)
    sections = ("train", "critic") if has_critic(context) else ("train",)
    return mapped(*((f"{section}.optm_grad_norm_clip", norm) for section in sections))


ALGORITHM_RULES: tuple[Rule, ...] = (
    Rule("adv_estimator", _estimator, default="gae", when=_no_estimator),
    Rule(
        "whiten_advantages",
        _part_of_estimator("whiten_advantages", values.flag),
        default=False,
        when=_no_estimator,
    ),
    Rule("reward_norm", to.unless(_OFF, "none", _part_of_estimator("reward_norm"))),
    Rule("norm_mean_type", to.unless(_OFF, "none", _part_of_estimator("norm_mean_type"))),
    Rule("norm_std_type", to.unless(_OFF, "none", _part_of_estimator("norm_std_type"))),
    Rule("reward_clip", to.unless((*_OFF, 0), "none", _part_of_estimator("reward_clip", values.number))),
    Rule("reward_shift", to.unless(_OFF, "none", _part_of_estimator("reward_shift", values.flag))),
    Rule("reward_scale", to.unless((*_OFF, 1), "none", _part_of_estimator("reward_scale", values.flag))),
    Rule("advantage_clip", to.unless((*_OFF, 0), "none", to.number(f"{POLICY}.advantage_clip"))),
    Rule("gamma", _gamma),
    Rule("lambd", to.number(f"{POLICY}.gae_lambda"), default=0.95, when=no_critic),
    Rule("add_token_level_kl", _token_kl),
    Rule("init_kl_coef", to.number(f"{POLICY}.kl_in_reward.beta"), default=0.2, when=_no_reward_kl),
    Rule("kl_penalty", to.choice(f"{POLICY}.kl_in_reward.type", _KL_TYPES), default="kl", when=_no_reward_kl),
    Rule("target_kl", _target_kl, when=_no_reward_kl),
    Rule("kl_horizon", to.integer(f"{POLICY}.kl_in_reward.horizon"), when=_no_reward_kl),
    Rule("use_kl_loss", _kl_loss),
    Rule("kl_loss_coef", to.number(f"{POLICY}.kl_beta"), when=_no_loss_kl),
    Rule("kl_loss_type", to.choice(f"{POLICY}.kl_type", _KL_TYPES), when=_no_loss_kl),
    Rule("enable_reference", _reference),
    Rule("ppo_epochs", to.integer(f"{POLICY}.mu_iterations"), default=1),
    Rule("pg_clip", _clip, default=0.2),
    Rule("use_pg_clip_range", to.always("chooses between pg_clip and pg_clip_low, pg_clip_high")),
    Rule("pg_clip_low", _clip_low, default=0.2, when=_without_range),
    Rule("pg_clip_high", to.number(f"{POLICY}.epsilon_high"), default=0.2, when=_without_range),
    Rule("dual_clip_loss", _dual_clip, default=False),
    Rule("importance_sampling", _variant, default="token"),
    Rule("use_policy_loss_type", _variant),
    Rule("loss_agg_mode", _loss_type, default="seq-mean-token-mean"),
    Rule("entropy_loss_coef", to.number(f"{POLICY}.entropy_coeff")),
    Rule("postive_loss_coef", _positive, also=("positive_loss_coef",)),
    Rule("max_grad_norm", _clip_norm, default=1.0),
    Rule("value_clip", to.number("critic.value_clip", "as it is", "no clip of values"), when=no_critic),
    Rule("critic_warmup", to.integer("critic.warmup_steps"), when=no_critic),
    Rule("balance_length", to.flag(f"{POLICY}.balance_dp_token")),
    Rule("train_infer_correction.is_weight.enabled", _is_weights),
    Rule("train_infer_correction.is_weight.weight_type", _weight_type, when=_no_weights),
    Rule(
        "train_infer_correction.is_weight.upper_bound",
        to.number(f"{_CORRECTION}.cap", "as it is", "no bound"),
        default=1.2,
        when=_no_weights,
    ),
    Rule(
        "train_infer_correction.is_weight.detach",
        to.unless(
            (True,),
            "weights carry no gradient here either",
            lost("train_infer_correction.is_weight.detach", EITHER_WAY),
        ),
        when=_no_weights,
    ),
    Rule("train_infer_correction.filters", _filters),
    Rule("enable_old_logprobs_recompute", _old_log_probs),
    Rule(
        "force_disable_old_logprobs_recompute",
        to.always("π_old is the policy that sampled: nothing is recomputed"),
    ),
    *(
        Rule(key, lost(key))
        for key in words(
            "use_reward_scaling use_reward_norm whiten_rewards add_len_reward difficulty_loss_weight "
            "length_loss_weight use_topr_loss use_topr_neg_loss_coef l2"
        )
    ),
    Rule("rl_loss_coef", lost("rl_loss_coef", EITHER_WAY, 1, 1.0)),
    Rule("minibatch_data_iter_num", lost("minibatch_data_iter_num", 1)),
    Rule("mask_type", to.unless(("loss", None), "masks act on the loss alone", lost("mask_type"))),
    Rule("max_len_mask", to.unless(_OFF, "no mask", to.flag(f"{_MASKS}.truncated", "as it is"))),
    Rule("difficulty_mask", to.unless(_OFF, "no mask", _difficulty)),
    Rule("difficulty_low_threshold", to.number(f"{_MASKS}.mean_score_above"), when=_no_difficulty),
    Rule("difficulty_high_threshold", to.number(f"{_MASKS}.mean_score_below"), when=_no_difficulty),
    Rule("error_max_len_clip", to.unless(_OFF, "no mask", _long_failures)),
    Rule("error_max_len_threshold", to.integer(f"{_MASKS}.failed_from_tokens"), when=_no_long_failures),
)
