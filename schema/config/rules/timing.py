"""Rules of time: how old weights may be, how long is waited, and which waits rule out `train.deterministic`.

What is promised of a deterministic run stands in docs/algorithms.md under "The same bits".
"""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.backends import BACKENDS
from schema.config.problem import Problem
from schema.config.root import Config

_POLICY = "train.train_policy"


def on_policy_agrees(config: Config) -> Iterator[Problem]:
    """`on_policy = true` means a bound of 0; a written bound of another value contradicts it."""
    if not config.is_grpo:
        return
    policy = config.grpo
    written = "allowed_outdated_steps" in policy.model_fields_set
    if not policy.on_policy or not written or policy.allowed_outdated_steps == 0:
        return
    bound = policy.allowed_outdated_steps
    message = f"on_policy = true allows no outdated steps, but allowed_outdated_steps = {bound}"
    related = (f"{_POLICY}.allowed_outdated_steps",)
    yield Problem(f"{_POLICY}.on_policy", message, True, "leave one of the two out", related=related)


def interval_fits_staleness(config: Config) -> Iterator[Problem]:
    """Between two publications k steps pass: with S < k - 1 no group could be leased for the last of them."""
    if not config.is_grpo or config.staleness_bound >= config.train.sync_weight_interval - 1:
        return
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
    yield Problem("train.sync_weight_interval", message, interval, hint, related=related)


def stragglers_are_bounded(config: Config) -> Iterator[Problem]:
    """Dropping what is late needs to know what late is."""
    controller = config.controller
    if controller.on_stale == "drop" and controller.straggler_timeout is None:
        message = "needs the time after which a group is late (controller.straggler_timeout)"
        hint = "write controller.straggler_timeout = 60.0, in seconds"
        yield Problem("controller.on_stale", message, "drop", hint, related=("controller.straggler_timeout",))
    if controller.on_stale == "wait" and controller.straggler_timeout is not None:
        message = 'has no effect while controller.on_stale = "wait"'
        hint = 'write controller.on_stale = "drop", or leave it out'
        key, value = "controller.straggler_timeout", controller.straggler_timeout
        yield Problem(key, message, value, hint, related=("controller.on_stale",))


def timeouts_are_ordered(config: Config) -> Iterator[Problem]:
    """What is renewed by heartbeats must outlive the time between two of them."""
    controller, launcher = config.controller, config.launcher
    beat = controller.heartbeat_interval
    for name, value in (
        ("heartbeat_timeout", controller.heartbeat_timeout),
        ("lease_timeout", controller.lease_timeout),
    ):
        if value <= beat:
            message = f"{value} s is not longer than controller.heartbeat_interval = {beat} s"
            hint = f"write controller.{name} = {beat * 5} or more"
            related = ("controller.heartbeat_interval",)
            yield Problem(f"controller.{name}", message, value, hint, related=related)
    if launcher.restart_backoff_max < launcher.restart_backoff:
        key = "launcher.restart_backoff_max"
        message = f"{launcher.restart_backoff_max} s is less than launcher.restart_backoff = "
        message += f"{launcher.restart_backoff} s"
        hint = f"write {key} = {launcher.restart_backoff} or more"
        related = ("launcher.restart_backoff",)
        yield Problem(key, message, launcher.restart_backoff_max, hint, related=related)


_KEY = "train.deterministic"
_COUNTS = "ledger and counters still agree"


def the_same_bits_are_possible(config: Config) -> Iterator[Problem]:
    """Warning: a run that asks for the same bits and cannot have them."""
    for key, why, hint in _obstacles(config) if config.train.deterministic else ():
        message = f"true does not reach the same bits here: {why}; {_COUNTS}"
        yield Problem(_KEY, message, True, hint, related=(key,))


def _obstacles(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key, why, remedy) of everything that lets chance in."""
    if config.train.compile:
        key = "train.compile"
        yield key, f"{key} = true makes code for the lengths that it meets first", f"write {key} = false"
    if not config.is_grpo:
        return
    if not config.rollout.engine.repeats:
        key = "rollout.backend"
        why = f'{key} = "{config.rollout.backend}" batches by arrival times, and the last bits of log-probs follow'
        repeating = next(name for name, engine in BACKENDS.items() if engine.repeats)
        yield key, why, f'write {key} = "{repeating}"'
    if config.staleness_bound > 0:
        key, bound = "train.train_policy.allowed_outdated_steps", config.staleness_bound
        why = f"with {key} = {bound} the version that a sample is made by is a matter of speed"
        yield key, why, f"write {key} = 0"
    if config.controller.oversample > 1.0:
        key = "controller.oversample"
        yield (
            key,
            f"with {key} = {config.controller.oversample} the fastest groups are trained",
            f"write {key} = 1.0",
        )
    if config.controller.on_stale == "drop":
        key = "controller.on_stale"
        yield key, f'{key} = "drop" drops groups by the clock', f'write {key} = "wait"'


TIMING_RULES = (on_policy_agrees, interval_fits_staleness, stragglers_are_bounded, timeouts_are_ordered)
TIMING_WARNINGS = (the_same_bits_are_possible,)
