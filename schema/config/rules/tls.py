"""Rules of encryption: files that belong together are both named, and what is encrypted can act.

What stands in the files is looked at on the machine that runs the job (`launcher.preflight.checks`), not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Each, Refusal, Row, Rule
from schema.config.sections.controller import ControllerConfig
from schema.config.sections.redis import RedisConfig
from schema.util.proxies import is_loopback


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
    if not config.redis.url.startswith("rediss://"):
        return
    query = parse_qs(urlsplit(config.redis.url).query)
    off = [
        f"{name}={query[name][0]}"
        for name, harmless in (("ssl_cert_reqs", "required"), ("ssl_check_hostname", "true"))
        if query.get(name, [harmless])[0].lower() != harmless
    ]
    message = (
        f"{' and '.join(off)} in the address: any server at that address gets the password and every sample"
    )
    hint = "take it out of the address and name the server's authority with redis.tls_ca"
    if off:
        yield Problem("redis.url", message, None, hint)


def redis_is_not_overheard(config: Config) -> Iterator[Problem]:
    """Warning: a server on another machine that proves nothing, and no encryption."""
    url = config.redis.url
    try:
        host = (urlsplit(url).hostname or "") if url.startswith("redis://") else ""
    except ValueError:
        return  # `redis_address_is_one` says so
    if not host or is_loopback(host):
        return
    message = (
        f"without TLS the password and every sample go in the clear to whatever listens at {host}, and whatever "
        "answers there decides the state of the job"
    )
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
