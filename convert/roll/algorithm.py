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

from typing import Any

from convert.engine import to, values
from convert.engine.keys import renamed
from convert.engine.model import Result, implicit, mapped, no_counterpart, unsupported
from convert.engine.rules import ConversionContext, KeyPath, needs
from convert.engine.values import BadValue, shown
from convert.roll import facts
from convert.roll.converters import KEYS, POLICY, reason

_NO_DUAL_CLIP = 1e9  # beyond exp(20), the largest ratio that the loss knows
_KL_TYPES = renamed("kl=k1 k1 abs mse=k2 k2 k3 full low_var_kl=k3")
_ESTIMATORS = ("grpo", "gae", "reinforce")
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
    white = context.flag("whiten_advantages")
    whitening = {} if white else {"whiten_advantages": False}
    if context.get("adv_estimator", "gae") == "gae":
        return {"advantage_estimator": "gae", **whitening}
    norm, clip = _norm(context), context.number("reward_clip", None)
    if not clip and context.number("gamma", 1.0) == 1.0:
        if norm == ("group", "group") and not white:
            return {"advantage_estimator": "grpo"}
        if norm == ("group", None):
            centred = {"advantage_estimator": "grpo", "unbiased_advantage": True}
            return {"advantage_estimator": "reinforce_plus_plus_baseline"} if white else centred
    shaping = {f"reward_shaping.{key}": over for key, over in zip(("center", "scale"), norm, strict=True)}
    shaping = {key: over for key, over in shaping.items() if over in ("group", "batch")}
    clipping = {"reward_shaping.clip": clip} if clip else {}
    return {"advantage_estimator": "reinforce_plus_plus", **shaping, **clipping, **whitening}


def _estimator(context: ConversionContext, leaf: KeyPath) -> Result:
    name = leaf.value
    names = (*_ESTIMATORS, *_OTHER_ESTIMATORS)
    if name not in names:
        raise BadValue(f"expected one of {', '.join(names)}, got {shown(name)}")
    if name in _OTHER_ESTIMATORS:
        return no_counterpart(reason("adv_estimator"))
    chosen = _choose(context)
    ours = chosen["advantage_estimator"]
    targets = [(f"{POLICY}.{key}", value) for key, value in chosen.items()]
    if ours == "gae":
        targets.append(("critic.enable", True))
    note = "" if ours == name else "what it, its normalisation of rewards and its whitening come to"
    return mapped(*targets, note=note)


_JUDGES = {
    **dict.fromkeys(("whiten_advantages", "reward_shift", "reward_scale"), values.flag),
    "reward_clip": values.number,
}


def _part_of_estimator(context: ConversionContext, leaf: KeyPath) -> Result:
    """A switch that the choice of the estimator covers; where it cannot, it has no counterpart."""
    name = context.get("adv_estimator", "gae")
    if name not in _ESTIMATORS:
        return no_counterpart(reason(leaf.key))
    if judge := _JUDGES.get(leaf.key):
        judge(leaf.value)
    if leaf.key != "whiten_advantages" and "running" in _norm(context):
        return unsupported("running means of rewards are not kept: center and scale over the group or the batch")
    if leaf.key == "reward_clip" and facts.has_reward_kl(context):
        return unsupported("with a KL in the reward ROLL clips the reward of each token again, after the KL")
    if leaf.key != "whiten_advantages" and name == "gae":
        return unsupported(reason(leaf.key))
    return implicit(f"part of advantage_estimator = {_choose(context)['advantage_estimator']}")


def _no_estimator(context: ConversionContext) -> str:
    return "" if facts.has_advantages(context) else f"a {context.kind} pipeline has no advantages"


_no_reward_kl = facts.only_with(facts.has_reward_kl, "the reward has no KL term (add_token_level_kl)")
_no_loss_kl = facts.only_with(facts.has_loss_kl, "the loss has no KL term (use_kl_loss)")


def _gamma(context: ConversionContext, leaf: KeyPath) -> Result:
    discount = values.number(leaf.value)
    is_known = context.get("adv_estimator", "gae") in _ESTIMATORS
    if is_known and _choose(context)["advantage_estimator"] in ("gae", "reinforce_plus_plus"):
        return leaf.to(discount)
    return implicit("1: nothing is discounted") if discount == 1 else unsupported(reason("gamma"))


def _token_kl(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("no KL in the reward")
    return leaf.to(context.number("init_kl_coef", 0.2))


def _target_kl(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to("adaptive", values.number(leaf.value))


def _kl_loss(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("no KL in the loss")
    kind = _KL_TYPES.get(context.text("kl_loss_type", "k3"), "k3")
    return mapped((leaf.ours[0], context.number("kl_loss_coef", 0.0)), (f"{POLICY}.kl_type", kind))


def _clip(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.flag("use_pg_clip_range"):
        return implicit("use_pg_clip_range takes pg_clip_low and pg_clip_high instead")
    if _our_variant(context) == "reinforce":
        return implicit("the plain policy gradient has no ratio to clip")
    if leaf.value is None:
        return implicit("null: the default, 0.2")
    return to.clip_sides(leaf.value, *leaf.ours)


def _clip_low(context: ConversionContext, leaf: KeyPath) -> Result:
    return to.clip_sides(leaf.value, low=leaf.ours[0])


def _without_range(context: ConversionContext) -> str:
    if context.get("use_policy_loss_type", "PPO") == "PG":
        return "the plain policy gradient has no ratio to clip"
    return "" if context.flag("use_pg_clip_range") else "use_pg_clip_range is off: pg_clip is taken"


def _dual_clip(context: ConversionContext, leaf: KeyPath) -> Result:
    if _our_variant(context) != "grpo":
        return implicit(f"{_our_variant(context)} has no dual clip")
    if not values.flag(leaf.value):
        return leaf.to(_NO_DUAL_CLIP, note="so high that it never acts")
    clip = context.number("pg_clip", 0.2) or 0.0
    if clip <= 0:
        raise BadValue(f"pg_clip = {clip} leaves no dual clip")
    return leaf.to(round(1 + 2 * clip, 6), note="1 + 2 · pg_clip")


def _variant(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to(_our_variant(context))


def _our_variant(context: ConversionContext) -> str:
    sampling, loss = context.get("importance_sampling", "token"), context.get("use_policy_loss_type", "PPO")
    if sampling not in ("token", "seq"):
        raise BadValue(f"importance_sampling: expected token or seq, got {shown(sampling)}")
    if loss not in ("PPO", "PG"):
        raise BadValue(f"use_policy_loss_type: expected PPO or PG, got {shown(loss)}")
    if loss == "PG":
        return "reinforce"
    return "gspo" if sampling == "seq" else "grpo"


def _loss_type(context: ConversionContext, leaf: KeyPath) -> Result:
    names = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    if leaf.value in names:
        return leaf.to(leaf.value)
    if leaf.value != "seq-mean-token-sum-norm":
        raise BadValue(f"expected one of {', '.join(names)}, seq-mean-token-sum-norm, got {shown(leaf.value)}")
    context.warn(
        "loss_agg_mode = seq-mean-token-sum-norm: ROLL divides the sum by the longest answer alone, here it is also "
        "divided by the number of samples: gradients are smaller by that number, which counts where they are clipped "
        "(train.optm_grad_norm_clip)"
    )
    note = "divided by the longest answer and the number of samples; ROLL's is larger by that number"
    return leaf.to("seq-mean-token-mean", facts.response_length(context), note=note)


def _positive(context: ConversionContext, leaf: KeyPath) -> Result:
    weight = values.number(leaf.value)
    return leaf.to(weight) if weight else implicit("0: no such loss")


_WEIGHTS = ("token", "sequence")
_REJECTS = ("token", "sequence", "geometric")


def _is_weights(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("no weights")
    kind = context.get("train_infer_correction.is_weight.weight_type", "token")
    if kind not in _WEIGHTS:
        return implicit("see weight_type")
    return leaf.to(kind)


_no_weights = needs("train_infer_correction.is_weight.enabled", "the weights are off")


def _weight_type(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value not in _WEIGHTS:
        return no_counterpart(reason("train_infer_correction.is_weight.weight_type"))
    return leaf.to(leaf.value)


def _filters(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == []:
        return implicit("no filter")
    if not isinstance(leaf.value, list) or not all(isinstance(item, dict) for item in leaf.value):
        raise BadValue(f"expected a list of filters, got {shown(leaf.value)}")
    active = [item for item in leaf.value if values.flag(item.get("enabled", False))]
    if not active:
        return implicit("no filter is enabled")
    first = active[0]
    over, by_ratio = first.get("agg_type", "token"), values.flag(first.get("ratio_enabled", True))
    if len(active) > 1 or not by_ratio or values.flag(first.get("diff_enabled", False)) or over not in _REJECTS:
        return no_counterpart(reason(leaf.key))
    bounds = (values.number(first.get(f"ratio_{side}", bound)) for side, bound in (("low", 0.8), ("high", 1.2)))
    return leaf.to(over, *bounds)


def _no_difficulty(context: ConversionContext) -> str:
    if not context.flag("difficulty_mask"):
        return "difficulty_mask is off"
    return "a group of one sample has no difficulty" if facts.group_size(context) == 1 else ""


def _difficulty(context: ConversionContext, leaf: KeyPath) -> Result:
    values.flag(leaf.value)
    if off := _no_difficulty(context):
        return implicit(off)
    sides = (("low", 0.0), ("high", 1.0))
    return leaf.to(*(context.number(f"difficulty_{side}_threshold", default) for side, default in sides))


def _no_long_failures(context: ConversionContext) -> str:
    if not context.flag("error_max_len_clip"):
        return "error_max_len_clip is off"
    least, longest = context.integer("error_max_len_threshold", None), facts.response_length(context)
    if least is None or (longest is not None and least > longest):
        return "no answer is as long as error_max_len_threshold"
    return ""


def _long_failures(context: ConversionContext, leaf: KeyPath) -> Result:
    values.flag(leaf.value)
    if off := _no_long_failures(context):
        return implicit(off)
    context.warn(
        "error_max_len_clip: ROLL trains on answers that score 1, and on shorter ones that score 0; here answers of "
        "any score above 0 are trained, however long, and shorter ones of any score"
    )
    return leaf.to(context.integer("error_max_len_threshold"))


def _reference(context: ConversionContext, leaf: KeyPath) -> Result:
    if values.flag(leaf.value) and not facts.has_reference(context):
        return implicit("no KL term reads a reference model: none is loaded")
    return implicit("a reference model is there when a KL term needs it")


def _clip_norm(context: ConversionContext, leaf: KeyPath) -> Result:
    norm = values.number(leaf.value)
    return leaf.to(norm, *([norm] if facts.has_critic(context) else []))


ALGORITHM_RULES = KEYS.rules("algorithm", globals())
