"""Certificates of a private authority, made for one test: a server's, and a client's that the server may ask for."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme

HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: who is trusted (`ca`), the server's pair, the client's pair. Keys have mode 0600."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path

    def server_context(self, *, ask_client: bool = False) -> ssl.SSLContext:
        """What a server with these files uses; `ask_client`: only clients with a certificate may talk to it."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.ca))
        context.load_cert_chain(self.cert, self.key)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def make_certificates(
    directory: Path, *, hosts: Sequence[str] = HOSTS, expires: datetime | None = None
) -> Certificates:
    """A new authority and what it signs for `hosts`, in files below `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    ca = directory / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    server = _pair(authority.issue_cert(*hosts, not_after=expires), directory / "server")
    client = _pair(authority.issue_cert("client@example.org"), directory / "client")
    return Certificates(ca, *server, *client)


def _pair(leaf: trustme.LeafCert, stem: Path) -> tuple[Path, Path]:
    cert, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
    cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.touch(mode=0o600)
    leaf.private_key_pem.write_to_path(key)
    return cert, key
