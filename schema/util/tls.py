"""TLS contexts of both ends, and what is wrong with the files they are made of. Standard library alone.

    server_context(cert, key)      what the controller listens with
    client_context(ca)             whom its callers trust: an authority of one's own, or those of the system
    redis_options(url)             the same of redis-py, which makes its own
    faults(cert, key, ca, host)    both ends, put together in memory: what a caller would run into

Both ends speak TLS 1.2 or newer.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

OLDEST = ssl.TLSVersion.TLSv1_2


class TlsFileError(ValueError):
    """A certificate or key cannot be used; the message names the file and the reason."""


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """The server's side. Raises `TlsFileError` if the files cannot be read or do not belong together."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = OLDEST
    load_pair(context, cert, key)
    return context


def load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Give a context its certificate. Raises `TlsFileError`."""
    for file in (cert, key):
        _require_readable(file)

    def no_passphrase() -> str:
        raise TlsFileError(f"{key} is encrypted, and its passphrase cannot be entered: decrypt it")

    try:
        context.load_cert_chain(cert, key, no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFileError(f"{key} is not the private key of {cert}") from None
        raise TlsFileError(f"{cert} and {key} are no certificate and private key in PEM: {error}") from None


def client_context(ca: str = "") -> ssl.SSLContext:
    """The caller's side. `ca`: a PEM file of authorities; empty: those of the system. Raises `TlsFileError`."""
    if ca:
        _require_readable(ca)
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except ssl.SSLError as error:
        raise TlsFileError(f"{ca} holds no certificate in PEM: {error}") from None
    context.minimum_version = OLDEST
    return context


def redis_options(url: str) -> dict[str, ssl.TLSVersion]:
    """Return what redis-py gets next to an address: else the interpreter's oldest protocol counts, which some
    distributions leave to OpenSSL."""
    return {"ssl_min_version": OLDEST} if url.startswith("rediss://") else {}


def faults(cert: str, key: str, ca: str, host: str) -> list[str]:
    """Return what keeps a caller that trusts `ca` from talking to `host` with this certificate; empty: nothing.

    Both ends are made and shake hands in memory, so key, chain, dates and names are judged by the code that will
    judge them in the job.
    """
    try:
        server, client = server_context(cert, key), client_context(ca)
    except TlsFileError as error:
        return [str(error)]
    try:
        _shake_hands(server, client, host)
    except ssl.SSLCertVerificationError as error:
        authorities = ca or "the system's authorities (no tls_ca is named)"
        return [f"{cert} is refused by callers of {host} that trust {authorities}: {error.verify_message}"]
    except ssl.SSLError as error:
        return [f"{cert} cannot be used: {error}"]
    return []


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(8):  # a handshake has two round trips at most
        waiting = 0
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1
        if not waiting:
            return
    raise ssl.SSLError("the handshake does not end")


def is_exposed(key: str) -> bool:
    """Whether a private key may be read by more than its owner and group."""
    try:
        return bool(Path(key).stat().st_mode & 0o007)
    except (OSError, ValueError):
        return False


def _require_readable(file: str) -> None:
    try:
        if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
            raise ValueError("not a file")  # opening a pipe may block for ever
        with open(file, "rb"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TlsFileError(f"{file} cannot be read: {reason}") from None
