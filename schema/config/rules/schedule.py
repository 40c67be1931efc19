"""Rules of optimizers and their schedules, the policy's in `[train]` and the critic's in `[critic]`."""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.sections.optimizer import OptimizerKeys

_STEPS = "train.max_num_steps"


def _optimizers(config: Config) -> Iterator[tuple[str, OptimizerKeys]]:
    yield "train", config.train
    if config.critic.enable and config.is_grpo:
        yield "critic", config.critic


def _decays(keys: OptimizerKeys) -> bool:
    return keys.optm_decay_type not in (None, "none")


def warmup_is_a_share_or_steps(config: Config) -> list[Problem]:
    """A float is a share of all steps, and shares add up to at most all of them."""
    return [problem for section, keys in _optimizers(config) for problem in _warmup(section, keys)]


def _warmup(section: str, keys: OptimizerKeys) -> list[Problem]:
    key, warmup, decay = f"{section}.optm_warmup_steps", keys.optm_warmup_steps, keys.optm_decay_ratio or 0.0
    if not isinstance(warmup, float):
        return []
    if warmup > 1.0:
        hint = (
            f"write {key} = {int(warmup)} for steps" if warmup.is_integer() else "for steps write an integer"
        )
        return [Problem(key, f"a float is a share of all steps, at most 1.0, got {warmup}", warmup, hint)]
    if warmup + decay > 1.0:
        ratio = f"{section}.optm_decay_ratio"
        message = f"decay ({decay}) and {key} = {warmup} together are more than all steps"
        hint = f"write {ratio} = {int((1.0 - warmup) * 100) / 100}, or less of both"
        return [Problem(ratio, message, decay, hint, related=(key,))]
    return []


def decay_is_complete(config: Config) -> list[Problem]:
    """A decay has a shape and a length; without both, keys of the decay would do nothing."""
    return [problem for section, keys in _optimizers(config) for problem in _decay(section, keys)]


def _decay(section: str, keys: OptimizerKeys) -> list[Problem]:
    problems, shape = [], keys.optm_decay_type
    ratio_key, steps_key = f"{section}.optm_decay_ratio", f"{section}.optm_decay_steps"
    type_key, factor_key = f"{section}.optm_decay_type", f"{section}.optm_min_lr_factor"
    ratio, steps, related = keys.optm_decay_ratio or 0.0, keys.optm_decay_steps, (type_key, ratio_key)
    lengths = [(key, value) for key, value in ((ratio_key, ratio), (steps_key, steps)) if value]
    if len(lengths) == 2:
        message = f"{steps} contradicts {ratio_key} = {ratio}: both are the length of the decay"
        hint = f"leave it out, or write {ratio_key} = 0.0"
        problems.append(Problem(steps_key, message, steps, hint, related=(ratio_key,)))
    if shape == "inverse_sqrt":
        for key, value in lengths:
            message = (
                f'has no effect with {type_key} = "inverse_sqrt", which decays from the end of warm-up on'
            )
            problems.append(Problem(key, message, value, "leave it out", related=(type_key,)))
    elif _decays(keys) and not lengths:
        message = f"a {shape} decay needs the share of steps over which it happens ({ratio_key})"
        hint = f"write {ratio_key} = 0.2, or another share in (0.0, 1.0]"
        problems.append(Problem(type_key, message, shape, hint, related=related))
    if not _decays(keys):
        for key, value in lengths:
            hint = f'write {type_key} = "linear", "cosine", "sqrt" or "wsd", or leave it out'
            message = f"has no effect without a decay ({type_key})"
            problems.append(Problem(key, message, value, hint, related=related))
        if keys.optm_min_lr_factor:
            message, hint = (
                f"has no effect without a decay ({type_key})",
                "leave it out, or write a decay too",
            )
            problems.append(Problem(factor_key, message, keys.optm_min_lr_factor, hint, related=related))
    return problems


def decay_fits_the_run(config: Config) -> list[Problem]:
    """Where the length of the run is stated, the steps of warm-up and decay are not more."""
    problems, total = [], config.train.max_num_steps
    for section, keys in _optimizers(config):
        warmup, steps = keys.optm_warmup_steps, keys.optm_decay_steps
        if total is None or steps is None or isinstance(warmup, float) or warmup + steps <= total:
            continue
        key, warmup_key = f"{section}.optm_decay_steps", f"{section}.optm_warmup_steps"
        message = f"{steps} and {warmup_key} = {warmup} together are more than {_STEPS} = {total}"
        hint = f"write {_STEPS} = {warmup + steps}, or fewer steps of warm-up and decay"
        if warmup < total:
            hint = f"write {key} = {total - warmup}, or {_STEPS} = {warmup + steps}"
        problems.append(Problem(key, message, steps, hint, related=(warmup_key, _STEPS)))
    return problems


def options_belong_to_their_shape(config: Config) -> list[Problem]:
    """Options of one schedule that another does not have."""
    return [problem for section, keys in _optimizers(config) for problem in _options(section, keys)]


def _options(section: str, keys: OptimizerKeys) -> list[Problem]:
    problems, type_key = [], f"{section}.optm_decay_type"
    shape = "none" if keys.optm_decay_type is None else keys.optm_decay_type
    length = (
        "" if keys.optm_decay_ratio or keys.optm_decay_steps else f" and {section}.optm_decay_ratio = 0.2"
    )
    end = keys.optm_wsd_decay_type
    if end != "cosine" and shape != "wsd":
        key, hint = f"{section}.optm_wsd_decay_type", f'leave it out, or write {type_key} = "wsd"{length}'
        message = f'"{end}" is the last part of a wsd schedule, but {type_key} = "{shape}"'
        problems.append(Problem(key, message, end, hint, related=(type_key,)))
    waves = keys.optm_num_cycles
    if waves != 0.5 and shape != "cosine" and not (shape == "wsd" and end == "cosine"):
        key, hint = f"{section}.optm_num_cycles", f'leave it out, or write {type_key} = "cosine"{length}'
        message = f'{waves} counts the waves of a cosine, but {type_key} = "{shape}"'
        problems.append(Problem(key, message, waves, hint, related=(type_key,)))
    return problems


def weight_decay_ramp_agrees(config: Config) -> list[Problem]:
    """A ramp has two ends; a start without a ramp, or a ramp from a value to itself, would do nothing."""
    problems = []
    for section, keys in _optimizers(config):
        key, ramp_key = f"{section}.optm_weight_decay_start", f"{section}.optm_weight_decay_ramp"
        end_key, start = f"{section}.optm_weight_decay", keys.optm_weight_decay_start
        ramp, end = keys.optm_weight_decay_ramp, keys.optm_weight_decay
        if ramp == "constant" and start is not None:
            message = f'{start} is where a ramp starts, but {ramp_key} = "constant"'
            hint = f'write {ramp_key} = "linear" or "cosine", or leave it out'
            problems.append(Problem(key, message, start, hint, related=(ramp_key,)))
        elif ramp != "constant" and (start or 0.0) == end:
            message = f'"{ramp}" goes from {key} = {start or 0.0} to {end_key} = {end}, which is no ramp'
            hint = f'write {ramp_key} = "constant", or another start'
            problems.append(Problem(ramp_key, message, ramp, hint, related=(key, end_key)))
    return problems


def one_optimizer(config: Config) -> list[Problem]:
    """Lists are for several optimizers; there is one."""
    problems = []
    for section, keys in _optimizers(config):
        for name, value in (("optm_lr", keys.optm_lr), ("optm_impl", keys.optm_impl)):
            if isinstance(value, list) and len(value) != 1:
                message = f"a list of {len(value)} is for {len(value)} optimizers, and there is one"
                hint = "write one value"
                problems.append(Problem(f"{section}.{name}", message, value, hint))
    return problems


def warmup_ends_in_time(config: Config) -> list[Problem]:
    """Warning: a run that is shorter than its warm-up never reaches the learning rate that is written."""
    warnings, total = [], config.train.max_num_steps
    for section, keys in _optimizers(config):
        key, warmup = f"{section}.optm_warmup_steps", keys.optm_warmup_steps
        if total is not None and not isinstance(warmup, float) and warmup >= total:
            message = (
                f"{warmup} steps of warm-up do not end within {_STEPS} = {total}: the peak is never reached"
            )
            hint = f"write {key} = {total // 10}, or a share of all steps as a float"
            warnings.append(Problem(key, message, warmup, hint, related=(_STEPS,)))
    return warnings


SCHEDULE_RULES = (
    warmup_is_a_share_or_steps,
    decay_is_complete,
    decay_fits_the_run,
    options_belong_to_their_shape,
    weight_decay_ramp_agrees,
    one_optimizer,
)
SCHEDULE_WARNINGS = (warmup_ends_in_time,)
