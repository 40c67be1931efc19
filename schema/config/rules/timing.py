"""Rules of time: how old weights may be, how long is waited, what must outlive what."""

from __future__ import annotations

from schema.config.problem import Problem
from schema.config.root import Config

_POLICY = "train.train_policy"


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
    if config.grpo.on_policy:
        hint = f"write train.sync_weight_interval = {bound + 1}, or {_POLICY}.on_policy = false"
    related = (f"{_POLICY}.allowed_outdated_steps", f"{_POLICY}.on_policy")
    return [Problem("train.sync_weight_interval", message, interval, hint, related=related)]


def stragglers_are_bounded(config: Config) -> list[Problem]:
    """Dropping what is late needs to know what late is."""
    controller = config.controller
    if controller.on_stale == "drop" and controller.straggler_timeout is None:
        message = "needs the time after which a group is late (controller.straggler_timeout)"
        hint = "write controller.straggler_timeout = 60.0, in seconds"
        return [
            Problem("controller.on_stale", message, "drop", hint, related=("controller.straggler_timeout",))
        ]
    if controller.on_stale == "wait" and controller.straggler_timeout is not None:
        message = 'has no effect while controller.on_stale = "wait"'
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
        message = f"{launcher.restart_backoff_max} s is less than launcher.restart_backoff = "
        message += f"{launcher.restart_backoff} s"
        hint = f"write {key} = {launcher.restart_backoff} or more"
        related = ("launcher.restart_backoff",)
        problems.append(Problem(key, message, launcher.restart_backoff_max, hint, related=related))
    return problems


TIMING_RULES = (on_policy_agrees, interval_fits_staleness, stragglers_are_bounded, timeouts_are_ordered)
