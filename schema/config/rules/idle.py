"""Keys that are written and cannot act in this job: refused where they belong to another kind of job, shown as a
warning where a switch of the same job turns them off.

    section or key ─▶ when it acts, and what is missing when it does not

"Written" means: other than the default. So a resolved configuration, in which every key is written, is judged as
the file that it came from. Keys of parts that are not built stand in `availability`, and are refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from schema.config.base import Section
from schema.config.problem import Problem
from schema.config.root import Config

_POLICY = "train.train_policy"
_OVERLONG = f"{_POLICY}.overlong_reward"


@dataclass(frozen=True)
class Idle:
    """One row of the tables.

    key: a key, or a section for all keys in it except `but`. acts: whether it means anything in this job.
    why: what there is not. hint: what to do. but: keys and sections of it, by their path in it.
    """

    key: str
    acts: Callable[[Config], bool]
    why: str
    hint: str = "leave it out"
    but: tuple[str, ...] = ()


def _is_grpo(config: Config) -> bool:
    return config.is_grpo


def _generates(config: Config) -> bool:
    return config.generates


def _validates(config: Config) -> bool:
    return config.validation.enable


def _samples(config: Config) -> bool:
    """Whether a validation set draws its answers at a temperature above 0."""
    return any(keys.temperature > 0.0 for keys in config.validation.sets.values())


def _has_class(config: Config) -> bool:
    """Whether rows come from a class of the user's."""
    datasets = (config.train.train_policy.dataset, config.validation.dataset, config.evaluation.dataset)
    return any(part.custom_class for dataset in datasets for _, part in dataset.parts)


_NO_ROLLOUTS = "supervised training generates nothing"
_GENERATE = "leave it out, or write validation.generate = true"
SFT_READS = ("multi_turn_config.custom_chat_template_path", "sampling_config.stop", "sampling_config.stop_token_ids")
"""Keys of [rollout] that supervised training reads: how conversations are rendered, and where answers end."""

OF_ANOTHER_JOB = (
    Idle("rollout", _generates, f"{_NO_ROLLOUTS}: it has no rollout replicas", _GENERATE, SFT_READS),
    Idle("validation", _generates, f"{_NO_ROLLOUTS}: validation is the loss on held-out conversations", _GENERATE,
        ("enable", "freq", "before", "batch_size", "dataset", "generate")),
    Idle("validation.generate", lambda c: not c.is_grpo, "validation of reinforcement generates anyway"),
    Idle("validation.reference_column_name", lambda c: not c.is_grpo,
        f"{_POLICY}.response_column_name names it in reinforcement"),
    Idle("reward", _generates, "supervised training has no rewards", _GENERATE, ("prompt_forms", "environment")),
    Idle("reward.environment", lambda c: c.generates or _has_class(c), "supervised training has no rewards"),
    *(
        Idle(f"rollout.{name}", lambda c: c.is_grpo or not c.generates,
            "supervised training draws no samples to learn from: [validation] has its own")
        for name in ("n_generation", "sampling_config.temperature")
    ),
    Idle("critic", _is_grpo, "supervised training has no critic", but=("enable",)),
    Idle("teacher", _is_grpo, "supervised training has no samples of the policy, which a teacher judges"),
    Idle("weight_sync", _generates, "supervised training sends its weights nowhere", _GENERATE),
    Idle("train.sync_weight_interval", _is_grpo, "supervised training sends its weights nowhere"),
    *(
        Idle(f"logging.{name}", _generates, _NO_ROLLOUTS, _GENERATE)
        for name in ("samples_dir", "log_validation_samples")
    ),
    Idle("logging.log_training_samples", _is_grpo, _NO_ROLLOUTS),
    Idle("train.local_dataset", lambda c: c.is_grpo or c.train.local_dataset is not False,
        "supervised training has no leases: its trainers read the rows"),
    Idle("profiler.record_batches", _is_grpo, "supervised training reads its batches from the data each time"),
    *(
        Idle(f"kubernetes.{name}", _generates, f"{_NO_ROLLOUTS}: it has no rollout pods")
        for name in ("rollout_selector", "rollout_tolerations", "topology_key")
    ),
    *(
        Idle(f"controller.{name}", _is_grpo, "supervised training has no groups of samples")
        for name in ("oversample", "on_stale", "straggler_timeout")
    ),
    *(
        Idle(f"controller.{name}", _generates, "supervised training has no groups of samples")
        for name in ("lease_timeout", "max_attempts")
    ),
)  # fmt: skip
"""Refused: the key belongs to a job of the other type."""

SWITCHED_OFF = (
    Idle("kubernetes.scaler", lambda c: c.autoscale.enable, "the number of rollout replicas does not change",
        "write autoscale.enable = true to use it"),
    *(
        Idle(f"kubernetes.{name}", lambda c: not c.kubernetes.claim, "kubernetes.claim names a claim that is there",
            "leave one of the two out")
        for name in ("storage_class", "storage_size")
    ),
    Idle("kubernetes.redis_image", lambda c: not c.redis.url, "redis.url names a server that is there",
        "leave one of the two out"),
    Idle("validation", _validates, "validation is off", "write validation.enable = true to use it", ("enable",)),
    *(
        Idle(f"{_OVERLONG}.{name}", lambda c: not c.is_grpo or c.grpo.overlong_reward.enable_overlong_penalty,
            "long answers are not penalised", f"write {_OVERLONG}.enable_overlong_penalty = true to use it")
        for name in ("buffer_length", "penalty_factor")
    ),
    *(
        Idle(f"train.ckpt.{name}", lambda c: c.train.ckpt.enable_checkpoint, "checkpoints are off",
            "write train.ckpt.enable_checkpoint = true to use it")
        for name in ("save_freq", "save_freq_in_epoch")
    ),
    Idle("critic", lambda c: c.critic.enable or not c.is_grpo, "no critic is trained",
        "write critic.enable = true to use it", ("enable",)),
    Idle("critic.mini_batch", lambda c: c.critic.max_token_len_per_mini_batch is None,
        "critic.max_token_len_per_mini_batch sizes micro-batches by tokens", "leave one of the two out"),
    Idle("critic.optm_warmup_start_factor", lambda c: bool(c.critic.optm_warmup_steps) or not c.critic.enable,
        "critic.optm_warmup_steps = 0: nothing is warmed up"),
    Idle("train.ckpt.load_contents", lambda c: bool(c.train.resume),
        "train.resume = false names no checkpoint, and a run that continues itself reads all"),
    Idle(f"{_POLICY}.mini_batch", lambda c: c.train.train_policy.max_token_len_per_mini_batch is None,
        f"{_POLICY}.max_token_len_per_mini_batch sizes micro-batches by tokens", "leave one of the two out"),
    Idle("train.optm_warmup_start_factor", lambda c: bool(c.train.optm_warmup_steps),
        "train.optm_warmup_steps = 0: nothing is warmed up"),
    Idle(f"{_POLICY}.outdated_rollout_fetch_batch_size", lambda c: not c.is_grpo or c.staleness_bound > 0,
        "nothing is generated with outdated weights when no step may train on them"),
    *(
        Idle(f"validation.{name}",
            lambda c: not c.generates or not c.validation.enable or _samples(c),
            "validation.temperature = 0.0 takes the likeliest token",
            "write validation.temperature too, or leave it out")
        for name in ("top_p", "top_k")
    ),
    Idle("rollout.sampling_config.sampling_correction",
        lambda c: not c.is_grpo or c.rollout.sampling_config.reshapes,
        "tokens are drawn from the plain softmax, so there is nothing to correct"),
    *(
        Idle(f"launcher.{name}", lambda c: c.launcher.max_restarts > 0, "nothing is started again")
        for name in ("restart_backoff", "restart_backoff_max")
    ),
    Idle("weight_sync.anchor_interval", lambda c: not c.generates or c.weight_sync.encoding == "delta",
        'every publication is full: weight_sync.encoding = "full"',
        'write weight_sync.encoding = "delta", or leave it out'),
    Idle("weight_sync.collective_timeout", lambda c: not c.generates or c.weight_sync.transport == "collective",
        'weights travel through the store: weight_sync.transport = "store"',
        'write weight_sync.transport = "collective", or leave it out'),
    Idle("profiler.sub_profiler_config", lambda c: c.profiler.enable_profiler,
        "no profile is taken: profiler.enable_profiler = false",
        "write profiler.enable_profiler = true to use it", ("do_profile",)),
    Idle("profiler.sub_profiler_config.wait_steps",
        lambda c: c.profiler.sub_profiler_config.do_profile or not c.profiler.enable_profiler,
        "no profile begins with the trainer: profiler.sub_profiler_config.do_profile = false",
        "write profiler.sub_profiler_config.do_profile = true to use it"),
    *(
        Idle(f"logging.log_{kind}_samples", lambda c: any(name != "console" for name in c.logging.logger),
            "the console has no tables", 'write logging.logger = ["console", "tensorboard"], or another tracker')
        for kind in ("validation", "training")
    ),
    Idle("logging.log_validation_samples", _validates, "validation is off",
        "write validation.enable = true to use it"),
    Idle("logging.log_training_samples", lambda c: not c.validation.only, "nothing is trained"),
    Idle("custom", lambda c: c.generates or _has_class(c), "supervised training runs no functions of yours"),
)  # fmt: skip
"""Shown as a warning: a switch elsewhere in the job turns the key off."""


_OF_EVERY_JOB = ("output_dir", "timestamp", "seed")
BESIDE_AN_EVALUATION = tuple(
    Idle(name, lambda _: False, "an evaluation scores a file and runs nothing else", but=but)
    for name, but in {
        "train": _OF_EVERY_JOB,
        **dict.fromkeys(("policy", "teacher", "rollout", "validation", "controller", "redis", "weight_sync"), ()),
        **dict.fromkeys(("placement", "launcher", "logging", "profiler"), ()),
        "reward": ("timeout", "num_workers", "retries", "environment"),
    }.items()
)
"""Shown as a warning in an evaluation, which looks at none of it."""


def written(section: Section, *names: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys that are not at their default, with their values."""
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].get_default(call_default_factory=True):
            yield name, value


def keys_belong_to_this_job(config: Config) -> list[Problem]:
    """Keys of the other type of job."""
    return [problem for row in OF_ANOTHER_JOB for problem in _problems(config, row)]


def keys_are_switched_on(config: Config) -> list[Problem]:
    """Warning: keys that something else turns off."""
    return [problem for row in SWITCHED_OFF for problem in _problems(config, row)]


def keys_are_of_the_evaluation(config: Config) -> list[Problem]:
    """Warning: keys of training in a job that only scores."""
    return [problem for row in BESIDE_AN_EVALUATION for problem in _problems(config, row)]


def _problems(config: Config, row: Idle) -> list[Problem]:
    """One problem for a key; for a section one that names all keys in it."""
    if row.acts(config):
        return []
    value, default = _value(config, row.key), _value(_default(), row.key)
    if not isinstance(value, Section):
        if value == default:
            return []
        return [Problem(row.key, f"has no effect here: {row.why}", value, row.hint)]
    names = [
        name for name in _changed(value, default) if not any(f"{name}.".startswith(f"{but}.") for but in row.but)
    ]
    if not names:
        return []
    key = f"{row.key}.{names[0]}" if len(names) == 1 else row.key
    shown = "" if len(names) == 1 else f"{', '.join(names)} "
    verb = "has" if len(names) == 1 else "have"
    related = tuple(f"{row.key}.{name}" for name in names)
    return [Problem(key, f"{shown}{verb} no effect here: {row.why}", None, row.hint, related=related)]


def _changed(section: Section, default: Section, prefix: str = "") -> Iterator[str]:
    """Names, dotted below `section`, of the keys that are not at their default."""
    for name in type(section).model_fields:
        value, usual = getattr(section, name), getattr(default, name, None)
        if isinstance(value, Section) and isinstance(usual, Section):
            yield from _changed(value, usual, f"{prefix}{name}.")
        elif value != usual:
            yield f"{prefix}{name}"


def _value(config: Config, key: str) -> Any:
    """The value of a key; of a key that this type of job does not have, None."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


@cache
def _default() -> Config:
    return Config()


IDLE_RULES = (keys_belong_to_this_job,)
IDLE_WARNINGS = (keys_are_switched_on,)
