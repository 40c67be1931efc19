"""Checks of certificates, keys and addresses before a process starts: files by the same code that the job uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from launcher.plan.addresses import reachable_host
from schema.config import Config, Problem
from schema.util.proxies import is_loopback, proxy_of
from schema.wire.store_url import is_url

if TYPE_CHECKING:
    import ssl


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
        texts = faults(controller.tls_cert, controller.tls_key, controller.tls_ca, host)
        problems += [Problem("controller.tls_cert", text, None, hint) for text in texts]
        warnings += _exposed("controller.tls_key", controller.tls_key)
    if redis.url.startswith("rediss://"):
        problems += _redis_faults(config)
        warnings += _exposed("redis.tls_key", redis.tls_key)
    return problems, warnings


OF_PROFILE = "endpoint_url in ~/.aws/config"
FOR_BOTO = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", OF_PROFILE)
ENVIRONMENT = {
    "AWS_ENDPOINT_URL_S3": "weights and checkpoints, with AWS_SESSION_TOKEN where that is set,",
    "AWS_ENDPOINT_URL": "weights and checkpoints, with AWS_SESSION_TOKEN where that is set,",
    OF_PROFILE: "weights and checkpoints, with the profile's session token,",
    "HF_ENDPOINT": "HF_TOKEN, models and data",
    "WANDB_BASE_URL": "WANDB_API_KEY and all metrics",
    "SWANLAB_API_HOST": "SWANLAB_API_KEY and all metrics",
    "MLFLOW_TRACKING_URI": "MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_PASSWORD and all metrics",
}
"""Addresses that libraries read from the environment, or from a file, and what goes there."""


def unencrypted_addresses(config: Config, env: Mapping[str, str]) -> list[Problem]:
    """Warnings: what this job uses of `ENVIRONMENT` is at http:// on another machine, where nothing proves itself, or
    is taken to one by a proxy."""
    ckpt, trackers = config.train.ckpt, config.logging.logger
    bucket = is_url(config.weight_sync.store) or bool(ckpt.upload_s3)
    used = {
        "AWS_ENDPOINT_URL_S3": bucket,
        "AWS_ENDPOINT_URL": bucket and not env.get("AWS_ENDPOINT_URL_S3"),
        "SWANLAB_API_HOST": "swanlab" in trackers,
        "HF_ENDPOINT": True,
        "WANDB_BASE_URL": "wandb" in trackers,
        "MLFLOW_TRACKING_URI": "mlflow" in trackers,
    }
    addresses = {name: env.get(name, "") for name, counts in used.items() if counts}
    if bucket and not (env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")):
        addresses[OF_PROFILE] = _endpoint_of_profile(env)
    warnings = []
    for name, sent in ENVIRONMENT.items():
        host = _plain_host(addresses.get(name, ""))
        if host and (proxy := proxy_of(addresses[name], env, reads_all=name not in FOR_BOTO)):
            message = f"{name} is an http:// address: {sent} go in the clear through {proxy}"
            warnings.append(Problem("", message, None, f"name {host} in NO_PROXY, or an https:// address"))
        elif host and not is_loopback(host):
            message = f"{name} is an http:// address: {sent} go in the clear to whatever listens there"
            hint = "name an https:// address, unless the network is trusted"
            warnings.append(Problem("", message, None, hint))
    return warnings


def _endpoint_of_profile(env: Mapping[str, str]) -> str:
    """The endpoint in the profile that boto3 takes, or "" if it sets none. `services` sections are not read."""
    from configparser import Error, RawConfigParser

    profile = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE") or "default"
    files = RawConfigParser(strict=False)
    try:
        files.read(os.path.expanduser(env.get("AWS_CONFIG_FILE") or "~/.aws/config"))
    except (Error, OSError, UnicodeDecodeError):
        return ""  # boto3 says so
    section = profile if profile == "default" else f"profile {profile}"
    return files.get(section, "endpoint_url", fallback="")


def _plain_host(address: str) -> str:
    """The host of an http:// address; "" of any other."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""  # the library that reads it says so
    return (parts.hostname or "") if parts.scheme.lower() == "http" else ""


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
            hint = "name the certificate that the server accepts and its private key, both in PEM"
            problems.append(Problem("redis.tls_cert", str(error), redis.tls_cert, hint))
    return problems


def _exposed(name: str, key: str) -> list[Problem]:
    from schema.util.tls import is_exposed

    if not key or not is_exposed(key):
        return []
    return [Problem(name, f"everybody on this machine can use {key}", key, f"chmod 600 {key}")]
