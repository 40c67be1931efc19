"""Rules of the policy loss and of the weights in it: an option of one loss is no option of another."""

from __future__ import annotations

from schema.config.problem import Problem
from schema.config.root import Config

_POLICY = "train.train_policy"
_VARIANT = f"{_POLICY}.variant"
_CORRECTION = f"{_POLICY}.rollout_correction"
_UNCLIPPED = {"reinforce": "reinforce has no ratio to clip"}
_NO_DUAL_CLIP = {
    "gspo": "gspo has no dual clip",
    "cispo": "cispo has no dual clip",
    "reinforce": "reinforce has no ratio to clip",
}


def has_kl(config: Config) -> bool:
    """Whether a KL term needs the reference model."""
    return config.is_grpo and (config.grpo.kl_beta > 0.0 or config.grpo.kl_in_reward.beta > 0.0)


def averages_agree(config: Config) -> list[Problem]:
    """How token losses become one number, and what only one of these ways knows."""
    if not config.is_grpo:
        return []
    policy, problems = config.grpo, []
    key, tokens = f"{_POLICY}.unbiased_loss_max_tokens", policy.unbiased_loss_max_tokens
    if tokens is not None and policy.loss_type != "seq-mean-token-mean":
        message = (
            f'{tokens} works with {_POLICY}.loss_type = "seq-mean-token-mean" only, not "{policy.loss_type}"'
        )
        hint = f'write {_POLICY}.loss_type = "seq-mean-token-mean", or leave it out'
        problems.append(Problem(key, message, tokens, hint, related=(f"{_POLICY}.loss_type",)))
    if policy.variant == "gspo" and policy.loss_type == "seq-mean-token-sum":
        message = (
            f'{_VARIANT} = "gspo" averages over each sequence; "{policy.loss_type}", a sum over its tokens, is '
            "another loss"
        )
        hint = f'write {_POLICY}.loss_type = "seq-mean-token-mean", or leave it out'
        problems.append(Problem(f"{_POLICY}.loss_type", message, policy.loss_type, hint, related=(_VARIANT,)))
    return problems


def clips_belong_to_their_loss(config: Config) -> list[Problem]:
    """Bounds of the ratio in losses that do not clip it so."""
    if not config.is_grpo:
        return []
    policy, problems = config.grpo, []
    truncated = f"{_POLICY}.aipo_rho = {policy.aipo_rho} truncates the ratio instead of clipping it"
    plain = policy.aipo_rho is not None
    reason = truncated if plain else _NO_DUAL_CLIP.get(policy.variant)
    if reason and policy.lower_bound_ratio != 3.0:
        key, value = f"{_POLICY}.lower_bound_ratio", policy.lower_bound_ratio
        message = f"{value} has no effect: {reason} ({_VARIANT} = {policy.variant})"
        hint = "leave it out, or choose the variant grpo or dapo"
        problems.append(Problem(key, message, value, hint, related=(_VARIANT, f"{_POLICY}.aipo_rho")))
    reason = truncated if plain else _UNCLIPPED.get(policy.variant)
    for name in ("epsilon_low", "epsilon_high"):
        value = getattr(policy, name)
        if reason and value != 0.2:
            message = f"{value} has no effect: {reason} ({_VARIANT} = {policy.variant})"
            hint, related = "leave it out, or choose another loss", (_VARIANT, f"{_POLICY}.aipo_rho")
            problems.append(Problem(f"{_POLICY}.{name}", message, value, hint, related=related))
    return problems


def truncation_fits_the_loss(config: Config) -> list[Problem]:
    """AIPO replaces the clip of a token's ratio; losses without such a clip have nothing to replace."""
    if not config.is_grpo or config.grpo.aipo_rho is None or config.grpo.variant in ("grpo", "dapo"):
        return []
    key, rho = f"{_POLICY}.aipo_rho", config.grpo.aipo_rho
    message = (
        f'{rho} replaces the clip of each token\'s ratio, which {_VARIANT} = "{config.grpo.variant}" lacks'
    )
    hint = f'leave it out, or write {_VARIANT} = "grpo"'
    return [Problem(key, message, rho, hint, related=(_VARIANT,))]


def decoupling_is_on(config: Config) -> list[Problem]:
    """The cap is of weights that only the decoupled loss has, and no weight is taken twice."""
    if not config.is_grpo:
        return []
    policy, problems, other = config.grpo, [], f"{_POLICY}.use_decoupled_loss"
    cap = policy.behav_imp_weight_cap
    if cap is not None and not policy.use_decoupled_loss:
        message = f"{cap} caps weights that {other} = false does not have"
        hint = f"write {other} = true, or leave it out"
        problems.append(Problem(f"{_POLICY}.behav_imp_weight_cap", message, cap, hint, related=(other,)))
    weights = policy.rollout_correction.weights
    if policy.use_decoupled_loss and weights != "none":
        key = f"{_CORRECTION}.weights"
        message = (
            f'"{weights}" weighs each sample by old over behaviour policy, as {other} = true already does'
        )
        hint = f'write {key} = "none", or {other} = false'
        problems.append(Problem(key, message, weights, hint, related=(other,)))
    return problems


def correction_is_complete(config: Config) -> list[Problem]:
    """Rejection has bounds, in order; a cap has weights."""
    if not config.is_grpo:
        return []
    correction, problems = config.grpo.rollout_correction, []
    below, above, reject = correction.reject_below, correction.reject_above, correction.reject
    keys = {"reject_below": below, "reject_above": above}
    written = {f"{_CORRECTION}.{name}": value for name, value in keys.items() if value is not None}
    key = f"{_CORRECTION}.reject"
    if reject != "none" and not written:
        message = (
            f'"{reject}" has no bounds: {_CORRECTION}.reject_below and {_CORRECTION}.reject_above are unset'
        )
        hint = f'write {_CORRECTION}.reject_above = 2.0, or {key} = "none"'
        problems.append(
            Problem(key, message, reject, hint, related=tuple(f"{_CORRECTION}.{n}" for n in keys))
        )
    if reject == "none":
        for name, value in written.items():
            hint = f'write {key} = "token", "sequence" or "geometric", or leave it out'
            problems.append(
                Problem(name, f'{value} has no effect: {key} = "none"', value, hint, related=(key,))
            )
    if below is not None and above is not None and below >= above:
        name, upper = f"{_CORRECTION}.reject_below", f"{_CORRECTION}.reject_above"
        message = f"{below} is not below {upper} = {above}: everything would be rejected"
        hint = f"write {name} = {above / 2}, or a larger {upper}"
        problems.append(Problem(name, message, below, hint, related=(upper,)))
    if correction.weights == "none" and correction.cap != 2.0:
        name, other = f"{_CORRECTION}.cap", f"{_CORRECTION}.weights"
        message = f'{correction.cap} has no effect: {other} = "none"'
        hint = f'write {other} = "token" or "sequence", or leave it out'
        problems.append(Problem(name, message, correction.cap, hint, related=(other,)))
    return problems


LOSS_RULES = (
    averages_agree,
    clips_belong_to_their_loss,
    truncation_fits_the_loss,
    decoupling_is_on,
    correction_is_complete,
)
