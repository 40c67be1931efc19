"""Rules of security: texts can be printed, secrets stay out, what travels is encrypted where that is asked for.

The configuration is written to files and sent to every worker. What stands in the files of encryption is looked at
on the machine that runs the job (`launcher.preflight.checks`), not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from schema.config.base import FREE_TABLES, Section
from schema.config.problem import KeyPath, Problem, format_key
from schema.config.root import Config
from schema.config.rules.rows import Each, Refusal, Row, Rule
from schema.config.secrets import SECRET_KEY, found_in
from schema.config.sections.controller import ControllerConfig
from schema.config.sections.redis import RedisConfig
from schema.util.proxies import is_loopback
from schema.util.text import CONTROL

_STOP = ("rollout", "sampling_config", "stop")
_WRITTEN_OUT = frozenset({_STOP, ("train", "train_policy", "system_prompt")})
"""Texts for the model, where line breaks and tabs have a meaning."""


def texts_are_printable(config: Config) -> Iterator[Problem]:
    """A control character in a name or path forges lines of logs and displays, and is never meant."""
    for path, text in _texts(config):
        match = CONTROL.search(text)
        if match is None or path[:3] in _WRITTEN_OUT:
            continue
        message = f"holds the control character U+{ord(match.group()):04X} at position {match.start() + 1}"
        hint = "take it out; between single quotes a backslash stays a backslash"
        yield Problem(format_key(path), message, text, hint)


def texts_are_not_blank(config: Config) -> Iterator[Problem]:
    """An empty text means "none" where a key takes one text; blanks, and an empty item of a list, mean nothing."""
    for path, text in _texts(config):
        key = format_key(path)
        if path[:3] == _STOP:
            if not text:
                message = "an empty text ends every answer before its first token"
                yield Problem(key, message, text, "leave it out")
        elif not text.strip() and path[:3] not in _WRITTEN_OUT and (text or not _is_scalar(config, path)):
            yield Problem(key, f"{text!r} is blank: it names nothing", text, "leave it out")


def _is_scalar(config: Config, path: KeyPath) -> bool:
    """Whether the text is a key's own value and not an item of a list or table."""
    value: Any = config
    for part in path[:-1]:
        value = value[part] if isinstance(part, int) else getattr(value, str(part), None)
    return isinstance(value, Section)


def _texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text of the schema's own keys; of a table its names too."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            if name not in FREE_TABLES:
                yield from _texts(getattr(value, name), (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(name, (*path, name))
            yield from _texts(item, (*path, name))


_OF_ITS_OWN = frozenset({("redis", "url")})
"""Handed to the controller by its environment, and cut everywhere else."""


def secrets_stay_out(config: Config) -> Iterator[Problem]:
    """Credentials in addresses are left out for the processes; keys of `custom` that sound secret are not."""
    for path, text in _all_texts(config.model_dump(mode="json"), ()):
        key = format_key(path)
        if path not in _OF_ITS_OWN and "://" in text and found_in(text):
            message = "holds credentials in its address: they are left out of what the processes get"
            hint = "write the address without them, and keep them in a file that you alone may read"
            yield Problem(key, message, None, hint)
        elif path[0] == "custom" and any(SECRET_KEY.search(str(part)) for part in path):
            message = "sounds like a secret, and is written to the run's directory and sent to every worker"
            hint = "put it into a variable and name that in reward.environment, or write the path of a file that "
            hint += "holds it and that you alone may read; the function opens it"
            yield Problem(key, message, None, hint)


def _all_texts(value: Any, path: KeyPath) -> list[tuple[KeyPath, str]]:
    if isinstance(value, str):
        return [(path, value)] if value else []
    if isinstance(value, dict):
        return [entry for key, item in value.items() for entry in _all_texts(item, (*path, key))]
    if isinstance(value, list):
        return [entry for i, item in enumerate(value) for entry in _all_texts(item, (*path, i))]
    return []


TEXT_RULES = (texts_are_printable, texts_are_not_blank)
TEXT_WARNINGS = (secrets_stay_out,)


# ---- encryption -------------------------------------------------------------------------------------------


def redis_address_is_one(config: Config) -> Iterator[Problem]:
    """The address of Redis can be taken apart: a host that is closed, a port that is a number."""
    try:
        _ = urlsplit(config.redis.url).port
    except ValueError:  # its text may hold a part of the password
        message = "cannot be read: its host or port is not valid (in a password, write / as %2F, # as %23, ? as %3F)"
        hint = 'write redis.url = "rediss://host:6379/0", with COSMOS_REDIS_PASSWORD in the environment'
        yield Problem("redis.url", message, None, hint)


def redis_is_verified(config: Config) -> Iterator[Problem]:
    """Warning: an encrypted connection to an unverified peer."""
    address = urlsplit(config.redis.url) if config.redis.url.startswith("rediss://") else None
    query = parse_qs(address.query) if address else {}
    off = [
        f"{name}={query[name][0]}"
        for name, harmless in (("ssl_cert_reqs", "required"), ("ssl_check_hostname", "true"))
        if query.get(name, [harmless])[0].lower() != harmless
    ]
    if off:
        message = f"{' and '.join(off)} in the address: any server at that address gets the password and every sample"
        hint = "take it out of the address and name the server's authority with redis.tls_ca"
        yield Problem("redis.url", message, None, hint)


def redis_is_not_overheard(config: Config) -> Iterator[Problem]:
    """Warning: a server on another machine that proves nothing, and no encryption."""
    url = config.redis.url
    try:
        host = (urlsplit(url).hostname or "") if url.startswith("redis://") else ""
    except ValueError:
        return  # `redis_address_is_one` says so
    if host and not is_loopback(host):
        message = f"without TLS the password and every sample go in the clear to whatever listens at {host}, and "
        message += "whatever answers there decides the state of the job"
        hint = "write rediss:// and redis.tls_ca, unless the network is trusted"
        yield Problem("redis.url", message, None, hint)


Encrypted = Row[RedisConfig | ControllerConfig]


def _encrypted(config: Config) -> Iterator[tuple[str, RedisConfig | ControllerConfig]]:
    yield "redis", config.redis
    yield "controller", config.controller


TLS_RULES: tuple[Rule, ...] = (
    redis_address_is_one,
    Refusal(("redis.tls_ca", "redis.tls_cert", "redis.tls_key"), lambda c: not c.redis.url.startswith("rediss://"),
        "has no effect: only a rediss:// address is encrypted",
        "write {.url!} with rediss://, or leave {!} out", (".url",)),
    Each(
        _encrypted,
        Encrypted("tls_cert", lambda keys: bool(keys.tls_cert) and not keys.tls_key,
            "needs {.tls_key!} as well: a certificate is of use only with its private key",
            "write {.tls_key!} too, or leave {!} out", (".tls_key",)),
        Encrypted("tls_key", lambda keys: bool(keys.tls_key) and not keys.tls_cert,
            "needs {.tls_cert!} as well: a certificate is of use only with its private key",
            "write {.tls_cert!} too, or leave {!} out", (".tls_cert",)),
    ),
    Refusal("controller.tls_ca",
        lambda c: bool(c.controller.tls_ca) and not c.controller.tls_cert and not c.controller.tls_key,
        "has no effect: without {.tls_cert!} the API is served over http",
        "write {.tls_cert!} and {.tls_key!}, or leave {!} out", (".tls_cert",)),
)  # fmt: skip
TLS_WARNINGS: tuple[Rule, ...] = (
    redis_is_verified,
    redis_is_not_overheard,
    Refusal("controller.host", lambda c: not c.controller.tls_cert and not is_loopback(c.controller.host),
        "{~} can be reached from other machines, and without TLS tokens and samples travel in the clear",
        "write {.tls_cert!}, {.tls_key!} and {.tls_ca!}, unless the network is trusted", (".tls_cert",)),
)  # fmt: skip
