"""Checks of certificates and keys before a process starts, by the same code that the job uses, in memory."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from schema.config import Config, Problem

if TYPE_CHECKING:
    import ssl

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - where to reach such a listener


def reachable_host(config: Config) -> str:
    """The host by which processes of this machine reach the controller."""
    return ANY_ADDRESS.get(config.controller.host, config.controller.host)


def controller_url(config: Config, port: int | str) -> str:
    """The address of the controller for processes of this machine."""
    return url_of(config, reachable_host(config), port)


def reachable_elsewhere(config: Config) -> str:
    """The host by which other machines reach the controller, as far as this one knows its name; the local one where
    only that reaches it."""
    host = config.controller.host
    return socket.gethostname() if host in ANY_ADDRESS else host


def url_of(config: Config, host: str, port: int | str) -> str:
    """The controller's URL at a host."""
    return f"{config.controller.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def check_encryption(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Problems and warnings of the files of [controller] and [redis]. Takes no time where none is named."""
    controller, redis = config.controller, config.redis
    problems, warnings = [], []
    if controller.tls_cert and controller.tls_key:
        from schema.util.tls import faults

        host = reachable_host(config)
        hint = (
            f"name a certificate for {host} and its key in PEM, and its authority in controller.tls_ca; "
            "docs/security.md makes one with two commands"
        )
        found = faults(controller.tls_cert, controller.tls_key, controller.tls_ca, host)
        problems += [Problem("controller.tls_cert", text, None, hint) for text in found]
        warnings += _exposed("controller.tls_key", controller.tls_key)
    if redis.url.startswith("rediss://"):
        problems += _redis_faults(config)
        warnings += _exposed("redis.tls_key", redis.tls_key)
    return problems, warnings


def _redis_faults(config: Config) -> list[Problem]:
    from schema.util.tls import TlsFileError, client_context, load_pair

    redis, problems = config.redis, []
    context: ssl.SSLContext | None = None
    try:
        context = client_context(redis.tls_ca)
    except TlsFileError as error:
        hint = "name the PEM file of the authority that signed the server's certificate"
        problems.append(Problem("redis.tls_ca", str(error), redis.tls_ca, hint))
    if context is not None and redis.tls_cert and redis.tls_key:
        try:
            load_pair(context, redis.tls_cert, redis.tls_key)
        except TlsFileError as error:
            hint = "name the certificate that the server knows and its private key, both in PEM"
            problems.append(Problem("redis.tls_cert", str(error), redis.tls_cert, hint))
    return problems


def _exposed(name: str, key: str) -> list[Problem]:
    from schema.util.tls import is_exposed

    if not key or not is_exposed(key):
        return []
    return [Problem(name, f"everybody on this machine can use {key}", key, f"chmod 600 {key}")]
