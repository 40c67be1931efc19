"""Secrets that travel in headers: tokens of a role, and what tells one replica of a role from another.

A rollout replica sends `REPLICA_HEADER` with every call, its registration first; who does not know the secret of a
registration can neither act for that replica nor take its name while it lives.
"""

from __future__ import annotations

REPLICA_HEADER = "x-cosmos-replica-secret"
MIN_LENGTH, MIN_DIFFERENT = 20, 8
"""Characters of a secret, and how many different ones: `secrets.token_urlsafe(32)` makes 43."""


def fault(secret: str) -> str:
    """Describe the fault of a secret as the end of a sentence that never shows it; "" where nothing is."""
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        return "holds characters other than printable ASCII without spaces"
    if len(secret) < MIN_LENGTH or len(set(secret)) < MIN_DIFFERENT:
        return (
            f"can be guessed: it needs {MIN_LENGTH} characters or more, {MIN_DIFFERENT} of them different "
            "(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )
    return ""
