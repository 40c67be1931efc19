"""verl's `actor_rollout_ref.actor` and `.ref`: loss, batches, optimizer, mesh and checkpoints."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.keys import renamed
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, KeyPath
from convert.engine.values import BadValue, shown
from convert.verl.facts import ACTOR, KL_TYPES, POLICY, group_size, is_streamed, prompts_per_step, response_length
from convert.verl.unsupported import VERL

_OF_SEQUENCES = ("gspo", "geo_mean")
_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum")
_NORMED = "seq-mean-token-sum-norm"
_LOSSES = renamed("vanilla=grpo gspo cispo gpg=reinforce geo_mean")


def _ppo_mini_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, n = values.integer(leaf.value), group_size(context)
    batch = prompts_per_step(context)
    key, samples = f"{POLICY}.batch_size_per_optimize", ("train.train_batch_per_replica", batch * n)
    step = [samples] if is_streamed(context) else []
    if prompts >= batch:
        return mapped((key, None), *step, note=f"one optimizer step for the whole batch of {batch} prompts")
    if prompts <= 0:
        raise BadValue(f"expected at least 1, got {prompts}")
    return mapped((key, prompts * n), *step, note=f"{prompts} prompts × {n} samples")


def _clip_ratio(context: ConversionContext, leaf: KeyPath) -> Result:
    """The clip of the sides that the row names; clip_ratio, of both, is that of a side without a key of its own."""
    loss = context.text(f"{ACTOR}.policy_loss.loss_mode")
    if loss == "gpg":
        return implicit("gpg has no ratio to clip")
    keys = {ours.rpartition("_")[2]: ours for ours in leaf.ours}
    if len(keys) > 1:
        own = [side for side in keys if context.number(f"{ACTOR}.clip_ratio_{side}", None) is not None]
        keys = {side: ours for side, ours in keys.items() if side not in own}
    if not keys:
        return implicit("clip_ratio_low and clip_ratio_high are both set")
    clip = to.clip_sides(leaf.value, keys.get("low", ""), keys.get("high", ""))
    if clip.note and loss == "geo_mean":
        raise BadValue(f"geo_mean bounds the ratio's logarithm, which {shown(leaf.value)} does not leave open")
    return clip


def _dual_clip(context: ConversionContext, leaf: KeyPath) -> Result:
    if (loss := context.text(f"{ACTOR}.policy_loss.loss_mode")) in (*_OF_SEQUENCES, "cispo", "gpg"):
        return implicit(f"{loss} has no dual clip")
    return leaf.to(values.number(leaf.value))


def _aggregation(context: ConversionContext, leaf: KeyPath) -> Result:
    mode = values.text(leaf.value)
    loss = context.text(f"{ACTOR}.policy_loss.loss_mode")
    if loss in _OF_SEQUENCES and mode in (*_AGGREGATIONS, _NORMED):
        terms = _averaged_terms(context)
        if terms and mode != "seq-mean-token-mean":
            context.warn(
                f"{leaf.key} = {mode} with policy_loss.loss_mode = {loss}: verl averages the policy loss over "
                f"sequences, and what {terms} asks for by {mode}; here both are averaged over sequences"
            )
        return leaf.to("seq-mean-token-mean", note=f"{loss} averages over each sequence")
    if mode in _AGGREGATIONS:
        return leaf.to(mode)
    if mode == _NORMED:
        longest = context.integer(f"{ACTOR}.loss_scale_factor", None) or response_length(context)
        note = f"Dr. GRPO: the sum over all tokens divided by {longest} tokens and the number of sequences"
        context.warn(
            f"{ACTOR}.loss_agg_mode = seq-mean-token-sum-norm: the sum is divided by {longest} tokens and the number "
            "of sequences of the optimizer step, as verl does where its agg_loss takes global_batch_size. Older "
            "versions divide the sum of a micro-batch by the tokens alone: their gradient is larger by the number "
            "of sequences of a micro-batch, which counts where gradients are clipped "
            "(train.optm_grad_norm_clip) and where the optimizer is not of Adam's kind"
        )
        return leaf.to("seq-mean-token-mean", longest, note=note)
    raise BadValue(f"expected {', '.join(_AGGREGATIONS)} or {_NORMED}, got {shown(mode)}")


def _is_normed(context: ConversionContext) -> bool:
    is_of_tokens = context.text(f"{ACTOR}.policy_loss.loss_mode") not in _OF_SEQUENCES
    return is_of_tokens and context.text(f"{ACTOR}.loss_agg_mode") == _NORMED


def _averaged_terms(context: ConversionContext) -> str:
    """The terms of the loss besides the policy's that loss_agg_mode averages; "" where the file has none."""
    has = {
        "entropy_coeff": bool(context.number(f"{ACTOR}.entropy_coeff", 0.0)),
        "use_kl_loss": context.flag(f"{ACTOR}.use_kl_loss"),
    }
    return " and ".join(name for name, is_on in has.items() if is_on)


def _use_kl_loss(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or not values.flag(leaf.value):
        return implicit("false: no KL in the loss, kl_beta stays 0")
    coefficient = context.number(f"{ACTOR}.kl_loss_coef", 0.001) or 0.0
    return leaf.to(coefficient, note="kl_loss_coef")


def _kl_type(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if not context.flag(f"{ACTOR}.use_kl_loss"):
        return implicit("no effect while use_kl_loss = false")
    if name not in KL_TYPES:
        raise BadValue(f"expected one of {', '.join(KL_TYPES)}, got {shown(name)}")
    return leaf.to(KL_TYPES[name])


def _loss_mode(context: ConversionContext, leaf: KeyPath) -> Result:
    mode = values.text(leaf.value)
    if mode in _LOSSES:
        return leaf.to(_LOSSES[mode])
    reason = VERL.reason(f"{leaf.key}={mode}")
    if reason is not None:
        return no_counterpart(reason)
    raise BadValue(f"expected one of {', '.join(_LOSSES)}, got {shown(mode)}")


def _loss_option(context: ConversionContext, leaf: KeyPath) -> Result:
    mode = context.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode in _LOSSES or leaf.value is None:
        return implicit(f"no effect with loss_mode = {mode}")
    return no_counterpart(VERL.reason(f"{ACTOR}.policy_loss.loss_mode={mode}") or "a loss without counterpart")


def _tis_cap(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or values.number(leaf.value) <= 0:
        return implicit("negative: off")
    return leaf.to("token", values.number(leaf.value))


# --- the rest -----------------------------------------------------------------------------------------------


def _reference_path(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == context.get("actor_rollout_ref.model.path", None):
        return implicit("the policy's own model")
    return to.path("reference.model_name_or_path").run(context, leaf)
