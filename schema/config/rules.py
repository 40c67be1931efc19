"""What the sections must agree on: pure functions `Config -> list[Problem]`, each one rule.

Every rule refuses a configuration that would fail, deadlock or silently do something else than it says; none
changes anything. `check_rules` runs them all. What concerns files and functions of the user stands in
`data_rules`, sampling and engines in `engine_rules`; `check_warnings` names what works but is seldom meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from schema.config.data_rules import DATA_RULES
from schema.config.engine_rules import ENGINE_RULES
from schema.config.placement_rules import PLACEMENT_RULES, PLACEMENT_WARNINGS
from schema.config.problem import Problem
from schema.config.root import Config

Rule = Callable[[Config], list[Problem]]

_POLICY = "train.train_policy"


def check_rules(config: Config) -> list[Problem]:
    """Everything that the rules have against a configuration."""
    return [problem for rule in RULES for problem in rule(config)]


def batch_is_whole_groups(config: Config) -> list[Problem]:
    """B = train_batch_per_replica * n_init_replicas / n_generation is a whole number (NUMERICS, Batches)."""
    if not config.is_grpo or config.samples_per_step % config.rollout.n_generation == 0:
        return []
    batch, replicas = config.train.train_batch_per_replica, config.policy.parallelism.n_init_replicas
    generation = config.rollout.n_generation
    unit = generation // math.gcd(generation, replicas)
    batches = [value for value in (batch // unit * unit, (batch // unit + 1) * unit) if value > 0]
    groups = [
        value for value in range(1, config.samples_per_step + 1) if config.samples_per_step % value == 0
    ]
    near = min(groups, key=lambda value: abs(value - generation))
    key = "train.train_batch_per_replica"
    message = (
        f"{batch} samples per replica * {replicas} policy replicas = {config.samples_per_step} samples per "
        f"step, which is not a whole number of groups of rollout.n_generation = {generation}"
    )
    hint = f"write {key} = {' or '.join(map(str, batches))}, or rollout.n_generation = {near}"
    related = ("rollout.n_generation", "policy.parallelism.n_init_replicas")
    return [Problem(key, message, batch, hint, related=related)]


def optimizer_steps_divide_batch(config: Config) -> list[Problem]:
    """The batch is cut into whole optimizer steps."""
    if not config.is_grpo or config.grpo.batch_size_per_optimize is None:
        return []
    batch, piece = config.train.train_batch_per_replica, config.grpo.batch_size_per_optimize
    if batch % piece == 0:
        return []
    below = max(value for value in range(1, min(piece, batch) + 1) if batch % value == 0)
    above = next((value for value in range(piece, batch + 1) if batch % value == 0), batch)
    key = f"{_POLICY}.batch_size_per_optimize"
    choices = " or ".join(str(value) for value in sorted({below, above}))
    message = f"train.train_batch_per_replica = {batch} cannot be cut into optimizer steps of {piece} samples"
    return [
        Problem(key, message, piece, f"write {key} = {choices}", related=("train.train_batch_per_replica",))
    ]


def on_policy_agrees(config: Config) -> list[Problem]:
    """`on_policy = true` means a bound of 0; a written bound of another value contradicts it."""
    if not config.is_grpo:
        return []
    policy = config.grpo
    written = "allowed_outdated_steps" in policy.model_fields_set
    if not policy.on_policy or not written or policy.allowed_outdated_steps == 0:
        return []
    bound = policy.allowed_outdated_steps
    message = f"on_policy = true allows no outdated steps, but allowed_outdated_steps = {bound}"
    related = (f"{_POLICY}.allowed_outdated_steps",)
    return [Problem(f"{_POLICY}.on_policy", message, True, "leave one of the two out", related=related)]


def interval_fits_staleness(config: Config) -> list[Problem]:
    """Between two publications k steps pass: with S < k - 1 no group could be leased for the last of them."""
    if not config.is_grpo or config.staleness_bound >= config.train.sync_weight_interval - 1:
        return []
    interval, bound = config.train.sync_weight_interval, config.staleness_bound
    message = (
        f"weights published every {interval} steps need a staleness bound of at least {interval - 1}, but it "
        f"is {bound}: training would wait for ever"
    )
    hint = (
        f"write {_POLICY}.allowed_outdated_steps = {interval - 1} or train.sync_weight_interval = {bound + 1}"
    )
    related = (f"{_POLICY}.allowed_outdated_steps", f"{_POLICY}.on_policy")
    return [Problem("train.sync_weight_interval", message, interval, hint, related=related)]


def loss_options_agree(config: Config) -> list[Problem]:
    """Options of the loss that the chosen loss does not have."""
    if not config.is_grpo:
        return []
    policy, problems = config.grpo, []
    if policy.unbiased_loss_max_tokens is not None and policy.loss_type != "seq-mean-token-mean":
        key = f"{_POLICY}.unbiased_loss_max_tokens"
        message = f"works with loss_type = seq-mean-token-mean only, and it is {policy.loss_type}"
        hint = f'write {_POLICY}.loss_type = "seq-mean-token-mean" or leave it out'
        problems.append(
            Problem(key, message, policy.unbiased_loss_max_tokens, hint, related=(f"{_POLICY}.loss_type",))
        )
    if policy.variant == "gspo" and policy.loss_type == "seq-mean-token-sum":
        message = "gspo averages over each sequence; a sum over its tokens is another loss"
        hint = f'write {_POLICY}.loss_type = "seq-mean-token-mean" or leave it out'
        variant = (f"{_POLICY}.variant",)
        problems.append(Problem(f"{_POLICY}.loss_type", message, policy.loss_type, hint, related=variant))
    if policy.variant == "gspo" and policy.lower_bound_ratio != 3.0:
        message = "gspo has no dual clip"
        hint = "leave it out, or choose the variant grpo or dapo"
        key = f"{_POLICY}.lower_bound_ratio"
        problems.append(
            Problem(key, message, policy.lower_bound_ratio, hint, related=(f"{_POLICY}.variant",))
        )
    overlong = policy.overlong_reward
    if overlong.enable_overlong_penalty and overlong.buffer_length > config.rollout.max_response_length:
        longest = config.rollout.max_response_length
        key = f"{_POLICY}.overlong_reward.buffer_length"
        message = f"is longer than rollout.max_response_length = {longest}"
        hint = f"write {key} = {max(longest // 4, 1)}, or any value up to {longest}"
        related = ("rollout.max_response_length", f"{_POLICY}.overlong_reward.enable_overlong_penalty")
        problems.append(Problem(key, message, overlong.buffer_length, hint, related=related))
    return problems


def lengths_fit(config: Config) -> list[Problem]:
    """A response leaves room for a prompt, and the longest sample fits into a micro-batch."""
    problems = []
    longest, cap = config.policy.model_max_length, config.train.train_policy.max_token_len_per_mini_batch
    if cap is not None and cap < longest:
        key = f"{_POLICY}.max_token_len_per_mini_batch"
        message = (
            f"a sample of policy.model_max_length = {longest} tokens does not fit into a micro-batch of {cap}"
        )
        hint = f"write {key} = {longest} or more, or policy.model_max_length = {cap}"
        problems.append(Problem(key, message, cap, hint, related=("policy.model_max_length",)))
    if not config.is_grpo:
        return problems
    responses = {"rollout.max_response_length": config.rollout.max_response_length}
    if config.validation.enable and config.validation.max_response_length is not None:
        responses["validation.max_response_length"] = config.validation.max_response_length
    limits = {"policy.model_max_length": longest}
    if config.rollout.max_model_len is not None:
        limits["rollout.max_model_len"] = config.rollout.max_model_len
    for key, response in responses.items():
        for limit_key, limit in limits.items():
            if response >= limit:
                message = f"{response} tokens leave no room for a prompt within {limit_key} = {limit}"
                hint = f"write {key} = {max(limit // 2, 1)}, or a larger {limit_key}"
                problems.append(Problem(key, message, response, hint, related=(limit_key,)))
    return problems


def warmup_is_a_share_or_steps(config: Config) -> list[Problem]:
    """A float is a share of all steps, and shares add up to at most all of them."""
    key, warmup, decay = (
        "train.optm_warmup_steps",
        config.train.optm_warmup_steps,
        config.train.optm_decay_ratio or 0,
    )
    if not isinstance(warmup, float):
        return []
    if warmup > 1.0:
        hint = (
            f"write {key} = {int(warmup)} for steps" if warmup.is_integer() else "for steps write an integer"
        )
        return [Problem(key, f"a float is a share of all steps, at most 1.0, got {warmup}", warmup, hint)]
    if warmup + decay > 1.0:
        message = f"decay ({decay}) and warm-up ({warmup}) together are more than all steps"
        hint = "their sum must not exceed 1.0"
        return [Problem("train.optm_decay_ratio", message, decay, hint, related=(key,))]
    return []


def decay_is_complete(config: Config) -> list[Problem]:
    """A decay has a shape and a share of the steps; without both, keys of the decay would do nothing."""
    train, problems = config.train, []
    shape, ratio = train.optm_decay_type, train.optm_decay_ratio or 0.0
    decays, keys = shape not in (None, "none"), ("train.optm_decay_type", "train.optm_decay_ratio")
    if decays and not ratio:
        message = f"a {shape} decay needs the share of steps over which it happens"
        hint = "write train.optm_decay_ratio = 0.2, or another share in (0.0, 1.0]"
        problems.append(Problem("train.optm_decay_type", message, shape, hint, related=keys))
    if ratio and not decays:
        hint = 'write train.optm_decay_type = "linear", "cosine", "sqrt" or "wsd", or leave the ratio out'
        message = "has no effect without a decay type"
        problems.append(Problem("train.optm_decay_ratio", message, ratio, hint, related=keys))
    if train.optm_min_lr_factor and not decays:
        hint, message = "write train.optm_decay_type too, or leave it out", "has no effect without a decay"
        factor = train.optm_min_lr_factor
        problems.append(Problem("train.optm_min_lr_factor", message, factor, hint, related=keys))
    return problems


def one_optimizer(config: Config) -> list[Problem]:
    """Lists are for several optimizers; there is one."""
    problems = []
    for key, value in (("optm_lr", config.train.optm_lr), ("optm_impl", config.train.optm_impl)):
        if isinstance(value, list) and len(value) != 1:
            message = f"a list of {len(value)} is for {len(value)} optimizers, and there is one"
            problems.append(Problem(f"train.{key}", message, value, "write one value"))
    return problems


def stragglers_are_bounded(config: Config) -> list[Problem]:
    """Dropping what is late needs to know what late is."""
    controller = config.controller
    if controller.on_stale == "drop" and controller.straggler_timeout is None:
        message = "needs the time after which a group is late"
        hint = "write controller.straggler_timeout = 60.0, in seconds"
        return [
            Problem("controller.on_stale", message, "drop", hint, related=("controller.straggler_timeout",))
        ]
    if controller.on_stale == "wait" and controller.straggler_timeout is not None:
        message = "has no effect while on_stale = wait"
        hint = 'write controller.on_stale = "drop", or leave it out'
        key, value = "controller.straggler_timeout", controller.straggler_timeout
        return [Problem(key, message, value, hint, related=("controller.on_stale",))]
    return []


def timeouts_are_ordered(config: Config) -> list[Problem]:
    """What is renewed by heartbeats must outlive the time between two of them."""
    controller, launcher, problems = config.controller, config.launcher, []
    beat = controller.heartbeat_interval
    for name, value in (
        ("heartbeat_timeout", controller.heartbeat_timeout),
        ("lease_timeout", controller.lease_timeout),
    ):
        if value <= beat:
            message = f"{value} s is not longer than controller.heartbeat_interval = {beat} s"
            hint = f"write controller.{name} = {beat * 5} or more"
            related = ("controller.heartbeat_interval",)
            problems.append(Problem(f"controller.{name}", message, value, hint, related=related))
    if launcher.restart_backoff_max < launcher.restart_backoff:
        key = "launcher.restart_backoff_max"
        message = f"is less than launcher.restart_backoff = {launcher.restart_backoff}"
        hint = f"write {key} = {launcher.restart_backoff} or more"
        related = ("launcher.restart_backoff",)
        problems.append(Problem(key, message, launcher.restart_backoff_max, hint, related=related))
    return problems


RULES: tuple[Rule, ...] = (
    batch_is_whole_groups,
    optimizer_steps_divide_batch,
    on_policy_agrees,
    interval_fits_staleness,
    loss_options_agree,
    lengths_fit,
    warmup_is_a_share_or_steps,
    decay_is_complete,
    one_optimizer,
    stragglers_are_bounded,
    timeouts_are_ordered,
    *ENGINE_RULES,
    *DATA_RULES,
    *PLACEMENT_RULES,
)


def check_warnings(config: Config) -> list[Problem]:
    """What is allowed and works, but seldom meant: shown, never refused."""
    warnings = []
    if config.train.master_dtype == "bfloat16":
        message = "updates smaller than 1/256 of a weight are lost in bfloat16 master weights"
        hint = 'write train.master_dtype = "float32"'
        warnings.append(Problem("train.master_dtype", message, "bfloat16", hint))
    if not config.train.ckpt.enable_checkpoint:
        message = "without checkpoints the loss of all policy replicas ends the job"
        hint = 'write train.ckpt.enable_checkpoint = true and train.ckpt.save_mode = "sync"'
        warnings.append(Problem("train.ckpt.enable_checkpoint", message, False, hint))
    return warnings + [warning for rule in PLACEMENT_WARNINGS for warning in rule(config)]
