"""Secrets out of a config before anybody sees it: `schema.config.secrets`, under the names that the API uses."""

from __future__ import annotations

from typing import Any

from schema.config.secrets import cut, masked


def without_url_credentials(value: Any) -> Any:
    """The same values, without credentials in addresses: what workers get."""
    return cut(value)


def redacted(value: Any) -> Any:
    """The same values without credentials in addresses, and with secret-looking keys masked: what people see."""
    return cut(masked(value))
