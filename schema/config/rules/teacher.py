"""Rules of `[[teacher]]`: what each names, which keys go with it, and whether its tokens are those of the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from schema.config.model_facts import BrokenModelError, FindFile, local_file, read_facts
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.named import directory_problems
from schema.config.rules.rows import Each, Refusal, Row, Rule, refused
from schema.config.sections.teacher import TeacherConfig
from schema.config.vocabulary import difference, vocabulary_of
from schema.util.proxies import is_loopback

_TEMPERATURE = "train.train_policy.temperature"
_MODEL = "policy.model_name_or_path"


def _numbered(config: Config) -> Iterator[tuple[str, TeacherConfig]]:
    for number, teacher in enumerate(config.teacher):
        yield f"teacher[{number}]", teacher


def teachers_are_named_once(config: Config) -> Iterator[Problem]:
    """Metrics and messages call a teacher by its name."""
    count = Counter(teacher.name for teacher in config.teacher)
    for key, teacher in _numbered(config):
        if count[teacher.name] > 1:
            says = f"{count[teacher.name]} teachers are called {{}}"
            yield refused(config, f"{key}.name", says, "give each a name of its own")


def teachers_are_somewhere(config: Config) -> Iterator[Problem]:
    """A teacher is a local model or a server."""
    for key, teacher in _numbered(config):
        if (teacher.model is None) == (teacher.url is None):
            message = "neither model nor url says where it is" if teacher.model is None else "both model and url"
            hint = f'write {key}.model = "path or name", or {key}.url = "http://host:8000"'
            yield Problem(key, message, None, hint, related=(f"{key}.model", f"{key}.url"))
        if teacher.model is not None:
            yield from directory_problems(f"{key}.model", teacher.model, "model", ("config.json",))


def tokens_are_those_of_the_policy(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """A local teacher reads the policy's token ids: each must mean the same to it. Where both are on this machine."""
    policy_tokens = vocabulary_of(*config.policy.tokenizer, find) if config.local_teachers else None
    for key, teacher in _numbered(config):
        if teacher.model is None:
            continue
        yield from _sizes(config, f"{key}.model", teacher, find)
        teacher_tokens = vocabulary_of(teacher.model, None, find) if policy_tokens else None
        if policy_tokens and teacher_tokens and (differs := difference(policy_tokens, teacher_tokens, padded=True)):
            message = f"another tokenizer: {differs}"
            hint = "choose a teacher of the policy's family, whose tokenizer is the same"
            yield Problem(f"{key}.model", message, teacher.model, hint, related=(_MODEL,))


def _sizes(config: Config, key: str, teacher: TeacherConfig, find: FindFile) -> Iterator[Problem]:
    """Numbers of embeddings: a larger one is padding, which only matters over the whole vocabulary."""
    policy = config.policy
    try:
        read = (
            read_facts(policy.model_name_or_path, policy.model_revision, policy.override_config, find),
            read_facts(str(teacher.model), None, {}, find),
        )
    except BrokenModelError:
        return  # who loads it says what is wrong
    policy_size, teacher_size = (None if facts is None else facts.vocabulary for facts in read)
    whole = teacher.loss in ("reverse_kl_full", "top_k_jsd")
    if (
        policy_size is None
        or teacher_size is None
        or policy_size == teacher_size
        or (teacher_size > policy_size and not whole)
    ):
        return
    says, why = f"{{~}} has {teacher_size} tokens, and the policy {policy_size}: ", "it is of another vocabulary"
    hint = "choose a teacher of the policy's vocabulary"
    if teacher_size > policy_size:
        why = f'"{teacher.loss}" compares all of them'
        hint = 'write loss = "reverse_kl_advantage", which looks at the sampled tokens, or choose another teacher'
    yield refused(config, key, says + why, hint, (_MODEL,))


def _is_open(url: str) -> bool:
    """Whether what is sent to an address can be read on its way."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


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
    Each(
        lambda c: _numbered(c) if c.is_grpo and c.sampling_temperature != 1.0 else (),
        Teacher("url", lambda teacher: teacher.url is not None,
            "a server's log-probs are of temperature 1, and samples are drawn at {sampling_temperature}: the two "
            "distributions could never agree",
            f"write {_TEMPERATURE} = 1.0, or name a local model", (_TEMPERATURE,)),
    ),
    Refusal("rollout.sampling_config.sampling_correction",
        lambda c: c.is_grpo and bool(c.teacher) and c.rollout.sampling_config.reshapes
        and c.rollout.sampling_config.sampling_correction == "exact",
        "{} computes log-probs under filters and penalties, and teachers have none: the two distributions could "
        "never agree",
        'leave filters and penalties out, or write {.sampling_correction!} = "raw"',
        ("rollout.sampling_config", "teacher")),
    tokens_are_those_of_the_policy,
)  # fmt: skip
TEACHER_WARNINGS: tuple[Rule, ...] = (
    Each(
        _numbered,
        Teacher("url", lambda teacher: bool(teacher.key_variable) and _is_open(teacher.url or ""),
            "the API key of {.key_variable~} is sent unencrypted, to whatever listens there", "write https://"),
    ),
)  # fmt: skip
