"""Rules of the algorithm: the policy loss, the advantage estimator, the KL terms and their reference model."""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.algorithms import ESTIMATORS, LOSSES
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written
from schema.config.rules.own_code import own_function
from schema.config.rules.rows import Each, InGrpo, Refusal, Row, Rule, section
from schema.config.sections.reference import ReferenceConfig
from schema.config.sections.train_policy import (
    GrpoConfig,
    KlInRewardConfig,
    LogProbPassConfig,
    RolloutCorrectionConfig,
    SampleMasksConfig,
)
from schema.util.own_code import is_own

_POLICY = "train.train_policy"
_VARIANT = f"{_POLICY}.variant"
_ESTIMATOR = f"{_POLICY}.advantage_estimator"
_CORRECTION = f"{_POLICY}.rollout_correction"


Policy = Row[GrpoConfig]
Correction = Row[RolloutCorrectionConfig]
_policy = section(_POLICY, lambda c: c.grpo if c.is_grpo else None)


def _clips(policy: GrpoConfig) -> str:
    """Return the object whose ratio the policy loss clips; "" for a user's own loss."""
    loss = LOSSES.get(policy.variant)
    return loss.clips if loss else ""


def _average(policy: GrpoConfig) -> str:
    """The average over tokens that the policy loss prescribes, if any."""
    loss = LOSSES.get(policy.variant)
    return loss.loss_type if loss else ""


def _last_step(config: Config) -> int | None:
    return config.train.max_num_steps


def own_code_is_there(config: Config) -> Iterator[Problem]:
    """A loss or an estimator of the user's own is a function in a file that exists."""
    if not config.is_grpo:
        return
    for key, name in ((_VARIANT, config.grpo.variant), (_ESTIMATOR, config.grpo.advantage_estimator)):
        definition_or_problem = own_function(key, name, "file") if is_own(name) else None
        if isinstance(definition_or_problem, Problem):
            yield definition_or_problem


def clips_belong_to_their_loss(config: Config) -> Iterator[Problem]:
    """Bounds of the ratio in losses that do not clip it so."""
    if not config.is_grpo:
        return
    policy = config.grpo
    truncated = f"{_POLICY}.aipo_rho = {policy.aipo_rho} truncates the ratio instead of clipping it"
    plain = policy.aipo_rho is not None
    clips = _clips(policy)
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


_GROUP = "rollout.n_generation"


def groups_are_large_enough(config: Config) -> Iterator[Problem]:
    """Estimators and filters that compare the samples of a prompt need more than one."""
    if config.rollout.n_generation > 1:
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
            message = f"{value} compares the samples of a prompt, and {_GROUP} = 1: every group would be left out"
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


_BETA = f"{_POLICY}.kl_beta"
_REWARD = f"{_POLICY}.kl_in_reward"
_WITHOUT = "{train.train_policy.kl_beta=} and {train.train_policy.kl_in_reward.beta=}"


def _reaches(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low >= high


ALGORITHM_RULES: tuple[Rule, ...] = (
    own_code_is_there,
    Each(
        _policy,
        Policy("unbiased_loss_max_tokens",
            lambda p: p.unbiased_loss_max_tokens is not None and p.loss_type != "seq-mean-token-mean",
            '{} works with {.loss_type!} = "seq-mean-token-mean" only, not {.loss_type}',
            'write {.loss_type!} = "seq-mean-token-mean", or leave it out', (".loss_type",)),
        Policy("loss_type", lambda p: bool(_average(p)) and p.loss_type not in (_average(p), "token-mean"),
            "{.variant=} averages over each sequence; {}, a sum over its tokens, is another loss",
            lambda p: f'write {_POLICY}.loss_type = "{_average(p)}", or leave it out'),
    ),
    clips_belong_to_their_loss,
    Each(
        _policy,
        Policy("aipo_rho", lambda p: p.aipo_rho is not None and _clips(p) != "tokens",
            "{} replaces the clip of each token's ratio, which {.variant=} lacks",
            'leave it out, or write {.variant!} = "grpo"'),
        Policy("behav_imp_weight_cap", lambda p: p.behav_imp_weight_cap is not None and not p.use_decoupled_loss,
            "{} caps weights that {.use_decoupled_loss=} does not have",
            "write {.use_decoupled_loss!} = true, or leave it out"),
        Policy("rollout_correction.weights",
            lambda p: p.use_decoupled_loss and p.rollout_correction.weights != "none",
            "{} weighs each sample by old over behaviour policy, as {train.train_policy.use_decoupled_loss=} already "
            "does",
            'write {.weights!} = "none", or {train.train_policy.use_decoupled_loss!} = false'),
    ),
    Each(
        section(f"{_POLICY}.rollout_correction", lambda c: c.grpo.rollout_correction if c.is_grpo else None),
        Correction("reject", lambda c: c.reject != "none" and c.reject_below is None and c.reject_above is None,
            "{} has no bounds: {.reject_below!} and {.reject_above!} are unset",
            'write {.reject_above!} = 2.0, or {.reject!} = "none"', (".reject_below", ".reject_above")),
        Correction(("reject_below", "reject_above"), lambda c: c.reject == "none", "{} has no effect: {.reject=}",
            'write {.reject!} = "token", "sequence" or "geometric", or leave it out'),
        Correction("reject_below", lambda c: _reaches(c.reject_below, c.reject_above),
            "{} is not below {.reject_above=}: everything would be rejected",
            lambda c: f"write {_CORRECTION}.reject_below = {(c.reject_above or 0.0) / 2}, or a larger "
            f"{_CORRECTION}.reject_above"),
        Correction("cap", lambda c: c.weights == "none" and c.cap != 2.0, "{} has no effect: {.weights=}",
            'write {.weights!} = "token" or "sequence", or leave it out'),
    ),
    Refusal("critic.enable", lambda c: not c.is_grpo and c.critic.enable,
        "supervised training ({train.train_policy.type=}) has no critic", "write {critic.enable!} = false"),
    InGrpo(
        Refusal(_ESTIMATOR, lambda c: c.grpo.advantage_estimator == "gae" and not c.critic.enable,
            "{} needs the values of a critic, and {critic.enable=}",
            'write {critic.enable!} = true, or {.advantage_estimator!} = "grpo"'),
        Refusal("critic.enable", lambda c: c.critic.enable and c.grpo.advantage_estimator != "gae",
            "true trains values that {train.train_policy.advantage_estimator=} does not read",
            'write {train.train_policy.advantage_estimator!} = "gae", or {critic.enable!} = false'),
        Refusal("critic.warmup_steps", lambda c: c.critic.enable and _reaches(c.critic.warmup_steps, _last_step(c)),
            "{} steps before the policy learns are all of {train.max_num_steps=}",
            lambda c: f"write critic.warmup_steps = {(_last_step(c) or 0) // 10}, or a larger train.max_num_steps"),
        groups_are_large_enough,
        options_belong_to_their_estimator,
    ),
    Each(
        section(f"{_POLICY}.sample_masks", lambda c: c.grpo.sample_masks if c.is_grpo else None),
        Row[SampleMasksConfig]("mean_score_above", lambda c: _reaches(c.mean_score_above, c.mean_score_below),
            "no mean score is above {} and below {.mean_score_below=}: nothing would be trained",
            "leave it out, or write a smaller number"),
    ),
    InGrpo(
        Refusal(f"{_POLICY}.sample_masks.failed_from_tokens",
            lambda c: (c.grpo.sample_masks.failed_from_tokens or 0) > c.rollout.max_response_length,
            "{} has no effect: no answer is longer than {rollout.max_response_length=}",
            lambda c: f"leave it out, or write {_POLICY}.sample_masks.failed_from_tokens = "
            f"{max(c.rollout.max_response_length // 2, 1)}"),
    ),
    Each(
        _policy,
        Policy("kl_type", lambda p: p.kl_beta == 0.0 and p.kl_type != "k3",
            "{} estimates a term that {.kl_beta=} leaves out", "write {.kl_beta!} = 0.001, or leave it out"),
        Policy("unbiased_kl_estimate", lambda p: p.kl_beta == 0.0 and p.unbiased_kl_estimate,
            "weighs a term that {.kl_beta=} leaves out", "write {.kl_beta!} = 0.001, or leave it out"),
    ),
    Refusal(tuple(f"reference.{name}" for name in ReferenceConfig.model_fields), lambda c: not c.is_grpo,
        "this job has no reference model: {train.train_policy.type=}"),
    InGrpo(
        Refusal(f"{_POLICY}.reference_reset_interval",
            lambda c: not c.has_reference and bool(c.grpo.reference_reset_interval),
            f"{{}} is the time between resets of a model that this job does not have ({_WITHOUT})",
            "write {.kl_beta!} = 0.001, or leave it out", (".kl_beta", ".kl_in_reward.beta")),
        Refusal(tuple(f"reference.{name}" for name in ReferenceConfig.model_fields), lambda c: not c.has_reference,
            f"this job has no reference model: {_WITHOUT}", f"write {_BETA} = 0.001, or leave it out"),
        Refusal(f"{_POLICY}.reset_optimizer_with_reference",
            lambda c: not c.grpo.reset_optimizer_with_reference and not c.grpo.reference_reset_interval,
            "false has no effect: {.reference_reset_interval!} is unset, so the reference model is never reset",
            lambda c: "leave it out" + f", or write {_POLICY}.reference_reset_interval = 100" * c.has_reference,
            (".reference_reset_interval",)),
    ),
    Each(
        section(_REWARD, lambda c: c.grpo.kl_in_reward if c.is_grpo else None),
        Row[KlInRewardConfig](("type", "controller"), lambda term: term.beta == 0.0, "{} has no effect: {.beta=}",
            "write {.beta!} = 0.001, or leave it out"),
        Row[KlInRewardConfig](("target", "horizon"), lambda term: term.controller == "fixed",
            "{} has no effect: {.controller=} keeps the coefficient",
            'write {.controller!} = "adaptive", or leave it out'),
    ),
)  # fmt: skip
ALGORITHM_WARNINGS: tuple[Rule, ...] = (
    Each(
        _policy,
        Policy(tuple(f"old_log_prob.{name}" for name in LogProbPassConfig.model_fields),
            lambda p: not p.recomputes_old,
            "{} has no effect: {train.train_policy.use_decoupled_loss=} and "
            "{train.train_policy.rollout_correction.weights=} have no pass for the old policy",
            "leave it out, or write {train.train_policy.use_decoupled_loss!} = true"),
    ),
)  # fmt: skip
