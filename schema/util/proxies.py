"""Proxies of the environment: which requests pass one, and which go straight.

    loopback, and 0.0.0.0                       straight, always
    private address, NO_PROXY is not set        straight
    private address, NO_PROXY is set            as it says: `NO_PROXY=` sends private addresses to the proxy
    any other                                   as it says

Private are the networks of RFC 1918, 3927 and 4193 and names that the public DNS lacks (`minio`, `store.internal`).
Libraries differ in what they read of NO_PROXY (ports, networks, brackets): clients of our own get the answer of
`proxy_of`, and processes with clients of their own the list of `spared`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
_PRIVATE = tuple(map(ip_network, (*PRIVATE_NETWORKS, "fc00::/7", "fe80::/10")))
_PRIVATE_NAMES = (".local", ".internal", ".intranet", ".private", ".lan", ".home.arpa", ".svc", ".cluster.local")
_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Proxy:
    """A proxy, and the variable of the environment that names it."""

    variable: str
    url: str

    def __str__(self) -> str:
        """Without credentials."""
        return f"the proxy {self.url.rpartition('@')[2].rpartition('://')[2].rstrip('/')} of {self.variable}"


def proxy_of(url: str, env: Mapping[str, str] = os.environ, *, reads_all: bool = True) -> Proxy | None:
    """The proxy that a request to an http:// or https:// address passes; None: it goes straight.

    reads_all: whether the client reads ALL_PROXY.
    """
    proxy, host = _named(url, env, reads_all), _host(url)
    if proxy is None or _is_here(host) or (_spares_private(env) and is_private(host)):
        return None
    return None if _is_excepted(host, _exceptions(env) or "") else proxy


def passed_over(url: str, env: Mapping[str, str] = os.environ, *, reads_all: bool = True) -> Proxy | None:
    """The proxy of the environment that a request does not pass, since its address is near or NO_PROXY names it."""
    return _named(url, env, reads_all) if proxy_of(url, env, reads_all=reads_all) is None else None


def spared(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a process needs in its environment so that its libraries go straight where `proxy_of` says so; {}
    without a proxy. Addresses that variables of the environment name (AWS_ENDPOINT_URL, OPENAI_BASE_URL, …) are
    looked at."""
    if not any(value for name, value in env.items() if name.lower() in _VARIABLES):
        return {}
    exceptions = _exceptions(env)
    hosts = [host for host in _hosts(env) if _is_here(host) or (_spares_private(env) and is_private(host))]
    networks = PRIVATE_NETWORKS if exceptions is None else ()
    value = ",".join(dict.fromkeys([*filter(None, [exceptions]), *_LOOPBACK, *networks, *hosts]))
    return {"no_proxy": value, "NO_PROXY": value}


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name or number alone."""
    try:
        number = ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return (getattr(number, "ipv4_mapped", None) or number).is_loopback


def _is_here(host: str) -> bool:
    """Whether a request to a host stays on this machine: one to `0.0.0.0` does, although who listens there is reached
    from anywhere."""
    return is_loopback(host) or host in _UNSPECIFIED


def is_private(host: str) -> bool:
    """Whether a host is of a private network by its name or number alone; loopback addresses are not meant."""
    try:
        number = ip_address(host)
    except ValueError:
        return bool(host) and not is_loopback(host) and ("." not in host or host.endswith(_PRIVATE_NAMES))
    return any(number in network for network in _PRIVATE)


def _host(url: str) -> str:
    try:
        return (urlsplit(url if "://" in url else f"//{url}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _hosts(env: Mapping[str, str]) -> Iterator[str]:
    """Yield the hosts of addresses that the environment names, proxies left out."""
    for name, value in env.items():
        if value.startswith(("http://", "https://")) and name.lower() not in _VARIABLES:
            yield _host(value)


def _named(url: str, env: Mapping[str, str], reads_all: bool) -> Proxy | None:
    """Return what the environment names for the scheme of an address; a variable in small letters first, as libraries
    do."""
    scheme = url.partition("://")[0].lower()
    for variable in (f"{scheme}_proxy", *(("all_proxy",) if reads_all else ())):
        name = variable if variable in env else variable.upper()
        if env.get(name):
            return Proxy(name, env[name])
    return None


def _exceptions(env: Mapping[str, str]) -> str | None:
    return env.get("no_proxy", env.get("NO_PROXY"))


def _spares_private(env: Mapping[str, str]) -> bool:
    """Whether private addresses go straight: NO_PROXY does not speak, or names their networks (see `spared`)."""
    exceptions = _exceptions(env)
    return exceptions is None or set(PRIVATE_NETWORKS) <= {entry.strip() for entry in exceptions.split(",")}


def _is_excepted(host: str, exceptions: str) -> bool:
    """Whether NO_PROXY names a host: itself, a domain that it is of, a network, or `*`. Ports are left out."""
    for entry in exceptions.replace(" ", ",").lower().split(","):
        domain = _host(entry).removeprefix("*").removeprefix(".")
        if entry in ("*", host) or (domain and (host == domain or host.endswith(f".{domain}"))):
            return True
        with suppress(ValueError):
            if "/" in entry and ip_address(host) in ip_network(entry, strict=False):
                return True
    return False
