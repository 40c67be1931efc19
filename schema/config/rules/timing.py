"""Rules of time: how old weights may be, how long is waited, and which waits rule out `train.deterministic`.

What is promised of a deterministic run stands in docs/algorithms.md under "The same bits".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from schema.config.backends import BACKENDS
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Each, Refusal, Row, Rule, refused, section
from schema.config.sections.controller import ControllerConfig
from schema.config.sections.train_policy import GrpoConfig

_POLICY = "train.train_policy"


def interval_fits_staleness(config: Config) -> Iterator[Problem]:
    """Between two publications k steps pass: with S < k - 1 no group could be leased for the last of them."""
    if not config.is_grpo or config.staleness_bound >= config.train.sync_weight_interval - 1:
        return
    least, bound = config.train.sync_weight_interval - 1, config.staleness_bound
    says = f"weights published every {{}} steps need a staleness bound of at least {least}, but it is {bound}"
    hint = f"write {_POLICY}.allowed_outdated_steps = {least} or {{!}} = {bound + 1}"
    if config.grpo.on_policy:
        hint = f"write {{!}} = {bound + 1}, or {_POLICY}.on_policy = false"
    related = (f"{_POLICY}.allowed_outdated_steps", f"{_POLICY}.on_policy")
    yield refused(config, "train.sync_weight_interval", f"{says}: training would wait for ever", hint, related)


def _chance(key: str, lets_in: Callable[[Config], bool], how: str, value: str) -> Refusal:
    """Warning: a run that asks for the same bits and cannot have them. value: of `key`, where chance stays out."""
    says = f"true does not reach the same bits here: {how}; ledger and counters still agree"
    when = lambda c: c.train.deterministic and (c.is_grpo or key == "train.compile") and lets_in(c)  # noqa: E731
    return Refusal("train.deterministic", when, says, f"write {key} = {value}")


Controller = Row[ControllerConfig]
TIMING_RULES: tuple[Rule, ...] = (
    Each(
        section(_POLICY, lambda c: c.grpo if c.is_grpo else None),
        Row[GrpoConfig]("on_policy",
            lambda p: p.on_policy and p.allowed_outdated_steps != 0
            and "allowed_outdated_steps" in p.model_fields_set,
            "on_policy = true allows no outdated steps, but allowed_outdated_steps = {.allowed_outdated_steps}",
            "leave one of the two out", (".allowed_outdated_steps",)),
    ),
    interval_fits_staleness,
    Each(
        section("controller", lambda c: c.controller),
        Controller("on_stale", lambda keys: keys.on_stale == "drop" and keys.straggler_timeout is None,
            "needs the time after which a group is late ({.straggler_timeout!})",
            "write {.straggler_timeout!} = 60.0, in seconds", (".straggler_timeout",)),
        Controller("straggler_timeout", lambda keys: keys.on_stale == "wait" and keys.straggler_timeout is not None,
            "has no effect while {.on_stale=}", 'write {.on_stale!} = "drop", or leave it out'),
        Controller("heartbeat_timeout", lambda keys: keys.heartbeat_timeout <= keys.heartbeat_interval,
            "{} s is not longer than {.heartbeat_interval=} s",
            lambda keys: f"write {{.heartbeat_timeout!}} = {keys.heartbeat_interval * 5} or more"),
        Controller("lease_timeout", lambda keys: keys.lease_timeout <= keys.heartbeat_interval,
            "{} s is not longer than {.heartbeat_interval=} s",
            lambda keys: f"write {{.lease_timeout!}} = {keys.heartbeat_interval * 5} or more"),
    ),
    Refusal("launcher.restart_backoff_max", lambda c: c.launcher.restart_backoff_max < c.launcher.restart_backoff,
        "{} s is less than {.restart_backoff=} s", "write {.restart_backoff_max!} = {.restart_backoff} or more"),
)  # fmt: skip
TIMING_WARNINGS: tuple[Rule, ...] = (
    _chance("train.compile", lambda c: c.train.compile,
        "{train.compile=} makes code for the lengths that it meets first", "false"),
    _chance("rollout.backend", lambda c: not c.rollout.engine.repeats,
        "{rollout.backend=} batches by arrival times, and the last bits of log-probs follow",
        toml_value(next(name for name, engine in BACKENDS.items() if engine.repeats))),
    _chance(f"{_POLICY}.allowed_outdated_steps", lambda c: c.staleness_bound > 0,
        "with {train.train_policy.allowed_outdated_steps=} the version that a sample is made by is a matter of speed",
        "0"),
    _chance("controller.oversample", lambda c: c.controller.oversample > 1.0,
        "with {controller.oversample=} the fastest groups are trained", "1.0"),
    _chance("controller.on_stale", lambda c: c.controller.on_stale == "drop",
        "{controller.on_stale=} drops groups by the clock", '"wait"'),
)  # fmt: skip
