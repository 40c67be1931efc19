"""Rules of `[[teacher]]`: what each names, which keys go with it, and whether its tokens are those of the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from schema.config.model_facts import BrokenModelError, FindFile, local_file, read_facts
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.model import directory_problems
from schema.config.rules.rows import Each, Refusal, Row, Rule
from schema.config.sections.teacher import TeacherConfig
from schema.config.vocabulary import difference, vocabulary_of
from schema.util.proxies import is_loopback

_TEMPERATURE = "train.train_policy.temperature"


def _numbered(config: Config) -> Iterator[tuple[str, TeacherConfig]]:
    for number, teacher in enumerate(config.teacher):
        yield f"teacher[{number}]", teacher


def teachers_are_named_once(config: Config) -> Iterator[Problem]:
    """Metrics and messages call a teacher by its name."""
    known = Counter(teacher.name for teacher in config.teacher)
    for key, teacher in _numbered(config):
        if known[teacher.name] > 1:
            message = f'{known[teacher.name]} teachers are called "{teacher.name}"'
            yield Problem(f"{key}.name", message, teacher.name, "give each a name of its own")


def teachers_are_somewhere(config: Config) -> Iterator[Problem]:
    """A teacher is a local model or a server."""
    for key, teacher in _numbered(config):
        if (teacher.model is None) == (teacher.url is None):
            message = (
                "neither model nor url says where it is" if teacher.model is None else "both model and url"
            )
            hint = f'write {key}.model = "path or name", or {key}.url = "http://host:8000"'
            yield Problem(key, message, None, hint, related=(f"{key}.model", f"{key}.url"))
        if teacher.model is not None:
            yield from directory_problems(f"{key}.model", teacher.model, "model", ("config.json",))


def temperature_is_that_of_the_teacher(config: Config) -> Iterator[Problem]:
    """A server returns log-probs at temperature 1; a local model's logits are divided like the policy's."""
    if not config.is_grpo or config.sampling_temperature == 1.0:
        return
    for key, teacher in _numbered(config):
        if teacher.url is not None:
            message = (
                f"a server's log-probs are of temperature 1, and samples are drawn at "
                f"{config.sampling_temperature}: the two distributions could never agree"
            )
            hint = f"write {_TEMPERATURE} = 1.0, or name a local model"
            yield Problem(f"{key}.url", message, teacher.url, hint, related=(_TEMPERATURE,))


def tokens_are_those_of_the_policy(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """A local teacher reads the policy's token ids: each must mean the same to it. Where both are on this machine."""
    own = vocabulary_of(*config.policy.tokenizer, find) if config.local_teachers else None
    for key, teacher in _numbered(config):
        if teacher.model is None:
            continue
        yield from _sizes(config, f"{key}.model", teacher, find)
        theirs = vocabulary_of(teacher.model, None, find) if own else None
        if own and theirs and (differs := difference(own, theirs, padded=True)):
            message = f"another tokenizer: {differs}"
            hint = "choose a teacher of the policy's family, whose tokenizer is the same"
            related = ("policy.model_name_or_path",)
            yield Problem(f"{key}.model", message, teacher.model, hint, related=related)


def _sizes(config: Config, key: str, teacher: TeacherConfig, find: FindFile) -> Iterator[Problem]:
    """Numbers of embeddings: a larger one is padding, which only matters over the whole vocabulary."""
    policy = config.policy
    try:
        mine = read_facts(policy.model_name_or_path, policy.model_revision, policy.override_config, find)
        facts = read_facts(str(teacher.model), None, {}, find)
    except BrokenModelError:
        return  # who loads it says what is wrong
    ours, theirs = (None if one is None else one.vocabulary for one in (mine, facts))
    whole = teacher.loss in ("reverse_kl_full", "top_k_jsd")
    if ours is None or theirs is None or ours == theirs or (theirs > ours and not whole):
        return
    message = f"{teacher.model} has {theirs} tokens, and the policy {ours}: it is of another vocabulary"
    hint = "choose a teacher of the policy's vocabulary"
    if theirs > ours:
        message = f'{teacher.model} has {theirs} tokens, and the policy {ours}: "{teacher.loss}" compares all of them'
        hint = 'write loss = "reverse_kl_advantage", which looks at the sampled tokens, or choose another teacher'
    yield Problem(key, message, teacher.model, hint, related=("policy.model_name_or_path",))


def keys_travel_encrypted(config: Config) -> Iterator[Problem]:
    """Warning: what is sent to an http address can be read on its way."""
    for key, teacher in _numbered(config):
        parts = urlsplit(teacher.url or "")
        if teacher.key_variable and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            message = f"the API key of {teacher.key_variable} is sent unencrypted, to whatever listens there"
            yield Problem(f"{key}.url", message, teacher.url, "write https://")


Teacher = Row[TeacherConfig]
TEACHER_RULES: tuple[Rule, ...] = (
    teachers_are_named_once,
    teachers_are_somewhere,
    Each(
        _numbered,
        Teacher(("served_model", "key_variable", "timeout"), lambda teacher: teacher.is_local,
            "{} has no effect: it belongs to url, and this teacher has model", related=(".model",)),
        Teacher(("offload", "mini_batch", "max_token_len_per_mini_batch"), lambda teacher: not teacher.is_local,
            "{} has no effect: it belongs to model, and this teacher has url", related=(".url",)),
        Teacher(("top_k", "beta"), lambda teacher: teacher.loss != "top_k_jsd", "{} has no effect: {.loss=}",
            'write {.loss!} = "top_k_jsd", or leave it out'),
        Teacher("loss", lambda teacher: teacher.url is not None and teacher.loss == "reverse_kl_full",
            "{} needs the whole distribution, which no server returns",
            'write {.loss!} = "top_k_jsd" or "reverse_kl_k2", or name a local model', (".url",)),
    ),
    temperature_is_that_of_the_teacher,
    Refusal("rollout.sampling_config.sampling_correction",
        lambda c: c.is_grpo and bool(c.teacher) and c.rollout.sampling_config.reshapes
        and c.rollout.sampling_config.sampling_correction == "exact",
        "{} computes log-probs under filters and penalties, and teachers have none: the two distributions could "
        "never agree",
        'leave filters and penalties out, or write {.sampling_correction!} = "raw"',
        ("rollout.sampling_config", "teacher")),
    tokens_are_those_of_the_policy,
)  # fmt: skip
TEACHER_WARNINGS = (keys_travel_encrypted,)
