"""Certificates, and servers that ask for a password and for TLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from controller.server import ServerSettings
from tests.support.certificates import Certificates, make_certificates
from tests.support.controller import TOKENS
from tests.support.tls_proxy import tls_proxy
from tests.support.valkey import running_valkey

PASSWORD = "planted-redis-password"


@dataclass(frozen=True, slots=True)
class GuardedRedis:
    """A Valkey behind TLS that wants a password and, on `port`, a client's certificate."""

    port: int
    certificates: Certificates

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0"

    def files(self, *names: str) -> dict[str, str]:
        """Values of `[redis]`: tls_ca, and with names client_cert, client_key too."""
        files = {"tls_ca": "ca", "tls_cert": "client_cert", "tls_key": "client_key"}
        wanted = names or tuple(files)
        return {name: str(getattr(self.certificates, files[name])) for name in wanted}


def read_settings(run_dir: Path) -> ServerSettings:
    """What a controller of a run directory reads at its start."""
    tokens = {f"COSMOS_TOKEN_{role.upper()}": token for role, token in TOKENS.items()}
    return ServerSettings.read(run_dir, None, 0, {**tokens, "COSMOS_REDIS_URL": "unix:///nowhere"})


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded_redis(certificates: Certificates) -> Iterator[GuardedRedis]:
    with (
        running_valkey(password=PASSWORD) as server,
        tls_proxy(server.url, certificates.server_context(ask_client=True)) as port,
    ):
        yield GuardedRedis(port, certificates)


@pytest.fixture
def other_authority(tmp_path: Path) -> Certificates:
    """Somebody else's certificates."""
    return make_certificates(tmp_path / "other")
