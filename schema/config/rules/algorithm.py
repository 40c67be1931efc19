"""Rules of the algorithm: the policy loss, the advantage estimator, the KL terms and their reference model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schema.config.algorithms import ESTIMATORS, LOSSES
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written
from schema.config.rules.reward import own_function
from schema.config.sections.reference import ReferenceConfig
from schema.config.sections.train_policy import LogProbPassConfig
from schema.util.own_code import is_own

_POLICY = "train.train_policy"
_VARIANT = f"{_POLICY}.variant"
_ESTIMATOR = f"{_POLICY}.advantage_estimator"
_CORRECTION = f"{_POLICY}.rollout_correction"


def _clips(config: Config) -> str:
    """Whose ratio the policy loss clips; "" for a user's own."""
    loss = LOSSES.get(config.grpo.variant)
    return loss.clips if loss else ""


def own_code_is_there(config: Config) -> Iterator[Problem]:
    """A loss or an estimator of the user's own is a function in a file that exists."""
    if not config.is_grpo:
        return
    for key, name in ((_VARIANT, config.grpo.variant), (_ESTIMATOR, config.grpo.advantage_estimator)):
        found = own_function(key, name, "file") if is_own(name) else None
        if isinstance(found, Problem):
            yield found


def averages_agree(config: Config) -> Iterator[Problem]:
    """How token losses become one number, and what only one of these ways knows."""
    if not config.is_grpo:
        return
    policy = config.grpo
    key, tokens = f"{_POLICY}.unbiased_loss_max_tokens", policy.unbiased_loss_max_tokens
    if tokens is not None and policy.loss_type != "seq-mean-token-mean":
        message = (
            f'{tokens} works with {_POLICY}.loss_type = "seq-mean-token-mean" only, not "{policy.loss_type}"'
        )
        hint = f'write {_POLICY}.loss_type = "seq-mean-token-mean", or leave it out'
        yield Problem(key, message, tokens, hint, related=(f"{_POLICY}.loss_type",))
    loss = LOSSES.get(policy.variant)
    if loss and loss.loss_type and policy.loss_type not in (loss.loss_type, "token-mean"):
        message = (
            f'{_VARIANT} = "{policy.variant}" averages over each sequence; "{policy.loss_type}", a sum over its '
            "tokens, is another loss"
        )
        hint = f'write {_POLICY}.loss_type = "{loss.loss_type}", or leave it out'
        yield Problem(f"{_POLICY}.loss_type", message, policy.loss_type, hint, related=(_VARIANT,))


def clips_belong_to_their_loss(config: Config) -> Iterator[Problem]:
    """Bounds of the ratio in losses that do not clip it so."""
    if not config.is_grpo:
        return
    policy = config.grpo
    truncated = f"{_POLICY}.aipo_rho = {policy.aipo_rho} truncates the ratio instead of clipping it"
    plain = policy.aipo_rho is not None
    clips = _clips(config)
    unclipped = f"{policy.variant} has no ratio to clip" if clips == "nothing" else ""
    single = f"{policy.variant} has no dual clip" if clips in ("sequences", "weights") else ""
    reason = truncated if plain else unclipped or single
    if reason and policy.lower_bound_ratio != 3.0:
        key, value = f"{_POLICY}.lower_bound_ratio", policy.lower_bound_ratio
        message = f"{value} has no effect: {reason} ({_VARIANT} = {policy.variant})"
        hint = "leave it out, or choose the variant grpo or dapo"
        yield Problem(key, message, value, hint, related=(_VARIANT, f"{_POLICY}.aipo_rho"))
    reason = truncated if plain else unclipped
    for name, value in written(policy, "epsilon_low", "epsilon_high") if reason else ():
        message = f"{value} has no effect: {reason} ({_VARIANT} = {policy.variant})"
        hint, related = "leave it out, or choose another loss", (_VARIANT, f"{_POLICY}.aipo_rho")
        yield Problem(f"{_POLICY}.{name}", message, value, hint, related=related)


def truncation_fits_the_loss(config: Config) -> Iterator[Problem]:
    """AIPO replaces the clip of a token's ratio; losses without such a clip have nothing to replace."""
    if not config.is_grpo or config.grpo.aipo_rho is None or _clips(config) == "tokens":
        return
    key, rho = f"{_POLICY}.aipo_rho", config.grpo.aipo_rho
    message = (
        f'{rho} replaces the clip of each token\'s ratio, which {_VARIANT} = "{config.grpo.variant}" lacks'
    )
    hint = f'leave it out, or write {_VARIANT} = "grpo"'
    yield Problem(key, message, rho, hint, related=(_VARIANT,))


def decoupling_is_on(config: Config) -> Iterator[Problem]:
    """The cap is of weights that only the decoupled loss has, and no weight is taken twice."""
    if not config.is_grpo:
        return
    policy, other = config.grpo, f"{_POLICY}.use_decoupled_loss"
    cap = policy.behav_imp_weight_cap
    if cap is not None and not policy.use_decoupled_loss:
        message = f"{cap} caps weights that {other} = false does not have"
        hint = f"write {other} = true, or leave it out"
        yield Problem(f"{_POLICY}.behav_imp_weight_cap", message, cap, hint, related=(other,))
    weights = policy.rollout_correction.weights
    if policy.use_decoupled_loss and weights != "none":
        key = f"{_CORRECTION}.weights"
        message = (
            f'"{weights}" weighs each sample by old over behaviour policy, as {other} = true already does'
        )
        hint = f'write {key} = "none", or {other} = false'
        yield Problem(key, message, weights, hint, related=(other,))


def correction_is_complete(config: Config) -> Iterator[Problem]:
    """Rejection has bounds, in order; a cap has weights."""
    if not config.is_grpo:
        return
    correction = config.grpo.rollout_correction
    below, above, reject = correction.reject_below, correction.reject_above, correction.reject
    keys = {"reject_below": below, "reject_above": above}
    bounds = {f"{_CORRECTION}.{name}": value for name, value in keys.items() if value is not None}
    key = f"{_CORRECTION}.reject"
    if reject != "none" and not bounds:
        message = (
            f'"{reject}" has no bounds: {_CORRECTION}.reject_below and {_CORRECTION}.reject_above are unset'
        )
        hint = f'write {_CORRECTION}.reject_above = 2.0, or {key} = "none"'
        yield Problem(key, message, reject, hint, related=tuple(f"{_CORRECTION}.{n}" for n in keys))
    if reject == "none":
        for name, value in bounds.items():
            hint = f'write {key} = "token", "sequence" or "geometric", or leave it out'
            yield Problem(name, f'{value} has no effect: {key} = "none"', value, hint, related=(key,))
    if below is not None and above is not None and below >= above:
        name, upper = f"{_CORRECTION}.reject_below", f"{_CORRECTION}.reject_above"
        message = f"{below} is not below {upper} = {above}: everything would be rejected"
        hint = f"write {name} = {above / 2}, or a larger {upper}"
        yield Problem(name, message, below, hint, related=(upper,))
    if correction.weights == "none" and correction.cap != 2.0:
        name, other = f"{_CORRECTION}.cap", f"{_CORRECTION}.weights"
        message = f'{correction.cap} has no effect: {other} = "none"'
        hint = f'write {other} = "token" or "sequence", or leave it out'
        yield Problem(name, message, correction.cap, hint, related=(other,))


def old_pass_is_used(config: Config) -> Iterator[Problem]:
    """The budget of a pass that this job does not have."""
    if not config.is_grpo or config.grpo.recomputes_old:
        return
    other, weights = f"{_POLICY}.use_decoupled_loss", f"{_CORRECTION}.weights"
    for name, value in written(config.grpo.old_log_prob, *LogProbPassConfig.model_fields):
        message = (
            f'{value} has no effect: {other} = false and {weights} = "none" have no pass for the old policy'
        )
        hint = f"leave it out, or write {other} = true"
        yield Problem(f"{_POLICY}.old_log_prob.{name}", message, value, hint, related=(other, weights))


_GROUP = "rollout.n_generation"


def critic_agrees(config: Config) -> Iterator[Problem]:
    """`gae` needs values, and values serve `gae` alone."""
    key = "critic.enable"
    if not config.is_grpo:
        if config.critic.enable:
            message = f'supervised training ({_POLICY}.type = "sft") has no critic'
            yield Problem(key, message, True, f"write {key} = false", related=(f"{_POLICY}.type",))
        return
    estimator = config.grpo.advantage_estimator
    if estimator == "gae" and not config.critic.enable:
        message = f'"gae" needs the values of a critic, and {key} = false'
        hint = f'write {key} = true, or {_ESTIMATOR} = "grpo"'
        yield Problem(_ESTIMATOR, message, estimator, hint, related=(key,))
    if config.critic.enable and estimator != "gae":
        message = f'true trains values that {_ESTIMATOR} = "{estimator}" does not read'
        hint = f'write {_ESTIMATOR} = "gae", or {key} = false'
        yield Problem(key, message, True, hint, related=(_ESTIMATOR,))


def critic_warms_up_in_time(config: Config) -> Iterator[Problem]:
    """The policy learns after the critic's warm-up, so the run is longer than it."""
    steps, total = config.critic.warmup_steps, config.train.max_num_steps
    if not config.is_grpo or not config.critic.enable or total is None or steps < total:
        return
    key, other = "critic.warmup_steps", "train.max_num_steps"
    message = f"{steps} steps before the policy learns are all of {other} = {total}"
    yield Problem(key, message, steps, f"write {key} = {total // 10}, or a larger {other}", related=(other,))


def groups_are_large_enough(config: Config) -> Iterator[Problem]:
    """Estimators and filters that compare the samples of a prompt need more than one."""
    if not config.is_grpo or config.rollout.n_generation > 1:
        return
    policy = config.grpo
    estimator = policy.advantage_estimator
    if estimator in ESTIMATORS and (alone := ESTIMATORS[estimator].alone):
        message = (
            f'{_ESTIMATOR} = "{estimator}" compares the samples of a prompt, and with {_GROUP} = 1 the advantage '
            f"would be {alone}"
        )
        hint = f'write {_GROUP} = 8, or {_ESTIMATOR} = "reinforce_plus_plus"'
        yield Problem(_GROUP, message, 1, hint, related=(_ESTIMATOR,))
    idle = {
        "filter_reward_metric": [] if policy.has_baseline else policy.filter_metrics,
        "min_filter_prefix_tokens": policy.min_filter_prefix_tokens,
    }
    for name, value in idle.items():
        if value:
            key = f"{_POLICY}.{name}"
            message = (
                f"{value} compares the samples of a prompt, and {_GROUP} = 1: every group would be left out"
            )
            if name != "filter_reward_metric":
                message = f"{value} compares the samples of a prompt, and {_GROUP} = 1"
            hint = f"leave it out, or write {_GROUP} = 8"
            yield Problem(key, message, value, hint, related=(_GROUP,))


def options_belong_to_their_estimator(config: Config) -> Iterator[Problem]:
    """Discounts and divisions that an estimator does not have."""
    if not config.is_grpo:
        return
    policy = config.grpo
    estimator = policy.advantage_estimator
    if ":" in estimator:  # the user's own may read any of them
        return
    owners: dict[str, list[str]] = {}
    for owner, row in sorted(ESTIMATORS.items()):
        for option in row.options:
            owners.setdefault(option, []).append(owner)
    for name, value in written(policy, *owners):
        if estimator not in owners[name]:
            message = f'{toml_value(value)} has no effect: {_ESTIMATOR} = "{estimator}" does not read it'
            hint = f"leave it out; it belongs to {' and '.join(owners[name])}"
            yield Problem(f"{_POLICY}.{name}", message, value, hint, related=(_ESTIMATOR,))


_MASKS = f"{_POLICY}.sample_masks"


def masks_leave_samples(config: Config) -> Iterator[Problem]:
    """Thresholds of the difficulty of prompts leave some between them; an answer can be as long as is masked."""
    if not config.is_grpo:
        return
    masks, longest = config.grpo.sample_masks, config.rollout.max_response_length
    above, below = masks.mean_score_above, masks.mean_score_below
    if above is not None and below is not None and above >= below:
        key, other = f"{_MASKS}.mean_score_above", f"{_MASKS}.mean_score_below"
        message = f"no mean score is above {above} and below {other} = {below}: nothing would be trained"
        yield Problem(key, message, above, "leave it out, or write a smaller number", related=(other,))
    tokens = masks.failed_from_tokens
    if tokens is not None and tokens > longest:
        key, other = f"{_MASKS}.failed_from_tokens", "rollout.max_response_length"
        message = f"{tokens} has no effect: no answer is longer than {other} = {longest}"
        hint = f"leave it out, or write {key} = {max(longest // 2, 1)}"
        yield Problem(key, message, tokens, hint, related=(other,))


_BETA = f"{_POLICY}.kl_beta"
_REWARD = f"{_POLICY}.kl_in_reward"
_EITHER = f"{_BETA} = 0.0 and {_REWARD}.beta = 0.0"


def loss_term_is_on(config: Config) -> Iterator[Problem]:
    """How the KL in the loss is estimated matters when there is one."""
    if not config.is_grpo or config.grpo.kl_beta > 0.0:
        return
    policy = config.grpo
    idle: list[tuple[str, Any, str]] = []
    if policy.kl_type != "k3":
        idle.append(("kl_type", policy.kl_type, f'"{policy.kl_type}" estimates a term'))
    if policy.unbiased_kl_estimate:
        idle.append(("unbiased_kl_estimate", True, "weighs a term"))
    for name, value, does in idle:
        message, hint = f"{does} that {_BETA} = 0.0 leaves out", f"write {_BETA} = 0.001, or leave it out"
        yield Problem(f"{_POLICY}.{name}", message, value, hint, related=(_BETA,))


def reference_is_used(config: Config) -> Iterator[Problem]:
    """The reference model exists when a KL term does."""
    if config.has_reference:
        return
    hint = f"write {_BETA} = 0.001, or leave it out"
    related: tuple[str, ...] = (_BETA, f"{_REWARD}.beta")
    without = _EITHER if config.is_grpo else f'{_POLICY}.type = "sft"'
    if not config.is_grpo:
        hint, related = "leave it out", (f"{_POLICY}.type",)
    elif config.grpo.reference_reset_interval:
        interval = config.grpo.reference_reset_interval
        message = f"{interval} is the time between resets of a model that this job does not have ({without})"
        yield Problem(f"{_POLICY}.reference_reset_interval", message, interval, hint, related=related)
    message = f"this job has no reference model: {without}"
    for name, value in written(config.reference, *ReferenceConfig.model_fields):
        yield Problem(f"reference.{name}", message, value, hint, related=related)


def resets_agree(config: Config) -> Iterator[Problem]:
    """What happens to the optimizer at a reset needs resets."""
    if (
        not config.is_grpo
        or config.grpo.reset_optimizer_with_reference
        or config.grpo.reference_reset_interval
    ):
        return
    key, other = f"{_POLICY}.reset_optimizer_with_reference", f"{_POLICY}.reference_reset_interval"
    message = f"false has no effect: {other} is unset, so the reference model is never reset"
    hint = f"leave it out, or write {other} = 100" if config.has_reference else "leave it out"
    yield Problem(key, message, False, hint, related=(other,))


def reward_term_is_complete(config: Config) -> Iterator[Problem]:
    """Options of the KL in the reward need a coefficient; those of its controller need it to be adaptive."""
    if not config.is_grpo:
        return
    term = config.grpo.kl_in_reward
    if term.beta == 0.0:
        for name, value in written(term, "type", "controller"):
            message = f'"{value}" has no effect: {_REWARD}.beta = 0.0'
            hint = f"write {_REWARD}.beta = 0.001, or leave it out"
            yield Problem(f"{_REWARD}.{name}", message, value, hint, related=(f"{_REWARD}.beta",))
    if term.controller == "fixed":
        for name, value in written(term, "target", "horizon"):
            message = f'{value} has no effect: {_REWARD}.controller = "fixed" keeps the coefficient'
            hint = f'write {_REWARD}.controller = "adaptive", or leave it out'
            yield Problem(f"{_REWARD}.{name}", message, value, hint, related=(f"{_REWARD}.controller",))


ALGORITHM_RULES = (
    own_code_is_there,
    averages_agree,
    clips_belong_to_their_loss,
    truncation_fits_the_loss,
    decoupling_is_on,
    correction_is_complete,
    critic_agrees,
    critic_warms_up_in_time,
    groups_are_large_enough,
    options_belong_to_their_estimator,
    masks_leave_samples,
    loss_term_is_on,
    reference_is_used,
    resets_agree,
    reward_term_is_complete,
)

ALGORITHM_WARNINGS = (old_pass_is_used,)
