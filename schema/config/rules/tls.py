"""Rules of encryption: files that belong together are both named, and what is encrypted can act.

What stands in the files is looked at on the machine that runs the job (`launcher.preflight.checks`), not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written
from schema.util.proxies import is_loopback


def redis_address_is_one(config: Config) -> Iterator[Problem]:
    """The address of Redis can be taken apart: a host that is closed, a port that is a number."""
    try:
        _ = urlsplit(config.redis.url).port
    except ValueError:  # its text may hold a part of the password
        message = "cannot be read: its host or port is not valid (in a password, write / as %2F, # as %23, ? as %3F)"
        hint = 'write redis.url = "rediss://host:6379/0", with COSMOS_REDIS_PASSWORD in the environment'
        yield Problem("redis.url", message, None, hint)


def redis_files_act(config: Config) -> Iterator[Problem]:
    """Certificates are used by rediss:// alone, a certificate only with its key."""
    redis = config.redis
    if not redis.url.startswith("rediss://"):
        for name, value in written(redis, "tls_ca", "tls_cert", "tls_key"):
            message = "has no effect: only a rediss:// address is encrypted"
            hint = f"write redis.url with rediss://, or leave redis.{name} out"
            yield Problem(f"redis.{name}", message, value, hint, related=("redis.url",))
    yield from _pair("redis", redis.tls_cert, redis.tls_key)


def controller_files_act(config: Config) -> Iterator[Problem]:
    """A certificate comes with its key, an authority is of use only where there is a certificate."""
    controller = config.controller
    yield from _pair("controller", controller.tls_cert, controller.tls_key)
    if controller.tls_ca and not controller.tls_cert and not controller.tls_key:
        message = "has no effect: without controller.tls_cert the API is served over http"
        hint = "write controller.tls_cert and controller.tls_key, or leave controller.tls_ca out"
        related = ("controller.tls_cert",)
        yield Problem("controller.tls_ca", message, controller.tls_ca, hint, related=related)


def _pair(section: str, cert: str, key: str) -> Iterator[Problem]:
    """A certificate without its key proves nothing, a key without its certificate is never shown."""
    if bool(cert) == bool(key):
        return
    there, missing = ("tls_cert", "tls_key") if cert else ("tls_key", "tls_cert")
    message = f"needs {section}.{missing} as well: a certificate is of use only with its private key"
    hint = f"write {section}.{missing} too, or leave {section}.{there} out"
    key_path = f"{section}.{there}"
    yield Problem(key_path, message, cert or key, hint, related=(f"{section}.{missing}",))


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


def tokens_are_not_overheard(config: Config) -> Iterator[Problem]:
    """Warning: an address that others can reach, and no encryption."""
    host = config.controller.host
    if config.controller.tls_cert or is_loopback(host):
        return
    message = (
        f"{host} can be reached from other machines, and without TLS tokens and samples travel in the clear"
    )
    hint = (
        "write controller.tls_cert, controller.tls_key and controller.tls_ca, unless the network is trusted"
    )
    yield Problem("controller.host", message, host, hint, related=("controller.tls_cert",))


TLS_RULES = (redis_address_is_one, redis_files_act, controller_files_act)
TLS_WARNINGS = (redis_is_verified, redis_is_not_overheard, tokens_are_not_overheard)
